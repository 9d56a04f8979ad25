"""Gradients under a GradScaler are recorded without its factor, in any loop."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.errors import HookkitWarning
from hookkit.stats import GradientStats
from hookkit.watching import watch


def scaler_of(scale: float = 1024.0) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def step_of(model: Any, opt: Any, scaler: Any, x: Any, n: int = 1, clip: bool = False) -> None:
    """One step of `n` batches, as PyTorch's AMP examples make it."""
    for part in x.chunk(n):
        loss = model(part).square().mean() / n
        (loss if scaler is None else scaler.scale(loss)).backward()
    if clip:
        if scaler is not None:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step() if scaler is None else scaler.step(opt)
    if scaler is not None:
        scaler.update()
    opt.zero_grad()


def recorded(scaler: Any, steps: int = 4, **how: Any) -> Any:
    """RMS by row and step: of outputs, and of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.001)
    stats = GradientStats(True), GradientStats(of="params")
    with watch(model, opt, *stats):
        for _ in range(steps):
            step_of(model, opt, scaler, torch.randn(16, 4), **how)
    return [cb.record().value("rms") for cb in stats]


@pytest.mark.parametrize("how", [{}, {"n": 4}, {"clip": True}, {"n": 2, "clip": True}])
def test_the_factor_is_gone_from_all_records_but_a_first_one_that_is_left_out(how: Any) -> None:
    (outputs, params), (plain_outputs, plain_params) = (
        recorded(scaler_of(), **how),
        recorded(None, **how),
    )

    np.testing.assert_allclose(outputs, plain_outputs[:, 1:], rtol=1e-4)
    np.testing.assert_allclose(params, plain_params, rtol=1e-4)


def test_a_scaler_that_is_there_and_not_used_changes_nothing() -> None:
    idle, plain = scaler_of(), recorded(None)

    np.testing.assert_array_equal(recorded(None)[0], plain[0])
    np.testing.assert_array_equal(recorded(torch.amp.GradScaler("cpu", enabled=False))[1], plain[1])
    assert idle.is_enabled()


def test_a_scaler_that_is_given_is_known_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 3), scaler_of()
    opt, x = torch.optim.SGD(model.parameters(), 0.0), torch.randn(16, 4)
    with watch(model, opt, stats := GradientStats(scaler=scaler), plain := GradientStats()):
        for _ in range(3):
            step_of(model, opt, scaler, x)

    rms = stats.record().value("rms", 0)
    assert (len(rms), len(plain.record())) == (3, 2)
    np.testing.assert_allclose(rms, plain.record().value("rms", 0)[0], rtol=1e-4)
    assert stats.record().meta["unscaled"]


def test_a_step_that_the_scaler_skips_is_in_no_record() -> None:
    model, scaler = nn.Linear(4, 3), scaler_of()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, stats := GradientStats(scaler=scaler)) as w:
        for i in range(6):
            x = torch.full((5, 4), float("inf") if i in (0, 3) else 1.0)
            step_of(model, opt, scaler, x)

    record = stats.record()
    assert (w.n_steps, len(record)) == (4, 4)
    assert (record.value("count") == 15).all()
    assert not record.value("nonfinite").any()


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
