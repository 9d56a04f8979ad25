"""Figures, files, colours and text: what every picture needs. No global setting is changed.

The first file of the folder to be imported, so the one that says how to install matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hookkit.checks import check_path, kind_of, shown
from hookkit.errors import ArgumentError, OptionError, missing_extra
from hookkit.files import atomic_write
from hookkit.interrupts import block

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize, to_rgba
    from matplotlib.figure import Figure, FigureBase
    from matplotlib.patches import Patch
except ImportError:
    raise missing_extra("matplotlib", "plot", "draw") from None

FAINT = "#767676"
"""Grey that is legible on white and on black: a contrast of 4.5 to 1 (WCAG 2.2, 1.4.3)."""
ALARM = "#d55e00"
"""Vermilion of Okabe and Ito's palette, which colour-blind readers distinguish: NaN or Inf only."""
NEVER = "#bcbcbc"
BLACK, WHITE = "#010101", "#fefefe"
"""Of what is black or white on every ground: on a page, the colour of text is that of its theme."""
BLUE = "#0072b2"
ORANGE = "#e69f00"

_offscreen: ContextVar[bool] = ContextVar("_offscreen", default=False)


@block
def offscreen() -> Iterator[None]:
    """Inside, new figures are not pyplot's: for pictures that go to a file, from any thread.

    Returns:
        A context manager.
    """
    token = _offscreen.set(True)
    try:
        yield
    finally:
        _offscreen.reset(token)


def png(picture: Any, dpi: int = 100) -> bytes:
    """A Figure or Axes as the bytes of a PNG file; a figure of pyplot's is closed.

    On the background that it was drawn for, white unless the user's style is a dark one.

    Args:
        picture: a Figure or an Axes.
        dpi: dots per inch.

    Returns:
        The bytes.

    Raises:
        ArgumentError: `picture` is neither.
    """
    figure = figure_of(picture)
    buffer = BytesIO()
    ground = to_rgba(figure.get_facecolor())
    ground = ground if ground[3] else to_rgba("white")  # text on nothing may not be seen
    figure.savefig(buffer, format="png", dpi=dpi, facecolor=ground, metadata={"Software": None})
    if hasattr(figure, "number"):  # pyplot keeps a figure alive until it is closed
        pyplot().close(figure)
    return buffer.getvalue()


def figure_of(picture: Any) -> Any:
    """The Figure that `picture` is, or that it is an Axes of; else an ArgumentError."""
    figure = picture if isinstance(picture, Figure) else getattr(picture, "figure", None)
    if not isinstance(figure, Figure):
        raise ArgumentError(
            f"expected a picture, found {type(picture).__name__}. "
            f"Give the Figure or the Axes that a plot_… function returned."
        )
    return figure


def save(picture: Any, path: str | Path, dpi: int = 150) -> Path:
    """Writes a picture into a PNG file; missing parent folders are made.

    Args:
        picture: a Figure or an Axes.
        path: of the file, which ends in `.png`.
        dpi: dots per inch.

    Returns:
        The path.

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


def pyplot() -> Any:
    """matplotlib.pyplot, imported late: it chooses a backend."""
    import matplotlib.pyplot

    return matplotlib.pyplot


def new_figure(fig: Any, width: float, height: float) -> Any:
    """`fig`, or a new figure: pyplot's, so that notebooks show it, unless `offscreen()`.

    An empty Figure that nothing lays out is given a layout, or names would be cut off at its edge.
    """
    if fig is None:
        make = Figure if _offscreen.get() else pyplot().figure
        fig = make(figsize=(width, height), layout="constrained")
    _checked("fig", fig, FigureBase, "a Figure or SubFigure")
    if isinstance(fig, Figure):
        if not fig.axes and fig.get_layout_engine() is None:
            fig.set_layout_engine("constrained")
        fig._ipython_display_ = partial(_leave_pyplot, fig)  # type: ignore[attr-defined]
    return fig


def _leave_pyplot(figure: Any) -> None:
    """IPython calls this before it shows `figure`: a notebook then shows it once.

    Otherwise the inline backend shows every figure that pyplot has at the end of the cell, too.
    NotImplementedError makes IPython go on and show it in the formats that the user has chosen.
    """
    if "inline" in pyplot().get_backend():  # windows of other backends stay open
        pyplot().close(figure)
    raise NotImplementedError


def new_axes(ax: Any, width: float, height: float) -> Any:
    """`ax`, or the only Axes of a new figure."""
    if ax is not None:
        return _checked("ax", ax, Axes, "an Axes")
    return new_figure(None, width, height).subplots()


def _checked(name: str, given: Any, kind: type, word: str) -> Any:
    if not isinstance(given, kind):
        raise ArgumentError(
            f"{name}={shown(given)}: expected {word} of matplotlib's, found {kind_of(given)}. Give "
            f"one, or none for a new one."
        )
    return given


def ink(ax: Any) -> Any:
    """The colour of text in the user's style: black, or white on a dark background."""
    return ax.xaxis.label.get_color()


def literal(text: str) -> str:
    """`text` on one line, with dollar signs escaped: matplotlib reads formulas between two.

    >>> literal("cost in $ or $US")
    'cost in \\\\$ or \\\\$US'
    """
    return " ".join(text.replace("$", r"\$").splitlines())


def colour_map(name: str, n: int = 64, **extremes: Any) -> Any:
    """`n` colours of a named colour map, with colours for `bad`, `under` and `over`.

    Steps of 64 are not seen; with all 256 a page of pictures would be a third larger.
    Maps other than viridis lose their two ends, which are nearly black: black means zero here.
    """
    ends = (0.0, 1.0) if name == "viridis" else (0.1, 0.9)
    return ListedColormap(mpl.colormaps[name](np.linspace(*ends, n))).with_extremes(**extremes)


def depth_colours(n: int) -> list[Any]:
    """`n` colours from the first layer (dark) to the last (light), all visible on both grounds."""
    return list(mpl.colormaps["viridis"](np.linspace(0.25, 0.9, n)))


def depth_scale(n: int) -> Any:
    """What a colour bar needs to show `depth_colours(n)`."""
    return ScalarMappable(Normalize(0, max(1, n - 1)), ListedColormap(depth_colours(256)))


def key(fig: Any, colours: dict[str, str], lines: list[str]) -> None:
    """What special colours of a figure mean, above it; lines of text, below it.

    Side by side, a long line would lie on the colours.
    """
    words = [Patch(fc="none", ec="none", label=literal(line)) for line in lines]
    edge = mpl.rcParams["text.color"]
    patches = [Patch(fc=c, ec=edge, lw=0.5, label=meaning) for meaning, c in colours.items()]
    if words:
        text = {"handlelength": 0, "handletextpad": 0, "loc": "outside lower left"}
        fig.legend(handles=words, fontsize=8, frameon=False, **text)
    if patches:
        wide = sum(len(meaning) + 8 for meaning in colours) > 130  # more than fit in a row
        row = {"ncols": 2 if wide else len(patches), "loc": "outside upper right"}
        fig.legend(handles=patches, fontsize=8, frameon=False, borderaxespad=0, **row)
