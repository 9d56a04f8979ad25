"""`every="auto"` records whole steps, as often as takes 5 % of the time by the test's clock."""

from typing import Any

import pytest
import torch
from torch import nn

from hookkit.errors import OptionError
from hookkit.recorders import (
    ActivationStats,
    GradientStats,
    ParamStats,
    layer_stats,
    param_stats,
    step_recorder,
)
from hookkit.training import watch


class Clock:
    """A clock that goes on by 1 each time it is read: so each part of a recorder takes 1."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def train(recorder: Any, work: float, monkeypatch: pytest.MonkeyPatch, n_steps: int = 200) -> float:
    """Trains with steps of two batches, which take `work` by the clock; returns the whole time."""
    clock = Clock()
    for module in (step_recorder, layer_stats, param_stats):
        monkeypatch.setattr(module, "clock", clock)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, opt, recorder):
        for _ in range(n_steps):
            for _ in range(2):
                net(torch.ones(5, 3)).sum().backward()
            clock.now += work
            opt.step()
            opt.zero_grad()
    return clock.now


MAKE = [ActivationStats, GradientStats, ParamStats]


@pytest.mark.parametrize("make", MAKE)
def test_whole_steps_are_recorded_as_often_as_costs_5_percent(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent, end_step = list[float](), make._end_step

    def noted(self: Any, learn: Any, recorded: bool) -> None:
        spent.extend([self._spent] * recorded)
        end_step(self, learn, recorded)

    monkeypatch.setattr(make, "_end_step", noted)
    recorder = make(every="auto")

    time = train(recorder, 19, monkeypatch)

    record = recorder.record()
    assert record.steps[0] == 0
    assert 10 < len(record) <= 100
    assert 0.03 * time < sum(spent) < 0.05 * time + spent[0]
    if make is not ParamStats:
        assert (record.value("count") == [[2 * 5 * 4], [2 * 5 * 2]]).all()


@pytest.mark.parametrize("make", MAKE)
def test_a_cheap_recorder_records_every_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(every="auto")

    train(recorder, 1000, monkeypatch, n_steps=5)

    assert recorder.record().steps.tolist() == [0, 1, 2, 3, 4]


def test_several_processes_and_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r'every=\'often\'\): .* or "auto"'):
        ActivationStats(every="often")
    monkeypatch.setattr("hookkit._core.distributed.is_distributed", lambda: True)
    monkeypatch.setattr("hookkit._core.distributed.rank_label", lambda: "rank 0 of 2")
    with pytest.raises(OptionError, match=r"could not merge them\. Give a number"):
        train(ActivationStats(every="auto"), 1, monkeypatch)
