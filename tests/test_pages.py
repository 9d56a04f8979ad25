"""The page of a run: whole, valid, self-contained, and honest about what is missing."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import numpy as np
import pytest
import torch

import hookkit
from hookkit.errors import ArgumentError, OptionError
from hookkit.records import Incident, Run
from hookkit.stats import ActivationStats, ParamStats
from hookkit.testing import mlp, synth_learner
from hookkit.watching import watch

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
plt = pytest.importorskip("matplotlib.pyplot")
svg = pytest.importorskip("hookkit.plotting.svg").svg
report = pytest.importorskip("hookkit.pages").report

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Tags must balance; collects ids, attributes and text."""

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
    return report(run, tmp_path / "run.html", **options).read_text()


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookkit.pages.pages.DPI", 20)  # quick: what is on them is not read here


@pytest.fixture(scope="module")
def broken_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = made.exploding(made.run(n=300))
    return html_of(run, tmp_path_factory.mktemp("failing"))


@pytest.mark.slow
def test_the_page_has_every_part_in_order_and_its_tags_balance(broken_page: str) -> None:
    page = Outline(broken_page)

    ids = [attrs["id"] for attrs in page.all("section")]
    assert ids == ["findings", "run", "loss", "layers", "model", "environment"]
    assert [a["href"] for a in page.all("a")] == ["#main", *(f"#{i}" for i in ids)]
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("nav")) == 1
    assert "error 1. " in page.text


def test_every_picture_says_what_it_shows_and_its_size(broken_page: str) -> None:
    pictures = Outline(broken_page).all("svg")

    assert len(pictures) >= 8
    assert all(len(p["aria-label"] or "") > 60 and p["width"] and p["height"] for p in pictures)
    assert "NaN or Inf in 2 rows" in str(pictures[0]["aria-label"])


def test_a_picture_fits_a_narrow_page_and_scrolls_by_itself_when_enlarged(broken_page: str) -> None:
    regions = [a for a in Outline(broken_page).all("div") if a.get("role") == "group"]

    assert len(regions) == len(Outline(broken_page).all("svg"))
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    rules = broken_page.rpartition("</style>")[0].split("}")
    wider = [rule.partition("{")[0] for rule in rules if "svg{max-width:none" in rule]
    assert wider == ["figure .wide:focus svg"]
    assert any("figure svg{max-width:100%;" in rule for rule in rules)


def test_no_two_pictures_share_an_id(broken_page: str) -> None:
    """One that is folded away would take its marks and clips away from the other."""
    ids = [attrs["id"] for _, attrs in Outline(broken_page).tags if "id" in attrs]

    assert len(ids) == len(set(ids)) > 50


def test_equal_images_in_a_picture_share_no_id() -> None:
    figure = plt.figure(figsize=(4, 4), dpi=100)
    for left in (0.0, 0.5):
        figure.add_axes((left, 0, 0.4, 0.4)).imshow(np.eye(4))

    ids = re.findall(r'\bid="([^"]+)"', svg(figure, "two"))

    assert len(ids) == len(set(ids)) > 0


def test_layers_of_a_deep_net_are_on_folded_pages_that_say_which_they_are(tmp_path: Path) -> None:
    record = made.record([(f"{i}", "Linear") for i in range(50)], 3)

    page = Outline(html_of(Run(record), tmp_path))

    assert "step by step, a panel a layer: layers 1 to 24 of 50." in page.text
    assert "Layers 25 to 48 of 50: 24 Linear to 47 Linear" in page.text
    assert "Layers 49 to 50 of 50: 48 Linear to 49 Linear" in page.text


@pytest.mark.slow
def test_the_page_of_148_layers_and_2000_steps_is_below_2_megabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookkit.pages.pages.DPI", 100)
    parts = [("ln_1", "LayerNorm"), ("attn.c_attn", "Linear"), ("attn.c_proj", "Linear")]
    parts += [("ln_2", "LayerNorm"), ("mlp.c_fc", "Linear"), ("mlp.c_proj", "Linear")]
    names = [(f"transformer.h.{i}.{name}", kind) for i in range(24) for name, kind in parts]
    names = [("wte", "Embedding"), ("wpe", "Embedding"), *names, ("ln_f", "LayerNorm")]

    html = html_of(made.run([*names, ("lm_head", "Linear")], 250, every=8, epoch=500), tmp_path)

    assert len(html) < 2_000_000


@pytest.mark.slow
def test_counts_of_values_that_are_not_finite_are_whole_numbers(tmp_path: Path) -> None:
    many = made.with_values(made.record(made.small_names(), 30), "nonfinite", 0, 32768.0)

    assert "<td>32,768</td>" in html_of(Run(replace(many, hist=None)), tmp_path)


