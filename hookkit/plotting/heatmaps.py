"""The whole run at a glance: layer × step heat-maps, with epochs and findings marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookkit import health
from hookkit.checks import check_flag, shown
from hookkit.errors import ArgumentError
from hookkit.plotting import arrays
from hookkit.plotting.axes import (
    BROKEN,
    KINDS,
    count_steps,
    mark_epochs,
    name_layers,
    nothing,
    title,
)
from hookkit.plotting.figures import ALARM, BLACK, NEVER, WHITE, colour_map, key, new_figure
from hookkit.plotting.labels import listed
from hookkit.records import Floats, Record, as_run, in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY_AND_BLACK = {
    "activation": ("did not run", "all zero"),
    "gradient": ("no gradient", "all zero"),
    "param": ("not recorded", "did not move"),
}
"""What a cell without a number means, and one of zero, for each kind of record."""

YOUNG = "no value yet: begins at 0, until a step changes it by 1 % or less"
"""What a grey cell of a parameter means whose relative update is not known."""

MOST_BOXES = 12
"""Of one finding: more would hide what they mark."""

LEAST_GAP = 0.15
"""Inches between two boxes; rows that are closer share one box."""


def plot_run(
    run: Any,
    *,
    findings: Sequence[Any] | None = None,
    relative: bool | None = None,
    fig: Any = None,
) -> Figure:
    """The whole run at a glance: layer × step heat-maps of activations, gradients and updates.

    Colour is log10 RMS (of outputs and of their gradients) and log10 of update:weight, whose map is
    pale at the healthy −3, green below and purple above. Grey: the layer did not run, or no
    gradient reached it; black: all zero, or not moved; vermilion: NaN or Inf. In a deep net, or a
    long run, a cell shows the largest of its neighbours, and the title says of how many. The
    least and the largest 0.5 % of values share the colours at the ends. Numbered boxes mark what
    the first six findings name: one box may hold layers that lie close together, and each finding
    has twelve boxes at most.

    A parameter that begins at 0 is grey until a step first changes it by 1 % or less: its relative
    update is infinite at first, and large then, whatever the learning rate.

    Args:
        run: a Run, a Record, a recorder or a driver.
        findings: what to mark, each with `severity, rule, layers, steps`; default `diagnose(run)`.
        relative: draws activations and gradients relative to what each layer had at first (the
            median over the first tenth of the records): pale where nothing has changed, purple
            where it is larger now, green where it is smaller. The title has the range of levels
            that they had then. False draws levels. Default: True where a LayerNorm or RMSNorm was
            recorded. There a layer's level follows from where it stands: a norm's output has RMS 1,
            others may have 0.01, so that levels are stripes.
        fig: an empty Figure or SubFigure to draw on.

    Returns:
        The Figure, with a panel and a colour bar for each record that is there.

    Raises:
        ArgumentError: `findings` has something else in it, or `relative` is no flag.
    """
    if relative is not None:
        relative = check_flag("plot_run", "relative", relative)
    run = in_order(as_run(run))
    if relative is None:  # a norm gives each of its outputs the same size
        kinds = [kind for r in run.records for kind in r.types]
        relative = any("LayerNorm" in kind or "RMSNorm" in kind for kind in kinds)
    panels = [r for r in run.records if len(r) and len(r.names)]
    heights = [_height(r) for r in panels]
    found = health.diagnose(run) if findings is None else _checked(findings)
    fig = new_figure(fig, 10, sum(heights) + 0.9 + 0.17 * min(7, len(found)))
    if not panels:
        nothing(fig.subplots(), "nothing was recorded")
        return fig
    axes = fig.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    meanings: dict[str, list[str]] = {}
    for ax, record, height in zip(axes, panels, heights, strict=True):
        for colour, words in _heat(ax, record, height, relative).items():
            meanings[colour] = [*dict.fromkeys([*meanings.get(colour, []), *words])]
        mark_epochs(ax, record, label=ax is axes[0])
    count_steps(axes[-1])
    lines = _mark_findings(axes, panels, found)
    key(fig, {" / ".join(words): colour for colour, words in meanings.items()}, lines)
    return fig


def _height(record: Record) -> float:
    """Of a panel, in inches: every layer a pixel high, and what is named legible."""
    n = len(record.names)
    return max(1.1, min(2.6, 0.16 * n + 0.5), min(6.5, n / SHARPNESS + MARGIN))


SHARPNESS, MARGIN = 90, 0.4
"""Rows to an inch that a screen of 100 dots to an inch can show; inches of a panel beside them."""


def _heat(ax: Any, record: Record, height: float, relative: bool) -> dict[str, list[str]]:
    """One heat-map with its colour bar; its special colours, and what they mean."""
    shown, param = _shown(record, relative), record.kind == "param"
    low, high = shown.limits
    cells = np.where(np.isneginf(shown.table), -np.inf, np.clip(shown.table, low, high))
    cells[broken := arrays.nonfinite(record)] = np.inf
    ends, most = np.arange(len(record.names) + 1.0) - 0.5, int((height - MARGIN) * 100)
    edges, signed = arrays.step_edges(record.steps), relative and not param
    cells, edges, columns = arrays.pool(cells, edges, 800, signed=signed)
    cells, ends, merged = arrays.pool(cells.T, ends, most, signed=signed)
    cells = np.clip(cells, low - 9, high + 9)  # zero and NaN take the colours for under and over
    name = "PRGn_r" if param or relative else "viridis"
    colours = colour_map(name, bad=NEVER, under=BLACK, over=ALARM)
    mesh = ax.pcolormesh(edges, ends, cells.T, cmap=colours, vmin=low, vmax=high, rasterized=True)
    _bar(ax, mesh, shown.unit, param)
    ax.grid(False)
    ax.tick_params(labelsize=8)
    ax.set_ylim(len(record.names) - 0.5, -0.5)  # input on top, as in a summary
    name_layers(ax.yaxis, record, int(8 * height))
    title(ax, shown.head + _of_how_many(columns, merged, signed))
    grey, black = GREY_AND_BLACK[record.kind]
    unknown, zero = np.isnan(shown.table) & ~broken, np.isneginf(shown.table) & ~broken
    there = {grey: unknown & ~shown.young, YOUNG: unknown & shown.young}
    words = {NEVER: [word for word, mask in there.items() if mask.any()]}
    words |= {BLACK: [black] * bool(zero.any()), ALARM: [BROKEN] * bool(broken.any())}
    return {colour: said for colour, said in words.items() if said}


class Shown(NamedTuple):
    """What a heat-map shows: (rows, n) logarithms, their limits, unit and title.

    `young` is where parameters have no value yet.
    """

    table: Floats
    limits: tuple[float, float]
    unit: str
    head: str
    young: Any


def _shown(record: Record, relative: bool) -> Shown:
    if record.kind == "param":
        ratio, young = arrays.update_ratios(record)
        head = "Update : weight of parameters"
        return Shown(arrays.log10(ratio), (-5.0, -1.0), "log10\nupdate:weight", head, young)
    rms, none = record.value("rms"), np.zeros((len(record.names), len(record)), bool)
    if not relative:
        table, head = arrays.log10(rms), f"RMS of {KINDS[record.kind]}"
        return Shown(table, _limits(table), "log10 RMS", head, none)
    table, starts = arrays.since_start(rms)
    most = max(1.0, *np.abs(_limits(table)))
    last = int(record.steps[max(1, len(record) // 10) - 1])
    when = f"steps {record.steps[0]}–{last}" if last > record.steps[0] else f"step {last}"
    least, largest = (f"{10**end:.2g}" for end in arrays.span(starts))
    then = f", when it was {least} to {largest}" if np.isfinite(starts).any() else ""
    head = f"RMS of {KINDS[record.kind]}, change of each layer since {when}{then}"
    return Shown(table, (-most, most), "log10 of RMS\nnow : at first", head, none)


def _limits(values: Floats) -> tuple[float, float]:
    """Colour limits of `values`: their 0.5 and 99.5 percentiles, at least 1 apart."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = np.percentile(finite, (0.5, 99.5))
    short = max(0.0, 1.0 - (high - low)) / 2
    return float(low - short), float(high + short)


