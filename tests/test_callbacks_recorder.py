"""Recorder: losses, rates and metrics, read late, added to by fits alone."""

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from learners import plain, quiet
from torch import Tensor, nn

from hookkit import watch
from hookkit.callbacks import Callback, GradientAccumulation, Recorder
from hookkit.callbacks.events import (
    CancelBatchException,
    CancelTrainException,
    CancelValidException,
)
from hookkit.errors import ArgumentError
from hookkit.recorders import FlightRecorder


def mae(pred: Tensor, y: Tensor) -> Tensor:
    return (pred - y).abs().mean()


def raises(event: str, error: type[Exception], when: Any = lambda cb: True) -> Callback:
    def fail(self: Any) -> None:
        if when(self):
            raise error

    return Callback(**{event: fail})


class Keep(Callback):
    """The losses as they come, on the host: the slow way."""

    def __init__(self) -> None:
        self.train: list[float] = []

    def after_loss(self) -> None:
        if self.training:
            self.train.append(self.learn.loss.item())


def slow_smoothing(losses: list[float], beta: float = 0.98) -> list[float]:
    average, out = 0.0, []
    for n, loss in enumerate(losses, 1):
        average = beta * average + (1 - beta) * loss
        out.append(average / (1 - beta**n))
    return out


def test_losses_are_the_debiased_average_and_a_second_fit_adds_and_smooths_anew() -> None:
    keep = Keep()
    learn = quiet(cbs=keep)

    learn.fit(1)
    learn.fit(2, lr=0.5)

    rec = learn.recorder
    expected = slow_smoothing(keep.train[:3]) + slow_smoothing(keep.train[3:])
    np.testing.assert_allclose(rec.losses, expected, rtol=1e-12)
    assert learn.smooth_loss == pytest.approx(rec.losses[-1], rel=1e-12)
    assert rec.lrs == [1e-3] * 3 + [0.5] * 6
    assert rec.iters == [3, 6, 9]
    assert [row["epoch"] for row in learn.epochs] == [0, 0, 1]

    # losses by step are means over the batches of each
    learn.fit(1, cbs=GradientAccumulation(2))
    a, b, c = keep.train[9:]
    np.testing.assert_allclose(learn.run_record().losses[9:], [(a + b) / 2, c], rtol=1e-6)

    late = Recorder()  # of one fit, beside the other
    learn.fit(1, cbs=late)
    learn.fit(1)
    assert len(late.losses) == len(late.lrs) == late.iters[0] == 3
    assert len(rec.losses) == len(learn.losses) == 18
    assert len(learn.run_record().valid) == 6

    learn = quiet()  # a batch made by hand
    learn.create_opt()
    learn.training = True
    learn.one_batch(0, learn.dls.one_batch())
    assert learn.recorder.losses == pytest.approx([learn.smooth_loss])


def test_values_hold_train_loss_valid_loss_and_metrics_of_each_epoch() -> None:
    learn = quiet(metrics=[mae])

    learn.fit(2)

    rec = learn.recorder
    assert rec.metric_names == ["epoch", "train_loss", "valid_loss", "mae", "time"]
    assert [len(row) for row in rec.values] == [3, 3]
    preds, y = learn.get_preds()
    assert rec.values[-1][1] == pytest.approx(float(((preds - y) ** 2).mean()), rel=1e-5)
    assert rec.values[-1][2] == pytest.approx(float(mae(preds, y)), rel=1e-5)
    assert learn.final_record == rec.values[-1]
    assert rec.log[:1] == [1]
    assert rec.log[-1] == "00:00"

    before = (rec.losses, rec.values[:], rec.iters[:], rec.log[:], rec.lrs[:])
    learn.validate()
    assert (rec.losses, rec.values, rec.iters, rec.log, rec.lrs) == before


