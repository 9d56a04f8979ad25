"""Slips of the loop and of the first weights: ascent, momentum, constant weights."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_health import FLAT, N, acts, alarms, falling, found, weights
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
    return w.run_record()


# ascent


def test_a_climbed_loss_is_named_before_its_consequences():
    d = diagnose(trained(sign=-1.0))

    assert (d[0].rule, d[0].severity) == ("ascent", "error")
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


def test_ascent_is_seen_before_the_loss_has_risen_far():
    p = weights(4, n=30, grad_norm=[0.1] * 4, update_norm=[0.05] * 4)
    losses = rising(0.3, 30)

    assert alarms(Run(params=p, losses=losses)) == {"ascent"}
    both_signs = losses - 2.05
    assert alarms(Run(params=p, losses=both_signs)) == set()


def test_ascent_is_seen_in_some_of_the_steps_but_not_in_merged_ones():
    p = weights(4, grad_norm=[0.1] * 4, update_norm=[0.05] * 4)
    every_other = dataclasses.replace(p, steps=2 * p.steps)
    merged = dataclasses.replace(every_other, spans=np.full(N, 2))
    losses = rising(2.0, 2 * N)

    assert "49% of all" in found(Run(params=every_other, losses=losses), "ascent").evidence
    d = diagnose(Run(params=merged, losses=losses))
    assert dict(d.unjudged)["ascent"] == "not each step of parameters by itself"


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


@pytest.mark.parametrize(("losses", "severity"), [(FLAT, "error"), (falling(), "warning")])
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


# gradients that pile up


def summed(n, every=1, noise=0.0):
    """Norms of a running sum of gradients that partly agree, at every so many steps."""
    steps = np.arange(0, n, every)
    jitter = np.exp(noise * np.random.default_rng(3).normal(size=len(steps)))
    return steps, 0.1 * (steps + 1) ** 0.75 * jitter


def sampled(norms, steps):
    """`norms` as the gradients of one matrix of two."""
    k = len(steps)
    p = weights(2, n=k, grad_norm=[norms, np.zeros(k)])
    return dataclasses.replace(p, steps=steps)


@pytest.mark.parametrize(("losses", "severity"), [(falling(), "warning"), (FLAT, "error")])
def test_a_sum_of_gradients_is_known_also_from_every_tenth_step(losses, severity):
    steps, norms = summed(300, 10)

    f = found(Run(params=sampled(norms, steps), losses=losses), "grads_pile_up")

    assert f.severity == severity
    fresh = sampled(summed(300, 10, noise=0.3)[1], steps)
    assert "grads_pile_up" not in alarms(Run(params=fresh, losses=losses))


def test_a_sum_that_is_smooth_and_tenfold_needs_no_losses():
    norms = summed(200)[1]

    assert alarms(Run(grad_norms=norms)) == {"grads_pile_up"}
    assert alarms(Run(grad_norms=np.minimum(norms, 0.5))) == set()


def test_a_sum_smoother_than_the_loss_is_one_also_where_the_loss_stays():
    norms = np.minimum(summed(300)[1], 0.5) * (1 + 1e-3 * np.random.default_rng(0).normal(size=300))
    wild = FLAT * np.where(np.arange(300) % 2, 1.3, 0.7)

    assert found(Run(losses=wild, grad_norms=norms), "grads_pile_up").severity == "error"
    assert alarms(Run(losses=FLAT, grad_norms=norms)) == {"not_learning"}


def test_a_sum_smoother_than_the_loss_shows_in_a_short_run():
    wild = FLAT[:45] * np.where(np.arange(45) % 2, 1.3, 0.7)

    assert alarms(Run(losses=wild, grad_norms=summed(45)[1])) == {"grads_pile_up"}


def test_a_norm_that_grows_late_is_no_sum():
    late = 0.1 * np.exp(np.linspace(0, 4, 300))  # as large targets make it, step by step

    assert "grads_pile_up" not in alarms(Run(losses=FLAT, grad_norms=late))


# a sigmoid before binary_cross_entropy_with_logits

BCE = {"loss_func": "BCEWithLogitsLoss"}


def test_a_sigmoid_at_the_end_is_one_too_many_for_a_loss_with_logits():
    last = acts(("Linear", "ReLU", "Linear", "Sigmoid"))

    f = found(Run(last, losses=falling(), info=BCE), "probabilities")

    assert "BCEWithLogitsLoss" in f.source
    assert (
        "probabilities"
        not in diagnose(Run(last, losses=falling(), info={"loss_func": "BCELoss"})).rules
    )


def test_large_scores_that_leave_a_binary_loss_in_a_narrow_range_are_squashed():
    narrow = 0.46 + 0.2 * np.exp(-np.arange(300) / 60)
    large = acts(("Linear", "ReLU", "Conv2d"), rms=[1, 1, 12], min=[-3, -3, -20])

    f = found(Run(large, losses=narrow, info=BCE), "probabilities")

    assert (f.severity, "2 gives values of RMS 12" in f.evidence) == ("warning", True)
    for record, losses in (
        (acts(rms=[1, 1, 2]), narrow),  # scores of an ordinary size
        (acts(rms=[1, 1, 1e4], min=[-3, -3, -1e9]), narrow),  # a mask
        (large, narrow - 0.2),  # below what probabilities can reach
    ):
        assert alarms(Run(record, losses=losses, info=BCE)) == set()


# a sigmoid or softmax that is a function


@pytest.mark.parametrize(
    ("given", "loss", "named"),
    [
        ("Sigmoid", "BCEWithLogitsLoss", True),
        ("Softmax", "cross_entropy", True),
        ("Softmax", "nll_loss", True),
        ("Sigmoid", "BCELoss", False),
        ("LogSoftmax", "nll_loss", False),
        (None, "cross_entropy", False),
    ],
)
def test_what_the_loss_is_given_tells_of_probabilities(given, loss, named):
    a = acts(("Linear", "ReLU", "Linear"))

    d = diagnose(Run(a, losses=falling(), info={"loss_func": loss, "loss_input": given}))

    assert ("probabilities" in d.rules) == named
    if named:
        assert d[0].evidence == f"the loss is given what a {given.lower()} gives"


def test_a_sigmoid_before_a_plain_binary_cross_entropy_is_what_it_expects():
    a = acts(("Linear", "ReLU", "Sigmoid"))

    for loss in ("binary_cross_entropy", "BCELoss"):
        d = diagnose(Run(a, losses=falling(), info={"loss_func": loss, "loss_input": "Sigmoid"}))
        assert "probabilities" not in d.rules


@pytest.mark.parametrize(
    "loss", ["binary_cross_entropy_with_logits", "BCELoss", "PoissonNLLLoss", "gaussian_nll_loss"]
)
def test_columns_of_such_losses_are_no_classes(loss):
    flat = 0.69 + np.random.default_rng(0).normal(0, 0.003, 300)  # ln 2, and ln 64 is 4.2
    info = {"loss_func": loss, "n_classes": 64}

    assert "not_learning" in alarms(Run(losses=flat, info=info))
    assert "initial_loss" in dict(diagnose(Run(losses=flat, info=info)).unjudged)
    assert "initial_loss" not in dict(diagnose(Run(losses=flat, info={"n_classes": 64})).unjudged)


def test_two_classes_of_a_binary_loss_are_a_known_chance():
    info = {"loss_func": "BCEWithLogitsLoss", "n_classes": 2}

    assert "initial_loss" in alarms(Run(losses=np.full(300, 3.5), info=info))
