"""Pictures inside a page: in the page's colours, small, with text that is text."""

import re
from base64 import b64decode
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import made
import numpy as np
import pytest

from hookkit.errors import ArgumentError

mpl = pytest.importorskip("matplotlib")
plt = pytest.importorskip("matplotlib.pyplot")
plotting = pytest.importorskip("hookkit.plotting")
svg = pytest.importorskip("hookkit.plotting.svg").svg
Image = pytest.importorskip("PIL.Image")


def drawn(name: str = "plot_run", run: Any = None, dpi: int = 30, **options: Any) -> str:
    with plotting.offscreen():
        return svg(getattr(plotting, name)(run or made.run(n=40), **options), name, dpi)


def images(element: str) -> list[Any]:
    found = re.findall(r"base64,([^\"]*)", element)
    return [Image.open(BytesIO(b64decode(each))) for each in found]


@pytest.mark.parametrize("name", ["plot_run", "plot_loss", "plot_stats", "plot_updates"])
def test_what_has_the_colour_of_text_has_that_of_the_page(name: str) -> None:
    element = drawn(name)

    assert not re.search(r"(fill|stroke): #(000000|767676)", element)
    assert "stroke: currentColor" in element
    assert 'fill="currentColor"' in element
    assert "<style" not in element  # it would be one of the whole page


def test_in_a_dark_style_text_has_the_colour_of_the_page_too() -> None:
    with plt.style.context("dark_background"):
        element = drawn("plot_loss")

    assert not re.search(r"(fill|stroke): #ffffff", element)


def test_numbers_of_findings_stay_black_on_white() -> None:
    finding = SimpleNamespace(rule="dead", severity="error", layers=("act",), steps=(10, 19))

    element = drawn(findings=[finding])

    assert "fill: #fefefe; stroke: #010101" in element
    assert re.search(r"fill: #010101[^>]*>1</text>", element)


def test_text_is_text_and_keeps_its_digits() -> None:
    run = made.run([("a_layer_of_0.123456", "Linear"), ("<b>&", "ReLU")], n=40)

    words = "".join(ElementTree.fromstring(drawn(run=run)).itertext())

    assert "a_layer_of_0.123456 Linear" in words
    assert "<b>& ReLU" in words
    assert "optimizer step" in words


@pytest.mark.parametrize(("layers", "n_images"), [(3, 0), (40, 3)])
def test_few_lines_are_paths_and_many_are_pixels(layers: int, n_images: int) -> None:
    record = made.record([(f"{i}", "Linear") for i in range(layers)], 40)

    with plotting.offscreen():
        element = svg(plotting.plot_stats(record), "stats", 30)

    assert len(images(element)) == n_images  # of two panels and of the key


def test_many_markers_are_pixels_too() -> None:
    run = made.run([(f"{i}", "Linear") for i in range(148)], n=100)

    assert len(images(drawn("plot_depth", run))) == 2


def test_a_large_image_has_a_palette_and_a_small_one_all_its_colours() -> None:
    modes = {image.size[0] * image.size[1] > 50_000: image.mode for image in images(drawn(dpi=100))}

    assert modes == {True: "P", False: "RGBA"}


def test_a_gradient_in_a_heat_map_has_no_steps_of_its_own() -> None:
    record = made.record(made.small_names(), 400)
    slope = np.logspace(-3, 0, 400)[None].repeat(len(record.names), axis=0)
    run = made.with_values(record, "rms", slice(None), slope)

    image = max(images(drawn(run=run, dpi=100)), key=lambda i: i.width)
    pixels = np.asarray(image.convert("RGBA"), int)[image.height // 8, :, :3]

    assert len(np.unique(pixels, axis=0)) > 60
    assert np.abs(np.diff(pixels, axis=0)).max(axis=1)[2:-2].max() <= 16


def test_its_size_is_that_of_the_figure_at_100_dots_to_an_inch() -> None:
    root = ElementTree.fromstring(drawn("plot_loss", dpi=200))

    assert (root.get("width"), root.get("height")) == ("1000", "500")
    assert root.get("viewBox") == "0 0 720 360"
    assert (root.get("role"), root.get("aria-label")) == ("img", "plot_loss")


def test_settings_of_matplotlib_are_as_before() -> None:
    before = dict(mpl.rcParams)

    drawn("plot_loss")

    assert dict(mpl.rcParams) == before


def test_the_same_picture_is_the_same_text() -> None:
    assert drawn() == drawn()


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected a picture, found int"):
        svg(3, "three")
