"""Rules on units that give nothing: dead, dormant, saturated.

Whether a unit is dead shows in a ReLU's output; most records have none, since a ReLU has no
parameters. Then what the ReLU is given shows it: a unit that is never above 0 there. That a ReLU
does read it is known

is         where the ReLU itself was recorded (`include_paramless=True`),
feeds      from `meta["feeds"]`: per row the class of the activation that alone reads its output,
           "" where something else does, None where it is not known,
gradients  where at least so large a share of the layer's gradients is exactly 0 at every record,

and otherwise not at all: a note, unless the whole layer is below 0 and the loss does not fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.activations import SAGEMAKER
from hookkit.health.diagnosis import UNITS_UNSEEN, Finding
from hookkit.records import Floats, Record, Run


def dead(run: Run) -> Iterator[Finding]:
    """Units behind a ReLU that no input of the later half of the run wakes."""
    record = read.activations(run)
    relus = read.rows(record, read.RELU_LIKE)
    sure, maybe = relus + _feeding(record, relus), [] if relus else _before_something(record)
    shares = {i: _lasting(record, i) for i in sure + maybe}
    shares |= {i: 0.0 for i in shares if i not in relus and _weight_tells(run, record, i)}
    proved = [i for i in maybe if _stopped(run, record.names[i], shares[i])]
    given = "a ReLU layer's units" if relus else "the units that a ReLU is given"
    falls = loss_expectations.learns(run) is True
    found = [*_shut(record, {i: shares[i] for i in sure}, given, falls)]
    found += _shut(record, {i: shares[i] for i in proved}, _BY_GRADIENTS, falls)
    doubtful = [i for i in maybe if i not in proved and shares[i] > 0.5]
    found += _below(run, record, {i: shares[i] for i in doubtful})
    yield from found
    if found:
        return
    if not _looked(record):
        if not relus:
            raise read.Missing("no ReLU among the layers (include_paramless=True records them)")
    elif "dead" not in record.values and any(_at_most(run, record, i) > 0.5 for i in sure):
        raise read.Missing(UNITS_UNSEEN)


_BY_GRADIENTS = "the units that a ReLU is given (as many gradients are exactly 0)"


def _shut(record: Record, shares: dict[int, float], units: str, falls: bool) -> Iterator[Finding]:
    window = read.last_half(record)
    for severity, low, high in (("error", 0.9, np.inf), ("warning", 0.5, 0.9), ("note", 0.2, 0.5)):
        hit = {i: s for i, s in shares.items() if low < s <= high}
        if hit:
            born = all(_least(_dead(record, i)[:3]) > low for i in hit)
            yield Finding(
                "dead",
                "note" if severity == "warning" and falls and not born else severity,
                read.names(record, sorted(hit)),
                read.span(record, window),
                f"up to {max(hit.values()):.0%} of {units} are never above 0"
                + (", from the first step on" if born else ", and more than at first"),
                "over 50 % of a layer's units (a note from 20 %, and up to 90 % where they died "
                "while the loss fell: capacity that is lost, or was not needed)",
                f"{SAGEMAKER}, DeadRelu: 50 % of a layer",
                "biases (or weights) that began so that no input reaches these units"
                if born
                else "a learning rate that is too high",
                "check the initial biases and weights, or use LeakyReLU or GELU"
                if born
                else "lower the learning rate, or use LeakyReLU or GELU",
            )


def _below(run: Run, record: Record, hit: dict[int, float]) -> Iterator[Finding]:
    """Layers that give hardly anything above 0, where nobody knows what reads them."""
    if hit:
        stuck = max(hit.values()) > 0.9 and loss_expectations.learns(run) is False
        yield Finding(
            "dead",
            "warning" if stuck else "note",
            read.names(record, sorted(hit)),
            read.span(record, read.last_half(record)),
            f"up to {max(hit.values()):.0%} of a layer's units never give anything above 0: a ReLU "
            "behind them lets nothing through",
            "over 50 % of a layer's units; an alarm from 90 % if the loss does not fall",
            f"{SAGEMAKER}, DeadRelu: 50 % of a layer, where there is a ReLU",
            "dead units, if a ReLU reads this layer: biases that began so, or a learning rate that "
            "is too high",
            "record what proves it: GradientStats(), or the ReLU itself (include_paramless=True)",
        )


def _feeding(record: Record, relus: list[int]) -> list[int]:
    """Rows whose output goes into a ReLU, and nowhere else, where that is not a row itself."""
    readers = read.meta(record, "feeds", None)
    fed = [i for i, reader in enumerate(readers) if reader in read.RELU_LIKE]
    return [i for i in fed if i not in relus and i + 1 not in relus]


def _looked(record: Record) -> bool:
    """Whether it is known of any layer what reads it."""
    return any(reader is not None for reader in read.meta(record, "feeds", None))


def _before_something(record: Record) -> list[int]:
    """Rows that a ReLU may read: not before a norm or another activation, and not the last."""
    types, readers = record.types, read.meta(record, "feeds", None)
    return [
        i
        for i, (this, behind) in enumerate(pairwise(types))
        if (this in read.PRE_ACTIVATION or this.startswith("BatchNorm"))
        and "Norm" not in behind
        and behind not in _ACTIVATIONS
        and readers[i] is None
    ]


_ACTIVATIONS = ("GELU", "SiLU", "ELU", "LeakyReLU", "Mish", "Tanh", "Sigmoid", "Softplus")


def _dead(record: Record, row: int) -> Floats:
    """(n,) share of a row's units that are never above 0; without units all of them or none."""
    if record.types[row] in read.RELU_LIKE:
        whole = read.table(record, "zero")[row] >= 1
    else:
        whole = read.table(record, "max")[row] <= 0
    # over a window that reaches back; `dead` in older records
    units = record.values.get("never_positive", record.values.get("dead"))
    return np.asarray(whole if units is None else np.fmax(units[row], whole), np.float64)


