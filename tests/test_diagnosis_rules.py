"""Every rule: it is found in a training with its mistake, and not in the same without it."""

from dataclasses import replace

import pytest
from diagnosis_loops import LOOPS

from hookkit.diagnosis import RULES, diagnose

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::hookkit.errors.NeverFiredWarning"),
]

NOTES = {
    *("repeated_data", "saturated", "initial_loss", "vanishing", "exploding", "overfit"),
    "not_learning",
}


def test_every_rule_has_a_training():
    assert {rule.name for rule in RULES} == LOOPS.keys()


@pytest.mark.parametrize("rule", LOOPS)
def test_a_rule_finds_its_mistake(rule):
    found = diagnose(LOOPS[rule](True))

    severity = {f.rule: f.severity for f in found}
    assert rule in severity, found
    assert (severity[rule] == "note") == (rule in NOTES), found


@pytest.mark.parametrize("rule", LOOPS)
def test_a_rule_is_silent_without_it(rule):
    found = diagnose(LOOPS[rule](False))

    assert rule not in found.rules
    assert not found.alarms, found


def test_epochs_that_were_not_validated_do_not_hide_an_overfit():
    run = LOOPS["overfit"](True)
    left_out = {"epoch": 0, "train_loss": 0.1, "valid_loss": None}
    rows = [row for each in run.valid for row in (each, left_out)]

    assert "overfit" in diagnose(replace(run, valid=rows)).rules
