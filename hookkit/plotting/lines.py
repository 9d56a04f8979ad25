"""Pictures with a line for each layer over steps, coloured by depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.health.units import can_be_dormant, can_die
from hookkit.plotting import arrays, figures
from hookkit.plotting.axes import (
    KINDS,
    count_steps,
    log_y,
    mark_broken,
    mark_epochs,
    name_layers,
    nothing,
    plain,
    signed_log_if_wide,
    title,
)
from hookkit.plotting.labels import listed, row_label
from hookkit.records import Floats, Record, as_record, by_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 12
"""Layers up to which a legend names each line, and each is drawn as it is behind its mean."""

SHAPES = "os^DvPX<>ph*"
"""One for each of a few lines."""


def plot_stats(record: Any, *, fig: Any = None) -> Figure:
    """Means and standard deviations of all layers over steps, coloured by depth.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.
    """
    record = by_module(as_record(record, "activation", "gradient"))
    fig = figures.new_figure(fig, 10, 4)
    left, right = fig.subplots(1, 2, sharex=True)
    mean, std = record.value("mean"), record.value("std")
    _lines(left, record, mean, f"Mean of {KINDS[record.kind]}")
    signed_log_if_wide(left, mean)
    _lines(right, record, std, f"Standard deviation of {KINDS[record.kind]}", key=True)
    log_y(right, std)
    zero = (std == 0).any(axis=1) & (np.isnan(std) | (std == 0)).all(axis=1)
    if zero.any() and right.get_yscale() == "log":
        _note(right, "always 0", [record.labels[i] for i in np.flatnonzero(zero)], 40)
    return fig


def plot_updates(record: Any, *, ax: Any = None) -> Axes:
    """log10 of update:weight of every matrix over steps, with the −3 that is a healthy pace.

    Vectors (biases, norms) are not drawn: their updates say little about the learning rate. A
    matrix that begins at 0 is drawn from the first step on that changes it by 1 % or less: until
    then its relative update is large whatever the learning rate.
    Source: Karpathy's makemore, part 3; cs231n, "ratio of weights:updates".

    Args:
        record: of parameters, a Run, a Record, a recorder, a Watcher or a Learner.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.
    """
    record = by_module(as_record(record, "param"))
    ndim = np.asarray(record.meta.get("ndim", [2] * len(record.names)))
    ax = figures.new_axes(ax, 10, 4.5)
    ratio, young = arrays.update_ratios(record)
    ratio = arrays.log10(ratio)
    moved = np.isfinite(ratio).any(axis=1) | young.any(axis=1)
    never = np.isneginf(ratio).any(axis=1) & ~moved & (ndim >= 2)
    ratio[~np.isfinite(ratio) | (ndim < 2)[:, None]] = np.nan
    head = "Update : weight of matrices; dashed: −3, a healthy pace"
    head += "; those that begin at 0: once below −2" if young[ndim >= 2].any() else ""
    low, high = arrays.span(ratio)
    if np.isfinite(ratio).any():  # or a frozen matrix would flatten all others
        low = max(low, float(np.nanmedian(ratio)) - 6)
    below = int((np.isfinite(ratio).any(axis=1) & ~(ratio >= low).any(axis=1)).sum())
    head += f"; {below} below this range" if below else ""
    _lines(ax, record, ratio, head, key=True, ylabel="log10 |Δw| / |w|")
    if np.isfinite(ratio).any():
        ax.axhline(-3, color=figures.ink(ax), lw=1.2, ls="--")
        ax.set_ylim(min(low - 0.1, -3.3), max(high + 0.1, -2.7))  # the dashed line stays in view
    if never.any():
        _note(ax, "never moved", [record.labels[i] for i in np.flatnonzero(never)], 80)
    return ax


def plot_dead(record: Any, *, ax: Any = None) -> Axes:
    """The share of each layer's units that are dead (solid) or dormant (dashed, with rings).

    Dead units are those of ReLUs, and of layers that a ReLU alone reads: from the step on at which
    they are drawn, they never gave anything above 0 for as long as they were watched (`window`
    records of `ActivationStats`, or half of that). There is a point for each half window, so units
    died between the point where they are drawn and the one before. Dormant units are those of
    activations, drawn in the middle of the window over which their mean size was judged.

    Where no such units were recorded, the share of values near zero instead; the title says so.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.
    """
    record = by_module(as_record(record, "activation", "gradient"))
    ax, shape = figures.new_axes(ax, 10, 4.5), (len(record.names), len(record))
    none = np.full(shape, np.nan)
    dead = np.where(can_die(record)[:, None], record.values.get("dead", none), np.nan)
    dormant = np.where(can_be_dormant(record)[:, None], record.values.get("dormant", none), np.nan)
    if np.isfinite(dead).any() or np.isfinite(dormant).any():
        _units(ax, record, dead, dormant)
    else:
        seen = np.isfinite(record.values.get("dead", none)).any()
        why = "; no layer is known to end in a ReLU, so none has dead units" if seen else ""
        head = f"Values near zero{_eps(record)}{why}"
        _lines(ax, record, 100 * record.value("near_zero"), head, key=True, ylabel="% of values")
    ax.set_ylim(-2, 102)
    return ax


def _units(ax: Any, record: Record, dead: Floats, dormant: Floats) -> None:
    """Dead units where their windows begin, up to the last one's end; dormant ones in the middle.

    Both (n_layers, n) shares, NaN where they mean nothing.
    """
    known = np.isfinite(dead) | np.isfinite(dormant)
    rows = np.flatnonzero(known.any(axis=1)).tolist()
    begin, end = arrays.judged_windows(record, rows)
    steps = record.steps
    since, dead = np.append(steps[begin], steps[end[-1:]]), dead[:, np.append(end, end[-1:])]
    middle, dormant = (steps[begin] + steps[end]) / 2, dormant[:, end]
    has_dead, has_dormant = bool(np.isfinite(dead).any()), bool(np.isfinite(dormant).any())
    ring = {"ls": "--", "marker": "o", "mfc": "none", "ms": 6}  # seen around a point of dead units
    curves(ax, record, middle, 100 * dormant, rows=rows, key=not has_dead, **ring)
    curves(ax, record, since, 100 * dead, rows=rows, key=has_dead)
    rings = ["dormant (dashed, rings)"] * has_dormant
    words = [f"dead{_how_long(record)} (solid)"] * has_dead + rings
    title(ax, f"Units that are {' or '.join(words or ['dead'])}")
    ax.set_ylabel("% of units", fontsize=9)
    _step_axis(ax, record, rows)
    if not words:
        _empty(ax, record)
    if has_dead and not np.nan_to_num(dead).any():
        ax.text(
            0.5, 0.5, "no unit is dead", transform=ax.transAxes, ha="center", color=figures.FAINT
        )


def _how_long(record: Record) -> str:
    window = int(record.meta.get("window", 1))
    half, most = (min(max(n, 1), len(record)) for n in (window // 2, window))
    many = f"{half} to {most} records" if half < most else f"{most} record{'s' * (most > 1)}"
    return f" for the next {many}" if window > 1 else ""


def _eps(record: Record) -> str:
    return f" (|x| ≤ {record.meta['eps']:g})" if "eps" in record.meta else ""


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
    fig, smooth = figures.new_figure(fig, 10, 3), _smooth(record)
    panels = {
        "mean": ("Mean", 1),
        "std": ("Standard deviation", 1),
        "near_zero": (f"Near zero{_eps(record)}, % of values", 100),
    }
    for ax, (statistic, (head, scale)) in zip(fig.subplots(1, 3), panels.items(), strict=True):
        values = scale * record.value(statistic, row)
        if not np.isfinite(values).any():
            _empty(ax, record)
        line(ax, record.steps, values, color=figures.BLUE, alpha=0.35 if smooth else 1.0)
        if smooth:
            line(ax, record.steps, arrays.smoothed(values, smooth), color=figures.BLUE)
        title(ax, head)
        signed_log_if_wide(ax, values)
        _step_axis(ax, record, [row])
    words = f"; dark: smoothed over {smooth} records" if smooth else ""
    fig.suptitle(
        figures.literal(f"{row_label(record, row)}: {KINDS[record.kind]}{words}"), fontsize=10
    )
    return fig


def _lines(
    ax: Any, record: Record, table: Floats, head: str, *, key: bool = False, ylabel: str = ""
) -> None:
    """One line a layer over steps, with the axis in order."""
    if smooth := _smooth(record):  # or the noise of one layer would hide all others
        if len(table) <= FEW:
            curves(ax, record, record.steps, table, key=False, alpha=0.25)
        table = np.stack([arrays.smoothed(row, smooth) for row in table])
        head += f"; smoothed over {smooth} records"
    curves(ax, record, record.steps, table, key=key)
    title(ax, head)
    ax.set_ylabel(ylabel, fontsize=9)
    _step_axis(ax, record, None)
    if not np.isfinite(table).any():
        _empty(ax, record)


def _note(ax: Any, what: str, names: list[str], width: int) -> None:
    """Names, at the bottom left, the layers whose lines cannot be seen."""
    where = {"xycoords": "axes fraction", "fontsize": 8, "weight": "bold"}
    ax.annotate(figures.literal(f"{what}: {listed(names, width)}"), (0.01, 0.02), **where)


def _empty(ax: Any, record: Record) -> None:
    why = "no finite value" if len(record) else "nothing was recorded"
    nothing(ax, why, keep_x=len(record) > 0)


def _smooth(record: Record) -> int:
    """Over how many records to smooth a line; 0: there are few enough to see each."""
    width = len(record) // 100
    return width | 1 if width > 1 else 0


def _step_axis(ax: Any, record: Record, rows: list[int] | None) -> None:
    if len(record):
        broken = arrays.nonfinite(record)
        mark_broken(ax, record.steps, (broken if rows is None else broken[rows]).any(axis=0))
        mark_epochs(ax, record)
        ends = [(record.steps[0], 0.0), (record.steps[-1], 0.0)]
        ax.update_datalim(ends, updatey=False)  # also where the last, or all, have no value
        ax.autoscale_view(scaley=False)
    count_steps(ax)
    plain(ax)


def curves(
    ax: Any, record: Record, x: Any, table: Floats, *, rows: Any = None, key: bool, **style: Any
) -> None:
    """Lines of `rows` coloured by depth, or of those with a value; `key` says which is which.

    Up to 12 have shapes too, for neighbours differ little in colour. Of two equal lines only the
    later one is seen: the key says so of the other.
    """
    rows = [i for i, y in enumerate(table) if np.isfinite(y).any()] if rows is None else rows
    colours = figures.depth_colours(len(rows))
    style = {"lw": 1.4 if len(rows) <= 30 else 0.8, **style}
    shapes = SHAPES if len(rows) <= FEW and "alpha" not in style else [None] * len(rows)
    shaped = zip(rows, colours, shapes, strict=False)
    lines = [line(ax, x, table[i], shape, color=colour, **style) for i, colour, shape in shaped]
    if not key or not rows:
        return
    if len(rows) <= FEW:
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
        alone = ax.figure.get_layout_engine() is None  # nothing makes room beside the Axes
        place = {"loc": "best", "framealpha": 0.6} if alone else beside
        legend = ax.legend(lines, map(str, rows), fontsize=7, **place)
        # set now: a legend skips labels that begin with an underscore
        for n, (text, i) in enumerate(zip(legend.get_texts(), rows, strict=True), 1):
            equal = [j for j in rows[n:] if np.array_equal(table[i], table[j], equal_nan=True)]
            behind = f" = {row_label(record, equal[0], 16)}" if equal else ""
            text.set_text(figures.literal(row_label(record, i, 34) + behind))
        return
    bar = ax.figure.colorbar(figures.depth_scale(len(rows)), ax=ax, pad=0.01, aspect=25)
    bar.ax.invert_yaxis()
    name_layers(bar.ax.yaxis, record, 16, rows=rows)


def line(ax: Any, x: Any, y: Floats, shape: str | None = None, **style: Any) -> Any:
    """One line, with points where there are few values, or one without neighbours.

    A layer that runs every other step has no two values side by side: nothing would be drawn.
    With a `shape`, that is what points are, and some of all others have one.
    """
    known = np.pad(np.isfinite(y), 1)
    points = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])
    if shape and known.any():  # not at the same steps in each line, or one would hide the other
        first = SHAPES.index(shape) / len(SHAPES)
        some = np.flatnonzero(np.isfinite(y))
        points = np.union1d(points, some[((np.arange(6) + first) * len(some) / 6).astype(int)])
    if len(x) < 30 or len(points):
        every = None if len(x) < 30 else points.tolist()
        style = {"marker": shape or ".", "markevery": every, "ms": 4 if shape else 6} | style
    return ax.plot(x, y, **style)[0]
