"""The part of a value that is meant, and whether a replacement fits it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookkit.errors import HookError
from hookkit.nested import Inputs, describe, named_leaves, pick


def part_at(x: Any, path: str, who: str, label: Any) -> Any:
    """The part of `x` at `path`, such as `[0]`; all of it without a path. Or it raises `HookError`.

    >>> part_at({"a": (1, 2)}, "['a'][1]", "Hook", "Linear")
    2
    """
    try:
        return pick(x, path)
    except (LookupError, AttributeError, TypeError, ValueError):
        paths = ", ".join([p for p, _ in named_leaves(x) if p][:6])
        raise HookError(
            f"{who}: {label() if callable(label) else label} has nothing at {path}; there is "
            f"{describe(x)}. Select a path that is there: {paths or 'it needs none'}."
        ) from None


def check_same(hook: Any, old: Any, new: Any) -> None:
    """Raises unless `new`, the replacement of `old`, has its tensors at the same places."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return
    paths = [path for path, _ in named_leaves(old)]
    same = type(old) is type(new)
    if paths and not (same and paths == [path for path, _ in named_leaves(new)]):
        raise HookError(
            f"{hook.switch.who} on {hook.label}: the replacement is {described(new)}, the layer "
            f"gave {described(old)}. Return the same structure, or None to leave it."
        )


def check_grad(hook: Any, grad: Tensor, new: Any) -> None:
    """Raises unless `new`, the replacement of a gradient, has its shape."""
    if not isinstance(new, Tensor) or new.shape != grad.shape:
        raise HookError(
            f"{hook.switch.who} on {hook.label}: the replacement is {described(new)}, the gradient "
            f"is {describe(grad)}. Return a tensor of that shape, or None."
        )


def described(x: Any) -> str:
    """`x` in words that begin with its type."""
    name, text = type(x).__name__, describe(x)
    return text if isinstance(x, Tensor) or text.startswith(name) else f"{name} {text}"


def new_inputs(hook: Any, inputs: Inputs, new: Any) -> tuple[tuple[Any, ...], Any]:
    """The positional and keyword inputs that `new` stands for; raises unless there are as many."""
    if isinstance(new, Inputs):
        return tuple(new), new.kwargs
    values = new if type(new) is tuple else (new,)  # a PackedSequence is one value
    if len(values) != len(inputs):
        raise HookError(
            f"{hook.switch.who} on {hook.label}: {len(values)} positional inputs were returned, "
            f"the layer was called with {describe(inputs)}. Return as many, or Inputs(args, "
            "kwargs) for all."
        )
    return values, inputs.kwargs
