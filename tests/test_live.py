"""`ShowHealth`: what it shows where, what it costs, and that a run is the same with it."""

import copy
import io
import os
import pickle
import re
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import interrupted_everywhere, left_behind
from processes import in_ranks
from torch import nn

from hookkit import (
    ActivationStats,
    GradientStats,
    ParamStats,
    ProgressCallback,
    Run,
    ShowHealth,
    watch,
)
from hookkit.errors import HookkitWarning, OptionError
from hookkit.live import screens, show_health
from hookkit.live.glance import bars, glance
from hookkit.testing import synth_learner

FIND = re.compile("error: dead|warning: dead")


COLUMNS, ROWS = 500, 60


class Tty(io.StringIO):
    """A terminal: what scrolls off its region, and what its rows show in the end."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        self.rows, self.off = [""] * ROWS, list[str]()
        self.y = self.x = 0
        self.bottom, self.saved = ROWS - 1, (0, 0)
        for part in re.findall(
            r"\x1b\[[\d;]*[A-Za-z]|\x1b[78D]|[\r\n]|[^\x1b\r\n]+", self.getvalue()
        ):
            self.obey(part)
        return [row.rstrip() for row in self.off + self.rows if row.rstrip()]

    @property
    def all_scrolls(self) -> bool:
        return self.shown is not None and self.bottom == ROWS - 1

    def obey(self, part: str) -> None:
        numbers = [int(n) for n in re.findall(r"\d+", part)] if part[0] == "\x1b" else []
        match part[0] + part[-1]:
            case "\x1b7":
                self.saved = self.y, self.x
            case "\x1b8":
                self.y, self.x = self.saved
            case "\x1bD":
                self.down()
            case "\x1bA":
                self.y = max(0, self.y - numbers[0])
            case "\x1bH":
                self.y, self.x = numbers[0] - 1, numbers[1] - 1
            case "\x1bK":
                self.rows[self.y] = ""
            case "\x1bJ":
                self.rows[self.y :] = [self.rows[self.y][: self.x]] + [""] * (ROWS - 1 - self.y)
            case "\x1br":
                self.bottom = numbers[1] - 1 if numbers else ROWS - 1
                self.y = self.x = 0
            case "\r\r":
                self.x = 0
            case "\n\n":
                self.x = 0
                self.down()
            case _:
                assert part.isprintable(), part
                for c in part:
                    self.put(c)

    def down(self) -> None:
        if self.y == self.bottom:
            self.off.append(self.rows.pop(0))
            self.rows.insert(self.bottom, "")
        else:
            self.y = min(self.y + 1, ROWS - 1)

    def put(self, c: str) -> None:
        if self.x == COLUMNS:
            self.x = 0
            self.down()
        row = self.rows[self.y]
        self.rows[self.y] = row[: self.x].ljust(self.x) + c + row[self.x + 1 :]
        self.x += 1


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks before each step."""
    monkeypatch.setattr(show_health, "_MOST", 1e12)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """stdout and stderr as one terminal; no fixture, since pytest sets them before the test."""
    made = Tty()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(ROWS))
    return made


def net(dead: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if dead:
        nn.init.constant_(model[0].bias, -60.0)
    return model


def train(w: Any, model: nn.Module, n: int, say: Callable[[int], None] = lambda i: None) -> None:
    """Each step of two batches; the loss is reported after the step."""
    torch.manual_seed(1)
    for i in range(2 * n):
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        if i % 2:
            w.opt.step()
            w.opt.zero_grad()
        w.loss(loss)
        say(i)


def watched(*cbs: Any, n: int = 30, dead: bool = False, **options: Any) -> Any:
    model = net(dead)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, opt, *cbs) as w:
        train(w, model, n, **options)
    return w


def stats(**options: Any) -> list[Any]:
    return [ActivationStats(units=True, **options), GradientStats(**options), ParamStats(**options)]


