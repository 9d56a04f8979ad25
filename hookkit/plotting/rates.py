"""Learning rates: over a training, and against the loss while `lr_find` raises them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.plotting.axes import log_y, nothing, plain, title
from hookkit.plotting.figures import BLUE, FAINT, ORANGE, ink, new_axes
from hookkit.records import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LAST = 5  # batches at which the loss is out of hand already


def plot_rates(lrs: Sequence[float], ends: Sequence[int] = (), *, ax: Any = None) -> Axes:
    """The learning rate of each training batch, lines where the epochs end; the Axes."""
    ax = new_axes(ax, 10, 3)
    title(ax, "Learning rate")
    if not len(lrs):
        return nothing(ax, "no batch was trained on")
    for end in ends[:-1]:
        ax.axvline(end, color=FAINT, lw=0.7, ls=":")
    ax.plot(np.arange(len(lrs)), lrs, color=BLUE, lw=1.8, marker="." if len(lrs) < 30 else "")
    ax.set_xlabel("training batch", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    plain(ax)
    return ax


def plot_lr_find(lrs: Floats, losses: Floats, suggested: float, *, ax: Any = None) -> Any:
    """The smoothed loss against the learning rate, and the one suggested; the Axes."""
    ax = new_axes(ax, 7, 4)
    shown = slice(None, -_LAST) if len(lrs) > 4 * _LAST else slice(None)
    ax.plot(lrs[shown], losses[shown], color=BLUE, lw=1.8)
    at = int(np.argmin(np.abs(lrs - suggested)))
    style = {"color": ORANGE, "mec": ink(ax), "mew": 0.6, "ms": 7}
    ax.plot(lrs[at], losses[at], "o", **style, label=f"suggested: {suggested:.2g}")
    ax.set_xscale("log")
    if losses.min() > 0 and losses[shown].max() > 100 * losses.min():
        log_y(ax, losses[shown])
    ax.set_xlabel("learning rate", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    title(ax, "Loss, smoothed, as the learning rate grows")
    plain(ax)
    return ax
