"""How every picture dresses its axes: titles, names of layers, marks of epochs and of NaN or Inf.

An axis, or a figure, is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hookkit.plotting.naming import layer_ticks
from hookkit.plotting.plotdata import epoch_starts, step_edges
from hookkit.records import Record

FAINT = "#767676"
"""Grey that is read on white and on black alike: a contrast of 4.5 to 1 (WCAG 2.2, 1.4.3)."""
ALARM = "#d55e00"
"""Vermilion of Okabe and Ito's palette, which colour-blind readers can tell: NaN or Inf only."""
NEVER = "#dcdcdc"
BLUE = "#0072b2"
ORANGE = "#e69f00"
BROKEN = "NaN or Inf"
KINDS = {"activation": "activations", "gradient": "gradients", "param": "parameters"}


def literal(text: str) -> str:
    """`text` as it stands, on one line, with □ for what the user's font has no sign for.

    Between two dollar signs matplotlib would read a formula; for each missing sign it would warn.

    >>> literal("cost in $ or $US")
    'cost in \\\\$ or \\\\$US'
    """
    text = " ".join(text.replace("$", r"\$").splitlines())
    if text.isascii():
        return text
    known = _signs(_fonts())
    box = "□" if ord("□") in known else "?"
    return "".join(c if c.isascii() or ord(c) in known else box for c in text)


def _fonts() -> tuple[str, ...]:
    """The files of the fonts that text is drawn in."""
    from matplotlib import rcParams  # late: that it is missing is for canvas to tell
    from matplotlib.font_manager import FontProperties, findfont

    return tuple(findfont(FontProperties(family=[family])) for family in rcParams["font.family"])


@lru_cache(maxsize=8)
def _signs(fonts: tuple[str, ...]) -> frozenset[int]:
    """The code points that one of these fonts can draw."""
    from matplotlib.font_manager import get_font

    return frozenset(code for font in fonts for code in get_font(font).get_charmap())


def ink(ax: Any) -> Any:
    """The colour of text in the user's style: black, or white on a dark background."""
    return ax.xaxis.label.get_color()


def title(ax: Any, text: str, pad: float | None = None) -> None:
    """A small title at the left."""
    ax.set_title(literal(text), fontsize=10, loc="left", pad=pad)


