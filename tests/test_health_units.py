"""Rules on units: dead, saturated.

`ActivationStats()` records layers with parameters, and a ReLU has none: so many of these runs show
a ReLU only by what it is given.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import FLAT, N, acts, alarms, falling, first, found, weights
from torch import nn

from hookkit import ActivationStats, GradientStats, watch
from hookkit.health import diagnose
from hookkit.records import Run


@pytest.mark.parametrize(("share", "severity"), [(0.95, "error"), (0.6, "warning"), (0.3, "note")])
def test_dead_units_by_their_share(share, severity):
    run = Run(acts(dead=[0.9, share, 0.9]))

    f = found(run, "dead")

    assert (f.severity, f.layers) == (severity, ("1",))


def test_a_unit_that_gives_something_again_is_not_dead():
    dead = np.full((3, N), 0.9)
    dead[:, 80] = 0.0

    assert alarms(Run(acts(dead=dead))) == set()


def test_dead_is_for_relus_only():
    assert alarms(Run(acts(("Linear", "GELU", "Linear"), dead=[1, 1, 1], zero=[1, 1, 1]))) == set()


def test_without_units_a_relu_layer_of_zeros_is_dead():
    assert found(Run(acts(zero=[0, 1, 0])), "dead").severity == "error"
    assert alarms(Run(acts(zero=[0, 0.95, 0]))) == set()


@pytest.mark.parametrize("kind", ["Tanh", "Sigmoid"])
def test_saturated_units_by_their_share(kind):
    types = ("Linear", kind, "Linear")
    graded = [(0.95, "error"), (0.7, "warning")]

    for share, severity in graded:
        run = Run(acts(types, saturated=[np.nan, share, np.nan]))
        assert found(run, "saturated").severity == severity
    assert alarms(Run(acts(types, saturated=[np.nan, 0.4, np.nan]))) == set()


def test_an_output_layer_at_its_ends_is_not_saturated():
    types = ("Linear", "ReLU", "Sigmoid")

    assert alarms(Run(acts(types, saturated=[0, 0, 0.99]))) == set()


def test_dead_units_come_before_the_gradients_they_stop():
    p = weights(3, update_norm=[0, 1, 1], grad_norm=[0, 1, 1])

    assert first(Run(acts(dead=[0, 1, 0]), params=p, losses=FLAT)) == "dead"


def test_the_cause_of_dead_units_depends_on_when_they_died():
    later = np.zeros((3, N))
    later[1, 20:] = 0.95

    assert "from the first step on" in found(Run(acts(dead=[0, 0.95, 0])), "dead").evidence
    assert "learning rate" in found(Run(acts(dead=later)), "dead").cause
    assert "biases" in found(Run(acts(dead=[0, 0.95, 0])), "dead").cause


LINEAR = ("Linear",) * 3


def layers(feeds=None, **values):
    """Activations of three Linears; `feeds` names what reads each."""
    record = acts(LINEAR, **values)
    return record if feeds is None else dataclasses.replace(record, meta={"feeds": feeds})


@pytest.mark.parametrize(("share", "severity"), [(0.95, "error"), (0.6, "warning"), (0.3, "note")])
def test_units_that_a_relu_is_given_are_dead_if_never_above_0(share, severity):
    run = Run(layers(["ReLU", "ReLU", ""], dead=[0, share, 0.9]), losses=falling())

    f = found(run, "dead")

    assert (f.severity, f.layers) == (severity, ("1",))
    assert "the units that a ReLU is given" in f.evidence


def test_units_that_something_else_reads_may_be_below_0():
    run = Run(layers(["", "", ""], dead=[0.9, 0.9, 0.9]), losses=FLAT)

    assert alarms(run) == {"not_learning"}
    assert "dead" not in dict(diagnose(run).unjudged)


def test_a_layer_that_is_wholly_below_0_needs_no_units_to_be_dead():
    low = np.where(np.arange(N) < 20, 3.0, -1.0)
    run = Run(layers(["ReLU", "ReLU", ""], max=[3.0, low, 3.0]), losses=FLAT)

    f = found(run, "dead")

    assert (f.severity, f.layers) == ("error", ("1",))
    assert "more than at first" in f.evidence


def test_a_recorded_relu_is_not_reported_twice():
    record = acts(("Linear", "ReLU", "Linear"), dead=[0.95, 0.95, 0])
    run = Run(dataclasses.replace(record, meta={"feeds": ["ReLU", None, ""]}))

    assert [f.layers for f in diagnose(run) if f.rule == "dead"] == [("1",)]


@pytest.mark.parametrize("behind", ["BatchNorm1d", "LayerNorm", "GELU", "Tanh"])
def test_what_a_norm_or_another_activation_reads_is_no_guess(behind):
    run = Run(acts(("Linear", behind, "Linear"), dead=[0.9, 0, 0]), losses=FLAT)

    assert "dead" not in diagnose(run).rules


def test_a_layer_whose_weight_has_a_gradient_is_not_dead():
    low = layers(max=[3, -1, 3])

    assert "dead" not in diagnose(Run(low, params=weights(3), losses=FLAT)).rules


def test_dead_units_that_were_not_recorded_are_unjudged():
    run = Run(layers(["ReLU", "ReLU", ""]), params=weights(3), losses=falling())

    assert (
        str(diagnose(run)) == "3 layers, 300 steps: healthy (dead units unseen without units=True)"
    )


@pytest.mark.parametrize(
    "seen",
    [
        layers(["ReLU", "ReLU", ""], dead=[0, 0, 0]),
        layers(["", "", ""]),
        acts(("Linear", "ReLU", "Linear"), zero=[0, 0.4, 0]),  # no room for more than 40 %
    ],
)
def test_units_that_were_recorded_or_cannot_be_dead_are_judged(seen):
    assert str(diagnose(Run(seen, params=weights(3), losses=falling()))) == (
        "3 layers, 300 steps: healthy"
    )


def test_a_histogram_leaves_no_room_for_dead_units():
    plain = layers(["ReLU", "ReLU", ""])
    hist = np.broadcast_to(np.array([40, 60])[None, :, None], (3, 2, N))
    run = Run(plain, params=weights(3), losses=falling())
    clear = dataclasses.replace(plain, hist=hist, edges=np.array([-9.0, 0, 9]))

    assert "unseen" in str(diagnose(run))
    run = dataclasses.replace(run, activations=clear)
    assert str(diagnose(run)) == "3 layers, 300 steps: healthy"


class Functional(nn.Module):
    """Three layers of a net that calls F.relu; most units of the second one begin shut."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        nn.init.constant_(self.b.bias[:24].data, -20.0)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def test_dead_units_behind_a_function_are_named_though_the_net_learns():
    torch.manual_seed(0)
    net, truth = Functional(), torch.randn(8, 4)
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    with watch(net, opt, ActivationStats(units=True), GradientStats()) as w:
        for _ in range(80):
            x = torch.randn(32, 8)
            loss = F.cross_entropy(net(x), (x @ truth).argmax(1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    f = found(w.run_record(), "dead")

    assert (f.severity, f.layers) == ("warning", ("b",))
    assert "from the first step on" in f.evidence


def test_units_that_die_while_the_loss_falls_are_a_note_up_to_most_of_a_layer():
    def died(share):
        later = np.where(np.arange(N) < 20, 0.0, share)
        return layers(["ReLU", "ReLU", ""], dead=[0 * later, later, 0 * later])

    assert found(Run(died(0.7), losses=falling()), "dead").severity == "note"
    assert found(Run(died(0.7), losses=FLAT), "dead").severity == "warning"
    assert found(Run(died(0.7)), "dead").severity == "warning"
    assert found(Run(died(0.95), losses=falling()), "dead").severity == "error"


def test_units_that_die_under_a_loss_that_need_not_fall_are_a_note_up_to_most_of_a_layer():
    def died(share):
        later = np.where(np.arange(N) < 20, 0.0, share)
        seen = layers(["ReLU", "ReLU", ""], dead=[0 * later, later, 0 * later])
        return Run(seen, losses=FLAT, info={"others_weights": 6})

    f = found(died(0.7), "dead")

    assert f.severity == "note"
    assert f.threshold == "over 50 % of a layer's units, while the loss need not fall"
    assert found(died(0.95), "dead").severity == "error"


def test_a_last_sigmoid_may_be_at_its_ends_only_where_the_loss_falls():
    last = acts(("Linear", "Sigmoid"), saturated=[0, 0.99])

    assert "saturated" in alarms(Run(last, losses=FLAT))
    assert alarms(Run(last, losses=falling())) == set()
    assert alarms(Run(last)) == set()


@pytest.mark.parametrize(("top", "named"), [(1.0, False), (6.0, True)])
def test_targets_that_the_sigmoid_at_the_end_cannot_reach_are_named(top, named):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    opt = torch.optim.Adam(net.parameters(), 0.02)
    with watch(net, opt, ActivationStats(include_paramless=True, units=True)) as w:
        for _ in range(200):
            x = torch.randn(64, 4)
            target = top * (4 * x[:, :1]).sigmoid() - (top - 1) / 2
            loss = F.mse_loss(net(x), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    assert (alarms(w.run_record()) == {"saturated"}) == named
    assert not named or "cannot reach" in found(w.run_record(), "saturated").cause
