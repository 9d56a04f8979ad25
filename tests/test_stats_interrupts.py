"""What is recorded is never half done: Ctrl-C at any line of the recorders, one line at a time.

A trace raises KeyboardInterrupt at the n-th line that runs in `hookkit/moments` and in
`hookkit/stats`; what was recorded before has to be right, all of it readable, and what follows
recorded as ever.
"""

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options
from torch import nn

import hookkit
from hookkit.health import diagnose
from hookkit.moments import buffers, history, log_bins
from hookkit.moments.history import StepHistory
from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import watch

FOLDERS = tuple(str(Path(hookkit.__file__).parent / name) for name in ("moments", "stats"))


Line = tuple[str, int]


class Lines:
    """Counts how often each line, (file, number), of `FOLDERS` runs; interrupts one at its nth run.

    It is called for every line, so it does no more than that.
    """

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


def at_every_line(run: Callable[[Lines], Any], every: int = 1, nths: int = 1) -> Any:
    """What `run` gives if it is interrupted at one line, by line; the same at each of its lines.

    Args:
        every: takes one line in so many.
        nths: at how many of the times that it runs, evenly spread, the middle one first.
    """
    count = Lines()
    run(count)
    assert len(count.times) > 5
    for line, n in list(count.times.items())[::every]:
        for nth in {1 + (2 * i + 1) * n // (2 * nths) for i in range(min(nths, n))}:
            where = f"{Path(line[0]).name}:{line[1]}, time {nth} of {n}"
            try:
                yield where, run(Lines(line, min(nth, n)))
            except Exception as e:
                raise AssertionError(f"interrupted at {where}: {type(e).__name__}: {e}") from e


@pytest.fixture
def small_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_COLUMNS", "MIN_COLUMNS"):
        monkeypatch.setattr(history, name, 4)


# history: whoever was interrupted still has the old value, and does it again


@pytest.mark.usefixtures("small_history")
@pytest.mark.parametrize("name", ["moments", "counts"])
def test_a_history_is_as_it_was_after_an_interrupt_at_any_line(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    tables = torch.rand(30, 3, 9, generator=g, dtype=torch.float64)
    key = name, torch.device("cpu")

    def run(lines: Lines) -> StepHistory:
        now = StepHistory()
        while (record := now.n) < 30:
            n, rows = (1, 2) if record < 5 else (3 if record % 2 else 1, 3)
            n = min(n, 30 - record)
            places = [(step, step // 5, step) for step in range(record, record + n)]
            before = now.read(key).clone() if record else None
            try:
                with lines.counted():
                    new = now.with_records(places, {key: tables[record : record + n, :rows]})
            except KeyboardInterrupt:
                assert before is None or torch.equal(now.read(key), before)
                continue
            now = new
        return now

    want = run(Lines())

    assert want.stride == 8
    for where, got in at_every_line(run, nths=6):
        assert [got.column(i) for i in range(4)] == [want.column(i) for i in range(4)], where
        assert torch.equal(got.read(key), want.read(key)), where


# accumulators


def filled(lines: Lines) -> StatsAccumulator:
    """12 steps, of two batches each at times; interrupted steps are closed again."""
    stats = StatsAccumulator("activation", Options(bins=log_bins(), sample=16, window=4))
    g = torch.Generator().manual_seed(0)
    for step in range(12):
        for batch in range(1 + (step == 3)):
            if batch:
                again(lines, stats.fold)
            for row in range(1 + step // 5):
                width = 6 if row or step < 8 else 5
                x = torch.randn(4, width, generator=g)
                x[:, :2] = -x[:, :2].abs()
                again(lines, lambda row=row: stats.rows([f"fc{row}"], ["ReLU"]))
                stats.see(row, 0, "", x.double() if row == 1 else x)
        wanted = stats.n_records + 1
        again(lines, lambda step=step: stats.commit(step, 0, step), stats, wanted)
        if step == 5:
            again(lines, stats.record)
    return stats


def again(lines: Lines, call: Callable[[], Any], stats: Any = None, n: int = 0) -> None:
    """`call()`; after an interrupt what the next call finds: the step closed, or to be closed."""
    try:
        with lines.counted():
            call()
    except KeyboardInterrupt:
        if stats is None or stats.n_records < n:
            call()


def same(got: Any, want: Any, where: str) -> None:
    assert (got.names, got.types, got.steps.tolist()) == (
        want.names,
        want.types,
        want.steps.tolist(),
    ), where
    np.testing.assert_array_equal(got.spans, want.spans, err_msg=where)
    # a step in whose gradients the interrupt fell has fewer of them
    whole = np.full(want.steps.shape, True)
    if want.kind == "gradient":
        whole = (got.values["count"] == want.values["count"]).all(0)
        assert whole.sum() >= len(want) - 1, where
    for name, table in want.values.items():
        found = got.values[name][:, whole]
        np.testing.assert_allclose(
            found, table[:, whole], rtol=1e-6, atol=1e-9, err_msg=f"{where}: {name}"
        )
    if want.hist is not None:
        np.testing.assert_array_equal(got.hist, want.hist, err_msg=where)


@pytest.mark.slow
@pytest.mark.usefixtures("small_history")
@pytest.mark.parametrize("by_array", [True, False])
def test_nothing_is_lost_or_counted_twice_wherever_an_accumulator_is_interrupted(
    by_array: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "reads_arrays", lambda device: by_array)  # False: as on a GPU
    want = filled(Lines()).record()

    for where, stats in at_every_line(filled, every=5):
        same(stats.record(), want, where)


# recorders in a training


def trained(lines: Lines) -> list[Any]:
    """Recorders of 10 steps in a loop that goes on after Ctrl-C in the optimizer's step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.randn(10, 5, 4)
    cbs = [
        ActivationStats(with_hist=True, units=True, window=4, include_paramless=True),
        GradientStats(),
        ParamStats(),
    ]
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
        copied = pickle.loads(pickle.dumps([copy.copy(cb) for cb in cbs]))
    diagnose(w.run_record())
    return [*cbs, *copied]


@pytest.mark.slow
@pytest.mark.usefixtures("small_history")
def test_a_training_goes_on_after_an_interrupt_in_a_recorder() -> None:
    want = [recorder.record() for recorder in trained(Lines())]

    for where, recorders in at_every_line(trained, every=11):
        for recorder, whole in zip(recorders, want, strict=True):
            record = recorder.record()
            n = int(record.spans.sum())
            assert n in (9, 10), where
            assert record.names == whole.names, where
            if n == 10:  # a step that an interrupt has prevented is merged into the next
                same(record, whole, where)
