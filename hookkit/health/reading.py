"""How rules read a `Run`: windows, rows by type, robust averages; `Missing` if it is not there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hookkit.records import Floats, Record, Run

MIN_RECORDS = 10
"""Fewer records than this say nothing: a rule never speaks on one batch. Half as many do, if they
are of batches that lie apart, over 40 steps or more."""

ENOUGH_LOSSES = 50
"""In fewer steps than this a loss that does not fall says nothing."""

SAME = 1e-6
"""Relative to their size, norms that differ by less may be of the same values."""

FAINT_INPUT = 3e-3
"""Inputs smaller than this, where 1 is usual, hardly reach the first weights."""

RELU_LIKE = frozenset({"ReLU", "ReLU6"})
PRE_ACTIVATION = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d")
EMBEDDINGS = frozenset({"Embedding", "EmbeddingBag"})


class Missing(Exception):
    """The run does not hold what a rule needs; the message says what, in a few words."""


def activations(run: Run) -> Record:
    """The record of activations, long enough to judge."""
    return _enough(run.activations, "activations")


def params(run: Run) -> Record:
    """The record of parameters, long enough to judge."""
    return _enough(run.params, "parameters")


def _enough(record: Record | None, what: str) -> Record:
    if record is None or not record.names:
        raise Missing(f"no {what}")
    apart = len(record) >= MIN_RECORDS // 2 and record.steps[-1] - record.steps[0] >= 40
    if len(record) < MIN_RECORDS and not apart:
        raise Missing(f"fewer than {MIN_RECORDS} records of {what}")
    return record


def table(record: Record, statistic: str) -> Floats:
    """(n_layers, n) of a statistic."""
    if statistic not in record.values:
        raise Missing(f"{statistic} not recorded")
    return record.values[statistic]


def losses(run: Run, at_least: int = 1) -> Floats:
    """(n_steps,) losses, of which at least `at_least` are known."""
    if run.losses is None or not np.isfinite(run.losses).any():
        raise Missing("no losses")
    if len(run.losses) < at_least:
        raise Missing(f"fewer than {at_least} steps of loss")
    return np.asarray(run.losses, np.float64)


def rows(record: Record, types: Iterable[str]) -> list[int]:
    """Rows whose module class is one of `types`, in execution order."""
    wanted = set(types)
    return [i for i, t in enumerate(record.types) if t in wanted]


def matrices(record: Record) -> list[int]:
    """Rows of trainable parameters with two dimensions or more, embeddings left out."""
    ndim = meta(record, "ndim", 2)
    trainable = meta(record, "requires_grad", True)
    return [
        i
        for i, t in enumerate(record.types)
        if ndim[i] >= 2 and trainable[i] and t not in EMBEDDINGS
    ]


def meta(record: Record, key: str, default: Any) -> list[Any]:
    """A list per row from `meta`, or `default` for each row."""
    found = record.meta.get(key)
    return list(found) if found is not None else [default] * len(record.names)


def median(values: Floats, axis: int | None = None) -> Any:
    """The median of what is finite; NaN where nothing is."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, for an all-NaN slice
        return np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=axis)


