"""One line a layer over steps, coloured by depth: means and stds, updates, dead units."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit.plotting import naming, plotdata
from hookkit.plotting.axes import (
    BLUE,
    FAINT,
    KINDS,
    count_steps,
    ink,
    literal,
    log_y,
    mark_broken,
    mark_epochs,
    name_layers,
    nothing,
    plain,
    signed_log_if_wide,
    title,
)
from hookkit.plotting.canvas import depth_colours, depth_scale, new_axes, new_figure
from hookkit.records import Floats, Record, as_record

FEW = 12
"""Layers up to which a legend names each line, and each is drawn as it is behind its mean."""


def plot_stats(record: Any, *, fig: Any = None) -> Any:
    """Means and standard deviations of all layers over steps, coloured by depth; the Figure."""
    record = plotdata.as_record(record, "activation", "gradient")
    fig = new_figure(fig, 10, 4)
    left, right = fig.subplots(1, 2, sharex=True)
    mean, std = record.value("mean"), record.value("std")
    _lines(left, record, mean, f"Mean of {KINDS[record.kind]}")
    signed_log_if_wide(left, mean)
    _lines(right, record, std, f"Standard deviation of {KINDS[record.kind]}", key=True)
    log_y(right, std)
    return fig


def plot_updates(record: Any, *, ax: Any = None) -> Any:
    """log10 of update:weight of every matrix over steps, with the −3 that is a healthy pace.

    Vectors (biases, norms) are left out: theirs says little about the learning rate.
    Source: Karpathy's makemore, part 3; cs231n, "ratio of weights:updates".
    """
    record = plotdata.as_record(record, "param")
    ndim = np.asarray(record.meta.get("ndim", [2] * len(record.names)))
    ax = new_axes(ax, 10, 4.5)
    ratio = plotdata.log10(record.value("update_ratio"))
    never = np.isneginf(ratio).any(axis=1) & ~np.isfinite(ratio).any(axis=1) & (ndim >= 2)
    ratio[~np.isfinite(ratio) | (ndim < 2)[:, None]] = np.nan
    head = "Update : weight of matrices; dashed: −3, a healthy pace"
    _lines(ax, record, ratio, head, key=True, ylabel="log10 |Δw| / |w|")
    if np.isfinite(ratio).any():
        low, high = plotdata.span(ratio)
        low = max(low, float(np.nanmedian(ratio)) - 6)  # or one frozen matrix presses all flat
        ax.axhline(-3, color=ink(ax), lw=1.2, ls="--")
        ax.set_ylim(min(low - 0.1, -3.3), max(high + 0.1, -2.7))  # all are measured by the line
    if never.any():
        still = [record.labels[i] for i in np.flatnonzero(never)]
        text = f"never moved: {naming.listed(still, 80)}"
        where = {"xycoords": "axes fraction", "fontsize": 8, "weight": "bold"}
        ax.annotate(literal(text), (0.01, 0.02), **where)
    return ax


def plot_dead(record: Any, *, ax: Any = None) -> Any:
    """The share of each layer's units that are dead (solid) or dormant (dashed), over steps.

    Where units were not recorded, the share of values near zero instead, and the title says so.
    """
    record = plotdata.as_record(record, "activation", "gradient")
    ax = new_axes(ax, 10, 4.5)
    if np.isfinite(record.values.get("dead", np.nan)).any():
        head = "Units that are dead (solid) or dormant (dashed)"
        _lines(ax, record, 100 * record.value("dead"), head, key=True, ylabel="% of units")
        if "dormant" in record.values:
            dormant = 100 * record.value("dormant")
            curves(ax, record, record.steps, dormant, key=False, ls="--")
        if not np.nan_to_num(record.value("dead")).any():
            ax.text(0.5, 0.5, "no unit is dead", transform=ax.transAxes, ha="center", color=FAINT)
    else:
        head = f"Values near zero{_eps(record)}"
        _lines(ax, record, 100 * record.value("near_zero"), head, key=True, ylabel="% of values")
    ax.set_ylim(-2, 102)
    return ax


def _eps(record: Record) -> str:
    return f" (|x| ≤ {record.meta['eps']:g})" if "eps" in record.meta else ""


def plot_layer_stats(record: Any, layer: int | str, *, fig: Any = None) -> Any:
    """Mean, standard deviation and share near zero of one layer over steps; the Figure.

    As fastai's `ActivationStats.plot_layer_stats` (2.8), with true steps, and |x| for near zero.
    """
    record = as_record(record, "activation", "gradient")
    row = record.layer(layer)
    fig = new_figure(fig, 10, 3)
    panels = {
        "mean": ("Mean", 1),
        "std": ("Standard deviation", 1),
        "near_zero": (f"Near zero{_eps(record)}, % of values", 100),
    }
    for ax, (statistic, (head, scale)) in zip(fig.subplots(1, 3), panels.items(), strict=True):
        values = scale * record.value(statistic, row)
        if not np.isfinite(values).any():
            _empty(ax, record)
        smooth = _smooth(record)
        line(ax, record.steps, values, color=BLUE, alpha=0.35 if smooth else 1.0)
        if smooth:
            line(ax, record.steps, plotdata.smoothed(values, smooth), color=BLUE)
        title(ax, head)
        signed_log_if_wide(ax, values)
        _step_axis(ax, record, [row])
    fig.suptitle(literal(f"{naming.row_label(record, row)}: {KINDS[record.kind]}"), fontsize=10)
    return fig


def _lines(
    ax: Any,
    record: Record,
    table: Floats,
    head: str,
    *,
    key: bool = False,
    ylabel: str = "",
) -> None:
    """One line a layer over steps, with the axis in order."""
    if smooth := _smooth(record):  # or the noise of one layer hides all others
        if len(table) <= FEW:
            curves(ax, record, record.steps, table, key=False, alpha=0.25)
        table = np.stack([plotdata.smoothed(row, smooth) for row in table])
        head += f", smoothed over {smooth} records"
    curves(ax, record, record.steps, table, key=key)
    title(ax, head)
    ax.set_ylabel(ylabel, fontsize=9)
    _step_axis(ax, record, None)
    if not np.isfinite(table).any():
        _empty(ax, record)


def _empty(ax: Any, record: Record) -> None:
    there = len(record) > 0
    nothing(ax, "no finite value" if there else "nothing was recorded", keep_x=there)


def _smooth(record: Record) -> int:
    """Over how many records to smooth a line; 0: there are few enough to see each."""
    width = len(record) // 100
    return width | 1 if width > 1 else 0


def _step_axis(ax: Any, record: Record, rows: list[int] | None) -> None:
    if len(record):
        broken = plotdata.nonfinite(record)
        mark_broken(ax, record.steps, (broken if rows is None else broken[rows]).any(axis=0))
        mark_epochs(ax, record)
        ends = [(record.steps[0], 0.0), (record.steps[-1], 0.0)]
        ax.update_datalim(ends, updatey=False)  # also where the last, or all, have no value
        ax.autoscale_view(scaley=False)
    count_steps(ax)
    plain(ax)


def curves(
    ax: Any, record: Record, x: Any, table: Floats, *, key: bool, ls: str = "-", alpha: float = 1.0
) -> None:
    """Lines coloured by depth, skipping layers without a value; `key` says which is which."""
    rows = [i for i, row in enumerate(table) if np.isfinite(row).any()]
    colours = depth_colours(len(rows), ax)
    style = {"lw": 1.4 if len(rows) <= 30 else 0.8, "ls": ls, "alpha": alpha}
    lines = [
        line(ax, x, table[i], color=colour, **style)
        for colour, i in zip(colours, rows, strict=True)
    ]
    if not key or not rows:
        return
    if len(rows) <= FEW:
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
        alone = ax.figure.get_layout_engine() is None  # nobody would make room beside the Axes
        place = {"loc": "best", "framealpha": 0.6} if alone else beside
        legend = ax.legend(lines, map(str, rows), fontsize=7, **place)
        # named now: a label that begins with an underscore is left out of a legend
        for text, i in zip(legend.get_texts(), rows, strict=True):
            text.set_text(literal(naming.row_label(record, i, 34)))
        return
    bar = ax.figure.colorbar(depth_scale(len(rows), ax), ax=ax, pad=0.01, aspect=25)
    bar.ax.invert_yaxis()
    name_layers(bar.ax.yaxis, record, 16, rows=rows)


def line(ax: Any, x: Any, y: Floats, **style: Any) -> Any:
    """One line, with a point where there are few values, or where one stands alone.

    A layer that runs every other step has no two values side by side: nothing would be drawn.
    """
    known = np.pad(np.isfinite(y), 1)
    alone = np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])
    if len(x) < 30:
        style["marker"] = "."
    elif len(alone):
        style |= {"marker": ".", "markevery": alone.tolist()}
    return ax.plot(x, y, **style)[0]
