"""How far the steps can have moved the loss: to first order, and never further.

A step dw changes the loss by g·dw, and never by more than |g| |dw|, summed over parameters.
Climbing uses most of that. A rate that is too high makes the loss rise as well, but then the steps
go to and fro: where it takes ten of them or more to rise tenfold, that is a sixteenth of the sum
(of a quadratic: (r - 1) / 2, if the distance grows r-fold a step). A rise of twice the sum is not
theirs.
"""

from __future__ import annotations

import numpy as np

from hookkit.health import reading as read
from hookkit.records import Floats, Record, Run


def climbed(record: Record, series: Floats) -> float | None:
    """The rise of the loss over the sum of |g| |dw|, until it has risen tenfold; None if it falls.

    Raises:
        Missing: records were merged, or hold no gradients.
    """
    if set(record.spans) != {1}:
        raise read.Missing("not each step of parameters by itself")
    reach = np.nansum(read.table(record, "grad_norm") * read.table(record, "update_norm"), axis=0)
    loss = series[: record.steps[-1] + 1]
    reach = np.interp(np.arange(len(loss)), record.steps, reach)  # between the records
    unknown = np.flatnonzero(~np.isfinite(loss))
    loss = loss[: unknown[0]] if len(unknown) else loss
    if len(loss) < read.MIN_RECORDS:
        return None
    start = float(np.median(loss[:5]))
    high = np.flatnonzero(~(smoothed(loss) <= start + 9 * abs(start)))
    end = int(high[0]) if len(high) else len(loss)
    if end < read.MIN_RECORDS:
        return None
    noise = 1.4826 * float(read.median(np.abs(np.diff(loss[:end]))))
    rise = float(read.median(loss[end - 5 : end])) - start
    total = float(reach[:end].sum())
    return rise / total if rise > 3 * noise and np.isfinite(total) and total > 0 else None


def at_most(run: Run) -> float | None:
    """The share of its first loss that all steps of a run can take away; None if not known."""
    record, series = run.params, run.losses
    if record is None or series is None or set(record.spans) != {1}:
        return None
    reach = np.nansum(read.table(record, "grad_norm") * read.table(record, "update_norm"), axis=0)
    start = read.start_level(series)
    if not len(reach) or not start > 0 or not np.isfinite(reach).all():
        return None
    return float(reach.mean()) * len(series) / start


def smoothed(values: Floats, n: int = 5) -> Floats:
    """Medians of `n` neighbours, so that one wild batch is no peak."""
    views = np.lib.stride_tricks.sliding_window_view(values, min(n, len(values)))
    return np.asarray(np.median(views, axis=1))
