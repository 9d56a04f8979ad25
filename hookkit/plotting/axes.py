"""Axes alike in every picture: titles, scales and ticks, names of layers, marks of epochs and NaN.

Scales and their ticks are matplotlib's, but for those of histograms: their bins are drawn equally
high, which no locator knows of. Builds on `arrays`, `figures` and `labels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from hookkit.plotting.arrays import epoch_starts, step_edges
from hookkit.plotting.figures import ALARM, FAINT, ink, literal
from hookkit.plotting.labels import layer_ticks
from hookkit.records import Floats, Record

BROKEN = "NaN or Inf"
_HUGE = 1e200
KINDS = {"activation": "activations", "gradient": "gradients", "param": "parameters"}


def title(ax: Any, text: str, pad: float | None = None) -> None:
    """A small title at the left."""
    ax.set_title(literal(text), fontsize=10, loc="left", pad=pad)


def count_steps(ax: Any) -> None:
    """Labels x as optimizer steps, whole numbers also where there are few."""
    ax.set_xlabel("optimizer step", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def plain(ax: Any) -> None:
    """No box, a faint grid, small numbers."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color=ink(ax), alpha=0.1, lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)


def nothing(ax: Any, why: str, *, keep_x: bool = False) -> Any:
    """An Axes that says why it is empty; with `keep_x` the x axis stays."""
    middle = {"transform": ax.transAxes, "ha": "center", "va": "center"}
    ax.text(0.5, 0.5, why, fontsize=8, color=FAINT, **middle)
    ax.yaxis.set_visible(False)
    ax.xaxis.set_visible(keep_x)
    ax.spines["left"].set_visible(False)
    ax.spines[["bottom", "top", "right"]].set_visible(keep_x)
    return ax


def name_layers(
    axis: Any, record: Record, most: int, rotation: float = 0, rows: Sequence[int] | None = None
) -> None:
    """Ticks with the names and types of layers (of `rows`, or all), thinned to about `most`."""
    rows = range(len(record.names)) if rows is None else rows
    ticks = layer_ticks([record.names[i] for i in rows], [record.types[i] for i in rows], most)
    style = {"fontsize": 7 if len(ticks) <= 20 else 6, "rotation": rotation}
    axis.set_ticks([i for i, _ in ticks], [literal(name) for _, name in ticks], **style)


def mark_epochs(ax: Any, record: Record, *, label: bool = True) -> None:
    """Dotted lines where epochs begin, and their numbers along the top."""
    starts = epoch_starts(record)
    if not starts:
        return
    for step, _ in starts:
        ax.axvline(step, color=FAINT, lw=0.7, ls=":")
    if label:
        top = ax.secondary_xaxis("top")
        names = [f"epoch {epoch}" if i == 0 else f"{epoch}" for i, (_, epoch) in enumerate(starts)]
        top.set_xticks([step for step, _ in starts], names, fontsize=6.5, color=FAINT)
        top.tick_params(length=2, pad=1, color=FAINT)
        top.spines["top"].set_visible(False)


def mark_broken(ax: Any, steps: Any, broken: Any) -> None:
    """A vermilion bar along the top of an Axes over the steps with NaN or Inf."""
    if not len(steps) or not np.any(broken):
        return
    edges = step_edges(np.asarray(steps))
    bars = np.stack([edges[:-1], np.diff(edges)], axis=1)[np.asarray(broken, bool)]
    across = ax.get_xaxis_transform()  # x in steps, y in shares of the height
    ax.broken_barh(bars, (0.96, 0.04), transform=across, color=ALARM, lw=0.5, zorder=4)
    late = bars[0, 0] > (edges[0] + edges[-1]) / 2  # on the side that has room
    x, ha = (edges[-1], "right") if late else (bars[0, 0], "left")
    ax.text(x, 0.95, BROKEN, transform=across, va="top", ha=ha, fontsize=7, color=ALARM)


