"""`plot_loss`: training and validation loss over steps, with the global gradient norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit.checks import check_number
from hookkit.health.jumps import jumps
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
from hookkit.records import Floats, Run, as_run, in_order


def plot_loss(
    run: Any, skip_start: int = 0, with_valid: bool = True, *, ax: Any = None, fig: Any = None
) -> Any:
    """Training and validation loss over steps, and below it the global gradient norm; the Figure.

    Grey is each value, blue a running median, whose window is in the legend: about a fortieth of
    the run. A spike does not move it. From 100 steps on triangles mark what the rule `spikes` of
    `diagnose` counts: values 6 standard deviations (by the median) above the 128 steps before, and
    by half of where the line begins. Vermilion bars mark NaN or Inf.

    Args:
        run: a Run, a recorder or a driver.
        skip_start: how many steps to leave out at the beginning.
        with_valid: whether to draw the validation loss.
        ax: draws the loss alone, here; the result is this Axes.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure, or `ax`.

    Raises:
        OptionError: `skip_start` is negative, or leaves nothing of the losses.
    """
    run = in_order(as_run(run))
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
    has_norms = int(np.isfinite(norms[steps >= skip_start]).any())
    has_loss = bool(n or (with_valid and arrays.valid_losses(run, run.n_steps)))
    fig = new_figure(fig, 10, 5 if has_norms and has_loss else 3.6)
    heights = (2 if has_loss else 0.3, 1)[: 1 + has_norms]
    axes = fig.subplots(1 + has_norms, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _losses(axes[0], run, skip_start, with_valid)
    if has_norms:
        _series(axes[1], steps, norms, "gradient norm", skip_start)
        title(axes[1], "Global gradient norm")
        log_y(axes[1], norms[steps >= skip_start])
        _key(axes[1])
        _mark_epochs(axes[1], run, label=False)
    count_steps(axes[-1])
    return fig


def _losses(ax: Any, run: Run, skip_start: int, with_valid: bool) -> None:
    losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, dtype=np.float64)
    points = arrays.valid_losses(run, run.n_steps) if with_valid else []
    if len(losses) or points:
        _series(ax, np.arange(len(losses)), losses, "training loss", skip_start)
        valid = _valid_points(ax, points, skip_start)
        shown = np.concatenate([losses[skip_start:], valid])
        low, high = arrays.span(shown)
        if not np.isfinite(shown).any():
            nothing(ax, "no finite loss", keep_x=True)
        elif high > 100 * low > 0:
            log_y(ax, shown)
        elif low <= 0:
            signed_log_if_wide(ax, shown)
        _key(ax)
    else:
        nothing(ax, "no loss was recorded")
    title(ax, "Loss")
    _mark_epochs(ax, run, label=True)


def _key(ax: Any) -> None:
    """Which line is which, above the panel and the numbers of its epochs: it lies on no line."""
    if not ax.get_legend_handles_labels()[0]:
        return
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderpad": 0, "ncols": 5}
    ax.legend(fontsize=8, frameon=False, borderaxespad=1.5, columnspacing=1.2, **place)


def _mark_epochs(ax: Any, run: Run, *, label: bool) -> None:
    if run.records and len(run.records[0]):
        mark_epochs(ax, run.records[0], label=label)


def _series(ax: Any, steps: Any, values: Floats, name: str, skip_start: int) -> None:
    """Each value from `skip_start` on; medians and spikes are those of the whole series."""
    shown = steps >= skip_start
    mark_broken(ax, steps[shown], arrays.broken_series(values)[shown])
    known = np.isfinite(values)
    if not known.any():
        return plain(ax)
    steps, values = steps[known], values[known]
    first, few = int(np.searchsorted(steps, skip_start)), len(values) < 30
    raw = {"color": FAINT, "lw": 0.7, "marker": "." if few else ""}
    each = "step" if (np.diff(steps) == 1).all() else "value"  # those of merged records have gaps
    ax.plot(steps[first:], values[first:], **raw, label=name if few else f"{name}, each {each}")
    if not few:
        width = arrays.median_width(len(values))
        at, middle = arrays.running_median(values, width)
        at, middle = at[at >= first], middle[at >= first]
        ax.plot(steps[at], middle, color=BLUE, lw=1.8, label=f"running median of {width} values")
    at = jumps(values)
    at = at[at >= first]
    if len(at):
        style = {"color": ink(ax), "ms": 5 if len(at) < 30 else 3}
        ax.plot(steps[at], values[at], "v", **style, label=f"{len(at)} far above the steps before")
    plain(ax)


def _valid_points(ax: Any, points: list[tuple[float, float]], skip_start: int) -> Floats:
    """Draws validation losses, one that is NaN or Inf as a cross at the top; the losses drawn."""
    points = [(at, loss) for at, loss in points if at >= skip_start] or points[-1:]
    if not points:
        return np.zeros(0)
    at, losses = np.array(points).T
    fine = np.isfinite(losses)
    style = {"color": ORANGE, "mec": ink(ax), "mew": 0.6, "ms": 5, "lw": 1}
    if fine.any():
        ax.plot(at[fine], losses[fine], "o-", **style, label="validation loss")
    if not fine.all():
        top = {
            "transform": ax.get_xaxis_transform(),
            "color": ALARM,
            "label": f"validation loss: {BROKEN}",
        }
        ax.plot(at[~fine], np.full((~fine).sum(), 0.98), "x", ms=5, **top)
    return np.asarray(losses, dtype=np.float64)
