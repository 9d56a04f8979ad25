"""Axes alike in every picture: titles, scales and ticks, names of layers, marks of epochs and NaN.

Scales and their ticks are matplotlib's; those of histograms are in `bins`. Builds on `arrays`,
`figures` and `labels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter, StrMethodFormatter

from hookkit.plotting.arrays import epoch_starts, step_edges
from hookkit.plotting.figures import ALARM, FAINT, ink, literal
from hookkit.plotting.labels import layer_ticks
from hookkit.records import Record

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
    low, high = ax.dataLim.intervaly  # not `get_ylim`: that would settle the limits now
    scalar = isinstance(ax.yaxis.get_major_formatter(), ScalarFormatter)
    if scalar and high - low > 1e-3 * max(abs(low), abs(high)):  # or the digits would be the same
        # ScalarFormatter's "1e−5" above the axis would lie on the numbers of epochs.
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


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
    ax.text(x, 0.95, BROKEN, transform=across, va="top", ha=ha, fontsize=7)


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
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
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
        # Above a power of ten, or a rounded logarithm would add a tick within the linear part.
        least = 10.0 ** np.round(np.log10(usual)) * (1 + 1e-9)
        decades = np.log10(min(size.max(), _HUGE) / least)
        room = max(1.0, decades / 5)  # or the labels at 0 and on its two sides would touch
        ax.set_yscale("symlog", linthresh=least, linscale=room)
        ax.yaxis.get_major_locator().set_params(numticks=7)
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
