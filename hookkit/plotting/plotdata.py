"""What the pictures show, as plain arrays: ticks, edges, colours' limits, spikes, chosen steps.

Everything about a picture that can be decided, and tested, without matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hookkit.errors import OptionError
from hookkit.plotting.naming import as_record, as_run
from hookkit.records import Floats, Ints, Record, Run

__all__ = ["as_record", "as_run"]  # what every picture begins with


def epoch_starts(record: Record, most: int = 12) -> list[tuple[float, int]]:
    """The step at which each epoch begins, and its number; thinned to about `most`.

    Empty when the record spans one epoch only: there is nothing to mark. Another fit begins an
    epoch too, also where it has the number of the one before.
    """
    again = np.diff(record.iters) < 0  # batches are counted from 0 in each fit
    changed = np.flatnonzero((np.diff(record.epochs) != 0) | again) + 1
    if not len(changed):
        return []
    starts = [(float(record.steps[i]), int(record.epochs[i])) for i in (0, *changed)]
    every = -(-len(starts) // most)
    return starts[::every]


def step_edges(steps: Ints) -> Floats:
    """(n + 1,) edges of the cells of `steps`: each reaches to the next record.

    >>> step_edges(np.array([0, 10, 20]))
    array([ 0., 10., 20., 30.])
    """
    width = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    return np.append(steps.astype(np.float64), steps[-1] + width)


def pool(table: Floats, edges: Floats, most: int) -> tuple[Floats, Floats, int]:
    """`table` (rows, n) with its columns merged to at most `most`; its edges; how many were merged.

    Each cell keeps the largest of its group, so that one spike in 2,000 steps stays visible: to
    leave the merging to the renderer would drop columns at random.
    """
    n = table.shape[1]
    k = max(1, -(-n // most))
    if k == 1:
        return table, edges, 1
    low = np.where(np.isnan(table), -np.inf, table)
    pooled = np.maximum.reduceat(low, np.arange(0, n, k), axis=1)
    ran = np.logical_or.reduceat(~np.isnan(table), np.arange(0, n, k), axis=1)
    return np.where(ran, pooled, np.nan), np.append(edges[:-1:k], edges[-1]), k


def log10(values: Floats) -> Floats:
    """log10 without warnings: −inf for 0, NaN for NaN and for negatives."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log10(values), dtype=np.float64)


def limits(values: Floats, least: float = 1.0) -> tuple[float, float]:
    """Colour limits of `values`: their 0.5 and 99.5 percentiles, at least `least` apart."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, least
    low, high = (float(v) for v in np.percentile(finite, (0.5, 99.5)))
    short = max(0.0, least - (high - low)) / 2
    return low - short, high + short


def shares(record: Record, row: int) -> Floats:
    """(n_bins, n) share of each record's counted values in each bin, NaN where none was counted."""
    if record.hist is None:
        raise OptionError(
            f"a histogram of {record.names[row]!r} is needed, none was recorded. "
            f"Record with `with_hist=True`."
        )
    counts = record.hist[row].astype(np.float64)
    total = counts.sum(axis=0)
    return np.asarray(counts / np.where(total > 0, total, np.nan), dtype=np.float64)


def is_linear(edges: Floats) -> bool:
    """Whether the finite bins have equal widths (a range of the user's) or are signed-log."""
    widths = np.diff(edges[np.isfinite(edges)])
    return len(widths) < 3 or bool(np.allclose(widths, widths[0], rtol=1e-3))


def bin_ticks(edges: Floats, first: int, last: int, most: int = 7) -> tuple[Floats, list[str]]:
    """Places (in bins) and labels of round values between the bins `first` and `last`.

    Bins are drawn equally high, whatever their edges: a signed-log axis (or, for equal bins, a
    linear one) whose ticks are true values.
    """
    finite = np.isfinite(edges)
    index, value = np.arange(len(edges))[finite], edges[finite]
    low, high = value[np.clip([first, last + 1], index[0], index[-1]) - index[0]]
    if is_linear(edges):
        step = _round_step((high - low) / most)
        ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
        labels = [f"{t:.6g}" for t in ticks]
    else:
        ticks, labels = _log_ticks(low, high, value, most)
    places = np.interp(ticks, value, index)
    nil, apart = np.interp(0.0, value, index), 0.6 * (last + 1 - first) / most
    open_ended = _open_bins(edges, first, last)
    kept = [
        (place, label)
        for place, label, tick in zip(places, labels, ticks, strict=True)
        if (not tick or abs(place - nil) >= apart)
        and all(abs(place - middle) >= apart for middle, _ in open_ended)
    ]
    both = sorted([*kept, *open_ended])
    return np.array([place for place, _ in both]), [label.replace("-", "−") for _, label in both]


