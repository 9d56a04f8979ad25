"""`plot_depth`: how large values and gradients are from layer to layer, a line for each step."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.plotting import arrays
from hookkit.plotting.axes import KINDS, log_y, name_layers, nothing, plain, title
from hookkit.plotting.figures import ALARM, depth_colours, new_figure
from hookkit.records import Floats, Ints, Record, as_run, in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 30
"""Layers up to which a depth profile joins each with the next."""


def plot_depth(run: Any, steps: Sequence[int] | None = None, *, fig: Any = None) -> Figure:
    """RMS through the depth of the net, forward (outputs) and backward (their gradients).

    Up to 30 layers, and where layers have no blocks, the lines join each layer with the next. Else
    points are layers, and lines join the geometric means of blocks, such as `h.0`, `h.1`, …:
    layers within a block are unlike each other, and joining them would draw a comb. Lines pass over
    layers that did not run, gave zeros only, or NaN or Inf; crosses mark the latter two.

    Args:
        run: a Run, a Record, a recorder or a driver.
        steps: optimizer steps to draw (the nearest records); default 0, 1, 10, 100, … and the last.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure; a level line is healthy, a slope is a signal that vanishes or explodes.

    Raises:
        OptionError: `steps` has one that was not recorded, or none.
    """
    run = in_order(as_run(run))
    panels = {"activation": run.activations, "gradient": run.gradients}
    there = {kind: r for kind, r in panels.items() if r is not None and len(r) and len(r.names)}
    columns = {kind: arrays.columns_of(r, steps) for kind, r in there.items()}
    fig = new_figure(fig, 10, 4.6)
    for ax, (kind, record) in zip(fig.subplots(1, 2), panels.items(), strict=True):
        if kind in there:
            _profile(ax, there[kind], columns[kind])
            title(ax, f"{'Forward' if kind == 'activation' else 'Backward'}: RMS of {KINDS[kind]}")
        else:
            why = f"no {kind}s recorded: add {kind.capitalize()}Stats()"
            nothing(ax, why if record is None else "nothing was recorded")
    return fig


def _profile(ax: Any, record: Record, columns: list[int]) -> None:
    table = record.value("rms")
    broken, at = arrays.nonfinite(record), np.arange(len(record.names))
    blocks = arrays.blocks(record.names) if len(at) > MOST_POINTS else None
    handles = []
    for colour, j in zip(depth_colours(len(columns)), columns, strict=True):
        rms, bad = table[:, j], broken[:, j]
        fine = np.isfinite(rms) & (rms > 0) & ~bad  # joined: a gap would hide the slope
        style = {"color": colour, "label": f"{record.steps[j]}"}
        if blocks is not None:
            ax.plot(at[fine], rms[fine], ".", ms=3, color=colour, alpha=0.5)
            handles += ax.plot(*_block_means(blocks[fine], at[fine], rms[fine]), lw=1.6, **style)
        else:
            few = {"lw": 1.6, "ms": 3} if len(at) <= MOST_POINTS else {"lw": 0.8, "ms": 1.5}
            handles += ax.plot(at[fine], rms[fine], marker="o", **few, **style)
        edge = {"transform": ax.get_xaxis_transform(), "ls": "", "marker": "x", "ms": 5}
        ax.plot(at[rms == 0], np.full((rms == 0).sum(), 0.02), color=colour, **edge)
        ax.plot(at[bad], np.full(bad.sum(), 0.98), color=ALARM, **edge)
    log_y(ax, table[:, columns][~broken[:, columns]])
    notes = {"× below: all zero": table[:, columns] == 0, "× above: NaN or Inf": broken[:, columns]}
    words = [word for word, there in notes.items() if there.any()]
    words += ["lines: geometric mean of each block"] if blocks is not None else []
    if (merged := int(record.spans[columns].max())) > 1:
        words.append(f"each step over {merged} records")
    ax.set_xlabel("\n".join(["layer, in order", *wrap("; ".join(words), 65)]), fontsize=9)
    name_layers(ax.xaxis, record, 24, rotation=90)
    ax.set_xlim(-0.5, len(record.names) - 0.5)
    plain(ax)
    _steps_key(ax, handles)


def _block_means(blocks: Ints, at: Ints, rms: Floats) -> tuple[Floats, Floats]:
    """The middle of each block, and the geometric mean of its layers."""
    _, which, n = np.unique(blocks, return_inverse=True, return_counts=True)
    middle, level = (np.bincount(which, weights=x) / n for x in (at, np.log10(rms)))
    return middle, 10**level


def _steps_key(ax: Any, handles: list[Any]) -> None:
    """Which colour is which step, above the panel: inside it would lie on the lines."""
    style = {"fontsize": 7, "frameon": False, "handlelength": 1, "columnspacing": 0.8}
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "borderpad": 0, "ncols": 9}
    head = ax.plot([], [], lw=0, label="step")
    ax.legend(handles=[*head, *handles], handletextpad=0.4, **style, **place)
