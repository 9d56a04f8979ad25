"""Pictures with a line for each layer, coloured by depth: over steps, and through the net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.plotting import figures
from hookkit.plotting.figures import KINDS, new_axes, new_figure
from hookkit.records import Floats, Record, as_record, as_run, by_module, in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_stats(record: Any, *, fig: Any = None) -> Figure:
    """Means and standard deviations of all layers over steps, coloured by depth.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.
    """
    record = by_module(as_record(record, "activation", "gradient"))
    fig = new_figure(fig, 10, 4)
    left, right = fig.subplots(1, 2, sharex=True)
    mean, std = record.value("mean"), record.value("std")
    _lines(left, record, mean, f"Mean of {KINDS[record.kind]}", key=False)
    figures.fit_scale(left, mean)
    right.set_yscale("log")
    std = np.where(std > 0, std, np.nan)  # a log axis has no 0
    _lines(right, record, std, f"Standard deviation of {KINDS[record.kind]}")
    return fig


def plot_updates(record: Any, *, ax: Any = None) -> Axes:
    """log10 of update:weight of every matrix over steps, with the −3 that is a healthy pace.

    Vectors (biases, norms) are not drawn: their updates say little about the learning rate. The
    line of a matrix that begins at 0 begins high, whatever the rate.
    Source: Karpathy's makemore, part 3; cs231n, "ratio of weights:updates".

    Args:
        record: of parameters, a Run, a Record, a recorder, a Watcher or a Learner.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.
    """
    record, ax = by_module(as_record(record, "param")), new_axes(ax, 10, 4.5)
    ratio = figures.log10(record.value("update_ratio"))
    head = "Update : weight of matrices; dashed: −3, a healthy pace"
    _lines(ax, record, ratio, head, figures.matrices(record), ylabel="log10 |Δw| / |w|")
    ax.axhline(-3, color=figures.FAINT, ls="--")
    return ax


def plot_dead(record: Any, *, ax: Any = None) -> Axes:
    """The share of each layer's units that are dead, in per cent.

    Units of ReLUs, and of layers that a ReLU alone reads, are dead if they never gave anything
    above 0, others if they gave nothing but 0, throughout the last records: as many as the `window`
    of `ActivationStats`, or half of that in the beginning. There is a point for each half window,
    none for a shorter one (but at the end), nor for one that ends with NaN or Inf.

    Where units were not recorded, the share of values near zero instead; the title says so.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.
    """
    record, ax = by_module(as_record(record, "activation", "gradient")), new_axes(ax, 10, 4.5)
    dead, eps = record.values.get("dead"), record.meta.get("eps", 0)
    if dead is None or not np.isfinite(dead).any():
        head = f"Values near zero (|x| ≤ {eps:g})"
        _lines(ax, record, 100 * record.value("near_zero"), head, ylabel="% of values")
    else:
        window = int(record.meta.get("window", 1))
        # In records, of which a column may have several. Within a half window the shares fall, as
        # it grows; so each is drawn where it ends.
        halves = (np.cumsum(record.spans) - 1) // max(window // 2, 1)
        ends = np.append(np.diff(halves) > 0, True)
        dead = np.where(ends & ~figures.nonfinite(record), 100 * dead, np.nan)
        head = f"Units that are dead over the last {window} records"
        _lines(ax, record, dead, head, ylabel="% of units", style="o-")
    ax.set_ylim(-2, 102)
    return ax


def plot_layer_stats(record: Any, layer: int | str, *, fig: Any = None) -> Figure:
    """Mean, standard deviation and share near zero of one layer over steps.

    As fastai's `ActivationStats.plot_layer_stats` (2.8), with true steps, and `|x|` for near zero.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        layer: name or index.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.

    Raises:
        SelectionError: there is no such layer.
    """
    record = as_record(record, "activation", "gradient")
    row = record.layer(layer)
    fig = new_figure(fig, 10, 3)
    heads = {"mean": "Mean", "std": "Standard deviation", "near_zero": "Share near zero"}
    for ax, (statistic, head) in zip(fig.subplots(1, 3), heads.items(), strict=True):
        values = record.value(statistic)
        _lines(ax, record, values, head, [row], key=False, style="-")
        figures.fit_scale(ax, values[row])
    fig.suptitle(f"{figures.label(record, row, 80)}: {KINDS[record.kind]}", fontsize=10)
    return fig


def plot_depth(run: Any, steps: Sequence[int] | None = None, *, fig: Any = None) -> Figure:
    """RMS through the depth of the net, forward (outputs) and backward (their gradients).

    A level line is healthy; a slope is a signal that vanishes or explodes. Beyond 30 layers, which
    may be unlike their neighbours, there are points only. A layer without a point did not run, gave
    zeros only, or NaN or Inf.

    Args:
        run: a Run, a Record, a recorder or a driver.
        steps: optimizer steps to draw (the nearest records); default 0, 1, 10, 100, … and the last.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.

    Raises:
        OptionError: `steps` has one that was not recorded.
    """
    run = in_order(as_run(run))
    panels = {"Forward": run.activations, "Backward": run.gradients}
    there = {h: r for h, r in panels.items() if r is not None and len(r) and r.names}
    columns = {h: _columns(r, steps) for h, r in there.items()}
    fig = new_figure(fig, 10, 4.6)
    for ax, (head, record) in zip(fig.subplots(1, 2), panels.items(), strict=True):
        if record is None or head not in there:
            figures.nothing(ax, f"{head}: nothing was recorded")
            continue
        figures.title(ax, f"{head}: RMS of {KINDS[record.kind]}")
        rms, names = record.value("rms"), range(len(record.names))
        rms = np.where((rms > 0) & ~figures.nonfinite(record), rms, np.nan)
        ax.set_yscale("log")
        line = "o-" if len(names) <= 30 else "o"
        for j, colour in zip(columns[head], figures.colours(len(columns[head])), strict=True):
            fine = np.flatnonzero(np.isfinite(rms[:, j]))  # lines pass over the others
            label = f"{record.steps[j]}"
            ax.plot(fine, rms[fine, j], line, color=colour, ms=3, lw=1.4, label=label)
        figures.name_layers(ax.xaxis, record, names, 24, rotation=90)
        ax.set_xlim(-0.5, len(names) - 0.5)
        place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        ax.legend(title="step", title_fontsize=7, fontsize=7, frameon=False, **place)
    return fig


def _columns(record: Record, steps: Sequence[int] | None) -> list[int]:
    """Columns to draw; without `steps` those of 0, 1, 10, 100, … and the last."""
    first, last = int(record.steps[0]), int(record.steps[-1])
    tens = [10**k for k in range(12) if first < 10**k < 0.7 * last]
    return figures.columns_of("plot_depth", record, steps or [first, *tens, last])


def _lines(
    ax: Any,
    record: Record,
    table: Floats,
    head: str,
    rows: Sequence[int] | None = None,
    *,
    key: bool = True,
    ylabel: str = "",
    style: str | None = None,
) -> None:
    """One line over steps for each of `rows` that has a finite value; lines pass over others.

    Without a `style` the lines of a long run are smoothed: the noise of one would hide all others.
    """
    rows = [*range(len(record.names))] if rows is None else [*rows]
    shown = [i for i in rows if np.isfinite(table[i]).any()]
    width = 1 if style else max(1, len(record) // 100)
    without = f"; {len(rows) - len(shown)} of {len(rows)} have no value to show"
    head += without * (len(shown) < len(rows)) + f"; means of {width} records" * (width > 1)
    figures.title(ax, head)
    if not shown:
        figures.nothing(ax, "no finite value" if len(record) else "nothing was recorded")
        return
    style = style or (".-" if len(record) < 30 else "-")
    looks = {"lw": 1.4 if len(shown) <= 30 else 0.8, "ms": 4}
    for i, colour in zip(shown, figures.colours(len(shown)), strict=True):
        seen = np.isfinite(table[i])
        values, name = _means(table[i][seen], width), figures.label(record, i)
        ax.plot(record.steps[seen], values, style, color=colour, label=name, **looks)
    ax.set_ylabel(ylabel, fontsize=9)
    figures.mark_steps(ax, record)
    broken, edges = figures.nonfinite(record)[rows].any(axis=0), figures.step_edges(record.steps)
    figures.mark_broken(ax, edges, broken)
    ax.set_xlim(edges[0], edges[-1])  # also where the first, or last, have no value
    if key:
        figures.layer_key(ax, record, shown)


def _means(values: Floats, width: int) -> Floats:
    """The mean of `width` values around each, of fewer near both ends."""
    kernel = np.ones(min(width, len(values)))
    n = np.convolve(np.ones(len(values)), kernel, "same")
    return np.asarray(np.convolve(values, kernel, "same") / n)
