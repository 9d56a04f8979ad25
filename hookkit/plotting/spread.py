"""Draw histograms of values: the colorful dimension over steps, and the density at one step.

The axis of values is matplotlib's symlog scale, linear within the smallest bins. If all bins are
equally wide, the whole axis is linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.scale import SymmetricalLogTransform
from matplotlib.ticker import MaxNLocator

from hookkit.errors import OptionError
from hookkit.plotting import figures
from hookkit.plotting.figures import label
from hookkit.records import Floats, Record, as_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST, ACROSS = 24, 4
"""How many layers a grid has at most (more names could not be read), and how many in one row."""


def color_dim(
    record: Any, layer: int | str | None = None, *, ax: Any = None, fig: Any = None
) -> Any:
    """Draw the colorful dimension: the histogram of a layer's values at each step.

    Each column is the histogram of one record, or in a long run of several; the title says of how
    many. Colour is the fraction of values in a bin, on a log scale. Values beyond the bins are in
    the outermost bin. Grey: nothing was counted; vermilion on top: NaN or Inf.

    Args:
        record: a Record with histograms, a Run, a recorder, a Watcher or a Learner.
        layer: name or index; None draws a grid of the first 24 layers, in the order of the model.
            The title says so if there are more.
        ax: where to draw the one layer.
        fig: where to draw the grid.

    Returns:
        The Axes of one layer, or the Figure of all.

    Raises:
        OptionError: no histograms were recorded, or `ax` was given for many layers.
        SelectionError: there is no such layer.
    """
    record = as_record(record, "activation", "gradient")
    _check_hist(record)
    if layer is not None:
        row, ax = record.layer(layer), figures.new_axes(ax)
        _tiles(ax, record, [row], f"Spread of {record.kind}s: {label(record, row, 80)}")
        return ax
    n = len(record.names)
    if ax is not None:
        raise OptionError(f"one Axes was given for {n} layers. Name a layer, or give fig=.")
    rows = [*range(min(n, MOST))]
    which = f"the first {MOST} of {n} layers" if n > MOST else f"{n} layers"
    fig = figures.new_figure(fig, 10, 0.9 + max(2.2, 1.5 * -(-len(rows) // ACROSS)))
    _tiles(fig.subplots(), record, rows, f"Spread of {record.kind}s, {which}, in order")
    return fig


def plot_density(record: Any, step: int | None = None, *, ax: Any = None) -> Axes:
    """Draw the density of every layer's values at one step, a line per layer.

    A density is the fraction of values in a bin, divided by the bin's width on the axis, so that
    the area under each line is 1. On the symlog axis of the default bins, a normal distribution
    around 0 has two humps, at plus and minus its standard deviation; a box that begins at 0 holds
    the zeros of a ReLU.

    Args:
        record: a Run, a Record with histograms, a recorder, a Watcher or a Learner.
        step: the optimizer step; the nearest record is drawn, and the title says which. Default:
            the last record in which most layers had finite values.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.

    Raises:
        OptionError: no histograms were recorded, or `step` is outside the run.
    """
    record = as_record(record, "activation", "gradient")
    hist = _check_hist(record)
    if not hist.any():
        return figures.nothing(figures.new_axes(ax), "no finite value was recorded")
    counted = (hist.sum(axis=1) > 0).mean(axis=0)
    column = int(np.flatnonzero(counted >= min(0.5, counted.max()))[-1])
    if step is not None:
        (column,) = figures.columns_of("plot_density", record, [step])
    ax = figures.new_axes(ax, 10, 4.5)  # only now, so that a wrong step leaves no empty figure
    counts = hist[:, :, column]
    rows = np.flatnonzero(counts.sum(axis=1)).tolist()
    edges, *ticks = _value_axis(record)
    middles = (edges[1:] + edges[:-1]) / 2
    steps = "steps-mid" if len(rows) <= figures.FEW else "default"
    for row, colour in zip(rows, figures.colours(len(rows)), strict=True):
        shares = counts[row] / counts[row].sum() / np.diff(edges)
        ax.plot(middles, shares, drawstyle=steps, color=colour, lw=1, label=label(record, row))
    first, last = _used(counts)
    ax.set_xticks(*ticks, fontsize=8)
    ax.set_xlim(edges[first], edges[last + 1])
    ax.set_xlabel(f"value of {record.kind}", fontsize=9)
    ax.set_ylabel("density: share per unit of the axis", fontsize=9)
    none = f"; {len(counts) - len(rows)} layers have no finite value there"
    head = f"Spread of {record.kind}s at step {record.steps[column]}"
    figures.title(ax, head + none * (len(rows) < len(counts)))
    figures.layer_key(ax, record, rows)
    return ax


def _check_hist(record: Record) -> Any:
    if record.hist is None:
        raise OptionError("no histograms were recorded. Record with `with_hist=True`.")
    return record.hist


def _value_axis(record: Record) -> tuple[Floats, Floats, list[str]]:
    """Return (n_bins + 1,) positions of the bins' edges, and the positions and labels of the ticks.

    A bin that reaches to infinity is drawn one decade wide.
    """
    edges = np.asarray(record.edges, dtype=np.float64)
    finite = edges[np.isfinite(edges)]
    sizes, widths = np.abs(finite[finite != 0]), np.diff(finite)
    top, least = sizes.max(), sizes.min()
    ticks = np.asarray(MaxNLocator(8).tick_values(finite[0], finite[-1]))
    if np.allclose(widths, widths[0], rtol=1e-3):
        least = top
    else:
        each = max(2, round(np.log10(top / least) / 4))  # decades from tick to tick
        last = np.log10(10 * least) / each  # labels of smaller ticks would overlap that of 0
        powers = 10.0 ** (each * np.arange(np.floor(np.log10(top) / each), last, -1))
        ticks = np.array([*-powers, 0, *powers[::-1]])
    # linscale 0.39: the slope is the same at both sides of the linear part, so there is no kink
    transform = SymmetricalLogTransform(10, least, 0.39).transform_non_affine
    edges = np.clip(edges, -10 * top, 10 * top)
    names = [f"{tick:g}".replace("-", "−") for tick in ticks]
    return transform(edges) / least, transform(ticks) / least, names


def _used(counts: Any) -> tuple[int, int]:
    """Return the first and last bin in use of (n_layers, n_bins, …) counts, one bin wider."""
    used = np.flatnonzero(counts.any(axis=(0, *range(2, counts.ndim))))
    low, high = (used[0], used[-1]) if len(used) else (0, counts.shape[1] - 1)
    return max(int(low) - 1, 0), min(int(high) + 1, counts.shape[1] - 1)


def _tiles(ax: Any, record: Record, rows: list[int], head: str) -> None:
    """Draw each layer as a tile, all on one Axes, because 24 Axes take seconds to lay out."""
    if not rows or not len(record):
        figures.nothing(ax)
        return
    hist, (edges, ticks, names) = _check_hist(record)[rows], _value_axis(record)
    first, last = _used(hist)
    across, every = min(ACROSS, len(rows)), -(-len(record) * min(ACROSS, len(rows)) // 800)
    starts = np.arange(0, len(record), every)
    ys, xs = edges[first : last + 2], figures.step_edges(record.steps)[[*starts, -1]]
    right, down = 1.05 * (xs[-1] - xs[0]), 1.2 * (ys[-1] - ys[0])
    colours = mpl.colormaps["viridis"].with_extremes(bad=figures.GREY, over=figures.ALARM)
    broken = np.logical_or.reduceat(figures.nonfinite(record)[rows], starts, axis=1)
    for k, counts in enumerate(hist):
        counts = np.add.reduceat(counts, starts, axis=1)
        total = counts.sum(axis=0)
        shares = figures.log10(counts / np.where(total > 0, total, np.nan))
        cells = np.clip(shares, -4, 0)[first : last + 1]
        cells[-max(1, len(cells) // 20) :, broken[k]] = 9
        x, y = xs + k % across * right, ys - k // across * down
        mesh = ax.pcolormesh(x, y, cells, cmap=colours, vmin=-4, vmax=0, rasterized=True)
        if len(rows) > 1:
            ax.text(x[0], y[-1], label(record, rows[k]), fontsize=8, va="bottom")
    head += f"; {every} records a column" * (every > 1)
    head += "; NaN or Inf in vermilion" * bool(broken.any())
    figures.title(ax, head + "\n" * (len(rows) > 1))  # above the names of the first row
    figures.mark_steps(ax, record if len(rows) == 1 else None)
    if len(rows) > 1:
        ax.set_xticks(record.steps[[0, -1]])  # of the first tile
    shown, lines = (ticks >= ys[0]) & (ticks <= ys[-1]), range(-(-len(rows) // ACROSS))
    places = [tick - line * down for line in lines for tick in ticks[shown]]
    ax.set_yticks(places, [*np.array(names)[shown]] * len(lines), fontsize=8)
    ax.set_ylabel(f"value of {record.kind}", fontsize=9)
    ax.set_frame_on(False)
    ax.grid(False)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.01, aspect=25, fraction=0.03)
    bar.set_label("log10 of the share of values", fontsize=8)
    bar.ax.tick_params(labelsize=7)
