"""What a loss says to the other rules: too short to tell, slow, excused, huge at first."""

import dataclasses

import numpy as np
import pytest
from test_health import FLAT, N, acts, alarms, falling, found, weights
from test_health_causes import EVEN

from hookkit.health import diagnose, loss_expectations
from hookkit.records import Run

CE = {"n_classes": 10, "loss_func": "CrossEntropyLoss"}
MSE = {"loss_func": "MSELoss"}
SHRINKS = acts(("Linear",) * 5, std=[1, 3e-2, 3e-3, 3e-4, 1], count=[64] * 5)
DEFAULT = acts(("Linear",) * 5, std=[1, 0.5, 0.2, 0.08, 1])


# how long


def test_a_loss_that_stays_in_a_few_steps_says_nothing_and_one_that_rises_does():
    few = FLAT[:30]

    assert alarms(Run(SHRINKS, losses=few)) == set()
    assert alarms(Run(SHRINKS, losses=FLAT)) == {"bad_init", "not_learning"}
    assert "bad_init" in alarms(Run(SHRINKS, losses=few * np.linspace(1, 9, 30)))


def slow(fall, n=300, noise=0.02):
    return 2.3 - np.linspace(0, fall, n) + np.random.default_rng(4).normal(0, noise, n)


@pytest.mark.parametrize("info", [{}, CE])
def test_a_loss_that_falls_slowly_and_steadily_is_a_note(info):
    rates = weights(update_ratio=[3e-5] * 4)

    f = found(Run(params=rates, losses=slow(0.09), info=info), "not_learning")

    assert (f.severity, "slowly" in f.evidence) == ("note", True)
    assert alarms(Run(params=rates, losses=slow(0.09), info=info)) == set()
    assert alarms(Run(params=rates, losses=slow(0.01))) == {"lr_too_low", "not_learning"}


def test_a_drop_to_chance_that_then_stays_is_no_slow_fall():
    drops = FLAT + 0.08 * np.exp(-np.arange(300) / 20)

    assert alarms(Run(losses=drops)) == {"not_learning"}
    assert alarms(Run(losses=slow(0.09, noise=1.0))) == {"not_learning"}


def regression(numel=1, std=1.0):
    record = acts(std=[1, 1, std])
    p = weights(3, update_norm=[0.05] * 3)
    names = (*p.names[:2], "2.bias")
    return {
        "activations": record,
        "params": dataclasses.replace(p, names=names, meta={**p.meta, "numel": [64, 64, numel]}),
        "info": MSE,
    }


def test_a_regression_that_had_learnt_before_may_stay_at_the_floor_of_its_noise():
    floor = FLAT / 10  # of a variance of 1

    assert alarms(Run(**regression(), losses=floor)) == set()
    for other in (regression(std=0.5), regression(numel=8), regression() | {"info": {}}):
        assert alarms(Run(**other, losses=floor)) == {"not_learning"}
    assert "diverging" in alarms(Run(**regression(), losses=floor * np.linspace(1, 9, 300)))


@pytest.mark.parametrize("noise", [0.04, 0.4])
def test_a_loss_in_whose_noise_a_fall_may_hide_is_a_note(noise):
    stays = 1 + noise * np.random.default_rng(2).normal(size=300)

    f = found(Run(losses=stays), "not_learning")

    assert f.severity == ("note" if noise > 0.3 else "warning")
    assert ("so noisy" in f.evidence) == (noise > 0.3)
    assert "diverging" in alarms(Run(losses=stays * np.linspace(1, 3, 300)))


def test_a_fall_shows_in_ten_steps_and_a_rate_is_then_judged_by_it():
    fast, falls = weights(n=12, update_ratio=[0.2] * 4), np.linspace(2.3, 1.2, 12)

    assert alarms(Run(params=fast, losses=falls)) == set()
    assert alarms(Run(params=fast, losses=np.full(12, 2.3))) == {"lr_too_high"}


# excused


def test_a_loss_that_need_not_fall_is_no_witness_for_other_rules():
    turns = weights(5, update_norm=[EVEN, EVEN, EVEN, ~EVEN, ~EVEN])

    assert alarms(Run(SHRINKS, params=turns, losses=FLAT)) == set()
    assert "bad_init" in alarms(Run(SHRINKS, params=weights(5), losses=FLAT))


def episodes(growth):
    return acts(count=[np.linspace(20, 20 * growth, N)] * 3)