# --- the run is the same


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{}, {"every": 3}], ids=str)
def test_what_is_recorded_is_the_same_with_it(options: Any) -> None:
    without = watched(*stats(**options))
    looked = watched(*stats(**options), ShowHealth(every_s=1e-9))

    assert looked.run_record() == without.run_record()
    same = zip(looked.model.parameters(), without.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.usefixtures("always")
def test_a_learner_records_the_same_with_it() -> None:
    runs = []
    for more in ([], [ShowHealth(every_s=1e-9)]):
        torch.manual_seed(0)
        learn = synth_learner(cbs=[*stats(every=2), *more])
        with learn.no_logging():
            learn.fit(3)
        runs.append(learn.run_record())

    assert runs[0] == runs[1]


def test_it_looks_between_steps_and_not_within_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show_health, "_MOST", 1e12)
    at: list[tuple[int, int]] = []
    monkeypatch.setattr(
        ShowHealth, "_look", lambda self, *_: at.append((self.learn.n_steps, self.learn.train_iter))
    )

    watched(ActivationStats, ShowHealth(every_s=1e-9), n=3)

    assert at == [(1, 2), (2, 4), (3, 6)]


# --- what it costs


def test_looks_take_2_percent_of_the_time_with_the_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def look(self: Any, *_: Any) -> None:
        looks.append(clock[0])
        clock[0] += 0.3

    monkeypatch.setattr(ShowHealth, "_look", look)

    def step(i: int) -> None:
        clock[0] += 1.0

    watched(ActivationStats, ShowHealth(every_s=5.0), n=200, say=step)

    *regular, last = looks
    assert regular[0] == pytest.approx(5.0, abs=1.0)
    assert len(regular) > 5
    assert np.diff(regular).min() >= 14
    assert 0.3 * len(looks) <= 0.02 * last


def on_a_clock(
    monkeypatch: pytest.MonkeyPatch, costs: dict[str, float], seconds: int
) -> tuple[dict[str, list[float]], float]:
    """When each job was done in a loop of so many seconds in a notebook, and how long it took."""
    clock = [0.0]
    done: dict[str, list[float]] = {job: [] for job in costs}
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        show_health, "screen", lambda: type("", (screens.Lines,), {"draws": True})()
    )
    for job, cost in costs.items():

        def run(self: Any, *_: Any, job: str = job, cost: float = cost) -> None:
            done[job].append(clock[0])
            clock[0] += cost

        monkeypatch.setattr(ShowHealth, job, run)

    def step(i: int) -> None:
        clock[0] += 0.25

    watched(ActivationStats, ShowHealth(every_s=1.0), n=2 * seconds, say=step)
    return done, clock[0]


def test_looks_and_pictures_share_what_it_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"_look": 0.02, "_draw": 0.4}

    done, elapsed = on_a_clock(monkeypatch, costs, 200)

    assert np.diff(done["_look"][:-1]).min() >= 3.0
    assert np.diff(done["_draw"][:-1]).min() >= 26.0
    assert done["_draw"][0] >= 40.0
    assert len(done["_look"]) > 40
    assert len(done["_draw"]) > 4
    assert sum(cost * len(done[job]) for job, cost in costs.items()) <= 0.02 * elapsed


@pytest.mark.parametrize(("seconds", "pictures"), [(10, 0), (30, 1), (41, 2)])
def test_a_short_loop_in_a_notebook_has_no_picture_and_a_longer_one_that_of_its_end(
    seconds: int, pictures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"_look": 0.01, "_draw": 0.3}

    done, elapsed = on_a_clock(monkeypatch, costs, seconds)

    assert len(done["_draw"]) == pictures
    assert done["_look"][-1] >= seconds
    assert sum(cost * len(done[job]) for job, cost in costs.items()) <= 0.02 * elapsed


# --- findings


@pytest.mark.usefixtures("always")
def test_a_finding_is_printed_once_when_two_looks_agree(capsys: Any) -> None:
    w = watched(*stats(), ShowHealth(every_s=1e-9), dead=True, n=40)

    lines = capsys.readouterr().err.splitlines()
    dead = [line for line in lines if FIND.search(line)]
    assert len(dead) == 1
    assert re.fullmatch(
        r"step \d+: (error|warning): dead: .+ \(0 Linear.* · steps \d+–\d+\)\.", dead[0]
    )
    assert 10 < int(dead[0].split()[1][:-1]) < 40
    assert not [line for line in lines if ": note:" in line]
    assert w.show_health.findings["dead"].severity in dead[0]


