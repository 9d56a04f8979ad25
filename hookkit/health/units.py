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

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import SAGEMAKER, UNITS_UNSEEN, Finding, rule
from hookkit.health.reading import smallest
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Record

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
    threshold="over 50 % of a layer's units (a note from 20 %, and up to 90 % where they died "
    "while the loss fell: capacity that is lost, or was not needed)",
    source=f"{SAGEMAKER}, DeadRelu: 50 % of a layer",
    cause="a learning rate that is too high",
    fix="lower the learning rate, or use LeakyReLU or GELU",
)
def dead(run: RunView) -> Iterator[Finding]:
    """Units behind a ReLU that give nothing throughout the later half of the run.

    Three groups of layers: those that a ReLU reads for sure, those where zeros among the gradients
    prove it, and those where it stays a guess. A layer whose weight still gets a gradient is not
    dead, whatever its outputs look like.
    """
    record = run.activations
    relus = read.rows(record, read.RELU_LIKE).tolist()
    sure = relus + _relu_inputs(record, relus)
    maybe = [] if relus else _maybe_relu_inputs(record)
    shares = {i: _dead_share(record, i) for i in sure + maybe}
    shares |= {i: 0.0 for i in shares if i not in relus and _weight_disproves(run, record, i)}
    proved = [i for i in maybe if _gradients_prove(run, record.names[i], shares[i])]
    doubtful = [i for i in maybe if i not in proved and shares[i] > MANY]
    units = "a ReLU layer's units" if relus else "the units that a ReLU is given"
    found = [*_dead_layers(run, {i: shares[i] for i in sure}, units)]
    found += _dead_layers(run, {i: shares[i] for i in proved}, _BY_GRADIENTS)
    found += _maybe_dead(run, {i: shares[i] for i in doubtful})
    yield from found
    if not found:
        _check_that_it_could_be_judged(run, record, relus, sure)


_BY_GRADIENTS = "the units that a ReLU is given (as many gradients are exactly 0)"


def _dead_layers(run: RunView, shares: dict[int, float], units: str) -> Iterator[Finding]:
    """Hits for layers that a ReLU reads, the worst first."""
    record = run.activations
    grades = ("error", MOST, np.inf), ("warning", MANY, MOST), ("note", NOTED, MANY)
    for severity, low, high in grades:
        hit = {i: s for i, s in sorted(shares.items()) if low < s <= high}
        if not hit:
            continue
        born = all(smallest(_dead_by_record(record, i)[:3]) > low for i in hit)
        what = f"up to {max(hit.values()):.0%} of {units} are never above 0"
        what += ", from the first step on" if born else ", and more than at first"
        if severity == "warning" and run.learns and not born:
            severity = "note"
        where = read.where(record, hit, read.last_half(record))
        yield (_BORN if born else dead).found(severity, what, *where)


_BORN = dead.but(
    cause="biases (or weights) that began so that no input reaches these units",
    fix="check the initial biases and weights, or use LeakyReLU or GELU",
)


def _maybe_dead(run: RunView, shares: dict[int, float]) -> Iterator[Finding]:
    """A hit for layers that give hardly anything above 0, where it is not known what reads them."""
    if shares:
        record = run.activations
        stuck = max(shares.values()) > MOST and run.fails
        what = f"up to {max(shares.values()):.0%} of a layer's units never give anything above 0: "
        what += "a ReLU behind them lets nothing through"
        where = read.where(record, sorted(shares), read.last_half(record))
        yield _UNPROVED.found("warning" if stuck else "note", what, *where)


_UNPROVED = dead.but(
    threshold="over 50 % of a layer's units; a warning from 90 % if the loss does not fall",
    source=f"{SAGEMAKER}, DeadRelu: 50 % of a layer, where there is a ReLU",
    cause="dead units, if a ReLU reads this layer: biases that began so, or a learning rate that "
    "is too high",
    fix="record what proves it: GradientStats(), or the ReLU itself (include_paramless=True)",
)