def log_y(ax: Any, values: Any) -> None:
    """A logarithmic y axis with plain numbers, where there is anything positive to show on it."""
    values = np.asarray(values)
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return
    # Matplotlib's margins and its ticks beyond both ends would overflow near the largest float.
    low, high = np.clip((values.min(), values.max()), 1 / _HUGE, _HUGE)
    if high < 5 * low:  # too little to hold two ticks: show the neighbourhood too
        middle = np.sqrt(low) * np.sqrt(high)
        ax.set_ylim(middle / 3, middle * 3)
    elif low > values.min() or high < values.max():
        ax.set_ylim(low, high)
    ax.set_yscale("log", nonpositive="mask")
    leads = (1, 2, 5) if high < 100 * low else (1,)
    ax.yaxis.set_major_locator(LogLocator(subs=leads))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def signed_log_if_wide(ax: Any, values: Any) -> None:
    """A signed-log y axis, where a few values would flatten all others."""
    size = np.abs(values[np.isfinite(values) & (values != 0)])
    if not size.size:
        return
    if size.max() > _HUGE:  # as in `log_y`
        ax.set_ylim(-_HUGE, _HUGE)
    usual = np.clip(np.percentile(size, 75), 1 / _HUGE, _HUGE)
    if size.max() > 100 * usual:
        ax.set_yscale("symlog", linthresh=10.0 ** np.round(np.log10(usual)))
        ax.yaxis.get_major_locator().set_params(numticks=7)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))


def bin_ticks(edges: Floats, first: int, last: int, most: int = 7) -> tuple[Floats, list[str]]:
    """Places (in bins) and labels of round values between the bins `first` and `last`.

    Bins are drawn equally high, whatever their edges: a signed-log axis (or, for equal bins, a
    linear one) whose ticks are true values.
    """
    finite = np.isfinite(edges)
    index, value = np.arange(len(edges))[finite], edges[finite]
    low, high = value[np.clip([first, last + 1], index[0], index[-1]) - index[0]]
    ticks = _round_values(edges, low, high, most)
    places, zero = np.interp(ticks, value, index), np.interp(0.0, value, index)
    apart = 0.6 * (last + 1 - first) / most  # labels closer than this would touch
    shown = _open_bins(edges, first, last)
    taken = [place for place, _ in shown]
    for place, tick in zip(places, ticks, strict=True):
        if all(abs(place - t) >= apart for t in [*taken, *[zero] * bool(tick)]):
            shown.append((float(place), f"{tick:.4g}"))
    shown.sort()
    return np.array([place for place, _ in shown]), [text.replace("-", "−") for _, text in shown]


def _round_values(edges: Floats, low: float, high: float, most: int) -> Floats:
    """About `most` round values from `low` to `high`, of linear or of logarithmic bins."""
    sizes = np.abs(edges[np.isfinite(edges) & (edges != 0)])
    least = sizes.min() if low <= 0 <= high else min(abs(low), abs(high))
    tops = [int(np.floor(np.log10(end) + 1e-9)) for end in (-low, high) if end > least]
    widths = np.diff(edges[np.isfinite(edges)])
    if tops and len(widths) > 2 and not np.allclose(widths, widths[0], rtol=1e-3):
        # Whole decades, the same ones for both signs, from the largest down. Where the two ends are
        # about as large, from the smaller of them, so that both get a label.
        bottom, alike = int(np.ceil(np.log10(least) - 1e-9)), max(tops) - min(tops) <= 1
        n_decades = sum(top - bottom + 1 for top in tops)
        every = max(1, -(-n_decades // (most - 1)))
        powers = 10.0 ** np.arange(min(tops) if alike else max(tops), bottom - 1, -every)
        ticks = np.unique(np.concatenate(([0.0], powers, -powers)))
        ticks = ticks[(low <= ticks) & (ticks <= high)]
        if len(ticks) > 1:
            return ticks
    ticks = np.asarray(MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high))
    return np.asarray(ticks[(low <= ticks) & (ticks <= high)], dtype=np.float64)


def _open_bins(edges: Floats, first: int, last: int) -> list[tuple[float, str]]:
    """Middle and label of the bins, among those shown, that hold all beyond the range."""
    low = [(0.5, f"< {edges[1]:.4g}")] if first == 0 and np.isinf(edges[0]) else []
    n = len(edges) - 1
    high = [(n - 0.5, f"> {edges[-2]:.4g}")] if last == n - 1 and np.isinf(edges[-1]) else []
    return low + high
