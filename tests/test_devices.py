"""On an accelerator: nothing waits for it, and what is recorded and edited is as on a CPU."""

import ast
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from test_watching import net, sgd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hookkit
from hookkit._core.pytree import tree_leaves
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.recorders.parameters import norms_of
from hookkit.records import Run
from hookkit.training import watch

PACKAGE = Path(hookkit.__file__).parent
MAKERS = "zeros ones empty full arange tensor as_tensor randn rand randint randperm linspace eye"


def test_every_tensor_that_hookkit_makes_names_its_device():
    """Where a user has set another default device, what is on the CPU has to stay there."""
    unnamed = []
    for file in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func)[6:] in MAKERS.split():
                given = {keyword.arg for keyword in call.keywords}
                if ast.unparse(call.func).startswith("torch.") and not given & {"device", None}:
                    unnamed.append(f"{file.relative_to(PACKAGE)}:{call.lineno} {ast.unparse(call)}")
    assert [line for line in unnamed if not line.startswith("testing/")] == []


def test_no_step_waits_for_the_device(cuda: torch.device):
    model, loss_func = net().to(cuda), nn.CrossEntropyLoss()
    opt = sgd(model)
    x = torch.randn(5, 4, device=cuda)
    y = torch.zeros(5, dtype=torch.long, device=cuda)
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
def test_a_step_that_the_gradient_scaler_leaves_out(fused: bool, gpu: torch.device):
    model = net().to(gpu)
    opt = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler(gpu.type, init_scale=4.0)
    before = model[0].weight.detach().clone()

    with warnings.catch_warnings(), watch(model, opt, ParamStats()) as w:
        warnings.simplefilter("ignore")  # of no step at all
        with torch.autocast(gpu.type, torch.float16):
            loss = model(torch.randn(5, 4, device=gpu)).float().mean()
        scaler.scale(loss * float("inf")).backward()
        scaler.step(opt)
        scaler.update()

    assert torch.equal(before, model[0].weight)
    assert w.n_steps == int(fused)  # fused optimizers step on the device, and change nothing there


class OnTwoDevices(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.host, self.card, self.device = nn.Linear(4, 6), nn.Linear(6, 3).to(device), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.card(self.host(x).relu().to(self.device))


def test_a_model_on_two_devices_is_recorded_on_both_and_in_half_precision(gpu: torch.device):
    model = OnTwoDevices(gpu)
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


class NoFloat64(TorchDispatchMode):
    """Refuses float64 anywhere but on the CPU, as Apple's devices do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if not t.is_cpu and t.dtype is torch.float64]
        assert not made, f"{func} made a float64 tensor on {made[0].device}"
        return out


def losses_and_record(device: torch.device) -> tuple[Any, Run]:
    torch.manual_seed(0)
    model = net().to(device)
    opt, x = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(5, 4).to(device)
    y = torch.arange(5).to(device) % 2
    stats = ActivationStats(units=True, with_hist=True), GradientStats(True), ParamStats()
    with warnings.catch_warnings(), watch(model, opt, *stats, FlightRecorder("report")) as w:
        for _ in range(4):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            w.loss(loss)
    return w.losses, w.run_record()


def test_a_device_without_float64_records_the_same(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
):
    wanted_losses, wanted = losses_and_record(torch.device("cpu"))
    monkeypatch.setattr("hookkit._core.devices.WITHOUT_FLOAT64", frozenset((gpu.type,)))
    monkeypatch.setattr("hookkit.recorders.triton_rows.serves", lambda device: False)

    with NoFloat64():
        losses, run = losses_and_record(gpu)

    np.testing.assert_allclose(losses, wanted_losses, 1e-3)
    for name, table in wanted.activations.values.items():
        np.testing.assert_allclose(run.activations.values[name], table, 1e-3, 1e-4, err_msg=name)
    for name, table in wanted.params.values.items():
        np.testing.assert_allclose(run.params.values[name], table, 1e-2, 1e-4, err_msg=name)


def test_norms_whose_squares_leave_float32(gpu: torch.device):
    values = [1e-24, 0.0, 1.0, 1e25, float("inf"), float("nan")]
    norms = norms_of([torch.full((4,), value, device=gpu) for value in values])
    np.testing.assert_allclose(norms.cpu(), [2 * value for value in values], 1e-6)


def test_a_training_by_torch_func_is_seen(gpu: torch.device):
    model = net().to(gpu)
    opt, recorder = sgd(model), FlightRecorder()
    with warnings.catch_warnings(), watch(model, opt, recorder):
        warnings.simplefilter("ignore")  # of a first product without a CUDA context, by torch 2.11
        for _ in range(3):
            values, x = dict(model.named_parameters()), torch.randn(5, 4, device=gpu)
            grads = torch.func.grad(
                lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean()
            )(values, x)
            for name, p in values.items():
                p.grad = grads[name].detach()
            opt.step()

    assert recorder.incidents == ()


def test_a_learning_rate_on_the_device_is_recorded(gpu: torch.device):
    model = net().to(gpu)
    rate = torch.tensor(0.5, device=gpu)
    opt = torch.optim.SGD(
        [{"params": [model[0].weight]}, {"params": [model[2].weight], "lr": rate}], 0.1
    )
    with watch(model, opt, stats := ParamStats()):
        for _ in range(2):
            model(torch.randn(5, 4, device=gpu)).mean().backward()
            opt.step()
            rate.mul_(0.5)

    record = stats.record()
    np.testing.assert_allclose(record.value("lr", "0.weight"), [0.1, 0.1])
    np.testing.assert_allclose(record.value("lr", "2.weight"), [0.5, 0.25])
