"""Values of the second model, and what the first one has in their place.

Builds on `measures`, `comparison` and `sides`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hookkit.comparing.comparison import Comparison, Row
from hookkit.comparing.measures import Difference, dense, difference, tolerances
from hookkit.comparing.sides import Chosen, Key, See
from hookkit.hooks.snapshot import snapshot
from hookkit.nested import Inputs, describe, leaves, named_leaves, parts_of, rebuilt

Parts = list[tuple[str, Tensor]]  # tensors with their paths in a structure


class First(Protocol):
    """What is known of the first side: values in their order, classes and paths by name."""

    types: dict[str, str]
    leaves: dict[str, str]

    @property
    def keys(self) -> list[Key]:
        """The values' keys, in order."""

    def read(self, key: Key) -> Parts:
        """The tensors of a value; none where there is no such value."""


class Kept:
    """What the first model gives, in the order in which its modules finish.

    Attributes:
        types: the classes of its modules by name.
        leaves: the paths in their outputs that are meant, by name.
        inputs: what the calls of each module received, in the order in which they began.
    """

    def __init__(self, chosen: Chosen) -> None:
        self.types = {name: type(m).__name__ for name, (m, _) in chosen.items()}
        self.leaves = {name: leaf for name, (_, leaf) in chosen.items()}
        self.inputs: dict[str, list[list[Tensor]]] = {}
        self._values: dict[Key, Parts] = {}

    @property
    def keys(self) -> list[Key]:
        """The values' keys, in order."""
        return list(self._values)

    def see(self, key: Key, value: Any) -> None:
        """Keeps a value; the last one where several have the same key."""
        self._values.pop(key, None)
        self._values[key] = [(path, snapshot(t.detach())) for path, t in named_leaves(value)]

    def receive(self, name: str, given: Inputs) -> None:
        """Keeps what a call received."""
        self.inputs.setdefault(name, []).append([snapshot(t.detach()) for t in leaves(given)])

    def read(self, key: Key) -> Parts:
        """The tensors of a value; none where there is no such value."""
        return self._values.get(key, [])


class Isolated:
    """Gives each module of the second model what the first model's received.

    Args:
        inputs: what the first model's calls received, by name.
        see: called with what the second model's modules return for it.
    """

    def __init__(self, inputs: dict[str, list[list[Tensor]]], see: See) -> None:
        self._inputs = {name: iter(each) for name, each in inputs.items()}
        self._see = see
        # by name, of the calls that have begun: the second model's tensors and what they get
        self._open: dict[str, list[list[tuple[Tensor, Tensor, int]] | None]] = {}

    def receive(self, name: str, given: Inputs) -> Inputs | None:
        """`given` with the first model's tensors; None if those are others, or of other shapes."""
        theirs, mine = next(self._inputs.get(name, iter(())), None), leaves(given)
        begun = self._open.setdefault(name, [])
        if theirs is None or not _alike(theirs, mine):
            begun.append(None)
            return None
        new = [_filled(t, value) for t, value in zip(mine, theirs, strict=True)]
        begun.append([(t, n, n._version) for t, n in zip(mine, new, strict=True)])
        fed: Inputs = _replaced(given, iter(new))
        return fed

    def see(self, key: Key, value: Any) -> None:
        """Shows what a module returns for the first model's inputs, if it was given them."""
        swapped = self._open[key.name].pop()
        if swapped is None:
            return
        # A module that works in place, such as ReLU(inplace=True), changes what its caller has.
        # Private: `Tensor._version`, as in `hooks.snapshot`.
        for mine, new, version in swapped:
            if new._version != version:
                with torch.no_grad():
                    mine.copy_(new)
        self._see(key, value)


