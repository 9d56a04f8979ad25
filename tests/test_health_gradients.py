"""Rules on the size of gradients: vanishing, exploding, grads_pile_up."""

import numpy as np
import pytest
from health_runs import FLAT, N, alarms, falling, found, weights

from hookkit.records import Run


def test_vanishing_gradients_are_not_blamed_on_the_learning_rate():
    fading = weights(
        grad_rms=[1e-12, 1e-9, 1e-6, 1e-3], update_ratio=[1e-9] * 4, update_norm=[0, 1, 1, 1]
    )

    said = alarms(Run(params=fading, losses=FLAT))
    assert "vanishing" in said
    assert not said & {"lr_too_low", "unmoved"}


def test_vanishing_and_exploding_gradients():
    fading = [1e-7, 1e-6, 1e-5, 1e-3]

    assert found(Run(params=weights(grad_rms=fading), losses=FLAT), "vanishing").severity == "error"
    assert (
        found(Run(params=weights(grad_rms=fading), losses=falling()), "vanishing").severity
        == "warning"
    )
    grown = Run(params=weights(grad_rms=[9, 3, 1, 0.1]), losses=FLAT)
    assert found(grown, "exploding").layers == ("0.weight", "3.weight")
    assert alarms(Run(params=weights(grad_rms=[9, 3, 1, 0.1]), losses=falling())) == set()


@pytest.mark.parametrize(("losses", "severity"), [(falling(), "warning"), (FLAT, "error")])
def test_gradients_that_pile_up(losses, severity):
    f = found(Run(losses=losses, info={"kept_gradients": [15, 16]}), "grads_pile_up")

    assert (f.severity, f.steps) == (severity, (0, 16))


@pytest.mark.parametrize("kept", [[2, 2], [8, 16], [0, 16]])
def test_gradients_that_are_kept_now_and_then_are_meant_to_be(kept):
    assert alarms(Run(losses=falling(), info={"kept_gradients": kept})) == set()


def test_a_last_matrix_that_began_at_zero_holds_gradients_back():
    norm = np.full((4, N), 5.0)
    norm[3, 0] = 0
    held = weights(grad_rms=[1e-9, 1e-9, 1e-9, 1e-3], weight_norm=norm)

    assert alarms(Run(params=held, losses=falling())) == set()


def test_one_first_matrix_without_gradient_is_no_vanishing():
    one = weights(6, grad_rms=[1e-7, 1e-3, 1e-2, 1e-2, 1e-2, 1e-2])
    many = weights(6, grad_rms=[1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])

    assert alarms(Run(params=one, losses=falling())) == set()
    assert "vanishing" in alarms(Run(params=many, losses=falling()))


@pytest.mark.parametrize(("optimizer", "alarmed"), [("Adam", True), ("SGD", False)])
def test_gradients_clipped_below_adams_eps(optimizer, alarmed):
    clipped = weights(grad_norm=[5e-8] * 4, update_ratio=[5e-3] * 4)

    said = alarms(Run(params=clipped, losses=falling(), info={"optimizer": optimizer}))

    assert said == ({"clipping"} if alarmed else set())
