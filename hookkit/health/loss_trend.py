"""Does the loss fall, and have the steps done it?

Builds on `reading`. A loss counts as fallen if it ends 5 % or more below its start. Three more
questions make that honest: did it only come down from a wild start to chance; does it fall by less,
but steadily; and is it so noisy that a fall of 5 % may hide in it.

How far the steps can have moved the loss has an upper bound, to first order. A step dw changes the
loss by g·dw, so by at most |g| |dw|, summed over the parameters. How much of that bound a rise uses
says what kind of rise it is: going uphill on purpose (a wrong sign) uses most of it. A learning
rate that is too high makes the loss rise as well, but then the steps go to and fro: on a quadratic
whose distance grows r-fold a step it is (r - 1) / 2 of the bound, which is a sixteenth where the
rise takes ten steps or more to be tenfold. A rise of twice the bound is not made by the steps.
"""

from __future__ import annotations

import numpy as np

from hookkit.health import reading as read
from hookkit.health.reading import Missing
from hookkit.records import Floats, Record, Run

# In fewer steps than this, a loss that does not fall proves nothing
ENOUGH_LOSSES = 50
# Ben Braiek & Khomh 2022 (TheDeepChecker): a loss that falls by less than 5 % does not fall
FALL = 0.05
# A steady fall of 2 % is one, too (hookkit, measured)
SLOW_FALL = 0.02
# Shares of chance: a loss that begins below half of it belongs to a model that had learnt before,
# and counts as fallen while it ends below three quarters of it (hookkit, measured).
LEARNT_BEFORE, STILL_LEARNT = 0.5, 0.75
# A standard deviation, per median absolute deviation, of a normal distribution
SIGMA = 1.4826


def losses(run: Run, at_least: int = 1) -> Floats:
    """(n_steps,) losses, NaN where unknown.

    Raises:
        Missing: none is known, or there are fewer than `at_least` steps.
    """
    if run.losses is None or not np.isfinite(run.losses).any():
        raise Missing("no losses")
    if len(run.losses) < at_least:
        raise Missing(f"fewer than {at_least} steps of loss")
    return np.asarray(run.losses, np.float64)


def known(series: Floats) -> Floats:
    """The finite values of a series."""
    return series[np.isfinite(series)]


