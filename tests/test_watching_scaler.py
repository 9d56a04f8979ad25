"""A GradScaler in a watched loop: what a step that it skips means for the record.

An ordinary optimizer is then not called: for the watcher that is accumulation, which is right:
the weights are the same. The batch counts for the next step's record, once; its gradients do not. A
fused optimizer is called and does not change the weights: a step that moves nothing.
"""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import (
    ActivationStats,
    GradientStats,
    HookkitWarning,
    ParamStats,
    watch,
)

BATCH, N = 16, 24


def train(
    *, skips=(), scaler=None, given=False, fused=False, zero_late=False, every=None, left_out=()
):
    """Batches, and what is recorded of a loop in which some batches' loss is scaled to Inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-2, fused=fused)
    given_one = scaler if given else None
    grads = GradientStats(True, every=every, of="both", scaler=given_one)
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
                if i not in left_out:
                    loss.backward()
                    opt.step()
            else:
                (scaler.scale(loss) * (math.inf if i in skips else 1.0)).backward()
                scaler.step(opt)
                scaler.update()
    return w, outputs, weights


def scaler_of(scale=1024.0):
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


@pytest.mark.parametrize("given", [False, True])
def test_its_gradients_are_in_no_record(given):
    w, _, _ = train(skips=(0, 5), scaler=scaler_of(), given=given)
    outputs, params = w.gradient_stats.record(), w.param_stats.record()

    assert (outputs.values["count"][0] == BATCH * 8).all()
    assert not outputs.values["nonfinite"].any()
    assert not params.values["nonfinite"].any()
    assert (params.values["update_norm"] > 0).all()


def test_parameters_gradients_are_unscaled_also_if_the_scaler_is_not_given():
    plain, _, _ = train()
    for given in (False, True):
        w, _, _ = train(scaler=scaler_of(), given=given)
        scaled, unscaled = w.gradient_stats.record(), plain.gradient_stats.record()
        rows = [i for i, name in enumerate(scaled.names) if "." in name]

        np.testing.assert_allclose(
            scaled.values["rms"][rows], unscaled.values["rms"][rows], rtol=1e-3
        )
        np.testing.assert_allclose(
            w.param_stats.record().values["grad_norm"],
            plain.param_stats.record().values["grad_norm"],
            rtol=1e-3,
        )


@pytest.mark.slow
@pytest.mark.parametrize("skips", [(), (0, 1, 7)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_outputs_gradients_are_unscaled_from_the_first_step_on(given, fused, skips):
    skips = () if fused else skips
    made = [i for i in range(N) if i not in skips]
    plain, _, _ = train(fused=fused, left_out=skips)
    under, _, _ = train(scaler=scaler_of(), given=given, fused=fused, skips=skips)
    want, got = plain.gradient_stats.record(), under.gradient_stats.record()

    assert len(got) == len(made)
    for name in ("rms", "min", "max", "near_zero"):
        np.testing.assert_allclose(got.values[name], want.values[name], rtol=1e-3, atol=1e-7)
    np.testing.assert_array_equal(got.hist.sum(1), want.hist.sum(1))
    assert got.meta["unscaled"]
    assert not want.meta["unscaled"]


def step_of(model, opt, scaler, x, n=1, clip=False, times=1.0):
    """One step of `n` batches, as PyTorch's AMP examples make it."""
    for part in x.chunk(n):
        loss = model(part).square().mean() * times / n
        (loss if scaler is None else scaler.scale(loss)).backward()
    if clip:
        if scaler is not None:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step() if scaler is None else scaler.step(opt)
    if scaler is not None:
        scaler.update()
    opt.zero_grad()


def recorded(scaler, steps=4, stats=GradientStats, **how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.001)
    with watch(model, opt, cb := stats()):
        for _ in range(steps):
            step_of(model, opt, scaler, torch.randn(BATCH, 4), **how)
    return cb.record().value("rms")


@pytest.mark.parametrize("how", [{"n": 4}, {"clip": True}, {"n": 2, "clip": True}])
def test_accumulation_and_clipping_change_nothing_of_it(how):
    np.testing.assert_allclose(recorded(scaler_of(), **how), recorded(None, **how), rtol=1e-4)


