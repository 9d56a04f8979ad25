"""Make the rows of a comparison from two sides and their pairs, and find the first that differs.

Builds on `pairing`, `differences` and `first_difference`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from hookkit._core.pytree import Parts, describe
from hookkit.inspection.comparison import MISSING, NOT_GIVEN, Comparison, Row
from hookkit.inspection.differences import (
    Difference,
    default_rtol,
    dense,
    difference,
    laid_out,
    root_mean_square,
)
from hookkit.inspection.first_difference import Call
from hookkit.inspection.pairing import Pair, braced, feature_orders, main_pair, names_of
from hookkit.inspection.sides import Key, Side, float_dtype

_AMPLIFIES = 8  # an output whose error is below 8 times that of its inputs gets it from these


class RowMaker:
    """Compares two sides, pair by pair.

    Attributes:
        strict: True if both sides have the same names. Then a tensor that only one side has is a
            difference. A port is built in another way, so what only one side has is not judged.
        rows: the rows, each with its key; the key is None if only the second side has the tensor.
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
        self._n_calls = [Counter((key.what, key.call.name) for key in side.values)
                         for side in (first, second)]  # fmt: skip
        self._compared = set[tuple[Key, str]]()  # of the second side, with the path
        models = [side.modules[""] for side in (first, second) if "" in side.modules]
        self._dtypes = [dtype for m in models if (dtype := float_dtype(m)) is not None]
        # module of the second side → the selected parts of its output
        limits = {self.pair_of[n].b[0]: p for n, p in first.paths.items() if n in self.pair_of}
        self._limits = limits | second.paths
        # A gradient may be rounding alone (of a key's bias), so all are measured by the largest.
        self._sizes = dict[str, float]()
        for key, parts in first.values.items():
            for _, t in parts if key.what in ("grad", "param_grad") else ():
                size = root_mean_square(dense(t))
                self._sizes[key.what] = max(size, self._sizes.get(key.what, 0.0))

    def comparison(self, selected: bool = False) -> Comparison:
        """Return the rows of all pairs, and where the difference begins.

        Args:
            selected: the second side may have modules that were not selected, and do not count.
        """
        for key in self.first.values:
            pair = self.pair_of.get(key.call.name)
            if pair is not None and key.what != "input" and key.call.name == pair.a[-1]:
                self._compare(key, pair)
        named = {pair.b[-1]: pair for pair in self.pairs}
        for key in self.second.values:  # what the first side lacks
            if key.what != "input" and (pair := named.get(key.call.name)):
                parts = self._parts(self.second, pair.b, key, pair) or []
                alone = [p for p in parts if (key, p[0]) not in self._compared]
                self._add_alone(self.second, None, key, alone)
        self._add_modules(self.first, [*self.pair_of], "second")
        if not selected:
            self._add_modules(self.second, [n for pair in self.pairs for n in pair.b], "first")
        at, place = self._first()
        rows = [row for _, row in self.rows]
        if at is not None:
            rows[at] = replace(rows[at], place=place)
        notes = tuple(dict.fromkeys(self.not_judged))
        return Comparison(tuple(rows), notes, names_of(self.pairs), at)

    # -- rows --------------------------------------------------------------------------------------

    def _compare(self, key: Key, pair: Pair) -> None:
        """Add the rows of one call, or of its gradients."""
        xs = self._parts(self.first, pair.a, key, pair) or []
        ys = self._parts(self.second, pair.b, key, pair)
        error = math.nan
        if key.what == "output":
            error = self._compare_inputs(key.call, pair, called=ys is not None)
        matches = _matched(xs, ys or [], self.strict)
        is_root = key.what == "output" and pair.a == pair.b == ("",)
        n = self._n_calls[0][key.what, pair.a[-1]]
        m = self._n_calls[1][key.what, pair.b[-1]]
        for path, x, other, y in matches:
            row = self._row(self.first, key, path, x)
            row = replace(row, name=braced(pair.a) + path, other_name=braced(pair.b) + other,
                          paired=pair.how, input_error=error,
                          **self._values(x, y, pair, key.what))  # fmt: skip
            if row.differs and n != m and not self.strict:
                # one call for all steps may be a call for each step in a port: LSTM and LSTMCell
                self.not_judged.append(f"{row.label}: calls in the first {n}, in the second {m}")
            elif row.problem and not (self.strict or is_root):
                self.not_judged.append(f"{row.label}: {row.problem}")
            else:
                self.rows.append((key, row))
        mine, there = {path for path, *_ in matches}, Key(key.what, Call(pair.b[-1], key.call.n))
        self._compared |= {(there, other) for _, _, other, _ in matches}
        self._add_alone(self.first, key, key, [p for p in xs if p[0] not in mine])

    def _parts(self, side: Side, names: tuple[str, ...], key: Key, pair: Pair) -> Parts | None:
        """Return the values of the modules `names`, joined if fused; None if a module has none.

        If paths were selected, only these are returned; if a side is a file, only tensors.
        """
        every = [side.values.get(Key(key.what, Call(name, key.call.n))) for name in names]
        parts = [p for p in every if p is not None]
        if len(parts) < len(names):
            return None
        if len(names) > 1:
            joined: Parts = []
            for path, t in parts[0]:
                tensors: list[Any] = [dict(found).get(path) for found in parts]
                # features are the rows of a weight, the channels of a grid, else the last axis
                dim = 0 if key.what == "param_grad" else 1 if getattr(t, "ndim", 0) > 3 else -1
                with suppress(TypeError, RuntimeError):  # no tensors, or of other sizes
                    joined.append((path, torch.cat(tensors, dim)))
            return joined
        paths = None if key.what == "param_grad" else self._limits.get(pair.b[0])
        meant = []
        for path, x in parts[0]:
            if self.has_file and not isinstance(x, Tensor):
                self.not_judged.append(f"{pair.b[0]}{path} {type(x).__name__}: not in a file")
            elif paths is None or any(f"{path}.".startswith((f"{at}.", f"{at}[")) for at in paths):
                meant.append((path, x))
        return meant

    def _row(self, side: Side, key: Key, path: str, x: Any) -> Row:
        name, kind = key.call.name + path, side.types.get(key.call.name, "")
        shape = tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else ()
        return Row(name, name, kind, key.what, key.call.n, shape, path=path)

    def _add_alone(self, side: Side, key: Key | None, there: Key, parts: Parts) -> None:
        """Add the tensors that only one side has: as differences if strict, else as not judged."""
        one, other = ("first", "second") if side is self.first else ("second", "first")
        rows = [self._row(side, there, path, x) for path, x in parts]
        if self.strict:
            self.rows += [(key, replace(row, problem=f"{NOT_GIVEN}{other}")) for row in rows]
        elif rows:
            more = f" and {len(rows) - 1} more" * (len(rows) > 1)
            self.not_judged.append(f"{rows[0].label}{more}: only given by the {one}")

    def _add_modules(self, side: Side, known: list[str], other: str) -> None:
        """Add the modules of `side` without a partner.

        If a side is a file they are differences, because the file may lack the model's own output.
        """
        for name in [n for n in side.ran() if n not in known]:
            module = side.modules.get(name)
            if self.strict and self.has_file:
                own = [(k, p) for k, parts in side.values.items() for p in parts
                       if k.what == "output" and k.call.name == name]  # fmt: skip
                rows = [self._row(side, k, *part) for k, part in own]
                self.rows += [(None, replace(row, problem=f"{MISSING}{other}")) for row in rows]
                continue
            why = f"nothing in the {other} has its weights, name or place"
            if name in (self.second if other == "second" else self.first).modules:
                why = f"never called in the {other}"
            elif self.strict or module is None:
                why = f"{MISSING}{other}"
            elif next(module.parameters(), None) is None:
                why = "it has no parameters to be paired by"
            self.not_judged.append(f"{name or '(model)'} {side.types[name]}: {why}")

    # -- values ------------------------------------------------------------------------------------

    def _values(self, x: Any, y: Any, pair: Pair, what: str) -> dict[str, Any]:
        """Return fields of a row: how far `y` is from `x`, or why they cannot be compared."""
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            kind = type(y if isinstance(x, Tensor) else x).__name__
            problem = f"a {kind}, in which hookkit finds no tensor"
            return {"problem": "" if _equal(x, y) else problem}
        found = self._difference(x, y, pair, what)
        if found is not None:
            return found._asdict()
        if x.is_nested or y.is_nested:
            return {"problem": "a nested tensor, which is not compared"}
        if x.is_meta or y.is_meta:
            return {"problem": "on meta, without values"}
        return {"problem": f"{describe(y)} in the second"}

    def _difference(self, x: Tensor, y: Tensor, pair: Pair, what: str) -> Difference | None:
        """Return how far `y` is from `x` in its nearest layout; None if no layout fits.

        Layouts are tried only if the sides are not `strict`.
        """
        if any(t.is_nested or t.is_meta for t in (x, y)):
            return None
        x, y, size, rtol = dense(x), dense(y), self._sizes.get(what, 0.0), self.rtol
        if rtol is None and x.is_floating_point():  # a model in half precision has some in float32
            rtol = default_rtol(x.dtype, y.dtype, *self._dtypes)

        def nearest(ways: Iterable[Tensor]) -> Difference | None:
            found = (difference(x, way, rtol, self.atol, size) for way in ways)
            return min(found, key=lambda d: (d.n_different, d.rel_error), default=None)

        if self.strict:
            return nearest([y] * (x.shape == y.shape))
        ways = [*laid_out(y, x)]
        if what == "param_grad" and y.ndim == 2 and y.mT.shape == x.shape:
            ways.append(y.mT)
        best = nearest(ways)
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

    def _compare_inputs(self, call: Call, pair: Pair, called: bool) -> float:
        """Note how far the inputs of a call are apart, and return their relative error.

        The model's own inputs, and those of a call that one side lacks, count as equal.
        """
        self.input_error[call] = math.nan
        if self.has_file:
            self.inputs_differ.add(call)
            return math.nan
        xs = self.first.values.get(Key("input", Call(pair.a[0], call.n)), [])
        ys = self.second.values.get(Key("input", Call(pair.b[0], call.n)), [])
        if pair.a == pair.b == ("",) or not (called and (xs or ys)):
            self.input_error[call] = 0.0
            return 0.0
        both = [(x, y) for (_, x), (_, y) in zip(xs, ys, strict=False)]
        if pair.how != "name" or [(p, t.dtype) for p, t in xs] != [(p, t.dtype) for p, t in ys]:
            main = main_pair(xs, ys)
            both = [] if main is None else [(main[0][1], main[1][1])]
        found = [self._difference(x, y, pair, "input") for x, y in both]
        known = [d for d in found if d is not None]
        if len(known) < max(len(found), 1) or any(d.n_different for d in known):
            self.inputs_differ.add(call)
        error = max((d.rel_error for d in known), default=math.nan)
        self.input_error[call] = error
        return error

    # -- the first ---------------------------------------------------------------------------------

    def _first(self) -> tuple[int | None, str]:
        """Return the index of the row where the difference begins, and the place in words."""
        tree = self.first.tree
        judged = {k.call for k, _ in self.rows if k is not None and k.what == "output"}
        inside: dict[Call, list[Call]] = {call: [] for call in judged}
        for call in (c for c in tree.begun if c in judged):
            for outer in judged.intersection(tree.around(call)):
                inside[outer].append(call)
        errors = dict[Call, float]()
        for key, row in self.rows:
            if key is not None and key.what == "output" and row.differs:
                error = math.inf if row.problem else row.rel_error
                errors[key.call] = max(error, errors.get(key.call, 0.0))
        if self.has_file and not self.strict and Call("") in judged - errors.keys():
            self._leave_out(errors)
            errors.clear()
        # Find the makers of the difference; if one is without effect, leave it out and try again.
        while True:
            from_inputs = {c for c, e in errors.items() if e < _AMPLIFIES * self.input_error[c]}
            makers = tree.makers(self.inputs_differ | from_inputs, errors)
            cut = [c for c in makers if self._has_no_effect(c, makers, inside, errors)]
            if self.strict:  # only calls that one side lacks may be without effect
                both = {k.call for k, r in self.rows if k and r.differs and not r.is_alone}
                cut = [c for c in cut if c not in both]
            if not cut:
                break
            self._leave_out(cut[:1])
            del errors[cut[0]]

        begins = tree.first(self.inputs_differ, errors)
        differ = [i for i, (_, row) in enumerate(self.rows) if row.differs]
        if makers:
            at = next(i for i in differ if self.rows[i][0] == Key("output", makers[0]))
            if begins in inside[makers[0]]:
                add_up = f"as errors of its layers add up, from {begins.name} on"
                return at, f"{add_up} (in float64 rounding vanishes)"
            return at, tree.place(makers[0], self.inputs_differ, judged)
        given = [r for _, r in self.rows if r.what == "output" and r.name == r.path]  # by the model
        if given and not (self.has_file or any(r.differs for r in given)):
            # The model's own output agrees. Either rounding adds up inside the model, or the layers
            # that differ have other inputs, and nothing that is computed from them differs.
            if begins is None:
                self._leave_out(None)
            differ = [i for i, (_, r) in enumerate(self.rows) if r.differs and r.what != "output"]
        return (differ[0], self._where(differ[0])) if differ else (None, "")

    def _leave_out(self, calls: Collection[Call] | None) -> None:
        """Move the outputs of `calls` that differ to `not_judged`, because they have no effect.

        If `calls` is None, all outputs that differ. Their gradients are moved too: all of them if
        `calls` is None, otherwise those that cannot be compared.
        """
        rows, self.rows, left = self.rows, [], set[tuple[str, int]]()
        for key, row in rows:
            if row.what == "output":
                meant = calls is None or (key is not None and key.call in calls)
            else:
                meant = row.what == "grad" and (row.name, row.call) in left
                meant = meant and (calls is None or bool(row.problem))
            if meant and row.differs:
                left.add((row.name, row.call))
                why = row.problem or "another value in the second"
                self.not_judged.append(f"{row.label}: {why}, and what comes of it is the same")
            else:
                self.rows.append((key, row))

    def _where(self, at: int) -> str:
        """Return in words where the difference of row `at` begins, if no call made it."""
        key, row = self.rows[at]
        if self.has_file:
            return "of unknown inputs, as a file has none"
        if key is None or row.what == "output":
            return "" if row.is_alone else "of inputs that differ"
        grads = [(k, r) for k, r in self.rows[:at] if k is not None and k.what == "grad"]
        if row.what == "grad":
            return (
                f"in the backward between it and {grads[-1][1].label}" if grads else "of the loss"
            )
        own = any(k.call == key.call for k, _ in grads)
        return "in its own backward, as the gradient of its output agrees" if own else ""

    def _has_no_effect(
        self,
        call: Call,
        makers: list[Call],
        inside: dict[Call, list[Call]],
        errors: dict[Call, float],
    ) -> bool:
        """Return whether the output of `call` differs, but nothing that is computed from it does.

        A port may have a residual, a norm or a scale inside a module that the other model has
        outside of it. Then all later calls have equal inputs and the module around agrees; or a
        later call makes a difference by itself before an input differs.
        """
        outer = next((c for c in self.first.tree.around(call) if c in inside), None)
        if outer is None:
            return False
        order = inside[outer]
        rest = order[max(order.index(c) for c in (call, *inside[call])) + 1 :]
        later = [*takewhile(lambda c: c not in self.inputs_differ, rest)]
        return any(c in makers for c in later) or (outer not in errors and later == rest)


def _matched(xs: Parts, ys: Parts, strict: bool) -> list[tuple[str, Any, str, Any]]:
    """Return the parts of `xs` and `ys` that belong together: those with the same path.

    If the structures differ, parts are matched by place if strict, otherwise by `main_pair`.
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
