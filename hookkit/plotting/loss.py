"""`plot_loss`: training and validation loss over steps, with the global gradient norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit.checks import check_number
from hookkit.plotting import arrays
from hookkit.plotting.axes import (
    BROKEN,
    count_steps,
    log_y,
    mark_broken,
    mark_epochs,
    nothing,
    plain,
    signed_log_if_wide,
    title,
)
from hookkit.plotting.figures import ALARM, BLUE, FAINT, ORANGE, ink, new_axes, new_figure
from hookkit.plotting.labels import ordered_run
from hookkit.records import Floats, Run


def plot_loss(
    run: Any, skip_start: int = 0, with_valid: bool = True, *, ax: Any = None, fig: Any = None
) -> Any:
    """Training and validation loss over steps, and below it the global gradient norm; the Figure.

    Triangles mark spikes (6 sigma above the 128 steps before), vermilion bars NaN or Inf.

    Args:
        run: a Run, a recorder or a driver.
        skip_start: how many steps to leave out at the beginning.
        with_valid: whether to draw the validation loss.
        ax: draws the loss alone, here; the result is this Axes.
        fig: an empty Figure or SubFigure.

    Raises:
        OptionError: `skip_start` is negative, or leaves nothing of the losses.
    """
    run = ordered_run(run)
    n = 0 if run.losses is None else len(run.losses)
    check_number(
        "plot_loss", "skip_start", skip_start, 0, n - 1 if n else np.inf, whole=True,
        what="the number of steps to leave out at the beginning",
    )  # fmt: skip
    if ax is not None:
        ax = new_axes(ax, 10, 3.6)
        _losses(ax, run, skip_start, with_valid)
        count_steps(ax)
        return ax
    steps, norms = arrays.gradient_norms(run)
    steps, norms = steps[steps >= skip_start], norms[steps >= skip_start]
    has_norms = int(np.isfinite(norms).any())
    fig = new_figure(fig, 10, 5 if has_norms else 3.6)
    heights = (2, 1)[: 1 + has_norms]
    axes = fig.subplots(1 + has_norms, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _losses(axes[0], run, skip_start, with_valid)
    if has_norms:
        _series(axes[1], steps, norms, "gradient norm")
        title(axes[1], "Global gradient norm")
        log_y(axes[1], norms)
        if spikes := [line for line in axes[1].lines if "spike" in str(line.get_label())]:
            axes[1].legend(handles=spikes, fontsize=8, frameon=False)
        _mark_epochs(axes[1], run, label=False)
    count_steps(axes[-1])
    return fig


def _losses(ax: Any, run: Run, skip_start: int, with_valid: bool) -> None:
    losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, dtype=np.float64)
    points = arrays.valid_losses(run, run.n_steps) if with_valid else []
    if len(losses) or points:
        losses, steps = losses[skip_start:], np.arange(len(losses))[skip_start:]
        _series(ax, steps, losses, "training loss")
        valid = _valid_points(ax, points, skip_start)
        ax.legend(fontsize=8, frameon=False)
        low, high = arrays.span(np.concatenate([losses, valid]))
        if high > 100 * low > 0:
            log_y(ax, np.concatenate([losses, valid]))
        elif low <= 0:
            signed_log_if_wide(ax, np.concatenate([losses, valid]))
    else:
        nothing(ax, "no loss was recorded")
    title(ax, "Loss")
    _mark_epochs(ax, run, label=True)


def _mark_epochs(ax: Any, run: Run, *, label: bool) -> None:
    if run.records and len(run.records[0]):
        mark_epochs(ax, run.records[0], label=label)


def _series(ax: Any, steps: Any, values: Floats, name: str) -> None:
    mark_broken(ax, steps, arrays.broken_series(values))
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    few = len(values) < 30
    raw = {"color": FAINT, "lw": 0.7, "marker": "." if few else ""}
    ax.plot(steps, values, **raw, label=name if few else f"{name}, each step")
    if not few:
        ax.plot(steps, arrays.smoothed(values), color=BLUE, lw=1.8, label=f"{name}, smoothed")
    at = arrays.spikes(values)
    if len(at):
        word = f"{len(at)} spike{'s' * (len(at) > 1)}"
        ax.plot(steps[at], values[at], "v", color=ink(ax), ms=5 if len(at) < 30 else 3, label=word)
    plain(ax)


def _valid_points(ax: Any, points: list[tuple[float, float]], skip_start: int) -> Floats:
    """Draws validation losses, one that is NaN or Inf as a cross at the top; the losses drawn."""
    points = [(at, loss) for at, loss in points if at >= skip_start] or points[-1:]
    if not points:
        return np.zeros(0)
    at, losses = np.array(points).T
    fine = np.isfinite(losses)
    style = {"color": ORANGE, "mec": ink(ax), "mew": 0.6, "ms": 5, "lw": 1}
    ax.plot(at[fine], losses[fine], "o-", **style, label="validation loss")
    if not fine.all():
        top = {"transform": ax.get_xaxis_transform(), "color": ALARM, "label": f"{BROKEN} in it"}
        ax.plot(at[~fine], np.full((~fine).sum(), 0.98), "x", ms=5, **top)
    return np.asarray(losses, dtype=np.float64)
