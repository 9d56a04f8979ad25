"""Rules on units that give nothing: dead, saturated.

Whether a unit is dead shows in a ReLU's output, or, since most records have no ReLU in them (it has
no parameters), in what the ReLU is given: a unit that is never above 0 there. Which layers a ReLU
alone reads is known from the autograd graph, `meta["feeds"]`. Other layers are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import SAGEMAKER, UNITS_UNSEEN, Finding, Rule, rule
from hookkit.health.loss_expectations import ERRORS
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Ints, Record

# Shares of a layer's units. SageMaker Debugger, DeadRelu: 50 % of a layer; the others: measured.
NOTED, MANY, MOST = 0.2, 0.5, 0.9

_DORMANT_TYPES = (*read.RELU_LIKE, "GELU", "SiLU", "ELU", "LeakyReLU", "Mish", "Tanh")


@rule(
    needs=("activations",),
    threshold="over 50 % of a layer's units",
    source=f"{SAGEMAKER}, DeadRelu: 50 % of a layer",
    cause="a learning rate that is too high",
    fix="divide the learning rate by 10, or use nn.LeakyReLU or nn.GELU",
)
def dead(run: RunView) -> Iterator[Finding]:
    """Units behind a ReLU that give nothing throughout the later half of the run."""
    record = run.activations
    relu, feeds = read.are(record.types, read.RELU_LIKE), read.meta(record, "feeds", None)
    sure = can_die(record)
    share, born = _dead_shares(record, relu, sure)
    units = "a ReLU layer's units" if relu.any() else "the units that a ReLU is given"
    found = [*_dead_layers(run, sure, share, born, units)]
    yield from found
    known = any(consumer is not None for consumer in feeds)
    if not found and not known and not relu.any():
        raise read.Missing("no ReLU among the layers (include_paramless=True records them)")
    unseen = not found and known and "dead" not in record.values
    if unseen and (sure & (_largest_possible_share(record, relu) > MANY)).any():
        raise read.Missing(UNITS_UNSEEN)


def can_die(record: Record) -> Bools:
    """(n_layers,) where a unit that is never above 0 is dead for sure, each ReLU counted once.

    A ReLU's own row; of one that is no row itself that of the layer that it alone reads.
    """
    relu = read.are(record.types, read.RELU_LIKE)
    feeds = read.are(read.meta(record, "feeds", None), read.RELU_LIKE)
    return np.asarray(relu | (feeds & ~np.append(relu[1:], False)), bool)


def can_be_dormant(record: Record) -> Bools:
    """(n_layers,) which rows are outputs of activations, whose dormant units are counted."""
    return read.are(record.types, _DORMANT_TYPES)


_BORN = dead.but(
    cause="biases (or weights) that began so that no input reaches these units",
    fix="begin with biases of 0, torch.nn.init.zeros_(layer.bias), or use nn.LeakyReLU or nn.GELU",
)

_LOST = dead.but(cause="capacity that was lost, or that was not needed")


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


def _dead_shares(record: Record, relu: Bools, which: Bools) -> tuple[Floats, Floats]:
    """(n_layers,) shares of units never above 0: in the later half, and in the first records."""
    whole = np.zeros((len(relu), len(record)), bool)
    if relu.any():
        whole[relu] = read.table(record, "zero")[relu] >= 1
    if (fed := which & ~relu).any():
        whole[fed] = read.table(record, "max")[fed] <= 0
    # over a window of records before this one; `dead` in older records
    units = record.values.get("never_positive", record.values.get("dead"))
    table = np.asarray(whole if units is None else np.fmax(units, whole), np.float64)
    return _smallest(table[:, read.last_half(record)]), _smallest(table[:, :3])


def _largest_possible_share(record: Record, relu: Bools) -> Floats:
    """(n_layers,) the largest share of dead units that leaves room for what was seen above 0."""
    window, zero = read.last_half(record), read.table(record, "zero")
    most = np.ones(len(relu))
    if record.hist is not None and record.edges is not None:
        below = record.hist[:, np.asarray(record.edges[1:]) <= 0].sum(axis=1)
        share = below / record.hist.sum(axis=1) + zero
        most = np.minimum(most, _smallest(share[:, window]))
    return np.where(relu, _smallest(zero[:, window]), most)


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
    yield from _out_of_reach(run, record, bool(which[-1]))
    which[-1] &= run.fails
    if not which.any():
        why = "no tanh or sigmoid among the layers (include_paramless=True records them)"
        raise read.Missing(why)
    window = read.last_half(record)
    table = read.table(record, "saturated")
    share = _smallest(table[:, window])
    for severity, low, hit in _graded(which & (share > MANY), share):
        late = run.learns and not (table[hit, :3] > MANY).any()
        what = f"up to {read.percent(share[hit].max())} of a layer is at the ends of its range"
        what += ", and was not at first" * bool(late)
        line = saturated.threshold.replace("50", f"{100 * low:.0f}", 1)
        here = saturated.but(threshold=line, source=_source(saturated, low))
        where = read.where(record, hit, window)
        yield here.found("note" if late else severity, what, *where)


def _out_of_reach(run: RunView, record: Record, bounded: bool) -> Iterator[Finding]:
    """An output at the ends of its range, while the error that it is to lower stays."""
    if not bounded or run.loss_name not in ERRORS or not run.learns or not run.has_much_left:
        return
    share = float(_smallest(read.table(record, "saturated")[-1:, read.last_half(record)])[0])
    if share > MANY:
        what = f"{read.percent(share)} of the output is at the ends of its range, and "
        what += f"{read.percent(read.end_level(run.losses) / read.start_level(run.losses))} of the "
        what += "error is left"
        last = len(record.names) - 1
        yield _OUT_OF_REACH.found("warning", what, *read.where(record, [last]))


_OUT_OF_REACH = saturated.but(
    threshold="over 50 % of the last layer, with 0.3 of an error left",
    source="the range of the function, 0 to 1, or -1 to 1; 50 % and 0.3: hookkit, measured",
    cause="targets that the activation at the end cannot reach",
    fix="leave nn.Sigmoid or nn.Tanh out at the end of a regression, or scale the targets to its "
    "range",
)
