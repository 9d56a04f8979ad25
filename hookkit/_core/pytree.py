"""Structures of tensors, as modules take and return them: list, map, read, replace, describe.

Containers are tuples, namedtuples, lists, deques, dicts and other mappings (Hugging Face's
ModelOutput too), dataclasses, PackedSequence and `Inputs`. Each keeps its type; any other object is
passed on by reference. All functions are built on `tree_children` and `tree_rebuild`, which take a
container apart and put it together again. The names are those of `torch.utils._pytree`.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from ast import literal_eval
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn.utils.rnn import PackedSequence

PLAIN = frozenset((int, float, bool, str, bytes, type(None), complex, Size))
"""Types that hold no tensor."""
_ATOMS = (type, nn.Module, torch.dtype, torch.device)  # their attributes are not searched

Parts = list[tuple[str, Any]]
"""The tensors in a result with their paths, and the objects in it that hold none."""

BRACKET = r"""\[(-?(?:0|[1-9][0-9]*)|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]"""
"""A step of a path in brackets: `[0]`, `['x']`, `["it's"]`, as Python writes them."""

_STEP = re.compile(rf"\.(\w+)|{BRACKET}", re.DOTALL)


class Inputs(tuple[Any, ...]):
    """Holds the inputs of a call: a tuple of the positional ones, with keyword inputs by name.

    `inputs[0]` is the first positional input, `inputs["mask"]` the keyword input `mask`, and
    `inputs.kwargs` the dict of all keyword inputs. Without keyword inputs it prints as the plain
    tuple that PyTorch gives a hook.

    >>> i = Inputs((1, 2), {"scale": 3})
    >>> i[0], i["scale"], i
    (1, 3, Inputs(1, 2, scale=3))
    """

    kwargs: dict[str, Any]

    def __new__(cls, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Inputs:
        """Make an `Inputs` of the positional inputs `args` and the keyword inputs `kwargs`."""
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


def is_container(x: Any) -> bool:
    """Return whether `x` is a container that `tree_children` takes apart, or an empty one."""
    if dataclasses.is_dataclass(x):
        return not isinstance(x, (type, nn.Module))
    return isinstance(x, (tuple, list, deque, MutableMapping))


def tree_children(x: Any) -> list[tuple[str, Any]]:
    """Return the children of container `x` as (path step, child); [] if `x` is no container."""
    kind = type(x)
    if kind in PLAIN:
        return []
    if kind is tuple or kind is list:  # most containers
        return [(f"[{i}]", v) for i, v in enumerate(x)]
    if not is_container(x):
        return []
    if isinstance(x, PackedSequence):
        return [(".data", x.data)]
    if isinstance(x, (tuple, list, deque)):
        keywords = x.kwargs if isinstance(x, Inputs) else {}
        return [(f"[{i}]", v) for i, v in enumerate(x)] + tree_children(keywords)
    if isinstance(x, Mapping):
        return [(f"[{k!r}]", v) for k, v in x.items()]
    names = [f.name for f in dataclasses.fields(x) if hasattr(x, f.name)]
    return [(f".{name}", getattr(x, name)) for name in names]


def tree_rebuild(x: Any, new: list[Any]) -> Any:
    """Return a container like `x` with the children `new`, in the order of `tree_children`."""
    if isinstance(x, PackedSequence):  # its index tensors must be on the device of the data
        packed: Any = x
        packed = packed.to(new[0].device) if isinstance(new[0], Tensor) else packed
        return packed._replace(data=new[0])
    if isinstance(x, Inputs):
        return Inputs(new[: len(x)], dict(zip(x.kwargs, new[len(x) :], strict=True)))
    if isinstance(x, tuple):
        if hasattr(x, "_make"):
            return type(x)._make(new)
        if type(x) is tuple or hasattr(x, "n_fields"):  # torch.return_types
            return type(x)(new)
        own: Any = tuple.__new__(type(x), new)  # the class's `__new__` may take other arguments
        getattr(own, "__dict__", {}).update(getattr(x, "__dict__", {}))
        return own
    made = copy.copy(x)
    if isinstance(x, (list, deque)):
        made.clear()
        made.extend(new)
    elif isinstance(x, Mapping):
        for key, value in zip(list(x), new, strict=True):
            made[key] = value
            if isinstance(key, str) and key in getattr(made, "__dict__", ()):  # ModelOutput
                made.__dict__[key] = value
    else:
        for (step, _), value in zip(tree_children(x), new, strict=True):
            object.__setattr__(made, step[1:], value)  # also if frozen; runs no __post_init__
    return made


def tree_leaves_with_path(x: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in `x` with the Python path that reads each, as `x<path>`.

    >>> import torch
    >>> [p for p, _ in tree_leaves_with_path((torch.ones(2), {"a": [torch.ones(3)]}))]
    ['[0]', "[1]['a'][0]"]
    """
    if isinstance(x, Tensor):
        return [(path, x)]
    return [
        pair for step, part in tree_children(x) for pair in tree_leaves_with_path(part, path + step)
    ]


def tree_leaves(x: Any) -> list[Tensor]:
    """Return the tensors in `x`, in order, not copied; one that appears twice is listed twice.

    >>> import torch
    >>> [t.shape[0] for t in tree_leaves((torch.ones(2), {"a": torch.ones(3), "b": None}))]
    [2, 3]
    """
    if isinstance(x, Tensor):
        return [x]
    return [t for _, part in tree_children(x) for t in tree_leaves(part)]


def tree_leaves_of_objects(x: Any, path: str = "", around: tuple[int, ...] = ()) -> Parts:
    """Return the tensors in `x` with their paths, also those in the attributes of objects.

    An object without a tensor is listed itself, unless it is a number, a text or the like. A
    PackedSequence is listed with its index tensors too. `around` holds the ids of the objects that
    contain `x`, because objects can refer to each other in a circle.

    >>> import torch
    >>> tree_leaves_of_objects((torch.ones(2), 3, {1}))
    [('[0]', tensor([1., 1.])), ('[2]', {1})]
    >>> normal = torch.distributions.Normal(torch.zeros(2), 1.0)
    >>> [path for path, _ in tree_leaves_of_objects(normal)]
    ['.loc', '.scale']
    """
    if isinstance(x, Tensor):
        return [(path, x)]
    if type(x) in PLAIN or isinstance(x, _ATOMS) or id(x) in around:
        return []
    if isinstance(x, PackedSequence):
        fields: dict[str, Any] = x._asdict()
        return [(f"{path}.{name}", t) for name, t in fields.items() if t is not None]
    around = (*around, id(x))
    if is_container(x):
        return [
            p
            for step, part in tree_children(x)
            for p in tree_leaves_of_objects(part, path + step, around)
        ]
    inside = [p for k, v in getattr(x, "__dict__", {}).items()
              for p in tree_leaves_of_objects(v, f"{path}.{k}", around)]  # fmt: skip
    return [p for p in inside if isinstance(p[1], Tensor)] or [(path, x)]


def tree_map(f: Callable[[Tensor], Any], x: Any, *, fresh: bool = False) -> Any:
    """Return `x` with `f(t)` in the place of every tensor `t`; containers keep their types.

    A container in which nothing changed is the same object. With `fresh`, a list, dict or other
    container that can be changed is always a new one.

    >>> import torch
    >>> tree_map(lambda t: t.shape[0], (torch.ones(2), {"a": torch.ones(3), "b": None}))
    (2, {'a': 3, 'b': None})
    """
    if isinstance(x, Tensor):
        return f(x)
    kind = type(x)
    if kind in PLAIN:
        return x
    if kind is tuple or (kind is Inputs and not x.kwargs):  # fast path: builds no path texts
        old: list[Any] = list(x)
    else:
        old = [part for _, part in tree_children(x)]
    new = [tree_map(f, part, fresh=fresh) for part in old]
    if all(a is b for a, b in zip(new, old, strict=True)):
        copies = fresh and not isinstance(x, tuple) and (kind in (list, dict) or tree_leaves(x))
        return tree_rebuild(x, new) if copies else x
    return kind(new) if kind is tuple else tree_rebuild(x, new)


def describe(x: Any) -> str:
    """Return the shapes in `x` as text: `4×10`, `(4×10, (2×3, 2×3))`, `{'logits': 4×10}`.

    >>> import torch
    >>> describe((torch.ones(4, 10), {"n": 3, "h": torch.ones(())}, None))
    "(4×10, {'n': 3, 'h': scalar}, None)"
    """
    if isinstance(x, Tensor):
        return f"nested {x.size(0)}×…" if x.is_nested else "×".join(map(str, x.shape)) or "scalar"
    parts, kind = tree_children(x), type(x)
    inner = [describe(part) for _, part in parts]
    if kind is dict:
        return "{" + ", ".join(f"{k!r}: {s}" for k, s in zip(x, inner, strict=True)) + "}"
    if kind is list:
        return f"[{', '.join(inner)}]"
    if kind is tuple:
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if not parts:
        return repr(x) if kind in PLAIN and len(repr(x)) <= 20 else kind.__name__
    names = ["" if re.fullmatch(r"\[\d+\]", k) else k.strip(".[]'") + "=" for k, _ in parts]
    body = ", ".join(n + s for n, s in zip(names, inner, strict=True))
    if kind is Inputs:  # a single positional input is described without parentheses
        return inner[0] if len(x) == len(parts) == 1 else f"({body})"
    return f"{kind.__name__}({body})"


def is_path(path: str) -> bool:
    """Return whether `tree_get` can read `path`.

    >>> is_path("[0].h['x']"), is_path("[0"), is_path("")
    (True, False, True)
    """
    return _STEP.sub("", path) == ""


def tree_get(x: Any, path: str) -> Any:
    """Return the part of `x` at a path that `tree_leaves_with_path` writes: `.h`, `['logits'][0]`.

    If `x` has nothing there, raises what Python's own indexing raises.

    >>> tree_get({"a": (1, 2)}, "['a'][1]")
    2
    """
    if not is_path(path):
        raise ValueError(f"cannot read the path {path!r}: write it as [0], .name or ['key']")
    for field, key in _STEP.findall(path):
        if isinstance(x, Tensor):  # indexing it with `[0]` would return the first sample
            raise LookupError(f"a tensor has no parts, and {path!r} asks for one")
        x = getattr(x, field) if field else x[literal_eval(key)]
    return x


def canonical_path(path: str) -> str:
    """Return `path` as `tree_leaves_with_path` writes it, whichever quotes it has.

    >>> canonical_path('["logits"][0]')
    "['logits'][0]"
    """
    return _STEP.sub(lambda step: f"[{literal_eval(step[2])!r}]" if step[2] else step[0], path)


def tree_set(x: Any, path: str, value: Any) -> Any:
    """Return a copy of `x` in which `x<path>` is `value`; the rest is shared, types are kept.

    If `x` has nothing there, raises what `tree_get` raises.

    >>> tree_set({"a": (1, 2), "b": 3}, "['a'][0]", 9)
    {'a': (9, 2), 'b': 3}
    """
    if not path:
        return value
    tree_get(x, path)
    step: Any = _STEP.match(path)
    keys, new = [key for key, _ in tree_children(x)], [v for _, v in tree_children(x)]
    names = [canonical_path(step[0]), f"[{step[1]!r}]"]  # the second: an attribute of a ModelOutput
    if found := [keys.index(name) for name in names if name in keys]:
        at = found[0]
    else:  # a field of a namedtuple, or a negative index
        at = type(x).__match_args__.index(step[1]) if step[1] else int(step[2]) % len(x)
    new[at] = tree_set(new[at], path[step.end() :], value)
    return tree_rebuild(x, new)
