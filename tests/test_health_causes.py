"""The cause before its consequence, and silence where an odd sight is meant.

Each test is a kind of training that a rule once misjudged: GANs, experts, gates, fine-tuning, …
"""

import dataclasses
import warnings

import made
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_health import FLAT, N, acts, alarms, falling, found, weights
from torch import nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.health import Diagnosis, diagnose
from hookkit.records import Record, Run

EVEN = np.arange(N) % 2 == 0
CE = {"n_classes": 10, "loss_func": "CrossEntropyLoss"}


def first(run):
    return diagnose(run)[0].rule


# losses


def test_players_that_move_in_turns_need_not_lower_their_loss():
    turns = weights(update_norm=[EVEN, EVEN, ~EVEN, ~EVEN])

    assert found(Run(params=turns, losses=FLAT), "not_learning").severity == "note"
    assert alarms(Run(params=turns, losses=FLAT)) == set()


def test_a_player_that_moves_between_the_records_is_not_still():
    norm = np.tile(5.0 + 0.01 * np.arange(N), (4, 1))
    every_other = weights(update_norm=[1, 1, 0, 0], weight_norm=norm)

    assert alarms(Run(params=every_other, losses=FLAT)) == set()


def test_parts_that_are_trained_one_after_the_other_are_no_game():
    early = np.arange(N) < N // 2
    phases = weights(update_norm=[early, early, ~early, ~early])

    assert "not_learning" in alarms(Run(params=phases, losses=FLAT))


def test_a_loss_that_leaps_with_the_first_step_did_not_fall():
    leaps = np.r_[2.3, np.geomspace(1e4, 3.4, 40), np.full(259, 3.4)]
    fast = weights(update_ratio=[0.9] * 4)

    assert found(Run(losses=leaps), "not_learning").evidence.startswith("the loss began at 2.3")
    assert found(Run(params=fast, losses=leaps), "lr_too_high").severity == "error"


def test_one_lucky_first_batch_is_no_leap():
    lucky = np.random.default_rng(0).lognormal(-3, 1, 300) * np.linspace(1, 0.5, 300)
    lucky[0] = 1e-4

    assert alarms(Run(losses=lucky)) == set()


def test_a_frozen_model_that_does_not_learn_is_told_so():
    p = weights(update_norm=[0, 0, 0, 1], requires_grad=[False] * 3 + [True])

    assert "3 of 4 matrices are frozen" in found(Run(params=p, losses=FLAT), "not_learning").cause
    assert "frozen" not in found(Run(params=weights(), losses=FLAT), "not_learning").cause


def test_a_loss_below_where_it_can_be_is_sick():
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


def test_probabilities_where_their_logarithm_is_expected():
    softmax = acts(("Linear", "ReLU", "Linear", "Softmax"))

    f = found(Run(softmax, losses=falling(), info={"loss_func": "NLLLoss"}), "probabilities")

    assert "NLLLoss" in f.source
    assert "log_softmax" in f.fix


def test_small_losses_jump_by_factors():
    noisy = np.random.default_rng(3).lognormal(-4, 0.8, 300)
    broken = noisy.copy()
    broken[[100, 150, 200, 250]] = 50.0

    assert "spikes" not in {f.rule for f in diagnose(Run(losses=noisy))}
    assert found(Run(losses=broken), "spikes").severity == "warning"


# steps and gradients


def test_a_head_that_trains_alone_may_leap():
    leaps = np.full((1, N), 1e-2)
    leaps[:, :30] = 0.6

    assert alarms(Run(params=weights(1, update_ratio=leaps), losses=falling())) == set()
    assert "lr_too_high" in alarms(Run(params=weights(1, update_ratio=leaps), losses=FLAT))


def test_lbfgs_chooses_its_own_step():
    d = diagnose(Run(params=weights(update_ratio=[2.0] * 4), info={"optimizer": "LBFGS"}))

    assert d.healthy
    assert dict(d.unjudged)["lr_too_high"] == "LBFGS searches its own step"


