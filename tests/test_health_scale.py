"""Sizes at the start: inputs, targets, first outputs."""

import dataclasses

import numpy as np
import pytest
from test_health import FLAT, N, acts, alarms, falling, found, weights

from hookkit.health import diagnose
from hookkit.records import Run

MSE = {"loss_func": "MSELoss"}


def first_layer(weight_grad, bias_grad=0.1, **facts):
    """Parameters of which "0" has 16 × 64 weights and a bias."""
    p = weights(4, grad_norm=[weight_grad, bias_grad, 0.1, 0.1], **facts)
    meta = {**p.meta, "ndim": [2, 1, 2, 2], "numel": [1024, 16, 256, 256]}
    return dataclasses.replace(p, names=("0.weight", "0.bias", "2.weight", "4.weight"), meta=meta)


# inputs


def test_a_bias_of_all_units_alike_is_no_inputs_doing():
    shut = acts(rms=[20.5, 1, 1], mean=[-20, 0, 0], std=[1, 1, 1])

    assert "input_scale" not in diagnose(Run(shut, losses=FLAT)).rules


def test_what_the_bias_of_one_unit_makes_is_no_inputs_doing_either():
    gate = acts(rms=[25.1, 1, 1], std=[21.8, 1, 1])  # four units, one of them with a bias of 50
    bias = np.array([1.0, 50.0, 1.0, 1.0])
    shut = first_layer(0.1, weight_norm=[1.0, 50.0, 1.0, 1.0])
    shut = dataclasses.replace(shut, meta={**shut.meta, "numel": [80, 4, 256, 256]})
    open_ = first_layer(0.1, weight_norm=list(bias / 50))

    assert "input_scale" not in diagnose(Run(gate, params=shut, losses=FLAT)).rules
    assert "input_scale" in diagnose(Run(gate, params=open_, losses=FLAT)).rules


def test_small_inputs_make_small_gradients_of_the_first_weight_and_nothing_has_vanished():
    rms = [1e-8, 1e-7, 1e-6, 1e-3]
    arrives = first_layer(1e-6, bias_grad=0.1, grad_rms=rms)
    faded = first_layer(1e-6, bias_grad=1e-6, grad_rms=rms)

    assert "vanishing" not in alarms(Run(acts(), params=arrives, losses=FLAT))
    assert "vanishing" in alarms(Run(acts(), params=faded, losses=FLAT))


@pytest.mark.parametrize(("losses", "severity"), [(FLAT, "warning"), (falling(), "note")])
def test_inputs_that_are_almost_0_show_in_the_first_gradients(losses, severity):
    f = found(Run(acts(), params=first_layer(1e-4), losses=losses), "input_scale")

    assert (f.severity, f.layers) == (severity, ("0",))
    assert "inputs of size 0.00013" in f.evidence  # 1e-4 / 0.1 / √64


@pytest.mark.parametrize(
    ("types", "params"),
    [
        (("Linear", "ReLU", "Linear"), first_layer(0.1)),
        (("Linear", "ReLU", "Linear"), first_layer(0.0)),  # `zero_gradient`
        (("Linear", "ReLU", "Linear"), first_layer(1e-4, bias_grad=0.0)),
        (("Linear", "LayerNorm", "Linear"), first_layer(1e-4)),
        (("Embedding", "Linear", "Linear"), first_layer(1e-4)),
        (("Linear", "ReLU", "Linear"), weights(4)),  # no bias to compare with
    ],
)
def test_inputs_that_are_not_known_to_be_small_are_no_finding(types, params):
    assert "input_scale" not in diagnose(Run(acts(types), params=params, losses=FLAT)).rules


# first outputs


@pytest.mark.parametrize(("losses", "severity"), [(FLAT, "error"), (falling(), "note")])
def test_a_cell_that_grows_in_a_loop_began_too_large(losses, severity):
    calms = np.where(np.arange(N) > 20, 3.0, 5e3)
    cells = acts(("Linear", "Linear", "Linear"), std=[0.8, calms, 4e3])

    f = found(Run(cells, losses=losses), "bad_init")

    assert (f.severity, f.layers) == (severity, ("1",))


def test_a_cell_that_stays_too_large_is_an_alarm_though_the_loss_falls():
    cells = acts(("Linear", "Linear", "Linear"), std=[0.8, 5e3, 4e3])

    assert found(Run(cells, losses=falling()), "bad_init").severity == "warning"


@pytest.mark.parametrize("std", [[0.8, 50, 50], [0.8, 1, 5e3], [50, 4e3, 1]])
def test_a_loud_head_or_loud_inputs_are_no_cell_that_grows(std):
    quiet = acts(("Linear", "Linear", "Linear"), std=std)

    assert "bad_init" not in diagnose(Run(quiet, losses=FLAT)).rules


def test_growth_is_seen_though_a_stem_is_registered_behind_the_blocks():
    grows = list(np.geomspace(0.7, 1800, 16))
    stem, mixed = acts(("Linear",) * 18, std=[*grows, 0.5, 900]), grows[::2] + grows[1::2]

    assert "grows" in found(Run(stem, losses=FLAT), "bad_init").evidence
    assert "bad_init" not in alarms(Run(acts(("Linear",) * 17, std=[*mixed, 1]), losses=FLAT))


# targets


def test_targets_out_of_reach_are_named_though_noise_lets_the_loss_fall():
    noisy = 1e5 * np.random.default_rng(0).uniform(0.7, 1.3, N)
    noisy[:5], noisy[-10:] = 1.1e5, 0.9e5  # as chance may have it
    slow = weights(4, grad_norm=[500] * 4, update_norm=[0.01] * 4)  # 20 a step
    quick = weights(4, grad_norm=[500] * 4, update_norm=[1.0] * 4)

    f = found(Run(params=slow, losses=noisy, info=MSE), "target_scale")

    assert f.severity == "warning"
    assert "all steps together can take 0.018" in f.evidence
    assert alarms(Run(params=quick, losses=noisy, info=MSE)) == set()
    assert alarms(Run(losses=noisy, info=MSE)) == set()  # nobody knows


def test_a_steady_fall_from_far_is_no_alarm_whatever_the_steps_seem_to_reach():
    slow = weights(4, n=300, grad_norm=[1] * 4, update_norm=[0.01] * 4)
    steady = np.linspace(1e5, 0.97e5, 300)

    assert alarms(Run(params=slow, losses=steady, info=MSE)) == set()
