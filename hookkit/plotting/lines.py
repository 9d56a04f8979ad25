"""Draw lines: one per layer, over steps or over depth; the loss; the suggestions of `lr_find`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit._core.checks import check_number
from hookkit.diagnosis.view import nan_from
from hookkit.plotting import figures
from hookkit.plotting.figures import BLUE, FAINT, ORANGE, new_axes, new_figure
from hookkit.records import Floats, Record, as_record, as_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_stats(record: Any, *, fig: Any = None) -> Figure:
    """Draw means and standard deviations of all layers over steps, coloured by depth.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.
    """
    record = as_record(record, "activation", "gradient")
    fig = new_figure(fig, 10, 4)
    left, right = fig.subplots(1, 2, sharex=True)
    mean, std = record.value("mean"), record.value("std")
    _lines(left, record, mean, f"Mean of {record.kind}s", key=False)
    figures.fit_scale(left, mean)
    right.set_yscale("log")
    std = np.where(std > 0, std, np.nan)  # a log axis has no 0
    _lines(right, record, std, f"Standard deviation of {record.kind}s")
    return fig


def plot_updates(record: Any, *, ax: Any = None) -> Axes:
    """Draw log10 of the update:weight ratio of every matrix over steps; −3 is healthy.

    Vectors (biases, norms) are not drawn: their updates say little about the learning rate. A
    matrix that was initialised with zeros has a high ratio at first, at any learning rate.
    Source: Karpathy's makemore, part 3; cs231n, "ratio of weights:updates".

    Args:
        record: a Run, a Record of parameters, a recorder, a Watcher or a Learner.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.
    """
    record, ax = as_record(record, "param"), new_axes(ax, 10, 4.5)
    ratio = figures.log10(record.value("update_ratio"))
    head = "Update : weight of matrices; dashed: −3, a healthy pace"
    _lines(ax, record, ratio, head, figures.matrices(record), ylabel="log10 |Δw| / |w|")
    ax.axhline(-3, color=FAINT, ls="--")
    return ax


def plot_dead(record: Any, *, ax: Any = None) -> Axes:
    """Draw the percentage of dead units of each layer over steps.

    A unit of a ReLU, or of a layer that only a ReLU reads, is dead if it was never above 0 in the
    last `window` records of `ActivationStats` (at first, in half a window). There is one point for
    each half window, unless it ends with NaN or Inf.

    If units were not recorded, draw the percentage of values near zero; the title says so.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        ax: where to draw; a new figure by default.

    Returns:
        The Axes.
    """
    record, ax = as_record(record, "activation", "gradient"), new_axes(ax, 10, 4.5)
    dead, eps = record.values.get("dead"), record.meta.get("eps", 0)
    if dead is None or not np.isfinite(dead).any():
        head = f"Values near zero (|x| ≤ {eps:g})"
        _lines(ax, record, 100 * record.value("near_zero"), head, ylabel="% of values")
    else:
        window = int(record.meta.get("window", 1))
        # Within a half window the share of dead units falls, because more records are counted. So
        # only the value at its end is drawn. `spans`, since a column may merge several records.
        halves = (np.cumsum(record.spans) - 1) // max(window // 2, 1)
        ends = np.append(np.diff(halves) > 0, True)
        dead = np.where(ends & ~figures.nonfinite(record), 100 * dead, np.nan)
        head = f"Units that are dead over the last {window} records"
        _lines(ax, record, dead, head, ylabel="% of units", style="o-")
    ax.set_ylim(-2, 102)
    return ax


def plot_layer_stats(record: Any, layer: int | str, *, fig: Any = None) -> Figure:
    """Draw mean, standard deviation and fraction near zero of one layer over steps.

    Like fastai's `ActivationStats.plot_layer_stats` (2.8), but over optimizer steps, and with `|x|`
    for near zero.

    Args:
        record: a Run, a Record, a recorder, a Watcher or a Learner.
        layer: name or index.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.

    Raises:
        SelectionError: there is no such layer.
    """
    record = as_record(record, "activation", "gradient")
    row = record.layer(layer)
    fig = new_figure(fig, 10, 3)
    heads = {"mean": "Mean", "std": "Standard deviation", "near_zero": "Share near zero"}
    for ax, (statistic, head) in zip(fig.subplots(1, 3), heads.items(), strict=True):
        values = record.value(statistic)
        _lines(ax, record, values, head, [row], key=False, style="-")
        figures.fit_scale(ax, values[row])
    fig.suptitle(f"{figures.label(record, row, 80)}: {record.kind}s", fontsize=10)
    return fig


def plot_depth(run: Any, steps: Sequence[int] | None = None, *, fig: Any = None) -> Figure:
    """Draw the RMS of each layer in the order of layers: of outputs, and of their gradients.

    A level line is healthy; a slope means that the signal vanishes or explodes. More than 30 layers
    are drawn as points without lines. A layer without a point did not run, or its values were all
    zero, or had NaN or Inf.

    Args:
        run: a Run, a Record, a recorder, a Watcher or a Learner.
        steps: optimizer steps to draw (the nearest records); default 0, 1, 10, 100, … and the last.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure.

    Raises:
        OptionError: `steps` has one that was not recorded.
    """
    run = as_run(run)
    panels = {"Forward": run.activations, "Backward": run.gradients}
    columns: dict[str, list[int]] = {}  # checked first, so that a wrong step leaves no empty figure
    for head, record in panels.items():
        if record and record.names:
            first, last = int(record.steps[0]), int(record.steps[-1])
            usual = [first, *(10**k for k in range(12) if first < 10**k < 0.7 * last), last]
            columns[head] = figures.columns_of("plot_depth", record, steps or usual)
    fig = new_figure(fig, 10, 4.6)
    for ax, (head, record) in zip(fig.subplots(1, 2), panels.items(), strict=True):
        if record is None or head not in columns:
            figures.nothing(ax, f"{head}: nothing was recorded")
            continue
        figures.title(ax, f"{head}: RMS of {record.kind}s")
        rms, names = record.value("rms"), range(len(record.names))
        rms = np.where((rms > 0) & ~figures.nonfinite(record), rms, np.nan)
        ax.set_yscale("log")
        line = "o-" if len(names) <= 30 else "o"
        for j, colour in zip(columns[head], figures.colours(len(columns[head])), strict=True):
            fine = np.flatnonzero(np.isfinite(rms[:, j]))  # the line skips layers without a value
            label = f"{record.steps[j]}"
            ax.plot(fine, rms[fine, j], line, color=colour, ms=3, lw=1.4, label=label)
        figures.name_layers(ax.xaxis, record, names, 24, rotation=90)
        ax.set_xlim(-0.5, len(names) - 0.5)
        place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        ax.legend(title="step", title_fontsize=7, fontsize=7, frameon=False, **place)
    return fig


def plot_loss(
    run: Any, skip_start: int = 0, with_valid: bool = True, *, ax: Any = None, fig: Any = None
) -> Any:
    """Draw training and validation loss over steps, and below it the global gradient norm.

    Each value is grey; a running median over about a fortieth of the run, which spikes do not move,
    is blue. A vermilion bar marks NaN and Inf. If the step of a validation is not known, it is
    drawn as if epochs were equally long.

    Args:
        run: a Run, a Record, a recorder, a Watcher or a Learner.
        skip_start: how many steps to leave out at the beginning.
        with_valid: whether to draw the validation loss.
        ax: where to draw the loss without the gradient norm.
        fig: an empty Figure or SubFigure.

    Returns:
        The Figure, or `ax`.

    Raises:
        OptionError: `skip_start` is negative, or not smaller than the number of losses.
    """
    run = as_run(run)
    losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, dtype=np.float64)
    most, what = len(losses) - 1 if len(losses) else np.inf, "the number of steps to leave out"
    check_number("plot_loss", "skip_start", skip_start, 0, most, whole=True, what=what)
    valid, each = [], run.n_steps / max(len(run.valid), 1) or 1
    for i, row in enumerate(run.valid if with_valid else ()):
        if isinstance(value := row.get("valid_loss"), (int, float, np.number)):
            valid.append((row.get("step", (i + 1) * each - 1), float(value)))
    if ax is not None:
        panels = [(ax, losses, "training loss")]
    else:
        norms = run.grad_norms
        fig = new_figure(fig, 10, 3.6 if norms is None else 5)
        heights = [2] if norms is None else [2, 1]
        axes = fig.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        panels = [*zip(axes, (losses, norms), ("training loss", "gradient norm"), strict=False)]
    for one, values, name in panels:
        _loss_panel(one, values, name, skip_start, valid if name == "training loss" else [])
        figures.mark_steps(one, run.records[0] if run.records else None)
        one.xaxis.label.set_visible(one is panels[-1][0])
    return fig if ax is None else ax


def _loss_panel(
    ax: Any, values: Floats, name: str, skip: int, valid: Sequence[tuple[float, float]]
) -> None:
    """Draw one panel of `plot_loss`; with fewer than 30 values, there is no running median."""
    figures.title(ax, name.capitalize())
    at = np.flatnonzero(np.isfinite(values) & (np.arange(len(values)) >= skip))
    points = np.array([p for p in valid if p[0] >= skip]).reshape(-1, 2)
    if not len(at) and not len(points):
        figures.nothing(ax, f"no finite {name}" if len(values) else f"no {name} recorded")
        return
    few = len(at) < 30
    ax.plot(at, values[at], color=FAINT, lw=0.7, marker="." if few else "", label=name)
    if not few:
        half = min(len(at) // 80, 500) + 2
        some = np.arange(0, len(at), -(-len(at) // 2000))  # 2000 points are as many as one can see
        reach = np.minimum(some, half)  # centred at the start, too, where the loss falls fast
        pairs = zip(some, reach, strict=True)
        middle = [np.median(values[at[i - k : i + k + 1]]) for i, k in pairs]
        label = f"running median of {2 * half + 1} values"
        ax.plot(at[some], middle, color=BLUE, lw=1.8, label=label)
    if len(points):
        ax.plot(*points.T, "o-", color=ORANGE, ms=4, lw=1, label="validation loss")
    bad = points[~np.isfinite(points[:, 1]), 0]
    if len(bad):
        style = {"color": figures.ALARM, "transform": ax.get_xaxis_transform()}
        ax.plot(bad, np.full(len(bad), 0.97), "x", label="validation: NaN or Inf", **style)
    ratio = 100 if name == "training loss" else 5  # of gradient norms, factors matter
    figures.fit_scale(ax, np.append(values[at], points[:, 1]), ratio)
    broken, lost = np.isinf(values), nan_from(values)
    broken[len(values) if lost is None else lost :] = True
    figures.mark_broken(ax, np.arange(len(values) + 1.0), broken)
    ax.legend(fontsize=8, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def plot_lr_find(
    lrs: Floats, losses: Floats, suggested: dict[str, float], *, ax: Any = None
) -> Axes:
    """Draw the smoothed loss and the named suggestions over the learning rate; return the Axes.

    The last five batches, in which the loss explodes, are left out.
    """
    ax = new_axes(ax, 7, 4)
    figures.title(ax, "Loss, smoothed, as the learning rate grows")
    shown = slice(None, -5) if len(lrs) > 20 else slice(None)
    ax.plot(lrs[shown], losses[shown], color=BLUE, lw=1.8)
    for (name, lr), marker in zip(suggested.items(), "osv^", strict=False):
        at = int(np.argmin(np.abs(lrs - lr)))
        color = FAINT if name != "valley" else ORANGE
        ax.plot(lrs[at], losses[at], marker, color=color, ms=7, label=f"{name}: {lr:.2g}")
    ax.set_xscale("log")
    figures.fit_scale(ax, losses[shown])
    ax.set_xlabel("learning rate", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    return ax


def _lines(
    ax: Any,
    record: Record,
    table: Floats,
    head: str,
    rows: Sequence[int] | None = None,
    *,
    key: bool = True,
    ylabel: str = "",
    style: str | None = None,
) -> None:
    """Draw a line over steps for each of `rows`, through its finite values.

    Without a `style`, lines of a long run are smoothed: the noise of one would hide the others.
    """
    rows = [*range(len(record.names))] if rows is None else [*rows]
    shown = [i for i in rows if np.isfinite(table[i]).any()]
    width = 1 if style else max(1, len(record) // 100)
    without = f"; {len(rows) - len(shown)} of {len(rows)} have no value to show"
    head += without * (len(shown) < len(rows)) + f"; means of {width} records" * (width > 1)
    figures.title(ax, head)
    if not shown:
        figures.nothing(ax, "no finite value" if len(record) else "nothing was recorded")
        return
    style = style or (".-" if len(record) < 30 else "-")
    looks = {"lw": 1.4 if len(shown) <= 30 else 0.8, "ms": 4}
    for i, colour in zip(shown, figures.colours(len(shown)), strict=True):
        seen = np.isfinite(table[i])
        values, name = table[i][seen], figures.label(record, i)
        if width > 1:  # a running mean of `width` values, fewer near both ends
            kernel = np.ones(min(width, len(values)))
            n = np.convolve(np.ones(len(values)), kernel, "same")
            values = np.convolve(values, kernel, "same") / n
        ax.plot(record.steps[seen], values, style, color=colour, label=name, **looks)
    ax.set_ylabel(ylabel, fontsize=9)
    figures.mark_steps(ax, record)
    broken, edges = figures.nonfinite(record)[rows].any(axis=0), figures.step_edges(record.steps)
    figures.mark_broken(ax, edges, broken)
    ax.set_xlim(edges[0], edges[-1])  # all records, even if the first or last have no value
    if key:
        figures.layer_key(ax, record, shown)
