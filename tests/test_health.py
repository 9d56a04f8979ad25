"""`diagnose` as a whole: order, texts, HTML, what was not judged; and real trainings."""

import dataclasses
import re
import subprocess
import sys
import warnings

import made
import numpy as np
import pytest
import torch
from health_runs import FLAT, MSE, N, acts, alarms, falling, first_layer, weights
from torch import nn

import hookkit
from hookkit import ActivationStats, watch
from hookkit.errors import ArgumentError
from hookkit.health import RULES, Diagnosis, Finding, diagnose
from hookkit.health.diagnosis import Rule
from hookkit.health.rates import RATES
from hookkit.records import Record, Run


def test_a_healthy_run_is_one_line():
    run = Run(acts(), params=weights(), losses=falling())

    assert str(diagnose(run)) == "3 layers, 300 steps: healthy"
    assert diagnose(run).healthy
    assert diagnose(run).worst == "healthy"
    assert len(diagnose(run)) == 0


def test_what_could_not_be_judged_is_named():
    d = diagnose(Run(acts()))

    assert str(d) == "3 layers, 100 steps: healthy (no losses, no parameters)"
    assert dict(d.unjudged)["lr_too_high"] == "no parameters"


class Driver:
    """As a Learner, a Watcher or a recorder: it returns what was recorded."""

    def __init__(self, name, recorded):
        setattr(self, name, lambda: recorded)


def test_a_driver_a_recorder_and_a_record_can_be_diagnosed():
    bad = weights(update_norm=[1, 0, 1, 1])
    run = Run(params=bad)
    sources = [Driver("run_record", run), Driver("record", bad), bad]

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
def test_what_holds_no_records_is_refused(wrong):
    with pytest.raises(ArgumentError, match=r"\w+ was given, and it holds no records\. Give a Run"):
        diagnose(wrong)


@pytest.mark.slow
def test_a_diagnosis_needs_no_matplotlib():
    code = "import sys; sys.modules['matplotlib'] = None; import hookkit; hookkit.diagnose("
    code += "hookkit.Run()); print('plotting' in ' '.join(sys.modules))"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "False"


def test_an_empty_run_gets_no_verdict():
    assert str(diagnose(Run())) == "nothing was recorded: no verdict"


def test_no_rule_judges_a_few_records():
    few = acts(("Linear", "ReLU"), n=5, zero=[0.0, 1.0])

    assert alarms(Run(few, params=weights(n=5, update_norm=[0.0] * 4))) == set()


def test_the_most_severe_findings_come_first_and_print_their_reasons():
    run = Run(acts(zero=[0, 1, 0]), params=weights(in_optimizer=[True] * 3 + [False],
              update_norm=[1, 1, 1, 0]), losses=FLAT)  # fmt: skip

    d = diagnose(run)

    assert [f.severity for f in d] == sorted(
        (f.severity for f in d), key=["error", "warning", "note"].index
    )
    assert d.headline == "3 layers, 300 steps: 2 errors, 1 warning"
    text = " ".join(str(d).split())
    assert re.search(
        r"✗ error dead: Up to 100% of [^.]* \(1 ReLU · steps 50–99\)\. (Likely c|C)ause", text
    )
    assert re.search(
        r"\n    (?:Likely c|C)ause: .*\.\n    Fix: .*\.\n    Line: over 90 % of ", str(d)
    )
    assert d.rules == ("not_in_optimizer", "dead", "not_learning")
    assert d[1].rule == "dead"
    assert not d.healthy


def test_a_finding_reads_as_three_sentences_above_its_line():
    f = Finding("r", "note", ("fc1",), (0, 9), "a is 3", "over 2", "us", "an eps", "lower it.")

    assert f.sentences == ("A is 3 (fc1 · steps 0–9).", "Likely cause: an eps.", "Fix: lower it.")
    assert f.line == "Line: over 2. Source: us."
    assert str(f).splitlines() == [
        "· note  r: A is 3 (fc1 · steps 0–9).",
        *("    Likely cause: an eps.", "    Fix: lower it.", "    Line: over 2. Source: us."),
    ]


@pytest.mark.parametrize(
    ("right", "wrong", "sure"),
    [(3, 0, "clear"), (8, 1, "clear"), (2, 0, "likely"), (7, 2, "likely"), (0, 5, "likely")],
)
def test_a_cause_is_clear_where_its_rule_was_nearly_always_right(monkeypatch, right, wrong, sure):
    monkeypatch.setitem(RATES, "r", (right, wrong))
    f = Finding("r", "warning", (), (0, 9), "a is 3", "over 2", "us", "an eps", "lower it")

    assert f.certainty == sure
    assert f.sentences[1] == {"clear": "Cause: an eps.", "likely": "Likely cause: an eps."}[sure]
    assert f.line.endswith(f"Right in {right} of {right + wrong} trainings: {sure}.")
    assert f.sentences[1] in str(f)
    assert f.sentences[1] in Diagnosis((f,), 1, 10)._repr_html_()


