"""A training that was killed within an epoch goes on there, if its loader can."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner_checkpoints import accuracy, assert_same, learner
from torch import Tensor
from torch.utils.data import TensorDataset

from hookkit.callbacks import (
    Callback,
    CSVLogger,
    GradientAccumulation,
    MixedPrecision,
    Recorder,
    SchedulerCallback,
)
from hookkit.data import DataLoaders
from hookkit.errors import OptionError
from hookkit.events import CancelTrainException


class Shuffled:
    """Batches in another order in each epoch, which can go on within one."""

    def __init__(self, data: TensorDataset, batch: int = 8) -> None:
        self.data, self.batch = data, batch
        self.epoch = self.done = self.first = 0

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch)

    def __iter__(self) -> Any:
        self.done, self.first = self.first, 0
        self.epoch += self.done == 0
        return self._batches()

    def _batches(self) -> Any:
        shuffler = torch.Generator().manual_seed(self.epoch)
        parts = torch.randperm(len(self.data), generator=shuffler).split(self.batch)
        for part in parts[self.done :]:
            self.done += 1
            x, y = self.data[part]
            yield x + 0.1 * torch.randn(()), y
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "first": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11


def torchdatas(data: TensorDataset, batch: int = 8, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(data, batch, shuffle=True, **options)


def torchdatas_workers(data: TensorDataset) -> Any:
    return torchdatas(data, num_workers=1, persistent_workers=True)


def stateful(folder: Path, loader: Any = Shuffled, seed: int = 0, **options: Any) -> Any:
    learn = learner(folder, seed, **options)
    learn.dls = DataLoaders(loader(learn.dls.train_ds), learn.dls.valid)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return learn


def killed(n_batches: int, order: float = 0) -> Callback:
    """Saves a checkpoint after so many batches, and ends the process, as it were."""

    def save(cb: Callback) -> None:
        if cb.learn.training and cb.learn.epoch * 5 + cb.learn.iter + 1 == n_batches:
            cb.learn.save("checkpoint")
            raise KeyboardInterrupt

    made = Callback(after_batch=save)
    made.order = order
    return made


def resumed(
    folder: Path, n_batches: int, more: Any = list, options: Any = dict, order: float = 0
) -> Any:
    """The same training without an interruption, and with one."""
    whole = stateful(folder, **options())
    whole.fit(4, cbs=more())
    first = stateful(folder, **options())
    with pytest.raises(KeyboardInterrupt):
        first.fit(4, cbs=[*more(), killed(n_batches, order)])
    later = stateful(folder, seed=7, **options())
    later.fit(4, cbs=more(), resume="checkpoint")
    return whole, later


@pytest.mark.parametrize("loader", [Shuffled, torchdatas, torchdatas_workers])
@pytest.mark.parametrize("n_batches", [3, 8, 10, 20])
def test_a_training_goes_on_within_an_epoch(loader: Any, n_batches: int, tmp_path: Path) -> None:
    whole, later = resumed(tmp_path, n_batches, options=lambda: {"loader": loader})

    assert_same(whole, later)
    valid = [learn.activation_stats.record(valid=True) for learn in (whole, later)]
    assert valid[0] == valid[1]
    assert [row["epoch"] for row in later.recorder.rows()] == [0, 1, 2, 3]


@pytest.mark.parametrize("loader", [Shuffled, torchdatas, torchdatas_workers])
def test_a_loader_with_a_state_goes_on_at_the_end_of_an_epoch(loader: Any, tmp_path: Path) -> None:
    whole, later = stateful(tmp_path, loader), stateful(tmp_path, loader, seed=7)
    torch.manual_seed(0)
    whole.fit(4, cbs=Callback(after_epoch=lambda cb: cb.epoch == 1 and cb.learn.save("two")))

    torch.manual_seed(7)
    later.fit(4, resume="two")

    assert_same(whole, later)


class Sum:
    """A metric of one's own."""

    def __init__(self) -> None:
        self.of = torch.sum
        self.reset()

    def reset(self) -> None:
        self.value, self.seen = torch.zeros(()), list[float]()

    def update(self, pred: Tensor, y: Tensor) -> None:
        self.value = self.value + self.of(pred.detach())
        self.seen.append(float(pred.detach().sum()))

    def compute(self) -> float:
        return float(self.value) + sum(self.seen)


def torchmetrics_accuracy() -> Any:
    module = pytest.importorskip("torchmetrics")
    return module.MetricCollection([module.Accuracy("multiclass", num_classes=3)])


@pytest.mark.parametrize("metric", [lambda: accuracy, Sum, torchmetrics_accuracy])
@pytest.mark.parametrize("order", [-100, 0, 99])
def test_metrics_of_training_go_on(metric: Any, order: float, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"metrics": [metric()], "cbs": [Recorder(train_metrics=True)]}

    whole, later = resumed(tmp_path, 8, options=options, order=order)

    assert_same(whole, later)
    assert len(later.recorder.metric_names) == 6  # epoch, two losses, two metrics, time


def one_cycle() -> SchedulerCallback:
    made = torch.optim.lr_scheduler.OneCycleLR
    return SchedulerCallback(lambda opt, n: made(opt, 0.1, total_steps=n))


