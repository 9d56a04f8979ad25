"""`compare_runs`: in which step, in which layer and by what two trainings part.

`_Steps` compares one step of both runs row by row, in the order in which they were computed, and
finds the first row that differs by the rule of `first_difference`. `_Verdict` says in words what it
may be, by what else differs and what does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hookkit._core.checks import check_number
from hookkit._core.text import wrap
from hookkit.errors import OptionError
from hookkit.inspection.first_difference import Call, Localisation
from hookkit.inspection.run_file import Key, RunStep, Seen, read_run

_ORDER = {
    "before": 0,
    "batches": 2,
    "param_grad": 2,
    "scale": 3,
    "setting": 3,
    "weight": 4,
    "buffer": 5,
}
_FORWARD = 1  # of what is computed in batches, which is in its order
_EXPLAINS = ("random", "scale")  # what differs in these alone is no difference of the training
_SCALED = 1e-5  # gradients that carry different scales differ by less, by rounding

Steps = Mapping[int, RunStep]


@dataclass(frozen=True)
class RunRow:
    """One tensor or hyperparameter of one step of both runs.

    Attributes:
        step: its number in the first run.
        what: `"before"` (a weight or buffer before the step), `"input"`, `"output"`, `"loss"`,
            `"grad"` (the gradient of an output), `"param_grad"`, `"setting"` (a hyperparameter),
            `"weight"` or `"buffer"` (after the step), `"batches"` (how many a step has),
            `"random"` or `"scale"` (of a GradScaler).
        name: of the layer, the parameter or the hyperparameter.
        path: of the tensor in what the layer takes or gives, `""` if it is that itself.
        type: the layer's class.
        batch: the number of the batch in the step.
        call: the number of the layer's call in the batch; of a gradient, how many have arrived
            there before in the step.
        shape: in the first run.
        rel_error: `|a − b| / |a|`, an estimate that is right within a factor of two; for weights
            and gradients at least relative to the size that all of the step have (a tenth of it
            for gradients). Infinite for other integers, NaN if it is not known.
        differs: whether it is beyond the tolerance.
        problem: what is different, where that is no number.
    """

    step: int
    what: str
    name: str
    path: str = ""
    type: str = ""
    batch: int = 0
    call: int = 0
    shape: tuple[int, ...] = ()
    rel_error: float = 0.0
    differs: bool = False
    problem: str = ""

    @property
    def label(self) -> str:
        """The row in words: `output of blocks.1.norm (LayerNorm)`."""
        if self.what in ("setting", "loss"):
            return self.name or self.what
        what = {"grad": "gradient", "param_grad": "gradient", "before": "first"}
        more = f" ({self.type})" * bool(self.type)
        more += f", batch {self.batch}" * bool(self.batch) + f", call {self.call}" * bool(self.call)
        of = "the step" if self.what == "batches" else self.name or "(model)"
        return f"{what.get(self.what, self.what)} of {of}{self.path}{more}"


@dataclass(frozen=True, repr=False)
class RunComparison(Localisation):
    """Where two trainings part: what `compare_runs` returns.

    Attributes:
        rows: all of the first step in which one differs; none if the runs agree.
        first: the row that answers: step, layer and kind; None if the runs agree.
        verdict: what that means, in a sentence.
        not_judged: what could not be compared, each with the reason.
    """

    rows: tuple[RunRow, ...]
    first: RunRow | None = None
    verdict: str = ""
    not_judged: tuple[str, ...] = ()
    _AGREES: ClassVar[str] = "the runs agree"

    def text(self) -> str:
        """Return the verdict, the first difference between its neighbours, what is not judged."""
        lines = [self.verdict]
        if self.first is not None:
            rows = [r for r in self.rows if r.what not in _EXPLAINS]
            at = rows.index(self.first)
            near = rows[max(0, at - 2) : at + 3]
            width = max(len(r.label) for r in near)
            for r in near:
                found = r.problem or (f"rel_error {r.rel_error:.2g}" if r.rel_error else "same")
                lines.append(f"{'→' if r is self.first else ' '} {r.label:{width}}  {found}")
            n = sum(r.differs for r in rows)
            lines.append(f"{n} of {len(rows)} rows of step {self.first.step} differ")
        lines += wrap([f"Not judged: {text}" for text in self.not_judged], 100, ". ")
        return "\n".join(lines)


def compare_runs(a: str | Path, b: str | Path, *, rtol: float | None = None) -> RunComparison:
    """Return the first step, layer and tensor in which two recorded trainings differ.

    Both were recorded by a `Fingerprint`. A training that was resumed is aligned with the other by
    the weights that it begins with.

    Args:
        a, b: the files.
        rtol: how far apart two tensors may be, as `RunRow.rel_error`. None compares bit for bit,
            for trainings on the same machine. Take 1e-3 for other hardware, another number of
            processes, or batches that are split otherwise: then only the gradients of parameters
            and the weights are compared.

    Raises:
        OptionError: a file cannot be read, is no fingerprint or has no step; the runs have no
            weight, or no step, in common.

    >>> import tempfile, torch
    >>> from hookkit import Fingerprint, watch
    >>> def train(path, lr):
    ...     torch.manual_seed(0)
    ...     net = torch.nn.Linear(2, 1)
    ...     opt = torch.optim.SGD(net.parameters(), lr)
    ...     with watch(net, opt, Fingerprint(path)):
    ...         for step in range(3):
    ...             net(torch.ones(4, 2)).pow(2).mean().backward()
    ...             opt.step()
    ...     return path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     comparison = compare_runs(train(f"{folder}/a", 0.1), train(f"{folder}/b", 0.2))
    >>> print(comparison.verdict)
    step 0: lr of group 0 is 0.1 in a, 0.2 in b; 2 weights differ after the step, no gradient does
    """
    limit = 0.0 if rtol is None else check_number("compare_runs", "rtol", rtol, 0.0)
    (steps, a_is_cut), (others, b_is_cut) = read_run(a), read_run(b)
    offset = _offset(steps, others)
    others = {s + offset: step for s, step in others.items()}
    shared = [s for s in steps if s in others]
    if not shared:
        raise OptionError(
            f"compare_runs: {a} and {b} have no step in common: {_range(steps)}, and in the second "
            f"{_range(others)}. Record both with the same `every`."
        )
    notes: dict[str, None] = {}
    for name, own, is_cut in ("a", steps, a_is_cut), ("b", others, b_is_cut):
        if is_cut:
            notes[f"the last line of {name}, which was cut as it was written"] = None
        if alone := own.keys() - shared:
            notes[f"what only {name} has, {_range(alone)}"] = None
    aligned = f" (step {max(-offset, 0)} of b is step {max(offset, 0)} of a, by the weights before)"
    aligned *= bool(offset)
    previous = None
    for s in shared:
        if not steps[s].same_bits(others[s]):
            pair = _Steps(s, steps[s], others[s], limit, notes)
            if pair.first is not None:
                text = _Verdict(pair, pair.first, previous, others).text()
                return RunComparison(tuple(pair.rows), pair.first, text + aligned, (*notes,))
        previous = s
    how = ", bit for bit" if rtol is None else f" beyond {rtol:g}"
    text = f"{len(shared)} step{'s' * (len(shared) != 1)} compared: no difference{how}{aligned}"
    return RunComparison((), None, text, (*notes,))


def _range(steps: Iterable[int]) -> str:
    known = sorted(steps)
    return f"step {known[0]}" if len(known) == 1 else f"steps {known[0]} to {known[-1]}"


def _offset(a: Steps, b: Steps) -> int:
    """Return by how much the numbers of steps are greater in `a` than in `b`.

    The first step of the one fits that step of the other before which most weights are the same;
    if several do, that of the same number, or else the first.
    """
    first_a, first_b = min(a), min(b)
    starts = {i: {s: step.start() for s, step in run.items()} for i, run in enumerate((a, b))}
    mine, theirs = starts[0][first_a], starts[1][first_b]
    if not mine.keys() & theirs.keys():
        raise OptionError(
            "compare_runs: these runs are of different models: the first has a weight "
            f"{next(iter(mine), None)!r}, the second {next(iter(theirs), None)!r}, and no weight "
            "has the same name in both."
        )
    pairs = [(first_b, first_b), (first_a, first_a), (first_a, first_b)]
    pairs += [(s, first_b) for s in a] + [(first_a, s) for s in b]
    most, offset = 0, 0 if a.keys() & b.keys() else first_a - first_b
    for s, t in pairs:
        if s in a and t in b:
            n = len(starts[0][s].items() & starts[1][t].items())
            most, offset = (n, s - t) if n > most else (most, offset)
    return offset


class _Steps:
    """A step of both runs.

    Attributes:
        x, y: the step of the first and of the second run.
        rows: in the order in which they were computed.
        first: the row that answers; None if none differs.
        scale_text: of the GradScalers, if their scales differ; otherwise `""`.
    """

    def __init__(
        self, number: int, x: RunStep, y: RunStep, rtol: float, notes: dict[str, None]
    ) -> None:
        self.x, self.y, self._number, self._rtol = x, y, number, rtol
        self._unjudged: dict[str, list[str]] = {}
        scales = [[float(seen.numbers[0]) for key, seen in step.seen.items() if key.what == "scale"]
                  for step in (x, y)]  # fmt: skip
        self._scales = [scale[-1] if scale else 1.0 for scale in scales]
        self._sizes = _sizes(x)
        self.scale_text = ""
        if self._scales[0] != self._scales[1]:
            self.scale_text = "the GradScaler's scale is {:g} in a, {:g} in b".format(*self._scales)
            notes[
                "the last bits of gradients of outputs, which carry another GradScaler's scale"
            ] = None
        is_split = rtol > 0 and _batches(x) != _batches(y)
        if is_split:
            notes["what the layers compute, as the batches of a step are split otherwise"] = None
        keys = [*x.seen, *(key for key in y.seen if key not in x.seen)]
        rows = [self._row(key) for key in keys if key.what in _ORDER or not is_split]
        for name in {**x.settings, **y.settings}:
            values = x.settings.get(name), y.settings.get(name)
            problem = "" if _close(*values, rtol) else "{} in a, {} in b".format(*values)
            rows.append(RunRow(number, "setting", name, differs=bool(problem), problem=problem))
        n, m = len(x.layout.trees), len(y.layout.trees)
        if n != m and not is_split:
            problem = f"{n} in a, {m} in b"
            rows.append(RunRow(number, "batches", "", differs=True, problem=problem))
        self.rows = [row for row in rows if row is not None]
        self.rows.sort(key=lambda r: _ORDER.get(r.what, _FORWARD))
        for run in "ab":
            alone = [r for r in self.rows if r.problem == f"only in {run}" and not r.differs]
            if names := {r.name or "(model)": 0 for r in alone if r.what not in _EXPLAINS}:
                notes[f"what only {run} has in step {number}: {_some(names)}"] = None
        for why, labels in self._unjudged.items():
            notes[f"tensors {why}: {_some(labels)}"] = None
        self.first = self._first()

    def _row(self, key: Key) -> RunRow | None:
        """Return the row of a tensor; None, and a note, if its values are not known."""
        r, q = self.x.seen.get(key), self.y.seen.get(key)
        if key.what == "param_grad" and key.call:  # changed again, as by clipping: in one run alone
            r, q = (seen or step.seen.get(key._replace(call=key.call - 1))
                    for seen, step in ((r, self.x), (q, self.y)))  # fmt: skip
        there = r or q
        assert there is not None
        kinds = (self.x if r else self.y).layout.kinds[key.batch]
        is_forward = key.what in ("input", "output")
        type_ = kinds[Call(key.name, key.call)][0] if is_forward else ""
        place = self._number, key.what, key.name, key.path, type_, key.batch, key.call
        row = partial(RunRow, *place, there.shape)
        if r is None or q is None:
            counts = key.what in _ORDER and key.what != "scale"
            counts &= key.what != "param_grad" or there.numbers[0] != 0
            only = f"only in {'b' if r is None else 'a'}"
            return row(math.inf, counts, only)
        label = f"{key.what} of {key.name or '(model)'}{key.path}"
        if r.hash is None or q.hash is None:
            self._unjudged.setdefault("whose values could not be read", []).append(label)
            return None
        if (r.hash, r.dtype, r.shape) == (q.hash, q.dtype, q.shape):
            return row()
        scales = self._scales if key.what == "grad" else [1.0, 1.0]
        limit = max(self._rtol, _SCALED * (scales[0] != scales[1]))
        error = _rel_error(r, q, self._sizes.get(key.what, 0.0), *scales)
        problem, differs = f"{r.dtype} in a, {q.dtype} in b" * (r.dtype != q.dtype), error > limit
        if r.shape != q.shape:
            problem, differs = f"{_shape(r.shape)} in a, {_shape(q.shape)} in b", True
        elif limit and math.isnan(error):
            self._unjudged.setdefault("whose norm is not finite", []).append(label)
        differs = (differs or not limit) and key.what not in _EXPLAINS
        return row(error, differs, problem)

    def _first(self) -> RunRow | None:
        """Return the first row that differs, or in a forward the output that the rule names."""
        bad = [r for r in self.rows if r.differs]
        top = bad[0] if bad else None
        if top is None or top.what not in ("input", "output"):
            return top
        tree = self.x.layout.trees[top.batch]
        if top.what == "input" and tree.parent[Call(top.name, top.call)] is None:
            return top
        call = tree.first(*(self.differing(what, top.batch) for what in ("input", "output")))
        outputs = (r for r in bad if (r.what, r.batch) == ("output", top.batch))
        return next((r for r in outputs if (r.name, r.call) == call), top)

    def differing(self, what: str, batch: int) -> set[Call]:
        """Return the calls of a batch that have a row of this kind that differs."""
        mine = (r for r in self.rows if r.differs and (r.what, r.batch) == (what, batch))
        return {Call(r.name, r.call) for r in mine}


def _some(names: Iterable[Any], most: int = 4) -> str:
    known = [str(name) for name in names]
    return ", ".join(known[:most]) + f" and {len(known) - most} more" * (len(known) > most)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _close(p: Any, q: Any, rtol: float) -> bool:
    """Return whether two values of a setting are equal, floats to within `rtol`."""
    if isinstance(p, list) and isinstance(q, list) and len(p) == len(q):
        return all(_close(v, w, rtol) for v, w in zip(p, q, strict=True))
    floats = isinstance(p, float) and isinstance(q, float)
    return math.isclose(p, q, rel_tol=rtol) if floats else bool(p == q)


def _batches(x: RunStep) -> list[Any]:
    """Return the shapes that each batch of a step gives to the outermost calls."""
    return [(k[1:], seen.shape) for k, seen in x.seen.items() if k.what == "input"
            and x.layout.trees[k.batch].parent[Call(k.name, k.call)] is None]  # fmt: skip


def _sizes(x: RunStep) -> dict[str, float]:
    """Return the least size per value that differences are relative to, for some kinds of rows.

    The gradient of a key's bias is rounding alone, and a bias is zero at first: what is small is
    measured by the root mean square of all weights, or a tenth of that of all gradients.
    """
    sizes = {}
    for what, share in ("before", 1.0), ("weight", 1.0), ("grad", 0.1), ("param_grad", 0.1):
        mine = [seen for key, seen in x.seen.items() if key.what == what]
        n = sum(math.prod(seen.shape) for seen in mine)
        square = sum(float(seen.numbers[0]) ** 2 for seen in mine)
        sizes[what] = share * math.sqrt(square / n) if n and math.isfinite(square) else 0.0
    return sizes


def _rel_error(r: Seen, q: Seen, size: float, of_r: float, of_q: float) -> float:
    """Return an estimate of `|a − b| / |a|`; infinite for integers, NaN if it is not known.

    Args:
        size: of a value of `a`, at least.
        of_r, of_q: the scales that the tensors carry.
    """
    p, q_ = r.numbers / of_r, q.numbers / of_q
    if not (np.isfinite(p).all() and np.isfinite(q_).all()):
        one = np.isfinite(p).all() != np.isfinite(q_).all()
        return math.inf if one else math.nan
    if not p.any() and not q_.any():  # integers have no projections
        return 0.0 if "float" in r.dtype else math.inf
    gap = max(math.sqrt(((p[1:] - q_[1:]) ** 2).mean()), abs(float(p[0] - q_[0])))
    least = max(float(p[0]), size * math.sqrt(math.prod(r.shape)))
    return gap / least if least else math.inf


class _Verdict:
    """Says in words what the first row that differs may come from: one method for each kind."""

    def __init__(
        self, pair: _Steps, first: RunRow, previous: int | None, others: dict[int, RunStep]
    ) -> None:
        self.pair, self.first, self.tree = pair, first, pair.x.layout.trees
        self._previous, self._others = previous, others
        self._layer = (first.name or "the model") + f" ({first.type})" * bool(first.type)

    def text(self) -> str:
        """Return the verdict."""
        say: str = getattr(self, f"_{self.first.what}")()
        if self.first.what == "before":
            return say
        batch = f", batch {self.first.batch}" * bool(self.first.batch)
        scale = f"; {self.pair.scale_text}" * (bool(self.pair.scale_text))
        return f"step {self.first.step}{batch}: {say}{scale}"

    def _bad(self, what: str) -> list[RunRow]:
        return [r for r in self.pair.rows if r.differs and r.what == what]

    def _share(self, what: str) -> str:
        """Return how many rows of a kind differ: `3 of 12`."""
        return f"{len(self._bad(what))} of {sum(r.what == what for r in self.pair.rows)}"

    def _before(self) -> str:
        s, problem = self.first.step, self.first.problem
        text = f"before step {s}: {self.first.name} differs ({self._share('before')} do): "
        if self._previous is None:
            return text + (problem or "another initialisation, seed or checkpoint, or a part of it")
        if self._previous < s - 1:
            return f"{text}after step {self._previous}, in one that is not recorded (every=1 tells)"
        return (
            f"{text}it was changed in one of the runs after step {s - 1}, outside of the optimizer "
            "(an average of weights, a reset, a clipping of weights)"
        )

    def _input(self) -> str:
        first = self.first
        tree = self.tree[first.batch]
        roots = [c for c in tree.begun if tree.parent[c] is None]
        if Call(first.name, first.call) != roots[0]:
            return (
                f"the input {first.path} of {self._layer} differs, and what was computed before "
                "does not: what runs between the layers, or outside of them"
            )
        bad = [r for r in self._bad("input") if Call(r.name, r.call) == roots[0]]
        text = f"the batch differs ({_some(f'{r.path} {r.problem}'.strip() for r in bad)})"
        for t, other in self._others.items():
            if t != first.step and _batch(other, first) == _batch(self.pair.x, first):
                return f"{text}: a has that of step {t} in b, another order of the data"
        return f"{text}: the data, their order, or how they are split"

    def _output(self) -> str:
        first, call = self.first, Call(self.first.name, self.first.call)
        path = f" {first.path}" * bool(first.path)
        text = f"the output{path} of {self._layer} differs, its inputs do not"
        kinds = [list(step.layout.kinds[first.batch][call]) for step in (self.pair.x, self.pair.y)]
        says = [set(kind[2].split(", ")) for kind in kinds]
        if says[0] != says[1]:  # as in `eps=1e-05 in a, eps=1e-06 in b`
            kinds[0][2], kinds[1][2] = (
                ", ".join(v for v in kind[2].split(", ") if v not in other) or "nothing"
                for kind, other in zip(kinds, says[::-1], strict=True)
            )
        for p, q in zip(*kinds, strict=True):
            if p != q:
                modes = {True: "training mode", False: "evaluation mode"}
                return f"{text}: {modes.get(p, p)} in a, {modes.get(q, q)} in b"
        place = self.tree[first.batch].place(call, self.pair.differing("input", first.batch))
        text += f"; it begins {place}" * bool(place)
        if first.problem:
            return f"{text}: {first.problem}"
        for key, seen in self.pair.x.seen.items():
            other = self.pair.y.seen.get(key)
            if (
                key.what == "random"
                and key.batch <= first.batch
                and other
                and other.hash != seen.hash
            ):
                when = f"batch {key.batch}" if key.batch else "the step"
                return (
                    f"{text}: other random numbers, if it draws any (the random state {key.name} "
                    f"differs before {when}: another seed, or a number more or less was drawn)"
                )
        moved = ", weights that were changed since the step began" * bool(first.batch)
        return (
            f"{text}: another computation (code, kernel, precision, an attribute){moved}, or one "
            "that cannot be repeated"
        )

    def _loss(self) -> str:
        return "the loss differs, what the model returns does not: labels, or the loss function"

    def _batches(self) -> str:
        return (
            f"it has {self.first.problem} batches: a step was skipped (by a GradScaler?), or "
            "gradients are accumulated otherwise"
        )

    def _grad(self) -> str:
        grads = [r for r in self.pair.rows if r.what == "grad"]
        at = grads.index(self.first)
        text = f"the gradient of the output of {self.first.name or 'the model'} differs, "
        if at and self.first.call <= grads[at - 1].call:
            before = grads[at - 1].name
            return f"{text}that of {before} does not: the backward of what runs between them"
        loss = "; the loss differs too" * bool(self._bad("loss"))
        return (
            f"{text}the first of a backward{self._factor('grad')}, and no output does{loss}: "
            "labels, the loss function, or a scale of the loss"
        )

    def _param_grad(self) -> str:
        text = f"the gradient of {self.first.name} differs ({self._share('param_grad')} do"
        text += f"{self._factor('param_grad')})"
        if self.first.problem:
            return f"{text}: it is {self.first.problem}"
        if not any(r.what == "grad" for r in self.pair.rows):
            return text
        if len(self._bad("param_grad")) == 1:
            return f"{text}, those of outputs do not: the backward of that layer, or a change of it"
        return (
            f"{text}, those of outputs do not: what changes gradients before the step (clipping, "
            "unscaling, an average over processes, gradients left from before)"
        )

    def _setting(self) -> str:
        text = "; ".join(f"{r.name} is {r.problem}" for r in self._bad("setting")[:4])
        n = len(self._bad("weight"))
        after = f"{n} weight{'s differ' if n > 1 else ' differs'} after the step"
        return f"{text}; {after if n else 'no weight differs yet'}, no gradient does"

    def _weight(self) -> str:
        name, n = self.first.name, len(self._bad("weight"))
        text = f"weight {name} differs after the step"
        if not any(r.name == name for r in self.pair.rows if r.what == "param_grad"):
            return f"{text}, and it has no gradient: it was changed outside of the optimizer"
        if n == 1:
            return (
                f"{text}, its gradient does not: the optimizer's state, or a change outside of it"
            )
        return (
            f"{text} ({self._share('weight')} do), its gradient does not: the optimizer's state "
            "(resumed without it?) or code"
        )

    def _buffer(self) -> str:
        return f"buffer {self.first.name} differs after the step, no weight does"

    def _factor(self, what: str) -> str:
        """Return `, all by the factor 2` if all gradients of a kind differ by that alone."""
        factors = []
        for key, seen in self.pair.x.seen.items():
            other = self.pair.y.seen.get(key)
            if key.what == what and other is not None and seen.numbers[0]:
                factor = other.numbers[0] / seen.numbers[0]
                factors.append(factor)
                gap = other.numbers - factor * seen.numbers
                if not np.abs(gap).max() <= 1e-4 * other.numbers[0]:
                    return ""
        mid = float(np.median(factors)) if factors else 1.0
        same = abs(mid - 1) > 1e-4 and all(abs(factor - mid) < 1e-4 * mid for factor in factors)
        return f", all by the factor {mid:.6g}" * same


def _batch(step: RunStep, row: RunRow) -> list[Any]:
    """Return the inputs of a call in a batch."""
    place = row.batch, row.name, row.call
    mine = (seen for k, seen in step.seen.items() if k.what == "input" and k[1:4] == place)
    return [(seen.hash, seen.dtype, seen.shape) for seen in mine]