def test_a_note_is_never_clear_since_only_alarms_were_measured(monkeypatch):
    monkeypatch.setitem(RATES, "r", (9, 0))
    f = Finding("r", "note", (), (0, 9), "a is 3", "over 2", "us", "an eps", "lower it")

    assert f.certainty == "likely"
    assert f.line == "Line: over 2. Source: us."


def test_every_rate_is_of_a_rule():
    names = {
        made.name
        for rule in RULES
        for made in vars(sys.modules[rule.check.__module__]).values()
        if isinstance(made, Rule)
    }

    assert RATES.keys() <= names
    assert all(right + wrong > 0 for right, wrong in RATES.values())


def test_text_is_at_most_100_columns_wide():
    run = Run(acts(("Linear",) * 5, std=[1, 12, 150, 1500, 1]), losses=np.full(300, 80.0),
              params=weights(update_ratio=[2.0] * 4), info={"n_classes": 10})  # fmt: skip

    lines = str(diagnose(run)).splitlines()

    assert len(lines) > 20
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(("loss", "said"), [("CrossEntropyLoss", True), ("MSELoss", False)])
def test_a_healthy_headline_says_that_chance_is_unknown(loss, said):
    run = Run(acts(), params=weights(), losses=falling(), info={"loss_func": loss})
    known = dataclasses.replace(run, info={**run.info, "n_classes": 10})

    chance = "healthy (chance unknown: number of classes not known)"
    assert diagnose(run).headline.endswith(chance if said else "healthy")
    assert diagnose(known).headline.endswith("healthy")


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
    assert "color-mix(in srgb,#f4554a 55%,currentColor)" in html  # suits light and dark
    assert "<script" not in html


def test_html_of_a_healthy_run_is_its_headline():
    assert "3 layers, 300 steps: healthy" in diagnose(Run(acts(), losses=falling()))._repr_html_()


def test_a_long_list_of_layers_is_cut():
    f = Finding("r", "note", tuple("abcde"), (0, 9), "e", "t", "s", "c", "f")

    assert f.where == "a, b, c and 2 more · steps 0–9"


def test_a_rule_without_what_it_needs_is_unjudged():
    unjudged = dict(diagnose(Run()).unjudged)

    assert {r.name for r in RULES if r.needs} <= set(unjudged)
    assert unjudged["dropout"] == "no activations"


def test_rules_have_names_of_their_own():
    assert len({r.name for r in RULES}) == len(RULES)
    assert all(r.__doc__ for r in RULES)


def test_diagnosis_is_a_sequence():
    d = Diagnosis((), 1, 2)

    assert list(d) == []
    assert d[:] == ()


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


def test_a_good_training_is_healthy():
    assert str(trained()).startswith("5 layers, 150 steps: healthy")


def test_a_forgotten_zero_grad_is_named():
    assert "grads_pile_up" in trained(zero_grad=False).rules


def test_a_run_that_overflowed_is_judged_without_a_warning():
    inf = np.full((4, N), 5.0)
    inf[:, 20:] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        d = diagnose(Run(params=weights(weight_norm=inf, grad_norm=inf * 1e300, update_norm=inf)))

    assert d is not None


def test_layers_that_gave_nothing_are_not_called_healthy() -> None:
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


def test_a_layer_that_never_ran_is_reported() -> None:
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


@pytest.mark.parametrize(("n", "every", "judged"), [(5, 10, True), (4, 20, False), (6, 5, False)])
def test_half_as_many_records_are_enough_if_they_are_spread_out(n, every, judged):
    still = weights(3, n=n, update_norm=[0, 1, 1])
    apart = dataclasses.replace(still, steps=every * np.arange(n))

    assert ("unmoved" in diagnose(Run(params=apart)).rules) == judged


def without_rows(record):
    values = {name: table[:0] for name, table in record.values.items()}
    return dataclasses.replace(record, names=(), types=(), values=values, meta={})


def test_records_of_nothing_and_of_few_statistics_do_not_stop_a_diagnosis():
    nothing = acts(n=0), None, weights(n=0), FLAT
    no_rows = without_rows(acts()), None, without_rows(weights()), FLAT
    unregistered = dataclasses.replace(acts(n=0), meta={"unregistered": ["w"]})
    layer = first_layer(0.1)
    no_norms = {k: v for k, v in layer.values.items() if k != "weight_norm"}
    few = acts(), None, dataclasses.replace(layer, values=no_norms), FLAT

    for parts in (nothing, no_rows, (unregistered, *nothing[1:]), few):
        assert diagnose(Run(*parts, info=MSE)).n_steps == len(FLAT)


def test_a_diagnosis_does_not_make_python_repeat_warnings_that_were_shown():
    run = Run(losses=np.full(300, 2.3))

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("of the user's own loop", stacklevel=1)
            diagnose(run)

    assert len(shown) == 1
