"""The tensors in any structure: listed, named, mapped, described."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import is_
from typing import Any

from torch import Tensor

from hookkit.errors import HookError
from hookkit.nested.containers import PLAIN, Inputs, parts_of, rebuilt


def leaves(x: Any) -> list[Tensor]:
    """The tensors in `x`, in order, not copied; one that appears twice is listed twice.

    >>> import torch
    >>> [t.shape[0] for t in leaves((torch.ones(2), {"a": torch.ones(3), "b": None}))]
    [2, 3]
    """
    if isinstance(x, Tensor):
        return [x]
    try:
        return [t for _, part in parts_of(x) for t in leaves(part)]
    except RecursionError:
        raise _endless(x) from None


def named_leaves(x: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """The tensors in `x` with the Python path that reads each, as `x<path>`.

    >>> import torch
    >>> [p for p, _ in named_leaves((torch.ones(2), {"a": [torch.ones(3)]}))]
    ['[0]', "[1]['a'][0]"]
    """
    if isinstance(x, Tensor):
        return [(path, x)]
    return [pair for key, part in parts_of(x) for pair in named_leaves(part, path + key)]


def tmap(f: Callable[[Tensor], Any], x: Any) -> Any:
    """`x` with `f(t)` in the place of every tensor `t`; containers keep their types.

    What `f` leaves alone is not rebuilt: an untouched container is the very same object.

    >>> import torch
    >>> tmap(lambda t: t + 1, {"a": torch.zeros(2), "n": 3})
    {'a': tensor([1., 1.]), 'n': 3}
    """
    if isinstance(x, Tensor):
        return f(x)
    kind = type(x)
    if kind in PLAIN:
        return x
    if kind is tuple or (kind is Inputs and not x.kwargs):  # most calls: no paths are needed
        new = [tmap(f, part) for part in x]
        return x if all(map(is_, new, x)) else kind(new)
    parts = parts_of(x)
    if not parts:
        return x
    try:
        new = [tmap(f, part) for _, part in parts]
    except RecursionError:
        raise _endless(x) from None
    if all(a is b for a, (_, b) in zip(new, parts, strict=True)):
        return x
    return rebuilt(x, new)


def _endless(x: Any) -> HookError:
    return HookError(
        f"the tensors of a {type(x).__name__} were asked for, which holds itself, or is nested "
        "hundreds of levels deep. Select a part of it (a leaf path), or hook another module."
    )


def describe(x: Any) -> str:
    """The shapes in `x` as text: `4×10`, `(4×10, (2×3, 2×3))`, `{'logits': 4×10}`.

    >>> import torch
    >>> describe((torch.ones(4, 10), {"n": 3, "h": torch.ones(())}, None))
    "(4×10, {'n': 3, 'h': scalar}, None)"
    """
    if isinstance(x, Tensor):
        return _shape(x)
    parts = parts_of(x)
    if not parts and isinstance(x, (tuple, list, dict)):
        return "()" if isinstance(x, tuple) else "[]" if isinstance(x, list) else "{}"
    if not parts:
        return repr(x) if type(x) in PLAIN and len(repr(x)) <= 20 else type(x).__name__
    return _described(x, parts)


def _described(x: Any, parts: list[tuple[str, Any]]) -> str:
    inner = [describe(part) for _, part in parts]
    if type(x) is tuple:
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if type(x) is list:
        return f"[{', '.join(inner)}]"
    if type(x) is dict:
        pairs = (f"{k[1:-1]}: {s}" for (k, _), s in zip(parts, inner, strict=True))
        return "{" + ", ".join(pairs) + "}"
    names = ["" if re.fullmatch(r"\[\d+\]", k) else k.strip(".[]'") + "=" for k, _ in parts]
    body = ", ".join(n + s for n, s in zip(names, inner, strict=True))
    return f"({body})" if type(x) is Inputs else f"{type(x).__name__}({body})"


def _shape(t: Tensor) -> str:
    if t.is_nested:
        return f"nested {t.size(0)}×…"
    return "×".join(map(str, t.shape)) or "scalar"
