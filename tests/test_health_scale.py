"""Sizes at the start: inputs, targets, first outputs."""

import dataclasses

from test_health import FLAT, acts, weights

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