def test_nothing_is_loaded_from_elsewhere(broken_page: str) -> None:
    outside = re.compile(r"""(?:src|href|url)\s*[=(]\s*["']?+(?!data:|#)""")
    assert not outside.search(re.sub(r"base64,[^\"]*", "", broken_page))
    assert "<script" not in broken_page
    assert "default-src 'none'" in broken_page


def test_tables_have_captions_and_scopes(broken_page: str) -> None:
    page = Outline(broken_page)

    assert len(page.all("caption")) == len(page.all("table")) == 4
    assert {attrs.get("scope") for attrs in page.all("th")} == {"row", "col"}


@pytest.mark.slow
@pytest.mark.parametrize(("n", "text"), [(1, "1 rule could not"), (2, "2 rules could not")])
def test_rules_that_could_not_judge_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, text: str
) -> None:
    unjudged = tuple((f"rule {i}", "why") for i in range(n))
    found = hookkit.Diagnosis((), 3, 40, unjudged)
    monkeypatch.setattr("hookkit.health.diagnose", lambda run: found)

    assert text in html_of(Run(losses=np.ones(40)), tmp_path)


def test_a_healthy_run_gets_one_line(tmp_path: Path) -> None:
    page = Outline(html_of(Run(losses=2.3 * np.exp(-np.arange(300) / 80)), tmp_path))

    assert "healthy" in page.text
    assert not page.all("article")


def looked_at(tmp_path: Path) -> dict[str, Any]:
    """A run, and the two drivers that record one."""
    learn = synth_learner(n_trn=12, cbs=[ActivationStats(), ParamStats()])
    with learn.no_logging():
        learn.fit(1)
    model, x = mlp(2, 4, 1), torch.randn(8, 2)
    with watch(model, opt := torch.optim.SGD(model.parameters()), ActivationStats()) as w:
        for _ in range(12):
            w.loss(loss := model(x).pow(2).mean())
            opt.zero_grad(), loss.backward(), opt.step()
    return {"run": made.exploding(made.run(n=40)), "learn": learn, "w": w}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["run", "learn", "w"])
def test_a_run_is_diagnosed_drawn_and_reported_by_itself(who: str, tmp_path: Path) -> None:
    source = looked_at(tmp_path)[who]

    with plotting.offscreen():
        figure = source.plot(findings=[])

    assert str(source.diagnose()) == str(hookkit.diagnose(source))
    assert figure.axes
    path = source.report(tmp_path / "run.html", title="Mine")
    assert "<h1>Mine</h1>" in path.read_text()


def test_report_is_a_function_of_the_package(tmp_path: Path) -> None:
    page = hookkit.report(Run(losses=np.ones(20)), tmp_path / "run.html")

    assert page == tmp_path / "run.html"
    assert "<h1>" in page.read_text()


def test_missing_parts_are_named_with_their_recorder(tmp_path: Path) -> None:
    text = Outline(html_of(Run(), tmp_path)).text

    assert "Not recorded: activations (ActivationStats()), gradients (GradientStats())" in text
    assert "No loss was recorded." in text
    assert "No layer was recorded: train with ActivationStats()." in text
    assert "No summary was given: report(…, summary=summary(model, x))." in text


def test_without_histograms_the_page_says_how_to_have_them(tmp_path: Path) -> None:
    text = Outline(html_of(Run(made.record(made.small_names(), 3, hist=False)), tmp_path)).text

    assert "No histograms of activations were recorded: use with_hist=True" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_layers", "broken", "n_pictures"), [(1, slice(None), 11), (64, slice(12, None), 15)]
)
def test_the_page_of_a_net_that_diverged_has_every_picture(
    n_layers: int, broken: slice, n_pictures: int, tmp_path: Path
) -> None:
    run = made.run([(f"{i}", "Linear") for i in range(n_layers)], n=24)
    for kind in ("activations", "gradients"):
        record = getattr(run, kind)
        values = {k: v.copy() for k, v in record.values.items()}
        for name, table in values.items():
            table[:, broken] = 64 if name == "nonfinite" else np.nan
        record.hist[:, :, broken] = 0
        run = replace(run, **{kind: replace(record, values=values)})

    html = html_of(run, tmp_path)

    assert "Could not be drawn" not in html
    assert "No picture" not in html
    assert html.count("<svg") == n_pictures


def test_without_a_picture_that_fails_there_is_still_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(plotting, "plot_stats", fails)

    assert "Could not be drawn: ZeroDivisionError: oh" in html_of(
        Run(made.record(made.small_names(), 3)), tmp_path
    )


