"""Gradients under a GradScaler are recorded without its factor, in any loop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.errors import HookkitWarning
from hookkit.recorders import GradientStats, ParamStats
from hookkit.training import watch


def scaler_of(scale: float = 1024.0, enabled: bool = True) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)


def step_of(
    model: Any, opt: Any, scaler: Any, x: Any, n: int = 1, clip: bool = False, fastai: bool = False
) -> None:
    """One step of `n` batches, as PyTorch's AMP examples make it, or as fastai's callback does."""
    for part in x.chunk(n):
        loss = model(part).square().mean() / n
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None and (clip or fastai):
        scaler.unscale_(opt)
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step() if scaler is None or fastai else scaler.step(opt)
    if scaler is not None:
        scaler.update()
    opt.zero_grad()


def recorded(scaler: Any, given: Any = None, fused: bool = False, **how: Any) -> Any:
    """In four steps the RMS of the gradients of outputs and of parameters, and their norms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.001, fused=fused)
    outputs, params = GradientStats(True, scaler=given), GradientStats(of="params")
    with watch(model, opt, outputs, params, norms := ParamStats()):
        for _ in range(4):
            step_of(model, opt, scaler, torch.randn(16, 4), **how)
    values = [cb.record().value("rms") for cb in (outputs, params)]
    return [*values, norms.record().value("grad_norm")]


HOW: list[dict[str, Any]] = [{}, {"n": 2, "clip": True}, {"fused": True}]


@pytest.mark.parametrize(
    ("how", "given"),
    [(h, given) for h in HOW for given in (False, True)] + [({"fastai": True}, True)],
)
def test_the_factor_is_gone_from_all_records_but_a_first_one_that_is_left_out(
    how: Any, given: bool
) -> None:
    scaler = scaler_of()

    outputs, *rest = recorded(scaler, scaler if given else None, **how)

    want, *want_rest = recorded(None, **how)
    np.testing.assert_allclose(outputs, want if given else want[:, 1:], rtol=1e-4)
    for of_params, wanted in zip(rest, want_rest, strict=True):
        np.testing.assert_allclose(of_params, wanted, rtol=1e-4)


def test_a_scaler_that_is_there_and_not_used_or_not_enabled_changes_nothing() -> None:
    idle, disabled, plain = scaler_of(), scaler_of(enabled=False), recorded(None)

    for got in (recorded(None), recorded(None, disabled), recorded(disabled)):
        for a, b in zip(got, plain, strict=True):
            np.testing.assert_array_equal(a, b)
    assert idle.is_enabled()


def test_a_scaler_that_comes_in_the_middle_costs_one_record_and_is_named() -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 3), scaler_of()
    opt, x = torch.optim.SGD(model.parameters(), 0.0), torch.randn(16, 4)
    with watch(model, opt, stats := GradientStats()):
        step_of(model, opt, None, x)
        with pytest.warns(HookkitWarning, match=r"step 1 .* give it: GradientStats\(scaler=sc"):
            step_of(model, opt, scaler, x)
        step_of(model, opt, scaler, x)

    rms = stats.record().value("rms", 0)
    assert stats.record().steps.tolist() == [0, 2]
    np.testing.assert_allclose(rms[0], rms[1], rtol=1e-4)


def test_no_batch_of_a_skipped_step_is_in_the_next_record() -> None:
    model, scaler = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), scaler_of()
    opt = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, opt, stats := GradientStats(scaler=scaler)) as w:
        for step in range(4):
            x = torch.ones(16, 4)
            # the weights' gradients of one batch overflow, not those of outputs
            x[5] = torch.inf if step in (0, 2) else 1.0
            step_of(model, opt, scaler, x, n=4)

    record = stats.record()
    assert w.n_steps == len(record) == 2
    assert record.value("count", 0).tolist() == [64, 64]
    assert not record.value("nonfinite").any()
    assert record.meta["unscaled"]
