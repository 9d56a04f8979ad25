"""The rows of a comparison, and the first of them, from what two sides gave and which are pairs.

Builds on `pairing`, `differences` and `first_difference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from hookkit._core.pytree import Parts, describe
from hookkit.inspection.comparison import MISSING, NOT_GIVEN, Comparison, Row
from hookkit.inspection.differences import (
    Difference,
    dense,
    difference,
    laid_out,
    root_mean_square,
)
from hookkit.inspection.first_difference import Call
from hookkit.inspection.pairing import Pair, braced, feature_orders, main_pair, names_of
from hookkit.inspection.sides import Key, Side

_AMPLIFIES = 8  # an output's error that is below so many times that of the inputs comes from them


class RowMaker:
    """Compares two sides, pair by pair.

    Attributes:
        strict: True if both sides have the same names. What only one of them has is a difference
            then; a port is built otherwise, and what it lacks is not judged.
        rows: the rows, each with its key; None for what only the second side has.
        not_judged: what could not be compared, with the reason.
        input_error: the relative error of the inputs of each call.
        inputs_differ: the calls whose inputs are beyond the tolerance, or could not be compared.
    """

    def __init__(
        self,
        first: Side,
        second: Side,
        pairs: list[Pair],
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        self.first, self.second, self.pairs = first, second, pairs
        self.rtol, self.atol = rtol, atol
        self.strict = all(pair.how == "name" for pair in pairs)
        self.has_file = first.saved or second.saved
        self.pair_of = {name: pair for pair in pairs for name in pair.a}
        self.rows, self.not_judged = list[tuple[Key | None, Row]](), list[str]()
        self.input_error, self.inputs_differ = dict[Call, float](), set[Call]()
        self._compared = set[tuple[Key, str]]()  # of the second side, with the path
        # the parts of results that are meant, by the second's names
        limits = {self.pair_of[n].b[0]: p for n, p in first.paths.items() if n in self.pair_of}
        self.limits = limits | second.paths
        # A gradient may be rounding alone (of a key's bias), so all are measured by the largest.
        self.sizes = dict[str, float]()
        for key, parts in first.values.items():
            for _, t in parts if key.what in ("grad", "param_grad") else ():
                size = root_mean_square(dense(t))
                self.sizes[key.what] = max(size, self.sizes.get(key.what, 0.0))

    def comparison(self, selected: bool = False) -> Comparison:
        """Return the rows of all pairs, and where the difference begins.

        Args:
            selected: the second side may have modules that were not asked for.
        """
        for key in self.first.values:
            pair = self.pair_of.get(key.call.name)
            if pair is not None and key.what != "input" and key.call.name == pair.a[-1]:
                self._compare(key, pair)
        named = {pair.b[-1]: pair for pair in self.pairs}
        for key, parts in self.second.values.items():  # what the first side lacks
            pair = named.get(key.call.name)
            if pair is not None and key.what != "input":
                meant = self._meant(parts, key.what, pair)
                alone = [p for p in meant if (key, p[0]) not in self._compared]
                self._add_alone(self.second, None, key, alone)
        self._add_modules(self.first, [*self.pair_of], "second")
        if not selected:
            self._add_modules(self.second, [n for pair in self.pairs for n in pair.b], "first")
        at = self._first()
        rows = tuple(row for _, row in self.rows)
        return Comparison(rows, tuple(dict.fromkeys(self.not_judged)), names_of(self.pairs), at)

    # -- rows --------------------------------------------------------------------------------------

    def _compare(self, key: Key, pair: Pair) -> None:
        """Add the rows of one call, or of its gradients."""
        xs = self._parts(self.first, pair.a, key, pair) or []
        ys = self._parts(self.second, pair.b, key, pair)
        if key.what == "output":
            self._compare_inputs(key.call, pair, called=ys is not None)
        if ys is None:
            self._add_alone(self.first, key, key, xs)
            return
        strict = self.strict or (key.what == "output" and pair.a == pair.b == ("",))
        matches = _matched(xs, ys, self.strict)
        for path, x, other, y in matches:
            row = self._row(self.first, key, path, x)
            row = replace(row, name=braced(pair.a) + path, other_name=braced(pair.b) + other)
            row = self._measured(replace(row, paired=pair.how), x, y, pair)
            if key.what == "output":
                row = replace(row, input_error=self.input_error.get(key.call, math.nan))
            if row.problem and not strict:
                self.not_judged.append(f"{row.label}: {row.problem}")
            else:
                self.rows.append((key, row))
        mine, there = {path for path, *_ in matches}, Key(key.what, Call(pair.b[-1], key.call.n))
        self._compared |= {(there, other) for _, _, other, _ in matches}
        self._add_alone(self.first, key, key, [p for p in xs if p[0] not in mine])

    def _parts(self, side: Side, names: tuple[str, ...], key: Key, pair: Pair) -> Parts | None:
        """Return what the modules `names` gave, fused ones joined; None if one gave nothing."""
        calls = [Key(key.what, Call(name, key.call.n)) for name in names]
        if not all(call in side.values for call in calls):
            return None
        parts = [self._meant(side.values[call], key.what, pair) for call in calls]
        if len(parts) == 1:
            return parts[0]
        joined: Parts = []
        for path, t in parts[0]:
            tensors: list[Any] = [dict(found).get(path) for found in parts]
            if all(isinstance(t, Tensor) for t in tensors):
                # features are the rows of a weight, channels of a grid, else the last axis
                dim = 0 if key.what == "param_grad" else 1 if t.ndim > 3 else -1
                fits = len({t.movedim(dim, -1).shape[:-1] for t in tensors}) == 1
                joined += [(path, torch.cat(tensors, dim))] if fits else []
        return joined

    def _meant(self, parts: Parts, what: str, pair: Pair) -> Parts:
        """Return those of `parts` that are compared: the selected ones; beside a file, tensors."""
        paths = None if what == "param_grad" else self.limits.get(pair.b[0])
        for path, x in parts if self.has_file else ():
            if not isinstance(x, Tensor):
                self.not_judged.append(f"{pair.b[0]}{path} {type(x).__name__}: not in a file")
        parts = [p for p in parts if isinstance(p[1], Tensor) or not self.has_file]
        if paths is None:
            return parts
        return [(p, x) for p, x in parts
                if any(p == at or p.startswith((f"{at}.", f"{at}[")) for at in paths)]  # fmt: skip

    def _row(self, side: Side, key: Key, path: str, x: Any) -> Row:
        name, kind = key.call.name + path, side.types.get(key.call.name, "")
        shape = tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else ()
        return Row(name, name, kind, key.what, key.call.n, shape, path=path)

    def _add_alone(self, side: Side, key: Key | None, there: Key, parts: Parts) -> None:
        """Add what one side gives and the other does not: as a difference, or as not judged."""
        one, other = ("first", "second") if side is self.first else ("second", "first")
        rows = [self._row(side, there, path, x) for path, x in parts]
        if self.strict:
            self.rows += [(key, replace(row, problem=f"{NOT_GIVEN}{other}")) for row in rows]
        elif rows:
            more = f" and {len(rows) - 1} more" * (len(rows) > 1)
            self.not_judged.append(f"{rows[0].label}{more}: only given by the {one}")

    def _add_modules(self, side: Side, known: list[str], other: str) -> None:
        """Add the modules of `side` without a partner.

        Beside a file they are differences: nothing that the whole model gives may be in it.
        """
        for name in [n for n in side.ran() if n not in known]:
            keys = [k for k in side.values if k == Key("output", Call(name, k.call.n))]
            if self.strict and self.has_file:
                rows = [self._row(side, k, *part) for k in keys for part in side.values[k]]
                self.rows += [(None, replace(row, problem=f"{MISSING}{other}")) for row in rows]
                continue
            module = side.modules.get(name)
            why = f"nothing in the {other} has its weights, name or place"
            if self.strict or module is None:
                why = f"{MISSING}{other}"
            elif next(module.parameters(), None) is None:
                why = "it has no parameters to be paired by"
            self.not_judged.append(f"{name or '(model)'} {side.types[name]}: {why}")

    # -- values ------------------------------------------------------------------------------------

    def _measured(self, row: Row, x: Any, y: Any, pair: Pair) -> Row:
        """Return `row` with how far `y` is from `x`, or why that is not known."""
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            kind = type(y if isinstance(x, Tensor) else x).__name__
            problem = f"a {kind}, in which hookkit finds no tensor"
            return row if _equal(x, y) else replace(row, problem=problem)
        if x.is_nested or y.is_nested:
            return replace(row, problem="a nested tensor, which is not compared")
        if x.is_meta or y.is_meta:
            return replace(row, problem="on meta, without values")
        found = self._difference(x, y, pair, row.what)
        if found is None:
            return replace(row, problem=f"{describe(y)} in the second")
        return replace(row, **found._asdict())

    def _difference(self, x: Tensor, y: Tensor, pair: Pair, what: str) -> Difference | None:
        """Return how far `y` is from `x`, in the layout in which it is nearest; None if none fits.

        Two modules with the same name have the same layout.
        """
        x, y, size = dense(x), dense(y), self.sizes.get(what, 0.0)

        def nearest(ways: Iterator[Tensor]) -> Difference | None:
            found = (difference(x, way, self.rtol, self.atol, size) for way in ways)
            return min(found, key=lambda d: (d.n_different, d.rel_error), default=None)

        if self.strict:
            return nearest(iter([y] * (x.shape == y.shape)))
        ways = [*laid_out(y, x)]
        if what == "param_grad" and y.ndim == 2 and y.mT.shape == x.shape:
            ways.append(y.mT)
        best = nearest(iter(ways))
        if best is None or not best.n_different or self.has_file:
            return best
        permuted = nearest(
            way.index_select(dim, order.to(way.device))
            for order in feature_orders(self.first, self.second, pair)
            for way in ways
            for dim in range(way.ndim)
            if way.shape[dim] == len(order)
        )
        return min(best, permuted or best, key=lambda d: (d.n_different, d.rel_error))

    def _compare_inputs(self, call: Call, pair: Pair, called: bool) -> None:
        """Note how far the inputs of a call are apart; a call that one side lacks begins there."""
        if pair.a == pair.b == ("",) or not called:
            self.input_error[call] = 0.0
            return
        xs = self.first.values.get(Key("input", Call(pair.a[0], call.n)))
        ys = self.second.values.get(Key("input", Call(pair.b[0], call.n)))
        if xs is None or ys is None:  # beside a file
            self.inputs_differ.add(call)
            return
        both = [(x, y) for (_, x), (_, y) in zip(xs, ys, strict=False)]
        if pair.how != "name" or [(p, t.dtype) for p, t in xs] != [(p, t.dtype) for p, t in ys]:
            main = main_pair(xs, ys)
            both = [] if main is None else [(main[0][1], main[1][1])]
        judged = [(x, y) for x, y in both if not any(t.is_nested or t.is_meta for t in (x, y))]
        found = [self._difference(x, y, pair, "input") for x, y in judged]
        known = [d for d in found if d is not None]
        if known or not (xs or ys):
            self.input_error[call] = max((d.rel_error for d in known), default=0.0)
        unknown = len(known) < len(both) or (bool(xs or ys) and not both)
        if unknown or any(d.n_different for d in known):
            self.inputs_differ.add(call)

    # -- the first ---------------------------------------------------------------------------------

    def _first(self) -> int | None:
        """Return the index of the row where the difference begins, and write its `place` to it."""
        tree = self.first.tree
        judged = {k.call for k, _ in self.rows if k is not None and k.what == "output"}
        errors = dict[Call, float]()
        for key, row in self.rows:
            if key is not None and key.what == "output" and row.differs:
                error = math.inf if row.problem else row.rel_error
                errors[key.call] = max(error, errors.get(key.call, 0.0))
        inside = {
            outer: [c for c in tree.begun if c in judged and outer in tree.around(c)]
            for outer in judged
        }
        while True:
            from_inputs = {c for c, error in errors.items()
                           if error < _AMPLIFIES * self.input_error.get(c, math.inf)}  # fmt: skip
            makers = tree.makers(self.inputs_differ | from_inputs, errors)
            cut = [c for c in makers if self._has_no_effect(c, makers, inside, errors)]
            if self.strict or not cut:
                break
            self._leave_out(cut[0])
            del errors[cut[0]]

        begins = tree.first(self.inputs_differ, errors)
        differ = [i for i, (_, row) in enumerate(self.rows) if row.differs]
        if not (makers or self.has_file) and begins is not None and Call("") in judged:
            # rounding adds up within the model, and what the model gives agrees
            differ = [i for i in differ if self.rows[i][1].what != "output"]
        if not makers or self.has_file:
            return self._mark(differ[0], self._why_no_maker(differ[0])) if differ else None
        at = next(i for i in differ if self.rows[i][0] == Key("output", makers[0]))
        if begins in inside[makers[0]]:
            return self._mark(at, f"as errors of its layers add up, from {begins.name} on")
        return self._mark(at, tree.place(makers[0], self.inputs_differ, judged))

    def _mark(self, at: int, place: str) -> int:
        key, row = self.rows[at]
        self.rows[at] = key, replace(row, place=place)
        return at

    def _has_no_effect(
        self,
        call: Call,
        makers: list[Call],
        inside: dict[Call, list[Call]],
        errors: dict[Call, float],
    ) -> bool:
        """Return whether a module of a port gives something else, and what comes of it is the same.

        A residual, a norm or a scale may be inside a module here and outside of it there. Nothing
        that runs later is given another input then, and the module around agrees; or something
        differs by itself before that.
        """
        outer = next((c for c in self.first.tree.around(call) if c in inside), None)
        if outer is None:
            return False
        order = inside[outer]
        rest = order[max(order.index(c) for c in (call, *inside[call])) + 1 :]
        later = [*takewhile(lambda c: c not in self.inputs_differ, rest)]
        return any(c in makers for c in later) or (outer not in errors and later == rest)

    def _leave_out(self, call: Call) -> None:
        label = next(row.label for key, row in self.rows if key == Key("output", call))
        why = "it gives something else in the second, and what comes of it is the same"
        self.not_judged.append(f"{label}: {why}")
        self.rows = [(k, r) for k, r in self.rows if k != Key("output", call)]

    def _why_no_maker(self, at: int) -> str:
        """Return in words which rows around the first that differs agree."""
        key, row = self.rows[at]
        if self.has_file:
            return "of unknown inputs, as a file has none"
        if row.what == "output" or key is None:
            return "" if row.is_alone else "of inputs that differ"
        grads = [r for k, r in self.rows[:at] if k is not None and k.what == "grad"]
        if row.what == "param_grad":
            own = any(k == Key("grad", key.call) for k, _ in self.rows[:at] if k is not None)
            return "in its own backward, as the gradient of its output agrees" if own else ""
        return f"in the backward between it and {grads[-1].label}" if grads else "of the loss"


def _matched(xs: Parts, ys: Parts, strict: bool) -> list[tuple[str, Any, str, Any]]:
    """Return the parts that belong together: those with the same path.

    Where the structures differ, those in the same place; of a port the two that are meant.
    """
    there = dict(ys)
    if {path for path, _ in xs} != set(there):
        alike = len(xs) == len(ys)
        if alike and (strict or len(xs) == 1):
            return [(*one, *other) for one, other in zip(xs, ys, strict=True)]
        if not strict:
            main = main_pair(xs, ys)
            return [] if main is None else [(*main[0], *main[1])]
    return [(path, x, path, there[path]) for path, x in xs if path in there]


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # an object of the user's, such as an array of numpy
        return False
