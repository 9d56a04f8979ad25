"""Values of the second model, and what the first one has in their place.

Builds on `measures`, `comparison`, `saved` and `sides`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookkit.comparing.comparison import Comparison, Row
from hookkit.comparing.measures import Difference, dense, difference, tolerances
from hookkit.comparing.saved import Saved
from hookkit.comparing.sides import Chosen, Key
from hookkit.hooks.snapshot import snapshot
from hookkit.nested import Inputs, describe, leaves, named_leaves

Parts = list[tuple[str, Tensor]]  # tensors with their paths in a structure


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
        tensors = leaves(given)
        kept = {id(t): snapshot(t.detach()) for t in tensors}  # one that is given twice once
        self.inputs.setdefault(name, []).append([kept[id(t)] for t in tensors])

    def read(self, key: Key) -> Parts:
        """The tensors of a value; none where there is no such value."""
        return self._values.get(key, [])


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
        self, first: Kept | Saved, others: dict[str, str], rtol: float | None, atol: float | None
    ) -> None:
        self.first, self.others, self.tolerance = first, others, (rtol, atol)
        self._rows: dict[tuple[Key, str], Row] = {}
        self._own: dict[tuple[Key, str], list[Difference]] = {}
        self.only: list[str] = []
        self.notes: list[str] = []

    def see(self, key: Key, value: Any) -> None:
        """Compares a value of the second side with the first one's."""
        self.see_parts(key, named_leaves(value))

    def see_parts(self, key: Key, found: Parts) -> None:
        """The same for tensors with their paths."""
        expected = self.first.read(key)
        pairs = paired(expected, found)
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

    def see_own(self, key: Key, value: Any, handed: list[Difference]) -> None:
        """Compares what a module gives, of its own, where it works on the first model's values.

        Args:
            key: of the value.
            value: what it returned.
            handed: how far what it handed to other modules is from what the first model's did.
        """
        for path, *both in paired(self.first.read(key), named_leaves(value)):
            a, b = map(dense, both)
            if (key, path) not in self._rows:
                self._rows[key, path] = self._row(key, path, a, b, "not run by the second itself")
            if a.shape == b.shape and not (a.is_meta or b.is_meta):
                self._own[key, path] = [self.difference(a, b), *handed]
                handed = []

    def difference(self, a: Tensor, b: Tensor) -> Difference:
        """How far `b` is from `a`, by the tolerance of their dtypes."""
        a, b = dense(a), dense(b)
        usual = tolerances(a.dtype, b.dtype)
        rtol, atol = (u if t is None else t for t, u in zip(self.tolerance, usual, strict=True))
        return difference(a, b, rtol, atol)

    def _row(self, key: Key, path: str, a: Tensor, b: Tensor, problem: str = "") -> Row:
        found = Difference(math.nan, math.nan, math.nan, 0)
        if problem:
            pass
        elif a.is_meta or b.is_meta:
            problem = "on meta, without values"
        elif a.shape != b.shape:
            problem = f"{describe(b)} in the second"
        else:
            found = self.difference(a, b)
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
        seen = [key for key, _ in self._rows] if isinstance(self.first, Saved) else []
        for key in dict.fromkeys([*seen, *self.first.keys]):
            for path, _ in self.first.read(key):
                row = self._rows.get((key, path))
                if row is None:
                    missing.append(f"{_words(key, path)} (first only)")
                elif (own := self._own.get((key, path))) is None:
                    rows.append(row)
                else:
                    rel, n_different = max(d.rel for d in own), sum(d.n_different for d in own)
                    rows.append(replace(row, own_rel=rel, own_different=n_different))
        return Comparison(tuple(rows), (*missing, *self.only), tuple(self.notes))


def paired(expected: Parts, found: Parts) -> list[tuple[str, Tensor, Tensor]]:
    """Tensors with the same path, or in the same place where the structures differ."""
    there = dict(found)
    if {path for path, _ in expected} != set(there) and len(expected) == len(found):
        there = {path: t for (path, _), (_, t) in zip(expected, found, strict=True)}
    return [(path, a, there[path]) for path, a in expected if path in there]


def _words(key: Key, path: str = "") -> str:
    call = f" call {key.call}" if key.call else ""
    what = "" if key.what == "output" else f" {key.what.replace('_', ' ')}"
    return f"{'' if key.name else '(model)'}{key.name}{path}{call}{what}"
