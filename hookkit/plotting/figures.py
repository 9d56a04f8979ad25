"""Make figures, PNG files and colours, and format axes. No global setting is changed.

It is the first file of the folder to be imported, so it raises the error if matplotlib is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hookkit._core.checks import check_number, check_path
from hookkit._core.files import atomic_write
from hookkit._core.messages import missing_extra
from hookkit.errors import ArgumentError, OptionError
from hookkit.records import Floats, Ints, Record

try:
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
except ImportError:
    raise missing_extra("matplotlib", "plot", "draw") from None

# Vermilion, blue and orange are Okabe and Ito's, which colour-blind readers distinguish. FAINT is
# legible on white and on black: a contrast of 4.5 to 1 (WCAG 2.2, 1.4.3).
ALARM, BLUE, ORANGE, FAINT, GREY = "#d55e00", "#0072b2", "#e69f00", "#767676", "#bcbcbc"

FEW = 12
"""Up to this many lines, a legend names each; beyond it, a colour bar names some of them."""

_offscreen: ContextVar[bool] = ContextVar("_offscreen", default=False)


@contextmanager
def offscreen() -> Iterator[None]:
    """Make new figures without pyplot, inside the `with`: for files, and in any thread."""
    token = _offscreen.set(True)
    try:
        yield
    finally:
        _offscreen.reset(token)


def png(picture: Any, dpi: int = 100) -> bytes:
    """Return a Figure or Axes as the bytes of a PNG file; close it if it is pyplot's.

    Args:
        picture: a Figure or an Axes.
        dpi: dots per inch.

    Raises:
        ArgumentError: `picture` is neither.
    """
    figure = picture if isinstance(picture, Figure) else getattr(picture, "figure", None)
    if not isinstance(figure, Figure):
        raise ArgumentError(
            f"expected a picture, found {type(picture).__name__}. "
            f"Give the Figure or the Axes that a plot_… function returned."
        )
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    if hasattr(figure, "number"):  # pyplot keeps a figure alive until it is closed
        _pyplot().close(figure)
    return buffer.getvalue()


def save(picture: Any, path: str | Path, dpi: int = 150) -> Path:
    """Write a picture into a PNG file, make missing parent folders, and return its path.

    Args:
        picture: a Figure or an Axes.
        path: of the file, which ends in `.png`.
        dpi: dots per inch.

    Raises:
        ArgumentError: `picture` is neither.
        OptionError: the name does not end in `.png`.
    """
    path = check_path("save", path)
    if path.suffix.lower() != ".png":
        raise OptionError(
            f'save(path="{path.name}") writes PNG files only. Name it '
            f'"{path.stem}.png", or call the Figure\'s own savefig(…) for a format that it has.'
        )
    drawn = png(picture, dpi)
    with atomic_write(path) as file:
        file.write(drawn)
    return path


def new_figure(fig: Any, width: float, height: float) -> Any:
    """Return `fig`, or a new figure: pyplot's, so that notebooks show it, unless `offscreen()`.

    An empty Figure without a layout gets one, because names would be cut off at its edge.
    """
    if fig is None:
        make = Figure if _offscreen.get() else _pyplot().figure
        fig = make(figsize=(width, height), layout="constrained")
    if isinstance(fig, Figure):
        if not fig.axes and fig.get_layout_engine() is None:
            fig.set_layout_engine("constrained")
        fig._ipython_display_ = partial(_leave_pyplot, fig)  # type: ignore[attr-defined]
    return fig


def new_axes(ax: Any, width: float = 10, height: float = 4) -> Any:
    """Return `ax`, or the only Axes of a new figure."""
    return new_figure(None, width, height).subplots() if ax is None else ax


def _pyplot() -> Any:
    """Return matplotlib.pyplot. Importing it chooses a backend, so it is imported late."""
    import matplotlib.pyplot

    return matplotlib.pyplot


def _leave_pyplot(figure: Any) -> None:
    """Close `figure` in pyplot before IPython shows it, so that a notebook shows it once.

    Otherwise the inline backend shows it again at the end of the cell. NotImplementedError makes
    IPython show the figure in the formats that the user has chosen.
    """
    if "inline" in _pyplot().get_backend():  # windows of other backends stay open
        _pyplot().close(figure)
    raise NotImplementedError


# --- axes


def title(ax: Any, text: str) -> None:
    """Give `ax` a small title at the left, a faint grid, and no box."""
    ax.set_title(text, fontsize=10, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8, which="both")


def nothing(ax: Any, why: str = "nothing was recorded") -> Any:
    """Write on `ax` why it is empty, and hide its axes; return it."""
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", fontsize=9, color=FAINT)
    ax.set_axis_off()
    return ax


def label(record: Record, row: int, width: int = 32) -> str:
    """Return a layer's name and type in one line, of which at most the last `width` characters.

    Dollar signs are escaped, because matplotlib reads text between two of them as a formula.
    """
    text = " ".join(record.labels[row].split())
    text = text if len(text) <= width else f"…{text[1 - width :]}"
    return text.replace("$", r"\$")


def name_layers(axis: Any, record: Record, rows: Sequence[int], most: int, **style: Any) -> None:
    """Label every n-th tick with the name of its row, so that at most `most` are labelled."""
    ticks = range(0, len(rows), -(-len(rows) // most) or 1)
    axis.set_ticks([*ticks], [label(record, rows[i]) for i in ticks], fontsize=7, **style)


def colours(n: int) -> Any:
    """Return `n` colours, dark for the first layer to light for the last, visible on white."""
    return mpl.colormaps["viridis"](np.linspace(0.1, 0.9, n))


def layer_key(ax: Any, record: Record, rows: Sequence[int]) -> None:
    """Show beside `ax` which line is which layer: a legend for a few, a colour bar for many."""
    if len(rows) <= FEW:
        ax.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        return
    scale = ScalarMappable(mpl.colors.Normalize(0, len(rows) - 1), ListedColormap(colours(256)))
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.01, aspect=25)
    bar.ax.invert_yaxis()
    name_layers(bar.ax.yaxis, record, rows, 16)


def step_edges(steps: Ints) -> Floats:
    """Return (n + 1,) edges of the cells of `steps`; a cell ends where the next one begins."""
    width = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    return np.append(steps.astype(np.float64), steps[-1] + width)


def mark_steps(ax: Any, record: Record | None) -> None:
    """Label x as optimizer steps, and mark where epochs begin."""
    ax.set_xlabel("optimizer step", fontsize=9)
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if record is None or not len(record):
        return
    again = np.diff(record.iters) < 0  # a new fit counts batches and epochs from 0 again
    starts = record.steps[1:][(np.diff(record.epochs) != 0) | again]
    for step in starts[:: -(-len(starts) // 12) or 1]:
        ax.axvline(step, color=FAINT, lw=0.7, ls=":")


def mark_broken(ax: Any, edges: Floats, broken: Any) -> None:
    """Draw a vermilion bar at the top over each `broken` cell; (n + 1,) `edges`, (n,) bool."""
    if broken.any():
        style = {"step": "post", "transform": ax.get_xaxis_transform(), "color": ALARM, "lw": 0}
        ax.fill_between(edges, 0.96, 1, where=np.append(broken, broken[-1]), **style)
        ax.text(1, 0.94, "NaN or Inf", transform=ax.transAxes, fontsize=7, va="top", ha="right")


def fit_scale(ax: Any, values: Floats, ratio: float = 100) -> None:
    """Set a log scale if positive `values` span more than `ratio`; symlog if others have outliers.

    An outlier is `ratio` times as large as the 75th percentile of the absolute values.
    """
    values = values[np.isfinite(values)]
    sizes = np.abs(values[values != 0])
    usual = np.percentile(sizes, 75) if len(sizes) else np.inf
    if len(values) and values.max() > ratio * values.min() > 0:
        ax.set_yscale("log")
    elif len(sizes) and sizes.max() > ratio * usual:
        ax.set_yscale("symlog", linthresh=10 ** np.ceil(np.log10(usual)))


# --- arrays to draw


def nonfinite(record: Record) -> Any:
    """Return (n_layers, n) bool: where a NaN or an Inf was counted."""
    none = np.zeros((len(record.names), len(record)))
    return np.asarray(record.values.get("nonfinite", none)) > 0


def log10(values: Floats) -> Floats:
    """Return log10 without warnings: −inf for 0, NaN for NaN and for negatives."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log10(values), dtype=np.float64)


def matrices(record: Record) -> list[int]:
    """Return the rows of parameters with two or more dimensions."""
    ndim = record.meta.get("ndim", [2] * len(record.names))
    return [i for i, n in enumerate(ndim) if n > 1]


def columns_of(who: str, record: Record, steps: Sequence[int]) -> list[int]:
    """Return the columns nearest to `steps`, sorted; raise an OptionError outside the run."""
    first, last = int(record.steps[0]), int(step_edges(record.steps)[-1]) - 1
    what = "an optimizer step that was recorded; the nearest record is taken"
    known = [check_number(who, "step", s, first, last, whole=True, what=what) for s in steps]
    return sorted({int(np.abs(record.steps - step).argmin()) for step in known})
