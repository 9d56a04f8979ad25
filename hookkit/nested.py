"""What a module takes and returns: its tensors listed, named, mapped, picked and described.

Containers are tuple, namedtuple, `torch.return_types.*`, list, deque, dict and other mappings
(Hugging Face's ModelOutput too), dataclasses, PackedSequence and `Inputs`. Each keeps its type;
anything else is passed on by reference.

All of it is a few lines on `parts_of` and `rebuilt`, which take a container apart and put it
together again. `torch.utils._pytree` knows no dataclasses and costs 7 µs on a bare tensor.
Builds on `errors`. The file is longer than 300 lines, since taking apart, rebuilding and paths must
agree on what a container is.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hookkit.errors import HookError

PLAIN = frozenset((int, float, bool, str, bytes, type(None), complex))
"""Types that hold no tensor: the walk ends there without looking further."""

_STEP = re.compile(r"\.\w+|\[-?\d+\]|\['[^']*'\]|\[\"[^\"]*\"\]")  # of a path: .h, [0], ['x']


class Inputs(tuple[Any, ...]):
    """What a module was called with: a tuple of the positional inputs, keyword inputs by name.

    `inputs[0]` is the first positional input, `inputs["mask"]` the keyword input `mask`, and
    `inputs.kwargs` the dict of all keyword inputs. Without keyword inputs it prints as the plain
    tuple that PyTorch gives a hook.

    >>> i = Inputs((1, 2), {"scale": 3})
    >>> i[0], i["scale"], i
    (1, 3, Inputs(1, 2, scale=3))
    """

    kwargs: dict[str, Any]

    def __new__(cls, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Inputs:
        """Positional inputs `args`, keyword inputs `kwargs`."""
        self = super().__new__(cls, args)
        self.kwargs = dict(kwargs or {})
        return self

    def __getitem__(self, key: Any) -> Any:
        return self.kwargs[key] if isinstance(key, str) else super().__getitem__(key)

    def __reduce__(self) -> Any:
        return Inputs, (tuple(self), self.kwargs)

    def __repr__(self) -> str:
        if not self.kwargs:
            return tuple.__repr__(self)
        parts = [repr(x) for x in self] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"Inputs({', '.join(parts)})"


# Containers: taken apart, and put together again.


def parts_of(x: Any) -> list[tuple[str, Any]]:
    """The children of container `x` as (path step, child); empty for what is not a container."""
    kind = type(x)
    if kind in PLAIN:
        return []
    if kind is tuple or kind is list:
        return [(f"[{i}]", v) for i, v in enumerate(x)]
    if kind is dict:
        return [(f"[{k!r}]", v) for k, v in x.items()]
    if isinstance(x, PackedSequence):
        return [(".data", x.data)]
    return list(_parts_of_other(x))


def is_container(x: Any) -> bool:
    """Whether `parts_of` can take `x` apart, though it may be empty."""
    return (
        isinstance(x, (tuple, list, dict, deque, PackedSequence, Mapping))
        or dataclasses.is_dataclass(x)
    ) and not isinstance(x, (type, nn.Module))


def _parts_of_other(x: Any) -> Iterator[tuple[str, Any]]:
    """As `parts_of`, for subclasses and dataclasses."""
    if isinstance(x, Inputs):
        yield from ((f"[{i}]", v) for i, v in enumerate(x))
        yield from ((f"[{k!r}]", v) for k, v in x.kwargs.items())
    elif isinstance(x, (tuple, list, deque)):
        names = _field_names(x)
        paths = (f".{n}" if n else f"[{i}]" for i, n in enumerate(names))
        yield from zip(paths, x, strict=True)
    elif isinstance(x, Mapping):
        as_attribute = dataclasses.is_dataclass(x)
        yield from ((f".{k}" if as_attribute else f"[{k!r}]", v) for k, v in x.items())
    elif dataclasses.is_dataclass(x) and not isinstance(x, (type, nn.Module)):
        for field in dataclasses.fields(x):
            if hasattr(x, field.name):
                yield f".{field.name}", getattr(x, field.name)


def _field_names(x: Any) -> list[str]:
    """Field names of a namedtuple or `torch.return_types` value, else blanks."""
    names = getattr(x, "_fields", None)
    if names is None and hasattr(type(x), "n_sequence_fields"):  # C struct sequences
        names = type(x).__match_args__
    return list(names) if names and len(names) == len(x) else [""] * len(x)


def rebuilt(x: Any, new: list[Any]) -> Any:
    """A container of the type of `x` whose children are `new`, in the order of `parts_of(x)`."""
    if type(x) in (tuple, list):
        return type(x)(new)
    if type(x) is dict:
        return dict(zip(x, new, strict=True))
    if isinstance(x, PackedSequence):
        return _packed(x, new[0])
    if isinstance(x, Inputs):
        return Inputs(new[: len(x)], dict(zip(x.kwargs, new[len(x) :], strict=True)))
    if isinstance(x, tuple):
        return type(x)._make(new) if hasattr(x, "_make") else type(x)(new)
    if isinstance(x, (list, deque)):
        made: Any = copy.copy(x)
        made.clear()
        made.extend(new)
        return made
    if isinstance(x, Mapping):
        return _mapping(x, new)
    made = copy.copy(x)
    for (path, _), value in zip(parts_of(x), new, strict=True):
        object.__setattr__(made, path[1:], value)  # frozen ones too; no __post_init__
    return made


def _packed(x: PackedSequence, data: Tensor) -> PackedSequence:
    """Only `data` is a leaf; the index tensors follow it to its device."""
    if not isinstance(data, Tensor):
        raise TypeError(f"a PackedSequence holds a tensor, not {type(data).__name__}")
    orders = [
        None if i is None else i.to(data.device) for i in (x.sorted_indices, x.unsorted_indices)
    ]
    return PackedSequence(data, x.batch_sizes, *orders)


def _mapping(x: Mapping[Any, Any], new: list[Any]) -> Any:
    """A copy of mapping `x` with new values; those that are attributes too (ModelOutput) follow."""
    if not hasattr(x, "__setitem__"):
        return type(x)(dict(zip(x, new, strict=True)))  # type: ignore[call-arg]
    made: Any = copy.copy(x)
    for key, value in zip(list(x), new, strict=True):
        old = x[key]
        made[key] = value
        if isinstance(key, str) and getattr(made, "__dict__", {}).get(key) is old:
            made.__dict__[key] = value
    return made


# The tensors in a structure: listed, named, mapped, described.


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
    try:
        return [pair for key, part in parts_of(x) for pair in named_leaves(part, path + key)]
    except RecursionError:
        raise _endless(x) from None


def tmap(f: Callable[[Tensor], Any], x: Any) -> Any:
    """`x` with `f(t)` in the place of every tensor `t`; containers keep their types.

    A container in which `f` changed nothing is not rebuilt: it is the very same object.

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
        f"cannot list the tensors of this {type(x).__name__}: it holds itself, or is nested "
        "hundreds of levels deep. Select a part of it by a leaf path, or hook another module."
    )


