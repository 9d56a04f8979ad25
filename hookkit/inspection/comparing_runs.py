"""`compare_runs` finds the step and the layer in which two trainings begin to differ, and why.

Each step is compared row by row between the runs, in the order of computation (`_Steps`). The first
row that differs is found by the rule of `first_difference`, and `_verdict` says in words what may
cause it.
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

# the order in which a step computes kinds of rows; all other kinds belong to a batch (`_BATCH`)
_ORDER = {"before": 0, "batches": 2, "param_grad": 3, "setting": 4, "weight": 5, "buffer": 6}
_BATCH = 1
_COMPUTED = ("input", "output", "loss", "grad", "param_grad")  # by modules
_ROUNDING = "depends on a gradient that may be rounding, of which Adam makes whole steps"
_EXPLAINS = ("random", "scale")  # these rows may explain a difference, but are none themselves

Steps = Mapping[int, RunStep]
Notes = dict[str, dict[str, None]]
"""The reason why something is not judged → the labels of what is not judged."""


@dataclass(frozen=True)
class RunRow:
    """Compares one tensor or hyperparameter of one step in both runs.

    Attributes:
        step: the number of the step in the first run.
        what: `"before"` (a weight or buffer before the step), `"input"`, `"output"`, `"loss"`,
            `"grad"` (the gradient of an output), `"batches"` (how many the step has),
            `"param_grad"`, `"setting"` (a hyperparameter), `"weight"` or `"buffer"` (after the
            step).
        name: the name of the layer, the parameter or the hyperparameter.
        path: the path of the tensor in the layer's input or output; `""` for the whole.
        type: the layer's class.
        batch: the number of the batch in the step.
        call: the number of the layer's call in the batch; for a gradient, how many came to this
            place before it in the step.
        rel_error: `|a − b| / |a|`, estimated within a factor of two. For weights and gradients
            `|a|` is at least the typical size in the step (a tenth of it for gradients). Infinite
            for integers that differ, NaN if it is not known.
        differs: whether the difference is beyond the tolerance.
        problem: the difference in words, if it is not a number.
    """

    step: int
    what: str
    name: str
    path: str = ""
    type: str = ""
    batch: int = 0
    call: int = 0
    rel_error: float = 0.0
    differs: bool = False
    problem: str = ""

    @property
    def label(self) -> str:
        """Return the row in words, such as `output blocks.1.norm (LayerNorm)`."""
        more = f" ({self.type})" * bool(self.type)
        more += f", batch {self.batch}" * bool(self.batch) + f", call {self.call}" * bool(self.call)
        return f"{self.what.replace('_', ' ')} {self.name or '(model)'}{self.path}{more}"


@dataclass(frozen=True, repr=False)
class RunComparison(Localisation):
    """Holds where two trainings begin to differ, as `compare_runs` found it.

    Attributes:
        rows: all rows of the first step in which a row differs; none if the runs agree.
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
        """Return the verdict, the first difference with its neighbours, and what is not judged."""
        lines = [self.verdict]
        if self.first is not None:
            at = self.rows.index(self.first)
            near = self.rows[max(0, at - 2) : at + 3]
            width = max(len(r.label) for r in near)
            for r in near:
                found = r.problem or (f"rel_error {r.rel_error:.2g}" if r.rel_error else "same")
                lines.append(f"{'→' if r is self.first else ' '} {r.label:{width}}  {found}")
            n = sum(r.differs for r in self.rows)
            lines.append(f"{n} of {len(self.rows)} rows of step {self.first.step} differ")
        return "\n".join([*lines, *wrap([f"Not judged: {t}" for t in self.not_judged], 100, ". ")])


