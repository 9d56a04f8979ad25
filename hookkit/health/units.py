"""Rules on units that give nothing: dead, dormant, saturated.

Whether a unit is dead shows in a ReLU's output. Most records have no ReLU in them, since a ReLU has
no parameters; then it shows in what the ReLU is given: a unit that is never above 0 there. That a
ReLU does read a layer is known

recorded   where the ReLU itself was recorded (`include_paramless=True`),
consumer   from `meta["feeds"]`: per row the class of the activation that alone reads its output,
           "" where something else does, None where it is not known,
gradients  where at least so large a share of the layer's gradients is exactly 0 at every record,

and otherwise not at all: a note, unless the whole layer is below 0 and the loss does not fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hookkit.health import reading as read
from hookkit.health.diagnosis import SAGEMAKER, UNITS_UNSEEN, Finding, Rule, rule
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Ints, Record

# Shares of a layer's units. SageMaker Debugger, DeadRelu: 50 % of a layer; the others: measured.
NOTED, MANY, MOST = 0.2, 0.5, 0.9
# Karpathy, makemore part 3: |tanh| above 0.97; the same for a sigmoid is 0.47 away from 1/2
TANH_END, SIGMOID_END = 0.97, 0.47
# A gate's mean is so far from 1/2, and its values differ by no more than this (measured)
SHUT, ALIKE = 0.45, 0.05

_NOT_RELU = ("GELU", "SiLU", "ELU", "LeakyReLU", "Mish", "Tanh", "Sigmoid", "Softplus")
_DORMANT_TYPES = (*read.RELU_LIKE, "GELU", "SiLU", "ELU", "LeakyReLU", "Mish", "Tanh")


@rule(
    needs=("activations",),
    threshold="over 50 % of a layer's units",
    source=f"{SAGEMAKER}, DeadRelu: 50 % of a layer",
    cause="a learning rate that is too high",
    fix="divide the learning rate by 10, or use nn.LeakyReLU or nn.GELU",
)
def dead(run: RunView) -> Iterator[Finding]:
    """Units behind a ReLU that give nothing throughout the later half of the run.

    Three groups of layers: those that a ReLU reads for sure, those where zeros among the gradients
    prove it, and those where it stays a guess. A layer whose weight still gets a gradient is not
    dead, whatever its outputs look like.
    """
    record = run.activations
    relu, feeds = read.are(record.types, read.RELU_LIKE), read.meta(record, "feeds", None)
    sure = can_die(record)
    maybe = ~relu.any() & _may_feed_a_relu(record, feeds)
    share, born = _dead_shares(run, record, relu, sure | maybe)
    proved = maybe & (share > NOTED) & (_zero_gradients(run, record) >= share)
    units = "a ReLU layer's units" if relu.any() else "the units that a ReLU is given"
    by_gradients = "the units that a ReLU is given (as many gradients are exactly 0)"
    found = [*_dead_layers(run, sure, share, born, units)]
    found += _dead_layers(run, proved, share, born, by_gradients)
    found += _maybe_dead(run, np.flatnonzero(maybe & ~proved & (share > MANY)), share)
    yield from found
    known = any(consumer is not None for consumer in feeds)
    if not found and not known and not relu.any():
        raise read.Missing("no ReLU among the layers (include_paramless=True records them)")
    unseen = not found and known and "dead" not in record.values
    if unseen and (sure & (_largest_possible_share(run, record, relu) > MANY)).any():
        raise read.Missing(UNITS_UNSEEN)


def can_die(record: Record) -> Bools:
    """(n_layers,) where a unit that is never above 0 is dead for sure, each ReLU counted once.

    A ReLU's own row; of one that is no row itself that of the layer that it alone reads.
    """
    relu = read.are(record.types, read.RELU_LIKE)
    feeds = read.are(read.meta(record, "feeds", None), read.RELU_LIKE)
    return np.asarray(relu | (feeds & ~np.append(relu[1:], False)), bool)


def can_be_dormant(record: Record) -> Bools:
    """(n_layers,) which rows are outputs of activations, whose dormant units are judged."""
    return read.are(record.types, _DORMANT_TYPES)


_BORN = dead.but(
    cause="biases (or weights) that began so that no input reaches these units",
    fix="begin with biases of 0, torch.nn.init.zeros_(layer.bias), or use nn.LeakyReLU or nn.GELU",
)

_LOST = dead.but(cause="capacity that was lost, or that was not needed")

_UNPROVED = dead.but(
    source=f"{dead.source}; a ReLU is not proved",
    cause="dead units, if a ReLU reads this layer: biases that began so, or a learning rate that "
    "is too high",
    fix="record what proves it: GradientStats(), or the ReLU itself (include_paramless=True)",
)


def _dead_layers(
    run: RunView, which: Bools, share: Floats, born: Floats, units: str
) -> Iterator[Finding]:
    """Findings about layers that a ReLU reads, the worst first."""
    for severity, low, hit in _graded(which, share):
        at_first = (born[hit] > low).all()
        what = f"up to {read.percent(share[hit].max())} of {units} are never above 0"
        what += ", from the first step on" if at_first else ", and more than at first"
        harmless = run.learns or run.excused
        lost = severity == "warning" and harmless and not at_first
        where = read.where(run.activations, hit, read.last_half(run.activations))
        says = _BORN if at_first else _LOST if lost else dead
        line = f"over {100 * low:.0f} % of a layer's units"
        line += f", while the loss {'falls' if run.learns else 'need not fall'}" * bool(lost)
        here = says.but(threshold=line, source=_source(says, low))
        yield here.found("note" if lost else severity, what, *where)


def _source(says: Rule, low: float) -> str:
    return says.source if low == MANY else f"hookkit, measured; {says.source}"


def _maybe_dead(run: RunView, rows: Ints, share: Floats) -> Iterator[Finding]:
    """One finding about layers of which it is not known whether a ReLU reads them."""
    if len(rows):
        most = share[rows].max()
        what = f"up to {read.percent(most)} of a layer's units never give anything above 0: a ReLU "
        what += "behind them lets nothing through"
        where = read.where(run.activations, rows, read.last_half(run.activations))
        if most > MOST and run.fails:
            line = "over 90 % of a layer's units, while the loss does not fall"
            here = _UNPROVED.but(threshold=line, source=_source(_UNPROVED, MOST))
            yield here.found("warning", what, *where)
        else:
            yield _UNPROVED.found("note", what, *where)


def _graded(which: Bools, share: Floats) -> Iterator[tuple[str, float, Ints]]:
    """By severity, the worst first: the least share that has it, and the rows."""
    grades = ("error", MOST, np.inf), ("warning", MANY, MOST), ("note", NOTED, MANY)
    for severity, low, high in grades:
        hit = np.flatnonzero(which & (share > low) & (share <= high))
        if len(hit):
            yield severity, low, hit


def _smallest(table: Floats) -> Floats:
    """(n_layers,) the smallest known value of each row, NaN where none is known."""
    least = np.where(np.isfinite(table), table, np.inf).min(axis=1, initial=np.inf)
    return np.where(np.isfinite(least), least, np.nan)


def _may_feed_a_relu(record: Record, feeds: npt.NDArray[Any]) -> Bools:
    """Rows that a ReLU may read: not before a norm or another activation, and not the last."""
    may = [
        (this in read.PRE_ACTIVATION or this.startswith("BatchNorm"))
        and "Norm" not in behind
        and behind not in _NOT_RELU
        and consumer is None
        for (this, behind), consumer in zip(pairwise(record.types), feeds, strict=False)
    ]
    return np.array([*may, False], bool)


def _dead_shares(run: RunView, record: Record, relu: Bools, which: Bools) -> tuple[Floats, Floats]:
    """(n_layers,) shares of units never above 0: throughout the later half; in the first records.

    0 for a layer that gives nothing above 0 and is not dead, by the gradient of its weight: one in
    the later half means that something reads the layer's negative outputs. One that was always 0 is
    reported as such, by `zero_gradient`.
    """
    whole = np.zeros((len(relu), len(record)), bool)
    if relu.any():
        whole[relu] = read.table(record, "zero")[relu] >= 1
    if (fed := which & ~relu).any():
        whole[fed] = read.table(record, "max")[fed] <= 0
    # over a window of records before this one; `dead` in older records
    units = record.values.get("never_positive", record.values.get("dead"))
    table = np.asarray(whole if units is None else np.fmax(units, whole), np.float64)
    share, params = _smallest(table[:, read.last_half(record)]), run.recorded.params
    if params is not None and "grad_norm" in params.values:
        grads = params.values["grad_norm"]
        late = np.nan_to_num(grads[:, read.last_half(params)]).any(axis=1)
        known, never = np.isfinite(grads).any(axis=1), ~np.nan_to_num(grads).any(axis=1)
        reads = np.asarray(known & (late | never))
        alive = {name for name, read_ in zip(params.names, reads, strict=True) if read_}
        share[[f"{n}.weight" in alive for n in record.names] & ~relu & (share >= 1)] = 0
    return share, _smallest(table[:, :3])


def _zero_gradients(run: RunView, record: Record) -> Floats:
    """(n_layers,) the smallest share of a layer's gradients that was exactly 0 in the later half.

    As many as there are dead units prove that a ReLU reads the layer: only a ReLU does so.
    """
    seen, by_name = run.recorded.gradients, {}
    if seen is not None and len(seen) >= read.MIN_RECORDS and "zero" in seen.values:
        late = _smallest(seen.values["zero"][:, read.last_half(seen)])
        by_name = dict(zip(seen.names, late, strict=True))
    return np.array([by_name.get(name, np.nan) for name in record.names])


def _largest_possible_share(run: RunView, record: Record, relu: Bools) -> Floats:
    """(n_layers,) the largest share of dead units that leaves room for what was seen above 0."""
    window, zero = read.last_half(record), read.table(record, "zero")
    most = np.nan_to_num(_zero_gradients(run, record), nan=1.0)
    if record.hist is not None and record.edges is not None:
        below = record.hist[:, np.asarray(record.edges[1:]) <= 0].sum(axis=1)
        share = below / record.hist.sum(axis=1) + zero
        most = np.minimum(most, _smallest(share[:, window]))
    return np.where(relu, _smallest(zero[:, window]), most)


@rule(
    needs=("activations",),
    threshold="over 50 % of a layer's units at tau = 0.025",
    source="Sokar et al. 2023 (ReDo, arXiv 2302.12902), for reinforcement learning",
    cause="capacity that this task does not use, or that was lost when the task changed",
    fix="nothing, if the loss is good; else lower the learning rate, or begin these layers again: "
    "layer.reset_parameters()",
)
def dormant(run: RunView) -> Iterator[Finding]:
    """Units that give little, compared with their layer: a note, since the source is about RL."""
    record = run.activations
    which, window = can_be_dormant(record), read.last_half(record)
    if which.any():
        share = np.where(which, _smallest(read.table(record, "dormant")[:, window]), np.nan)
        if len(hit := np.flatnonzero(share > MANY)):
            most = read.percent(share[hit].max())
            what = f"up to {most} of a layer's units are below 1/40 of the layer's "
            yield dormant.found("note", f"{what}mean size", *read.where(record, hit, window))


@rule(
    needs=("activations",),
    threshold="over 50 % at its ends: |tanh| above 0.97, a sigmoid below 0.03 or above 0.97",
    source=f"0.97: Karpathy, makemore part 3; 50 % of a layer: {SAGEMAKER}",
    cause="weights or inputs that are too large: the slope there is almost 0",
    fix="standardise the inputs, start with smaller weights (torch.nn.init.xavier_normal_), or put "
    "a norm before it (nn.LayerNorm)",
)
def saturated(run: RunView) -> Iterator[Finding]:
    """Tanh and sigmoid units at their ends; the last layer may be there, if the loss falls."""
    record = run.activations
    which = read.are(record.types, ("Tanh", "Sigmoid"))
    if which[-1]:
        which[-1] = run.fails
    if not which.any():
        why = "no tanh or sigmoid among the layers (include_paramless=True records them)"
        raise read.Missing(why)
    window = read.last_half(record)
    share = _smallest(_saturated_shares(record)[:, window])
    for severity, low, hit in _graded(which & (share > MANY), share):
        gates = not run.fails and _are_gates(record)[hit].all()
        late = run.learns and not (_saturated_shares(record)[hit, :3] > MANY).any()
        what = f"at least {read.percent(share[hit].max())} of a layer is at the ends of its range"
        what += ", and was not at first" * bool(late)
        says, severity = (_GATES, "note") if gates else (saturated, "note" if late else severity)
        line = saturated.threshold.replace("50", f"{100 * low:.0f}", 1)
        here = says.but(threshold=line, source=_source(says, low))
        yield here.found(severity, what, *read.where(record, hit, window))


_GATES = saturated.but(
    cause="gates that their biases begin shut or open, which is often meant",
    fix="nothing, if it is meant; else begin with biases nearer to 0: "
    "torch.nn.init.zeros_(layer.bias)",
)


def _are_gates(record: Record) -> Bools:
    """Which sigmoids begin all at one end: a bias does that, large inputs go to both."""
    mean, std = read.table(record, "mean")[:, 0], read.table(record, "std")[:, 0]
    return read.are(record.types, ("Sigmoid",)) & (np.abs(mean - 0.5) > SHUT) & (std < ALIKE)


def _saturated_shares(record: Record) -> Floats:
    """(n_layers, n) share of saturated values: recorded, else the least that mean and RMS allow.

    If a share s of the values is beyond e (and at most 1) and the rest is not, the mean square is
    at most s + (1 - s) e², so s is at least (rms² - e²) / (1 - e²). For a sigmoid, about 1/2.
    """
    if "saturated" in record.values:
        return record.values["saturated"]
    square = read.table(record, "rms") ** 2
    share = (square - TANH_END**2) / (1 - TANH_END**2)
    if (sigmoid := read.are(record.types, ("Sigmoid",))).any():  # E[(x - 1/2)²] = rms² - mean + 1/4
        centred = square[sigmoid] - read.table(record, "mean")[sigmoid] + 0.25
        share[sigmoid] = (centred - SIGMOID_END**2) / (0.25 - SIGMOID_END**2)
    return np.asarray(share)