def _bar(ax: Any, mesh: Any, unit: str, param: bool) -> None:
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.01, aspect=12)
    bar.set_label(unit, fontsize=8)
    if param:
        bar.set_ticks([-5, -4, -3, -2, -1], labels=["≤ −5", "−4", "−3", "−2", "≥ −1"])
    bar.ax.tick_params(labelsize=7)


def _of_how_many(columns: int, rows: int, signed: bool) -> str:
    merged = [f"{columns} records"] * (columns > 1) + [f"{rows} layers"] * (rows > 1)
    largest = "largest change" if signed else "largest"
    return f", each cell the {largest} of {' × '.join(merged)}" if merged else ""


def _checked(findings: Any) -> Sequence[Any]:
    found = list(findings) if isinstance(findings, Iterable) else [findings]
    needed = ("severity", "rule", "layers", "steps")
    if alien := [f for f in found if not all(hasattr(f, name) for name in needed)]:
        raise ArgumentError(
            f"plot_run(findings=…) holds {shown(alien[0])}, which is no finding. "
            f"Give diagnose(run), or some of its findings; [] marks nothing."
        )
    return found


def _mark_findings(axes: Any, panels: list[Record], findings: Sequence[Any]) -> list[str]:
    """Numbered boxes around what the findings name; a line of text for each."""
    lines = []
    labels = {name: text for r in panels for name, text in zip(r.names, r.labels, strict=True)}
    taken: dict[Any, list[tuple[int, int, float]]] = {ax: [] for ax in axes}
    for number, finding in enumerate(list(findings)[:6], 1):
        named = [str(layer) for layer in finding.layers or ()]
        for ax, record in _panels_of(finding, axes, panels):
            at = np.flatnonzero([name in named for name in record.names])
            gap = max(1.0, LEAST_GAP * len(record.names) / _height(record))
            for block in np.split(at, np.flatnonzero(np.diff(at) > gap) + 1)[:MOST_BOXES]:
                corner = _box(ax, record, block[0], block[-1], finding.steps or record.steps)
                _number(ax, record, taken[ax], number, *corner)
        where = listed([labels.get(name, name) for name in named], 90)
        lines.append(f"{number}  {finding.severity}: {finding.rule}{' · ' * bool(named)}{where}")
    return lines + ([f"… and {len(findings) - 6} more"] if len(findings) > 6 else [])