def compare_runs(a: str | Path, b: str | Path, *, rtol: float | None = None) -> RunComparison:
    """Find the first step, layer and tensor in which two recorded trainings differ.

    A `Fingerprint` records a training. A resumed training is aligned with the other one by the
    weights that it begins with.

    Args:
        a, b: the files.
        rtol: the largest `RunRow.rel_error` that counts as equal. None compares bit for bit, for
            trainings on the same machine. Use 1e-3 for other hardware, another number of processes,
            or batches that are split in another way; in this last case only the gradients of
            parameters and the weights are compared. A weight is not judged if its gradient is so
            small that it may be rounding: Adam makes whole steps of that too.

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
    notes: Notes = {}
    for name, own, is_cut in ("a", steps, a_is_cut), ("b", others, b_is_cut):
        if is_cut:
            notes["cut as it was written"] = {f"the last line of {name}": None}
        if alone := own.keys() - shared:
            notes[f"only {name} has"] = {_range(alone): None}
    rows, first, verdict, previous = list[RunRow](), None, "", None
    noisy = set[str]()
    for s in shared:
        for why in _unseen(steps[s], others[s]):
            notes.setdefault(why, {})[f"step {s}"] = None
        if not steps[s].same_bits(others[s]):
            pair = _Steps(s, steps[s], others[s], limit, notes, noisy)
            if (first := pair.first) is not None:
                rows = [r for r in pair.rows if r.what not in _EXPLAINS]
                verdict = _verdict(pair, first, previous)
                break
        previous = s
    if first is None:
        how = ", bit for bit" if rtol is None else f" beyond {rtol:g}"
        verdict = f"{len(shared)} step{'s' * (len(shared) != 1)} compared: no difference{how}"
    if offset:
        pair_of = f"step {max(-offset, 0)} of b is step {max(offset, 0)} of a"
        verdict += f" ({pair_of}, by the weights before)"
    not_judged = tuple(f"{why}: {_some(labels)}" for why, labels in notes.items())
    return RunComparison(tuple(rows), first, verdict, not_judged)


def _range(steps: Iterable[int]) -> str:
    known = sorted(steps)
    return f"step {known[0]}" if len(known) == 1 else f"steps {known[0]} to {known[-1]}"


def _some(names: Iterable[str]) -> str:
    first, more = [*names][:4], [*names][4:]
    return ", ".join(first) + f" and {len(more)} more" * bool(more)


def _offset(a: Steps, b: Steps) -> int:
    """Return by how much the numbers of steps are greater in `a` than in `b`.

    The first step of one run is aligned with the step of the other before which most weights are
    equal. Among several such steps it takes the one of the same number, or the first.
    """
    first_a, first_b = min(a), min(b)
    mine, theirs = ({s: step.start() for s, step in run.items()} for run in (a, b))
    if not mine[first_a].keys() & theirs[first_b].keys():
        raise OptionError(
            "compare_runs: these runs are of different models: no weight has the same name in both."
        )
    pairs = [(first_b, first_b), (first_a, first_a), (first_a, first_b)]
    pairs += [(s, first_b) for s in a] + [(first_a, s) for s in b]
    most, offset = 0, 0 if a.keys() & b.keys() else first_a - first_b
    for s, t in pairs:
        if s in a and t in b and (n := len(mine[s].items() & theirs[t].items())) > most:
            most, offset = n, s - t
    return offset


class _Steps:
    """Compares a step of both runs.

    Attributes:
        x, y: the step of the first and of the second run.
        rows: in the order in which the step computed them.
        first: the row that answers; None if no row differs.
        scales: of the GradScalers, in words, if they differ; otherwise `""`.
        fed: the modules that take what a layer with a weight in `noisy` returns.
    """

    def __init__(
        self, number: int, x: RunStep, y: RunStep, rtol: float, notes: Notes, noisy: set[str]
    ) -> None:
        self.x, self.y, self._number, self._rtol, self._notes = x, y, number, rtol, notes
        self._sizes = _sizes(x)
        noisy.update(self._noise())
        self._noisy = noisy
        inner = {k.name.rpartition(".")[0] for k in x.seen if k.what == "weight"}
        layers = {name.rpartition(".")[0] for name in noisy}
        layers = {m for m in layers if not any(i != m and _is_in(i, m) for i in inner)}
        moved = {r.hash for k, r in x.seen.items() if k.what == "output" and k.name in layers}
        self._moved = moved - {None}
        self.fed = {k.name for k, r in x.seen.items() if k.what == "input" and r.hash in moved}
        by = [[float(s.numbers[0]) for k, s in step.seen.items() if k.what == "scale"] or [1.0]
              for step in (x, y)]  # fmt: skip
        self.scales = f"{by[0][-1]:g} in a, {by[1][-1]:g} in b" if by[0] != by[1] else ""
        is_unseen = bool(_unseen(x, y))
        is_split = rtol > 0 and not is_unseen and _given(x) != _given(y)
        rows = list[RunRow | None]()
        for key in [*x.seen, *(key for key in y.seen if key not in x.seen)]:
            if key.what == "grad" and self.scales:
                self._note("they carry other scales of a GradScaler", "gradients of outputs")
            elif is_split and key.what not in _ORDER:
                self._note("the batches of a step are split otherwise", "what layers compute")
            else:
                rows.append(self._row(key))
        settings = {name: (x.settings.get(name), y.settings.get(name))
                    for name in {**x.settings, **y.settings}}  # fmt: skip
        if not is_split and not is_unseen:
            n, m = len(x.layout.trees), len(y.layout.trees)
            rows.append(self._setting("batches", "of the step", n, m))
        rows += [self._setting("setting", name, p, q) for name, (p, q) in settings.items()]
        self.rows = [row for row in rows if row is not None]
        weights = [r for r in self.rows if r.what == "weight" and r.differs]
        if rtol and all(self._may_be_rounding(r.name) for r in weights):
            noisy.update(r.name for r in weights)
            for r in weights:
                self._note(_ROUNDING, r.label)
                self.rows.remove(r)
        self.rows.sort(key=lambda r: _ORDER.get(r.what, _BATCH))
        self.first = self._first()

    def _note(self, why: str, what: str) -> None:
        self._notes.setdefault(why, {})[what] = None

    def _noise(self) -> set[str]:
        """Return the parameters whose gradients differ, and are too small for that to count.

        The true gradient of a bias before a batch norm, or of a key, is 0. What is computed is
        rounding, of which Adam makes steps as large as all others. The weight and the layer's
        output differ then, until the batch norm or the softmax takes the difference away.
        """
        found = set[str]()
        for key, r in self.x.seen.items():
            q = self.y.seen.get(key)
            if key.what == "param_grad" and self._rtol and q is not None and r.shape == q.shape:
                own, beside = (_rel_error(r, q, s) for s in (0.0, self._sizes["param_grad"]))
                if r.hash != q.hash and beside <= self._rtol < own:
                    found.add(key.name)
        return found

    def _may_be_rounding(self, name: str) -> bool:
        """Return whether Adam may have moved a vector apart by rounding in a part of its gradient.

        The bias of queries, keys and values may be one parameter, of which a third is the keys'.
        Adam moves a value by about the learning rate, so two runs part by twice that in a step;
        four times, because the distances are estimates.
        """
        keys = [Key(what, 0, name, 0, "") for what in ("before", "weight", "param_grad")]
        if not all(key in self.x.seen and key in self.y.seen for key in keys):
            return False
        before, weight, grad = ((self.x.seen[key], self.y.seen[key]) for key in keys)
        settings = self.x.settings.items()
        rates = [v for k, v in settings if k.startswith("lr of") and isinstance(v, int | float)]
        if len(weight[0].shape) != 1 or grad[0].hash == grad[1].hash or not rates:
            return False
        most = 4 * max(rates) * math.sqrt(weight[0].shape[0])
        return _gap(*weight) - _gap(*before) <= most

    def _is_noise(self, key: Key, r: Seen) -> bool:
        """Return whether a row that differs may do so by a weight in `noisy` alone."""
        if key.what in ("input", "output"):
            return r.hash in self._moved
        is_average = key.name.rpartition(".")[0] in self.fed  # a batch norm's, of its inputs
        is_weight = key.name in self._noisy
        return key.what in ("before", "weight", "buffer") and (is_weight or is_average)

    def _setting(self, what: str, name: str, p: Any, q: Any) -> RunRow:
        floats = isinstance(p, float) and isinstance(q, float)
        same = math.isclose(p, q, rel_tol=self._rtol) if floats else p == q
        problem = "" if same else f"{p} in a, {q} in b"
        return RunRow(self._number, what, name, differs=not same, problem=problem)

    def _row(self, key: Key) -> RunRow | None:
        """Return the row of a tensor; None, and a note, if it cannot be compared."""
        r, q = self.x.seen.get(key), self.y.seen.get(key)
        # a gradient that was changed again, as by clipping, may have this row in one run only
        if key.what == "param_grad" and key.call:
            before = key._replace(call=key.call - 1)
            r, q = r or self.x.seen.get(before), q or self.y.seen.get(before)
        there = r or q
        assert there is not None
        type_ = ""
        if key.what in ("input", "output"):
            type_ = (self.x if r else self.y).layout.kinds[key.batch][Call(key.name, key.call)][0]
        row = partial(
            RunRow, self._number, key.what, key.name, key.path, type_, key.batch, key.call
        )
        if r is None or q is None:
            run = "b" if r is None else "a"
            if key.what in _ORDER and (key.what != "param_grad" or there.numbers[0]):
                return row(math.inf, True, f"only in {run}")
            if key.what not in _EXPLAINS:
                self._note(f"only {run} has", key.name or "(model)")
            return None
        if r.hash is None or q.hash is None:
            self._note("values that could not be read", row().label)
            return None
        if (r.hash, r.dtype, r.shape) == (q.hash, q.dtype, q.shape):
            return row()
        error = _rel_error(r, q, self._sizes.get(key.what, 0.0))
        problem = f"{r.dtype} in a, {q.dtype} in b" * (r.dtype != q.dtype)
        if r.shape != q.shape:
            shapes = ["×".join(map(str, s.shape)) or "scalar" for s in (r, q)]
            return row(math.inf, True, "{} in a, {} in b".format(*shapes))
        if self._rtol and math.isnan(error):
            self._note("norms that are not finite", row().label)
        differs = (error > self._rtol or not self._rtol) and key.what not in _EXPLAINS
        if differs and self._rtol and self._is_noise(key, r):
            self._note(_ROUNDING, row().label)
            return None
        return row(error, differs, problem)

    def _first(self) -> RunRow | None:
        """Return the first row that differs; in a forward, the output that the rule finds."""
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
        """Return the calls of a batch in which a row of the kind `what` differs."""
        mine = (r for r in self.rows if r.differs and (r.what, r.batch) == (what, batch))
        return {Call(r.name, r.call) for r in mine}


def _is_in(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _unseen(x: RunStep, y: RunStep) -> list[str]:
    """Return for each run whose step has no forward a sentence that says so."""
    runs = [(name, step.layout) for name, step in (("a", x), ("b", y))]
    mode = " (the model was in evaluation mode)"
    return [f"no forward was recorded in {name}{mode * (not layout.training)}"
            for name, layout in runs if not any(tree.begun for tree in layout.trees)]  # fmt: skip


def _given(x: RunStep) -> list[Any]:
    """Return the shapes of the inputs of the outermost calls in each batch of a step."""
    return [(k[1:], seen.shape) for k, seen in x.seen.items() if k.what == "input"
            and x.layout.trees[k.batch].parent[Call(k.name, k.call)] is None]  # fmt: skip


def _sizes(x: RunStep) -> dict[str, float]:
    """Return kind of row → the smallest size per value that a difference is divided by.

    Some tensors are tiny: a new bias is zero, and the gradient of a key's bias is only rounding. So
    they are measured by the root mean square of all weights, or a tenth of that of all gradients.
    """
    sizes = {}
    for what, share in ("before", 1.0), ("weight", 1.0), ("grad", 0.1), ("param_grad", 0.1):
        mine = [seen for key, seen in x.seen.items() if key.what == what]
        n = sum(math.prod(seen.shape) for seen in mine)
        square = sum(float(seen.numbers[0]) ** 2 for seen in mine)
        sizes[what] = share * math.sqrt(square / n) if n and math.isfinite(square) else 0.0
    return sizes


def _rel_error(r: Seen, q: Seen, size: float) -> float:
    """Return an estimate of `|a − b| / |a|`; infinite for integers, NaN if it is not known.

    Args:
        r, q: `a` and `b`.
        size: the least size of a value of `a` that is assumed.
    """
    p, q_ = r.numbers, q.numbers
    if not (np.isfinite(p).all() and np.isfinite(q_).all()):
        return math.inf if np.isfinite(p).all() != np.isfinite(q_).all() else math.nan
    if not p.any() and not q_.any():  # integers have no projections
        return 0.0 if "float" in r.dtype else math.inf
    least = max(float(p[0]), size * math.sqrt(math.prod(r.shape)))
    return _gap(r, q) / least if least else math.inf


def _gap(r: Seen, q: Seen) -> float:
    """Return an estimate of `|a − b|`."""
    p, q_ = r.numbers, q.numbers
    return max(math.sqrt(((p[1:] - q_[1:]) ** 2).mean()), abs(float(p[0] - q_[0])))


def _verdict(pair: _Steps, first: RunRow, previous: int | None) -> str:
    """Return in words what may cause the first row that differs."""
    bad = [r for r in pair.rows if r.differs and r.what == first.what]
    share = f"{len(bad)} of {sum(r.what == first.what for r in pair.rows)} do"
    layer = (first.name or "the model") + f" ({first.type})" * bool(first.type)
    step = f"step {first.step}" + f", batch {first.batch}" * bool(first.batch)
    unseen = _unseen(pair.x, pair.y)
    scales = f"; the GradScaler's scale is {pair.scales}" * bool(pair.scales)
    if first.what == "before":
        why = first.problem or "another initialisation, seed or checkpoint, or a part of it"
        if previous is not None:
            why = f"after step {previous}, in one that is not recorded (every=1 tells)"
        if previous == first.step - 1:
            why = f"it was changed in one of the runs after step {previous}, outside of the "
            why += "optimizer (an average of weights, a reset, a clipping of weights)"
        return f"before {step}: {first.name} differs ({share}): {why}"
    if first.what == "input":
        text = _of_input(pair, first, layer)
    elif first.what == "output":
        text = _of_output(pair, first, layer)
    elif first.what == "loss":
        text = "the loss differs"
        if not unseen:
            text += ", what the model returns does not: labels, or the loss function"
    elif first.what == "grad":
        grads = [r for r in pair.rows if r.what == "grad"]
        before = grads[max(grads.index(first) - 1, 0)]
        text = f"the gradient of the output of {first.name or 'the model'} differs, "
        if before is not first and first.call <= before.call:
            text += f"that of {before.name} does not: the backward of what runs between them"
        else:
            loss = any(r.differs and r.what == "loss" for r in pair.rows)
            text += f"the first of a backward{_factor(pair, 'grad')}, and no output does"
            text += "; the loss differs too" * loss
            text += ": labels, the loss function, or a scale of the loss"
    elif first.what == "batches":
        text = f"the number of batches is {first.problem}: a step was skipped (by a GradScaler?), "
        text += "gradients are accumulated otherwise, or a model was in evaluation mode"
    elif first.what == "param_grad":
        text = f"the gradient of {first.name} differs ({share}{_factor(pair, 'param_grad')})"
        text += f": it is {first.problem}" * bool(first.problem)
        if any(r.what == "grad" for r in pair.rows) and not first.problem:
            why = "what changes gradients before the step (clipping, unscaling, an average over "
            why += "processes, gradients left from before)"
            why = why if len(bad) > 1 else "the backward of that layer, or a change of it"
            text += f", those of outputs do not: {why}"
    elif first.what == "setting":
        n = sum(r.differs and r.what == "weight" for r in pair.rows)
        after = f"{n} weight{'s differ' if n > 1 else ' differs'} after the step"
        text = "; ".join(f"{r.name} is {r.problem}" for r in bad[:4])
        text += f"; {after if n else 'no weight differs yet'}, no gradient does"
    elif first.what == "buffer":
        text = f"buffer {first.name} differs after the step, no weight does"
    else:
        text = f"weight {first.name} differs after the step ({share}), its gradient does not: "
        text += "the optimizer's state (resumed without it?) or code, or a change outside of it"
        if not any((r.what, r.name) == ("param_grad", first.name) for r in pair.rows):
            text = f"weight {first.name} differs after the step, and it has no gradient: it was "
            text += "changed outside of the optimizer"
    if first.what in _COMPUTED and (pair.x.layout.selected or pair.y.layout.selected):
        text += "; or a module that is not recorded (modules=) makes the difference"
    if len(unseen) == 1 and pair.x.layout.training != pair.y.layout.training:
        runs = "ab" if pair.y.layout.training else "ba"
        mode = "the model was in evaluation mode in {}, in training mode in {}".format(*runs)
        text = f"{mode}, so no forward was recorded in {runs[0]}; after it, {text}"
    elif unseen:
        text += "; no forward was recorded, so the layer is not known"
    return f"{step}: {text}{scales}"


def _of_input(pair: _Steps, first: RunRow, layer: str) -> str:
    tree = pair.x.layout.trees[first.batch]
    root = next(call for call in tree.begun if tree.parent[call] is None)
    if Call(first.name, first.call) != root:
        before = "judged" if pair.fed else "computed"
        return (
            f"the input {first.path} of {layer} differs, and what was {before} before does not: "
            "what runs between the layers, or outside of them"
        )

    bad = [r for r in pair.rows if r.differs and r.what == "input" and r.batch == first.batch]
    paths = [f"{r.path} {r.problem}".strip() for r in bad if (r.name, r.call) == root]
    return f"the batch differs ({_some(paths)}): the data, their order, or how they are split"


def _of_output(pair: _Steps, first: RunRow, layer: str) -> str:
    call = Call(first.name, first.call)
    path = f" {first.path}" * bool(first.path)
    text = f"the output{path} of {layer} differs, its inputs do not"
    inputs = {(r.name, r.call, r.batch) for r in pair.rows if r.what == "input"}
    if first.name in pair.fed and (*call, first.batch) not in inputs:
        text = f"the output{path} of {layer} differs, its inputs were not judged"
    (type_a, mode_a, says_a), (type_b, mode_b, says_b) = (
        step.layout.kinds[first.batch][call] for step in (pair.x, pair.y)
    )
    if type_a != type_b:
        return f"{text}: {type_a} in a, {type_b} in b"
    if mode_a != mode_b:
        modes = "training mode in {}, evaluation mode in {}".format(*("ab" if mode_a else "ba"))
        return f"{text}: {modes}"
    if says_a != says_b:  # as in `eps=1e-05 in a, eps=1e-06 in b`
        parts = [says.split(", ") for says in (says_a, says_b)]
        own = [", ".join(v for v in parts[i] if v not in parts[1 - i]) or "nothing" for i in (0, 1)]
        return "{}: {} in a, {} in b".format(text, *own)
    place = pair.x.layout.trees[first.batch].place(call, pair.differing("input", first.batch))
    text += f"; it begins {place}" * bool(place)
    if first.problem:
        return f"{text}: {first.problem}"
    for r in pair.rows:
        if r.what == "random" and r.batch <= first.batch and r.rel_error:
            when = f"batch {r.batch}" if r.batch else "the step"
            return (
                f"{text}: other random numbers, if it draws any (the random state {r.name} differs "
                f"before {when}: another seed, or a number more or less was drawn)"
            )
    moved = ", weights that were changed since the step began" * bool(first.batch)
    return (
        f"{text}: another computation (code, kernel, precision, an attribute){moved}, or one that "
        "cannot be repeated"
    )


def _factor(pair: _Steps, what: str) -> str:
    """Return `, all by the factor 2` if all gradients of a kind differ only by a factor."""
    factors = []
    for key, r in pair.x.seen.items():
        q = pair.y.seen.get(key)
        if key.what == what and q is not None and r.numbers[0]:
            factors.append(q.numbers[0] / r.numbers[0])
            if not np.allclose(q.numbers, factors[0] * r.numbers, rtol=0, atol=1e-4 * q.numbers[0]):
                return ""
    if not factors or abs(factors[0] - 1) < 1e-4:
        return ""
    return f", all by the factor {factors[0]:.6g}"