def test_a_last_matrix_that_began_at_zero_holds_gradients_back():
    norm = np.full((4, N), 5.0)
    norm[3, 0] = 0
    held = weights(grad_rms=[1e-9, 1e-9, 1e-9, 1e-3], weight_norm=norm)

    assert alarms(Run(params=held, losses=falling())) == set()


def test_one_first_matrix_without_gradient_is_no_fading():
    one = weights(6, grad_rms=[1e-7, 1e-3, 1e-2, 1e-2, 1e-2, 1e-2])
    many = weights(6, grad_rms=[1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])

    assert alarms(Run(params=one, losses=falling())) == set()
    assert "vanishing" in alarms(Run(params=many, losses=falling()))


def test_a_low_rate_says_what_else_makes_steps_small():
    still = np.zeros((4, N))
    still[:, ::10] = 1e-6
    swallowed = weights(update_ratio=still)
    clipped = weights(update_ratio=[1e-7] * 4, grad_norm=[1e-5] * 4)

    assert "precision" in found(Run(params=swallowed, losses=FLAT), "lr_too_low").cause
    assert "clipped" in found(Run(params=clipped, losses=FLAT), "lr_too_low").cause
    assert (
        "clipped"
        not in found(Run(params=weights(update_ratio=[1e-7] * 4), losses=FLAT), "lr_too_low").cause
    )


# what stays put


def test_a_layer_that_never_runs_is_told_from_a_cut_graph():
    asleep = acts(rms=[1, 1, np.nan])
    p = weights(3, update_norm=[1, 1, 0], grad_norm=[1, 1, np.nan])

    assert "never runs" in found(Run(asleep, params=p), "no_gradient").evidence
    assert "detach()" in found(Run(acts(), params=p), "no_gradient").cause


def test_a_rate_that_is_zero_too_soon_is_named_and_an_arrival_is_not():
    stop, fading = np.arange(N) < 3, np.where(np.arange(N) < 3, 1.0, 1e-9)
    halted = weights(update_norm=[stop] * 4)

    f = found(Run(params=halted, losses=FLAT), "unmoved")

    assert f.evidence == "no matrix moves after step 2, though gradients go on"
    assert "schedule" in f.cause
    assert alarms(Run(params=halted, losses=falling())) == set()
    assert alarms(Run(params=weights(update_norm=[stop] * 4, grad_norm=[fading] * 4))) == set()


def test_dead_units_come_before_the_gradients_they_stop():
    p = weights(3, update_norm=[0, 1, 1], grad_norm=[0, 1, 1])

    assert first(Run(acts(dead=[0, 1, 0]), params=p, losses=FLAT)) == "dead"


def test_a_relu_that_was_not_recorded_is_guessed_from_what_it_is_given():
    p = weights(3, update_norm=[1, 0, 1], grad_norm=[1, 0, 1])
    linear = ("Linear",) * 3

    f = found(Run(acts(linear, max=[3, -1, 3]), params=p, losses=FLAT), "dead")

    assert (f.layers, f.severity) == (("1.weight",), "error")
    assert first(Run(acts(linear), params=p, losses=FLAT)) == "zero_gradient"


def test_a_recurrence_whose_first_inputs_get_no_gradient_vanishes():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(2, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    model, x = Late(), torch.zeros(8, 300, 2)
    x[:, 0] = torch.randn(8, 2)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, ParamStats()) as w:
        for _ in range(12):
            opt.zero_grad()
            F.cross_entropy(model(x), torch.randint(2, (8,))).backward()
            opt.step()

    f = found(w.run_record(), "vanishing")
    assert (f.layers, f.severity) == (("rnn.weight_ih_l0",), "error")


# activations


def test_dead_units_are_told_by_when_they_died():
    later = np.zeros((3, N))
    later[1, 20:] = 0.95

    assert "from the first step on" in found(Run(acts(dead=[0, 0.95, 0])), "dead").evidence
    assert "learning rate" in found(Run(acts(dead=later)), "dead").cause
    assert "biases" in found(Run(acts(dead=[0, 0.95, 0])), "dead").cause