def describe(x: Any) -> str:
    """The shapes in `x` as text: `4×10`, `(4×10, (2×3, 2×3))`, `{'logits': 4×10}`.

    >>> import torch
    >>> describe((torch.ones(4, 10), {"n": 3, "h": torch.ones(())}, None))
    "(4×10, {'n': 3, 'h': scalar}, None)"
    """
    if isinstance(x, Tensor):
        return f"nested {x.size(0)}×…" if x.is_nested else "×".join(map(str, x.shape)) or "scalar"
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


# One place in a structure, by a path as Python writes it: `[0].h['x']`.


def pick(x: Any, path: str) -> Any:
    """What `x<path>` reads, for a path as `named_leaves` writes it: `[0]`, `.h`, `['logits']`.

    Raises the error of Python's own indexing if `x` has nothing there.

    >>> pick({"a": (1, 2)}, "['a'][1]")
    2
    """
    for step in _steps(path):
        x = getattr(x, step[1:]) if step[0] == "." else x[_key(step[1:-1])]
    return x


def put(x: Any, path: str, value: Any) -> Any:
    """A copy of `x` in which `x<path>` is `value`; the rest is shared, the types are kept.

    Raises as `pick` if `x` has nothing there.

    >>> put({"a": (1, 2), "b": 3}, "['a'][0]", 9)
    {'a': (9, 2), 'b': 3}
    """
    if not path:
        return value
    pick(x, path)
    step = _steps(path)[0]
    parts = parts_of(x)
    known = [k for k, _ in parts]
    number = known.index(step) if step in known else _position(known, step)
    new = [v for _, v in parts]
    new[number] = put(new[number], path[len(step) :], value)
    return rebuilt(x, new)


def _position(known: list[str], step: str) -> int:
    """The index in `known` of another spelling of a step: `[0]` for `.h`, `['h']` for `.h`."""
    bare = [k.strip("[].'\"") for k in known]
    name = step.strip("[].'\"")
    number = bare.index(name) if name in bare else int(name)
    return number if number >= 0 else number + len(known)


def paths_of(x: Any) -> str:
    """Where the tensors in `x` are, in words, for messages that name a wrong path.

    >>> import torch
    >>> paths_of((torch.ones(2), None, {"a": torch.ones(3)}))
    "[0], [2]['a']"
    """
    if isinstance(x, Tensor):
        return "it is one tensor, which needs none"
    paths = [path for path, _ in named_leaves(x)]
    return (", ".join(paths[:6]) + (", …" if paths[6:] else "")) or "it has no tensors"


def is_path(path: str) -> bool:
    """Whether `path` can be read: `[0]`, `.name`, `['key']`, or one after the other.

    >>> is_path("[0].h['x']"), is_path("[0"), is_path("")
    (True, False, True)
    """
    return "".join(_STEP.findall(path)) == path


def _steps(path: str) -> list[str]:
    steps = _STEP.findall(path)
    if "".join(steps) != path:
        raise ValueError(f"cannot read the path \"{path}\": write it as [0], .name or ['key']")
    return steps


def _key(text: str) -> Any:
    return text[1:-1] if text[0] in "'\"" else int(text)
