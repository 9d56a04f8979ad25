"""Rules on the size of gradients: vanishing, exploding, grads_pile_up."""

import dataclasses

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


def summed(n, every=1, noise=0.0):
    """Norms of a running sum of gradients that partly agree, at every so many steps."""
    steps = np.arange(0, n, every)
    jitter = np.exp(noise * np.random.default_rng(3).normal(size=len(steps)))
    return steps, 0.1 * (steps + 1) ** 0.75 * jitter


def sampled(norms, steps):
    """`norms` as the gradients of one matrix of two."""
    k = len(steps)
    p = weights(2, n=k, grad_norm=[norms, np.zeros(k)])
    return dataclasses.replace(p, steps=steps)


@pytest.mark.parametrize(("losses", "severity"), [(falling(), "warning"), (FLAT, "error")])
def test_a_sum_of_gradients_is_seen_in_every_tenth_step_too(losses, severity):
    steps, norms = summed(300, 10)

    f = found(Run(params=sampled(norms, steps), losses=losses), "grads_pile_up")

    assert f.severity == severity
    fresh = sampled(summed(300, 10, noise=0.3)[1], steps)
    assert "grads_pile_up" not in alarms(Run(params=fresh, losses=losses))


def test_a_sum_that_is_smooth_and_tenfold_needs_no_losses():
    norms = summed(200)[1]

    assert alarms(Run(grad_norms=norms)) == {"grads_pile_up"}
    assert alarms(Run(grad_norms=np.minimum(norms, 0.5))) == set()


def test_a_sum_smoother_than_the_loss_is_one_also_where_the_loss_stays():
    norms = np.minimum(summed(300)[1], 0.5) * (1 + 1e-3 * np.random.default_rng(0).normal(size=300))
    wild = FLAT * np.where(np.arange(300) % 2, 1.3, 0.7)

    assert found(Run(losses=wild, grad_norms=norms), "grads_pile_up").severity == "error"
    assert alarms(Run(losses=FLAT, grad_norms=norms)) == {"not_learning"}


def test_a_sum_smoother_than_the_loss_shows_in_a_short_run():
    wild = FLAT[:45] * np.where(np.arange(45) % 2, 1.3, 0.7)

    assert alarms(Run(losses=wild, grad_norms=summed(45)[1])) == {"grads_pile_up"}


def test_a_norm_that_grows_late_is_no_sum():
    late = 0.1 * np.exp(np.linspace(0, 4, 300))  # as large targets make it, step by step

    assert "grads_pile_up" not in alarms(Run(losses=FLAT, grad_norms=late))