def test_a_scaler_for_each_of_two_turns_is_distinguished():
    def run(scalers):
        torch.manual_seed(0)
        nets = [nn.Linear(4, 8), nn.Linear(8, 3)]
        opts = [torch.optim.SGD(m.parameters(), 0.1) for m in nets]
        with watch(nets, opts, cb := GradientStats()):
            for i in range(8):
                y = nets[1](nets[0](torch.randn(BATCH, 4)))
                loss = y.square().mean()
                (scalers[i % 2].scale(loss) if scalers else loss).backward()
                scalers[i % 2].step(opts[i % 2]) if scalers else opts[i % 2].step()
                if scalers:
                    scalers[i % 2].update()
                for opt in opts:
                    opt.zero_grad()
        return cb.record()

    plain = run([])
    with pytest.warns(HookkitWarning, match="made with another GradScaler than"):
        under = run([scaler_of(64.0), scaler_of(1024.0)])

    missed = sorted({*plain.steps.tolist()} - {*under.steps.tolist()})
    assert missed == [1]
    np.testing.assert_allclose(
        under.values["rms"], np.delete(plain.values["rms"], missed, 1), rtol=1e-4
    )


def test_a_scaler_made_during_the_training_costs_one_record_and_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.0)
    scaler, x = None, torch.randn(BATCH, 4)

    with watch(model, opt, both := GradientStats(of="both"), outs := GradientStats()):
        step_of(model, opt, None, x)
        scaler = scaler_of()
        with pytest.warns(HookkitWarning, match=r"step 1 .* give it: GradientStats\(scaler=sc"):
            step_of(model, opt, scaler, x)
        step_of(model, opt, scaler, x)

    rms = outs.record().value("rms")
    assert outs.record().steps.tolist() == [0, 2]
    np.testing.assert_allclose(rms[:, 0], rms[:, 1], rtol=1e-4)
    assert np.isnan(both.record().value("rms", "0")[1])
    np.testing.assert_allclose(
        both.record().value("rms", "0.weight"),
        3 * [both.record().value("rms", "0.weight")[0]],
        rtol=1e-4,
    )


def test_a_scaler_that_unscales_before_a_step_of_the_loops_own_is_found():
    def run(scaler):
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

    np.testing.assert_allclose(run(scaler_of()), run(None), rtol=1e-4)


def test_accelerates_own_scaler_is_found():
    accelerate = pytest.importorskip("accelerate")

    def run(scaler):
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

    assert plain.shape == (2, 3)
    np.testing.assert_allclose(under, plain, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")  # fastai's own
def test_fastais_own_scaler_is_found():
    pytest.importorskip("fastai")
    from fastai.callback.fp16 import MixedPrecision
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    class Half(MixedPrecision):
        def before_fit(self):
            super().before_fit()
            self.autocast, self.learn.scaler = nullcontext(), scaler_of()  # not for a GPU

    def run(*more):
        torch.manual_seed(0)
        x = torch.randn(4, BATCH, 4)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        cb, dls = GradientStats(), DataLoaders([(b, b) for b in x], [])
        learn = Learner(dls, model, nn.MSELoss(), OptimWrapper, lr=0.001, cbs=list(more))
        learn.opt_func = lambda p, lr: OptimWrapper(p, torch.optim.SGD, lr=lr)
        with learn.no_logging(), watch(model, None, cb):
            learn.fit(1)
        return cb.record().value("rms")

    under, plain = run(Half()), run()

    assert plain.shape == (2, 4)
    np.testing.assert_allclose(under, plain, rtol=1e-4)


def test_a_fused_optimizer_makes_a_step_that_moves_nothing_and_alarms_nobody():
    w, _, _ = train(skips=(12,), scaler=scaler_of(), given=True, fused=True)
    params = w.param_stats.record()

    assert w.n_steps == N
    assert (params.values["update_norm"][:, 12] == 0).all()
    assert (params.values["update_norm"][:, [11, 13]] > 0).all()
    assert w.diagnose().healthy
    assert [f.rule for f in w.diagnose()] == ["non_finite"]
