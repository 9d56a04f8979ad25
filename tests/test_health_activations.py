"""Rules on what layers give: input_scale, bad_init, dropout."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import EVEN, FLAT, acts, alarms, falling, first, found, weights
from torch import nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run


def test_bad_init_follows_the_depth():
    types = ("Linear",) * 8
    shrinking = [10.0**-i for i in range(8)]

    f = found(Run(acts(types, std=shrinking), losses=FLAT), "bad_init")

    assert f.severity == "error"
    assert "shrinks" in f.evidence
    assert "bad_init" not in alarms(Run(acts(types, std=shrinking), losses=falling()))
    assert alarms(Run(acts(types, std=[1, 9, 1, 9, 1, 9, 1, 1]))) == set()


def test_inputs_are_named_before_what_they_saturate():
    given = {"predecessors": {"0.weight": ""}, "given_rms": [80.0, np.nan, np.nan]}
    big = acts(("Linear", "Tanh", "Linear"), saturated=[0, 0.95, 0])
    wide = acts(("Linear", "Linear", "Linear"))
    big, wide = (dataclasses.replace(a, meta={**a.meta, **given}) for a in (big, wide))
    still = weights(3, update_norm=[1, 0, 1], grad_norm=[1, 0, 1])

    assert first(Run(big, losses=falling())) == "input_scale"
    assert first(Run(wide, params=still, losses=falling())) == "input_scale"


def dropped(rate):
    made = acts()
    return dataclasses.replace(made, meta={**made.meta, "dropout": {"a.drop": 0.1, "b.drop": rate}})


def test_dropout_that_keeps_almost_nothing_is_named_whatever_the_loss_does():
    assert first(Run(dropped(0.9), losses=FLAT)) == "dropout"
    assert alarms(Run(dropped(0.9), losses=falling())) == {"dropout"}
    assert found(Run(dropped(0.9), losses=FLAT), "dropout").layers == ("b.drop",)
    assert "dropout" not in alarms(Run(dropped(0.7), losses=FLAT))


def test_a_rate_of_dropout_is_read_from_the_model():
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.95), nn.Linear(16, 1))

    assert "dropout" in alarms(trained(net))
    net[2].p = 0.3
    assert "dropout" not in alarms(trained(net))


def trained(net):
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt, ActivationStats()) as w:
        for _ in range(60):
            x = torch.randn(32, 4)
            loss = F.mse_loss(net(x), x[:, :1])
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
    return w.run_record()


DEFAULT = acts(("Linear",) * 5, std=[1, 0.5, 0.2, 0.08, 1])


def test_the_variance_that_pytorchs_own_weights_give_is_no_finding():
    assert "bad_init" not in diagnose(Run(DEFAULT, losses=FLAT)).rules


def test_weights_that_begin_too_large_come_before_their_effects():
    grows = acts(("Linear",) * 5, std=[1, 12, 150, 1500, 1], nonfinite=[0, 0, 0, 0, EVEN])
    run = Run(grows, params=weights(update_ratio=[2.0] * 4), losses=FLAT)

    assert [f.rule for f in diagnose(run)][:3] == ["bad_init", "non_finite", "lr_too_high"]


@pytest.mark.parametrize(("gain", "seen"), [(4.0, set()), (6.0, {"bad_init"})])
def test_weights_that_begin_with_a_gain_above_5_are_too_large(gain, seen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=gain / 8)
    opt = torch.optim.SGD(model.parameters(), 1e-4)
    with watch(model, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(12):
            opt.zero_grad()
            model(torch.randn(32, 64)).pow(2).mean().backward()
            opt.step()

    assert alarms(w.run_record()) & {"bad_init"} == seen
