"""How rules read records and losses: rows by type, windows, robust averages, levels, bounds.

Builds on `records`. Medians and windows of many records stand for "lasting": no rule reports
anything that was seen in one batch alone. Overflows are not warned of while rules run: they are
what rules judge. Rows without any value are left out here, since numpy would warn of those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hookkit.records import Floats, Ints, Record

Bools = npt.NDArray[np.bool_]

# With fewer records than this nothing is judged. Half as many are enough if they are spread over
# `SPREAD_STEPS` steps or more, since such batches differ more than neighbours do.
MIN_RECORDS = 10

SPREAD_STEPS = 40

# Relative difference below which two norms may belong to the same values: the last digits of a
# norm depend on the order in which it was summed.
SAME_NORM = 1e-6
# AUTOTRAINER (ICSE 2021): a first layer's gradient below 1e-4 and below 1e-3 of the last one's
VANISHED, VANISHED_RATIO = 1e-4, 1e-3
# A standard deviation, per median absolute deviation, of a normal distribution
SIGMA = 1.4826

RELU_LIKE = frozenset({"ReLU", "ReLU6"})
PRE_ACTIVATION = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d")
EMBEDDINGS = frozenset({"Embedding", "EmbeddingBag"})
RECURRENT = frozenset({"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"})


class Missing(Exception):
    """The run does not hold what a rule needs; the message says what, in a few words."""


# A record, its rows and windows:


def enough(record: Record | None, what: str) -> Record:
    """`record`, if it is there and long enough to judge.

    Raises:
        Missing: it is not.
    """
    if record is None or not record.names:
        raise Missing(f"no {what}")
    half = len(record) >= MIN_RECORDS // 2
    spread = half and record.steps[-1] - record.steps[0] >= SPREAD_STEPS
    if len(record) < MIN_RECORDS and not spread:
        raise Missing(f"fewer than {MIN_RECORDS} records of {what}")
    return record


def table(record: Record, statistic: str) -> Floats:
    """(n_layers, n) of a statistic."""
    if statistic not in record.values:
        raise Missing(f"{statistic} not recorded")
    return record.values[statistic]


def meta(record: Record, key: str, default: Any) -> npt.NDArray[Any]:
    """(n_layers,) what `meta` knows of each row, or `default` for each."""
    found = record.meta.get(key)
    return np.array([default] * len(record.names) if found is None else found)


def are(types: Iterable[str | None], wanted: Collection[str]) -> Bools:
    """Which of the types, one for each row, are among those wanted."""
    return np.array([t in wanted for t in types], bool)


def rows(record: Record, types: Collection[str]) -> Ints:
    """Rows whose module class is one of `types`, in execution order."""
    return np.flatnonzero(are(record.types, types))


def last_half(record: Record) -> slice:
    """The later half of the records, at least `MIN_RECORDS` of them."""
    return slice(min(len(record) // 2, max(len(record) - MIN_RECORDS, 0)), None)


def span(record: Record, window: slice = slice(None)) -> tuple[int, int]:
    """First and last optimizer step of a window of records."""
    steps = record.steps[window]
    last = int(steps[-1]) + int(record.spans[window][-1]) - 1
    return int(steps[0]), last


def where(
    record: Record, which: Iterable[int], window: slice = slice(None)
) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Names of rows, and the steps of a window of records: the end of a finding."""
    return tuple(record.names[i] for i in which), span(record, window)


FIRST = slice(0, 1)
"""The window of what was seen before the first step."""


# Averages of few values:


def known(series: Floats) -> Floats:
    """The finite values of a series."""
    return series[np.isfinite(series)]


def median(values: Floats, axis: int | None = None) -> Any:
    """The median of the finite values; NaN where there are none, without numpy's warning."""
    values = np.reshape(values, -1) if axis is None else np.moveaxis(values, axis, -1)
    values = np.where(np.isfinite(values), values, np.nan)
    seen = np.isfinite(values).any(axis=-1)
    found = np.full(seen.shape, np.nan)
    found[seen] = np.nanmedian(values[seen], axis=-1)
    return found[()]


def percent(share: float) -> str:
    """A share in three digits, so that it does not round to the line that it has crossed."""
    return f"{100 * share:.3g}%"


# Records of parameters: (n_params,):


def is_matrix(record: Record) -> Bools:
    """Which parameters have two dimensions or more."""
    return np.asarray(meta(record, "ndim", 2) >= 2)


def trainable(record: Record) -> Bools:
    """Which parameters require a gradient."""
    return meta(record, "requires_grad", True).astype(bool)


