"""Rules on the optimizer's steps: learning rate, momentum, weight decay, ascent."""

import dataclasses

import numpy as np
import pytest
from health_runs import CE, FLAT, N, acts, alarms, falling, first, found, weights

from hookkit.health import diagnose
from hookkit.records import Run


def test_lr_too_high_needs_most_matrices_and_a_loss_that_stays():
    fast = weights(update_ratio=[0.3] * 3 + [1e-3])

    assert found(Run(params=fast, losses=FLAT), "lr_too_high").severity == "error"
    assert found(Run(params=fast), "lr_too_high").severity == "warning"
    assert alarms(Run(params=fast, losses=falling())) == set()
    assert "lr_too_high" not in alarms(
        Run(params=weights(update_ratio=[0.3] + [1e-3] * 3), losses=FLAT)
    )


@pytest.mark.parametrize(("begins", "named"), [(0.001, False), (0.05, True)])
def test_tiny_weights_may_grow_to_a_usual_size_with_one_step(begins, named):
    grows = np.linspace(begins, 20 * begins, N)
    jumps = weights(
        weight_norm=[64 * grows] * 4, update_ratio=[np.r_[2.0, np.full(N - 1, 1e-3)]] * 4
    )
    values = {**jumps.values, "weight_rms": np.tile(grows, (4, 1))}
    jumps = dataclasses.replace(jumps, values=values, meta={**jumps.meta, "shape": [[64, 64]] * 4})

    assert ("lr_too_high" in alarms(Run(params=jumps, losses=falling()))) == named


def test_lr_too_low_warns_only_if_the_loss_does_not_fall():
    slow = weights(update_ratio=[1e-6] * 4)

    assert found(Run(params=slow, losses=FLAT), "lr_too_low").severity == "warning"
    low = weights(update_ratio=[5e-5] * 4)
    assert found(Run(params=low), "lr_too_low").severity == "note"
    assert alarms(Run(params=slow, losses=falling())) == set()


def test_an_agent_whose_weights_hardly_move_has_a_rate_that_is_too_low():
    slow, noisy = weights(update_ratio=[1e-4] * 4), falling(end=1.2)

    def rules(params, losses=noisy, **info):
        return alarms(Run(params=params, losses=losses, info=info))

    assert rules(slow, asked=[64, 64]) == {"lr_too_low"}
    assert rules(slow, falling(end=0.01), asked=[64, 64]) == set()  # little of the loss is left
    assert rules(slow, noisy[:40], asked=[64, 64]) == set()
    assert rules(weights(update_ratio=[1e-2] * 4), asked=[64, 64]) == set()
    tuned = dataclasses.replace(
        slow, types=("Linear",) * 3 + ("LayerNorm",), meta={**slow.meta, "constant": [False] * 4}
    )
    assert rules(tuned, asked=[64, 64]) == set()  # it had been trained before
    begun = dataclasses.replace(  # as DCGAN's norms begin: weights at random, biases at 0
        tuned,
        names=("a.weight", "b.weight", "norm.weight", "norm.bias"),
        types=("Linear",) * 2 + ("BatchNorm2d",) * 2,
        meta={**slow.meta, "constant": [False] * 3 + [True]},
    )
    assert rules(begun, asked=[64, 64]) == {"lr_too_low"}


def test_a_leap_in_a_recurrence_that_the_loss_does_not_feel_is_a_note():
    norms, quiet = np.ones((4, N)), falling()
    norms[:, 30] = 100
    cells = dataclasses.replace(weights(grad_norm=norms), types=("RNN",) * 4)
    felt = quiet.copy()
    felt[31] = 10 * quiet[0]

    assert found(Run(params=cells, losses=quiet), "exploding").severity == "note"
    assert found(Run(params=cells, losses=felt), "exploding").severity == "warning"
    assert "exploding" in alarms(Run(params=cells))


def test_vectors_and_embeddings_do_not_count_for_the_learning_rate():
    fast = weights(update_ratio=[1.0] * 4, ndim=1)
    tokens = dataclasses.replace(weights(update_ratio=[1.0] * 4), types=("Embedding",) * 4)

    assert "lr_too_high" not in alarms(Run(params=fast, losses=FLAT))
    assert "lr_too_high" not in alarms(Run(params=tokens, losses=FLAT))


