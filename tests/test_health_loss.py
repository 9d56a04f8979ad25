"""Rules on the loss: initial_loss, target_scale, not_learning, below_zero, spikes, overfit."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import (
    CE,
    FLAT,
    MSE,
    acts,
    alarms,
    falling,
    first,
    found,
    sized,
    slow,
    weights,
)
from torch import nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run


def test_a_loss_logged_every_tenth_step_is_enough():
    series = np.full(300, np.nan)
    series[::10] = falling()[::10]

    assert alarms(Run(losses=series)) == set()


def test_initial_loss_against_chance():
    high = np.concatenate([[40.0], FLAT])

    assert found(Run(losses=high, info=CE), "initial_loss").severity == "warning"
    assert alarms(Run(losses=falling(start=8), info=CE)) == set()  # of several heads, perhaps
    known = {**CE, "chance": np.log(10)}
    assert alarms(Run(losses=falling(start=8, end=1.5), info=known)) == {"initial_loss"}
    assert found(Run(losses=falling(start=8), info=known), "initial_loss").severity == "note"
    assert alarms(Run(losses=falling(), info=known)) == set()


def test_not_learning_and_diverging():
    assert found(Run(losses=FLAT), "not_learning").severity == "warning"
    assert found(Run(losses=np.linspace(2.3, 50, 300)), "not_learning").severity == "error"


def test_a_wild_first_loss_does_not_make_the_rest_progress():
    series = np.concatenate([np.full(20, 30.0), FLAT])

    assert "not_learning" in alarms(Run(losses=series, info=CE))


def test_a_model_that_had_learnt_before_need_not_improve():
    slow = weights(update_ratio=[1e-6] * 4)

    assert alarms(Run(params=slow, losses=FLAT * 0.1, info=CE)) == set()
    assert "not_learning" in alarms(Run(losses=FLAT * np.linspace(0.1, 1, 300), info=CE))


def test_a_loss_of_several_heads_may_begin_above_chance():
    assert alarms(Run(losses=3 * falling(end=0.8), info=CE)) == set()


def test_a_negative_loss_may_fall():
    assert alarms(Run(losses=np.linspace(-1, -3, 300))) == set()
    assert alarms(Run(losses=np.linspace(-3, -2.9, 300))) == {"not_learning"}


def test_spikes_are_a_warning_where_they_come_at_one_place_of_each_epoch():
    one, many, scattered = falling(), falling(), falling()
    one[200] += 5
    many[100::13] += 5
    scattered[[100, 113, 131, 156, 200, 203, 241, 255]] += 5  # of heavy tails, in any order

    assert found(Run(losses=one), "spikes").severity == "note"
    assert found(Run(losses=scattered), "spikes").severity == "note"
    f = found(Run(losses=many), "spikes")
    assert (f.severity, "multiples of 13 steps" in f.evidence) == ("warning", True)
    assert not diagnose(Run(losses=falling()))


def test_overfitting_is_a_note():
    rows = [{"epoch": i, "train_loss": 1 / (i + 1), "valid_loss": 0.5 + 0.1 * i} for i in range(6)]

    assert found(Run(losses=falling(), valid=rows), "overfit").severity == "note"


def test_the_best_validation_loss_is_none_that_is_not_a_number():
    rows = [{"epoch": i, "train_loss": 1 / (i + 1), "valid_loss": 0.5 + 0.1 * i} for i in range(6)]
    nan = {"valid_loss": float("nan")}
    first_unknown, last_unknown = [rows[0] | nan, *rows[1:]], [*rows[:5], rows[5] | nan]

    finding = found(Run(losses=falling(), valid=first_unknown), "overfit")

    assert "best in epoch 1 (0.6)" in finding.evidence
    assert not diagnose(Run(losses=falling(), valid=last_unknown))


def test_a_loss_that_jumps_with_the_first_step_did_not_fall():
    jumps = np.r_[2.3, np.geomspace(1e4, 3.4, 40), np.full(259, 3.4)]
    fast = weights(update_ratio=[0.9] * 4)

    assert found(Run(losses=jumps), "not_learning").evidence.startswith("the loss began at 2.3")
    assert found(Run(params=fast, losses=jumps), "lr_too_high").severity == "error"


def test_one_low_first_batch_is_no_jump():
    lucky = np.random.default_rng(0).lognormal(-3, 1, 300) * np.linspace(1, 0.5, 300)
    lucky[0] = 1e-4

    assert alarms(Run(losses=lucky)) == set()


def test_a_loss_below_where_it_can_be_is_an_error():
    run = Run(losses=falling(end=-0.9), info={"loss_func": "NLLLoss"})

    f = found(run, "below_zero")

    assert f.severity == "error"
    assert "cannot be below 0" in f.evidence
    for fine in ({"loss_func": "GaussianNLLLoss"}, {}):
        assert alarms(Run(losses=falling(end=-0.9), info=fine)) == set()


def test_a_loss_that_falls_faster_and_faster_has_the_wrong_sign():
    t = np.linspace(0, 1, 300)

    assert "wrong sign" in found(Run(losses=-2.3 - 300 * t**3), "below_zero").cause
    assert alarms(Run(losses=-2.3 - 100 * (1 - np.exp(-5 * t)))) == set()


def test_a_loss_that_falls_without_end_and_then_blows_up_had_the_wrong_sign():
    t = np.linspace(0, 1, 300)
    losses = np.r_[-2.3 - 300 * t**3, np.geomspace(1e3, 1e15, 100)]

    assert first(Run(losses=losses)) == "below_zero"


@pytest.mark.parametrize(("lr", "size"), [(0.1, 1), (1.0, 1), (1.0, 2)])
def test_a_loss_that_is_mostly_0_is_judged_by_its_mean_and_has_no_spikes(lr, size):
    torch.manual_seed(1)
    x, true = torch.randn(500, 10), torch.randn(10)
    net = nn.Linear(10, 1)
    opt = torch.optim.SGD(net.parameters(), lr)
    with watch(net, opt, ParamStats()) as w:
        for _ in range(400):  # a perceptron: right answers cost nothing
            at = torch.randint(500, (size,))
            loss = F.relu(-torch.sign(x[at] @ true) * net(x[at]).squeeze(-1)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    assert alarms(w.run_record()) == set()


def test_small_losses_vary_by_factors():
    noisy = np.random.default_rng(3).lognormal(-4, 0.8, 300)
    broken = noisy.copy()
    broken[[100, 150, 200, 250]] = 50.0

    assert "spikes" not in {f.rule for f in diagnose(Run(losses=noisy))}
    assert found(Run(losses=broken), "spikes").severity == "warning"


def test_a_likelihood_that_is_maximised_should_rise():
    up = np.linspace(-2.3, -0.1, 300)

    assert alarms(Run(losses=up, info={"maximize": True})) == set()
    assert alarms(Run(losses=up)) != set()
    assert "not_learning" in alarms(Run(losses=np.full(300, -2.3), info={"maximize": True}))


def test_a_loss_that_stays_for_a_few_steps_proves_nothing_and_one_that_rises_does():
    few, small = FLAT[:30], sized(0.005)

    assert alarms(Run(acts(), params=small, losses=few)) == set()
    assert alarms(Run(acts(), params=small, losses=FLAT)) == {"bad_init", "not_learning"}
    rises = few * np.linspace(1, 9, 30)
    assert "bad_init" in alarms(Run(acts(), params=small, losses=rises, info=CE))


@pytest.mark.parametrize(("own", "named"), [(True, False), (False, True)])
def test_a_loss_that_falls_to_what_the_inputs_have_no_part_in_is_named(own, named):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    with watch(net, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(400):
            x = torch.randn(128, 8)
            level = 1 + x[:, :4] if own else 1 + torch.randn(128, 4)
            w.loss(loss := F.mse_loss(net(x), level))
            opt.zero_grad()
            loss.backward()
            opt.step()

    assert (alarms(w.run_record()) == {"not_learning"}) == named
    if named:
        assert "between samples" in found(w.run_record(), "not_learning").evidence


def test_a_loss_below_the_chance_of_shares_has_learnt_though_it_falls_no_more():
    quick = np.r_[2.3, 2.1, FLAT[2:] - 0.3]  # a list of ten, of which several are relevant

    assert alarms(Run(losses=quick)) == {"not_learning"}
    assert alarms(Run(losses=quick, info={"chance_of_shares": np.log(10)})) == set()
    assert alarms(Run(losses=FLAT, info={"chance_of_shares": np.log(10)})) == {"not_learning"}
    counts = {"chance_of_shares": np.log(2)}  # they add up to more than 1
    assert "initial_loss" not in alarms(Run(losses=falling(start=8, end=1), info=counts))


def test_a_first_loss_far_above_the_chance_of_several_losses_is_named():
    info = {"chance": float(np.log(64))}

    assert alarms(Run(losses=falling(start=30.0, end=3.0), info=info)) == {"initial_loss"}
    assert alarms(Run(losses=falling(start=15.0), info=info)) == set()


@pytest.mark.parametrize("info", [{}, CE])
def test_a_loss_that_falls_slowly_and_steadily_is_a_note(info):
    rates = weights(update_ratio=[3e-5] * 4)

    f = found(Run(params=rates, losses=slow(0.09), info=info), "not_learning")

    assert (f.severity, "slowly" in f.evidence) == ("note", True)
    assert alarms(Run(params=rates, losses=slow(0.09), info=info)) == {"lr_too_low"}
    assert alarms(Run(params=weights(), losses=slow(0.09), info=info)) == set()
    assert alarms(Run(params=rates, losses=slow(0.01))) == {"lr_too_low", "not_learning"}


def test_a_drop_to_chance_that_then_stays_is_no_slow_fall():
    drops = FLAT + 0.08 * np.exp(-np.arange(300) / 20)

    assert alarms(Run(losses=drops)) == {"not_learning"}
    assert alarms(Run(losses=slow(0.09, noise=1.0))) == {"not_learning"}


@pytest.mark.parametrize("noise", [0.04, 0.4])
def test_a_loss_in_whose_noise_a_fall_may_hide_is_a_note(noise):
    stays = 1 + noise * np.random.default_rng(2).normal(size=300)

    f = found(Run(losses=stays), "not_learning")

    assert f.severity == ("note" if noise > 0.3 else "warning")
    assert ("so noisy" in f.evidence) == (noise > 0.3)
    assert "not_learning" in alarms(Run(losses=stays * np.linspace(1, 3, 300)))


def test_a_fall_shows_in_ten_steps_and_a_rate_is_then_judged_by_it():
    fast, falls = weights(n=12, update_ratio=[0.2] * 4), np.linspace(2.3, 1.2, 12)

    assert alarms(Run(params=fast, losses=falls)) == set()
    assert alarms(Run(params=fast, losses=np.full(12, 2.3))) == {"lr_too_high"}


def test_targets_that_are_not_standardised_are_named_if_the_loss_does_not_fall():
    far = 2.7e4 * (1 + 0.01 * np.random.default_rng(0).normal(size=300))

    f = found(Run(losses=far, info=MSE), "target_scale")

    assert (f.severity, diagnose(Run(losses=far, info=MSE))[0].rule) == ("warning", "target_scale")
    assert f.evidence.startswith("the first error is 16")
    assert alarms(Run(losses=falling(start=2.7e4, end=3e3), info=MSE)) == {"target_scale"}
    assert alarms(Run(losses=falling(start=2.7e4, end=1e2), info=MSE)) == set()
    assert "target_scale" not in diagnose(Run(losses=far / 1e3, info=MSE)).rules
    assert "target_scale" not in diagnose(Run(losses=far)).rules


def test_spikes_are_a_note_where_the_data_change():
    spiky = 3 + np.linspace(0, 8, 300)
    spiky[[100, 150, 200, 250]] = 90.0
    small = weights(4, n=300, grad_norm=[0.1] * 4, update_norm=[0.01] * 4)

    assert found(Run(params=small, losses=spiky), "spikes").severity == "note"
    assert found(Run(losses=spiky), "spikes").severity == "warning"


def test_noise_by_factors_is_no_spike_where_some_losses_are_0_or_below():
    wild = 10 * np.exp(1.5 * np.random.default_rng(0).normal(size=300))
    wild[[100, 150, 200]] *= [8, 6, 7]
    dips = wild.copy()
    dips[::20] = -0.1  # advantages may be

    assert "spikes" not in alarms(Run(losses=wild))
    assert "spikes" not in alarms(Run(losses=dips))
    level = np.full(300, 10.0) + np.random.default_rng(0).normal(0, 0.5, 300)
    level[::20], level[[100, 150, 201, 250]] = -0.1, 90.0
    assert found(Run(losses=level), "spikes").severity == "note"  # at no place of a period


def test_a_steady_fall_from_far_does_not_excuse_an_error_that_stays_huge():
    slow = weights(4, n=300, grad_norm=[1] * 4, update_norm=[0.01] * 4)
    steady = np.linspace(1e5, 0.97e5, 300)

    assert alarms(Run(params=slow, losses=steady, info=MSE)) == {"target_scale"}


def test_a_known_chance_is_met_by_a_run_that_began_above_it():
    wild = Run(losses=falling(start=16.0, end=5.0), info={**CE, "chance": np.log(10)})
    heads = Run(losses=falling(start=6.0, end=2.5), info=CE)  # of three, perhaps

    assert found(wild, "initial_loss").severity == "warning"
    assert alarms(heads) == set()


def test_a_loss_that_ends_below_a_known_chance_has_learnt_though_it_fell_in_the_first_steps():
    players = 1.1 + np.random.default_rng(0).normal(0, 0.05, 300)  # two terms, of ln 2 each

    assert "not_learning" in alarms(Run(losses=players))
    assert alarms(Run(losses=players, info={"chance": 2 * np.log(2)})) == set()


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
