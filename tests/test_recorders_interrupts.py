"""Ctrl-C in a recorder: the training goes on, and a record is off by the step under way at most."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hookkit
from hookkit.recorders import ActivationStats, GradientStats, ParamStats, step_table
from hookkit.training import watch

pytestmark = pytest.mark.slow

FOLDERS = tuple(str(Path(hookkit.__file__).parent / name) for name in ("recorders",))


class Lines:
    """Counts how often each line of `FOLDERS` runs; interrupts one of them at its nth run."""

    def __init__(self, line: tuple[str, int] | None = None, nth: int = 0) -> None:
        self.line, self.nth, self.times = line, nth, Counter[tuple[str, int]]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            return self if frame.f_code.co_filename.startswith(FOLDERS) else None
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            self.times[here] += 1
            if here == self.line and self.times[here] == self.nth:
                raise KeyboardInterrupt
        return self


def trained(lines: Lines) -> list[Any]:
    """Recorders of 20 steps in a loop that goes on after Ctrl-C in the optimizer's step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.randn(20, 5, 4)
    units = ActivationStats(with_hist=True, units=True, include_paramless=True)
    cbs = [units, GradientStats(), ParamStats()]
    with watch(net, opt, *cbs) as w:
        for i in range(20):
            opt.zero_grad()
            loss = net(x[i]).pow(2).mean()
            loss.backward()
            before = sys.gettrace()
            sys.settrace(lines)
            try:
                opt.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
                # a trace can interrupt the last line of `with torch.no_grad()`, before it is left;
                # there Python does not look for signals
                torch.set_grad_enabled(True)
            w.loss(loss)
    return cbs


def test_a_training_goes_on_and_loses_one_step_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_table, "LIMIT", 4000)
    count = Lines()
    want = [recorder.record() for recorder in trained(count)]
    assert len(count.times) > 100

    for line, n in [*count.times.items()][::15]:
        where = f"{Path(line[0]).name}:{line[1]}"
        for recorder, whole in zip(trained(Lines(line, (n + 1) // 2)), want, strict=True):
            record = recorder.record()
            assert record.names == whole.names, where
            assert record.spans.sum() in (19, 20), where
            assert (record.steps[1:] > record.steps[:-1]).all(), where
