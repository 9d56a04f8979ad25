"""A picture as SVG inside a page, so that one rendering suits a light page and a dark one.

What is drawn in the colour of text (text, axes, grid, marks) becomes `currentColor`, and grey words
become the page's own grey: they are as legible as the words around the picture, in both themes.
The ground is transparent. Data is colour: it is the same in both.

Two PNG files, one for each theme, would be more than twice as large. One with text in a grey that
suits both would have the least contrast that is allowed on both. Inverted colours would make
another colour map of each.

Text stays text: it is sharp at any size and can be selected and searched. Many lines and meshes are
pixels, in a PNG of at most 256 colours: as paths they would be larger.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from html import escape
from io import BytesIO
from threading import Lock
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import is_color_like, same_color, to_hex
from PIL import Image  # matplotlib needs it too

from hookkit.plotting.figures import FAINT, figure_of

MOST_POINTS = 1000
"""Of the lines of an Axes that are drawn as paths; of more, pixels are fewer bytes."""

NO_MARKER = (None, "None", "none", " ", "")
"""What matplotlib takes for a line without markers."""

SMALL = 50_000
"""Pixels up to which an image keeps all its colours: a colour bar has half of them at most."""

_TEXT = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
"""matplotlib's settings of the colours in which text and axes are drawn."""

_one_at_a_time = Lock()


def svg(picture: Any, alt: str, dpi: int = 130) -> str:
    """A Figure or Axes as an SVG element for a page; the figure cannot be used any more.

    Args:
        alt: describes it to those who do not see it.
        dpi: of what is drawn as pixels; the element itself has 100 to an inch.
    """
    figure = figure_of(picture)
    _clear_and_rasterize(figure)
    buffer = BytesIO()
    # matplotlib has no other way to say it. Two threads would restore each other's settings.
    with _one_at_a_time, mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(buffer, format="svg", dpi=dpi, metadata={"Date": None})
    width, height = (round(100 * inches) for inches in figure.get_size_inches())
    body = _smaller(_in_colours_of_the_page(buffer.getvalue().decode()))
    box = re.search(r'viewBox="[^"]*"', body)
    return (
        f'<svg role="img" aria-label="{escape(alt)}" width="{width}" height="{height}" '
        f'{box[0] if box else ""} fill="currentColor">{body.partition(">")[2]}'
    )


def _clear_and_rasterize(figure: Any) -> None:
    """Takes the ground away, and marks what is to be pixels: meshes, and many coloured lines."""
    figure.patch.set_visible(False)
    for ax in figure.axes:
        ax.patch.set_visible(False)
        known = _text_colours()
        lines = [x for x in ax.lines if not any(same_color(x.get_color(), c) for c in known)]
        many = sum(map(_n_points, lines)) > MOST_POINTS
        for artist in [*ax.collections, *(lines if many else ())]:
            artist.set_rasterized(True)


def _n_points(line: Any) -> int:
    """Of a line; a marker takes as many bytes as eight points of a path."""
    n, every = len(line.get_xdata(orig=False)), line.get_markevery()
    marked = 0 if line.get_marker() in NO_MARKER else n if every is None else len(every)
    return int(n + 7 * marked)


def _text_colours() -> set[str]:
    return {to_hex(mpl.rcParams[name]) for name in _TEXT if is_color_like(mpl.rcParams[name])}


def _in_colours_of_the_page(text: str) -> str:
    """Colours of text are the page's; black, which matplotlib leaves out of text, is inherited."""
    for colour in _text_colours():
        text = re.sub(f"(fill|stroke): {colour}", r"\1: currentColor", text)
    return text.replace(f": {FAINT}", ": var(--soft)")


def _smaller(text: str) -> str:
    """The SVG element without what a page does not need, and its PNG images with a palette."""
    text = text[text.index("<svg") :]
    for what, instead in _SHORTER.items():
        text = re.sub(what, instead, text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    return re.sub(r"data:image/png;base64,([^\"]*)", lambda m: _with_palette(m[1]), text)


_SHORTER = {
    r"(?s)<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>": "",
    r'<g id="[^"]*"': "<g",  # the same ones in each picture of a page
    r' id="image[^"]*"': "",  # the same one for equal colour bars
    r"\bfont: ([\d.]+px)[^;\"]*": r"font-size: \1",  # matplotlib before 3.10
    r"; font-family: [^;\"]*": "",  # the page has one for all
    r' transform="rotate\(-0 [^"]*"': "",
    r"xlink:href": "href",
    r"\s*\n\s*": " ",
    r"> <": "><",
}
"""Regular expressions, and what takes the place of what they match."""


def _with_palette(encoded: str) -> str:
    """A PNG image with the nearest of 256 colours: a third of the bytes, and alike to the eye."""
    image = Image.open(BytesIO(b64decode(encoded))).convert("RGBA")
    if image.width * image.height > SMALL:
        image = _with_its_own(image) or image.quantize(256, method=Image.Quantize.FASTOCTREE)
    out = BytesIO()
    image.save(out, "png", optimize=True)
    return f"data:image/png;base64,{b64encode(out.getvalue()).decode()}"


def _with_its_own(image: Any) -> Any:
    """`image` with the 256 colours that it has most; None if these are not nearly all of it.

    A heat-map has those of its colour map. `quantize` would choose among all there could be, and
    leave a dozen of them in a smooth gradient: steps that are not in the data.
    """
    pixels = np.ascontiguousarray(image).reshape(-1, 4).view(np.uint32).ravel()
    colours, which, n = np.unique(pixels, return_inverse=True, return_counts=True)
    most = np.argsort(-n, kind="stable")[:256]
    if len(colours) > 4096 or n[most].sum() < 0.98 * len(pixels):
        return None
    parts = colours.view(np.uint8).reshape(-1, 4).astype(np.int32)
    apart = np.square(parts[:, None] - parts[most]).sum(axis=-1)
    places = apart.argmin(axis=1).astype(np.uint8)[which]
    found = Image.frombytes("P", image.size, places.tobytes())
    found.putpalette(parts[most, :3].astype(np.uint8).tobytes())
    found.info["transparency"] = parts[most, 3].astype(np.uint8).tobytes()
    return found
