"""How far the steps can have moved the loss: an upper bound, to first order.

Builds on `loss_trend`. A step dw changes the loss by g·dw, so by at most |g| |dw|, summed over the
parameters. How much of that bound a rise uses says what kind of rise it is: going uphill on purpose
(a wrong sign) uses most of it. A learning rate that is too high makes the loss rise as well, but
then the steps go to and fro: on a quadratic whose distance grows r-fold a step it is (r - 1) / 2 of
the bound, which is a sixteenth where the rise takes ten steps or more to be tenfold. A rise of
twice the bound is not made by the steps.
"""

from __future__ import annotations

import numpy as np

from hookkit.health import reading as read
from hookkit.health.loss_trend import SIGMA, start_level
from hookkit.records import Floats, Record, Run


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