def _check_that_it_could_be_judged(
    run: RunView, record: Record, relus: list[int], sure: list[int]
) -> None:
    """Raises Missing where dead units may be there, and what was recorded cannot show them."""
    known = any(consumer is not None for consumer in read.meta(record, "feeds", None))
    if not known and not relus:
        raise read.Missing("no ReLU among the layers (include_paramless=True records them)")
    unseen = known and "dead" not in record.values
    if unseen and any(_largest_possible_share(run, record, i) > MANY for i in sure):
        raise read.Missing(UNITS_UNSEEN)


def _relu_inputs(record: Record, relus: list[int]) -> list[int]:
    """Rows whose output goes into a ReLU, and nowhere else, where that ReLU is no row itself."""
    consumers = read.meta(record, "feeds", None)
    fed = [i for i, consumer in enumerate(consumers) if consumer in read.RELU_LIKE]
    return [i for i in fed if i not in relus and i + 1 not in relus]


def _maybe_relu_inputs(record: Record) -> list[int]:
    """Rows that a ReLU may read: not before a norm or another activation, and not the last."""
    consumers = read.meta(record, "feeds", None)
    return [
        i
        for i, (this, behind) in enumerate(pairwise(record.types))
        if (this in read.PRE_ACTIVATION or this.startswith("BatchNorm"))
        and "Norm" not in behind
        and behind not in _NOT_RELU
        and consumers[i] is None
    ]


def _dead_by_record(record: Record, row: int) -> Floats:
    """(n,) share of a row's units that are never above 0; without units all of them or none."""
    if record.types[row] in read.RELU_LIKE:
        whole = read.table(record, "zero")[row] >= 1
    else:
        whole = read.table(record, "max")[row] <= 0
    # over a window of records before this one; `dead` in older records
    units = record.values.get("never_positive", record.values.get("dead"))
    return np.asarray(whole if units is None else np.fmax(units[row], whole), np.float64)


def _dead_share(record: Record, row: int) -> float:
    """The share of dead units that lasted through the later half."""
    return smallest(_dead_by_record(record, row)[read.last_half(record)])


def _zero_gradients(run: RunView, name: str) -> float | None:
    """The smallest share of a layer's gradients that was exactly 0 in the later half."""
    record = run.recorded.gradients
    if record is None or name not in record.names or len(record) < read.MIN_RECORDS:
        return None
    zero = record.value("zero", name)[read.last_half(record)]
    return smallest(zero) if np.isfinite(zero).any() else None


def _gradients_prove(run: RunView, name: str, share: float) -> bool:
    """Whether as many of a layer's gradients are exactly 0 at every record: only a ReLU does so."""
    zero = _zero_gradients(run, name)
    return zero is not None and share > NOTED and zero >= share


def _weight_disproves(run: RunView, record: Record, row: int) -> bool:
    """Whether a layer that gives nothing above 0 is not dead, by the gradient of its weight.

    A gradient in the later half means that something reads the layer's negative outputs. One that
    was always 0 is reported as such, by `zero_gradient`.
    """
    name, params = f"{record.names[row]}.weight", run.recorded.params
    if _dead_share(record, row) < 1 or params is None or name not in params.names:
        return False
    grads = params.value("grad_norm", name)
    late = np.nan_to_num(grads[read.last_half(params)])
    return bool(np.isfinite(grads).any() and (late.any() or not np.nan_to_num(grads).any()))


def _largest_possible_share(run: RunView, record: Record, row: int) -> float:
    """The largest share of dead units that leaves room for the values that were seen above 0."""
    window = read.last_half(record)
    zero = read.table(record, "zero")[row, window]
    if record.types[row] in read.RELU_LIKE:
        return smallest(zero)
    stopped = _zero_gradients(run, record.names[row])
    most = 1.0 if stopped is None else stopped
    if record.hist is None or record.edges is None:
        return most
    counts = record.hist[row][:, window]
    below = counts[np.asarray(record.edges[1:]) <= 0].sum(axis=0)
    return min(most, smallest(below / counts.sum(axis=0) + zero))