@pytest.mark.parametrize(("losses", "severity"), [(falling(), "note"), (FLAT, "error")])
def test_a_gate_that_its_bias_shuts_is_a_note_where_the_loss_falls(losses, severity):
    types = ("Linear", "Sigmoid", "Linear")
    shut = acts(types, saturated=[0, 0.95, 0], mean=[0, 0.02, 0], std=[1, 0.01, 1])
    both = acts(types, saturated=[0, 0.95, 0], mean=[0, 0.5, 0], std=[1, 0.49, 1])

    assert found(Run(shut, losses=losses), "saturated").severity == severity
    assert found(Run(both, losses=losses), "saturated").severity == "error"


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


def test_a_recurrence_that_amplifies_began_too_large():
    loud = acts(("RNN", "Linear", "Linear"), rms=[1e4, 1e4, 1e4])

    assert found(Run(loud, losses=FLAT), "bad_init").layers == ("0",)
    assert alarms(Run(loud, losses=falling())) == set()


def test_dropout_that_leaves_nothing_is_named_where_the_loss_stays():
    types = ("Linear", "ReLU", "Dropout", "Linear")
    run = acts(types, zero=[0, 0.5, 0.995, 0])

    assert first(Run(run, losses=FLAT)) == "dropout"
    assert alarms(Run(run, losses=falling())) == set()
    assert "dropout" not in alarms(Run(acts(types, zero=[0, 0.8, 0.9, 0]), losses=FLAT))


