"""Losses that need not fall: of players, of both signs, of a target or data that move."""

import numpy as np
import pytest
from health_runs import CE, EVEN, FLAT, N, acts, alarms, found, sized, weights

from hookkit.health import diagnose, loss_expectations
from hookkit.records import Run


def test_players_that_move_in_turns_need_not_lower_their_loss():
    turns = weights(update_norm=[EVEN, EVEN, ~EVEN, ~EVEN])

    assert found(Run(params=turns, losses=FLAT), "not_learning").severity == "note"
    assert alarms(Run(params=turns, losses=FLAT)) == set()


def test_a_player_that_moves_between_the_records_does_move():
    norm = np.tile(5.0 + 0.01 * np.arange(N), (4, 1))
    every_other = weights(update_norm=[1, 1, 0, 0], weight_norm=norm)

    assert alarms(Run(params=every_other, losses=FLAT)) == set()


def test_parts_that_are_trained_one_after_the_other_are_no_players():
    early = np.arange(N) < N // 2
    phases = weights(update_norm=[early, early, ~early, ~early])

    assert "not_learning" in alarms(Run(params=phases, losses=FLAT))


def signed(start, end, noise=0.1, n=300):
    return np.linspace(start, end, n) + np.random.default_rng(5).normal(0, noise, n)


def test_a_loss_with_both_signs_need_not_fall():
    policy, energy = signed(-0.05, 0.05), signed(0, 0.2)

    for series in (policy, energy):
        f = found(Run(losses=series), "not_learning")
        assert f.severity == "note"
        assert "Spinning Up" in f.source
    assert "not_learning" in alarms(Run(losses=signed(0, 30)))
    assert alarms(Run(losses=policy, info={"loss_func": "MSELoss"})) != set()  # cannot be below 0


def test_a_loss_that_begins_at_0_can_only_rise():
    grows = np.r_[0.0, np.linspace(1e-3, 4e-3, 299)]

    assert alarms(Run(losses=grows)) == set()
    assert "not_learning" in alarms(Run(losses=grows + 1e-3))


def test_a_target_that_follows_the_model_moves_the_loss():
    drifting = np.tile(5.0 + 0.01 * np.arange(N), (4, 1))
    facts = {"requires_grad": [True, True, False, False], "update_norm": [1, 1, 0, 0]}
    facts |= {"in_optimizer": [True, True, False, False]}
    follows, rests = weights(**facts, weight_norm=drifting), weights(**facts)

    f = found(Run(params=follows, losses=FLAT), "not_learning")

    assert f.severity == "note"
    assert "2.weight, frozen, follows" in f.evidence
    assert alarms(Run(params=rests, losses=FLAT)) == {"not_learning"}


def test_a_loss_that_goes_through_another_model_need_not_fall():
    rises = np.linspace(0.8, 1.6, 300)

    f = found(Run(losses=rises, info={"others_weights": 6}), "not_learning")

    assert f.severity == "note"
    assert f.evidence.endswith("6 weights of another model take part in it")
    assert "not_learning" in alarms(Run(losses=rises))


@pytest.mark.parametrize(
    ("asked", "loss_func", "need_not_fall"),
    [
        ([64, 64], "SmoothL1Loss", True),
        ([4, 4], None, True),  # before a step in sixteen, as PPO does
        ([64, 1], "MSELoss", False),  # an evaluation on the same samples
        ([2, 2], "MSELoss", False),
        ([64, 64], "CrossEntropyLoss", False),
        (None, "MSELoss", False),
    ],
)
def test_what_an_agent_is_to_learn_changes(asked, loss_func, need_not_fall):
    rises = np.linspace(0.8, 1.6, 300)
    run = Run(losses=rises, info={"asked": asked, "loss_func": loss_func})

    assert found(run, "not_learning").severity == ("note" if need_not_fall else "error")


def test_a_loss_that_never_changes_is_no_agents():
    stays = Run(losses=np.full(300, 0.6931), info={"asked": [64, 64]})  # DPO against itself

    assert found(stays, "not_learning").severity == "warning"


def test_a_loss_that_need_not_fall_is_no_proof_for_other_rules():
    turns = sized(0.005, 5, update_norm=[EVEN, EVEN, EVEN, ~EVEN, ~EVEN])

    assert alarms(Run(acts(), params=turns, losses=FLAT)) == set()
    assert "bad_init" in alarms(Run(acts(), params=sized(0.005, 5), losses=FLAT))


def test_why_a_loss_need_not_fall_is_computed_once(monkeypatch):
    seen = []
    monkeypatch.setattr(loss_expectations, "_has_both_signs", lambda run: bool(seen.append(run)))

    diagnose(Run(acts(), params=weights(5), losses=FLAT))

    assert len(seen) == 1


def test_a_loss_that_rises_further_than_the_steps_explain_has_other_data():
    small = weights(4, grad_norm=[0.1] * 4, update_norm=[0.05] * 4)  # 0.02 a step, 2 in all
    fading = weights(4, grad_norm=[0.1] * 4, update_norm=[0.05] * 4, grad_rms=FADES)
    rises, further = 3 + np.linspace(0, 1, N), 3 + np.linspace(0, 8, N)

    f = found(Run(params=small, losses=further), "not_learning")

    assert f.severity == "note"
    assert "times as far as gradients and steps explain" in f.evidence
    assert alarms(Run(params=small, losses=rises)) == {"not_learning"}
    assert alarms(Run(params=small, losses=further, info=CE)) == {"not_learning"}
    assert alarms(Run(params=fading, losses=further)) == set()  # actor and critic: no one depth
    assert "vanishing" in alarms(Run(params=fading, losses=rises)) & alarms(Run(params=fading))


FADES = [1e-7, 1e-5, 1e-3, 1e-2]


def test_a_loss_that_hovers_just_below_zero_is_a_difference():
    hovers = np.random.default_rng(0).normal(-0.05, 0.04, 200)
    density = -1.0 + np.random.default_rng(0).normal(0, 0.04, 200)

    assert alarms(Run(losses=hovers + np.linspace(0, 0.05, 200))) == set()
    assert alarms(Run(losses=density + np.linspace(0, 0.8, 200))) == {"not_learning"}