def last_half(record: Record) -> slice:
    """The later half of the records, at least `MIN_RECORDS` of them."""
    return slice(min(len(record) // 2, max(len(record) - MIN_RECORDS, 0)), None)


def span(record: Record, window: slice = slice(None)) -> tuple[int, int]:
    """First and last optimizer step of a window of records."""
    steps = record.steps[window]
    last = int(steps[-1]) + int(record.spans[window][-1]) - 1
    return int(steps[0]), last


def names(record: Record, which: Iterable[int]) -> tuple[str, ...]:
    """Names of rows."""
    return tuple(record.names[i] for i in which)


def start_level(series: Floats) -> float:
    """Where a loss series begins: the median of its first steps (5, or a twentieth).

    Of one that leapt up with the first step and never came back to its first value: that value.
    """
    known = series[np.isfinite(series)]
    level = float(median(known[: max(5, len(known) // 20)]))
    end = known[-max(5, len(known) // 10) :]
    leapt = len(known) > 20 and 0 < 3 * known[0] < level and level > end.max()
    return float(known[0]) if leapt and np.quantile(end, 0.1) > known[0] else level


def end_level(series: Floats) -> float:
    """Where a loss series ends: the median of its last tenth; inf if it stopped being a number."""
    if breaks_off(series):
        return float("inf")
    known = series[np.isfinite(series)]
    return float(median(known[-max(5, len(known) // 10) :]))


def breaks_off(series: Floats) -> bool:
    """Whether a known loss ends in NaN for longer than its gaps of unknown steps explain."""
    known = np.flatnonzero(np.isfinite(series))
    if not len(known):
        return False
    gap = int(np.diff(known, prepend=-1).max()) - 1
    return len(series) - 1 - int(known[-1]) > 2 * gap + 2


def improved(run: Run) -> bool | None:
    """Whether the loss fell, by 5 % or more; None when it is unknown.

    Coming down from a wild first loss to chance (ln of the number of classes) is no progress; a
    loss that begins far below chance is a model that had learnt before, and counts as fallen; so
    does a squared error far below the variance of what the model gives. Below 0 and maximised, it
    is a likelihood that is to rise. In fewer than `ENOUGH_LOSSES` steps only a loss that rises says
    something: one that stays may have had no time.
    """
    try:
        series = losses(run, MIN_RECORDS)
    except Missing:
        return None
    fell = _fell(run, series)
    if len(series) < ENOUGH_LOSSES and not fell:
        return None if end_level(series) <= 1.5 * abs(start_level(series)) else False
    return fell


def hides_a_fall(run: Run) -> bool:
    """Whether a fall of 5 % cannot be excluded at two standard errors, for the noise of the loss.

    By the slope over the run; where chance is known, by how far below it the run ends.
    """
    series = losses(run)
    known = series[np.isfinite(series)]
    start, end, n = start_level(series), end_level(series), len(known)
    if n < ENOUGH_LOSSES or start <= 0 or not np.isfinite(end):
        return False
    spread = 1.4826 * float(np.median(np.abs(np.diff(known)))) / np.sqrt(2)
    if classes := run.info.get("n_classes"):
        from_level = min(start, float(np.log(classes)))
        most = from_level - end + 2 * 1.25 * spread / np.sqrt(max(5, n // 10))  # of a median
        return bool(most > 0.05 * from_level)
    time = np.arange(n) - (n - 1) / 2
    fall = -float(time @ known / (time @ time)) * n
    return bool(fall + 2 * spread * np.sqrt(12 / n) > 0.05 * start)


def _fell(run: Run, series: Floats) -> bool:
    start, end = start_level(series), end_level(series)
    if run.info.get("maximize") and start < 0:
        return end > start + 0.05 * abs(start)
    if (n := run.info.get("n_classes")) and n > 1:
        chance = float(np.log(n))
        if start < 0.5 * chance:
            return end < 0.75 * chance
        if start > chance and (abs(end - chance) < 0.05 * chance or end > 10 * chance):
            return False
    fell = bool(end < start - 0.05 * abs(start))
    return fell or (
        _explains(run, start, slice(MIN_RECORDS)) and _explains(run, end, slice(-10, None))
    )


def _explains(run: Run, loss: float, window: slice) -> bool:
    """Whether a regression's one output varies far more than it errs, so that it has learnt.

    If it knew nothing of the targets, the mean squared error would be its variance or more.
    """
    record, params = run.activations, run.params
    name = str(run.info.get("loss", run.info.get("loss_func", "")))
    if name not in ("MSELoss", "mse_loss") or record is None or params is None:
        return False
    last = f"{record.names[-1]}.bias"
    if record.types[-1] != "Linear" or last not in params.names or "std" not in record.values:
        return False
    one = meta(params, "numel", 0)[params.names.index(last)] == 1
    return bool(one and np.square(median(record.values["std"][-1, window])) > 2 * loss)


def creeps(run: Run) -> bool:
    """Whether the loss falls by less than 5 %, steadily and by far more than its noise.

    By 2 % or more (below chance, where that is known), from quarter to quarter of the run, and in
    the later half still by four standard errors: a first drop alone is none.
    """
    series = losses(run)
    known = series[np.isfinite(series)]
    if len(known) < ENOUGH_LOSSES or np.isinf(end_level(series)):
        return False
    n = len(known) // 4
    levels = [float(known[i * n : (i + 1) * n].mean()) for i in range(4)]
    spread = 1.4826 * float(np.median(np.abs(np.diff(known)))) / np.sqrt(2)
    chance = float(np.log(run.info.get("n_classes") or np.inf))
    falls = min(start_level(series), chance) - end_level(series)
    steady = levels[0] > levels[1] > levels[2] > levels[3]
    lasts = levels[1] - levels[3] > 4 * spread * np.sqrt(2 / n)
    return bool(steady and lasts and falls > 0.02 * abs(end_level(series)))


def input_size(params: Record | None, layer: str) -> float:
    """About how large a layer's inputs are: its weight's gradient over its bias's, by input.

    The first is a sum of errors times inputs, the second a sum of the errors alone. 1 where it is
    not known, or no gradient arrives.
    """
    names = [f"{layer}.weight", f"{layer}.bias"]
    if params is None or not set(names) <= set(params.names):
        return 1.0
    rows = [params.names.index(name) for name in names]
    grads = table(params, "grad_norm")[rows]
    numel = [meta(params, "numel", 0)[i] for i in rows]
    with np.errstate(all="ignore"):
        ratio = float(median(grads[0] / grads[1]))
    if not all(numel) or not ratio > 0:
        return 1.0
    return ratio / float(np.sqrt(numel[0] / numel[1]))


def drifts(record: Record) -> npt.NDArray[np.bool_]:
    """Whether each parameter has changed over the run, also where no step is seen.

    By its bits, where they were compared; else by its norm, whose last digits say nothing: they
    differ with the order of the sum.
    """
    if "moved" in record.meta:
        return np.array(record.meta["moved"], bool)
    norms = np.nan_to_num(table(record, "weight_norm"))
    return np.asarray(np.ptp(norms, axis=1) > SAME * norms.max(axis=1, initial=0))


def in_turns(run: Run) -> bool:
    """Whether no matrix moves at every step, and some never at the same: a GAN's two players."""
    if run.params is None or len(run.params) < MIN_RECORDS:
        return False
    moves = np.nan_to_num(table(run.params, "update_norm")[matrices(run.params)]) > 0
    if (drifts(run.params)[matrices(run.params)] & ~moves.any(axis=1)).any():
        return True  # always in steps that were not recorded
    moves = moves[moves.mean(axis=1) > 0.1]
    if len(moves) < 2 or moves.mean(axis=1).max() > 0.95:
        return False
    meet = moves.astype(float) @ moves.T.astype(float)
    first, second = np.unravel_index(int(meet.argmin()), meet.shape)
    a, b = np.flatnonzero(moves[first]), np.flatnonzero(moves[second])
    return bool(meet.min() == 0 and a[0] < b[-1] and b[0] < a[-1])