def test_episodes_that_last_longer_make_a_loss_that_rises():
    rises = np.linspace(3, 9, 300)

    f = found(Run(episodes(8), losses=rises), "not_learning")

    assert f.severity == "note"
    assert "times as much at the end" in f.evidence
    assert alarms(Run(episodes(1.2), losses=rises)) == {"diverging"}


# the first loss


def test_a_wild_first_loss_that_never_comes_below_chance_is_an_alarm():
    wild = falling(start=16.0, end=3.3)

    assert alarms(Run(losses=wild, info=CE)) == {"initial_loss"}
    assert alarms(Run(losses=falling(start=16.0, end=1.0), info=CE)) == set()


def test_targets_that_nobody_standardised_are_named_where_the_loss_stays():
    far = 2.7e4 * (1 + 0.01 * np.random.default_rng(0).normal(size=300))

    f = found(Run(losses=far, info=MSE), "target_scale")

    assert (f.severity, diagnose(Run(losses=far, info=MSE))[0].rule) == ("warning", "target_scale")
    assert f.evidence.startswith("the first error is 16")
    assert alarms(Run(losses=falling(start=2.7e4, end=3e3), info=MSE)) == set()
    assert "target_scale" not in diagnose(Run(losses=far / 1e3, info=MSE)).rules
    assert "target_scale" not in diagnose(Run(losses=far)).rules


# initial weights


def test_what_pytorchs_own_weights_do_to_the_variance_is_no_alarm():
    assert found(Run(DEFAULT, losses=FLAT), "bad_init").severity == "note"
    grows = acts(("Linear",) * 5, std=[1, 2, 5, 12.5, 1])

    assert found(Run(grows, losses=FLAT), "bad_init").severity == "warning"


def test_weights_that_begin_too_large_come_before_what_they_bring():
    grows = acts(("Linear",) * 5, std=[1, 12, 150, 1500, 1], nonfinite=[0, 0, 0, 0, EVEN])
    run = Run(grows, params=weights(update_ratio=[2.0] * 4), losses=FLAT)

    assert [f.rule for f in diagnose(run)][:3] == ["bad_init", "non_finite", "lr_too_high"]


# the learning rate


def leaps(to):
    ratio = np.full((4, N), 1e-3)
    ratio[:, 0] = to
    return weights(update_ratio=ratio)


@pytest.mark.parametrize(("losses", "severity"), [(falling(), "warning"), (None, "warning")])
def test_one_step_larger_than_the_weights_is_too_high_whatever_the_loss_says(losses, severity):
    assert found(Run(params=leaps(4.0), losses=losses), "lr_too_high").severity == severity
    assert alarms(Run(params=leaps(0.9), losses=losses)) == set()


def test_a_rate_too_high_comes_before_the_units_it_kills():
    later = np.zeros((3, N))
    later[1, 20:] = 0.95

    d = diagnose(Run(acts(dead=later), params=leaps(4.0)))

    assert [(f.rule, f.severity) for f in d] == [("lr_too_high", "error"), ("dead", "error")]


def test_steps_that_never_count_need_no_loss_to_be_too_small():
    slow, once = weights(update_ratio=[3e-7] * 4), np.full((4, N), 3e-7)
    once[:, 5] = 1e-3

    for losses in (None, FLAT[:30]):
        assert alarms(Run(params=slow, losses=losses)) == {"lr_too_low"}
        for ratio in (once, [3e-5] * 4):
            assert alarms(Run(params=weights(update_ratio=ratio), losses=losses)) == set()
    assert alarms(Run(params=slow, losses=falling())) == set()


def test_a_net_that_broke_in_its_first_steps_is_not_slow():
    broke = np.zeros((4, N))
    broke[:, 0] = 0.3
    sampled = dataclasses.replace(weights(update_ratio=broke), steps=10 * np.arange(N))

    rules = diagnose(Run(params=sampled, losses=FLAT)).rules

    assert "lr_too_high" in rules
    assert "lr_too_low" not in rules


def test_weights_that_are_all_zero_and_partly_stay_there_need_no_loss_that_stays():
    norm = np.full((3, N), 5.0)
    norm[:, 0] = 0
    part = weights(3, weight_norm=[0, 0, norm[2]], update_norm=[0, 0, 1])
    all_move = weights(3, weight_norm=norm)
    one = weights(1, weight_norm=norm[:1])

    assert "zero_init" in alarms(Run(params=part, losses=falling()))
    assert "zero_init" not in alarms(Run(params=all_move, losses=falling()))
    assert "zero_init" not in alarms(Run(params=one, losses=falling()))