def count_steps(ax: Any) -> None:
    """Says that x counts optimizer steps, which are whole also where there are few."""
    ax.set_xlabel("optimizer step", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def plain(ax: Any) -> None:
    """No box, a faint grid, small numbers."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color=ink(ax), alpha=0.1, lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)


def nothing(ax: Any, why: str, *, keep_x: bool = False) -> Any:
    """An Axes that says why it is empty, without a scale unless x has a meaning all the same."""
    ax.text(
        0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=8, color=FAINT
    )
    ax.yaxis.set_visible(False)
    ax.xaxis.set_visible(keep_x)
    ax.spines["left"].set_visible(False)
    ax.spines[["bottom", "top", "right"]].set_visible(keep_x)
    return ax


def name_layers(
    axis: Any, record: Record, most: int, rotation: float = 0, rows: Sequence[int] | None = None
) -> None:
    """Ticks with the names and types of layers (of `rows`, or all), thinned to about `most`."""
    rows = range(len(record.names)) if rows is None else rows
    ticks = layer_ticks([record.names[i] for i in rows], [record.types[i] for i in rows], most)
    size = 7 if len(ticks) <= 20 else 6
    axis.set_ticks(
        [i for i, _ in ticks],
        [literal(name) for _, name in ticks],
        fontsize=size,
        rotation=rotation,
    )


def mark_epochs(ax: Any, record: Record, *, label: bool = True) -> None:
    """Dotted lines where epochs begin, and their numbers along the top."""
    starts = epoch_starts(record)
    if not starts:
        return
    for step, _ in starts:
        ax.axvline(step, color=FAINT, lw=0.7, ls=":")
    if label:
        top = ax.secondary_xaxis("top")
        names = [f"epoch {epoch}" if i == 0 else f"{epoch}" for i, (_, epoch) in enumerate(starts)]
        top.set_xticks([step for step, _ in starts], names, fontsize=6.5, color=FAINT)
        top.tick_params(length=2, pad=1, color=FAINT)
        top.spines["top"].set_visible(False)


def mark_broken(ax: Any, steps: Any, broken: Any, *, word: bool = True) -> None:
    """A vermilion bar along the top of an Axes over the steps with NaN or Inf."""
    if not len(steps) or not np.any(broken):
        return
    edges = step_edges(np.asarray(steps))
    turns = np.flatnonzero(np.diff(np.concatenate(([0], np.asarray(broken, int), [0]))))
    bars = [(edges[a], edges[b] - edges[a]) for a, b in turns.reshape(-1, 2)]
    across = ax.get_xaxis_transform()  # x in steps, y in shares of the height
    ax.broken_barh(bars, (0.96, 0.04), transform=across, color=ALARM, lw=0.5, zorder=4)
    if word:
        late = bars[0][0] > (edges[0] + edges[-1]) / 2  # write to the side that has room
        x, ha = (edges[-1], "right") if late else (bars[0][0], "left")
        ax.text(x, 0.95, BROKEN, transform=across, va="top", ha=ha, fontsize=7, color=ALARM)


def log_y(ax: Any, values: Any) -> None:
    """A logarithmic y axis with plain numbers, where there is anything positive to show on it."""
    values = np.asarray(values)
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return
    low, high = np.log10(positive.min()), np.log10(positive.max())
    decades = high - low
    most = 300 - 0.35 * decades  # or matplotlib's ticks, some decades beyond, overflow
    if max(-low, high) > most:
        bottom, top = np.clip((low, high), -most, most)
        ax.set_ylim(10.0 ** (bottom - 0.1), 10.0 ** (top + 0.1))  # apart, also where both were cut
    ax.set_yscale("log", nonpositive="mask")
    between = {2.0, 5.0} if decades < 2 else set()

    def word(value: float, _: Any = None) -> str:
        lead = round(value / 10 ** np.floor(np.log10(value) + 1e-9), 6)
        return _number(value) if lead in between | {1.0} else ""

    ax.yaxis.set_major_formatter(lambda value, _: _number(value))
    ax.yaxis.set_minor_formatter(word)
    ax.tick_params(axis="y", which="minor", labelsize=7)
    if decades < 0.7:  # too little to hold two ticks: show the neighbourhood too
        middle = float(np.clip(10 ** ((low + high) / 2), 1e-301, 1e301))
        ax.set_ylim(middle / 3, middle * 3)


def _number(value: float) -> str:
    if 1e-3 <= abs(value) < 1e4 or not value:
        return f"{value:g}".replace("-", "−")
    return (
        f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
    )


def signed_log_if_wide(ax: Any, values: Any) -> None:
    """A signed-log y axis, where a few values would press all others flat."""
    size = np.abs(values[np.isfinite(values) & (values != 0)])
    usual = float(np.percentile(size, 75)) if size.size else 0.0
    if not size.size or size.max() <= 100 * usual:
        if size.size and size.max() > 1e300:  # the margin that matplotlib adds would overflow
            ax.set_ylim(-1e300, 1e300)
        return
    if size.max() > 1e200:  # as above, and before there is a scale to overflow
        ax.set_ylim(*np.clip((-size.max(), size.max()), -1e200, 1e200))
    ax.set_yscale("symlog", linthresh=usual)
    marks = _signed_ticks(values[np.isfinite(values)], usual)
    ax.set_yticks(marks, [_number(mark) for mark in marks])
    ax.minorticks_off()


def _signed_ticks(values: Any, usual: float) -> list[float]:
    """0, a round value near ±`usual` (where the axis turns logarithmic), and decades beyond."""
    power = 10.0 ** np.floor(np.log10(usual))
    near = max(lead * power for lead in (1, 2, 5) if lead * power <= usual * 1.001)
    last = int(np.floor(np.log10(np.abs(values).max())))
    beyond = range(last, int(np.ceil(np.log10(3 * usual))) - 1, -1)
    every = max(1, -(-len(beyond) // 3))
    sizes = [near, *(10.0**k for k in beyond[::every])]
    low, high = values.min() - near / 2, values.max() + near / 2
    return sorted(x for x in (0.0, *sizes, *(-size for size in sizes)) if low <= x <= high)