def test_metrics_are_means_over_samples_not_over_batches() -> None:
    batches = [(torch.zeros(n, 1), torch.full((n, 1), float(n))) for n in (1, 3)]
    learn = quiet(metrics=mae, model=nn.Identity())

    loss, metric = learn.validate(dl=batches)

    assert loss == pytest.approx((1 * 1 + 3 * 9) / 4)
    assert metric == pytest.approx((1 * 1 + 3 * 3) / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_and_metrics_in_half_precision_are_added_up_in_full(dtype: torch.dtype) -> None:
    # a sum of ones stops at 256 in bfloat16, and a sum of 512s is infinite in float16
    batches = [(torch.full((1, 1), 512.0, dtype=dtype), torch.ones(1, 1, dtype=dtype))] * 300

    def loss(pred: Tensor, y: Tensor) -> Tensor:
        return (pred * y).mean()

    learn = plain(None, nn.Identity(), loss_func=loss, metrics=[loss, lambda p, y: (y * 1).mean()])

    assert learn.validate(dl=batches) == [512.0, 512.0, 1.0]


def test_metrics_without_targets_are_means_over_samples_and_an_empty_batch_counts_nothing() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": x.mean(), "x": x}

    batches = [(torch.zeros(10, 1),), (torch.ones(2, 1),), (torch.ones(0, 1),)]
    learn = plain(None, Own(), metrics=lambda pred: pred["x"].mean())

    assert learn.validate(dl=batches) == pytest.approx([2 / 12, 2 / 12])


def test_a_list_of_dicts_as_targets_has_one_for_each_sample() -> None:
    def loss(pred: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([t["boxes"].sum() for t in targets]).mean()

    def batch(*n_boxes: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        return [torch.ones(1)] * len(n_boxes), [{"boxes": torch.ones(n)} for n in n_boxes]

    learn = plain(None, nn.Identity(), loss_func=loss, metrics=loss)

    assert learn.validate(dl=[batch(0, 9, 9), batch(6)]) == [6.0, 6.0]


class Counting:
    """A metric in torchmetrics' form."""

    def __init__(self) -> None:
        self.n = 0

    def reset(self) -> None:
        self.n = 0

    def update(self, pred: Tensor, y: Tensor) -> None:
        self.n += len(pred)

    def compute(self) -> Tensor:
        return torch.tensor(self.n)


def test_an_object_or_class_with_update_and_compute_is_a_metric_by_its_class_or_name() -> None:
    class Named(Counting):
        name = "how_many"

    learn = quiet(metrics=[Counting(), Named, mae])

    learn.fit(2)  # reset in between

    assert learn.recorder.metric_names[3:-1] == ["counting", "how_many", "mae"]
    assert [row["how_many"] for row in learn.epochs] == [32, 32]
    assert [row["counting"] for row in learn.epochs] == [32, 32]


def test_torchmetrics_are_metrics_and_each_of_a_collection_is_a_column() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    one = torchmetrics.MeanAbsoluteError()
    several = {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()}
    both = torchmetrics.MetricCollection(several, prefix="my_")
    learn = quiet(metrics=[one, both, torchmetrics.MeanSquaredError, mae])

    learn.fit(2)

    row = learn.epochs[-1]
    assert (row["meanabsoluteerror"], row["my_mae"]) == pytest.approx([row["mae"]] * 2)
    assert (row["my_mse"], row["meansquarederror"]) == pytest.approx([row["valid_loss"]] * 2)
    assert len(learn.recorder.log) == len(learn.recorder.metric_names) == 9


def at_most(pred: Tensor, y: Tensor, n: int) -> Tensor:
    return pred.mean() * 0 + n


def test_two_metrics_of_one_name_are_refused_until_one_has_a_name_of_its_own() -> None:
    one, two = partial(at_most, n=1), partial(at_most, n=2)
    learn = quiet(metrics=[one, two])

    with pytest.raises(ArgumentError, match="the name at_most is there twice"):
        learn.fit(1)
    assert learn.recorder.values == learn.recorder.metric_names == []

    for name in ("valid_loss", "step"):
        two.name = name  # type: ignore[attr-defined]
        with pytest.raises(ArgumentError, match=f"the name {name} is there twice"):
            learn.fit(1)

    two.name = "at_most_2"  # type: ignore[attr-defined]
    learn.fit(1)
    row = learn.epochs[0]
    assert (row["at_most"], row["at_most_2"]) == (1, 2)


def test_a_cancelled_batch_records_nothing_and_a_part_cancelled_as_it_began_is_none() -> None:
    learn = quiet(cbs=raises("after_loss", CancelBatchException, lambda cb: cb.iter == 1))
    learn.fit(1)
    assert len(learn.recorder.losses) == len(learn.recorder.lrs) == 2
    assert learn.recorder.iters == [2]

    learn.fit(1, cbs=raises("before_train", CancelTrainException))
    assert learn.recorder.values[-1][0] is None

    learn.fit(1, cbs=raises("before_validate", CancelValidException))
    assert learn.recorder.values[-1][1] is None
    assert learn.recorder.values[-1][0] is not None


@pytest.mark.parametrize("n_acc", [1, 4])
def test_an_epochs_train_loss_is_the_mean_over_its_steps_as_in_watch(n_acc: int) -> None:
    data = [(torch.full((2, 1), float(i)), torch.zeros(2, 1)) for i in range(10)]
    learn = plain((data, None), nn.Linear(1, 1), loss_func=nn.MSELoss(), lr=0.0)
    model = copy.deepcopy(learn.model)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)

    learn.fit(2, cbs=GradientAccumulation(n_acc))
    with watch(model, opt) as w:
        for _ in range(2):
            for i, (x, y) in enumerate(data):
                loss = nn.functional.mse_loss(model(x), y)
                w.loss(loss)
                loss.backward()
                if i % n_acc == n_acc - 1 or i == 9:
                    opt.step()
            w.epoch()

    run, watched = learn.run_record(), w.run_record()
    mean = run.losses[: len(run.losses) // 2].mean()
    for row, other in zip(run.valid, watched.valid, strict=True):
        assert row["train_loss"] == pytest.approx(mean, rel=1e-12)
        assert other["train_loss"] == pytest.approx(mean, rel=1e-6)


def test_a_learning_rate_in_a_tensor_is_kept_as_it_was_at_each_batch() -> None:
    def grow(cb: Any) -> None:
        cb.learn.opt.param_groups[-1]["lr"].mul_(2)

    learn = quiet()
    learn.create_opt()
    learn.opt.param_groups[-1]["lr"] = torch.tensor(0.0)
    grows = Callback(after_batch=lambda cb: cb.training and grow(cb))
    grows.order = 60

    learn.fit(1, lr=0.5, cbs=grows)

    assert learn.recorder.lrs == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("watched", [False, True])
def test_batches_without_a_finite_loss_are_counted(watched: bool) -> None:
    model = nn.Linear(1, 1)
    xs = [torch.full((2, 1), float("nan") if i in (2, 5) else 1.0) for i in range(8)]
    if watched:
        opt = torch.optim.SGD(model.parameters(), 0.0)
        with watch(model, opt) as run:
            for x in xs:
                run.loss(loss := model(x).mean())
                if loss.isfinite():  # as a GradScaler does
                    loss.backward()
                    opt.step()
    else:
        run = plain(([(x, x) for x in xs], None), model, loss_func=nn.MSELoss(), lr=0.0)
        run.fit(1)

    assert run.run_record().info["nan_losses"] == [2 if watched else 8 - 2, 8]


@pytest.mark.parametrize("n_acc", [1, 2])
def test_a_skipped_step_leaves_the_losses_and_their_average_alone(n_acc: int) -> None:
    xs = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
    spoiled = xs.clone()
    spoiled[4] = float("nan")
    left_out = range(4, 4 + n_acc)  # the batches of that step

    def trained(batches: list[Tensor]) -> Any:
        read = Callback(after_batch=lambda cb: cb.learn.recorder.smooth_loss)
        read.order = 60  # after the Recorder
        cbs = [GradientAccumulation(n_acc), FlightRecorder("skip"), read]
        torch.manual_seed(0)
        dls = [(x, x[:, :1]) for x in batches], None
        learn = plain(dls, nn.Linear(3, 1), loss_func=nn.MSELoss(), lr=0.1, cbs=cbs)
        learn.fit(2)
        return learn

    learn = trained([*spoiled])

    whole = trained([x for i, x in enumerate(xs) if i not in left_out])
    truth = whole.recorder
    assert learn.n_steps == 2 * (8 // n_acc - 1)
    np.testing.assert_allclose(learn.recorder.losses, truth.losses, rtol=1e-6)
    np.testing.assert_allclose(learn.run_record().losses, whole.run_record().losses, rtol=1e-6)
    assert (learn.recorder.lrs, learn.recorder.iters) == (truth.lrs, truth.iters)
    assert [v[0] for v in learn.recorder.values] == pytest.approx([v[0] for v in truth.values])


def test_nothing_is_read_from_the_device_during_an_epoch(monkeypatch: Any) -> None:
    reads: list[int] = []
    learn = quiet(n_trn=4, metrics=mae, cbs=Callback(after_train=lambda cb: reads.append(-1)))
    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__"):
        real = getattr(Tensor, name)

        def spy(self: Tensor, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            reads.append(learn.iter if learn.xb[0] is not None else -2)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, spy)

    seen: list[list[int]] = []
    learn.add_cb(Callback(after_batch=lambda cb: seen.append(reads[:])))
    learn.fit(1)

    per_batch = [b[len(a) :] for a, b in pairwise(seen[:4])]
    assert per_batch == [[], [], []]