def test_what_one_look_alone_has_seen_is_not_clear() -> None:
    show = ShowHealth()
    dead = watched(*stats(), dead=True, n=20).diagnose()
    healthy = watched(*stats(), n=20).diagnose()

    seen = [[f.rule for f in show._judge(d, last=False)] for d in (dead, healthy, dead, dead, dead)]

    assert seen[:3] == [[], [], []]
    assert "dead" in seen[3]
    assert seen[4] == []


def test_at_the_end_what_is_found_is_clear(capsys: Any) -> None:
    watched(*stats(), ShowHealth(every_s=1e9), dead=True, n=20)

    assert len(FIND.findall(capsys.readouterr().err)) == 1


def test_a_healthy_run_prints_nothing_where_it_is_not_shown(capsys: Any) -> None:
    watched(*stats(), ShowHealth(every_s=1e-9), n=20)

    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("always")
def test_what_is_found_no_longer_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = watched(*stats(), dead=True, n=20).diagnose()
    healthy = watched(*stats(), n=20).diagnose()
    tty, found = terminal(monkeypatch), iter([dead, dead])
    rules = ", ".join(dict.fromkeys(f.rule for f in dead if f.severity != "note"))
    monkeypatch.setattr(show_health, "diagnose", lambda run: next(found, healthy))

    watched(*stats(), ShowHealth(every_s=1e-9), n=20)

    assert f"20 steps: no findings now; before: {rules}" in tty.getvalue()
    assert tty.shown[-1] == f"2 layers, 20 steps: healthy; before: {rules}"


# --- in a terminal


@pytest.mark.usefixtures("always")
def test_a_terminal_shows_one_block_below_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)

    watched(
        *stats(),
        ShowHealth(every_s=1e-9),
        n=20,
        say=lambda i: print("batch", i) if i % 6 == 0 else 0,
    )

    *printed, first, acts, grads, params, verdict = tty.shown
    assert printed == [f"batch {i}" for i in range(0, 40, 6)]
    assert re.match(r"step 20 · 00:0\d · loss 0\.\d+ +[▁-█]+$", first)
    assert [line.split(",")[0] for line in (acts, grads)] == ["activations", "gradients"]
    assert params.startswith("update:weight")
    assert verdict == "2 layers, 20 steps: healthy"
    assert tty.all_scrolls


@pytest.mark.usefixtures("always")
def test_findings_stay_above_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)

    watched(*stats(), ShowHealth(every_s=1e-9), n=40, dead=True)

    assert sum(bool(FIND.search(line)) for line in tty.shown) == 1
    assert sum("40 steps" in line for line in tty.shown) == 1
    assert "no findings so far" in tty.getvalue()
    assert "no findings so far" not in "".join(tty.shown)


@pytest.mark.usefixtures("always")
def test_an_open_line_goes_on_above_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)

    watched(*stats(), ShowHealth(every_s=1e-9), n=20, dead=True, say=lambda i: print(end="."))

    assert "".join(line for line in tty.shown if line[0] == ".") == "." * 40
    assert sum("activations, " in line for line in tty.shown) == 1
    assert len(FIND.findall("\n".join(tty.shown))) == 1


@pytest.mark.usefixtures("always")
def test_a_line_that_was_open_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)
    print("fold 1: ", end="")

    watched(*stats(), ShowHealth(every_s=1e-9), n=20)

    assert tty.shown[0] == "fold 1:"
    assert tty.shown[1].startswith("step 20 · ")


@pytest.mark.usefixtures("always")
def test_a_line_that_is_written_over_and_over_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)

    watched(
        *stats(), ShowHealth(every_s=1e-9), n=20, say=lambda i: print(f"batch {i:02}", end="\r")
    )

    assert tty.shown[0] == "batch 39"
    assert tty.shown[1].startswith("step 20 · ")


@pytest.mark.usefixtures("always")
def test_below_a_line_that_was_cleared_there_is_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)

    def say(i: int) -> None:
        print(f"batch {i:02}", end="\r")
        print("\r        ", end="")  # as tqdm does
        print(end="\r")

    watched(*stats(), ShowHealth(every_s=1e-9), n=20, say=say)

    assert len(tty.shown) == 5
    assert tty.shown[0].startswith("step 20 · ")


