"""The second model run on the first one's values, so that each module's own error is seen.

Builds on `pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookkit.comparing.measures import Difference
from hookkit.comparing.pairs import Pairs, paired
from hookkit.comparing.sides import Key
from hookkit.nested import Inputs, leaves, named_leaves, parts_of, rebuilt


@dataclass
class _Begun:
    """A call of one of the second model's modules that has not returned yet.

    Attributes:
        name: of the module.
        fed: its caller's tensors, what it got in their place, and the version of that; None if it
            could not be given what the first model's module received.
        handed: how far what it has handed to other modules is from what the first model's did.
    """

    name: str
    fed: list[tuple[Tensor, Tensor, int]] | None
    handed: list[Difference]


class Isolated:
    """Gives each module of the second model what the first model's received, and returned.

    So each piece of code between two modules' beginnings or ends works on the first model's values,
    and what it gives is its own error: a module's output, or what it hands to another module.

    Args:
        inputs: what the first model's calls received, by name.
        pairs: compares what the second model's modules give.
    """

    def __init__(self, inputs: dict[str, list[list[Tensor]]], pairs: Pairs) -> None:
        self._inputs = {name: iter(each) for name, each in inputs.items()}
        self._pairs = pairs
        self._begun: list[_Begun] = []  # the innermost last

    def receive(self, name: str, given: Inputs) -> Inputs | None:
        """`given` with the first model's tensors; None if those are others, or of other shapes."""
        mine = leaves(given)
        theirs = _matched(next(self._inputs.get(name, iter(())), None), mine)
        if theirs is None:
            self._begun.append(_Begun(name, None, []))
            return None
        if self._begun:
            self._begun[-1].handed += map(self._pairs.difference, theirs, mine)
        new = _all_filled(mine, theirs)
        fed = [(t, n, n._version) for t, n in zip(mine, new, strict=True)]
        self._begun.append(_Begun(name, fed, []))
        replaced: Inputs = _replaced(given, iter(new))
        return replaced

    def see(self, key: Key, value: Any) -> Any:
        """Compares what a module returns if it was given the first model's inputs.

        Returns:
            What the first model's module returned, None if that is of another structure.
        """
        call = self._begun.pop()
        while call.name != key.name:  # that ended by an exception, which the model has caught
            call = self._begun.pop()
        # A module that works in place, such as ReLU(inplace=True), changes what its caller has.
        # Private: `Tensor._version`, as in `hooks.snapshot`.
        for mine, new, version in call.fed or ():
            if new._version != version:
                with torch.no_grad():
                    mine.copy_(new)
        if call.fed is not None:
            self._pairs.see_own(key, value, call.handed)
        return self._expected(key, value)

    def _expected(self, key: Key, value: Any) -> Any:
        """`value` with the first model's tensors; None if those are others, or of other shapes."""
        found = named_leaves(value)
        pairs = paired(self._pairs.first.read(key), found)
        theirs, mine = [a for _, a, _ in pairs], [b for _, _, b in pairs]
        if len(pairs) < len(found) or not _alike(theirs, mine):
            return None
        return _replaced(value, iter(_all_filled(mine, theirs)))


def _alike(a: list[Tensor], b: list[Tensor]) -> bool:
    if any(t.is_nested or t.is_meta for t in (*a, *b)):
        return False
    return [(t.shape, t.layout) for t in a] == [(t.shape, t.layout) for t in b]


def _matched(theirs: list[Tensor] | None, mine: list[Tensor]) -> list[Tensor] | None:
    """For each of `mine` the tensor of `theirs` in its place; None if they are not alike.

    One that is given several times counts once, so that attention of `(x, x, x)` is that of `x`.
    """
    if theirs is None:
        return None
    once, others = ([*{id(t): t for t in tensors}.values()] for tensors in (mine, theirs))
    if _alike(once, others):
        place = {id(t): value for t, value in zip(once, others, strict=True)}
        return [place[id(t)] for t in mine]
    return theirs if _alike(theirs, mine) else None


def _all_filled(mine: list[Tensor], theirs: list[Tensor]) -> list[Tensor]:
    """Tensors like `mine` with the values of `theirs`; the same one for the same two."""
    pairs = {(id(t), id(v)): (t, v) for t, v in zip(mine, theirs, strict=True)}
    new = {key: _filled(t, v) for key, (t, v) in pairs.items()}
    return [new[id(t), id(v)] for t, v in zip(mine, theirs, strict=True)]


def _filled(t: Tensor, value: Tensor) -> Tensor:
    """A tensor like `t`, of its dtype and on its device, with the values of another."""
    return t.detach().clone().copy_(value.dequantize() if value.is_quantized else value)


def _replaced(x: Any, new: Iterator[Tensor]) -> Any:
    """`x` with other tensors; lists and dicts are the same objects, which modules may share."""
    if isinstance(x, Tensor):
        return next(new)
    parts = [_replaced(part, new) for _, part in parts_of(x)]
    if type(x) not in (dict, list):
        return rebuilt(x, parts) if parts else x
    for key, part in zip(x if type(x) is dict else range(len(x)), parts, strict=True):
        x[key] = part
    return x
