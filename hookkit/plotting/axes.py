"""How every picture dresses its axes: titles, names of layers, marks of epochs and of NaN or Inf.

Nothing here imports matplotlib: an axis, or a figure, is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hookkit.plotdata import epoch_starts, layer_ticks, step_edges
from hookkit.records import Record

INK = "#222222"
FAINT = "#9a9a9a"
ALARM = "#d55e00"
"""Vermilion of Okabe and Ito's palette, which colour-blind readers can tell: NaN or Inf only."""
NEVER = "#dcdcdc"
BLUE = "#0072b2"
ORANGE = "#e69f00"
KINDS = {"activation": "activations", "gradient": "gradients", "param": "parameters"}


def title(place: Any, text: str) -> None:
    """A small title at the left of an Axes, or over a Figure."""
    if hasattr(place, "suptitle"):
        place.suptitle(text, fontsize=10)
    else:
        place.set_title(text, fontsize=10, loc="left")


def plain(ax: Any) -> None:
    """No box, a faint grid, small numbers."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#e6e6e6", lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)


def nothing(ax: Any, why: str) -> Any:
    """An Axes that says why it is empty."""
    ax.text(
        0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=8, color=FAINT
    )
    ax.set_yticks([])
    return ax


def name_layers(axis: Any, names: Sequence[str], most: int, rotation: float = 0) -> None:
    """Ticks with the names of layers, thinned to about `most`."""
    ticks = layer_ticks(names, most)
    size = 7 if len(ticks) <= 20 else 6
    axis.set_ticks(
        [i for i, _ in ticks], [name for _, name in ticks], fontsize=size, rotation=rotation
    )


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
    turns = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(broken, int), [0]))))
    bars = [(edges[a], edges[b] - edges[a]) for a, b in turns.reshape(-1, 2)]
    across = ax.get_xaxis_transform()  # x in steps, y in shares of the height
    ax.broken_barh(bars, (0.96, 0.04), transform=across, color=ALARM, lw=0)
    ax.annotate(
        "NaN or Inf", (bars[0][0], 0.95), xycoords=across, va="top", fontsize=7, color=ALARM
    )


def log_y(ax: Any, values: Any) -> None:
    """A logarithmic y axis, where there is anything positive to show on it."""
    values = np.asarray(values)
    if (np.isfinite(values) & (values > 0)).any():
        ax.set_yscale("log", nonpositive="mask")


def signed_log_if_wide(ax: Any, values: Any) -> None:
    """A signed-log y axis, where a few values would press all others flat."""
    size = np.abs(values[np.isfinite(values) & (values != 0)])
    if size.size and size.max() > 100 * np.median(size):
        ax.set_yscale("symlog", linthresh=float(np.median(size)))
