"""A model that was watched, trained or looked at is freed with the last reference to it.

By reference counting alone: on a GPU what waits for the garbage collector holds its memory.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hookkit import (
    ActivationStats,
    Callback,
    FlightRecorder,
    GradientClip,
    GradientStats,
    HookCallback,
    Learner,
    ParamStats,
    ProgressCallback,
    watch,
)

RECORDERS: list[Callable[[], Callback]] = [
    lambda: ActivationStats(True, units=True),
    lambda: GradientStats(),
    ParamStats,
    lambda: FlightRecorder("report"),
    lambda: HookCallback(hook=lambda m, i, o: o),
    lambda: Callback(after_step=lambda self: self.model),
]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x.sum(1, keepdim=True)) for x in torch.randn(3, 8, 4)]


def learner(model: nn.Module, **options: Any) -> Learner:
    learn = Learner((data(), data()), model, nn.MSELoss(), torch.optim.SGD, lr=0.01, **options)
    learn.logger = lambda row: None
    return learn


def watched(model: nn.Module, *callbacks: Any, **options: Any) -> Any:
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, *callbacks, **options) as w:
        for x, y in data():
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            w.loss(loss)
    return w


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    plain = net()  # PyTorch's first step and first backward leave cycles of their own
    opt = torch.optim.SGD(plain.parameters(), 0.01)
    plain(torch.ones(2, 4)).sum().backward()
    opt.step()
    gc.disable()
    yield
    gc.enable()


def is_freed_after(use: Callable[[nn.Module], object]) -> bool:
    model = net()
    gone = weakref.ref(model), weakref.ref(model[0].weight)
    kept = use(model)
    del model
    freed = [ref() is None for ref in gone] == [True, True]
    del kept
    return freed


@pytest.mark.parametrize("make", RECORDERS)
@pytest.mark.parametrize("keep", [False, True])
def test_a_watched_model_is_freed_also_if_a_recorder_is_kept(make: Any, keep: bool) -> None:
    def use(model: nn.Module) -> object:
        w = watched(model, cb := make())
        w.run_record()
        return cb if keep else None

    assert is_freed_after(use)


def never_entered(model: nn.Module) -> None:
    watch(model, None, ActivationStats())


def raised(model: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError), watch(model, None, ActivationStats()):
        model(1 / 0)


def started(model: nn.Module) -> None:
    watch(model, torch.optim.SGD(model.parameters(), 0.1), ParamStats()).start().stop()


@pytest.mark.parametrize(
    "use",
    [
        never_entered,
        raised,
        started,
        lambda model: watched(model, ActivationStats(), loss_func=nn.MSELoss()).run_record(),
        lambda model: watched(model, ActivationStats(), ParamStats()).diagnose(),
    ],
)
def test_a_watched_model_is_freed_however_it_was_watched(use: Any) -> None:
    assert is_freed_after(use)


@pytest.mark.parametrize("make", [*RECORDERS, ProgressCallback, lambda: GradientClip(1.0)])
@pytest.mark.parametrize("to_fit", [False, True])
def test_a_learners_model_is_freed(make: Any, to_fit: bool) -> None:
    if make is ProgressCallback:
        pytest.importorskip("tqdm")

    def use(model: nn.Module) -> None:
        learn = learner(model, cbs=None if to_fit else make())
        learn.fit(1, cbs=make() if to_fit else None)

    assert is_freed_after(use)


def failed(learn: Learner) -> None:
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=Callback(after_batch=lambda self: 1 / 0))


@pytest.mark.parametrize(
    "do",
    [
        lambda learn: None,
        lambda learn: learn.fit_one_cycle(1),
        lambda learn: (learn.fit(1), learn.validate(), learn.get_preds()),
        lambda learn: (learn.freeze(), learn.fit(1), learn.unfreeze()),
        lambda learn: learn.summary(),
        lambda learn: (learn.fit(1, cbs=[ActivationStats(), ParamStats()]), learn.diagnose()),
        failed,
    ],
)
def test_a_learners_model_is_freed_whatever_was_done(do: Any) -> None:
    def use(model: nn.Module) -> None:
        do(learner(model, metrics=nn.functional.l1_loss))

    assert is_freed_after(use)


def test_a_callback_whose_learner_no_longer_exists_says_so() -> None:
    learn = learner(net())
    learn.fit(1)
    recorder = learn.recorder

    del learn

    assert recorder.learn is None
    assert len(recorder.losses) == 3
    with pytest.raises(AttributeError, match=r"'dls': the Learner or .* no longer exists\. Keep"):
        _ = recorder.dls
    pytest.importorskip("matplotlib")
    with pytest.raises(AttributeError, match=r"no longer exists\. Keep that one"):
        recorder.plot_loss()


def test_a_watched_training_leaves_nothing_to_the_garbage_collector() -> None:
    def use() -> None:
        watched(net(), ActivationStats(True, units=True), GradientStats(), ParamStats())

    use()  # PyTorch's first ones leave cycles of their own
    gc.collect()

    use()

    assert gc.collect() == 0
