"""What is recorded is never half done: Ctrl-C at any line of a tally or a recorder."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hookkit
from hookkit.moments import history
from hookkit.moments.bins import LogBins
from hookkit.moments.reading import record_of
from hookkit.moments.tally import Options, Tally
from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import watch

pytestmark = pytest.mark.slow

FOLDERS = tuple(str(Path(hookkit.__file__).parent / name) for name in ("moments", "stats"))
Line = tuple[str, int]


class Lines:
    """Counts how often each line of `FOLDERS` runs; interrupts one of them at its nth run."""

    def __init__(self, line: Line | None = None, nth: int = 0) -> None:
        self.line, self.nth, self.times = line, nth, Counter[Line]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            return self if frame.f_code.co_filename.startswith(FOLDERS) else None
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            self.times[here] += 1
            if here == self.line and self.times[here] == self.nth:
                raise KeyboardInterrupt
        return self

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)
            # a trace can interrupt the last line of `with torch.no_grad()`, before it is left;
            # there Python does not look for signals
            torch.set_grad_enabled(True)


def at_every_line(run: Callable[[Lines], Any], every: int = 1) -> Iterator[tuple[str, Any]]:
    """What `run` gives if each line, or one of so many, is interrupted in the midst of its runs."""
    count = Lines()
    run(count)
    assert len(count.times) > 5
    for line, n in list(count.times.items())[::every]:
        where = f"{Path(line[0]).name}:{line[1]}"
        try:
            yield where, run(Lines(line, (n + 1) // 2))
        except Exception as e:
            raise AssertionError(f"interrupted at {where}: {type(e).__name__}: {e}") from e


@pytest.fixture(autouse=True)
def _small_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LIMIT", 6000)
    monkeypatch.setattr("hookkit.moments.tally.WAIT", 3)


def filled(lines: Lines) -> Tally:
    """12 steps, of two batches each at times; what was interrupted is done again if it was not."""
    stats = Tally("activation", Options(bins=LogBins(), units=True))
    g = torch.Generator().manual_seed(0)
    for step in range(12):
        for batch in range(1 + (step == 3)):
            if batch:
                before = len(stats._state.step)
                again(lines, stats.fold, lambda: len(stats._state.step) > before)  # noqa: B023
            for row in range(1 + step // 5):
                x = torch.randn(4, 6, generator=g)
                stats.see(stats.row(f"fc{row}", "ReLU"), 0, "", x.double() if row == 1 else x)
        n = stats.n_records
        commit = lambda step=step: stats.commit(step, 0, step)  # noqa: E731
        again(lines, commit, lambda: stats.n_records > n)  # noqa: B023
        if step == 5:
            again(lines, lambda: record_of(stats), lambda: False)
    return stats


def again(lines: Lines, call: Callable[[], Any], is_done: Callable[[], bool]) -> None:
    try:
        with lines.counted():
            call()
    except KeyboardInterrupt:
        if not is_done():
            call()


def test_a_tally_loses_nothing_and_counts_nothing_twice_wherever_it_is_interrupted() -> None:
    want = record_of(filled(Lines()))

    for where, stats in at_every_line(filled):
        assert record_of(stats) == want, where


def trained(lines: Lines) -> list[Any]:
    """Recorders of 10 steps in a loop that goes on after Ctrl-C in the optimizer's step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.randn(10, 5, 4)
    units = ActivationStats(with_hist=True, units=True, include_paramless=True)
    cbs = [units, GradientStats(), ParamStats()]
    with watch(net, opt, *cbs) as w:
        for i in range(10):
            opt.zero_grad()
            loss = net(x[i]).pow(2).mean()
            loss.backward()
            try:
                with lines.counted():
                    opt.step()
            except KeyboardInterrupt:
                pass
            w.loss(loss)
    return cbs


def test_a_training_goes_on_after_an_interrupt_in_a_recorder() -> None:
    want = [recorder.record() for recorder in trained(Lines())]

    for where, recorders in at_every_line(trained, every=7):
        for recorder, whole in zip(recorders, want, strict=True):
            record = recorder.record()
            assert record.spans.sum() in (9, 10), where  # a step that it prevented joins the next
            assert record.names == whole.names, where