def start_level(series: Floats) -> float:
    """Where a loss begins: the median of its first steps (5, or a twentieth of the run).

    But the first value alone, if the loss leapt up with the first step and never came back: the
    first steps are then those after the damage.
    """
    values = known(series)
    level = float(read.median(values[: max(5, len(values) // 20)]))
    end = values[-max(5, len(values) // 10) :]
    leapt = len(values) > 20 and 0 < 3 * values[0] < level and level > end.max()
    return float(values[0]) if leapt and np.quantile(end, 0.1) > values[0] else level


def end_level(series: Floats) -> float:
    """Where a loss ends: the median of its last tenth; inf if it stopped being a number."""
    if stops_being_a_number(series):
        return float("inf")
    values = known(series)
    return float(read.median(values[-max(5, len(values) // 10) :]))


def stops_being_a_number(series: Floats) -> bool:
    """Whether a loss that was known ends in NaN for longer than its gaps of unknown steps."""
    at = np.flatnonzero(np.isfinite(series))
    if not len(at):
        return False
    gap = int(np.diff(at, prepend=-1).max()) - 1
    return len(series) - 1 - int(at[-1]) > 2 * gap + 2


def improved(run: Run) -> bool | None:
    """Whether the loss fell, by 5 % or more; None when it is unknown.

    In fewer than `ENOUGH_LOSSES` steps only a loss that rises proves something: one that stays may
    have had no time.
    """
    try:
        series = losses(run, read.MIN_RECORDS)
    except Missing:
        return None
    fell = _has_fallen(run, series)
    if len(series) < ENOUGH_LOSSES and not fell:
        return None if end_level(series) <= 1.5 * abs(start_level(series)) else False
    return fell


def _has_fallen(run: Run, series: Floats) -> bool:
    """Whether a loss ends well below its start, and not merely where guessing would be.

    Coming down from a wild first loss to chance (ln of the number of classes) is no progress. A
    loss that begins far below chance is a model that had learnt before, and need not fall; so with
    a squared error far below the variance of what the model gives. Below 0 and maximised, the loss
    is a likelihood, which should rise.
    """
    start, end = start_level(series), end_level(series)
    if run.info.get("maximize") and start < 0:
        return end > start + FALL * abs(start)
    if (n := run.info.get("n_classes")) and n > 1:
        chance = float(np.log(n))
        if start < LEARNT_BEFORE * chance:
            return end < STILL_LEARNT * chance
        if start > chance and (abs(end - chance) < FALL * chance or end > 10 * chance):
            return False
    if end < start - FALL * abs(start):
        return True
    at_start, at_end = slice(read.MIN_RECORDS), slice(-10, None)
    return _explains_targets(run, start, at_start) and _explains_targets(run, end, at_end)


def _explains_targets(run: Run, loss: float, window: slice) -> bool:
    """Whether a regression with one output errs by far less than its output varies.

    If the output had nothing to do with the targets, the mean squared error would be at least the
    output's variance. Half of that is then proof that it has learnt.
    """
    record, params = run.activations, run.params
    name = str(run.info.get("loss", run.info.get("loss_func", "")))
    if name not in ("MSELoss", "mse_loss") or record is None or params is None:
        return False
    last = f"{record.names[-1]}.bias"
    if record.types[-1] != "Linear" or last not in params.names or "std" not in record.values:
        return False
    one = read.meta(params, "numel", 0)[params.names.index(last)] == 1
    return bool(one and np.square(read.median(record.values["std"][-1, window])) > 2 * loss)


def _noise(values: Floats) -> float:
    """The standard deviation of a loss around its trend, from its changes: robust to outliers."""
    return SIGMA * float(np.median(np.abs(np.diff(values)))) / float(np.sqrt(2))


def noise_may_hide_a_fall(run: Run) -> bool:
    """Whether a fall of 5 % cannot be excluded at two standard errors, for the noise of the loss.

    By the slope over the run; where chance is known, by how far below it the run ends.
    """
    series = losses(run)
    values = known(series)
    start, end, n = start_level(series), end_level(series), len(values)
    if n < ENOUGH_LOSSES or start <= 0 or not np.isfinite(end):
        return False
    noise = _noise(values)
    if classes := run.info.get("n_classes"):
        from_level = min(start, float(np.log(classes)))
        error = 1.25 * noise / np.sqrt(max(5, n // 10))  # standard error of a median
        return bool(from_level - end + 2 * error > FALL * from_level)
    time = np.arange(n) - (n - 1) / 2
    fall = -float(time @ values / (time @ time)) * n
    error = noise * np.sqrt(12 / n)  # standard error of a fitted slope, over the run
    return bool(fall + 2 * error > FALL * start)


def falls_slowly(run: Run) -> bool:
    """Whether the loss falls by less than 5 %, but steadily and by far more than its noise.

    By 2 % or more (below chance, where that is known), from quarter to quarter of the run, and in
    the later half still by four standard errors: so that a first drop alone is no slow fall.
    """
    series = losses(run)
    values = known(series)
    if len(values) < ENOUGH_LOSSES or np.isinf(end_level(series)):
        return False
    n = len(values) // 4
    levels = [float(values[i * n : (i + 1) * n].mean()) for i in range(4)]
    chance = float(np.log(run.info.get("n_classes") or np.inf))
    fall = min(start_level(series), chance) - end_level(series)
    steady = levels[0] > levels[1] > levels[2] > levels[3]
    lasts = levels[1] - levels[3] > 4 * _noise(values) * np.sqrt(2 / n)
    return bool(steady and lasts and fall > SLOW_FALL * abs(end_level(series)))


def _bound(record: Record) -> Floats:
    """(n,) the sum of |gradient| × |update| over the parameters, at each record."""
    product = read.table(record, "grad_norm") * read.table(record, "update_norm")
    return np.asarray(np.nansum(product, axis=0))


def rise_over_bound(record: Record, series: Floats) -> float | None:
    """The loss's rise, until it is tenfold, as a share of the bound; None if it does not rise.

    Raises:
        Missing: records were merged, or hold no gradients.
    """
    if set(record.spans) != {1}:
        raise read.Missing("not each step of parameters by itself")
    bound = _bound(record)
    loss = series[: record.steps[-1] + 1]
    bound = np.interp(np.arange(len(loss)), record.steps, bound)  # between the records
    unknown = np.flatnonzero(~np.isfinite(loss))
    loss = loss[: unknown[0]] if len(unknown) else loss
    if len(loss) < read.MIN_RECORDS:
        return None
    start = float(np.median(loss[:5]))
    high = np.flatnonzero(~(smoothed(loss) <= start + 9 * abs(start)))
    end = int(high[0]) if len(high) else len(loss)
    if end < read.MIN_RECORDS:
        return None
    noise = SIGMA * float(read.median(np.abs(np.diff(loss[:end]))))
    rise = float(read.median(loss[end - 5 : end])) - start
    total = float(bound[:end].sum())
    return rise / total if rise > 3 * noise and np.isfinite(total) and total > 0 else None


def possible_fall(run: Run) -> float | None:
    """The most that all steps of a run can take away, as a share of its first loss.

    None if it is not known.
    """
    record, series = run.params, run.losses
    if record is None or series is None or set(record.spans) != {1}:
        return None
    bound, start = _bound(record), start_level(series)
    if not len(bound) or not start > 0 or not np.isfinite(bound).all():
        return None
    return float(bound.mean()) * len(series) / start


def smoothed(values: Floats, n: int = 5) -> Floats:
    """Medians of `n` neighbours, so that one odd batch makes no peak."""
    views = np.lib.stride_tricks.sliding_window_view(values, min(n, len(values)))
    return np.asarray(np.median(views, axis=1))