@pytest.mark.usefixtures("always")
def test_of_two_at_once_one_has_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tty, model = terminal(monkeypatch), net()

    with watch(model, None, *stats(), ShowHealth(every_s=1e-9)) as outer:
        for i in range(5):
            inner = watched(*stats(), ShowHealth(every_s=1e-9), n=3)
            opt = torch.optim.SGD(model.parameters(), lr=0.05)
            model(torch.ones(2, 8)).sum().backward()
            opt.step()
            print(*["turn"] * (i < 2), end="\n" * (i < 2))

    heads = [line.split(" · ")[0] for line in tty.shown if line.startswith("step")]
    assert heads == ["step 3"] * 2 + ["step 5"]  # the outer one has it from its second step on
    assert sum(line.startswith("turn") for line in tty.shown) == 2
    assert (inner.n_steps, outer.n_steps) == (3, 5)
    assert tty.all_scrolls


@pytest.mark.usefixtures("always")
def test_prints_to_a_file_go_on_when_the_terminal_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    tty, file = terminal(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)

    def say(i: int) -> None:
        if i == 9:
            tty.close()
        print(i)

    with pytest.warns(HookkitWarning, match="shows nothing more: ValueError"):
        w = watched(*stats(), ShowHealth(every_s=1e-9), n=10, say=say)

    assert (w.n_steps, len(file.getvalue().split())) == (10, 20)


@pytest.mark.usefixtures("always")
def test_prints_to_one_terminal_go_on_when_another_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty, other = terminal(monkeypatch), Tty()
    monkeypatch.setattr(sys, "stdout", other)

    with pytest.warns(HookkitWarning, match="shows nothing more: ValueError"):
        watched(
            *stats(),
            ShowHealth(every_s=1e-9),
            n=10,
            say=lambda i: (i == 8 and tty.close(), print(i))[0],  # it shows a block by then
        )

    assert other.shown == [str(i) for i in range(20)]


def test_what_replaces_a_stream_need_not_know_of_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Log:
        write = told.append

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Log())
    monkeypatch.setattr(sys, "stdout", sys.stderr)

    watched(*stats(), ShowHealth(), dead=True, n=20)

    assert FIND.search("".join(told))


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals")
def test_the_size_is_that_of_the_terminal_and_not_of_stdout() -> None:
    termios, fcntl = pytest.importorskip("termios"), pytest.importorskip("fcntl")
    one, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 47, 0, 0))

    with os.fdopen(other, "w") as stream:
        assert screens._size(stream) == (47, 24)
    os.close(one)


@pytest.mark.usefixtures("always")
def test_an_error_in_the_loop_leaves_the_last_block_and_the_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = terminal(monkeypatch)

    def fail(i: int) -> None:
        if i == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(*stats(), ShowHealth(every_s=1e-9), say=fail)
    print("afterwards")

    assert tty.shown[-2:] == ["2 layers, 4 steps: no findings so far", "afterwards"]
    assert tty.all_scrolls


@pytest.mark.usefixtures("always")
def test_bars_stay_one_line_above_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    tty = terminal(monkeypatch)
    bar = tqdm(total=80, file=tty, mininterval=0, ncols=60)

    with bar:
        during = []

        def say(i: int) -> None:
            bar.update()
            during[:] = [tty.shown] if i == 60 else during

        watched(*stats(), ShowHealth(every_s=1e-9), n=40, dead=True, say=say)
        bar.update(0)
        after = tty.shown

    assert during[0][-5].endswith("it/s]")
    assert sum("it/s]" in line for line in during[0]) == 1
    assert [line.split(",")[0] for line in during[0][-3:-1]] == ["activations", "gradients"]
    assert sum(bool(FIND.search(line)) for line in after) == 1
    assert sum("it/s]" in line for line in after) == 1
    assert after[-1].endswith("it/s]")
    assert after[-2].startswith("2 layers, 40 steps: 2 errors")


@pytest.mark.usefixtures("always")
def test_it_lives_beside_the_bar_of_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    tty = terminal(monkeypatch)

    synth_learner(cbs=[*stats(), ProgressCallback()]).fit(2, cbs=ShowHealth(every_s=1e-9))

    head, *rows = (line.split() for line in tty.shown)
    assert head[:2] == ["epoch", "train_loss"]
    assert [row[0] for row in rows[:2]] == ["0", "1"]
    assert tty.shown[3].startswith("epoch 2/2 · step 20 · ")
    assert not [line for line in tty.shown if "it/s" in line]


