"""What the pictures show, as plain arrays: edges, limits of colours, chosen steps, smoothing.

Everything about a picture that can be decided, and tested, without matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hookkit.checks import is_whole, shown
from hookkit.errors import OptionError
from hookkit.records import Floats, Ints, Record, Run


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
    """(n + 1,) edges of the cells of `steps`: each reaches to the next record."""
    width = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    return np.append(steps.astype(np.float64), steps[-1] + width)


def pool(
    table: Floats, edges: Floats, most: int, *, signed: bool = False
) -> tuple[Floats, Floats, int]:
    """`table` (rows, n) with its columns merged to at most `most`; its edges; how many were merged.

    Each cell keeps the largest of its group (`signed`: of finite values the one farthest from 0),
    so that one spike in 2,000 steps stays visible; the renderer would drop columns at random.
    """
    n = table.shape[1]
    k = max(1, -(-n // most))
    if k == 1:
        return table, edges, 1
    low = np.where(np.isnan(table), -np.inf, table)
    pooled = np.maximum.reduceat(low, np.arange(0, n, k), axis=1)
    if signed:
        least = np.minimum.reduceat(
            np.where(np.isfinite(table), table, np.inf), np.arange(0, n, k), axis=1
        )
        falls = np.isfinite(pooled) & (-least > np.abs(pooled))
        pooled = np.where(falls, least, pooled)
    ran = np.logical_or.reduceat(~np.isnan(table), np.arange(0, n, k), axis=1)
    return np.where(ran, pooled, np.nan), np.append(edges[:-1:k], edges[-1]), k


def log10(values: Floats) -> Floats:
    """log10 without warnings: −inf for 0, NaN for NaN and for negatives."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log10(values), dtype=np.float64)


