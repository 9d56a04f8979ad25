"""Rules on NaN and Inf, and on float16, by layer."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import FLAT, N, acts, alarms, falling, found, weights
from torch import nn

from hookkit import ActivationStats, GradientStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Incident, Run


def test_non_finite_names_the_first_layer_and_step():
    bad = np.zeros((3, N))
    bad[1:, 40:] = 7
    run = Run(acts(nonfinite=bad))

    f = found(run, "non_finite")

    assert (f.layers, f.steps, f.severity) == (("1",), (40, 40), "error")
    assert "(ReLU) has NaN or Inf" in f.evidence


def overflow(kind="gradient", until=43):
    """Gradients of three layers, those of the first two not finite in some steps."""
    bad = np.zeros((3, N))
    bad[:2, 40:until] = 1
    return dataclasses.replace(acts(nonfinite=bad), kind=kind)


def test_non_finite_gradients_begin_at_the_end():
    f = found(Run(gradients=overflow()), "non_finite")

    assert (f.layers, f.severity) == (("1",), "error")


@pytest.mark.parametrize("kept", [{"activations": acts()}, {"params": weights()}])
def test_gradients_that_overflow_in_a_few_steps_and_do_no_harm_are_a_note(kept):
    f = found(Run(gradients=overflow(), losses=falling(), **kept), "non_finite")

    assert f.severity == "note"
    assert "weights, activations and loss stay finite" in f.evidence
    assert "GradScaler" in f.cause


def test_gradients_that_overflow_to_the_end_or_spoil_what_follows_are_errors():
    broken, poisoned = falling(), np.full((4, N), 5.0)
    broken[60:], poisoned[2, 44:] = np.nan, np.nan
    harmful = [
        Run(acts(), gradients=overflow(until=N), losses=falling()),
        Run(acts(), gradients=overflow(), losses=broken),
        Run(overflow("activation"), gradients=overflow(), losses=falling()),
        Run(gradients=overflow(), params=weights(weight_norm=poisoned), losses=falling()),
    ]

    assert [found(run, "non_finite").severity for run in harmful] == ["error"] * 4


def test_non_finite_reports_the_incident_of_the_flight_recorder():
    f = found(Run(incidents=(Incident("activation", "body.log", "Log", 12),)), "non_finite")

    assert (f.layers, f.steps) == (("body.log",), (12, 12))


def test_a_mask_of_minus_inf_is_a_note():
    f = found(Run(acts(nonfinite=[0, 5, 0]), losses=falling()), "non_finite")

    assert f.severity == "note"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_stops_being_a_number_is_an_error(bad):
    series = falling()
    series[120:] = bad

    assert found(Run(losses=series), "non_finite").steps == (120, 120)


@pytest.mark.parametrize("gaps", [slice(50, 60), slice(298, None), slice(None)])
def test_unknown_losses_are_not_nan_losses(gaps):
    series = falling()
    series[gaps] = np.nan

    assert alarms(Run(losses=series)) == set()


def test_weights_that_are_nan_from_the_first_step_are_not_called_unmoved():
    p = weights(update_norm=[np.nan] * 4, grad_norm=[np.nan] * 4, nonfinite=[3] * 4)

    assert alarms(Run(params=p)) == {"non_finite"}


def test_what_is_not_finite_in_the_first_step_comes_first():
    broken = acts(nonfinite=[0, 0, 1.0], max=[3.0, 3.0, 3.0])
    late = acts(nonfinite=[0, 0, np.arange(N) > 50])
    still = weights(3, update_norm=[0, 1, 1], grad_norm=[0, 1, 1])

    assert diagnose(Run(broken, params=still))[0].rule == "non_finite"
    assert diagnose(Run(late, params=still))[0].rule == "zero_gradient"


HALF, FULL = "torch.float16", "torch.float32"


def with_dtypes(record, dtypes, **meta):
    return dataclasses.replace(record, meta={**record.meta, "dtype": dtypes, **meta})


def grads(dtypes=(HALF, HALF, HALF), **values):
    return dataclasses.replace(with_dtypes(acts(**values), list(dtypes)), kind="gradient")


TINY = {"rms": [1e-7] * 3}


def test_range_names_the_layers_that_are_float16():
    big = acts(max=[1e4, 1e4, 1])

    f = found(Run(with_dtypes(big, [FULL, HALF, HALF])), "fp16_range")

    assert f.layers == ("1",)
    assert alarms(Run(with_dtypes(big, [FULL, "torch.bfloat16", HALF]))) == set()


def test_range_takes_the_models_dtype_where_the_record_does_not_say():
    assert found(Run(acts(min=[0, -9e3, 0]), info={"dtype": HALF}), "fp16_range").layers == ("1",)


@pytest.mark.parametrize("losses", [falling(), FLAT, None])
def test_gradients_at_float16s_smallest_number_from_the_start_are_a_warning(losses):
    f = found(Run(gradients=grads(**TINY), losses=losses), "fp16_underflow")

    assert (f.severity, f.layers) == ("warning", ("0", "1", "2"))
    assert "3 of 3 layers" in f.evidence
    assert "GradScaler" in f.fix


def test_gradients_that_get_so_small_late_are_no_finding():
    late = np.geomspace(1e-3, 1e-9, N)

    assert diagnose(Run(gradients=grads(rms=[late] * 3), losses=falling())).rules == ()


def test_zeros_alone_are_no_underflow():
    relu = grads(rms=[1e-5] * 3, zero=[0.9] * 3)
    lost = grads(rms=[1e-7] * 3, zero=[0.99] * 3)  # the others have RMS 1e-6

    assert alarms(Run(gradients=relu)) == set()
    assert alarms(Run(gradients=lost)) == set()


def test_underflow_needs_float16_most_layers_and_no_scale():
    bf16 = grads(["torch.bfloat16"] * 3, **TINY)
    few = grads(rms=[1e-7, 1e-3, 1e-3])
    scaled = with_dtypes(grads(**TINY), [HALF] * 3, unscaled=True)

    assert all(alarms(Run(gradients=g)) == set() for g in (bf16, few, scaled, grads([FULL] * 3)))


def test_parameters_in_float16_are_judged_by_their_own_gradients():
    params = with_dtypes(weights(grad_rms=[1e-8] * 4), [HALF] * 4)

    assert "fp16_underflow" in alarms(Run(params=params))
    assert "fp16_underflow" not in alarms(Run(params=with_dtypes(params, [FULL] * 4)))


def test_it_is_unjudged_where_float16_is_in_use_and_gradients_were_not_recorded():
    half = Run(with_dtypes(acts(), [FULL, HALF, FULL]))

    assert dict(diagnose(half).unjudged)["fp16_underflow"] == "no gradients of outputs"
    assert "fp16_underflow" not in dict(diagnose(Run(acts())).unjudged)


def test_a_gradient_that_is_always_0_is_no_underflow():
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
