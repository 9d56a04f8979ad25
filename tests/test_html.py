"""HTML for notebooks and pages: one style sheet, tables, terms, and what opens under a line."""

import re

from hookkit._core.html import STYLE, details, fragment, table, terms


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
