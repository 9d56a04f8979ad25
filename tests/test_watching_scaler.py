"""A GradScaler in a watched loop: what a step that it skips means for the record.

An ordinary optimizer is then not called: for `watch` that is accumulation, which is right, as the
weights are the same. The batch counts for the next step's record, once; its gradients do not.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import (
    ActivationStats,
    Callback,
    CancelStepException,
    GradientStats,
    ParamStats,
    watch,
)
from hookkit.testing import synth_learner

BATCH, N = 16, 24


def train(*, skips=(), scaler=None, given=False, zero_late=False, every=None):
    """Batches, and what is recorded of a loop in which some batches' loss is scaled to Inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    grads = GradientStats(True, every=every, scaler=scaler if given else None)
    outputs, weights = [], []
    model[0].register_forward_hook(lambda m, i, o: outputs.append(o.detach().clone()))
    with watch(model, opt, ActivationStats(every=every), grads, ParamStats(every=every)) as w:
        for i in range(N):
            x = torch.randn(BATCH, 4)
            weights.append(model[0].weight.detach().clone())
            if not zero_late:
                opt.zero_grad()
            scores = model(x)
            if zero_late:
                opt.zero_grad()
            loss = F.cross_entropy(scores, x[:, :3].argmax(1))
            w.loss(loss)
            if scaler is None:
                loss.backward()
                opt.step()
            else:
                (scaler.scale(loss) * (math.inf if i in skips else 1.0)).backward()
                scaler.step(opt)
                scaler.update()
    return w, outputs, weights


def scaler_of(scale: float = 1024.0) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("zero_late", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_batch_whose_step_was_left_out_counts_once_with_the_next(given, zero_late):
    skips = (0, 1, 7, N - 1)
    w, outputs, weights = train(skips=skips, scaler=scaler_of(), given=given, zero_late=zero_late)
    record = w.activation_stats.record()

    groups = [[0, 1, 2], *([i] for i in range(3, 7)), [7, 8], *([i] for i in range(9, N - 1))]
    assert w.n_steps == len(record) == len(groups)
    for column, group in enumerate(groups):
        seen = torch.cat([outputs[i] for i in group]).double()
        assert all(torch.equal(weights[i], weights[group[0]]) for i in group)
        assert record.values["count"][0, column] == seen.numel()
        assert record.values["mean"][0, column] == pytest.approx(seen.mean().item(), abs=1e-6)
    assert len(w.losses) == len(groups)
    assert np.isfinite(w.losses).all()


def test_gradients_of_a_step_that_was_left_out_are_in_no_record():
    w, _, _ = train(skips=(0, 5), scaler=scaler_of(), given=True)
    outputs, params = w.gradient_stats.record(), w.param_stats.record()

    assert (outputs.values["count"][0] == BATCH * 8).all()
    assert not outputs.values["nonfinite"].any()
    assert not params.values["nonfinite"].any()
    assert (params.values["update_norm"] > 0).all()


@pytest.mark.parametrize("given", [False, True])
def test_gradients_are_recorded_without_the_scale(given):
    """A scaler that is not given is known from the first step on."""
    plain, under = train()[0], train(scaler=scaler_of(), given=given)[0]
    want, got = plain.gradient_stats.record(), under.gradient_stats.record()
    first = 0 if given else 1

    assert got.steps.tolist() == list(range(first, N))
    for name in ("rms", "min", "max", "near_zero"):
        expected = want.values[name][:, first:]
        np.testing.assert_allclose(got.values[name], expected, rtol=1e-3, atol=1e-7)
    norms = (w.param_stats.record().value("grad_norm") for w in (under, plain))
    np.testing.assert_allclose(*norms, rtol=1e-3)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_accumulation_and_clipping_change_nothing_of_it(n: int, clip: bool):
    def recorded(scaler: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), 0.001)
        with watch(model, opt, cb := GradientStats(scaler=scaler)):
            for _ in range(4):
                for part in torch.randn(BATCH, 4).chunk(n):
                    loss = model(part).square().mean() / n
                    (loss if scaler is None else scaler.scale(loss)).backward()
                if clip:
                    if scaler is not None:
                        scaler.unscale_(opt)
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                opt.step() if scaler is None else scaler.step(opt)
                if scaler is not None:
                    scaler.update()
                opt.zero_grad()
        return cb.record().value("rms")

    np.testing.assert_allclose(recorded(scaler_of()), recorded(None), rtol=1e-4)


def test_a_scaler_that_unscales_before_a_step_of_the_loops_own_is_found():
    """As fastai's MixedPrecision does it."""

    def run(scaler: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        opt = torch.optim.SGD(model.parameters(), 0.001)
        with watch(model, opt, cb := GradientStats()):
            for _ in range(3):
                loss = model(torch.randn(BATCH, 4)).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is not None:
                    scaler.unscale_(opt)
                opt.step()
                opt.zero_grad()
                if scaler is not None:
                    scaler.update()
        return cb.record().value("rms")

    np.testing.assert_allclose(run(scaler_of()), run(None)[:, 1:], rtol=1e-4)


def test_accelerates_own_scaler_is_found():
    accelerate = pytest.importorskip("accelerate")

    def run(scaler: Any) -> Any:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        accelerator.scaler = scaler  # it makes one itself on a GPU only
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        made = torch.optim.SGD(model.parameters(), 0.001)
        net, opt = accelerator.prepare(model, made)
        with watch(net, opt, cb := GradientStats()):
            for _ in range(6):
                with accelerator.accumulate(net):
                    accelerator.backward(net(torch.randn(BATCH, 4)).square().mean())
                    opt.step()
                    opt.zero_grad()
        return cb.record().value("rms")

    under, plain = run(scaler_of()), run(None)

    np.testing.assert_allclose(under, plain[:, 1:], rtol=1e-4)


def test_a_learners_scaler_is_found_wherever_a_callback_keeps_it() -> None:
    class MixedPrecision(Callback):
        def before_fit(self) -> None:
            self.grad_scaler = scaler_of()

        def before_backward(self) -> None:
            self.learn.loss_grad = self.grad_scaler.scale(self.learn.loss_grad)

        def before_step(self) -> None:
            self.grad_scaler.step(self.learn.opt)
            self.grad_scaler.update()
            raise CancelStepException

    found = []
    for more in ([], [MixedPrecision]):
        torch.manual_seed(0)
        learn = synth_learner(cbs=[GradientStats(modules=""), *more])
        with learn.no_logging():
            learn.fit(2)
        found.append(learn.gradient_stats.record().value("rms"))

    # the first record is missing: the scaler is known from its step on
    np.testing.assert_allclose(found[1], found[0][:, 1:], rtol=1e-4)