def since_start(values: Floats) -> tuple[Floats, Floats]:
    """log10 of how many times as large each row of `values` (rows, n) is as at first; and of that.

    At first: the median above 0 in the first tenth of the columns, or of as many later ones. NaN,
    and −inf for 0, stay.
    """
    logs = log10(values)
    n, starts = max(1, logs.shape[1] // 10), np.full((len(logs), 1), np.nan)
    for row, start in zip(logs, starts, strict=True):
        head = row[:n][np.isfinite(row[:n])]
        later = row[np.isfinite(row)][:n]
        if len(later):
            start[0] = np.median(head if len(head) else later)
    return np.where(np.isneginf(logs), logs, logs - starts), starts[:, 0]


SETTLED = 0.01
"""Relative update from which on a parameter that begins at 0 has one. After t steps of the same
size in one direction it is 1/t whatever the learning rate; by then it has come from 100 steps."""


def update_ratios(record: Record) -> tuple[Floats, Any]:
    """update:weight, NaN where a parameter has no value yet; and (rows, n) bool where that is.

    A parameter that begins at 0 has none until a step first changes it by 1 % or less: a relative
    update of 0 is infinite, and stays large as long as all that there is comes from a few steps.
    """
    ratio = record.value("update_ratio").copy()
    weight = record.values.get("weight_norm", np.ones_like(ratio))
    if not len(record):
        return ratio, np.zeros(ratio.shape, bool)
    first = np.argmax(~np.isnan(ratio), axis=1)[:, None]
    began = [np.take_along_axis(table, first, axis=1) for table in (ratio, weight)]
    settled = np.maximum.accumulate((ratio <= SETTLED) & (weight > 0), axis=1)
    young = (np.isposinf(began[0]) | (began[1] == 0)) & ~settled & (ratio > 0)
    ratio[young] = np.nan
    return ratio, young


def columns_of(record: Record, steps: Sequence[int] | None) -> list[int]:
    """Columns of the records nearest to `steps`; None for 0, 1, 10, 100, … and the last.

    Raises an OptionError if `steps` is no list of numbers, is empty, or leaves what was recorded.
    """
    first, last, end = record.steps[0], record.steps[-1], int(step_edges(record.steps)[-1]) - 1
    if steps is None:
        wanted = [first, *(10**k for k in range(12) if 10**k < 0.7 * last), last]
    else:
        wanted = [] if isinstance(steps, str) or not isinstance(steps, Iterable) else list(steps)
        if not wanted:
            raise OptionError(
                f"steps={shown(steps)}: give a list of optimizer steps, such as [0, 100], or None "
                f"for the first, 1, 10, 100, … and the last."
            )
        for step in wanted:
            if not is_whole(step) or not first <= step <= end:
                raise OptionError(
                    f"step {step} was not recorded: the records cover the steps {first} to {end}. "
                    f"Use one of these; the nearest record is taken."
                )
    return sorted({int(np.abs(record.steps - step).argmin()) for step in wanted})


MIN_BLOCKS = 6
"""Of fewer blocks (the stages of a net, say) the next finer ones are taken."""


def blocks(names: Sequence[str]) -> Ints | None:
    """(n,) for each layer the number of the block that it is in; None if there are no blocks.

    A block is what a parent whose name ends in a number holds (`h.3`, `layer1.0`): by the first
    such number in a name, the second one, …, whichever gives six blocks of two layers or more.

    >>> names = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    >>> blocks(["wte", *names]).tolist()
    [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    """
    depth = max((name.count(".") for name in names), default=0)
    for level in range(depth):
        heads = [_block(name.split("."), level) for name in names]
        begins = [i == 0 or heads[i] != heads[i - 1] for i in range(len(heads))]
        found = np.cumsum(begins) - 1
        if (np.bincount(found) > 1).sum() >= MIN_BLOCKS:
            return np.asarray(found, np.int64)
    return None


def _block(path: list[str], level: int) -> list[str]:
    """The parents in `path` up to the one numbered `level`, or to the last that has a number."""
    numbered = [i for i, part in enumerate(path[:-1]) if part[-1:].isdigit()]
    return path[: numbered[: level + 1][-1] + 1] if numbered else path


def smoothed(values: Floats, width: int) -> Floats:
    """Running mean of the finite `values` over `width`; NaN stays NaN.

    The window is centred, so that the mean does not lag, and narrower near the first value, where
    the mean begins: half a window would begin below a falling series.
    """
    if not len(values):
        return values
    width = min(width, len(values)) | 1
    finite = np.isfinite(values)
    known, kernel = np.where(finite, values, 0.0), np.ones(width)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.convolve(known, kernel, "full")[width // 2 :][: len(values)]
        count = np.convolve(finite.astype(np.float64), kernel, "full")[width // 2 :][: len(values)]
        for i in range(width // 2):
            total[i], count[i] = known[: 2 * i + 1].sum(), finite[: 2 * i + 1].sum()
    return np.where(finite, total / np.maximum(count, 1.0), np.nan)


def median_width(n: int) -> int:
    """Over how many of `n` values to take a running median: a fortieth, from 5 to 1001."""
    return int(np.clip(n // 40, 5, 1001)) | 1


def running_median(values: Floats, width: int, most: int = 4000) -> tuple[Ints, Floats]:
    """Indices of at most about `most` of the finite `values`, and the median around each.

    One spike does not move it, and it does not fall behind a falling series, as a mean does. The
    window is centred, and narrower near the first value; near the last one it holds what is there,
    so that the median does not end in the noise of the last step.
    """
    n, half = len(values), width // 2
    at = np.unique(np.append(np.arange(0, n, -(-n // most)), n - 1))
    reach = np.minimum(at, half)
    windows = (values[i - k : i + k + 1] for i, k in zip(at, reach, strict=True))
    with np.errstate(over="ignore"):
        return at, np.array([np.median(window) for window in windows])


def span(values: Floats) -> tuple[float, float]:
    """The least and greatest finite value; (0, 0) when there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


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


def judged_windows(record: Record, rows: Any) -> tuple[Ints, Ints]:
    """First and last column of the windows over which dead units of `rows` were judged.

    What a record says of dead units is about the window that ends there. Of the windows that begin
    at one record, the longest is taken; they begin half a window apart. Windows with NaN or Inf in
    `rows` are left out. Where the window is not known, each record is one by itself.
    """
    last = np.cumsum(record.spans) - 1  # numbers of records, of which a column may have several
    first = last - record.spans + 1
    start = last
    if "window" in record.meta:
        half = max(int(record.meta["window"]) // 2, 1)
        start = np.maximum((last // half - 1) * half, 0)
    begin = np.searchsorted(first, start, side="right") - 1
    bad = np.append(0, np.cumsum(nonfinite(record)[rows].any(axis=0)))
    fine = np.flatnonzero(bad[1:] == bad[begin])
    longest = np.append(np.diff(begin[fine]) > 0, True) if len(fine) else np.zeros(0, bool)
    end = fine[longest]
    return begin[end], end


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
