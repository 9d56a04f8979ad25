"""Rules on what layers give: input_scale, bad_init, dropout."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import EVEN, FLAT, acts, alarms, falling, first, first_layer, found, weights
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


def test_input_scale_is_seen_in_the_first_layer():
    big = acts(rms=[80, 40, 1], std=[80, 40, 1])

    assert found(Run(big, losses=falling()), "input_scale").layers == ("0",)
    assert alarms(Run(acts(("Linear", "BatchNorm1d", "Linear"), std=[80, 1, 1]))) == set()


def test_inputs_are_named_before_what_they_saturate():
    big = acts(("Linear", "Tanh", "Linear"), rms=[80, 1, 1], std=[80, 1, 1], saturated=[0, 0.95, 0])

    still = weights(3, update_norm=[1, 0, 1], grad_norm=[1, 0, 1])
    wide = acts(("Linear", "Linear", "Linear"), rms=[80, 1, 1], std=[80, 1, 1])

    assert first(Run(big, losses=falling())) == "input_scale"
    assert first(Run(wide, params=still, losses=falling())) == "input_scale"


def test_a_head_behind_a_recurrence_is_given_no_inputs():
    big = acts(("GRU", "Linear"), rms=[1, 80], mean=[0, 0], std=[1, 1], min=[0, 0], max=[1, 1],
               zero=[0, 0], nonfinite=[0, 0])  # fmt: skip

    assert alarms(Run(big, losses=falling())) == set()


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


def test_the_variance_that_pytorchs_own_weights_give_is_a_note():
    assert found(Run(DEFAULT, losses=FLAT), "bad_init").severity == "note"
    grows = acts(("Linear",) * 5, std=[1, 2, 5, 12.5, 1])

    assert found(Run(grows, losses=FLAT), "bad_init").severity == "warning"


def test_weights_that_begin_too_large_come_before_their_effects():
    grows = acts(("Linear",) * 5, std=[1, 12, 150, 1500, 1], nonfinite=[0, 0, 0, 0, EVEN])
    run = Run(grows, params=weights(update_ratio=[2.0] * 4), losses=FLAT)

    assert [f.rule for f in diagnose(run)][:3] == ["bad_init", "non_finite", "lr_too_high"]


def test_one_bias_for_all_units_is_no_large_input():
    shut = acts(rms=[20.5, 1, 1], mean=[-20, 0, 0], std=[1, 1, 1])

    assert "input_scale" not in diagnose(Run(shut, losses=FLAT)).rules


def test_the_bias_of_one_unit_is_no_large_input():
    gate = acts(rms=[25.1, 1, 1], std=[21.8, 1, 1])  # four units, one of them with a bias of 50
    bias = np.array([1.0, 50.0, 1.0, 1.0])
    shut = first_layer(0.1, weight_norm=[1.0, 50.0, 1.0, 1.0])
    shut = dataclasses.replace(shut, meta={**shut.meta, "numel": [80, 4, 256, 256]})
    open_ = first_layer(0.1, weight_norm=list(bias / 50))

    assert "input_scale" not in diagnose(Run(gate, params=shut, losses=FLAT)).rules
    assert "input_scale" in diagnose(Run(gate, params=open_, losses=FLAT)).rules


def test_growth_is_seen_though_the_first_layer_is_registered_last():
    grows = list(np.geomspace(0.7, 1800, 16))
    first_last, mixed = acts(("Linear",) * 18, std=[*grows, 0.5, 900]), grows[::2] + grows[1::2]

    assert "grows" in found(Run(first_last, losses=FLAT), "bad_init").evidence
    assert "bad_init" not in alarms(Run(acts(("Linear",) * 17, std=[*mixed, 1]), losses=FLAT))


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
