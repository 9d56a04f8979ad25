"""Rules on what layers give: input_scale, bad_init, dropout."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import EVEN, FLAT, acts, alarms, falling, first, found, sized, weights
from torch import nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run


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
    grows = acts(("Linear",) * 5, rms=[1, 12, 150, 1500, 1], nonfinite=[0, 0, 0, 0, EVEN])
    run = Run(grows, params=sized(2.0, update_ratio=[2.0] * 4), losses=FLAT)

    assert [f.rule for f in diagnose(run)][:3] == ["bad_init", "non_finite", "lr_too_high"]


@pytest.mark.parametrize(("gain", "seen"), [(1.4, set()), (6.0, {"bad_init"})])
def test_weights_that_begin_with_a_large_gain_are_too_large(gain, seen):
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


@pytest.mark.parametrize(("times", "seen"), [(1.0, set()), (4.0, {"bad_init"})])
def test_weights_that_are_all_a_little_too_large_grow_over_the_depth(times, seen):
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(32, 32), nn.ReLU())))
    with torch.no_grad():
        for p in net.parameters():
            p *= times

    assert alarms(fitted(net, lambda y: y.mean(1))) & {"bad_init", "exploding"} == seen


def test_the_gain_that_pytorch_names_for_tanh_is_no_finding():
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(32, 32), nn.Tanh())))
    for layer in net[::2]:
        nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("tanh"))  # 5/3

    assert "bad_init" not in alarms(fitted(net, lambda y: y.mean(1)))


@pytest.mark.parametrize(("times", "named"), [(1.0, False), (30.0, True)])
def test_a_trained_model_may_amplify_and_random_norms_are_no_training(times, named):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32))
    for p in net.parameters():
        nn.init.normal_(p, std=0.1 * times)
    net[1].weight.data += 5.0

    assert ("bad_init" in alarms(fitted(net, lambda y: y.mean(1)))) == named


def test_a_layer_that_gives_each_one_hot_row_a_vector_of_rms_1_is_no_finding():
    torch.manual_seed(0)
    net = nn.Sequential(OneHot(), nn.Linear(200, 8))
    nn.init.normal_(net[1].weight)  # as nn.Embedding begins

    assert "bad_init" not in alarms(fitted(net, lambda y: y.mean(1)))


class OneHot(nn.Module):
    """The place of the largest of the data, of 200."""

    def forward(self, x):
        return nn.functional.one_hot(x.argmax(1), 200).float()


def test_one_weight_that_is_far_too_large_is_enough():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    with torch.no_grad():
        net[2].weight *= 20

    assert found(fitted(net, lambda y: y[:, 0]), "bad_init").layers == ("2.weight",)


class Recurrence(nn.Module):
    """A state that a factor multiplies in each of eight steps."""

    def __init__(self, factor):
        super().__init__()
        self.given, self.head, self.factor = nn.Linear(32, 32), nn.Linear(32, 1), factor

    def forward(self, x):
        state = 0
        for _ in range(8):
            state = self.factor * state + self.given(x)
        return self.head(state)


@pytest.mark.parametrize(("factor", "seen"), [(0.5, set()), (2.0, {"exploding"})])
def test_what_grows_between_layers_of_usual_weights_is_no_fault_of_theirs(factor, seen):
    torch.manual_seed(0)

    run = fitted(Recurrence(factor), lambda y: y[:, 0])

    assert alarms(run) & {"bad_init", "exploding"} == seen


def test_large_outputs_of_a_net_whose_norms_were_trained_are_no_bad_beginning():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    with torch.no_grad():
        net[2].weight *= 20
    fresh = alarms(fitted(net, lambda y: y.mean(1)))
    with torch.no_grad():
        net[2].weight.normal_(0, 20 / 32**0.5)
        net[1].weight += 0.1 * torch.randn(32)

    assert "bad_init" in fresh
    assert "bad_init" not in alarms(fitted(net, lambda y: y.mean(1)))


def fitted(net, of, n=200):
    """`net`, trained to give the mean of its inputs, by Adam."""
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(n):
            x = torch.randn(64, 32)
            loss = F.mse_loss(of(net(x)), x[:, 0])
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    return w.run_record()
