"""Draw one line: the loss of a training, or what `lr_find` found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.checks import check_number
from hookkit.plotting import figures
from hookkit.plotting.figures import BLUE, FAINT, ORANGE
from hookkit.records import Floats, Run, as_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_loss(
    run: Any, skip_start: int = 0, with_valid: bool = True, *, ax: Any = None, fig: Any = None
) -> Any:
    """Training and validation loss over steps, and below it the global gradient norm; the Figure.

    Grey is each value, blue a running median over about a fortieth of the run: a spike does not
    move it. A vermilion bar marks NaN and Inf.

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
    run = as_run(run)
    losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, dtype=np.float64)
    most, what = len(losses) - 1 if len(losses) else np.inf, "the number of steps to leave out"
    check_number("plot_loss", "skip_start", skip_start, 0, most, whole=True, what=what)
    norms = None if ax is not None or run.grad_norms is None else np.asarray(run.grad_norms)
    if ax is None:
        fig = figures.new_figure(fig, 10, 3.6 if norms is None else 5)
        heights = [2] if norms is None else [2, 1]
        axes = fig.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    else:
        axes = [ax]
    _series(axes[0], losses, "training loss", skip_start, _valid(run) if with_valid else [])
    if norms is not None:
        _series(axes[1], norms, "gradient norm", skip_start, [])
    for one in axes:
        figures.mark_steps(one, run.records[0] if run.records else None)
        one.xaxis.label.set_visible(one is axes[-1])
    return fig if ax is None else ax


def _valid(run: Run) -> list[tuple[float, float]]:
    """Last step and validation loss of epochs; without its step each is taken to be as long."""
    each = run.n_steps / max(len(run.valid), 1) or 1
    rows = [(row.get("step", (i + 1) * each - 1), row) for i, row in enumerate(run.valid)]
    points = [(step, row.get("valid_loss")) for step, row in rows]
    return [(step, float(v)) for step, v in points if isinstance(v, (int, float, np.number))]


def _series(
    ax: Any, values: Floats, name: str, skip: int, valid: Sequence[tuple[float, float]]
) -> None:
    """Each value and, from 30 on, a running median; validation losses as points."""
    figures.title(ax, name.capitalize())
    at = np.flatnonzero(np.isfinite(values) & (np.arange(len(values)) >= skip))
    points = np.array([p for p in valid if p[0] >= skip]).reshape(-1, 2)
    if not len(at) and not len(points):
        return figures.nothing(ax, f"no finite {name}" if len(values) else f"no {name} recorded")
    few = len(at) < 30
    ax.plot(at, values[at], color=FAINT, lw=0.7, marker="." if few else "", label=name)
    if not few:
        half = min(len(at) // 80, 500) + 2
        some = np.arange(0, len(at), -(-len(at) // 2000))  # more are not seen
        reach = np.minimum(some, half)  # narrower at the start: the median must not lag there
        pairs = zip(some, reach, strict=True)
        middle = [np.median(values[at[i - k : i + k + 1]]) for i, k in pairs]
        label = f"running median of {2 * half + 1} values"
        ax.plot(at[some], middle, color=BLUE, lw=1.8, label=label)
    if len(points):
        ax.plot(*points.T, "o-", color=ORANGE, ms=4, lw=1, label="validation loss")
    lost = points[~np.isfinite(points[:, 1]), 0]
    if len(lost):
        style = {"color": figures.ALARM, "transform": ax.get_xaxis_transform()}
        ax.plot(lost, np.full(len(lost), 0.97), "x", label="validation: NaN or Inf", **style)
    ratio = 100 if name == "training loss" else 5  # norms differ by factors
    figures.fit_scale(ax, np.append(values[at], points[:, 1]), ratio)
    # NaN alone says that a value is not known: one may be read every tenth step. At the end of a
    # run that is longer than a gap before, it was NaN.
    gap = np.diff(at, prepend=skip - 1).max() if len(at) else 0
    ended = np.arange(len(values)) > at[-1] if len(at) and len(values) - at[-1] > gap else False
    figures.mark_broken(ax, np.arange(len(values) + 1.0), np.isinf(values) | ended)
    ax.legend(fontsize=8, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    return None


def plot_lr_find(
    lrs: Floats, losses: Floats, suggested: dict[str, float], *, ax: Any = None
) -> Axes:
    """Draw the smoothed loss against the learning rate, and the suggestions by name; the Axes.

    The last five batches, at which the loss is out of hand, are left out.
    """
    ax = figures.new_axes(ax, 7, 4)
    figures.title(ax, "Loss, smoothed, as the learning rate grows")
    shown = slice(None, -5) if len(lrs) > 20 else slice(None)
    ax.plot(lrs[shown], losses[shown], color=BLUE, lw=1.8)
    for (name, lr), marker in zip(suggested.items(), "osv^", strict=False):
        at = int(np.argmin(np.abs(lrs - lr)))
        color = FAINT if name != "valley" else ORANGE
        ax.plot(lrs[at], losses[at], marker, color=color, ms=7, label=f"{name}: {lr:.2g}")
    ax.set_xscale("log")
    figures.fit_scale(ax, losses[shown])
    ax.set_xlabel("learning rate", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    return ax