def _open_bins(edges: Floats, first: int, last: int) -> list[tuple[float, str]]:
    """Middle and label of the bins, among those shown, that hold all beyond the range."""
    low = [(0.5, f"< {_short(edges[1])}")] if first == 0 and np.isinf(edges[0]) else []
    n = len(edges) - 1
    high = [(n - 0.5, f"> {_short(edges[-2])}")] if last == n - 1 and np.isinf(edges[-1]) else []
    return low + high


def _short(edge: float) -> str:
    return f"{edge:.4g}" if 1e-3 <= abs(edge) < 1e4 or not edge else _power(edge)


def _round_step(rough: float) -> float:
    power = 10.0 ** np.floor(np.log10(rough))
    return float(power * next(m for m in (1, 2, 5, 10) if m * power >= rough * 0.999))


def _log_ticks(low: float, high: float, value: Floats, most: int) -> tuple[Floats, list[str]]:
    """±10^k and 0 inside [low, high]: of both signs the same decades, as many as `most` allows."""
    if low <= 0 <= high:
        smallest = int(np.ceil(np.log10(np.abs(value[value != 0]).min()) - 1e-9))
    else:
        smallest = int(np.floor(np.log10(min(abs(low), abs(high))) + 1e-9))
    sizes = [max(-low, 1e-300), max(high, 1e-300)]  # of the negative values, of the positive
    tops = [int(np.floor(np.log10(size) + 1e-9)) for size in sizes]
    decades = sum(max(0, top - smallest + 1) for top in tops)
    every = max(1, -(-decades // max(1, most - 1)))
    alike = max(tops) - min(tops) <= 1  # then the ends of both have one
    start = smallest + ((min if alike else max)(tops) - smallest) % every
    powers = 10.0 ** np.arange(start, max(tops) + 1, every)
    for lead in ([1], [1, 2, 5], np.arange(1, 10, 0.5)):  # finer, where values are close together
        ticks = np.outer(lead, powers).ravel()
        inside = np.unique([t for t in (0.0, *ticks, *-ticks) if low <= t <= high])
        if len(inside) >= 2:
            break
    return inside, [_power(t) for t in inside]


def _power(tick: float) -> str:
    if 0.01 <= abs(tick) <= 1000 or not tick:
        return f"{tick:g}"
    lead, _, power = f"{tick:.1e}".partition("e")
    return f"{lead.removesuffix('.0')}e{int(power)}"


def used_bins(used: Any) -> tuple[int, int]:
    """First and last of the bins that hold anything, (n_bins,) bool, with one to spare."""
    rows = np.flatnonzero(used)
    if not len(rows):
        return 0, len(used) - 1
    return max(0, int(rows[0]) - 1), min(len(used) - 1, int(rows[-1]) + 1)


def chosen_columns(steps: Ints, wanted: Sequence[int] | None = None) -> list[int]:
    """Columns of the records nearest to the `wanted` steps; default 0, 1, 10, 100, … and last."""
    if not len(steps):
        return []
    last = int(steps[-1])
    if wanted is None:
        powers = [10**k for k in range(12) if 10**k < last * 0.7]
        wanted = [int(steps[0]), *powers, last]
    return sorted({int(np.abs(steps - step).argmin()) for step in wanted})


def asked_columns(record: Record, steps: Sequence[int] | None) -> list[int]:
    """Columns of the records nearest to `steps`, each of which is within what was recorded.

    Raises:
        OptionError: `steps` is no list of numbers, is empty, or leaves what was recorded.
    """
    if steps is not None:
        listed = [] if isinstance(steps, str) or not isinstance(steps, Iterable) else list(steps)
        if not listed:
            raise OptionError(
                f"steps={steps!r} was asked for: it is a list of optimizer steps. "
                f"Use steps=[0, 100], or None for the first, 1, 10, 100, … and the last."
            )
        for step in listed:
            check_step(record, step)
        steps = listed
    return chosen_columns(record.steps, steps)


def check_step(record: Record, step: int) -> None:
    """That `step` is among those recorded, or between two of them.

    Raises:
        OptionError: it is before the first or after the last, or no whole number.
    """
    first, last = int(record.steps[0]), int(step_edges(record.steps)[-1]) - 1
    whole = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
    if not whole or not first <= step <= last:
        raise OptionError(
            f"step {step} was asked for, the records cover the steps {first} to {last}. "
            f"Use one of these; the nearest record is taken."
        )


def smoothed(values: Floats, width: int | None = None) -> Floats:
    """Running mean of the finite `values`, centred so that it does not lag; default: n/40 wide."""
    if not len(values):
        return values
    width = (width or max(5, len(values) // 40)) | 1
    finite = np.isfinite(values)
    kernel = np.ones(min(width, len(values)))
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.convolve(np.where(finite, values, 0.0), kernel, "same")
    count = np.convolve(finite.astype(np.float64), kernel, "same")
    return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def span(values: Floats) -> tuple[float, float]:
    """The least and greatest finite value; (0, 0) when there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def spikes(values: Floats, window: int = 128, sigmas: float = 6.0, least: int = 32) -> Ints:
    """Where `values` exceed the mean of the `window` before by `sigmas` standard deviations.

    Source: OLMo-core's `StabilityMonitor` (6 sigma, 128 steps). The first `least` steps are never
    called spikes: there is nothing yet to compare them with.
    """
    found = []
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(least, len(values)):
            past = values[max(0, i - window) : i]
            past = past[np.isfinite(past)]
            if len(past) >= least and values[i] > past.mean() + sigmas * past.std() + 1e-12:
                found.append(i)
    return np.array(found, dtype=np.int64)


def valid_losses(run: Run, n_steps: int) -> list[tuple[float, float]]:
    """(step, validation loss) of each epoch that has one, at the end of the epoch.

    Where a row does not say its last step, epochs are found in the records, in order, since
    another fit counts them from 0 again; else they are taken to be equally long.
    """
    records = [r for r in run.records if len(r)]
    starts = epoch_starts(records[0], most=len(records[0])) if records else []
    ends = [*(start - 1 for start, _ in starts[1:]), float(n_steps - 1)]
    if len(ends) != len(run.valid):
        each = n_steps / len(run.valid) if n_steps and len(run.valid) else 1.0
        ends = [(i + 1) * each - 1 for i in range(len(run.valid))]
    return [
        (float(row.get("step", end)), float(row["valid_loss"]))
        for row, end in zip(run.valid, ends, strict=True)
        if isinstance(row.get("valid_loss"), (int, float, np.number))
    ]


def nonfinite(record: Record) -> Any:
    """(n_layers, n) bool: where a NaN or an Inf was counted."""
    shape = (len(record.names), len(record))
    return np.asarray(record.values.get("nonfinite", np.zeros(shape))) > 0


def gradient_norms(run: Run) -> tuple[Ints, Floats]:
    """Steps and global gradient norms: as recorded, else from the norms of all parameters."""
    if run.grad_norms is not None and np.isfinite(run.grad_norms).any():
        return np.arange(len(run.grad_norms)), np.asarray(run.grad_norms, dtype=np.float64)
    if run.params is None or not len(run.params) or "grad_norm" not in run.params.values:
        return np.zeros(0, np.int64), np.zeros(0)
    norms = run.params.value("grad_norm")
    known = ~np.isnan(norms).all(axis=0)
    total = np.sqrt(np.nansum(np.square(norms), axis=0))
    return run.params.steps, np.where(known, total, np.nan)


def broken_series(values: Floats) -> Any:
    """(n,) bool: where a loss or norm was Inf, or NaN to the end for longer than ever before.

    NaN alone says only that a step's value is not known (one may be read every tenth step).
    """
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return np.isinf(values)
    gap = int(np.diff(known, prepend=-1).max())
    ended = np.arange(len(values)) > known[-1]
    return np.isinf(values) | (ended & (len(values) - known[-1] > gap))