def _stopped(run: Run, name: str, share: float) -> bool:
    """Whether so many of a layer's gradients are exactly 0, at every record: a ReLU's doing."""
    zero = _zero_gradients(run, name)
    return zero is not None and share > 0.2 and zero >= share


def _zero_gradients(run: Run, name: str) -> float | None:
    """The least share of a layer's gradients that was exactly 0 in the later half."""
    record = run.gradients
    if record is None or name not in record.names or len(record) < read.MIN_RECORDS:
        return None
    zero = record.value("zero", name)[read.last_half(record)]
    return _least(zero) if np.isfinite(zero).any() else None


def _weight_tells(run: Run, record: Record, row: int) -> bool:
    """Whether a layer that gives nothing above 0 is no news: its weight still has a gradient, or
    never had one, which `still` tells."""
    name = f"{record.names[row]}.weight"
    if _lasting(record, row) < 1 or run.params is None or name not in run.params.names:
        return False
    grads = run.params.value("grad_norm", name)
    late = np.nan_to_num(grads[read.last_half(run.params)])
    return bool(np.isfinite(grads).any() and (late.any() or not np.nan_to_num(grads).any()))


def _at_most(run: Run, record: Record, row: int) -> float:
    """The largest share of dead units that leaves room for what was seen above 0."""
    zero = read.table(record, "zero")[row, read.last_half(record)]
    if record.types[row] in read.RELU_LIKE:
        return _least(zero)
    stopped = _zero_gradients(run, record.names[row])
    most = 1.0 if stopped is None else stopped
    if record.hist is None or record.edges is None:
        return most
    counts = record.hist[row][:, read.last_half(record)]
    below = counts[np.asarray(record.edges[1:]) <= 0].sum(axis=0)
    return min(most, _least(below / counts.sum(axis=0) + zero))