CALLBACKS = {
    "schedule": lambda: [one_cycle()],
    "accumulation": lambda: [GradientAccumulation(2)],
    "fp16": lambda: [MixedPrecision("fp16", growth_interval=2)],
    "halves the rate": lambda: [Halve()],
    "counts batches": lambda: [Count()],
}


class Halve(Callback):
    """Changes what a checkpoint has, as an epoch begins."""

    def before_epoch(self) -> None:
        self.learn.opt.param_groups[0]["lr"] /= 2

    def before_train(self) -> None:
        torch.rand(())


class Count(Callback):
    """Begins anew in each epoch; the learning rate depends on it."""

    def before_train(self) -> None:
        self.n = 0

    def before_batch(self) -> None:
        self.n += self.learn.training
        self.learn.opt.param_groups[0]["lr"] = 0.1 * self.learn.pct_train / (self.n + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


@pytest.mark.parametrize("cbs", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_go_on_within_an_epoch(cbs: Any, tmp_path: Path) -> None:
    whole, later = resumed(tmp_path, 7, cbs)

    assert_same(whole, later)


def test_a_log_goes_on_within_an_epoch(tmp_path: Path) -> None:
    first, later = stateful(tmp_path, cbs=None), stateful(tmp_path, cbs=None)
    with pytest.raises(KeyboardInterrupt):
        first.fit(3, cbs=[CSVLogger(), killed(12)])

    later.fit(3, cbs=CSVLogger(), resume="checkpoint")

    rows = (tmp_path / "history.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "2"]


class StopAt(Callback):
    """Ends the training part of an epoch at its third batch."""

    order = 90

    def after_batch(self) -> None:
        if self.learn.training and self.learn.iter == 2:
            raise CancelTrainException


def test_what_a_later_callback_cancels_stays_cancelled(tmp_path: Path) -> None:
    whole, later = resumed(tmp_path, 8, lambda: [StopAt()])

    assert_same(whole, later)
    assert later.recorder.iters == [3, 6, 9, 12]
    saved: list[Any] = []
    keep = Callback(after_batch=lambda cb: saved.append(cb.learn.save("now")))
    stateful(tmp_path).fit(1, cbs=[StopAt(), keep])
    assert len(saved) == 3 + 3  # its cancel reached the loop when `save` had returned


def test_a_loader_without_a_state_begins_an_epoch_anew(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(3, cbs=killed(7))
    with pytest.raises(OptionError, match=r"saved within epoch 1.*after a step.*StatefulDataLoad"):
        stateful(tmp_path).fit(3, resume="checkpoint")


def test_a_checkpoint_between_the_batches_of_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stateful(tmp_path).fit(3, cbs=[GradientAccumulation(2), killed(8)])
    with pytest.raises(OptionError, match=r"saved within epoch 1.*`after_batch`, after a step"):
        stateful(tmp_path).fit(3, resume="checkpoint")


def test_what_does_not_fit_within_an_epoch_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stateful(tmp_path).fit(3, cbs=killed(7))
    learn, other = learner(tmp_path), stateful(tmp_path)
    drawn = torch.get_rng_state()

    with pytest.raises(OptionError, match=r"training loader has no state_dict\(\) and load_state"):
        learn.fit(3, resume="checkpoint")
    with pytest.raises(OptionError, match=r"fit\(1, resume=…\): 1 epochs are done.*and a part of"):
        other.fit(1, resume="checkpoint")

    assert torch.get_rng_state().equal(drawn)
    assert learn.n_steps == other.n_steps == 0


def test_a_cancel_before_the_epoch_drops_the_rest_of_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stateful(tmp_path).fit(3, cbs=killed(7))
    learn = stateful(tmp_path)

    def cancel(cb: Callback) -> None:
        if cb.epoch == 1:
            raise CancelTrainException

    learn.fit(3, cbs=Callback(before_train=cancel), resume="checkpoint")

    assert learn.recorder.iters == [5, 7, 10]


@pytest.mark.parametrize("loader", [Shuffled, torchdatas, torchdatas_workers])
def test_saving_within_an_epoch_changes_nothing(loader: Any, tmp_path: Path) -> None:
    whole, saving = stateful(tmp_path, loader), stateful(tmp_path, loader)
    torch.manual_seed(0)
    whole.fit(2)
    torch.manual_seed(0)
    saving.fit(2, cbs=Callback(after_batch=lambda cb: cb.learn.save("now")))

    assert_same(whole, saving)


def test_a_metric_that_no_file_can_hold_is_named_where_it_matters(tmp_path: Path) -> None:
    class Odd(Sum):
        def reset(self) -> None:
            super().reset()
            self.kept = Path()

    options: dict[str, Any] = {"metrics": [Odd()], "cbs": [Recorder(train_metrics=True)]}
    learner(tmp_path, **options).fit(1, cbs=saves())

    with pytest.raises(OptionError, match=r"save\('now'\): pathlib.*cannot be loaded again"):
        stateful(tmp_path, **options).fit(1, cbs=saves())


def saves() -> Callback:
    return Callback(after_batch=lambda cb: cb.learn.save("now"))