def test_matrices_that_begin_at_zero_may_move_far():
    norm = np.full((4, N), 5.0)
    norm[:, 0] = 0
    ratio = np.full((4, N), 1e-3)
    ratio[:, 0] = np.inf

    assert alarms(Run(params=weights(weight_norm=norm, update_ratio=ratio), losses=FLAT)) == {
        "not_learning", "zero_init",
    }  # fmt: skip


def test_first_steps_away_from_zero_are_no_high_learning_rate():
    norm, ratio = np.full((4, N), 5.0), np.full((4, N), 0.9)
    norm[:, 0] = 0

    assert "lr_too_high" not in alarms(
        Run(params=weights(weight_norm=norm, update_ratio=ratio), losses=FLAT)
    )


def test_a_learning_rate_is_not_both_too_high_and_too_low():
    ratio = np.full((4, N), 1e-6)
    ratio[:, :20] = 0.9

    said = {f.rule for f in diagnose(Run(params=weights(update_ratio=ratio), losses=FLAT))}
    assert "lr_too_high" in said
    assert "lr_too_low" not in said


def test_weight_decay_by_its_setting_and_by_what_it_does():
    gone = weights(weight_norm=np.geomspace(5, 1e-3, N)[None].repeat(4, 0))

    assert found(Run(params=weights(), losses=falling(), info={"lr": [0.01], "weight_decay": [10]}),
                 "weight_decay").severity == "warning"  # fmt: skip
    assert found(Run(params=gone, losses=FLAT), "weight_decay").severity == "error"
    usual = {"lr": [1e-3, 1e-3], "weight_decay": [0.1, 0.0]}
    assert alarms(Run(params=weights(), losses=falling(), info=usual)) == set()


def test_a_head_that_trains_alone_may_move_far():
    jumps = np.full((1, N), 1e-2)
    jumps[:, :30] = 0.6

    assert alarms(Run(params=weights(1, update_ratio=jumps), losses=falling())) == set()
    assert "lr_too_high" in alarms(Run(params=weights(1, update_ratio=jumps), losses=FLAT))


def test_lbfgs_chooses_its_own_step():
    d = diagnose(Run(params=weights(update_ratio=[2.0] * 4), info={"optimizer": "LBFGS"}))

    assert d.healthy
    assert dict(d.unjudged)["lr_too_high"] == "LBFGS searches its own step"


def test_a_low_rate_names_what_else_makes_steps_small():
    still = np.zeros((4, N))
    still[:, ::10] = 1e-6
    swallowed = weights(update_ratio=still)

    assert "precision" in found(Run(params=swallowed, losses=FLAT), "lr_too_low").cause


def test_clipped_gradients_come_before_the_small_steps_that_they_cause():
    clipped = weights(update_ratio=[1e-7] * 4, grad_norm=[1e-5] * 4)

    rules = diagnose(Run(params=clipped, losses=np.geomspace(2, 1.5, N))).rules

    assert rules.index("clipping") < rules.index("lr_too_low")


def jumps(to):
    ratio = np.full((4, N), 1e-3)
    ratio[:, 0] = to
    return weights(update_ratio=ratio)


def test_one_step_larger_than_the_weights_is_too_high_where_no_loss_is_known():
    assert found(Run(params=jumps(4.0)), "lr_too_high").severity == "warning"
    assert alarms(Run(params=jumps(0.9))) == set()


def test_while_the_loss_falls_steps_are_too_large_that_blow_the_weights_up():
    grown = np.tile(np.geomspace(5.0, 50.0, N), (4, 1))
    blown = dataclasses.replace(jumps(0.9), values={**jumps(0.9).values, "weight_norm": grown})

    assert found(Run(params=blown, losses=falling()), "lr_too_high").severity == "warning"
    assert alarms(Run(params=jumps(4.0), losses=falling())) == set()
    assert alarms(Run(params=weights(weight_norm=grown), losses=falling())) == set()