def matrices(record: Record) -> Ints:
    """Rows of trainable parameters with two dimensions or more, without embeddings."""
    embeds = are(record.types, EMBEDDINGS)
    return np.flatnonzero(is_matrix(record) & trainable(record) & ~embeds)


def judged_matrices(record: Record) -> Ints:
    """`matrices`, or where a model has none its embeddings, of which a batch moves some rows."""
    which = matrices(record)
    return which if len(which) else rows(record, EMBEDDINGS)


def has_changed(record: Record) -> Bools:
    """Which parameters have changed over the run, also between recorded steps.

    By their bits, where they were compared; else by their norms, to `SAME_NORM`.
    """
    if "moved" in record.meta:
        return np.array(record.meta["moved"], bool)
    norms = np.nan_to_num(table(record, "weight_norm"))
    high, low = norms.max(axis=1, initial=0), norms.min(axis=1, initial=np.inf)
    return np.asarray(high - low > SAME_NORM * high)


def has_no_gradient(record: Record) -> Bools:
    """Which gradients are known, and exactly 0 in all records."""
    grads = table(record, "grad_norm")
    return np.asarray(np.isfinite(grads).any(axis=1) & (np.nan_to_num(grads) == 0).all(axis=1))


# Series of losses:


def start_level(series: Floats) -> float:
    """Where a loss begins: the median of its first steps (5, or a twentieth of the run).

    But the first value alone, if the loss leapt up with the first step and never came back: the
    first steps are then those after the damage. The mean of the first steps where most are 0.
    """
    values = known(series)
    first = values[: max(5, len(values) // 20)]
    level = float(median(first) or np.mean(first))
    end = values[-max(5, len(values) // 10) :]
    leapt = len(values) > 20 and 0 < 3 * values[0] < level and level > end.max()
    return float(values[0]) if leapt and np.median(end) > values[0] else level


def end_level(series: Floats) -> float:
    """Where a loss ends: the median of its last tenth; inf if it stopped being a number."""
    if stops_being_a_number(series):
        return float("inf")
    values = known(series)
    return float(median(values[-max(5, len(values) // 10) :]))


def stops_being_a_number(series: Floats) -> bool:
    """Whether a loss that was known ends in NaN for longer than its gaps of unknown steps."""
    at = np.flatnonzero(np.isfinite(series))
    if not len(at):
        return False
    gap = int(np.diff(at, prepend=-1).max()) - 1
    return len(series) - 1 - int(at[-1]) > 2 * gap + 2


def noise(values: Floats) -> float:
    """The standard deviation of a loss around its trend, from its changes: robust to outliers."""
    return SIGMA * float(np.median(np.abs(np.diff(values)))) / float(np.sqrt(2))


def smoothed(values: Floats, n: int = 5) -> Floats:
    """Medians of `n` neighbours, so that one odd batch makes no peak."""
    views = np.lib.stride_tricks.sliding_window_view(values, min(n, len(values)))
    return np.asarray(np.median(views, axis=1))


# How far the steps can have moved the loss has an upper bound, to first order: a step dw changes
# the loss by g·dw, so by at most |g| |dw|, summed over the parameters. A rise of twice the bound is
# not made by the steps.


def bound(record: Record) -> Floats:
    """(n,) the sum of |gradient| × |update| over the parameters, at each record."""
    product = table(record, "grad_norm") * table(record, "update_norm")
    return np.asarray(np.nansum(product, axis=0))


def rise_over_bound(record: Record, series: Floats) -> float | None:
    """The loss's rise, until it is tenfold, as a share of the bound; None if it does not rise.

    Raises:
        Missing: records were merged, or hold no gradients.
    """
    if set(record.spans) != {1}:
        raise Missing("not each step of parameters by itself")
    at_records = bound(record)
    loss = series[: record.steps[-1] + 1]
    most = np.interp(np.arange(len(loss)), record.steps, at_records)
    unknown = np.flatnonzero(~np.isfinite(loss))
    loss = loss[: unknown[0]] if len(unknown) else loss
    if len(loss) < MIN_RECORDS:
        return None
    start = float(np.median(loss[:5]))
    high = np.flatnonzero(~(smoothed(loss) <= start + 9 * abs(start)))
    end = int(high[0]) if len(high) else len(loss)
    if end < MIN_RECORDS:
        return None
    jitter = SIGMA * float(median(np.abs(np.diff(loss[:end]))))
    rise = float(median(loss[end - 5 : end])) - start
    total = float(most[:end].sum())
    return rise / total if rise > 3 * jitter and np.isfinite(total) and total > 0 else None
