"""Slips of the loop and of the first weights: ascent, momentum, constant weights."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_health import FLAT, N, alarms, falling, found, weights
from torch import nn

from hookkit import ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run

CE = {"n_classes": 10, "loss_func": "CrossEntropyLoss"}


def trained(sign=1.0, lr=0.01, steps=60):
    """A small regression, recorded by `ParamStats`; a sign of -1 climbs the loss."""
    torch.manual_seed(0)
    net, truth = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr)
    with watch(net, opt, ParamStats()) as w:
        for _ in range(steps):
            x = torch.randn(64, 4)
            loss = F.mse_loss(net(x), x @ truth)
            opt.zero_grad()
            (sign * loss).backward()
            opt.step()
            w.loss(loss)
    return w.run()


# ascent


def test_a_climbed_loss_is_named_before_its_consequences():
    d = diagnose(trained(sign=-1.0))

    assert (d[0].rule, d[0].severity) == ("ascent", "sick")
    assert "wrong sign" in d[0].cause


@pytest.mark.parametrize("lr", [0.01, 1.5])
def test_a_loss_that_falls_or_steps_that_go_too_far_are_no_ascent(lr):
    assert "ascent" not in diagnose(trained(lr=lr)).rules


def rising(by, n=N):
    noise = np.random.default_rng(0).normal(0, 0.01, n)
    return 2.0 + np.linspace(0, by, n) + noise


def test_ascent_is_a_matter_of_what_steps_can_do():
    p = weights(4, grad_norm=[0.1] * 4, update_norm=[0.05] * 4)  # together 0.02 a step, 2 in all

    assert "47% of all" in found(Run(params=p, losses=rising(1.0)), "ascent").evidence
    for by in (0.1, 10.0):  # too little for a climb, more than any step can do
        assert "ascent" not in diagnose(Run(params=p, losses=rising(by))).rules


def test_ascent_needs_every_step():
    p = weights(4)
    every_other = dataclasses.replace(p, steps=2 * p.steps)

    d = diagnose(Run(params=every_other, losses=rising(1.0, 2 * N)))

    assert dict(d.unjudged)["ascent"] == "not every step of parameters"


def test_maximize_is_ascent_where_the_loss_cannot_be_meant_to_rise():
    told = {**CE, "maximize": True}

    assert "maximize=True" in found(Run(losses=rising(3.0), info=told), "ascent").evidence
    assert "ascent" not in diagnose(Run(losses=falling(), info=told)).rules
    assert "ascent" not in diagnose(Run(losses=rising(3.0), info={"maximize": True})).rules


# momentum


def test_a_momentum_near_1_is_named_where_the_loss_does_not_fall():
    f = found(Run(losses=FLAT, info={"momentum": [0.9, 0.999]}), "momentum")

    assert "for 1000 steps (the run has 300)" in f.evidence
    assert "momentum" not in diagnose(Run(losses=falling(), info={"momentum": [0.999]})).rules
    assert "momentum" not in diagnose(Run(losses=FLAT, info={"momentum": [0.99]})).rules
    assert dict(diagnose(Run(losses=FLAT)).unjudged)["momentum"] == "momentum unknown"


def test_momentum_is_told_before_what_it_brings_about():
    rises = np.linspace(2.3, 9, 300)

    assert diagnose(Run(losses=rises, info={"momentum": [0.999]})).rules == (
        "momentum",
        "diverging",
    )


# constant weights


def begun(constant, norm=5.0, kind="Linear", **facts):
    """Four matrices, of which some begin at one value."""
    p = weights(4, weight_norm=[norm] * 4, **facts)
    return dataclasses.replace(p, meta={**p.meta, "constant": constant}, types=(kind,) * 4)


@pytest.mark.parametrize(("losses", "severity"), [(FLAT, "sick"), (falling(), "warn")])
def test_layers_in_a_row_that_begin_constant_are_named(losses, severity):
    f = found(Run(params=begun([False, True, True, False]), losses=losses), "constant_init")

    assert (f.severity, f.layers) == (severity, ("1.weight", "2.weight"))


@pytest.mark.parametrize(
    "quiet",
    [
        begun([True, False, True, False]),  # the next layer breaks the symmetry
        begun([True] * 4, kind="Scale"),  # gates and scales of one's own
        begun([True] * 4, requires_grad=[False] * 4, update_norm=[0] * 4),
        begun([False] * 4),
    ],
)
def test_constants_that_are_meant_or_alone_are_no_finding(quiet):
    assert "constant_init" not in diagnose(Run(params=quiet, losses=falling())).rules


def test_zeros_are_left_to_their_own_rule():
    p = begun([True] * 4, norm=0)
    p.values["weight_norm"][:, 1:] = 5.0

    assert alarms(Run(params=p, losses=FLAT)) == {"zero_init", "not_learning"}