def of_groups(rates, optimizers=("Adam",), **values):
    """Four matrices, the last two with the last rate and the last optimizer."""
    lr = [rates[0]] * 2 + [rates[-1]] * 2
    made = weights(lr=lr, **values)
    of = [optimizers[0]] * 2 + [optimizers[-1]] * 2
    return dataclasses.replace(made, meta={**made.meta, "optimizer": of})


def test_matrices_of_another_rate_are_judged_by_themselves():
    ratio = [0.3, 0.3, 1e-3, 1e-3]

    for own in (of_groups([0.1, 1e-3], update_ratio=ratio),
                of_groups([0.1], ["Adam", "SGD"], update_ratio=ratio)):  # fmt: skip
        assert found(Run(params=own, losses=FLAT), "lr_too_high").layers == (
            "0.weight", "1.weight",
        )  # fmt: skip
    one = of_groups([0.1], update_ratio=ratio)
    assert "lr_too_high" not in alarms(Run(params=one, losses=FLAT))


def test_one_matrix_with_a_rate_of_its_own_is_no_majority():
    made = weights(lr=[0.1, 1e-3, 1e-3, 1e-3], update_ratio=[0.3, 1e-3, 1e-3, 1e-3])
    own = dataclasses.replace(made, meta={**made.meta, "optimizer": ["Adam"] * 4})
    alone = weights(1, update_ratio=[0.3])

    assert "lr_too_high" not in alarms(Run(params=own, losses=FLAT))
    assert "lr_too_high" in alarms(Run(params=alone, losses=FLAT))


def test_a_rate_that_is_almost_nothing_for_half_of_the_run_is_named():
    early = np.where(np.arange(N) < 30, 0.1, 1e-5)
    late = np.where(np.arange(N) < 80, 0.1, 1e-5)

    f = found(Run(params=weights(lr=[early] * 4), losses=falling()), "lr_too_low")

    assert "in 70% of the records" in f.evidence
    assert "scheduler" in f.fix
    assert alarms(Run(params=weights(lr=[late] * 4), losses=falling())) == set()


def test_steps_that_together_move_nothing_are_too_small_though_the_loss_falls():
    tiny = weights(update_ratio=[1e-6] * 4)

    f = found(Run(params=tiny, losses=falling(start=2.3, end=2.0)), "lr_too_low")

    assert "by 0.01% of their weight" in f.evidence
    assert alarms(Run(params=tiny, losses=falling(start=2.3, end=0.5))) == set()
    learnt = falling(start=0.5, end=0.4)  # a model that had learnt before
    assert alarms(Run(params=tiny, losses=learnt, info={"n_classes": 10})) == set()


def test_decay_that_pulls_harder_than_the_gradient_is_named_though_the_loss_falls():
    shrinks = np.tile(np.geomspace(5.0, 1.0, N), (4, 1))
    made = weights(weight_norm=shrinks, grad_norm=[0.1] * 4)

    def decaying(decay):
        meta = {**made.meta, "weight_decay": [decay] * 4}
        return Run(params=dataclasses.replace(made, meta=meta), losses=falling())

    f = found(decaying(1.0), "weight_decay")

    assert (f.severity, "times the gradient" in f.evidence) == ("warning", True)
    late = np.tile(np.where(np.arange(N) < 30, 100.0, 0.1), (4, 1))  # large gradients at first
    made = weights(weight_norm=shrinks, grad_norm=late)
    assert "weight_decay" in alarms(decaying(1.0))
    assert alarms(decaying(1e-3)) == set()


def test_embeddings_that_are_all_of_a_model_are_judged_by_their_decay():
    gone = weights(weight_norm=[np.geomspace(5, 1e-3, N)] * 4, grad_norm=[1e-3] * 4)
    gone = dataclasses.replace(
        gone, types=("Embedding",) * 4, meta={**gone.meta, "weight_decay": [0.1] * 4}
    )

    f = found(Run(params=gone, losses=falling()), "weight_decay")

    assert f.evidence.startswith("4 of 4 matrices shrank")


