"""How values are spread: the colorful dimension over steps, and the density at one step."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit import plotdata
from hookkit.errors import OptionError
from hookkit.plotting.axes import KINDS, NEVER, mark_broken, mark_epochs, nothing, plain, title
from hookkit.plotting.canvas import colour_map, new_axes, new_figure, share_norm
from hookkit.plotting.curves import curves
from hookkit.records import Record

FLOOR = 1e-4
"""The smallest share of values with a colour of its own."""


def color_dim(
    record: Any, layer: int | str | None = None, *, ax: Any = None, fig: Any = None
) -> Any:
    """The colorful dimension: how the values of a layer are spread, step by step.

    Each column is one record's histogram; colour is the share of values in a bin (log scale). Bins
    are drawn equally high, labelled with their true values; vermilion on top marks NaN or Inf.

    Args:
        record: a Record with histograms, a Run, a recorder or a driver.
        layer: name or index; None draws every layer in a grid that drops none.
        ax: where to draw the one layer.
        fig: where to draw the grid.

    Returns:
        The Axes of one layer, or the Figure of all.

    Raises:
        OptionError: no histograms were recorded, or `ax` was given for many layers.
        SelectionError: there is no such layer.
    """
    record = plotdata.as_record(record, "activation", "gradient")
    if layer is not None:
        row = record.layer(layer)
        ax = new_axes(ax, 10, 4)
        mesh = _spread(ax, record, row, plotdata.used_bins(plotdata.shares(record, row)))
        mark_epochs(ax, record)
        title(ax, f"{plotdata.label(record, row)}: spread of {KINDS[record.kind]}")
        ax.set_xlabel("optimizer step", fontsize=9)
        if mesh is not None:
            _share_bar(ax.figure, mesh, ax)
        return ax
    if ax is not None:
        raise OptionError(
            f"one Axes was given for {len(record.names)} layers. Name a layer, or give fig=."
        )
    return _spread_grid(record, fig)


def _spread_grid(record: Record, fig: Any) -> Any:
    tables = [plotdata.shares(record, row) for row in range(len(record.names))]
    n = len(tables)
    columns = min(n, 4 if n <= 24 else 6 if n <= 72 else 10)
    height = 1.5 if n <= 24 else 1.1 if n <= 72 else 0.8
    if not n or not len(record):
        fig = new_figure(fig, 10, 2.4)
        nothing(fig.subplots(), "nothing was recorded")
        return fig
    rows = -(-n // columns)
    fig = new_figure(fig, 10, max(2.4, rows * height + 0.9))
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    used = plotdata.used_bins(np.concatenate(tables, axis=1))
    meshes = [_spread(axes.flat[i], record, i, used, 800 // columns) for i in range(n)]
    for i, ax in enumerate(axes.flat):
        ax.tick_params(labelsize=6, length=2)
        if i >= n:
            ax.set_axis_off()
            continue
        name = plotdata.shorten(plotdata.label(record, i), 130 // columns)
        ax.set_title(name, fontsize=8 if n <= 24 else 6, pad=2)
    title(fig, f"Spread of {KINDS[record.kind]} by optimizer step, {n} layers in execution order")
    if drawn := [mesh for mesh in meshes if mesh is not None]:
        _share_bar(fig, drawn[0], list(axes.flat))
    return fig


def _spread(ax: Any, record: Record, row: int, used: tuple[int, int], most: int = 800) -> Any:
    """One layer's histograms over steps; None where there is nothing to draw, and it says so."""
    table = plotdata.shares(record, row)
    if record.edges is None or np.isnan(table).all():
        nothing(ax, "did not run" if len(record) else "nothing was recorded")
        return None
    first, last = used
    shown, edges, _ = plotdata.pool(table, plotdata.step_edges(record.steps), most)
    shown = np.where(shown < FLOOR, FLOOR, shown)[first : last + 1]  # NaN stays: it did not run
    colours, bins = colour_map("viridis", bad=NEVER), np.arange(first, last + 2)
    mesh = ax.pcolormesh(edges, bins, shown, cmap=colours, norm=share_norm(FLOOR), rasterized=True)
    places, labels = plotdata.bin_ticks(record.edges, first, last, 7 if most > 400 else 5)
    ax.set_yticks(places, labels, fontsize=7)
    ax.set_ylim(first, last + 1)
    ax.set_xlim(edges[0], edges[-1])
    mark_broken(ax, record.steps, plotdata.nonfinite(record)[row])
    return mesh


def _share_bar(fig: Any, mesh: Any, ax: Any) -> None:
    bar = fig.colorbar(mesh, ax=ax, pad=0.01, aspect=25, fraction=0.04)
    bar.set_ticks([1e-4, 1e-3, 1e-2, 1e-1, 1], labels=["≤0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
    bar.ax.tick_params(labelsize=7)
    bar.ax.minorticks_off()
    bar.set_label("share of values in a bin", fontsize=8)


def plot_density(record: Any, step: int | None = None, *, ax: Any = None) -> Any:
    """How the values of every layer are spread at one step (default: the last), a line a layer.

    The nearest record is taken, and the title says which. Raises OptionError without histograms.
    """
    record = plotdata.as_record(record, "activation", "gradient")
    ax = new_axes(ax, 10, 4.5)
    shares = [plotdata.shares(record, i) for i in range(len(record.names))]
    if not shares or not len(record):
        return nothing(ax, "nothing was recorded")
    wanted = int(record.steps[-1]) if step is None else step
    (column,) = plotdata.chosen_columns(record.steps, [wanted])
    tables = np.stack([table[:, column] for table in shares])
    first, last = plotdata.used_bins(tables.T)
    x = np.arange(len(tables[0])) + 0.5
    curves(ax, record, x[first : last + 1], 100 * tables[:, first : last + 1], key=True)
    assert record.edges is not None
    ax.set_xticks(*plotdata.bin_ticks(record.edges, first, last, 13))
    ax.set_xlim(first, last + 1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"value of {KINDS[record.kind][:-1]}", fontsize=9)
    ax.set_ylabel("% of values in a bin", fontsize=9)
    title(ax, f"Spread of {KINDS[record.kind]} at step {record.steps[column]}")
    plain(ax)
    return ax
