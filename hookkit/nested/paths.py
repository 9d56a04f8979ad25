"""Paths into a structure, as Python would write them: `[0].h['x']` is read, written and told."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from hookkit.nested.containers import parts_of, rebuilt
from hookkit.nested.tensors import named_leaves

_STEP = re.compile(r"\.\w+|\[-?\d+\]|\['[^']*'\]|\[\"[^\"]*\"\]")


def pick(x: Any, path: str) -> Any:
    """What `x<path>` reads, for a path as `named_leaves` writes it: `[0]`, `.h`, `['logits']`.

    Raises:
        KeyError, IndexError, AttributeError: nothing of `x` stands at `path`.

    >>> pick({"a": (1, 2)}, "['a'][1]")
    2
    """
    for step in _steps(path):
        x = getattr(x, step[1:]) if step[0] == "." else x[_key(step[1:-1])]
    return x


def put(x: Any, path: str, value: Any) -> Any:
    """A copy of `x` in which `x<path>` is `value`; the rest is shared, the types are kept.

    Raises:
        KeyError, IndexError, AttributeError: nothing of `x` stands at `path`.

    >>> put({"a": (1, 2), "b": 3}, "['a'][0]", 9)
    {'a': (9, 2), 'b': 3}
    """
    if not path:
        return value
    pick(x, path)
    step = _steps(path)[0]
    parts = parts_of(x)
    at = [k for k, _ in parts]
    number = at.index(step) if step in at else _place(at, step)
    new = [v for _, v in parts]
    new[number] = put(new[number], path[len(step) :], value)
    return rebuilt(x, new)


def _place(at: list[str], step: str) -> int:
    """Which of the steps `at` is meant by another spelling of it: `[0]` for `.h`, `['h']`."""
    bare = [k.strip("[].'\"") for k in at]
    name = step.strip("[].'\"")
    number = bare.index(name) if name in bare else int(name)
    return number if number >= 0 else number + len(at)


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