def test_the_largest_decay_of_a_step_is_that_of_the_rate_it_was_made_with():
    made = weights(lr=[np.where(np.arange(N) < 50, 0.1, 0.0)] * 4)
    strong = dataclasses.replace(made, meta={**made.meta, "weight_decay": [0.2] * 4})

    assert "weight_decay" in alarms(Run(params=strong, losses=falling(), info={"lr": [0.0]}))


def test_a_rate_too_high_comes_before_the_units_it_kills():
    later = np.zeros((3, N))
    later[1, 20:] = 0.95

    d = diagnose(Run(acts(dead=later), params=jumps(4.0)))

    assert [(f.rule, f.severity) for f in d] == [("lr_too_high", "error"), ("dead", "error")]


def test_steps_far_too_small_need_no_loss_as_proof():
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


def test_a_high_weight_decay_comes_before_the_steps_it_makes():
    info = {"lr": [0.01], "weight_decay": [10.0]}

    d = diagnose(Run(params=weights(update_ratio=[0.3] * 4), losses=FLAT, info=info))

    assert [f.rule for f in d][:2] == ["weight_decay", "lr_too_high"]


def rising(by, n=N):
    noise = np.random.default_rng(0).normal(0, 0.01, n)
    return 2.0 + np.linspace(0, by, n) + noise


def test_maximize_is_ascent_where_the_loss_cannot_be_meant_to_rise():
    info = {**CE, "maximize": True}

    assert "maximize=True" in found(Run(losses=rising(3.0), info=info), "ascent").evidence
    assert "ascent" not in diagnose(Run(losses=falling(), info=info)).rules
    assert "ascent" not in diagnose(Run(losses=rising(3.0), info={"maximize": True})).rules


def test_a_momentum_near_1_is_named_where_the_loss_does_not_fall():
    f = found(Run(losses=FLAT, info={"momentum": [0.9, 0.999]}), "momentum")

    assert "for 1000 steps (the run has 300)" in f.evidence
    assert "momentum" in alarms(Run(losses=falling(), info={"momentum": [0.999]}))
    assert "momentum" not in diagnose(Run(losses=falling(), info={"momentum": [0.995]})).rules
    assert "momentum" not in diagnose(Run(losses=FLAT, info={"momentum": [0.99]})).rules
    assert dict(diagnose(Run(losses=FLAT)).unjudged)["momentum"] == "momentum unknown"


def test_momentum_comes_before_its_effects():
    rises = np.linspace(2.3, 9, 300)

    assert diagnose(Run(losses=rises, info={"momentum": [0.999]})).rules == (
        "momentum",
        "not_learning",
    )


def test_a_usual_weight_decay_is_not_blamed_for_a_learning_rate_that_is_too_high():
    made = weights(lr=[1.0] * 4, update_ratio=[0.3] * 4)
    usual, large = (
        dataclasses.replace(made, meta={**made.meta, "weight_decay": [decay] * 4})
        for decay in (0.1, 1.0)
    )

    assert first(Run(params=usual, losses=FLAT)) == "lr_too_high"
    assert "weight_decay" not in alarms(Run(params=usual, losses=FLAT))
    assert first(Run(params=large, losses=FLAT)) == "weight_decay"


def test_a_model_of_embeddings_alone_can_have_a_rate_that_is_too_low():
    tokens = dataclasses.replace(weights(update_ratio=[1e-6] * 4), types=("Embedding",) * 4)

    assert "lr_too_low" in alarms(Run(params=tokens, losses=FLAT))
    assert "lr_too_low" not in alarms(Run(params=tokens, losses=falling()))


def test_weights_that_grow_without_a_gain_show_a_rate_that_is_too_high():
    grown = weights(weight_norm=np.tile(np.linspace(5, 11, N), (4, 1)))
    steady = weights(weight_norm=np.tile(np.linspace(5, 9, N), (4, 1)))

    assert "lr_too_high" in alarms(Run(params=grown, losses=FLAT))
    assert "lr_too_high" not in alarms(Run(params=grown, losses=falling()))
    assert "lr_too_high" not in alarms(Run(params=steady, losses=FLAT))
