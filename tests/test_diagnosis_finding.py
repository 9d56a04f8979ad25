"""What a finding and a diagnosis say, above all of what was not judged."""

import dataclasses
import json

import made
import numpy as np
import pytest
import torch
from torch import nn

from hookkit import ActivationStats, Diagnosis, Finding, ParamStats, Run, diagnose, watch
from hookkit.diagnosis import RULES

FALLING = 2.3 * np.exp(-np.arange(300) / 80)

FOUND = Finding("dead", "error", "95% are 0", "a large step", "divide it by 10", ("fc1",), (5, 9))


def test_a_diagnosis_is_a_sequence_of_findings_and_notes_leave_it_healthy():
    found = Diagnosis((FOUND,), 3, 100)
    noted = Diagnosis((dataclasses.replace(FOUND, severity="note"),), 3, 100)

    assert found[0] is FOUND
    assert [*found] == [FOUND] == [*found.alarms]
    assert found.first is FOUND
    assert (len(found), found.rules, found.healthy) == (1, ("dead",), False)
    assert json.loads(json.dumps(found.to_dict()))["findings"][0]["layers"] == ["fc1"]
    assert str(found).startswith("1 error: 3 layers, 100 steps\n✗ error  dead")
    assert noted.healthy
    assert noted.verdict == "healthy, 1 note: 3 layers, 100 steps"


def test_without_losses_no_run_is_healthy_and_the_cure_is_said():
    found = diagnose(dataclasses.replace(made.run(n=40), losses=None))

    assert not found.healthy
    assert "below_zero" in found.not_judged["losses"]
    assert "rules could not be asked" in found.verdict
    assert "call w.loss(loss) in each batch, or give watch(…, loss_func=module)" in str(found)


def test_what_was_not_judged_is_said_of_any_run_with_the_rules_that_need_it():
    found = diagnose(Run(losses=FALLING))

    assert found.healthy
    assert set(found.not_judged) == {"loss graph", "activations", "parameters"}
    assert "parameters unknown (" in str(found)
    assert "add ParamStats()" in str(found)
    names = {rule.name for rule in RULES}
    assert {rule for rules in found.not_judged.values() for rule in rules} < names
    one_rank = diagnose(Run(losses=FALLING, info={"rank": "rank 1 of 2"}))
    assert "rank 1 of 2 alone; gather() on every rank merges all" in one_rank.verdict


def test_of_nothing_there_is_no_verdict():
    found = diagnose(Run())

    assert not found.healthy
    assert found.verdict.startswith("nothing was recorded, no verdict")


@pytest.mark.filterwarnings("ignore:watch saw 3 training batches")
@pytest.mark.parametrize("by_hand", [False, True])
def test_too_few_records_are_said_and_recorders_that_saw_no_step_are_not_asked_for(by_hand):
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with watch(net, None if by_hand else opt, ActivationStats(), ParamStats()) as w:
        for _ in range(3):
            if by_hand:
                (grad,) = torch.autograd.grad(net(torch.ones(2, 2)).sum(), net.bias)
                net.bias.data -= 0.1 * grad
            else:
                net(torch.ones(2, 2)).sum().backward()
                opt.step()

    found = w.diagnose()
    assert ("10 records of parameters" in found.not_judged) is not by_hand
    assert "ActivationStats" not in str(found)


def test_html_has_findings_and_what_was_not_judged_escaped():
    html = Diagnosis(
        (dataclasses.replace(FOUND, evidence="1 < 2"),), 3, 100, {"units": ("dead",)}
    )._repr_html_()

    assert "1 &lt; 2" in html
    assert "not judged: 1 rule" in html
    assert "ActivationStats(units=True)" in html
    assert "<details open" in html or "details class" in html


def test_layers_without_a_value_are_named():
    run = made.run([("used", "Linear"), ("other", "Linear")], n=20)
    values = {k: np.where([[True], [False]], x, np.nan) for k, x in run.activations.values.items()}
    found = diagnose(Run(dataclasses.replace(run.activations, values=values)))

    assert "1 never gave a value (other)" in found.verdict
