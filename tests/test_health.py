"""What `diagnose` says of runs made by hand: one rule at a time, and silence where all is well."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hookkit
from hookkit.errors import ArgumentError
from hookkit.health import RULES, Diagnosis, Finding, diagnose
from hookkit.records import Incident, Record, Run

N = 100  # records in each hand-made run


def record(kind, names, types, values, n=N, **meta):
    axis = np.arange(n)
    table = {
        k: np.array([np.broadcast_to(row, (n,)) for row in v], float) for k, v in values.items()
    }
    return Record(
        kind, tuple(names), tuple(types), axis, axis // 50, axis, np.ones(n, np.int64), table,
        meta=meta,
    )  # fmt: skip


def acts(types=("Linear", "ReLU", "Linear"), n=N, **values):
    """Activations of layers "0", "1", … that look healthy, but for `values`."""
    k = len(types)
    plain = {"mean": 0.1, "std": 1.0, "rms": 1.0, "min": -3.0, "max": 3.0, "zero": 0.1}
    table = {s: [v] * k for s, v in {**plain, "nonfinite": 0.0}.items()}
    return record("activation", map(str, range(k)), types, {**table, **values}, n)


def weights(k=4, n=N, ndim=2, **values):
    """Weights "0.weight", … of Linears that move healthily, but for `values`; meta likewise."""
    plain = {"weight_norm": 5.0, "grad_norm": 0.1, "update_norm": 5e-3, "update_ratio": 1e-3}
    table = {s: [v] * k for s, v in {**plain, "grad_rms": 1e-3, "nonfinite": 0.0}.items()}
    meta = {"ndim": [ndim] * k, "numel": [64] * k}
    meta |= {"requires_grad": [True] * k, "in_optimizer": [True] * k}
    meta |= {key: values.pop(key) for key in list(values) if key in meta}
    names = [f"{i}.weight" for i in range(k)]
    return record("param", names, ["Linear"] * k, {**table, **values}, n, **meta)


def falling(n=300, start=2.3, end=0.1):
    noise = np.random.default_rng(0).normal(0, 0.02, n)
    return end + (start - end) * np.exp(-np.arange(n) / (n / 5)) + np.abs(noise)


FLAT = np.full(300, 2.3) + np.random.default_rng(1).normal(0, 0.01, 300)


def found(run: Run, rule: str) -> Finding:
    hits = [f for f in diagnose(run) if f.rule == rule]
    assert hits, f"{rule} is silent: {diagnose(run)}"
    return hits[0]


def alarms(run: Run) -> set[str]:
    return {f.rule for f in diagnose(run) if f.severity != "note"}


# the whole


def test_a_healthy_run_is_one_calm_line():
    run = Run(acts(), params=weights(), losses=falling())

    assert str(diagnose(run)) == "3 layers, 300 steps: healthy"
    assert diagnose(run).healthy
    assert diagnose(run).worst == "healthy"
    assert len(diagnose(run)) == 0


def test_it_says_what_it_could_not_see():
    d = diagnose(Run(acts()))

    assert str(d) == "3 layers, 100 steps: healthy (no parameters, no losses)"
    assert dict(d.unjudged)["lr_too_high"] == "no parameters"


class Driver:
    """As a Learner, a Watcher or a recorder: it can tell what was recorded."""

    def __init__(self, name, recorded):
        setattr(self, name, lambda: recorded)


def test_a_driver_a_recorder_and_a_record_can_be_diagnosed():
    sick = weights(update_norm=[1, 0, 1, 1])
    run = Run(params=sick)
    sources = [Driver("run_record", run), Driver("record", sick), sick]

    assert all(diagnose(each) == diagnose(run) for each in sources)


def test_a_real_recorder_and_watcher_can_be_diagnosed():
    model = nn.Linear(2, 1)
    stats = hookkit.ActivationStats()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with hookkit.watch(model, opt, stats) as w:
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
            opt.step()

    assert isinstance(diagnose(w), Diagnosis)
    assert isinstance(diagnose(stats), Diagnosis)


@pytest.mark.parametrize("wrong", [None, 3, nn.Linear(2, 2)])
def test_what_holds_no_run_is_refused(wrong):
    with pytest.raises(ArgumentError, match=r"\w+ was given, and it holds no records\. Give a Run"):
        diagnose(wrong)


def test_a_diagnosis_needs_no_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import hookkit; hookkit.diagnose("
    code += "hookkit.Run()); print('plotting' in ' '.join(sys.modules))"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "False"


def test_an_empty_run_gets_no_verdict():
    assert str(diagnose(Run())) == "nothing was recorded: no verdict"


def test_no_rule_speaks_on_a_few_records():
    few = acts(("Linear", "ReLU"), n=5, zero=[0.0, 1.0])

    assert alarms(Run(few, params=weights(n=5, update_norm=[0.0] * 4))) == set()


def test_findings_come_gravest_first_and_print_their_reasons():
    run = Run(acts(zero=[0, 1, 0]), params=weights(in_optimizer=[True] * 3 + [False],
              update_norm=[1, 1, 1, 0]), losses=FLAT)  # fmt: skip

    d = diagnose(run)

    assert [f.severity for f in d] == sorted(
        (f.severity for f in d), key=["error", "warning", "note"].index
    )
    assert d.headline == "3 layers, 300 steps: 1 error, 2 warnings"
    assert re.search(
        r"✗ error  dead: .*\n    where      1 ReLU · steps 50–99\n    threshold  over 50 %", str(d)
    )
    assert d.rules == ("dead", "not_in_optimizer", "not_learning")
    assert d[0].rule == "dead"
    assert not d.healthy


def test_every_finding_names_threshold_source_cause_and_fix():
    run = Run(acts(zero=[0, 1, 0]), params=weights(update_ratio=[1.0] * 4), losses=FLAT)

    for f in diagnose(run):
        assert all((f.evidence, f.threshold, f.source, f.cause, f.fix))


def test_html_folds_escapes_and_needs_no_script():
    odd = dataclasses.replace(acts(zero=[0, 1, 0]), names=("a", "<b>", "c"))

    html = diagnose(Run(odd))._repr_html_()

    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "<details" in html
    assert "prefers-color-scheme:dark" in html
    assert "<script" not in html


def test_html_of_a_healthy_run_is_the_calm_line():
    assert "3 layers, 300 steps: healthy" in diagnose(Run(acts(), losses=falling()))._repr_html_()


def test_a_long_list_of_layers_is_cut():
    f = Finding("r", "note", tuple("abcde"), (0, 9), "e", "t", "s", "c", "f")

    assert f.where == "a, b, c and 2 more · steps 0–9"


def test_rules_have_names_of_their_own():
    assert len({r.name for r in RULES}) == len(RULES)
    assert all(r.__doc__ for r in RULES)


def test_diagnosis_is_a_sequence():
    d = Diagnosis((), 1, 2)

    assert list(d) == []
    assert d[:] == ()


# activations


def test_non_finite_names_the_first_layer_and_step():
    bad = np.zeros((3, N))
    bad[1:, 40:] = 7
    run = Run(acts(nonfinite=bad))

    f = found(run, "non_finite")

    assert (f.layers, f.steps, f.severity) == (("1",), (40, 40), "error")
    assert "(ReLU) has NaN or Inf" in f.evidence


def overflow(kind="gradient", until=43):
    """Gradients of three layers, those of the first two not finite in some steps."""
    bad = np.zeros((3, N))
    bad[:2, 40:until] = 1
    return dataclasses.replace(acts(nonfinite=bad), kind=kind)


def test_non_finite_gradients_begin_at_the_end():
    f = found(Run(gradients=overflow()), "non_finite")

    assert (f.layers, f.severity) == (("1",), "error")


@pytest.mark.parametrize("kept", [{"activations": acts()}, {"params": weights()}])
def test_gradients_that_overflow_in_a_few_steps_and_do_no_harm_are_a_note(kept):
    f = found(Run(gradients=overflow(), losses=falling(), **kept), "non_finite")

    assert f.severity == "note"
    assert "weights, activations and loss stay finite" in f.evidence
    assert "GradScaler" in f.cause


def test_gradients_that_overflow_to_the_end_or_spoil_what_follows_are_sick():
    broken, poisoned = falling(), np.full((4, N), 5.0)
    broken[60:], poisoned[2, 44:] = np.nan, np.nan
    sick = [
        Run(acts(), gradients=overflow(until=N), losses=falling()),
        Run(acts(), gradients=overflow(), losses=broken),
        Run(overflow("activation"), gradients=overflow(), losses=falling()),
        Run(gradients=overflow(), params=weights(weight_norm=poisoned), losses=falling()),
    ]

    assert [found(run, "non_finite").severity for run in sick] == ["error"] * 4


def test_non_finite_takes_the_word_of_the_flight_recorder():
    f = found(Run(incidents=(Incident("activation", "body.log", "Log", 12),)), "non_finite")

    assert (f.layers, f.steps) == (("body.log",), (12, 12))


def test_a_mask_of_minus_inf_is_a_note():
    f = found(Run(acts(nonfinite=[0, 5, 0]), losses=falling()), "non_finite")

    assert f.severity == "note"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_stops_being_a_number_is_sick(bad):
    series = falling()
    series[120:] = bad

    assert found(Run(losses=series), "non_finite").steps == (120, 120)


@pytest.mark.parametrize("gaps", [slice(50, 60), slice(298, None), slice(None)])
def test_unknown_losses_are_not_nan_losses(gaps):
    series = falling()
    series[gaps] = np.nan

    assert alarms(Run(losses=series)) == set()


def test_a_loss_logged_every_tenth_step_is_enough():
    series = np.full(300, np.nan)
    series[::10] = falling()[::10]

    assert alarms(Run(losses=series)) == set()


def test_weights_that_are_nan_from_the_first_step_are_not_called_unmoved():
    p = weights(update_norm=[np.nan] * 4, grad_norm=[np.nan] * 4, nonfinite=[3] * 4)

    assert alarms(Run(params=p)) == {"non_finite"}


@pytest.mark.parametrize(("share", "severity"), [(0.95, "error"), (0.6, "warning"), (0.3, "note")])
def test_dead_units_by_their_share(share, severity):
    run = Run(acts(dead=[0.9, share, 0.9]))

    f = found(run, "dead")

    assert (f.severity, f.layers) == (severity, ("1",))


def test_a_unit_that_wakes_up_is_not_dead():
    dead = np.full((3, N), 0.9)
    dead[:, 80] = 0.0

    assert alarms(Run(acts(dead=dead))) == set()


def test_dead_is_for_relus_only():
    assert alarms(Run(acts(("Linear", "GELU", "Linear"), dead=[1, 1, 1], zero=[1, 1, 1]))) == set()


def test_without_units_a_relu_layer_of_zeros_is_dead():
    assert found(Run(acts(zero=[0, 1, 0])), "dead").severity == "error"
    assert alarms(Run(acts(zero=[0, 0.95, 0]))) == set()


def test_dormant_units_are_a_note():
    assert found(Run(acts(dormant=[0.9, 0.8, 0.9], dead=[0, 0, 0])), "dormant").severity == "note"


def test_saturated_tanh_with_and_without_units():
    types = ("Linear", "Tanh", "Linear")

    assert (
        found(Run(acts(types, saturated=[np.nan, 0.7, np.nan])), "saturated").severity == "warning"
    )
    assert found(Run(acts(types, rms=[1, 0.999, 1])), "saturated").severity == "error"
    assert alarms(Run(acts(types, rms=[1, 0.8, 1]))) == set()


def test_saturated_sigmoid_by_its_moments():
    types = ("Linear", "Sigmoid", "Linear")
    half_on = {"mean": [0, 0.5, 0], "rms": [1, np.sqrt(0.5), 1]}  # half 0, half 1

    assert found(Run(acts(types, **half_on)), "saturated").layers == ("1",)
    assert alarms(Run(acts(types, mean=[0, 0.5, 0], rms=[1, 0.55, 1]))) == set()


def test_a_sure_output_layer_is_not_saturated():
    types = ("Linear", "ReLU", "Sigmoid")

    assert alarms(Run(acts(types, saturated=[0, 0, 0.99]))) == set()


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


# parameters


def test_lr_too_high_needs_most_matrices_and_a_loss_that_stays():
    fast = weights(update_ratio=[0.3] * 3 + [1e-3])

    assert found(Run(params=fast, losses=FLAT), "lr_too_high").severity == "error"
    assert found(Run(params=fast), "lr_too_high").severity == "warning"
    assert alarms(Run(params=fast, losses=falling())) == set()
    assert "lr_too_high" not in alarms(
        Run(params=weights(update_ratio=[0.3] + [1e-3] * 3), losses=FLAT)
    )


def test_lr_too_low_alarms_only_without_progress():
    slow = weights(update_ratio=[1e-6] * 4)

    assert found(Run(params=slow, losses=FLAT), "lr_too_low").severity == "warning"
    low = weights(update_ratio=[5e-5] * 4)
    assert found(Run(params=low), "lr_too_low").severity == "note"
    assert alarms(Run(params=slow, losses=falling())) == set()


def test_vectors_and_embeddings_say_nothing_of_the_learning_rate():
    fast = weights(update_ratio=[1.0] * 4, ndim=1)
    tokens = dataclasses.replace(weights(update_ratio=[1.0] * 4), types=("Embedding",) * 4)

    assert "lr_too_high" not in alarms(Run(params=fast, losses=FLAT))
    assert "lr_too_high" not in alarms(Run(params=tokens, losses=FLAT))


def test_matrices_that_begin_at_zero_may_jump():
    norm = np.full((4, N), 5.0)
    norm[:, 0] = 0
    ratio = np.full((4, N), 1e-3)
    ratio[:, 0] = np.inf

    assert alarms(Run(params=weights(weight_norm=norm, update_ratio=ratio), losses=FLAT)) == {
        "not_learning", "zero_init",
    }  # fmt: skip


def test_weights_that_begin_at_zero_are_named_unless_something_is_learnt():
    norm = np.full((4, N), 5.0)
    norm[:2, 0] = 0
    half, most = weights(weight_norm=norm), weights(weight_norm=np.roll(norm, 1, 0))
    norm[1, 0] = 5.0

    f = found(Run(params=half, losses=FLAT), "zero_init")
    assert (f.severity, f.layers) == ("error", ("0.weight", "1.weight"))
    assert "zero_init" in alarms(Run(params=most, losses=FLAT))
    for quiet in (Run(params=half, losses=falling()), Run(params=half)):
        assert "zero_init" not in alarms(quiet)
    assert "zero_init" not in alarms(Run(params=weights(weight_norm=norm), losses=FLAT))


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


def test_vanishing_gradients_are_not_blamed_on_the_learning_rate():
    fading = weights(
        grad_rms=[1e-12, 1e-9, 1e-6, 1e-3], update_ratio=[1e-9] * 4, update_norm=[0, 1, 1, 1]
    )

    said = alarms(Run(params=fading, losses=FLAT))
    assert "vanishing" in said
    assert not said & {"lr_too_low", "unmoved"}


def test_a_parameter_outside_the_optimizer_is_named():
    p = weights(update_norm=[1, 0, 1, 1], in_optimizer=[True, False, True, True])

    f = found(Run(params=p), "not_in_optimizer")

    assert (f.layers, f.severity) == (("1.weight",), "warning")


def test_a_parameter_without_gradient_is_named():
    p = weights(update_norm=[1, 0, 1, 1], grad_norm=[1, np.nan, 1, 1])

    assert found(Run(params=p), "no_gradient").layers == ("1.weight",)


def test_a_gradient_of_exactly_zero_is_sick():
    p = weights(update_norm=[1, 0, 1, 1], grad_norm=[1, 0, 1, 1])

    assert found(Run(params=p), "zero_gradient").severity == "error"


def test_a_matrix_that_stays_put_is_named_and_a_bias_is_not():
    still = {"update_norm": [1, 0, 1, 1]}

    assert found(Run(params=weights(**still)), "unmoved").layers == ("1.weight",)
    assert alarms(Run(params=weights(ndim=1, **still))) == set()  # a bias before batch-norm


def test_frozen_layers_are_no_finding():
    p = weights(
        update_norm=[0, 0, 0, 1], grad_norm=[np.nan] * 3 + [1], in_optimizer=[False] * 3 + [True],
        requires_grad=[False] * 3 + [True],
    )  # fmt: skip

    assert alarms(Run(params=p, losses=falling())) == set()


def test_vanishing_and_exploding_gradients():
    fading = [1e-7, 1e-6, 1e-5, 1e-3]

    assert found(Run(params=weights(grad_rms=fading), losses=FLAT), "vanishing").severity == "error"
    assert (
        found(Run(params=weights(grad_rms=fading), losses=falling()), "vanishing").severity
        == "warning"
    )
    assert found(Run(params=weights(grad_rms=[9, 3, 1, 0.1])), "exploding").layers == (
        "0.weight", "3.weight",
    )  # fmt: skip
    assert alarms(Run(params=weights(grad_rms=[9, 3, 1, 0.1]), losses=falling())) == set()


def test_weight_decay_by_its_setting_and_by_what_it_does():
    gone = weights(weight_norm=np.geomspace(5, 1e-3, N)[None].repeat(4, 0))

    assert found(Run(params=weights(), losses=falling(), info={"lr": [0.01], "weight_decay": [10]}),
                 "weight_decay").severity == "warning"  # fmt: skip
    assert found(Run(params=gone, losses=FLAT), "weight_decay").severity == "error"
    usual = {"lr": [1e-3, 1e-3], "weight_decay": [0.1, 0.0]}
    assert alarms(Run(params=weights(), losses=falling(), info=usual)) == set()


# curves

CE = {"n_classes": 10, "loss_func": "CrossEntropyLoss"}


def test_initial_loss_against_chance():
    high = np.concatenate([[40.0], FLAT])

    assert found(Run(losses=high, info=CE), "initial_loss").severity == "warning"
    assert found(Run(losses=falling(start=8), info=CE), "initial_loss").severity == "note"
    assert alarms(Run(losses=falling(), info=CE)) == set()


def test_not_learning_and_diverging():
    assert found(Run(losses=FLAT), "not_learning").severity == "warning"
    assert found(Run(losses=np.linspace(2.3, 50, 300)), "diverging").severity == "error"


def test_a_wild_first_loss_does_not_make_the_rest_progress():
    series = np.concatenate([np.full(20, 30.0), FLAT])

    assert "not_learning" in alarms(Run(losses=series, info=CE))


def test_a_model_that_had_learnt_before_need_not_improve():
    slow = weights(update_ratio=[1e-6] * 4)

    assert alarms(Run(params=slow, losses=FLAT * 0.1, info=CE)) == set()
    assert "diverging" in alarms(Run(losses=FLAT * np.linspace(0.1, 1, 300), info=CE))


def test_a_loss_of_several_heads_may_begin_above_chance():
    assert alarms(Run(losses=3 * falling(end=0.8), info=CE)) == set()


def test_a_negative_loss_may_fall():
    assert alarms(Run(losses=np.linspace(-1, -3, 300))) == set()
    assert alarms(Run(losses=np.linspace(-3, -2.9, 300))) == {"not_learning"}


def test_one_spike_is_a_note_and_many_are_an_alarm():
    one, many = falling(), falling()
    one[200] += 5
    many[100::13] += 5

    assert found(Run(losses=one), "spikes").severity == "note"
    assert found(Run(losses=many), "spikes").severity == "warning"
    assert not diagnose(Run(losses=falling()))


def test_gradients_that_pile_up():
    growing = np.linspace(0.1, 30, 300)

    assert found(Run(losses=FLAT, grad_norms=growing), "grads_pile_up").severity == "error"
    fresh = growing * np.random.default_rng(2).uniform(0.7, 1.4, 300)
    assert "grads_pile_up" not in alarms(Run(losses=falling(), grad_norms=fresh))


def test_an_explosion_that_passes_is_no_sum():
    passes = np.r_[np.geomspace(1e9, 1e11, 20), np.geomspace(1e11, 1e3, 280)]

    assert "grads_pile_up" not in alarms(Run(losses=FLAT, grad_norms=passes))


def test_a_norm_smoother_than_the_losses_is_a_sum_also_where_the_loss_falls():
    growing, clipped = np.linspace(0.1, 30, 300), np.minimum(np.linspace(0.1, 30, 300), 1)

    assert found(Run(losses=falling(), grad_norms=growing), "grads_pile_up").severity == "warning"
    assert alarms(Run(losses=falling(), grad_norms=clipped)) == set()
    assert alarms(Run(losses=2 + np.geomspace(1, 1e-3, 300), grad_norms=growing)) == set()


def test_gradients_of_what_is_in_no_optimizer_pile_up_unseen():
    sums = [np.full(N, 0.1), np.linspace(0.1, 30, N)]
    p = weights(2, grad_norm=sums, update_norm=[1, 0], in_optimizer=[True, False])

    assert alarms(Run(params=p, losses=FLAT[:N])) == {"not_in_optimizer", "not_learning"}


def test_a_loss_that_passes_by_the_floor_of_probabilities_has_not_settled_there():
    info = {"n_classes": 4, "loss_func": "CrossEntropyLoss"}  # the floor is 0.744
    passes = np.linspace(1.38, 0.76, 60)
    settles = 0.79 + 0.59 * np.exp(-np.arange(60) / 8)

    assert alarms(Run(losses=passes, info=info)) == set()
    assert alarms(Run(losses=settles, info=info)) == {"probabilities"}


def test_probabilities_by_output_by_layer_and_by_the_floor_of_the_loss():
    softmax = acts(("Linear", "ReLU", "Linear", "Softmax"))
    floor = np.log(np.e + 9) - 1
    settles = floor + 0.01 + 0.8 * np.exp(-np.arange(300) / 50)
    facts = {**CE, "output_is_probabilities": True}

    assert found(Run(losses=FLAT, info=facts), "probabilities").severity == "error"
    assert found(Run(softmax, info=CE), "probabilities").layers == ("3",)
    assert found(Run(losses=settles, info=CE), "probabilities").severity == "warning"
    assert "probabilities" not in alarms(Run(losses=falling(), info=CE))
    assert "probabilities" not in alarms(Run(acts(("Linear", "Linear", "LogSoftmax")), info=CE))


def test_overfitting_is_a_note():
    rows = [{"epoch": i, "train_loss": 1 / (i + 1), "valid_loss": 0.5 + 0.1 * i} for i in range(6)]

    assert found(Run(losses=falling(), valid=rows), "overfit").severity == "note"


# the real thing


def trained(*, zero_grad: bool = True, detach: bool = False) -> Diagnosis:
    stats = pytest.importorskip("hookkit.stats")
    watching = pytest.importorskip("hookkit.watching")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    truth = torch.randn(8, 4)
    opt, loss_func = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), nn.CrossEntropyLoss()
    callbacks = stats.ActivationStats(include_paramless=True, units=True), stats.ParamStats()
    with watching.watch(net, opt, *callbacks, loss_func=loss_func) as w:
        for _ in range(150):
            x = torch.randn(32, 8)
            h = net[:3](x).detach() if detach else net[:3](x)
            loss = loss_func(net[3:](h) if detach else net(x), (x @ truth).argmax(1))
            if zero_grad:
                opt.zero_grad()
            loss.backward()
            opt.step()
    return diagnose(w.run_record())


def test_a_sound_training_is_healthy():
    assert str(trained()).startswith("5 layers, 150 steps: healthy")


def test_a_forgotten_zero_grad_is_named():
    assert "grads_pile_up" in trained(zero_grad=False).rules