@rule(
    needs=("activations",),
    threshold="over half of a layer's units at tau = 0.025",
    source="Sokar et al. 2023 (ReDo, arXiv 2302.12902), for reinforcement learning",
    cause="capacity that this task does not use, or that was lost when the task changed",
    fix="nothing, if the loss is good; else lower the learning rate or re-initialise them",
)
def dormant(run: RunView) -> Iterator[Finding]:
    """Units that give little, compared with their layer: a note, since the source is about RL."""
    record = run.activations
    window, which = read.last_half(record), read.rows(record, _DORMANT_TYPES)
    shares = np.array([smallest(read.table(record, "dormant")[i, window]) for i in which])
    if (hit := shares > MANY).any():
        what = (
            f"up to {shares.max():.0%} of a layer's units are below 1/40 of the layer's mean size"
        )
        yield dormant.found("note", what, *read.where(record, which[hit], window))


@rule(
    needs=("activations",),
    threshold="over 50 % beyond |tanh| 0.97, or sigmoid below 0.03 or above 0.97",
    source=f"0.97: Karpathy, makemore part 3; 50 % of a layer: {SAGEMAKER}",
    cause="weights or inputs that are too large: the slope there is almost 0",
    fix="standardise the inputs, start with smaller weights, or put a norm before it",
)
def saturated(run: RunView) -> Iterator[Finding]:
    """Tanh and sigmoid units at their ends; the last layer may be there, if the loss falls."""
    record = run.activations
    last = len(record.names) - 1
    which = [i for i in read.rows(record, ("Tanh", "Sigmoid")) if i != last or run.fails]
    if not which:
        raise read.Missing(
            "no tanh or sigmoid among the layers (include_paramless=True records them)"
        )
    window = read.last_half(record)
    shares = {i: smallest(_saturated_by_record(record, i)[window]) for i in which}
    for severity, low, high in (("error", MOST, np.inf), ("warning", MANY, MOST)):
        hit = {i: s for i, s in shares.items() if low < s <= high}
        if hit:
            gates = not run.fails and all(_is_gate(record, i) for i in hit)
            what = f"at least {max(hit.values()):.0%} of a layer is at the ends of its range"
            says, severity = (_GATES, "note") if gates else (saturated, severity)
            yield says.found(severity, what, *read.where(record, hit, window))


_GATES = saturated.but(
    cause="gates that their biases begin shut or open, which is often meant",
    fix="nothing, if it is meant; else begin with biases nearer to 0",
)


def _is_gate(record: Record, row: int) -> bool:
    """Whether a sigmoid begins all at one end: a bias does that, large inputs go to both."""
    mean, std = (read.table(record, s)[row, 0] for s in ("mean", "std"))
    return record.types[row] == "Sigmoid" and abs(mean - 0.5) > SHUT and std < ALIKE


def _saturated_by_record(record: Record, row: int) -> Floats:
    """(n,) share of saturated values: recorded, else the least that mean and RMS allow.

    If a share s of the values is beyond e (and at most 1) and the rest is not, the mean square is
    at most s + (1 - s) e², so s is at least (rms² - e²) / (1 - e²). For a sigmoid, about 1/2.
    """
    if "saturated" in record.values:
        return record.value("saturated", row)
    rms = read.table(record, "rms")[row]
    if record.types[row] == "Tanh":
        share = (rms**2 - TANH_END**2) / (1 - TANH_END**2)
    else:  # E[(x - 1/2)²] = rms² - mean + 1/4
        square = rms**2 - read.table(record, "mean")[row] + 0.25
        share = (square - SIGMOID_END**2) / (0.25 - SIGMOID_END**2)
    return np.asarray(share, np.float64)
