"""Gradients under a GradScaler are recorded without its scale."""

import numpy as np
import pytest
import torch
from torch import nn

from hookkit import GradientStats, watch


def recorded(step, scaler=None, given=None):
    """RMS of the gradients of outputs in four steps, each made by `step(scaler, opt)`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), 0.001)
    with watch(model, opt, stats := GradientStats(scaler=given)):
        for _ in range(4):
            loss = model(torch.randn(16, 4)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            step(scaler, opt)
            opt.zero_grad()
    return stats.record().value("rms")


def plainly(scaler, opt):
    opt.step()


def by_scaler(scaler, opt):
    scaler.step(opt)
    scaler.update()


def unscaled_before(scaler, opt):
    """As fastai's callback does."""
    scaler.unscale_(opt)
    opt.step()
    scaler.update()


@pytest.mark.parametrize("step", [by_scaler, unscaled_before])
def test_a_scaler_that_is_not_given_costs_the_first_record(step):
    under = recorded(step, torch.amp.GradScaler("cpu", init_scale=1024.0))

    np.testing.assert_allclose(under, recorded(plainly)[:, 1:], rtol=1e-4)


def test_a_scaler_that_is_given_costs_none():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    under = recorded(by_scaler, scaler, given=scaler)

    np.testing.assert_allclose(under, recorded(plainly), rtol=1e-4)


def test_a_scaler_that_is_there_and_not_used_changes_nothing():
    unused = torch.amp.GradScaler("cpu", init_scale=1024.0)

    assert recorded(plainly).shape == (2, 4)
    assert unused.is_enabled()
