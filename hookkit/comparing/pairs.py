"""Values of the second model, and what the first one has in their place.

Builds on `measures`, `comparison` and `sides`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from hookkit.comparing.comparison import Comparison, Row
from hookkit.comparing.measures import Difference, dense, difference, tolerances
from hookkit.comparing.sides import Key
from hookkit.hooks.snapshot import snapshot
from hookkit.nested import Inputs, describe, leaves, named_leaves, tmap

Parts = list[tuple[str, Tensor]]  # tensors with their paths in a structure


class First(Protocol):
    """What is known of the first side: values in their order, and classes by name."""

    types: dict[str, str]

    @property
    def keys(self) -> list[Key]:
        """The values' keys, in order."""

    def read(self, key: Key) -> Parts:
        """The tensors of a value; none where there is no such value."""


class Kept:
    """What the first model gives, in the order in which its modules finish.

    Attributes:
        types: the classes of its modules by name.
    """

    def __init__(self, types: dict[str, str]) -> None:
        self.types = types
        self._values: dict[Key, Parts] = {}
        self._inputs: dict[Key, list[Tensor]] = {}

    @property
    def keys(self) -> list[Key]:
        """The values' keys, in order."""
        return list(self._values)

    def see(self, key: Key, value: Any) -> None:
        """Keeps a value."""
        self._values[key] = [(path, snapshot(t.detach())) for path, t in named_leaves(value)]

    def see_inputs(self, key: Key, given: Inputs) -> None:
        """Keeps what a call received."""
        self._inputs[key] = [snapshot(t.detach()) for t in leaves(given)]

    def read(self, key: Key) -> Parts:
        """The tensors of a value; none where there is no such value."""
        return self._values.get(key, [])

    def feed(self, key: Key, given: Inputs) -> Inputs | None:
        """`given` with the first model's tensors; None if there are others, or of other shapes."""
        mine = self._inputs.get(key, [])
        if [t.shape for t in mine] != [t.shape for t in leaves(given)]:
            return None
        each = iter(mine)
        fed: Inputs = tmap(lambda t: next(each).to(t.device, t.dtype), given)
        return fed


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
        if not expected and found:
            self.only.append(f"{_words(key)} (second only)")
        for path, a, b in _paired(expected, found):
            self._rows[key, path] = self._row(key, path, dense(a), dense(b))

    def see_own(self, key: Key, value: Any) -> None:
        """Compares what a module gives for the inputs that the first model's received."""
        for path, a, b in _paired(self.first.read(key), named_leaves(value)):
            if a.shape == b.shape and not (a.is_meta or b.is_meta):
                self._own[key, path] = self._difference(dense(a), dense(b))

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
        """The rows in the order of the first side's values."""
        rows, missing = [], list[str]()
        for key in self.first.keys:
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


def _words(key: Key, path: str = "") -> str:
    call = f" call {key.call}" if key.call else ""
    what = "" if key.what == "output" else f" {key.what.replace('_', ' ')}"
    return f"{key.name + path or '(model)'}{call}{what}"
