"""`ShowHealth`: what it prints and shows, what it costs, and that a run is the same with it."""

import copy
import pickle
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import in_ranks
from torch import nn

from hookkit import ActivationStats, ParamStats, ProgressCallback, ShowHealth, watch
from hookkit.errors import HookkitWarning, OptionError
from hookkit.testing import synth_learner
from hookkit.training import live


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """It looks before each step; the steps at which it did."""
    looks: list[int] = []
    begin, look = ShowHealth.before_fit, ShowHealth._diagnose

    def at_once(self: ShowHealth, f: Any, *args: Any) -> None:
        f(self, *args)
        self._next = 0.0 if self._next < float("inf") else self._next

    def noted(self: ShowHealth, last: bool) -> None:
        looks.append(self.learn.n_steps)
        look(self, last)

    monkeypatch.setattr(ShowHealth, "before_fit", lambda self: at_once(self, begin))
    monkeypatch.setattr(
        ShowHealth, "_diagnose", lambda self, last=False: at_once(self, noted, last)
    )
    return looks


def net(dead: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if dead:
        nn.init.constant_(model[0].bias, -60.0)
    return model


def watched(*cbs: Any, n: int = 30, dead: bool = False) -> Any:
    """Each step of two batches."""
    model = net(dead)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, opt, *cbs) as w:
        torch.manual_seed(1)
        for i in range(2 * n):
            loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            if i % 2:
                opt.step()
                opt.zero_grad()
            w.loss(loss)
    return w


def stats() -> list[Any]:
    return [ActivationStats(units=True), ParamStats()]


def test_it_looks_between_batches_and_what_is_recorded_is_the_same(always: list[int]) -> None:
    with_it, without = watched(*stats(), ShowHealth(1e-6), n=5), watched(*stats(), n=5)

    assert always == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    for a, b in zip(with_it.run_record().records, without.run_record().records, strict=True):
        for name, values in a.values.items():
            np.testing.assert_array_equal(values, b.values[name])


@pytest.mark.usefixtures("always")
def test_a_finding_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    w = watched(*stats(), ShowHealth(1e-6), dead=True)

    said = capsys.readouterr().err
    rules = [f.rule for f in w.diagnose() if f.severity != "note"]
    assert "dead" in rules
    assert list(w.show_health.findings) == list(dict.fromkeys(w.show_health.findings))
    for rule in w.show_health.findings:
        assert said.count(f" {rule}:") == 1
    assert said.startswith("step ")
    assert repr(w.show_health).startswith("ShowHealth(every_s=1e-06, ")


def test_at_the_end_it_looks_whatever_the_clock_says(capsys: pytest.CaptureFixture[str]) -> None:
    w = watched(*stats(), ShowHealth(3600), dead=True)

    assert "dead" in w.show_health.findings
    assert "step 30: " in capsys.readouterr().err

    learn = synth_learner(cbs=[ActivationStats, ParamStats, cb := ShowHealth(3600)])
    with learn.no_logging():
        learn.validate()
        assert capsys.readouterr().err == ""
        for _ in range(2):
            learn.fit(1)
            verdict = f"step {learn.n_steps:,}: {learn.diagnose().verdict}"
            assert capsys.readouterr().err.splitlines() == [verdict]
    assert repr(cb) == "ShowHealth(every_s=3600, no findings)"
    if find_spec("tqdm"):  # it lives beside the bar
        learn.fit(1, cbs=ProgressCallback)
        assert "step " in capsys.readouterr().err
    assert copy.deepcopy(cb).every_s == pickle.loads(pickle.dumps(ShowHealth(3600))).every_s == 3600


def test_looks_take_about_2_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], []

    def slow(run: Any) -> Any:
        now[0] += 1.0
        looks.append(now[0])
        return SimpleNamespace(verdict="", __iter__=None)

    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(ShowHealth, "_show", lambda self, run, last: slow(run))

    class Loop:
        fitting = True
        n_steps = property(lambda self: now[0])
        run_record = lambda self: None  # noqa: E731

    cb, loop = ShowHealth(5), Loop()
    cb.learn = loop
    cb.before_fit()
    while now[0] < 1000:
        now[0] += 0.1
        cb.before_batch()

    assert looks[:3] == pytest.approx([6.0, 57.1, 108.2], abs=0.5)
    assert len(looks) <= 20


@pytest.mark.usefixtures("always")
def test_a_notebook_shows_one_output_with_picture_and_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, str]] = []
    made: list[Any] = []

    class Cell:
        def __init__(self) -> None:
            made.append(self)

        def show(self, html: str, text: str) -> None:
            shown.append((html, text))

    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "Output", Cell)
    monkeypatch.setattr(live, "picture", lambda draw, caption: f"<img alt={caption}>")

    w = watched(*stats(), ShowHealth(1e-6), n=3, dead=True)

    assert (len(made), len(shown)) == (1, 7)
    html, text = shown[-1]
    assert html == f"<img alt=The run so far>{w.diagnose()._repr_html_()}"
    assert text == str(w.diagnose())
    assert capsys.readouterr().err == ""


def test_if_a_look_fails_it_warns_once_and_after_an_error_in_the_loop_it_looks_no_more(
    monkeypatch: pytest.MonkeyPatch, always: list[int]
) -> None:
    def fails(run: Any) -> Any:
        raise RuntimeError("no")

    cb = ShowHealth(3600)
    cb.before_fit = lambda: (ShowHealth.before_fit(cb), 1 / 0)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        watched(*stats(), cb)
    assert always == []

    monkeypatch.setattr(live, "diagnose", fails)
    with pytest.warns(HookkitWarning, match=r"ShowHealth shows nothing more: .*no") as caught:
        w = watched(*stats(), ShowHealth(1e-6), n=4)
    assert len(caught) == 1
    assert w.n_steps == 4


@pytest.mark.parametrize("every_s", [0, "5", float("nan")])
def test_the_seconds_between_looks_are_a_number_above_0(every_s: Any) -> None:
    with pytest.raises(OptionError, match=r"how many seconds .*Give a number above 0"):
        ShowHealth(every_s)


def test_show_adds_recorders_where_there_are_none() -> None:
    with watch(net(), show=True) as w:
        names = {type(cb).__name__ for cb in w.cbs}

    assert {"ActivationStats", "ParamStats", "ShowHealth"} <= names


def _shows_on_the_first(rank: int, folder: Path) -> None:
    cb = ShowHealth(3600)
    watched(*stats(), cb, dead=True)
    assert bool(cb.findings) == (rank == 0), rank


@pytest.mark.ranks
@pytest.mark.slow
def test_the_first_rank_shows_its_own_without_the_others(tmp_path: Path) -> None:
    in_ranks(_shows_on_the_first, tmp_path)
