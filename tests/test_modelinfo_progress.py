"""The line on stderr during a long run, and Ctrl-C in the middle of one."""

from __future__ import annotations

import io
import os
import signal
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit import summary
from hookkit.modelinfo import progress

X = torch.ones(2, 3)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def net(n: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(n)))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_WAIT_S", 0.0)
    monkeypatch.setattr(progress, "_PAUSE_S", 0.0)


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr; no fixture, since pytest sets stderr again before the test."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def shown(text: str) -> str:
    """What a terminal shows in the end: a carriage return goes back to the beginning."""
    line: list[str] = []
    for part in text.split("\r"):
        line[: len(part)] = part
    return "".join(line).strip()


@pytest.mark.usefixtures("at_once")
def test_a_line_says_how_far_a_long_run_is_and_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setitem(sys.modules, "tqdm", None)

    summary(net(), X)

    parts = [part.strip() for part in terminal.getvalue().split("\r") if part.strip()]
    assert parts == [f"{n} of 5 modules, 0 s" for n in range(1, 6)]
    assert shown(terminal.getvalue()) == ""
    assert "\n" not in terminal.getvalue()


@pytest.mark.usefixtures("at_once")
def test_the_line_is_the_text_of_tqdm_where_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tqdm")
    terminal = terminal_of(monkeypatch)

    summary(net(), X)

    assert " 40%|" in terminal.getvalue()
    assert "| 2/5 [00:00<" in terminal.getvalue()
    assert shown(terminal.getvalue()) == ""


def test_a_short_run_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)

    summary(net(), X)

    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("at_once")
def test_nothing_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)

    summary(net(), X)

    assert file.getvalue() == ""


@pytest.mark.usefixtures("at_once")
def test_a_notebook_shows_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stderr", cell)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)

    summary(net(), X)

    assert "5" in cell.getvalue()
    assert shown(cell.getvalue()) == ""


@pytest.mark.usefixtures("at_once")
def test_the_line_is_gone_when_the_model_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    model = net()
    model.append(nn.Linear(4, 4))

    with pytest.raises(RuntimeError):
        summary(model, X)

    assert terminal.getvalue()
    assert shown(terminal.getvalue()) == ""


@pytest.mark.usefixtures("at_once")
def test_a_closed_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(Terminal):
        def write(self, text: str) -> Any:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())

    assert summary(net(), X).n_params == 48


# --- Ctrl-C


class Interrupting(nn.Module):
    """Gets a Ctrl-C in its forward; keeps what it made in a global cache before that."""

    def __init__(self, real: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.real, self.sent, self.reached = real, 0, []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.real:
            x.sum().item()  # needs values
        mask(3)
        os.kill(os.getpid(), signal.SIGINT)
        REACHED.append("after")
        x = self.second(x)
        REACHED.append("second")
        return x


REACHED: list[str] = []


@cache
def mask(n: int) -> Tensor:
    return torch.ones(n, n)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_ctrl_c_ends_a_run_at_the_next_module_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, real: bool
) -> None:
    terminal = terminal_of(monkeypatch)
    model = Interrupting(real)
    mask.cache_clear()
    REACHED.clear()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grad, handler = torch.is_grad_enabled(), signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        summary(model, X)

    assert "second" not in REACHED
    assert "modules" in terminal.getvalue() or "/3" in terminal.getvalue()
    assert shown(terminal.getvalue()) == ""
    assert type(mask(3)) is Tensor
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert (grad, handler) == (torch.is_grad_enabled(), signal.getsignal(signal.SIGINT))
    assert model.second(X).shape == X.shape