def _lasting(record: Record, row: int) -> float:
    """The share of dead units that lasted through the later half."""
    return _least(_dead(record, row)[read.last_half(record)])


def _least(series: Floats) -> float:
    """The smallest known value; 0 where none is known."""
    known = series[np.isfinite(series)]
    return float(known.min()) if len(known) else 0.0


def dormant(run: Run) -> Iterator[Finding]:
    """Units that hardly speak, compared with their layer: a note, since the source is RL."""
    record = read.activations(run)
    window = read.last_half(record)
    types = (*read.RELU_LIKE, "GELU", "SiLU", "ELU", "LeakyReLU", "Mish", "Tanh")
    which = read.rows(record, types)
    share = np.array([_least(read.table(record, "dormant")[i, window]) for i in which])
    hit = [i for i, s in zip(which, share, strict=True) if s > 0.5]
    if hit:
        yield Finding(
            "dormant",
            "note",
            read.names(record, hit),
            read.span(record, window),
            f"up to {share.max():.0%} of a layer's units are below 1/40 of the layer's mean size",
            "over half of a layer's units at tau = 0.025",
            "Sokar et al. 2023 (ReDo, arXiv 2302.12902), for reinforcement learning",
            "capacity that this task does not use, or that was lost when the task changed",
            "nothing, if the loss is good; else lower the learning rate or re-initialise them",
        )


def saturated(run: Run) -> Iterator[Finding]:
    """Tanh and sigmoid units at their ends; the last layer may be there, if the loss falls."""
    record = read.activations(run)
    last, learns = len(record.names) - 1, loss_expectations.learns(run)
    which = read.rows(record, ("Tanh", "Sigmoid"))
    which = [i for i in which if i != last or learns is False]
    if not which:
        raise read.Missing(
            "no tanh or sigmoid among the layers (include_paramless=True records them)"
        )
    window = read.last_half(record)
    share = np.array([_least(_saturation(record, i)[window]) for i in which])
    for severity, low, high in (("error", 0.9, np.inf), ("warning", 0.5, 0.9)):
        hit = [(i, s) for i, s in zip(which, share, strict=True) if low < s <= high]
        if hit:
            gates = learns is not False and all(_is_gate(record, i) for i, _ in hit)
            yield Finding(
                "saturated",
                "note" if gates else severity,
                read.names(record, [i for i, _ in hit]),
                read.span(record, window),
                f"at least {max(s for _, s in hit):.0%} of a layer is at the ends of its range",
                "over 50 % beyond |tanh| 0.97, or sigmoid below 0.03 or above 0.97",
                f"0.97: Karpathy, makemore part 3; 50 % of a layer: {SAGEMAKER}",
                "gates that their biases begin shut or open, which is often meant"
                if gates
                else "weights or inputs that are too large: the slope there is almost 0",
                "nothing, if it is meant; else begin with biases nearer to 0"
                if gates
                else "standardise the inputs, start with smaller weights, or put a norm before it",
            )


def _is_gate(record: Record, row: int) -> bool:
    """Whether a sigmoid begins all at one end: a bias does that, large inputs go to both."""
    mean, std = (read.table(record, s)[row, 0] for s in ("mean", "std"))
    return record.types[row] == "Sigmoid" and abs(mean - 0.5) > 0.45 and std < 0.05


def _saturation(record: Record, row: int) -> Floats:
    """(n,) share of saturated values: recorded, else the least that mean and RMS allow."""
    if "saturated" in record.values:
        return record.value("saturated", row)
    rms = read.table(record, "rms")[row]
    if record.types[row] == "Tanh":
        share = (rms**2 - 0.97**2) / (1 - 0.97**2)
    else:  # the same about 1/2, where a sigmoid is in its middle
        share = (rms**2 - read.table(record, "mean")[row] + 0.25 - 0.47**2) / (0.25 - 0.47**2)
    return np.asarray(share, np.float64)
