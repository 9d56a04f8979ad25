"""The rule on probabilities given to a loss that expects scores."""

import numpy as np
import pytest
from health_runs import CE, FLAT, acts, alarms, falling, found

from hookkit.health import diagnose
from hookkit.records import Run


def test_probabilities_by_output_and_by_layer():
    softmax = acts(("Linear", "ReLU", "Linear", "Softmax"))
    facts = {**CE, "output_is_probabilities": True}

    assert found(Run(losses=FLAT, info=facts), "probabilities").severity == "error"
    assert found(Run(softmax, info=CE), "probabilities").layers == ("3",)
    by_graph = {**CE, "loss_input": "Softmax"}
    assert found(Run(softmax, losses=FLAT, info=by_graph), "probabilities").layers == ("3",)
    assert found(Run(acts(), losses=FLAT, info=by_graph), "probabilities").layers == ()
    assert "probabilities" not in alarms(Run(losses=falling(), info=CE))
    assert "probabilities" not in alarms(Run(acts(("Linear", "Linear", "LogSoftmax")), info=CE))


def test_probabilities_where_their_logarithm_is_expected():
    softmax = acts(("Linear", "ReLU", "Linear", "Softmax"))

    f = found(Run(softmax, losses=falling(), info={"loss_func": "NLLLoss"}), "probabilities")

    assert "NLLLoss" in f.source
    assert "log_softmax" in f.fix


BCE = {"loss_func": "BCEWithLogitsLoss"}


def test_a_sigmoid_at_the_end_is_one_too_many_for_a_loss_with_logits():
    last = acts(("Linear", "ReLU", "Linear", "Sigmoid"))

    f = found(Run(last, losses=falling(), info=BCE), "probabilities")

    assert "BCEWithLogitsLoss" in f.source
    assert (
        "probabilities"
        not in diagnose(Run(last, losses=falling(), info={"loss_func": "BCELoss"})).rules
    )


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
def test_the_input_of_the_loss_may_show_probabilities(given, loss, named):
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


def test_losses_of_which_none_is_known_do_not_stop_a_diagnosis():
    assert diagnose(Run(losses=np.full(300, np.nan), info=CE)).healthy
