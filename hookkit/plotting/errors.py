"""`plot_errors`: how far two models are apart, by depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.plotting.axes import nothing, plain, title
from hookkit.plotting.figures import BLUE, ORANGE, literal, new_axes
from hookkit.plotting.labels import layer_ticks
from hookkit.plotting.lines import line

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_errors(comparison: Any, *, ax: Any = None) -> Axes:
    """The relative error ‖a−b‖/‖a‖ of each output, in the order in which layers finish; the Axes.

    Of a `Comparison`: blue is the error, orange what a module adds itself, if it adds any (with
    `isolate=True`). A ring marks the first output beyond the tolerance. Outputs that are equal are
    drawn at the bottom, which is called so, and errors that are not finite at the top.
    """
    rows = [r for r in comparison if r.what == "output" and not r.problem]
    ax = new_axes(ax, 10, 3.6)
    title(ax, "Relative error by depth")
    if not rows:
        nothing(ax, "nothing to compare")
        return ax
    x = np.arange(len(rows))
    errors = np.array([r.rel for r in rows])
    own = np.array([r.own_rel for r in rows])
    low, high = _scale(ax, np.concatenate([errors, own]))
    line(ax, x, np.clip(np.nan_to_num(errors, nan=high, posinf=high), low, high), color=BLUE,
         marker="o", ms=3, label="error")  # fmt: skip
    if np.isfinite(own).any():  # none at the bottom: many would hide the line there
        some = np.where(own > 0, np.clip(own, low, high), np.nan)
        ax.plot(x, some, "s", color=ORANGE, ms=4, label="own error, if any")
    first = next((i for i, r in enumerate(rows) if r is comparison.first), None)
    if first is not None:
        at = min(max(errors[first], low), high)
        ax.plot(
            [first], [at], "o", mfc="none", mec=ORANGE, ms=12, label="first beyond the tolerance"
        )
    ticks = layer_ticks([r.name or "(model)" for r in rows], [r.type for r in rows], 20, 30)
    ax.set_xticks([i for i, _ in ticks], [literal(t) for _, t in ticks], rotation=35, ha="right")
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderpad": 0, "ncols": 3}
    ax.legend(frameon=False, fontsize=8, **place)  # above the panel: within, it may lie on lines
    plain(ax)
    return ax


def _scale(ax: Any, values: Any) -> tuple[float, float]:
    """Sets a scale of decades, whose ends stand for 0 and what is not finite; its ends."""
    seen = np.log10(values[np.isfinite(values) & (values > 0)])
    first, last = (int(seen.min() // 1) - 1, int(seen.max() // 1) + 2) if len(seen) else (-9, 0)
    step = -(-(last - first) // 8)
    decades = [*(n for n in range(first, last, step) if last - n >= step), last]
    labels = {n: f"$10^{{{n}}}$" for n in decades}
    labels |= {first: "equal"} if (values == 0).any() else {}
    labels |= {last: "not finite"} if np.isinf(values).any() else {}
    ax.set(yscale="log", ylim=(10.0**first, 10.0**last), ylabel="‖a−b‖ / ‖a‖")
    ax.set_yticks([10.0**n for n in decades], [labels[n] for n in decades])
    return 10.0**first, 10.0**last
