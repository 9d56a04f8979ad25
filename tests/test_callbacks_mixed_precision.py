"""`MixedPrecision`: autocast, a scaled loss, and steps that are left out."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hookkit import (
    ActivationStats,
    Callback,
    CancelBackwardException,
    CancelBatchException,
    CancelStepException,
    GradientAccumulation,
    GradientClip,
    GradientStats,
    Learner,
    MixedPrecision,
    ParamStats,
    SchedulerCallback,
)

SCALE = 256.0  # torch's first scale overflows in the first steps: it is found by trial
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
BATCHES = [(x, x.sum(1, keepdim=True)) for x in X.split(2)]


def learner(*cbs: Any, valid: Any = None, **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    kwargs = {"opt_func": torch.optim.SGD, "lr": 0.05, **kwargs}
    learn = Learner((BATCHES, valid), model, nn.MSELoss(), cbs=list(cbs), **kwargs)
    learn.logger = lambda row: None
    return learn


def weights(learn: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])


class Overflow(Callback):
    """Makes the gradients of some batches infinite."""

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def after_loss(self) -> None:
        if self.learn.training and self.learn.train_iter in self.batches:
            self.learn.loss_grad = self.learn.loss_grad * math.inf


def reference(dtype: torch.dtype, n_acc: int = 1, max_norm: float | None = None) -> torch.Tensor:
    """The same training, as torch's "Automatic Mixed Precision examples" write it."""
    learn = learner()
    model, opt = learn.model, torch.optim.SGD(learn.model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype is torch.float16)
    for i, (x, y) in enumerate(BATCHES):
        n = min(n_acc, len(BATCHES) - i // n_acc * n_acc)  # the last step has what is left
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = nn.functional.mse_loss(model(x).float(), y) / n
        scaler.scale(loss).backward()
        if (i + 1) % n_acc == 0 or i + 1 == len(BATCHES):
            if max_norm is not None:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return weights(learn)


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize("n_acc", [1, 4])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_it_trains_as_torchs_own_recipe_does(mode: str, n_acc: int, max_norm: float | None) -> None:
    cbs: list[Any] = [] if max_norm is None else [GradientClip(max_norm)]
    options = {"init_scale": SCALE} if mode == "fp16" else {}
    learn = learner(MixedPrecision(mode, **options), GradientAccumulation(n_acc), *cbs)

    learn.fit(1)

    dtype = torch.float16 if mode == "fp16" else torch.bfloat16
    assert torch.equal(weights(learn), reference(dtype, n_acc, max_norm))
    assert not torch.equal(weights(learn), reference(torch.float32, n_acc, max_norm))


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_layers_run_in_half_precision_also_after_a_validation_within_a_batch(mode: str) -> None:
    seen: list[Any] = []
    within: list[bool] = []

    def check(cb: Any) -> None:
        cb.learn.validate()
        within.append(torch.is_autocast_enabled("cpu"))

    inner = Callback(after_pred=check)
    inner.run_valid = False
    learn = learner(MixedPrecision(mode), inner, valid=BATCHES[:1])
    learn.model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))

    learn.fit(1)
    preds, _ = learn.get_preds()

    assert seen == [torch.float16 if mode == "fp16" else torch.bfloat16] * (6 + 6 + 1 + 1)
    assert within == [True] * 6
    assert not torch.is_autocast_enabled("cpu")
    assert preds.dtype is torch.float32
    assert {p.dtype for p in learn.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_layers_run_in_full_precision_once_the_callback_is_removed(mode: str) -> None:
    seen: list[Any] = []

    def remove(cb: Any) -> None:
        if cb.learn.iter == 2:
            cb.learn.remove_cbs(MixedPrecision)

    learn = learner(MixedPrecision(mode), Callback(before_batch=remove))
    learn.model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))

    learn.fit(1)

    assert [dtype is torch.float32 for dtype in seen] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("fused", [False, True])  # which steps, and does nothing
def test_a_step_that_overflows_is_left_out_and_nothing_moves(fused: bool) -> None:
    schedule = SchedulerCallback(lambda opt, n: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5))
    seen: list[Any] = []
    note = Callback(after_step=lambda cb: seen.append((cb.learn.stepped, weights(cb.learn))))
    params, acts, grads = ParamStats(), ActivationStats(), GradientStats()
    learn = learner(
        *(MixedPrecision(init_scale=SCALE), Overflow(0, 3), schedule, GradientClip(), note),
        *(params, acts, grads),
        opt_func=partial(torch.optim.SGD, fused=fused),
    )

    learn.fit(1)

    assert [stepped for stepped, _ in seen] == [False, True, True, False, True, True]
    assert torch.equal(seen[3][1], seen[2][1])
    assert learn.n_steps == 4 == schedule.scheduler.last_epoch
    assert len(learn.run_record().losses) == 4
    assert weights(learn).isfinite().all()
    for recorder in (params, acts, grads):
        assert recorder.record().steps.tolist() == [0, 1, 2, 3]
        assert not recorder.record().values["nonfinite"].any()


@pytest.mark.parametrize(
    ("event", "kind", "n_steps"),
    [
        ("before_step", CancelStepException, 5),
        ("before_step", CancelBatchException, 5),
        ("after_step", CancelBatchException, 6),
        ("after_pred", CancelBatchException, 5),
        ("before_backward", CancelBackwardException, 5),
    ],
)
def test_the_batches_after_a_cancelled_one_are_trained(event: str, kind: Any, n_steps: int) -> None:
    def cancel(cb: Any) -> None:
        if cb.learn.iter == 1:
            raise kind

    learn = learner(MixedPrecision(init_scale=SCALE), Callback(**{event: cancel}))

    learn.fit(1)

    assert learn.n_steps == n_steps
