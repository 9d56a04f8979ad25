"""HTML for notebooks and pages: one style sheet, tables, terms, and what opens under a line."""

import re

import pytest

from hookkit.diagnosis.report_page import LAYOUT
from hookkit.markup import STYLE, details, fragment, table, terms


def test_every_rule_begins_with_the_class_of_our_elements() -> None:
    rules = re.sub(r"<[^>]*>|@media[^{]*\{", "", STYLE)

    selectors = [s for group in re.findall(r"([^{}]+)\{[^}]*\}", rules) for s in group.split(",")]

    assert len(selectors) > 30
    assert [s for s in selectors if not re.match(r"\s*(div)?\.hk\b", s)] == []


def test_the_style_sheet_loads_nothing_and_uses_only_variables_of_its_own() -> None:
    used = set(re.findall(r"var\((--\w+)\)", STYLE))

    assert "url(" not in STYLE
    assert "@import" not in STYLE
    assert used - set(re.findall(r"(--\w+):", STYLE)) == {"--cols", "--d"}  # set on the element


def test_numbers_stand_on_the_right_and_words_on_the_left() -> None:
    rows = [["0", "Conv2d", "0.5", "–"], ["1", "ReLU", "4.09 k", "1,024"]]

    html = table("Layers", ["layer", "type", "mean", "n"], rows)

    assert ".hk .words{text-align:left}" in STYLE
    assert re.findall(r'class="words">(\w+)<', html) == ["type", "Conv2d", "ReLU"]
    assert "<td>–</td>" in html
    assert "<td>1,024</td>" in html
    assert "caption" not in table("", ["layer", "type"], [])


def test_texts_are_escaped_and_html_is_not() -> None:
    assert "&lt;b&gt;" in table("<b>", ["a"], [["<b>"]])
    assert terms([("a&b", "<i>")]) == "<dl><dt>a&amp;b</dt><dd>&lt;i&gt;</dd></dl>"
    assert details("<b>2</b>", "<p>", kind="finding", is_open=True) == (
        '<details class="finding" open><summary><b>2</b></summary><p></details>'
    )
    assert fragment("<p>x</p>") == f'{STYLE}<div class="hk"><p>x</p></div>'


def rgb(colour: str) -> list[float]:
    colour = colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:])
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def mixed(one: str, share: float, other: str) -> list[float]:
    return [share * a + (1 - share) * b for a, b in zip(rgb(one), rgb(other), strict=True)]


def contrast(one: list[float], other: list[float]) -> float:
    """Source: WCAG 2.2, contrast ratio."""

    def luminance(colour: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def grounds_of_pages() -> list[tuple[str, str]]:
    """Text and ground of a page: light and dark."""
    return re.findall(r"--ink:(#\w+);--paper:(#\w+)", LAYOUT.replace("#fff}", "#ffffff}"))


NOTEBOOKS = {
    "Jupyter, dark": ("#dedede", "#111111"),
    "VS Code": ("#3b3b3b", "#ffffff"),
    "Colab, dark": ("#d5d5d5", "#383838"),
}


@pytest.mark.parametrize(("ink", "ground"), [*grounds_of_pages(), *NOTEBOOKS.values()])
def test_all_text_has_a_contrast_of_at_least_4_5_to_1(ink: str, ground: str) -> None:
    assert len(grounds_of_pages()) == 2  # light and dark
    tones = re.findall(r"--(\w+):color-mix\(in srgb,(#\w+) (\d+)%,currentColor\)", STYLE)
    soft = re.search(r"--soft:color-mix\(in srgb,currentColor (\d+)%,transparent\)", STYLE)

    assert {name for name, *_ in tones} == {"error", "warning", "note", "healthy"}
    assert soft is not None
    shown = {name: mixed(colour, int(share) / 100, ink) for name, colour, share in tones}
    shown |= {"ink": rgb(ink), "soft": mixed(ink, int(soft[1]) / 100, ground)}
    assert {k: c for k, v in shown.items() if (c := contrast(v, rgb(ground))) < 4.5} == {}
