"""The one file that imports matplotlib: figures, files, colours. No global setting is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hookkit.errors import missing_extra
from hookkit.plotting.axes import INK

try:
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError:
    raise missing_extra("matplotlib", "plot", "draw") from None

_offscreen: ContextVar[bool] = ContextVar("_offscreen", default=False)


@contextmanager
def offscreen() -> Iterator[None]:
    """Inside, new figures are not pyplot's: for pictures that go to a file, from any thread."""
    token = _offscreen.set(True)
    try:
        yield
    finally:
        _offscreen.reset(token)


def png(picture: Any, dpi: int = 100) -> bytes:
    """A Figure or Axes as the bytes of a PNG file, on white; a figure of pyplot's is closed."""
    figure = picture if isinstance(picture, Figure) else picture.figure
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    if hasattr(figure, "number"):  # pyplot keeps a figure alive until it is closed
        pyplot().close(figure)
    return buffer.getvalue()


def save(picture: Any, path: str | Path, dpi: int = 150) -> Path:
    """Writes a Figure or Axes to `path` as PNG; the path."""
    path = Path(path)
    path.write_bytes(png(picture, dpi))
    return path


def pyplot() -> Any:
    """matplotlib.pyplot, imported late: it chooses a backend."""
    import matplotlib.pyplot

    return matplotlib.pyplot


def new_figure(fig: Any, width: float, height: float, *, constrained: bool = True) -> Any:
    """`fig`, or a new figure: pyplot's, so that notebooks show it, unless `offscreen()`."""
    if fig is not None:
        return fig
    make = Figure if _offscreen.get() else pyplot().figure
    return make(figsize=(width, height), layout="constrained" if constrained else None)


def new_axes(ax: Any, width: float, height: float) -> Any:
    """`ax`, or the only Axes of a new figure."""
    return new_figure(None, width, height).subplots() if ax is None else ax


def colour_map(name: str, **extremes: Any) -> Any:
    """A copy of a named colour map, with colours for `bad`, `under` and `over`.

    Without the ends of those that go to black on both sides: black has a meaning of its own.
    """
    ends = (0.0, 1.0) if name == "viridis" else (0.1, 0.9)
    return ListedColormap(mpl.colormaps[name](np.linspace(*ends, 256))).with_extremes(**extremes)


def depth_colours(n: int) -> list[Any]:
    """`n` colours from the first layer (dark) to the last (light, yet seen on white)."""
    return list(mpl.colormaps["viridis"](np.linspace(0, 0.9, n)))


def depth_scale(n: int) -> Any:
    """What a colour bar needs to show `depth_colours(n)`."""
    return ScalarMappable(Normalize(0, max(1, n - 1)), ListedColormap(depth_colours(256)))


def key(fig: Any, colours: dict[str, str], lines: list[str]) -> None:
    """Below a figure: lines of text at the left, what its special colours mean at the right."""
    words = [Patch(fc="none", ec="none", label=line) for line in lines]
    patches = [Patch(fc=c, ec=INK, lw=0.5, label=meaning) for meaning, c in colours.items()]
    if words:
        text = {"handlelength": 0, "handletextpad": 0, "loc": "outside lower left"}
        fig.legend(handles=words, fontsize=8, frameon=False, **text)
    if patches:
        fig.legend(handles=patches, fontsize=8, frameon=False, loc="outside lower right")
