"""The rules on float16: by layer, near its end and below its smallest number."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_health import FLAT, N, acts, alarms, falling, found, weights
from torch import nn

from hookkit import ActivationStats, GradientStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run

HALF, FULL = "torch.float16", "torch.float32"


def told(record, dtypes, **meta):
    return dataclasses.replace(record, meta={**record.meta, "dtype": dtypes, **meta})


def grads(dtypes=(HALF, HALF, HALF), **values):
    return dataclasses.replace(told(acts(**values), list(dtypes)), kind="gradient")


TINY = {"rms": [1e-7] * 3}


def test_range_speaks_of_the_layers_that_are_float16():
    big = acts(max=[1e4, 1e4, 1])

    f = found(Run(told(big, [FULL, HALF, HALF])), "fp16_range")

    assert f.layers == ("1",)
    assert alarms(Run(told(big, [FULL, "torch.bfloat16", HALF]))) == set()


def test_range_takes_the_models_dtype_where_the_record_does_not_say():
    assert found(Run(acts(min=[0, -9e3, 0]), info={"dtype": HALF}), "fp16_range").layers == ("1",)


@pytest.mark.parametrize("losses", [falling(), FLAT, None])
def test_gradients_at_float16s_smallest_number_from_the_start_are_an_alarm(losses):
    f = found(Run(gradients=grads(**TINY), losses=losses), "fp16_underflow")

    assert (f.severity, f.layers) == ("warning", ("0", "1", "2"))
    assert "3 of 3 layers" in f.evidence
    assert "GradScaler" in f.fix


def test_gradients_that_get_so_small_as_the_loss_falls_are_a_note():
    late = np.geomspace(1e-3, 1e-9, N)

    assert found(Run(gradients=grads(rms=[late] * 3), losses=falling()), "fp16_underflow")
    assert alarms(Run(gradients=grads(rms=[late] * 3), losses=falling())) == set()
    assert "fp16_underflow" in alarms(Run(gradients=grads(rms=[late] * 3), losses=FLAT))


def test_zeros_are_no_sign_of_underflow_by_themselves():
    relu = grads(rms=[1e-5] * 3, zero=[0.9] * 3)
    lost = grads(rms=[1e-7] * 3, zero=[0.99] * 3)  # what is left is of RMS 1e-6

    assert alarms(Run(gradients=relu)) == set()
    assert alarms(Run(gradients=lost)) == set()


def test_underflow_needs_float16_most_layers_and_no_scale():
    bf16 = grads(["torch.bfloat16"] * 3, **TINY)
    few = grads(rms=[1e-7, 1e-3, 1e-3])
    scaled = told(grads(**TINY), [HALF] * 3, unscaled=True)

    assert all(alarms(Run(gradients=g)) == set() for g in (bf16, few, scaled, grads([FULL] * 3)))


def test_parameters_in_float16_are_judged_by_their_own_gradients():
    params = told(weights(grad_rms=[1e-8] * 4), [HALF] * 4)

    assert "fp16_underflow" in alarms(Run(params=params))
    assert "fp16_underflow" not in alarms(Run(params=told(params, [FULL] * 4)))


def test_it_is_unjudged_where_float16_is_in_use_and_gradients_were_not_recorded():
    half = Run(told(acts(), [FULL, HALF, FULL]))

    assert dict(diagnose(half).unjudged)["fp16_underflow"] == "no gradients of outputs"
    assert "fp16_underflow" not in dict(diagnose(Run(acts())).unjudged)


def test_a_dead_gradient_says_nothing():
    none = grads(rms=[0.0] * 3, zero=[1.0] * 3)

    assert diagnose(Run(gradients=none)).rules == ()


def trained(factor, scaler=None, known=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
                          nn.Linear(16, 3))  # fmt: skip
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    stats = GradientStats(scaler=scaler if known else None)
    with watch(model, opt, ActivationStats(), ParamStats(), stats) as w:
        for _ in range(20):
            x = torch.randn(64, 4)
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), x[:, :3].argmax(1)) * factor
            if scaler is None:
                loss.backward()
                opt.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
    return w.run_record()


def test_under_autocast_a_real_run_is_judged_with_and_without_a_scaler():
    scale = 2.0**14

    assert "fp16_underflow" in alarms(trained(1e-5))
    assert alarms(trained(1.0)) == set()
    assert alarms(trained(1e-5, torch.amp.GradScaler("cpu", init_scale=scale))) == set()
    assert alarms(trained(1e-5, torch.amp.GradScaler("cpu", init_scale=scale), True)) == set()


def test_under_autocast_outputs_that_come_near_the_end_of_float16_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16))
    with torch.no_grad():
        model[2].weight.mul_(4e4)
    opt = torch.optim.SGD(model.parameters(), 1e-6)
    with watch(model, opt, ActivationStats()) as w:
        for _ in range(20):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(64, 4)).pow(2).mean()
            loss.backward()
            opt.step()

    (f,) = [f for f in w.diagnose() if f.rule == "fp16_range"]
    assert f.layers == ("2",)


def test_gradients_that_are_zero_in_every_layer_underflowed_if_nothing_is_learnt():
    none = grads(rms=[0.0] * 3, zero=[1.0] * 3)
    last_alive = grads(rms=[0.0, 0.0, 1e-3], zero=[1.0, 1.0, 0.0])

    assert found(Run(gradients=none, losses=FLAT), "fp16_underflow").severity == "error"
    assert "fp16_underflow" not in alarms(Run(gradients=last_alive, losses=FLAT))
    assert "fp16_underflow" not in alarms(Run(gradients=none, losses=falling()))


def test_without_gradients_of_outputs_those_of_matrices_tell():
    half = told(acts(), [HALF] * 3)
    gone = weights(3, grad_rms=[0, 0, 5e-7], grad_norm=[0, 0, 1e-5])

    f = found(Run(half, params=gone, losses=FLAT), "fp16_underflow")

    assert diagnose(Run(half, params=gone, losses=FLAT))[0] == f
    for record, p, losses in (
        (told(acts(), [FULL] * 3), gone, FLAT),
        (half, weights(3, grad_rms=[0, 0, 1e-4]), FLAT),
        (half, weights(3, grad_rms=[1e-5, 1e-5, 1e-5]), FLAT),
        (half, gone, falling()),
        (half, dataclasses.replace(gone, meta={**gone.meta, "unscaled": True}), FLAT),
    ):
        assert "fp16_underflow" not in diagnose(Run(record, params=p, losses=losses)).rules


def test_lost_gradients_are_told_before_the_weights_that_stay():
    p = weights(3, grad_rms=[0, 0, 5e-7], grad_norm=[0, 0, 1e-5], update_norm=[0, 0, 0])
    p.values["update_norm"][2, :3] = 1e-3

    d = diagnose(Run(told(acts(), [HALF] * 3), params=told(p, [HALF] * 3), losses=FLAT))

    assert d[0].rule == "fp16_underflow"
    assert "unmoved" in d.rules
