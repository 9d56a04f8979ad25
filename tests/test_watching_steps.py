"""Which optimizer steps `watch` counts, and what it records of them: steps that are skipped, of
several optimizers, of one made later, of a wrapper. Numbers are compared with a plain loop's."""

import pytest
import torch
from torch import nn

from hookkit import ActivationStats, GradientStats, ParamStats, watch


def net(n_out: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n_out))


# --- steps that a GradScaler skips


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_is_no_step(fused: bool):
    model, x = net(), torch.randn(8, 4)
    opt = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorders = ActivationStats(), GradientStats(of="params"), ParamStats()

    with watch(model, opt, *recorders) as w:
        for i in range(6):
            loss = model(x).pow(2).mean() * (float("inf") if i == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    assert w.n_steps == 5
    for recorder in recorders:
        assert recorder.record().steps.tolist() == [0, 1, 2, 3, 4]
        assert (recorder.record().value("nonfinite") == 0).all()
    assert (w.param_stats.record().value("update_norm") > 0).all()
