"""Through depth, and through the run: the depth profile, and loss with gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hookkit.errors import OptionError
from hookkit.plotting import plotdata
from hookkit.plotting.axes import (
    ALARM,
    BLUE,
    BROKEN,
    FAINT,
    KINDS,
    ORANGE,
    count_steps,
    ink,
    log_y,
    mark_broken,
    mark_epochs,
    name_layers,
    nothing,
    plain,
    signed_log_if_wide,
    title,
)
from hookkit.plotting.canvas import depth_colours, new_axes, new_figure
from hookkit.records import Floats, Record, Run

MOST_POINTS = 60
"""Layers up to which a depth profile joins each with the next."""


def plot_depth(run: Any, steps: Sequence[int] | None = None, *, fig: Any = None) -> Any:
    """RMS through the depth of the net, forward (outputs) and backward (their gradients).

    Args:
        run: a Run, a Record, a recorder or a driver.
        steps: optimizer steps to draw (the nearest records); default 0, 1, 10, 100, … and the last.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure; a level line is healthy, a slope is a signal that vanishes or explodes.

    Raises:
        OptionError: `steps` has one that was not recorded, or none.
    """
    run = plotdata.as_run(run)
    panels = {"activation": run.activations, "gradient": run.gradients}
    there = {kind: r for kind, r in panels.items() if r is not None and len(r) and len(r.names)}
    columns = {kind: plotdata.asked_columns(r, steps) for kind, r in there.items()}
    fig = new_figure(fig, 10, 4.6)
    for ax, (kind, record) in zip(fig.subplots(1, 2), panels.items(), strict=True):
        if kind in there:
            _profile(ax, there[kind], columns[kind])
            way = "Forward" if kind == "activation" else "Backward"
            title(ax, f"{way}: RMS of {KINDS[kind]}")
        else:
            recorder = {"activation": "ActivationStats", "gradient": "GradientStats"}[kind]
            add = f"no {kind}s recorded: add {recorder}()"
            nothing(ax, add if record is None else "nothing was recorded")
    return fig


def _profile(ax: Any, record: Record, columns: list[int]) -> None:
    table = record.value("rms")
    broken, at = plotdata.nonfinite(record), np.arange(len(record.names))
    wide = len(at) > MOST_POINTS  # blocks of unlike layers make a comb: draw its middle
    handles = []
    for colour, j in zip(depth_colours(len(columns), ax), columns, strict=True):
        rms, bad = table[:, j], broken[:, j]
        fine = np.isfinite(rms) & (rms > 0) & ~bad  # joined: a gap would hide the slope
        style = {"color": colour, "lw": 1.6, "label": f"{record.steps[j]}"}
        if wide:
            ax.plot(at[fine], rms[fine], ".", ms=2, color=colour, alpha=0.5)
            middle = 10 ** plotdata.smoothed(np.log10(rms[fine]), len(at) // 12)
            handles += ax.plot(at[fine], middle, **style)
        else:
            handles += ax.plot(at[fine], rms[fine], marker="o", ms=3, **style)
        edge = {"transform": ax.get_xaxis_transform(), "ls": "", "marker": "x", "ms": 5}
        ax.plot(at[rms == 0], np.full((rms == 0).sum(), 0.02), color=colour, **edge)
        ax.plot(at[bad], np.full(bad.sum(), 0.98), color=ALARM, **edge)
    log_y(ax, table[:, columns][~broken[:, columns]])
    notes = {"× below: all zero": table[:, columns] == 0, "× above: NaN or Inf": broken[:, columns]}
    words = ["layer, in order", *(word for word, there in notes.items() if there.any())]
    words += [f"lines: mean over {len(at) // 12 | 1} layers"] if wide else []
    ax.set_xlabel("; ".join(words), fontsize=9)
    name_layers(ax.xaxis, record, 24, rotation=90)
    ax.set_xlim(-0.5, len(record.names) - 0.5)
    plain(ax)
    _steps_key(ax, handles)


def _steps_key(ax: Any, handles: list[Any]) -> None:
    """Which colour is which step, above the panel: inside it would lie on the lines."""
    style = {"fontsize": 7, "frameon": False, "handlelength": 1, "columnspacing": 0.8}
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "borderpad": 0, "ncols": 9}
    nobody = ax.plot([], [], lw=0, label="step")
    ax.legend(handles=[*nobody, *handles], handletextpad=0.4, **style, **place)


def plot_loss(
    run: Any,
    skip_start: int = 0,
    with_valid: bool = True,
    *,
    ax: Any = None,
    fig: Any = None,
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
    run = plotdata.as_run(run)
    n = 0 if run.losses is None else len(run.losses)
    whole = isinstance(skip_start, (int, np.integer)) and not isinstance(skip_start, bool)
    if not whole or skip_start < 0 or 0 < n <= skip_start:
        most = f", below {n}, the steps there are" if n else ""
        raise OptionError(
            f"plot_loss(skip_start={skip_start!r}) was asked for: it is a number of steps to leave "
            f"out at the beginning. Use 0 for none, or a positive whole number{most}."
        )
    if ax is not None:
        ax = new_axes(ax, 10, 3.6)
        _losses(ax, run, skip_start, with_valid)
        count_steps(ax)
        return ax
    steps, norms = plotdata.gradient_norms(run)
    steps, norms = steps[steps >= skip_start], norms[steps >= skip_start]
    there = int(np.isfinite(norms).any())
    fig = new_figure(fig, 10, 5 if there else 3.6)
    heights = (2, 1)[: 1 + there]
    axes = fig.subplots(1 + there, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    _losses(axes[0], run, skip_start, with_valid)
    if there:
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
    n = len(losses)
    points = plotdata.valid_losses(run, run.n_steps) if with_valid else []
    if n or points:
        _series(ax, np.arange(n)[skip_start:], losses[skip_start:], "training loss")
        valid = _valid_points(ax, points, skip_start)
        ax.legend(fontsize=8, frameon=False)
        _log_if_wide(ax, np.concatenate([losses[skip_start:], valid]))
    else:
        nothing(ax, "no loss was recorded")
    title(ax, "Loss")
    _mark_epochs(ax, run, label=True)


def _mark_epochs(ax: Any, run: Run, *, label: bool) -> None:
    if run.records and len(run.records[0]):
        mark_epochs(ax, run.records[0], label=label)


def _series(ax: Any, steps: Any, values: Floats, name: str) -> None:
    mark_broken(ax, steps, plotdata.broken_series(values))
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    few = len(values) < 30
    raw = {"color": FAINT, "lw": 0.7, "marker": "." if few else ""}
    ax.plot(steps, values, **raw, label=name if few else f"{name}, each step")
    if not few:
        ax.plot(steps, plotdata.smoothed(values), color=BLUE, lw=1.8, label=f"{name}, smoothed")
    at = plotdata.spikes(values)
    if len(at):
        word = f"{len(at)} spike{'s' * (len(at) > 1)}"
        ax.plot(steps[at], values[at], "v", color=ink(ax), ms=5 if len(at) < 30 else 3, label=word)
    plain(ax)


def _log_if_wide(ax: Any, values: Floats) -> None:
    low, high = plotdata.span(values)
    if high > 100 * low > 0:
        log_y(ax, values)
    elif low <= 0:
        signed_log_if_wide(ax, values)


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
