"""A GradScaler in a loop that is watched: what a step that it leaves out means for the record.

An ordinary optimizer is then not called: the watcher cannot tell it from accumulation, and need
not, since the weights are the same. The batch counts to the next step's record, once; its gradients
do not. A fused optimizer is called and leaves the weights: a step that moves nothing.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import ActivationStats, GradientStats, ParamStats, watch

BATCH, N = 16, 24


def train(*, skips=(), scaler=None, given=False, fused=False, zero_late=False, every=None):
    """Batches, and what is recorded of a loop in which some batches' loss is scaled to Inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-2, fused=fused)
    grads = GradientStats(every=every, of="both", scaler=scaler if given else None)
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
        mine, theirs = w.gradient_stats.record(), plain.gradient_stats.record()
        rows = [i for i, name in enumerate(mine.names) if "." in name]

        np.testing.assert_allclose(mine.values["rms"][rows], theirs.values["rms"][rows], rtol=1e-3)
        np.testing.assert_allclose(
            w.param_stats.record().values["grad_norm"],
            plain.param_stats.record().values["grad_norm"],
            rtol=1e-3,
        )


def test_outputs_gradients_are_scaled_unless_the_scaler_is_given():
    plain, _, _ = train()
    blind, _, _ = train(scaler=scaler_of())
    told, _, _ = train(scaler=scaler_of(), given=True)
    rms, scaled, unscaled = (
        w.gradient_stats.record().value("rms", "2") for w in (plain, blind, told)
    )

    np.testing.assert_allclose(scaled, 1024 * rms, rtol=1e-3)
    np.testing.assert_allclose(unscaled, rms, rtol=1e-3)
    assert told.gradient_stats.record().meta["unscaled"]
    assert not blind.gradient_stats.record().meta["unscaled"]


def test_every_counts_the_steps_that_were_made():
    w, _, _ = train(skips=(2, 3, 4), scaler=scaler_of(), every=5)

    assert w.activation_stats.record().steps.tolist() == [0, 5, 10, 15, 20]
    assert w.param_stats.record().steps.tolist() == [0, 5, 10, 15, 20]


def test_a_fused_optimizer_makes_a_step_that_moves_nothing_and_alarms_nobody():
    w, _, _ = train(skips=(12,), scaler=scaler_of(), given=True, fused=True)
    params = w.param_stats.record()

    assert w.n_steps == N
    assert (params.values["update_norm"][:, 12] == 0).all()
    assert (params.values["update_norm"][:, [11, 13]] > 0).all()
    assert w.diagnose().healthy
    assert [f.rule for f in w.diagnose()] == ["non_finite"]
