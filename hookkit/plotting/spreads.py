"""How values are spread: the colorful dimension over steps, and the density at one step."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookkit import plotdata
from hookkit.errors import OptionError
from hookkit.plotting.axes import (
    ALARM,
    BROKEN,
    KINDS,
    NEVER,
    mark_epochs,
    nothing,
    plain,
    title,
)
from hookkit.plotting.canvas import colour_map, new_axes, new_figure
from hookkit.plotting.curves import curves
from hookkit.records import Floats, Record

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
    if layer is None and ax is not None:
        raise OptionError(
            f"one Axes was given for {len(record.names)} layers. Name a layer, or give fig=."
        )
    rows = list(range(len(record.names))) if layer is None else [record.layer(layer)]
    tables = [plotdata.shares(record, row) for row in rows]
    if layer is None:
        columns = min(len(rows), 4 if len(rows) <= 24 else 6 if len(rows) <= 72 else 10) or 1
        height = next(
            h for n, h in ((4, 2.4), (24, 1.5), (72, 1.1), (1 << 30, 0.75)) if len(rows) <= n
        )
        fig = new_figure(fig, 10, max(2.0, -(-len(rows) // columns) * height) + 0.7)
        ax = fig.subplots()
        alarm = f"; {BROKEN} in vermilion" if plotdata.nonfinite(record).any() else ""
        title(ax, f"Spread of {KINDS[record.kind]}, {len(rows)} layers in order{alarm}", pad=18)
    else:
        columns, height, ax = 1, 4.0, new_axes(ax, 10, 4)
        title(ax, f"Spread of {KINDS[record.kind]}: {plotdata.label(record, rows[0])}")
    if not rows or not len(record):
        nothing(ax, "nothing was recorded")
    else:
        _tiles(ax, record, rows, tables, columns, height)
    return fig if layer is None else ax


def _tiles(
    ax: Any, record: Record, rows: list[int], tables: list[Floats], columns: int, height: float
) -> None:
    """Every layer a tile, all in one mesh: 300 Axes would take two minutes to lay out."""
    alone = len(rows) == 1
    first, last = plotdata.used_bins(np.concatenate(tables, axis=1))
    broken = plotdata.nonfinite(record)
    edges = plotdata.step_edges(record.steps)
    tiles = [_tile(t[first : last + 1], broken[i]) for t, i in zip(tables, rows, strict=True)]
    pooled = [plotdata.pool(tile, edges, 800 // columns) for tile in tiles]
    xs, high, n_rows = pooled[0][1], last + 1 - first, -(-len(rows) // columns)
    wide = xs[-1] - xs[0]
    right, up = (0.0, 0.0) if alone else (0.06 * wide, 0.19 / (height - 0.19) * high)
    image = np.full((n_rows * (high + 1), columns * len(xs)), np.nan)
    for k, (tile, _, _) in enumerate(pooled):
        r, c = n_rows - 1 - k // columns, k % columns
        image[r * (high + 1) :, c * len(xs) :][:high, : len(xs) - 1] = tile
        if not alone:
            at = (c * (wide + right) + xs[0], r * (high + up) + high)
            name = _tile_name(record, rows[k], columns)
            size = 8 if columns < 5 else 6
            ax.annotate(name, at, (0, 2), textcoords="offset points", fontsize=size)
    x = np.concatenate([xs + c * (wide + right) for c in range(columns)])
    y = np.concatenate([np.arange(high + 1) + r * (high + up) for r in range(n_rows)])
    colours = colour_map("viridis", bad="none", under=NEVER, over=ALARM)
    mesh = ax.pcolormesh(
        x, y, image[:-1, :-1], cmap=colours, vmin=np.log10(FLOOR), vmax=0, rasterized=True
    )
    _tile_axes(ax, record, (first, last), (columns, wide + right), (n_rows, high + up))
    _share_bar(ax, mesh)


def _tile_name(record: Record, row: int, columns: int) -> str:
    """What fits over a tile; of long names the end, which tells neighbours apart."""
    whole, room = plotdata.label(record, row), 130 // columns
    name = whole if len(whole) <= room else record.names[row] or record.types[row]
    return name if len(name) <= room else "…" + name[1 - room :]


def _tile(table: Floats, broken: Any) -> Floats:
    """log10 of the shares; far below them where the layer did not run, above (on top) for NaN."""
    shown = np.clip(plotdata.log10(table), np.log10(FLOOR), 0.0)
    shown[np.isnan(shown)] = -99.0
    shown[-max(1, len(shown) // 20) :, broken] = 99.0
    return shown


def _tile_axes(ax: Any, record: Record, bins: tuple[int, int], across: Any, down: Any) -> None:
    """True values and steps at the left and the lower edge of the tiles; no frame around all."""
    assert record.edges is not None
    (columns, _), (n_rows, high) = across, down
    places, labels = plotdata.bin_ticks(record.edges, *bins, 9 if n_rows == 1 else 5)
    ys = [place - bins[0] + r * high for r in range(n_rows) for place in places]
    small = 8 if columns * n_rows == 1 else 7 if columns < 5 else 5.5
    ax.set_yticks(ys, labels * n_rows, fontsize=small)
    if columns == 1:
        mark_epochs(ax, record)
        ax.tick_params(labelsize=small)
    else:
        ends = [int(record.steps[0]), int(record.steps[-1])]
        ax.set_xticks(ends, [f"{end}" for end in ends], fontsize=small)  # alike in all columns
    ax.tick_params(length=2)
    ax.set_xlabel("optimizer step", fontsize=9)
    ax.spines[:].set_visible(False)


def _share_bar(ax: Any, mesh: Any) -> None:
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.01, aspect=25, fraction=0.03, shrink=0.9)
    bar.set_ticks([-4, -3, -2, -1, 0], labels=["≤0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
    bar.ax.tick_params(labelsize=7)
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
    empty = int(np.isnan(tables).all(axis=1).sum())
    note = f"; {empty} of {len(tables)} layers have no finite values there" if empty else ""
    title(ax, f"Spread of {KINDS[record.kind]} at step {record.steps[column]}{note}")
    plain(ax)
    return ax
