"""One line a layer over steps, coloured by depth: means and stds, updates, dead units."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit.plotting import plotdata
from hookkit.plotting.axes import (
    BLUE,
    FAINT,
    INK,
    KINDS,
    count_steps,
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
from hookkit.records import Floats, Record


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
    _lines(
        ax,
        record,
        ratio,
        "Update : weight of matrices; dashed: −3, a healthy pace",
        key=True,
        ylabel="log10 ‖Δw‖ / ‖w‖",
    )
    ax.axhline(-3, color=INK, lw=1.2, ls="--")
    low, high = plotdata.limits(ratio, 2.0) if np.isfinite(ratio).any() else (-4.0, -2.0)
    ax.set_ylim(min(low, -3.3), max(high, -2.7))  # the line is what the others are measured by
    if never.any():
        still = ", ".join(record.names[i] for i in np.flatnonzero(never))
        text = f"never moved: {plotdata.shorten(still, 80)}"
        ax.annotate(
            literal(text), (0.01, 0.02), xycoords="axes fraction", fontsize=8, weight="bold"
        )
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
        eps = f" (|x| ≤ {record.meta['eps']:g})" if "eps" in record.meta else ""
        head = f"Values near zero{eps}"
        _lines(ax, record, 100 * record.value("near_zero"), head, key=True, ylabel="% of values")
    ax.set_ylim(-2, 102)
    return ax


def plot_layer_stats(record: Any, layer: int | str, *, fig: Any = None) -> Any:
    """Mean, standard deviation and share near zero of one layer over steps; the Figure.

    As fastai's `ActivationStats.plot_layer_stats` (2.8), with true steps, and |x| for near zero.
    """
    record = plotdata.as_record(record, "activation", "gradient")
    row = record.layer(layer)
    fig = new_figure(fig, 10, 3)
    marker = "." if len(record) < 30 else ""
    panels = {
        "mean": ("Mean", 1),
        "std": ("Standard deviation", 1),
        "near_zero": ("Near zero, % of values", 100),
    }
    for ax, (statistic, (head, scale)) in zip(fig.subplots(1, 3), panels.items(), strict=True):
        values = scale * record.value(statistic, row)
        if not np.isfinite(values).any():
            nothing(ax, "did not run" if len(record) else "nothing was recorded")
        ax.plot(record.steps, values, color=BLUE, marker=marker)
        title(ax, head)
        signed_log_if_wide(ax, values)
        _step_axis(ax, record, [row])
    fig.suptitle(literal(f"{plotdata.label(record, row)}: {KINDS[record.kind]}"), fontsize=10)
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
    width = len(record) // 100
    if width > 1 and len(table) > 12:  # or the noise of one layer hides all others
        table = np.stack([plotdata.smoothed(row, width) for row in table])
        head += f", mean over {width | 1} records"
    curves(ax, record, record.steps, table, key=key)
    title(ax, head)
    ax.set_ylabel(ylabel, fontsize=9)
    _step_axis(ax, record, None)
    if not len(record):
        nothing(ax, "nothing was recorded")


def _step_axis(ax: Any, record: Record, rows: list[int] | None) -> None:
    if len(record):
        broken = plotdata.nonfinite(record)
        mark_broken(ax, record.steps, (broken if rows is None else broken[rows]).any(axis=0))
        mark_epochs(ax, record)
    count_steps(ax)
    plain(ax)


def curves(ax: Any, record: Record, x: Any, table: Floats, *, key: bool, ls: str = "-") -> None:
    """Lines coloured by depth, skipping layers without a value; `key` says which is which."""
    rows = [i for i, row in enumerate(table) if np.isfinite(row).any()]
    colours = depth_colours(len(rows))
    marker = "." if len(x) < 30 else ""
    style = {"lw": 1.4 if len(rows) <= 30 else 0.8, "ls": ls, "marker": marker}
    lines = [
        ax.plot(x, table[i], color=colour, **style)[0]
        for colour, i in zip(colours, rows, strict=True)
    ]
    if not key or not rows:
        return
    if len(rows) <= 12:
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
        legend = ax.legend(lines, map(str, rows), fontsize=7, frameon=False, **place)
        # named now: a label that begins with an underscore is left out of a legend
        for text, i in zip(legend.get_texts(), rows, strict=True):
            text.set_text(literal(plotdata.shorten(record.names[i] or "(model)", 28)))
        return
    bar = ax.figure.colorbar(depth_scale(len(rows)), ax=ax, pad=0.01, aspect=25)
    bar.ax.invert_yaxis()
    name_layers(bar.ax.yaxis, [record.names[i] for i in rows], 16)
