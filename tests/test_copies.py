"""Copies and pickles: what was recorded goes with them, what runs does not."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit import (
    ActivationStats,
    FlightRecorder,
    GradientStats,
    HookCallback,
    ParamStats,
    ProgressCallback,
    watch,
)
from hookkit.testing import synth_learner


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    copy.copy,
    lambda x: pickle.loads(pickle.dumps(x)),
    lambda x: pickle.loads(pickle.dumps(x, 2)),
    saved,
]
each_way = pytest.mark.parametrize("way", WAYS)


def keep_shape(m: nn.Module, i: Any, o: Any) -> Any:
    return o.shape


def recorders() -> list[Any]:
    stats = ActivationStats(True, units=True), GradientStats(True), ParamStats()
    return [*stats, FlightRecorder("report"), HookCallback(hook=keep_shape)]


class Local:
    """A model's part that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class Run:
    """A watched loop, some steps at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.model.part = Local()
        self.opt = torch.optim.Adam(self.model.parameters(), 0.01)
        self.w = watch(self.model, self.opt, *recorders())
        self.w.info["n_classes"] = 2

    def steps(self, n: int, zero: bool = True) -> None:
        for _ in range(n):
            loss = nn.functional.cross_entropy(self.model(torch.randn(8, 4)), torch.ones(8).long())
            loss.backward()
            self.opt.step()
            self.w.loss(loss)
            if zero:
                self.opt.zero_grad()


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("i", range(5))
@pytest.mark.parametrize("during", [False, True])
def test_a_recorder_is_copied_with_its_records(i: int, during: bool, way: Any) -> None:
    run = Run()
    cb = run.w.cbs[i]

    with run.w:
        run.steps(3)
        again = way(cb) if during else None
    again = again if during else way(cb)

    assert again.learn is None
    if hasattr(cb, "record"):
        assert len(again.record()) == 3
        for name, values in cb.record().values.items():
            np.testing.assert_array_equal(again.record().values[name], values)


@pytest.mark.slow
@each_way
def test_a_learner_is_copied_with_its_recorders_and_trains_on(way: Any) -> None:
    pytest.importorskip("tqdm")
    learn = synth_learner(cbs=[*recorders(), ProgressCallback])
    with learn.no_logging():
        learn.fit(1)
        again = way(learn)
        n = again.n_steps
        if way is not copy.copy:
            again.logger = learn.logger
            again.fit(1, cbs=None)

    assert learn.n_steps == 10
    assert all(cb.learn is learn for cb in learn.cbs)
    if way is not copy.copy:  # which shares the callbacks
        assert all(cb.learn is again for cb in again.cbs)
        assert again.n_steps == n + 10
        assert len(again.activation_stats.record()) == n + 10
        assert len(learn.activation_stats.record()) == 10