@pytest.mark.parametrize(
    ("batch", "free", "seen"), [(2, True, {"small_batch"}), (2, False, set()), (64, True, set())]
)
def test_batch_norm_of_two_examples_is_named(batch, free, seen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model[1].requires_grad_(free).train(free)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(12):
            opt.zero_grad()
            model(torch.randn(batch, 4)).pow(2).mean().backward()
            opt.step()

    assert alarms(w.run_record()) & {"small_batch"} == seen


def test_a_run_that_overflowed_is_judged_without_a_warning():
    inf = np.full((4, N), 5.0)
    inf[:, 20:] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        d = diagnose(Run(params=weights(weight_norm=inf, grad_norm=inf * 1e300, update_norm=inf)))

    assert d is not None


# losses that need not fall


def signed(start, end, noise=0.1, n=300):
    return np.linspace(start, end, n) + np.random.default_rng(5).normal(0, noise, n)


def test_a_loss_with_both_signs_need_not_fall():
    policy, energy = signed(-0.05, 0.05), signed(0, 0.2)

    for series in (policy, energy):
        f = found(Run(losses=series), "not_learning")
        assert f.severity == "note"
        assert "Spinning Up" in f.source
    assert "diverging" in alarms(Run(losses=signed(0, 30)))
    assert alarms(Run(losses=policy, info={"loss_func": "MSELoss"})) != set()  # cannot be below 0


def test_a_loss_that_begins_at_0_can_only_rise():
    grows = np.r_[0.0, np.linspace(1e-3, 4e-3, 299)]

    assert alarms(Run(losses=grows)) == set()
    assert "diverging" in alarms(Run(losses=grows + 1e-3))


def test_a_target_that_follows_the_model_moves_the_loss():
    drifting = np.tile(5.0 + 0.01 * np.arange(N), (4, 1))
    facts = {"requires_grad": [True, True, False, False], "update_norm": [1, 1, 0, 0]}
    facts |= {"in_optimizer": [True, True, False, False]}
    follows, rests = weights(**facts, weight_norm=drifting), weights(**facts)

    f = found(Run(params=follows, losses=FLAT), "not_learning")

    assert f.severity == "note"
    assert "2.weight, frozen, follows" in f.evidence
    assert alarms(Run(params=rests, losses=FLAT)) == {"not_learning"}


def players(batch=64, **also):
    """Three layers, of which the last sees twice the batch in every other step."""
    own = np.full(N, batch)
    return acts(("Linear",) * 3, count=[own, own, np.where(EVEN, 2 * own, own)], **also)


def test_players_are_known_by_how_the_batch_takes_turns():
    f = found(Run(players(), losses=FLAT), "not_learning")

    assert f.severity == "note"
    assert f.evidence.endswith("every 2 steps the batch takes the same turns through the layers")


def test_what_is_detached_in_turns_is_a_player_too():
    turns = np.where(EVEN, np.nan, 64.0)
    grads = acts(("Linear",) * 3, count=[turns, turns, np.full(N, 64.0)])

    assert alarms(Run(acts(count=[64] * 3), gradients=grads, losses=FLAT)) == set()


@pytest.mark.parametrize("period", [2, 7])
def test_short_batches_are_no_players(period):
    own = np.where(np.arange(N) % period, 64.0, 20.0)  # short in all layers

    assert alarms(Run(acts(count=[own] * 3), losses=FLAT)) == {"not_learning"}


def test_layers_that_change_once_are_no_players():
    later = np.where(np.arange(N) < N // 2, 64.0, 128.0)
    run = Run(acts(count=[np.full(N, 64.0), np.full(N, 64.0), later]), losses=FLAT)

    assert alarms(run) == {"not_learning"}


def test_where_parameters_were_seen_turns_are_judged_by_them():
    assert alarms(Run(players(), params=weights(3), losses=FLAT)) == {"not_learning"}


def test_a_likelihood_that_is_maximised_is_to_rise():
    up = np.linspace(-2.3, -0.1, 300)

    assert alarms(Run(losses=up, info={"maximize": True})) == set()
    assert alarms(Run(losses=up)) != set()
    assert "not_learning" in alarms(Run(losses=np.full(300, -2.3), info={"maximize": True}))


def test_layers_that_gave_nothing_are_no_healthy_ones() -> None:
    quiet = Diagnosis((), 2, 5, silent=("a", "b.0"))
    assert quiet.headline == "2 layers, 5 steps: healthy (2 never gave a value: a, b.0)"
    none = Diagnosis((), 0, 5, silent=("a", "b"))
    assert none.headline == "5 steps: no layer gave a value, no verdict on them"


@pytest.mark.parametrize("value", [1e308, 5e-324, 0.0, -3.0, np.inf, np.nan])
@pytest.mark.parametrize("n_layers", [1, 3, 450])
def test_numbers_at_the_ends_of_a_float_and_very_deep_nets_are_judged(
    n_layers: int, value: float
) -> None:
    run = made.run([(f"{i}", "Linear") for i in range(n_layers)], n=24)

    def filled(r: Record) -> Record:
        same = {"count", "near_zero", "zero"}
        bad = 64.0 * (not np.isfinite(value))
        full = {k: np.full_like(v, bad if k == "nonfinite" else value) for k, v in r.values.items()}
        return dataclasses.replace(r, values={**full, **{k: r.values[k] for k in same & set(full)}})

    kinds = ("activations", "gradients", "params")
    broken = dataclasses.replace(run, **{kind: filled(getattr(run, kind)) for kind in kinds})

    assert diagnose(broken).n_layers >= 0
    assert str(diagnose(dataclasses.replace(run, params=broken.params)))


def test_a_finding_names_the_types_of_its_layers() -> None:
    run = made.exploding(made.run([("0", "Conv2d"), ("1", "ReLU"), ("2", "Linear")], n=60))

    first = diagnose(run)[0]

    assert (first.layers, first.types, first.labels) == (("1",), ("ReLU",), ("1 ReLU",))
    assert first.where.startswith("1 ReLU · step")
    assert "1 ReLU · step" in diagnose(run)._repr_html_()


def test_a_layer_that_never_ran_is_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    stats = ActivationStats()
    opt = torch.optim.SGD(model["a"].parameters(), 0.1)
    with watch(model, opt, stats, each_forward=True):
        for _ in range(4):
            model["a"](torch.ones(3, 2)).sum().backward()
            opt.step()
    verdict = diagnose(stats)
    assert (verdict.n_layers, verdict.silent) == (1, ("b",))
    assert "1 never gave a value: b Linear" in verdict.headline


# what only decays, or hardly gets a gradient


def decayed(**facts):
    """Two matrices that get no gradient and decay, and two that learn."""
    shrinks = np.geomspace(5, 0.01, N)
    p = weights(4, grad_norm=[0, 0, 0.1, 0.1], weight_norm=[shrinks, shrinks, 5, 5], **facts)
    return dataclasses.replace(p, meta={**p.meta, "in_optimizer": [True] * 4})


def test_weights_that_only_decay_have_no_gradient_first_of_all():
    info = {"weight_decay": [1e-2], "lr": [1e-2]}
    alone = weights(3, grad_norm=[0] * 3, weight_norm=[np.geomspace(5, 0.01, N)] * 3,
                    update_ratio=[0.3] * 3)  # fmt: skip

    f = found(Run(params=decayed(), losses=FLAT, info=info), "zero_gradient")

    assert f.layers == ("0.weight", "1.weight")
    assert f.threshold == "a gradient of exactly 0 in all records"
    assert not {"weight_decay", "lr_too_high"} & alarms(Run(params=alone, losses=FLAT, info=info))


def test_weights_that_move_without_decay_or_grow_have_gradients_that_were_not_seen():
    grows = weights(3, grad_norm=[0] * 3, weight_norm=[np.linspace(5, 6, N)] * 3)

    assert "zero_gradient" not in diagnose(Run(params=decayed(), losses=FLAT)).rules
    for losses in (FLAT, None):
        run = Run(params=grows, losses=losses, info={"weight_decay": [1e-2]})
        assert "zero_gradient" not in diagnose(run).rules


def test_zeros_among_frozen_weights_are_no_lack_of_symmetry():
    norm = np.full((6, N), 5.0)
    norm[:2, 0] = 0
    lora = weights(6, weight_norm=norm, requires_grad=[True] * 4 + [False] * 2)
    half = weights(4, weight_norm=norm[:4])

    assert "zero_init" not in alarms(Run(params=lora, losses=FLAT))
    assert "zero_init" in alarms(Run(params=half, losses=FLAT))


def test_a_gradient_below_1e7_that_moves_nothing_has_vanished():
    faint = weights(4, grad_rms=[1e-3, 1e-15, 1e-3, 1e-3], update_norm=[1, 0, 1, 1],
                    grad_norm=[1, 1e-14, 1, 1])  # fmt: skip
    held = {"lr": [1e-3]}

    f = found(Run(params=faint, losses=falling(), info=held), "vanishing")

    assert (f.severity, f.layers) == ("warning", ("1.weight",))
    assert "VanishingGradient: 1e-7" in f.source
    assert "unmoved" not in diagnose(Run(params=faint, losses=falling(), info=held)).rules
    assert found(Run(params=faint, losses=falling(), info={"lr": [0.0]}), "unmoved")


@pytest.mark.parametrize(
    ("reader", "rule"), [(None, "dead"), ("ReLU", "dead"), ("", "zero_gradient")]
)
def test_a_layer_below_0_is_shut_only_where_a_relu_may_read_it(reader, rule):
    low = acts(("Linear", "Linear", "Linear"), max=[3, -0.1, 3])
    low = dataclasses.replace(low, meta={**low.meta, "feeds": ["", reader, ""]})
    still = weights(3, update_norm=[1, 0, 1], grad_norm=[1, 0, 1])

    f = found(Run(low, params=still, losses=FLAT), rule)

    assert (f.severity, f.layers) == ("error", ("1.weight",))
    assert "gradient is exactly 0" in f.evidence
