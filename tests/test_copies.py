"""Copies and pickles: what was recorded goes with them, what runs does not.

A host (a skorch net, a fastai Learner) that holds a Watcher is copied, pickled and exported as one
without.
"""

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
    HookError,
    Learner,
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


class Host:
    """What has a Watcher among other things."""

    def __init__(self, watcher: Any) -> None:
        self.watcher, self.name = watcher, "host"


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


def same(a: Any, b: Any) -> None:
    """Two runs hold the same."""
    np.testing.assert_array_equal(a.losses, b.losses)
    assert (a.info, a.valid, a.incidents) == (b.info, b.valid, b.incidents)
    for kind in ("activations", "gradients", "params"):
        mine, theirs = getattr(a, kind), getattr(b, kind)
        assert (mine.names, mine.types, mine.meta) == (theirs.names, theirs.types, theirs.meta)
        for name in mine.values:
            np.testing.assert_array_equal(mine.values[name], theirs.values[name])


@pytest.mark.slow
@each_way
@pytest.mark.parametrize("hosted", [False, True])
def test_a_watcher_is_copied_with_what_was_recorded(way: Any, hosted: bool) -> None:
    run = Run()
    with run.w:
        run.steps(6)
        run.w.epoch(valid_loss=0.5)
        run.steps(4)

    again = way(Host(run.w)).watcher if hosted else way(run.w)

    same(again.run_record(), run.w.run_record())
    assert repr(again) == repr(run.w)
    assert str(again.diagnose()) == str(run.w.diagnose())
    assert again.n_steps == 10
    assert again is run.w or again.opt is again.model is None  # a shallow copy of the host
    assert again.activation_stats.hist(0).shape[1] == 10


@each_way
def test_a_copy_made_during_a_run_is_at_rest_and_the_run_goes_on(way: Any) -> None:
    torch.manual_seed(1)
    (plain := Run()).w.start()
    plain.steps(8)
    plain.w.stop()
    torch.manual_seed(1)
    run = Run()

    with run.w:
        run.steps(4)
        again = way(run.w)
        seen = len(again.losses), again.loop.fitting
        again.stop()
        run.steps(4)

    same(run.w.run_record(), plain.w.run_record())
    assert seen == (4, False)
    assert "running" not in repr(again)
    if way is not copy.copy:  # which shares the recorders
        np.testing.assert_array_equal(again.losses, run.w.losses[:4])
        assert len(again.activation_stats.record()) == len(again.param_stats.record()) == 4


@each_way
def test_a_copied_watcher_does_not_start_and_its_callbacks_go_on_elsewhere(way: Any) -> None:
    run = Run()
    with run.w:
        run.steps(3)
    again = way(run.w)

    for start in (again.start, lambda: again.follow(run.opt)):
        with pytest.raises(HookError, match=r"neither model nor optimizer\. .* watch\(model, opt"):
            start()
    run.w = watch(run.model, run.opt, *again.cbs)
    with run.w:
        run.steps(2)

    assert len(run.w.activation_stats.record()) == 5
    assert again.loop.fitting is False


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
@pytest.mark.parametrize("during", [False, True])
def test_a_learner_is_copied_with_its_recorders_and_trains_on(way: Any, during: bool) -> None:
    copies: list[Learner] = []

    class Copies(HookCallback):
        def after_batch(self) -> None:
            if during and self.iter == 3:
                copies.append(way(self.learn))

    global _Copies
    _Copies = Copies
    Copies.__qualname__ = "_Copies"
    learn = synth_learner(cbs=[*recorders(), ProgressCallback, Copies(hook=keep_shape)])
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        again = copies[0] if during else way(learn)
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
