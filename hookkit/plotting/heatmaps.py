"""Draw heat-maps of the whole run, layer × step, with epochs and findings marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from hookkit._core.text import clip
from hookkit.diagnosis import diagnose
from hookkit.plotting import figures
from hookkit.plotting.figures import ALARM, GREY
from hookkit.records import Record, as_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANINGS = {GREY: "no value", "black": "all zero, or did not move", ALARM: "NaN or Inf"}
"""Colours that are not on the colour bar → what they mean."""


def plot_run(run: Any, *, findings: Sequence[Any] | None = None, fig: Any = None) -> Figure:
    """Draw the whole run at a glance: layer × step heat-maps of activations, gradients and updates.

    Colour shows log10 of the RMS of outputs and of their gradients, and log10 of the update:weight
    ratio of matrices: pale at the healthy −3, green below, purple above. Grey: the layer did not
    run, or got no gradient. Black: all values were zero, or the weight did not move. Vermilion: NaN
    or Inf. In a long run a cell shows the largest of several records; the title says how many. The
    smallest and largest 0.5 % of RMS values have the colours of the ends. The first six findings
    are listed below the maps; dashes at the right mark the layers of each, under its number.

    Args:
        run: a Run, a Record, a recorder, a Watcher or a Learner.
        findings: the findings to mark; default `diagnose(run)`; `[]` marks nothing.
        fig: an empty Figure or SubFigure to draw on.

    Returns:
        The Figure, with a panel and a colour bar for each Record of the run.
    """
    run = as_run(run)
    found = list(diagnose(run) if findings is None else findings)[:6]
    panels = []
    for r in run.records:
        own = figures.matrices(r) if r.kind == "param" else [*range(len(r.names))]
        panels += [(r, own)] if r and own else []
    heights = [min(2.8, max(1.0, 0.16 * len(own) + 0.5)) for _, own in panels]
    fig = figures.new_figure(fig, 10, sum(heights) + 0.8 + 0.16 * len(found))
    if not panels:
        figures.nothing(fig.subplots())
        return fig
    axes = fig.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    special: set[str] = set()
    for ax, (record, own) in zip(axes, panels, strict=True):
        special |= _heat(ax, record, own)
        for number, finding in enumerate(found, 1):
            rows = [y for y, i in enumerate(own) if record.names[i] in finding.layers]
            if rows:
                x, across = 1 + 0.012 * number, ax.get_yaxis_transform()
                ax.plot([x] * len(rows), rows, "k_", ms=5, transform=across, clip_on=False)
                ax.text(x, 1.02, f"{number}", fontsize=7, ha="center", transform=ax.transAxes)
        figures.mark_steps(ax, record)
        ax.xaxis.label.set_visible(ax is axes[-1])
    edge = {"ec": mpl.rcParams["text.color"], "lw": 0.5}  # shows black on a dark background
    patches = [Patch(fc=c, label=text, **edge) for c, text in MEANINGS.items() if c in special]
    if patches:
        fig.legend(handles=patches, fontsize=8, frameon=False, ncols=3, loc="outside upper right")
    lines = [clip(f"{i}  {str(f).splitlines()[0]}", 150) for i, f in enumerate(found, 1)]
    fig.supxlabel("\n".join(lines).replace("$", r"\$"), fontsize=8, x=0.01, ha="left")
    return fig


def _heat(ax: Any, record: Record, rows: list[int]) -> set[str]:
    """Draw one heat-map with its colour bar; return the special colours that it shows."""
    param = record.kind == "param"
    table = figures.log10(record.value("update_ratio" if param else "rms")[rows])
    low, high = -5.0, -1.0
    if not param:
        seen = table[np.isfinite(table)]
        low, high = map(float, np.percentile(seen, (0.5, 99.5)) if len(seen) else (0, 1))
        short = max(0.0, 1.0 - (high - low)) / 2  # the colour bar spans at least one decade
        low, high = low - short, high + short
    # the colour map is black below `low`, for log10(0), and vermilion above `high`, for NaN and Inf
    cells = np.where(np.isneginf(table), low - 9, np.clip(table, low, high))
    cells[figures.nonfinite(record)[rows]] = high + 9
    every = -(-len(record) // 800)  # records per cell: a wide figure has about 800 pixels
    starts = np.arange(0, len(record), every)
    cells = np.fmax.reduceat(cells, starts, axis=1)
    name, end = ("PRGn_r", 0.1) if param else ("viridis", 0.0)
    colours = mpl.colormaps[name](np.linspace(end, 1 - end, 128))  # ends of PRGn are nearly black
    shown = ListedColormap(colours).with_extremes(bad=GREY, under="black", over=ALARM)
    x, y = figures.step_edges(record.steps)[[*starts, -1]], np.arange(len(rows) + 1) - 0.5
    mesh = ax.pcolormesh(x, y, cells, cmap=shown, vmin=low, vmax=high, rasterized=True)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.06, aspect=12)
    unit = "log10\nupdate:weight" if param else "log10 RMS"
    bar.set_label(unit, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    head = "Update : weight of matrices" if param else f"RMS of {record.kind}s"
    figures.title(ax, head + f", each cell the largest of {every} records" * (every > 1))
    ax.grid(False)
    ax.set_ylim(len(rows) - 0.5, -0.5)  # the first layer is on top, as in a summary
    figures.name_layers(ax.yaxis, record, rows, 22)
    there = {GREY: np.isnan(cells), "black": cells < low, ALARM: cells > high}
    return {colour for colour, where in there.items() if where.any()}