class Pairs:
    """The rows of a comparison, as the second side's values come.

    Args:
        first: the first side.
        others: the names of its modules on the second side.
        rtol: relative tolerance, None for the dtypes' own.
        atol: absolute tolerance.

    Attributes:
        only: what only the second side has, in words.
        notes: what else is to be known.
    """

    def __init__(
        self, first: First, others: dict[str, str], rtol: float | None, atol: float | None
    ) -> None:
        self.first, self.others, self.tolerance = first, others, (rtol, atol)
        self._rows: dict[tuple[Key, str], Row] = {}
        self._own: dict[tuple[Key, str], Difference] = {}
        self.only: list[str] = []
        self.notes: list[str] = []

    def see(self, key: Key, value: Any) -> None:
        """Compares a value of the second side with the first one's."""
        self.see_parts(key, named_leaves(value))

    def see_parts(self, key: Key, found: Parts) -> None:
        """The same for tensors with their paths."""
        expected = self.first.read(key)
        pairs = _paired(expected, found)
        for path, a, b in pairs:
            self._rows.pop((key, path), None)
            self._rows[key, path] = self._row(key, path, dense(a), dense(b))
        if len(pairs) < len(found):
            known = [path for path, _ in expected]
            extra = [path for path, _ in found if path not in known] if expected else [""]
            self.list_only(f"{_words(key, path)} (second only)" for path in extra)

    def list_only(self, texts: Iterable[str]) -> None:
        """Lists what only the second side has, each once."""
        self.only += [text for text in dict.fromkeys(texts) if text not in self.only]

    def see_own(self, key: Key, value: Any) -> None:
        """Compares what a module gives for the inputs that the first model's received."""
        for path, a, b in _paired(self.first.read(key), named_leaves(value)):
            a, b = dense(a), dense(b)
            if a.shape == b.shape and not (a.is_meta or b.is_meta):
                self._own[key, path] = self._difference(a, b)

    def _difference(self, a: Tensor, b: Tensor) -> Difference:
        usual = tolerances(a.dtype, b.dtype)
        rtol, atol = (u if t is None else t for t, u in zip(self.tolerance, usual, strict=True))
        return difference(a, b, rtol, atol)

    def _row(self, key: Key, path: str, a: Tensor, b: Tensor) -> Row:
        problem, found = "", Difference(math.nan, math.nan, math.nan, 0)
        if a.is_meta or b.is_meta:
            problem = "on meta, without values"
        elif a.shape != b.shape:
            problem = f"{describe(b)} in the second"
        else:
            found = self._difference(a, b)
        module = key.name if key.what != "param_grad" else key.name.rpartition(".")[0]
        other = self.others.get(module, module) + key.name[len(module) :]
        dtype = str(a.dtype).removeprefix("torch.")
        return Row(
            key.name + path, other + path, self.first.types.get(module, ""), key.what, key.call,
            tuple(a.shape), dtype, *found, a.numel(), problem=problem,
        )  # fmt: skip

    def comparison(self) -> Comparison:
        """The rows in the order of the first side's values, a file's in that of the second's."""
        rows, missing = [], list[str]()
        seen = [] if isinstance(self.first, Kept) else [key for key, _ in self._rows]
        for key in dict.fromkeys([*seen, *self.first.keys]):
            for path, _ in self.first.read(key):
                row = self._rows.get((key, path))
                if row is None:
                    missing.append(f"{_words(key, path)} (first only)")
                elif (own := self._own.get((key, path))) is None:
                    rows.append(row)
                else:
                    rows.append(replace(row, own_rel=own.rel, own_different=own.n_different))
        return Comparison(tuple(rows), (*missing, *self.only), tuple(self.notes))


def _paired(expected: Parts, found: Parts) -> list[tuple[str, Tensor, Tensor]]:
    """Tensors with the same path, or in the same place where the structures differ."""
    there = dict(found)
    if {path for path, _ in expected} != set(there) and len(expected) == len(found):
        there = {path: t for (path, _), (_, t) in zip(expected, found, strict=True)}
    return [(path, a, there[path]) for path, a in expected if path in there]


def _alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return not any(t.is_nested for t in (*a, *b)) and [t.shape for t in a] == [t.shape for t in b]


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


def _words(key: Key, path: str = "") -> str:
    call = f" call {key.call}" if key.call else ""
    what = "" if key.what == "output" else f" {key.what.replace('_', ' ')}"
    return f"{'' if key.name else '(model)'}{key.name}{path}{call}{what}"
