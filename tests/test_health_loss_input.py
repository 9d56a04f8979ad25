"""The rule on probabilities given to a loss that expects scores."""

import numpy as np
import pytest
from health_runs import CE, FLAT, acts, alarms, falling, found

from hookkit.health import diagnose
from hookkit.records import Run


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


def test_large_scores_that_leave_a_binary_loss_in_a_narrow_range_are_squashed():
    narrow = 0.46 + 0.2 * np.exp(-np.arange(300) / 60)
    large = acts(("Linear", "ReLU", "Conv2d"), rms=[1, 1, 12], min=[-3, -3, -20])

    f = found(Run(large, losses=narrow, info=BCE), "probabilities")

    assert (f.severity, "2 gives values of RMS 12" in f.evidence) == ("warning", True)
    for record, losses in (
        (acts(rms=[1, 1, 2]), narrow),  # scores of an ordinary size
        (acts(rms=[1, 1, 1e4], min=[-3, -3, -1e9]), narrow),  # a mask
        (large, narrow - 0.2),  # below what probabilities can reach
    ):
        assert alarms(Run(record, losses=losses, info=BCE)) == set()


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
