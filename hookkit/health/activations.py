"""Rules on what layers give: badly scaled from the start, or too noisy in training.

What they are given is in `inputs`; units that give nothing are in `units`; NaN, Inf and the range
of float16 in `precision`; attention's logits in `attention`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.layer_order import ends, given_data, given_numbers
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.health.step_sizes import UNUSUAL_GAIN, blown_up, update_ratios
from hookkit.health.steps import rate_is_too_high
from hookkit.records import Floats, Ints, Record

# What a layer gives before training, over its inputs (or 1): 2.1 in healthy trainings (measured)
LARGE_OUTPUT = 4.0
# The gain of one weight that makes it so; of most, `UNUSUAL_GAIN` does
LARGE_GAIN = 5.0
# The same of an output where no weight is to blame, and what it begins with over what it ends with;
# 1.8 and 2.5 in healthy trainings (hookkit, measured)
FAR_OUTPUT, FELL_BACK = 10, 3
# PyTorch's own begin with a gain of 1/√3 = 0.58, GPT's with 0.14 in small nets (hookkit, measured)
SMALL_GAIN = 0.07
# Srivastava et al. 2014, Dropout: 50 % to 80 % of hidden units are kept; 25 %: half of the least.
LEAST_KEPT = 0.25


@rule(
    needs=("activations",),
    threshold="a layer's output above 4 (times the inputs, if these are larger than 1), and a gain "
    "above 5, or above 1.5 in most layers",
    source="He et al. 2015: √2; torch.nn.init.calculate_gain: 5/3 at most; 4 and 5: hookkit, "
    "measured",
    cause="weights (or embeddings, or codes) that begin too large: their RMS times √fan_in should "
    "be about 1",
    fix="initialise each weight for its fan-in, torch.nn.init.kaiming_normal_(layer.weight), or "
    "put norm layers (nn.LayerNorm, nn.BatchNorm2d) between",
)
def bad_init(run: RunView) -> Iterator[Finding]:
    """Weights whose size, or what they make of the first batch, is far from what can be learnt."""
    found = [*_small_weights(run)]
    if not found and run.info.get("optimizer") != "LBFGS":  # it steps before anything is recorded
        found = [*_large_cells(run)] or [*_large_outputs(run)]
    yield from found


def _large_cells(run: RunView) -> Iterator[Finding]:
    """Recurrent weights that begin too large; what they give is bounded, and shows nothing."""
    which, gain = _gains(run)
    cells = (gain > LARGE_GAIN) & _feeds_itself(run, which)
    if cells.any():
        what = f"{cells.sum()} recurrent weights begin with a gain (their RMS times √fan_in) of "
        what += f"{read.median(gain[cells]):.3g}"
        yield _CELLS.found("warning", what, *read.where(run.params, which[cells], read.FIRST))


def _large_outputs(run: RunView) -> Iterator[Finding]:
    """A layer that gives far more than it is to, before the first step, and what makes it do so."""
    record, (which, gain) = run.activations, _gains(run)
    if run.trained_before and 2 * (gain > LARGE_GAIN).sum() <= len(gain):
        return  # it amplifies as it was taught to, which random weights do not
    times = _times_inputs(run, record)
    if not times.max(initial=0.0) > LARGE_OUTPUT:
        return
    top, first = int(times.argmax()), read.table(record, "rms")[:, 0]
    what = f"{record.names[top]} gives RMS {first[top]:.3g} before training"
    in_most = 2 * (gain > UNUSUAL_GAIN).sum() > len(gain)
    hit = gain > (UNUSUAL_GAIN if in_most else LARGE_GAIN)
    if hit.any():
        what += f", where {hit.sum()} of {len(hit)} weights begin with a gain (their RMS times "
        what += f"√fan_in) of {read.median(gain[hit]):.3g}"
        yield bad_init.found("warning", what, *read.where(run.params, which[hit], read.FIRST))
        return
    rows = ends(run, record)
    last = read.median(read.table(record, "rms")[rows, -10:], axis=1)
    fell = first[rows] / last
    if times[rows].max(initial=0.0) > FAR_OUTPUT and (fell > FELL_BACK).any():
        what += f", and the output falls to {read.percent(1 / fell.max())} of what it was"
        yield _AMPLIFIED.found("warning", what, *read.where(record, [top], read.FIRST))


def _times_inputs(run: RunView, record: Record) -> Floats:
    """(n_layers,) how large what layers with matrices of their own give is at first, over the data.

    0 for others.
    """
    params = run.recorded.params
    none = np.zeros(len(record.names))
    if params is None or "weight_rms" not in params.values:
        return none
    names = np.array(params.names)
    owners = {name.rpartition(".")[0] for name in names[read.is_matrix(params)]}
    own = np.array([name in owners for name in record.names])
    given = read.meta(record, "given_rms", np.nan).astype(float)
    data = given[[*given_data(run, record), *given_numbers(run, record)]]
    size = read.table(record, "rms")[:, 0] / np.fmax(data, 1.0).max(initial=1.0)
    return np.where(own & np.isfinite(size), size, 0.0)


def _feeds_itself(run: RunView, which: Ints) -> Bools:
    """Which weights a recurrent layer applies to its own last output."""
    names = [] if run.recorded.params is None else run.recorded.params.names
    return np.array(["weight_hh" in names[i].rpartition(".")[2] for i in which], bool)


def _small_weights(run: RunView) -> Iterator[Finding]:
    """Weights that begin so small that hardly anything comes through, or steps replace them."""
    which, gain = _gains(run)
    begun = (gain > 0) & np.isin(which, read.matrices(run.params) if len(which) else which)
    which, gain = which[begun], gain[begun]
    hit = gain < SMALL_GAIN
    if not (hit.any() and hit.mean() > 0.5):
        return
    if run.fails:
        why = "the loss does not fall"
    elif _are_blown_up(run) or rate_is_too_high(run):
        why = "steps are too large for them"
    elif run.recorded.losses is not None and run.could_fall_further:
        why = "0.3 of the loss is left, or more"
    else:
        return
    what = f"the weights of {hit.sum()} of {len(which)} layers begin with a gain of "
    what += f"{read.median(gain[hit]):.2g}: their RMS times √fan_in; and {why}"
    yield _SMALL_GAIN.found("warning", what, *read.where(run.params, which[hit], read.FIRST))


def _are_blown_up(run: RunView) -> bool:
    """Whether steps have made most matrices several times as large, one of them by half."""
    try:
        return bool(blown_up(*update_ratios(run)).mean() > 0.5)
    except read.Missing:
        return False


def _gains(run: RunView) -> tuple[Ints, Floats]:
    """Matrices that can be trained, and their RMS times √fan_in; an embedding's is its RMS."""
    record = run.recorded.params
    if record is None or "shape" not in record.meta or "weight_rms" not in record.values:
        return np.zeros(0, np.int64), np.zeros(0)
    which = np.flatnonzero(read.is_matrix(record) & read.trainable(record))
    fan_in = np.array([np.prod(record.meta["shape"][i][1:]) for i in which], float)
    fan_in[np.isin(which, read.rows(record, read.EMBEDDINGS))] = 1
    return which, record.values["weight_rms"][which, 0] * np.sqrt(fan_in)