def _panels_of(finding: Any, axes: Any, panels: list[Record]) -> list[tuple[Any, Record]]:
    """The panel a finding belongs to: of those with its layers, the one that its rule is about."""
    named = {str(layer) for layer in finding.layers or ()}
    able = [(ax, r) for ax, r in zip(axes, panels, strict=True) if named & set(r.names)]
    if any(word in str(finding.rule).lower() for word in ("grad", "vanish", "explod")):
        able = [(ax, r) for ax, r in able if r.kind == "gradient"] or able
    if finding.rule == "non_finite":  # the same layer may be finite in the panel above
        able = [(ax, r) for ax, r in able if _is_broken(r, named, finding.steps or r.steps)] or able
    return able[:1]


def _is_broken(record: Record, named: set[str], steps: Any) -> bool:
    """Whether a layer of those `named` has NaN or Inf in `steps` (first and last one)."""
    broken = arrays.nonfinite(record)[[name in named for name in record.names]]
    spanned = (record.steps >= steps[0]) & (record.steps <= steps[-1])
    return bool(broken[:, spanned].any())


def _box(ax: Any, record: Record, top: int, bottom: int, steps: Any) -> tuple[float, float]:
    """A frame around rows and steps; where its number goes: its left end, in the middle."""
    edges = arrays.step_edges(record.steps)
    spanned = steps is not None and len(steps) > 0
    first, last = (steps[0], steps[-1] + 1) if spanned else (edges[0], edges[-1])
    left, right = max(float(first), edges[0]), min(float(last), edges[-1])
    xs = [left, right, right, left, left]
    ys = [top - 0.5, top - 0.5, bottom + 0.5, bottom + 0.5, top - 0.5]
    for colour, width in ((BLACK, 2.4), (WHITE, 1.0)):  # seen on dark and on pale cells
        ax.plot(xs, ys, color=colour, lw=width, clip_on=False, zorder=5)
    return left, (top + bottom) / 2


NUMBER, ACROSS = 15.0, 8.2 * 72
"""Width of a finding's number, and (about) of a panel, in points."""


def _number(
    ax: Any, record: Record, taken: list[tuple[int, int, float]], number: int, x: float, y: float
) -> None:
    """Writes `number` where the box of step `x` and row `y` begins, beside those put before.

    Inside the box, or it would hide a layer's name. `taken`: number, slot along x, and row of each.
    """
    edges = arrays.step_edges(record.steps)
    slot = first = round((x - edges[0]) / (edges[-1] - edges[0]) * ACROSS / NUMBER)
    apart = len(record.names) * NUMBER / 72 / _height(record)
    near = {s: n for n, s, row in taken if abs(row - y) < apart}
    while slot in near:
        if near[slot] == number:
            return  # the box above has this number
        slot += 1
    taken.append((number, slot, y))
    style = {"boxstyle": "circle,pad=0.2", "fc": WHITE, "ec": BLACK, "lw": 0.8}
    shift = {"xytext": (9 + (slot - first) * NUMBER, 0), "textcoords": "offset points"}
    where = {"ha": "center", "va": "center", "fontsize": 7, "zorder": 6, "color": BLACK}
    ax.annotate(f"{number}", (x, y), bbox=style, **shift, **where)