def test_without_matplotlib_the_page_has_all_but_the_pictures_and_names_the_extra(
    broken_page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if re.match(r"hookkit\.(plotting|pages)\b", n)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(hookkit, "plotting")
    monkeypatch.setattr(hookkit, "report", None)  # to be restored at the end
    for name in ["matplotlib", *(n for n in sys.modules if n.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)

    pages = import_module("hookkit.pages.pages")
    html = pages.report(made.exploding(made.run(n=300)), tmp_path / "bare.html").read_text()

    bare, whole = Outline(html), Outline(broken_page)
    why = 'No picture: hookkit needs matplotlib to draw: pip install "hookkit[plot]"'
    assert bare.all("svg") == []
    assert bare.text.count(why) == len(whole.all("svg"))
    assert all((p["aria-label"] or "") in bare.text for p in whole.all("svg"))
    for tag in ("section", "table", "article"):
        assert bare.all(tag) == whole.all(tag)


def test_names_and_facts_are_escaped_and_paths_are_not_shown(tmp_path: Path) -> None:
    run = Run(made.record([("<b>fc", "Linear"), ("act", "ReLU")], 3, hist=False))
    info = {"model": "<Net>", "data_from": "/home/somebody/data", "lr": [0.1, 0.01]}

    html = html_of(replace(run, info=info), tmp_path)

    assert "<b>fc" not in html
    assert "Training of &lt;Net&gt;" in html
    assert "somebody" not in html
    assert "0.1, 0.01" in html


def test_the_summary_is_shown_as_html_or_as_text(tmp_path: Path) -> None:
    rich = SimpleNamespace(_repr_html_=lambda: "<p id='mine'>table</p>")

    assert "<p id='mine'>table</p>" in html_of(Run(), tmp_path, summary=rich)
    assert '<pre tabindex="0">a &lt; b</pre>' in html_of(Run(), tmp_path, summary="a < b")


def test_incidents_of_the_flight_recorder_are_listed(tmp_path: Path) -> None:
    run = replace(Run(), incidents=(Incident("activation", "act", "ReLU", 41),))

    assert "step 41 (epoch 0): first non-finite activation of act (ReLU)" in html_of(run, tmp_path)


def test_a_record_of_few_statistics_has_a_page(tmp_path: Path) -> None:
    record = made.run(n=20).activations
    assert record is not None
    few = replace(record, values={"mean": record.value("mean")}, hist=None)

    text = report(few, tmp_path / "run.html").read_text()

    assert "statistic &quot;rms&quot; was not recorded; &quot;mean&quot;" in text


@pytest.mark.parametrize(("options", "what"), [({"path": 3}, "path"), ({"title": 3}, "title")])
def test_a_path_or_title_that_is_no_text_is_refused(options: Any, what: str) -> None:
    with pytest.raises(ArgumentError, match=rf"report\({what}=3\): expected text, found an int"):
        report(made.run(n=20), **options)


def test_a_validation_loss_that_is_nan_is_no_missing_one(tmp_path: Path) -> None:
    rows = ({"epoch": 0, "valid_loss": np.nan}, {"epoch": 1, "valid_loss": None})

    html = html_of(Run(losses=np.ones(3), valid=rows), tmp_path)

    assert "<td>NaN</td>" in html
    assert "<td>–</td>" in html


@pytest.mark.slow
def test_the_table_of_many_layers_is_folded(tmp_path: Path) -> None:
    run = Run(made.record(made.transformer_names(), 3, hist=False))

    assert "<summary>Activations: the numbers of 292 rows</summary>" in html_of(run, tmp_path)


def test_an_earlier_report_is_replaced_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "run.html"

    report(Run(), path, title="first")
    report(Run(), path, title="second")

    assert "<h1>second</h1>" in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["run.html"]


def test_a_file_that_is_no_report_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    path.write_text("my page")

    with pytest.raises(
        OptionError, match="is no report written by hookkit, so it is not overwritten"
    ):
        report(Run(), path)
    assert path.read_text() == "my page"


def test_a_folder_is_refused_with_a_name_to_use(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"is a folder\. Name a file in it"):
        report(Run(), tmp_path)


def test_a_failure_while_writing_leaves_the_earlier_page_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = report(Run(), tmp_path / "run.html", title="first")

    def full(*_: Any) -> Any:
        raise OSError(28, "disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        report(Run(), path, title="second")

    assert "<h1>first</h1>" in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]


def test_without_a_path_it_is_report_html_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert report(Run()).resolve() == (tmp_path / "report.html").resolve()
