"""`plot_errors`: how far two models are apart, by depth."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit.plotting.axes import nothing, plain, title
from hookkit.plotting.figures import BLUE, ORANGE, literal, new_axes
from hookkit.plotting.labels import layer_ticks
from hookkit.plotting.lines import line


def plot_errors(comparison: Any, *, ax: Any = None) -> Any:
    """The relative error ‖a−b‖/‖a‖ of each output, in the order in which layers finish; the Axes.

    Blue is the error, orange what a module adds itself (with `isolate=True`). A ring marks the
    first output beyond the tolerance. Outputs that are equal are drawn at the bottom line.

    Args:
        comparison: what `compare_models` returns.
        ax: matplotlib axes; new ones by default.
    """
    rows = [r for r in comparison if r.what == "output" and not r.problem]
    ax = new_axes(ax, 10, 3.6)
    title(ax, "relative error by depth")
    if not rows:
        nothing(ax, "nothing to compare")
        return ax
    x = np.arange(len(rows))
    errors = np.array([r.rel for r in rows])
    own = np.array([r.own_rel for r in rows])
    both = np.concatenate([errors, own])
    seen = both[np.isfinite(both) & (both > 0)]
    low = 10.0 ** np.floor(np.log10(seen.min()) - 1) if len(seen) else 1e-9
    high = 10.0 * seen.max() if len(seen) else 1.0
    ax.set(yscale="log", ylim=(low, high), ylabel="‖a−b‖ / ‖a‖")
    line(ax, x, np.clip(np.nan_to_num(errors, nan=high, posinf=high), low, high), color=BLUE,
         marker="o", markersize=3, label="error")  # fmt: skip
    if np.isfinite(own).any():
        ax.plot(x, np.clip(own, low, high), "s", color=ORANGE, markersize=4, label="own error")
    first = next((i for i, r in enumerate(rows) if r is comparison.first), None)
    if first is not None:
        at = min(max(errors[first], low), high)
        ax.plot([first], [at], "o", mfc="none", mec=ORANGE, markersize=12, label="first beyond")
    ticks = layer_ticks([r.name or "(model)" for r in rows], [r.type for r in rows], 20, 30)
    ax.set_xticks([i for i, _ in ticks], [literal(t) for _, t in ticks], rotation=35, ha="right")
    ax.legend(frameon=False, fontsize=8)
    plain(ax)
    return ax