_AMPLIFIED = bad_init.but(
    name="exploding",
    threshold="an output above 10 (times the inputs, if these are larger than 1), which falls to a "
    "third or less",
    source="hookkit, measured",
    cause="what stands between the layers amplifies: a recurrence that grows, a sum where a mean "
    "was meant, an inner step that is too large",
    fix="divide by what is added up (the degree of a node, the number of steps), and keep the "
    "factors of a recurrence below 1",
)

_CELLS = bad_init.but(
    threshold="a gain above 5 in a recurrent layer, where PyTorch's begin with 0.58",
    source="PyTorch, nn.LSTM: uniform within 1/√hidden_size; 5: hookkit, measured",
    fix="begin with torch.nn.init.orthogonal_(layer.weight_hh_l0), or with PyTorch's own weights",
)

_SMALL_GAIN = bad_init.but(
    threshold="below 0.07 in most layers, an eighth of what PyTorch's begin with, while the loss "
    "does not fall, or 0.3 of it is left, or steps are large beside them",
    source="PyTorch, nn.Linear and nn.LSTM: 0.58 and about that; an eighth: hookkit, measured",
    cause="weights that begin too small: hardly anything comes through, forwards and backwards",
)


@rule(
    needs=("activations",),
    threshold="less than 25 % is kept",
    source="Srivastava et al. 2014, Dropout: 50 % to 80 % of hidden units are kept; "
    "25 %: half of the least",
    cause="a dropout rate that is too high (p is the share that is dropped, not kept)",
    fix="lower p to 0.5 or less: nn.Dropout(p=0.5)",
)
def dropout(run: RunView) -> Iterator[Finding]:
    """Dropout that keeps less than a quarter."""
    rates = run.activations.meta.get("dropout") or {}
    hit = [name for name, rate in rates.items() if 1 - rate < LEAST_KEPT]
    if hit:
        what = f"dropout keeps {read.percent(1 - max(rates[name] for name in hit))} of what it is "
        severity = "error" if run.fails else "warning"
        yield dropout.found(severity, f"{what}given", hit, run.all_steps)
