"""`parts_of` and `rebuilt`: containers taken apart and put together again; and `Inputs`, our own.

All else in this room is a few lines on these two. torch's own pytree knows no dataclasses and costs
7 µs on a bare tensor.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

PLAIN = frozenset((int, float, bool, str, bytes, type(None), complex))


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
    return list(_odd_parts(x))


def is_container(x: Any) -> bool:
    """Whether `parts_of` can take `x` apart, though it may be empty."""
    return (
        isinstance(x, (tuple, list, dict, deque, PackedSequence, Mapping))
        or dataclasses.is_dataclass(x)
    ) and not isinstance(x, (type, nn.Module))


def _odd_parts(x: Any) -> Iterator[tuple[str, Any]]:
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
