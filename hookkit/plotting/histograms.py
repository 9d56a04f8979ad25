"""How values are spread: the colorful dimension over steps, and the density at one step.

Both draw densities: shares of values divided by the width of their bin on the axis (see `bins`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookkit.checks import check_number, shown
from hookkit.errors import OptionError
from hookkit.plotting import arrays
from hookkit.plotting.axes import BROKEN, KINDS, count_steps, mark_epochs, nothing, plain, title
from hookkit.plotting.bins import bin_ticks, densities, edge_places, scale_words, unit
from hookkit.plotting.figures import ALARM, NEVER, colour_map, literal, new_axes, new_figure
from hookkit.plotting.labels import row_label
from hookkit.plotting.lines import FEW, curves
from hookkit.records import Floats, Record, as_record, by_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADES = 4
"""Of densities that have a colour of their own, from what one narrowest bin can hold down."""


PAGE = 24
"""Layers in one picture, each with its name in full or nearly so."""


def color_dim(
    record: Any, layer: int | str | None = None, *, page: int = 1, ax: Any = None, fig: Any = None
) -> Any:
    """The colorful dimension: how the values of a layer are spread, step by step.

    Each column is one record's histogram, or that of several neighbours, if there are more than fit
    in the picture: the title says how many. Colour is the density on a log scale: the share of
    values per decade, for the default bins, whose axis is signed logarithmic (and linear within the
    least bins, around 0). A spike in it is a value that many have, such as the 0 of a ReLU. Bins
    that are equally wide have a linear axis and the share per bin. Values beyond the bins are in
    the open ones at the ends (`> 4096`), each a 15th of the axis. Grey: nothing was
    counted; vermilion on top: NaN or Inf.

    Args:
        record: a Record with histograms, a Run, a recorder or a driver.
        layer: name or index; None draws the layers in a grid, in the order of the model.
        page: of the grid, which 24 layers: 1 draws the first ones. The title says which they are.
        ax: where to draw the one layer.
        fig: where to draw the grid.

    Returns:
        The Axes of one layer, or the Figure of all.

    Raises:
        OptionError: no histograms were recorded, there is no such page (or one `layer` was named),
            or `ax` was given for many layers.
        SelectionError: there is no such layer.
    """
    record = as_record(record, "activation", "gradient")
    record = by_module(record) if layer is None else record
    if layer is None and ax is not None:
        raise OptionError(
            f"one Axes was given for {len(record.names)} layers. Name a layer, or give fig=."
        )
    if layer is not None and page != 1:
        raise OptionError(f"page={shown(page)} of one layer: leave out `layer`, or `page`.")
    _check_hist(record)
    rows = _rows_of_page(record, page) if layer is None else [record.layer(layer)]
    grid = _grid(len(rows))
    merged = _merged(record, grid)
    note = f"; {merged} records a column" if merged > 1 else ""
    note += f"; {BROKEN} in vermilion" if arrays.nonfinite(record)[rows].any() else ""
    if layer is None:
        fig = new_figure(fig, 10, max(2.0, grid.rows * grid.height) + 0.7)
        ax = fig.subplots()
        title(ax, f"Spread of {KINDS[record.kind]}{_which(record, rows)}{note}", pad=18)
    else:
        ax = new_axes(ax, 10, 4)
        title(ax, f"Spread of {KINDS[record.kind]}: {row_label(record, rows[0])}{note}")
    if rows and len(record):
        _tiles(ax, record, rows, grid)
    else:
        nothing(ax, "nothing was recorded")
    return fig if layer is None else ax


def _rows_of_page(record: Record, page: int) -> list[int]:
    """Of `page`, the rows: the first page has the first ones."""
    n = len(record.names)
    what = f"the page of {PAGE} layers to draw, of {n} layers"
    page = check_number("color_dim", "page", page, 1, max(1, -(-n // PAGE)), whole=True, what=what)
    return list(range(n))[(page - 1) * PAGE : page * PAGE]


def _which(record: Record, rows: list[int]) -> str:
    """Which layers a grid shows, as the end of its title."""
    n = len(record.names)
    if len(rows) == n > 1 or not n:
        return f", {n} layers in order"
    part = f"layers {rows[0] + 1}–{rows[-1] + 1} of {n}"
    return f", {part}, in order" if len(rows) > 1 else f": {row_label(record, rows[0])}"


class Grid(NamedTuple):
    """How many tiles are on top of each other and side by side, and how high they are (inches)."""

    rows: int
    columns: int
    height: float


def _grid(n: int) -> Grid:
    """For `n` tiles, at most a page of them."""
    if n <= 4:
        return Grid(1, max(1, n), 4.0 if n <= 1 else 2.4)
    return Grid(-(-n // 4), 4, 1.5)


def _check_hist(record: Record) -> None:
    if record.names and record.hist is None:
        raise OptionError(
            f'no histogram of "{record.names[0]}" was recorded. Record with `with_hist=True`.'
        )


def _densities(record: Record, row: int, merged: int = 1) -> Floats:
    """(n_bins, n) density of each record, or of `merged` neighbours; NaN without any values."""
    assert record.hist is not None
    assert record.edges is not None
    counts = record.hist[row].astype(np.float64)
    counts = np.add.reduceat(counts, np.arange(0, counts.shape[1], merged), axis=1)
    total = counts.sum(axis=0)
    return densities(counts / np.where(total > 0, total, np.nan), record.edges)


def _used_bins(used: Any) -> tuple[int, int]:
    """First and last of the bins that hold anything, (n_bins,) bool, with one to spare."""
    rows = np.flatnonzero(used)
    if not len(rows):
        return 0, len(used) - 1
    return max(0, int(rows[0]) - 1), min(len(used) - 1, int(rows[-1]) + 1)


def _merged(record: Record, grid: Grid) -> int:
    """How many records a column of a tile counts together."""
    return max(1, -(-len(record) // (800 // grid.columns)))


def _tiles(ax: Any, record: Record, rows: list[int], grid: Grid) -> None:
    """Every layer a tile, all in one mesh: 300 Axes would take two minutes to lay out."""
    assert record.hist is not None
    assert record.edges is not None
    bins, merged = _used_bins((record.hist[rows] > 0).any(axis=(0, 2))), _merged(record, grid)
    places, edges = edge_places(record.edges), arrays.step_edges(record.steps)
    ys, xs = places[bins[0] : bins[1] + 2] - places[bins[0]], edges[:-1:merged]
    xs, high = np.append(xs, edges[-1]), len(ys) - 1
    top = float(np.ceil(-np.log10(np.diff(places).min())))
    gap = (0.0, 0.0) if grid.columns == 1 else (0.06, 0.19 / (grid.height - 0.19))
    right, up = (1 + gap[0]) * (xs[-1] - xs[0]), (1 + gap[1]) * ys[-1]
    image = np.full((grid.rows * (high + 1), grid.columns * len(xs)), np.nan)
    for k, row in enumerate(rows):
        r, c = grid.rows - 1 - k // grid.columns, k % grid.columns
        tile = _tile(record, row, merged, bins, top)
        image[r * (high + 1) :, c * len(xs) :][:high, : len(xs) - 1] = tile
        if grid.columns > 1:
            at, text = (c * right + xs[0], r * up + ys[-1]), {"textcoords": "offset points"}
            name = row_label(record, row, 31)  # of long names the end: there they differ
            ax.annotate(literal(name), at, (0, 3.5), fontsize=8, **text)
    x = np.concatenate([xs + c * right for c in range(grid.columns)])
    y = np.concatenate([ys + r * up for r in range(grid.rows)])
    colours = colour_map("viridis", 5 * DECADES, bad="none", under=NEVER, over=ALARM)
    limits = {"vmin": top - DECADES, "vmax": top, "rasterized": True}
    mesh = ax.pcolormesh(x, y, image[:-1, :-1], cmap=colours, **limits)
    _tile_axes(ax, record, bins, grid, up)
    _density_bar(ax, mesh, record.edges, int(top))


def _tile(record: Record, row: int, merged: int, bins: tuple[int, int], top: float) -> Floats:
    """log10 of the densities; far below them where nothing was counted, above (on top) for NaN."""
    table = _densities(record, row, merged)[bins[0] : bins[1] + 1]
    shown = np.clip(arrays.log10(table), top - DECADES, top)
    shown[np.isnan(shown)] = -99.0
    starts = np.arange(0, len(record), merged)
    broken = np.logical_or.reduceat(arrays.nonfinite(record)[row], starts)
    shown[-max(1, len(shown) // 20) :, broken] = 99.0
    return shown


def _tile_axes(ax: Any, record: Record, bins: tuple[int, int], grid: Grid, up: float) -> None:
    """True values at the left, steps below the first column (alike in all), and no frame."""
    assert record.edges is not None
    most = min(9, _fitting(ax, 3.5, high=True)) if grid.rows == 1 else 5
    places, labels = bin_ticks(record.edges, *bins, most)
    low = edge_places(record.edges)[bins[0]]
    ys = [place - low + r * up for r in range(grid.rows) for place in places]
    count_steps(ax)
    ax.set_yticks(ys, labels * grid.rows, fontsize=8)
    ax.set_ylabel(f"value of {KINDS[record.kind][:-1]}\n{scale_words(record.edges)}", fontsize=7)
    if grid.columns == 1:
        mark_epochs(ax, record)
        ax.tick_params(labelsize=8)
    else:
        ends = sorted({int(record.steps[0]), int(record.steps[-1])})
        ax.set_xticks(ends, [f"{end}" for end in ends], fontsize=8)
    ax.grid(False)
    ax.tick_params(length=2)
    ax.spines[:].set_visible(False)


def _density_bar(ax: Any, mesh: Any, edges: Floats, top: int) -> None:
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.01, aspect=25, fraction=0.03, shrink=0.9)
    ticks = range(top - DECADES, top + 1)
    words = [f"{10.0**k:g}" for k in ticks]
    bar.set_ticks(list(ticks), labels=[f"≤{words[0]}", *words[1:]])
    bar.ax.tick_params(labelsize=7)
    bar.set_label(f"share of values per {unit(edges)}", fontsize=8)


def plot_density(record: Any, step: int | None = None, *, ax: Any = None) -> Axes:
    """How the values of every layer are spread at one step, a line a layer.

    Lines are densities: shares of values per decade, for the default bins, whose axis is signed
    logarithmic (and linear within the least bins, around 0). On it a normal distribution around 0
    has two humps, at plus and minus its standard deviation; a box that begins at 0 holds the zeros
    of a ReLU. Equal bins have a linear axis, and the share per bin. Up to 12 layers are drawn bin
    by bin, so that the area under each is 1; lines of more join the middles of the bins.

    The nearest record is taken, and the title says which; without `step` it is the last one in
    which most layers have finite values.

    Args:
        record: with histograms: a Run, a Record, a recorder, a Watcher or a Learner.
        step: the optimizer step.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.

    Raises:
        OptionError: no histograms were recorded, or `step` was not.
    """
    record = by_module(as_record(record, "activation", "gradient"))
    _check_hist(record)
    if not record.names or not len(record):
        return nothing(new_axes(ax, 10, 4.5), "nothing was recorded")
    column = _last_counted(record)
    if step is not None:
        (column,) = arrays.columns_of(record, [step])
    ax = new_axes(ax, 10, 4.5)
    rows = range(len(record.names))
    tables = np.stack([_densities(record, row)[:, column] for row in rows])
    first, last = _used_bins((tables > 0).any(axis=0))
    assert record.edges is not None
    x, shown = edge_places(record.edges)[first : last + 2], tables[:, first : last + 1]
    if len(rows) > FEW:
        curves(ax, record, (x[:-1] + x[1:]) / 2, shown, key=True, marker="")
    else:
        shown = shown[:, [*range(shown.shape[1]), -1]]  # a step reaches to the end of its bin
        curves(ax, record, x, shown, key=True, drawstyle="steps-post", marker="")
    ax.set_xticks(*bin_ticks(record.edges, first, last, _fitting(ax, 1.6)))
    ax.set_xlim(x[0], x[-1])
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"value of {KINDS[record.kind][:-1]}; {scale_words(record.edges)}", fontsize=9)
    ax.set_ylabel(f"share of values per {unit(record.edges)}", fontsize=9)
    empty = int(np.isnan(tables).all(axis=1).sum())
    note = f"; {empty} of {len(tables)} layers have no finite values there" if empty else ""
    note = (f", {n} records together" if (n := record.spans[column]) > 1 else "") + note
    title(ax, f"Spread of {KINDS[record.kind]} at step {record.steps[column]}{note}")
    plain(ax)
    return ax


def _fitting(ax: Any, per_inch: float, *, high: bool = False) -> int:
    """How many labels fit along an axis of `ax`, 4 at least."""
    fig = ax.get_figure(root=True)
    inches = float(ax.get_window_extent().size[int(high)]) / fig.dpi
    return max(4, int(inches * per_inch + 0.5))


def _last_counted(record: Record) -> int:
    """The last record in which most layers had finite values; else the last of all."""
    assert record.hist is not None
    counted = record.hist.sum(axis=1) > 0
    layers = counted.sum(axis=0)
    found = np.flatnonzero((layers > 0) & (2 * layers >= (counted.sum(axis=1) > 0).sum()))
    return int(found[-1]) if len(found) else len(record) - 1