def test_a_decay_that_is_set_comes_before_the_steps_it_makes():
    info = {"lr": [0.01], "weight_decay": [10.0]}

    d = diagnose(Run(params=weights(update_ratio=[0.3] * 4), losses=FLAT, info=info))

    assert [f.rule for f in d][:2] == ["weight_decay", "lr_too_high"]


def test_an_eps_that_holds_adam_back_is_named():
    info = {"optimizer": "Adam", "lr": [1e-3]}
    held = weights(update_norm=[8e-5] * 4)  # of 64 weights: 1e-5 each

    f = found(Run(params=held, losses=slow(0.09), info=info), "lr_too_low")

    assert (f.severity, "eps" in f.cause) == ("warning", True)
    assert "by 0.01 of its learning rate" in f.evidence
    assert "Adam moves" in f.evidence
    for other in ({"optimizer": "SGD", "lr": [1e-3]}, {**info, "lr": [1e-5]}):
        assert alarms(Run(params=held, losses=slow(0.09), info=other)) == set()
    assert alarms(Run(params=held, losses=falling(), info=info)) == set()


def test_the_excuse_is_looked_for_once(monkeypatch):
    seen = []
    monkeypatch.setattr(loss_expectations, "_has_both_signs", lambda run: bool(seen.append(run)))

    diagnose(Run(SHRINKS, params=weights(5), losses=FLAT))

    assert len(seen) == 1


def test_a_loss_that_rises_further_than_the_steps_explain_has_other_data():
    small = weights(4, grad_norm=[0.1] * 4, update_norm=[0.05] * 4)  # 0.02 a step, 2 in all
    fading = weights(4, grad_norm=[0.1] * 4, update_norm=[0.05] * 4, grad_rms=FADES)
    rises, further = 3 + np.linspace(0, 1, N), 3 + np.linspace(0, 8, N)

    f = found(Run(params=small, losses=further), "not_learning")

    assert f.severity == "note"
    assert "times as far as gradients and steps explain" in f.evidence
    assert alarms(Run(params=small, losses=rises)) == {"ascent", "not_learning"}
    assert alarms(Run(params=small, losses=further, info=CE)) == {"diverging"}
    assert alarms(Run(params=fading, losses=further)) == set()  # actor and critic: no one depth
    assert "vanishing" in alarms(Run(params=fading, losses=rises)) & alarms(Run(params=fading))


FADES = [1e-7, 1e-5, 1e-3, 1e-2]


def test_spikes_are_a_note_where_the_data_change():
    spiky = 3 + np.linspace(0, 8, 300)
    spiky[[100, 150, 200, 250]] = 90.0
    small = weights(4, n=300, grad_norm=[0.1] * 4, update_norm=[0.01] * 4)

    assert found(Run(params=small, losses=spiky), "spikes").severity == "note"
    assert found(Run(losses=spiky), "spikes").severity == "warning"


def test_noise_of_factors_is_no_spike_where_some_losses_are_0_or_below():
    wild = 10 * np.exp(1.5 * np.random.default_rng(0).normal(size=300))
    wild[[100, 150, 200]] *= [8, 6, 7]
    dips = wild.copy()
    dips[::20] = -0.1  # advantages may be

    assert "spikes" not in alarms(Run(losses=wild))
    assert "spikes" not in alarms(Run(losses=dips))
    level = np.full(300, 10.0) + np.random.default_rng(0).normal(0, 0.5, 300)
    level[::20], level[[100, 150, 201, 250]] = -0.1, 90.0
    assert "spikes" in alarms(Run(losses=level))


def test_what_was_no_number_in_the_first_step_comes_first():
    broken = acts(nonfinite=[0, 0, 1.0], max=[3.0, 3.0, 3.0])
    late = acts(nonfinite=[0, 0, np.arange(N) > 50])
    still = weights(3, update_norm=[0, 1, 1], grad_norm=[0, 1, 1])

    assert diagnose(Run(broken, params=still))[0].rule == "non_finite"
    assert diagnose(Run(late, params=still))[0].rule == "zero_gradient"


@pytest.mark.parametrize(("n", "every", "told"), [(5, 10, True), (4, 20, False), (6, 5, False)])
def test_half_as_many_records_do_where_they_lie_apart(n, every, told):
    still = weights(3, n=n, update_norm=[0, 1, 1])
    apart = dataclasses.replace(still, steps=every * np.arange(n))

    assert ("unmoved" in diagnose(Run(params=apart)).rules) == told
