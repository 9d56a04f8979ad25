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


def train(scaler: Any, skips: tuple[int, ...], given: bool, zero_late: bool) -> Any:
    """A watcher, outputs and weights of a loop in which some batches' loss is scaled to Inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    grads = GradientStats(True, scaler=scaler if given else None)
    outputs, weights = [], []
    model[0].register_forward_hook(lambda m, i, o: outputs.append(o.detach().clone()))
    with watch(model, opt, ActivationStats(), grads, ParamStats()) as w:
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
    w, outputs, weights = train(scaler_of(), skips, given, zero_late)
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
