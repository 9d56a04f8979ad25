"""`watch` on a CUDA device: the loop is never made to wait."""

import warnings

import pytest
import torch
from hooked import n_hooks
from test_watching import net, sgd
from torch import nn

from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import watch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def _no_waiting():
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
def test_no_step_waits_for_the_device():
    model, loss_func = net().cuda(), nn.CrossEntropyLoss()
    opt = sgd(model)
    x = torch.randn(5, 4, device="cuda")
    y = torch.zeros(5, dtype=torch.long, device="cuda")
    w = watch(model, opt, ActivationStats(), GradientStats(), ParamStats(), loss_func=loss_func)

    with w:
        for step in range(6):
            if step == 2:  # buffers are there by now
                torch.cuda.set_sync_debug_mode("error")
            loss_func(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.set_sync_debug_mode("default")

    assert w.n_steps == len(w.param_stats.record()) == 6
    assert w.losses.shape == (6,)
    assert w.losses[0] > w.losses[-1] > 0
    assert n_hooks(model, opt) == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_gradient_scaler_leaves_out(fused: bool):
    model = net().cuda()
    opt = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    before = model[0].weight.detach().clone()

    with warnings.catch_warnings(), watch(model, opt, ParamStats()) as w:
        warnings.simplefilter("ignore")  # of no step at all
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(5, 4, device="cuda")).float().mean()
        scaler.scale(loss * float("inf")).backward()
        scaler.step(opt)
        scaler.update()

    assert torch.equal(before, model[0].weight)
    assert w.n_steps == int(fused)  # fused optimizers step on the device, and change nothing there


class OnTwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.host, self.card = nn.Linear(4, 6), nn.Linear(6, 3).cuda()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.card(self.host(x).relu().cuda())


def test_a_model_on_two_devices_is_recorded_on_both_and_in_half_precision():
    model = OnTwoDevices()
    opt = sgd(model)

    with watch(model, opt, ActivationStats(with_hist=True), GradientStats(), ParamStats()) as w:
        for _ in range(3):
            model(torch.randn(5, 4)).float().pow(2).mean().backward()
            opt.step()
            opt.zero_grad()

    record = w.activation_stats.record()
    assert record.names == ("host", "card")
    assert record.values["count"].tolist() == [[30.0] * 3, [15.0] * 3]
    assert (record.values["std"] > 0).all()
    assert (w.param_stats.record().values["update_norm"] > 0).all()
