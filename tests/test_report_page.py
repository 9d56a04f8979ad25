"""The page of a run: whole, valid, self-contained, and honest about what is missing."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest

import hookkit
from hookkit.diagnosis import report_page
from hookkit.errors import OptionError
from hookkit.records import Incident, Run
from hookkit.testing import synth_learner

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Tags must balance; collects attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def html_of(run: Any, tmp_path: Path, **options: Any) -> str:
    return hookkit.report(run, tmp_path / "run.html", **options).read_text()


REAL = report_page.picture


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and most tests are about what is beside them."""
    monkeypatch.setattr(report_page, "picture", lambda draw, caption: f"<p>{caption}</p>")


@pytest.mark.slow
def test_the_page_has_every_part_in_order_and_its_tags_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_page, "picture", REAL)

    html = html_of(made.exploding(made.run(n=20)), tmp_path)

    page = Outline(html)
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads == [
        *("Findings", "The whole run", "Loss and metrics", "Layers", "Model", "Environment")
    ]
    captions = [str(image["alt"]) for image in page.all("img")]
    assert captions[:2] == ["Layers by steps", "Loss by step"]
    assert len(captions) == 11
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in page.all("img"))
    assert "non_finite" in page.text
    assert "Training of Net" in page.text
    assert not re.findall(r"<script|<link|https?://|url\(", html)  # nothing is loaded
    assert "width=device-width" in html  # a phone scales it


def test_missing_parts_are_named_with_their_recorder_and_incidents_are_listed(
    tmp_path: Path,
) -> None:
    run = Run(losses=np.ones(9), incidents=(Incident("activation", "fc1", "Linear", 7),))

    text = Outline(html_of(run, tmp_path)).text

    assert "activations (ActivationStats())" in text
    assert "params (ParamStats())" in text
    assert "No summary was given" in text
    assert "step 7 (epoch 0): first non-finite activation of fc1 (Linear)" in text
    bare = html_of(made.run(n=9, hist=False), tmp_path)
    assert "No histograms of gradients were recorded: use with_hist=True" in bare


def test_tables_have_the_last_value_that_was_seen(tmp_path: Path) -> None:
    run = made.run(n=20, epoch=10)
    r = made.with_values(run.activations, "rms", (1, slice(5, None)), np.nan)
    r = made.with_values(r, "rms", (1, 4), 0.12345)
    r = made.with_values(r, "rms", 2, np.nan)

    html = html_of(replace(run, activations=r), tmp_path)

    assert re.search(r">act ReLU</th>(<td>[^<]*</td>){2}<td>0.1235</td>", html)
    assert re.search(r">fc2 Linear</th>(<td>[^<]*</td>){2}<td>–</td>", html)
    assert "<caption>Each epoch</caption>" in html


def test_a_picture_that_fails_is_replaced_by_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plotting: Any) -> Any:
        raise ValueError("no <ink>")

    assert REAL(fails, "Loss") == "<p>Loss: no picture. ValueError: no &lt;ink&gt;</p>"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [n for n in sys.modules if n.startswith("hookkit.plotting")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(hookkit, "plotting", raising=False)
    assert "hookkit[plot]" in REAL(lambda p: p.plot_loss(made.run(n=5)), "Loss")


def test_names_and_facts_are_escaped_and_paths_are_not_shown(tmp_path: Path) -> None:
    info = {"model": "<Net>", "data": "/home/me/data", "seed": 0.5, "who": "me@host", "x": [1]}
    run = replace(made.run([("<b>", "Linear")], n=5), info=info)

    html = html_of(run, tmp_path, title="a <title>", summary="3 < 4 layers")

    Outline(html)
    assert "a &lt;title&gt;" in html
    assert "&lt;b&gt; Linear" in html
    assert "<dt>seed</dt><dd>0.5</dd>" in html
    assert "<pre>3 &lt; 4 layers</pre>" in html
    assert "home" not in html
    assert "me@host" not in html


def test_a_run_reports_itself_by_default_into_report_html_and_an_earlier_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert made.run(n=5).report() == Path("report.html")
    hookkit.report(made.run(n=5), title="second")
    assert "<h1>second</h1>" in Path("report.html").read_text()
    page = hookkit.report(synth_learner(), "new/folder/b.html").read_text()
    assert "No summary was given" not in page  # a Learner brings its own


@pytest.mark.parametrize("name", ["mine.html", "folder"])
def test_nothing_else_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine.html").write_text("<html>mine</html>")

    with pytest.raises(OptionError, match=r"no report of hookkit's.* Give another name"):
        hookkit.report(made.run(n=5), tmp_path / name)

    assert (tmp_path / "mine.html").read_text() == "<html>mine</html>"