def test_a_terminal_without_these_characters_gets_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = terminal(monkeypatch)
    monkeypatch.setattr(Tty, "encoding", "ascii")

    watched(*stats(), ShowHealth(every_s=1e9), n=20)

    assert tty.getvalue().isascii()
    assert tty.shown[0].startswith("step 20 ? 00:0")


# --- in a notebook


class Cell:
    """What a notebook shows: one output, and all that it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        display = pytest.importorskip("IPython.display")
        self.drawn: list[Any] = []
        self.n = 0
        monkeypatch.setattr(display, "display", self.first)
        monkeypatch.setattr(screens, "in_notebook", lambda: True)

    def first(self, data: Any, raw: bool, display_id: bool) -> Any:
        self.n += 1
        self.drawn.append(data)
        return self

    def update(self, data: Any, raw: bool) -> None:
        self.drawn.append(data)


@pytest.mark.usefixtures("always")
def test_a_notebook_shows_one_output_with_picture_and_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    cell = Cell(monkeypatch)
    drawn: list[int] = []
    monkeypatch.setattr("hookkit.plotting.svg.svg", lambda *_: drawn.append(1) or "<svg></svg>")

    watched(*stats(), ShowHealth(every_s=1e-9), n=12, dead=True)

    html, text = cell.drawn[-1]["text/html"], cell.drawn[-1]["text/plain"]
    assert cell.n == 1
    assert len(cell.drawn) > len(drawn) > 1
    assert "<svg></svg>" in html
    assert re.search('class="finding (error|warning)".*dead', html)
    assert "12 steps: " in html
    assert text.startswith("step 12 · ")
    assert "<svg" not in cell.drawn[0]["text/html"]
    assert "no findings so far" in cell.drawn[0]["text/html"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("always")
def test_the_picture_in_a_notebook_has_the_colours_of_its_theme_and_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    cell = Cell(monkeypatch)

    watched(*stats(), ShowHealth(every_s=1e-9), n=3)

    html = cell.drawn[-1]["text/html"]
    assert html.count("<svg ") == 1
    assert 'fill="currentColor"' in html
    assert re.search(
        'aria-label="Layer by step heat-maps of the run. step 3 .*2 layers, 3 st', html
    )


def test_a_notebook_without_matplotlib_shows_text(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    watched(*stats(), ShowHealth(), n=12)

    html = cell.drawn[-1]["text/html"]
    assert "<pre>activations, RMS" in html
    assert "2 layers, 12 steps: healthy" in html


# --- the training is not disturbed


@pytest.mark.usefixtures("always")
def test_if_drawing_fails_it_warns_once_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tty = terminal(monkeypatch)
    monkeypatch.setattr(screens.Terminal, "show", lambda *_: 1 / 0)

    with pytest.warns(
        HookkitWarning, match="shows nothing more: ZeroDivisionError: .* goes on"
    ) as found:
        w = watched(*stats(), ShowHealth(every_s=1e-9))

    assert len(found) == 1
    assert w.n_steps == 30
    assert tty.all_scrolls


def test_a_stream_that_is_closed_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch).close()

    with pytest.warns(HookkitWarning, match="shows nothing more: ValueError: I/O operation"):
        assert watched(*stats(), ShowHealth()).n_steps == 30


def test_stderr_is_closed_and_cannot_show_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch).close()
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: print("seen", file=sys.stderr))

    assert watched(*stats(), ShowHealth()).n_steps == 30


@pytest.mark.usefixtures("always")
def test_it_works_twice_and_in_copies(capsys: Any) -> None:
    copies: list[Any] = []
    model = net(dead=True)
    w = watch(model, torch.optim.SGD(model.parameters(), lr=0.05), *stats(), ShowHealth(1e-9))

    for _ in range(2):
        with w:
            train(w, model, 15, lambda i: copies.append(copy.deepcopy(w.show_health)))
    again = pickle.loads(pickle.dumps(w))

    assert len(FIND.findall(capsys.readouterr().err)) == 1
    assert again.show_health.findings == w.show_health.findings
    assert copies[-1].findings == w.show_health.findings
    assert again.run_record() == w.run_record()
    assert (again.show_health._screen, copies[0]._screen, copies[0]._next) == (None, None, {})


def test_a_validation_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)
    learn = synth_learner(cbs=[*stats(), ShowHealth(every_s=1e-9)])

    learn.validate()

    assert tty.getvalue() == ""


@pytest.mark.slow
def test_nothing_is_left_wherever_ctrl_c_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show_health, "_MOST", 1e12)
    tty, model = terminal(monkeypatch), net()

    def scenario() -> None:
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        with watch(model, opt, ActivationStats, ShowHealth(every_s=1e-9)):
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
                opt.step()

    def left() -> str:
        region = " the region" * (not tty.all_scrolls)
        return left_behind(model) + region + " the lock" * screens.Terminal._one.locked()

    assert interrupted_everywhere(scenario, left, most=60) == []


# --- what it needs


def test_a_watched_loop_without_recorders_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"there is none among the callbacks.*show=True"):
        watched(ShowHealth())


def test_a_learner_shows_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    tty = terminal(monkeypatch)

    with synth_learner().no_logging() as learn:
        learn.fit(2, cbs=ShowHealth())

    assert tty.shown[0].startswith("epoch 2/2 · step 20 · 00:00 · loss ")
    assert tty.shown[1] == "0 layers, 20 steps: healthy (no parameters, no activations)"


@pytest.mark.parametrize("wrong", [0, -1.0, "5", None])
def test_the_seconds_between_looks_are_a_number_above_0(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"ShowHealth\(every_s=.*Give a number above 0"):
        ShowHealth(every_s=wrong)


def names(w: Any) -> list[str]:
    return [cb.name for cb in w.cbs]


def test_show_adds_recorders_where_there_are_none() -> None:
    model = net()
    mine = ShowHealth(every_s=9.0)

    assert names(watch(model, show=True)) == ["activation_stats", "param_stats", "show_health"]
    assert names(watch(model, None, ParamStats, show=True)) == ["param_stats", "show_health"]
    assert watch(model, None, ParamStats, mine, show=True).cbs[1] is mine
    assert watch(model, show=True).activation_stats.every == 10
    assert names(watch(model)) == []
    with pytest.raises(TypeError, match=r"watch\(show='yes'\): give True or False"):
        watch(model, show="yes")  # type: ignore[arg-type]


# --- several processes


def shows(rank: int, folder: Path) -> None:
    show_health._MOST = 1e12
    err, sys.stderr = sys.stderr, io.StringIO()
    cbs = [*stats(), ShowHealth(every_s=1e-9)][: 4 if rank == 0 else 3]  # reads without the other
    w = watched(*cbs, n=20, dead=True)
    (folder / f"told{rank}").write_text(sys.stderr.getvalue())
    sys.stderr = err
    w.gather().run_record().save(folder / f"run{rank}.npz")
    second = watched(*stats(), ShowHealth(every_s=1e-9), n=20, dead=True)
    assert bool(second.show_health.findings) == (rank == 0)


@pytest.mark.ranks
@pytest.mark.slow
def test_the_first_rank_shows_its_own_without_the_others(tmp_path: Path) -> None:
    in_ranks(shows, tmp_path)

    runs = [Run.load(tmp_path / f"run{rank}.npz") for rank in (0, 1)]
    assert runs[0] == runs[1]
    assert FIND.search((tmp_path / "told0").read_text())
    assert (tmp_path / "told1").read_text() == ""


# --- at a glance


def test_bars_reach_from_the_smallest_to_the_greatest() -> None:
    assert bars(np.arange(8.0)) == "▁▂▃▄▅▆▇█"
    assert bars(np.array([1.0, np.nan, np.inf, 2.0])) == "▁  █"
    assert bars(np.ones(3)) == "▁▁▁"
    assert bars(np.array([np.nan])) == bars(np.array([])) == ""
    assert len(bars(np.random.default_rng(0).normal(size=1000))) == 24


def test_a_run_of_nothing_is_its_head() -> None:
    assert glance("step 0", Run()) == ["step 0"]
    assert glance("step 2", Run(losses=np.array([np.nan, np.nan]))) == ["step 2"]


def test_a_loss_that_is_no_number_any_more_is_not_shown_as_it_was() -> None:
    losses = np.array([3.0, 2.0, 1.0, np.nan, np.nan, np.nan])

    assert glance("step 6", Run(losses=losses))[0].startswith("step 6 · loss nan ")
    assert glance("step 4", Run(losses=losses[:4]))[0].startswith("step 4 · loss 2 ")
