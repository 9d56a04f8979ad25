"""Which backward passes `GradientStats` records: those whose gradients a step uses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.errors import HookkitWarning
from hookkit.recorders import GradientStats
from hookkit.training import watch


def net(n_in: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n_in, 16), nn.Tanh(), nn.Linear(16, 1))


def of_a_physics_informed_net(model: nn.Module) -> Tensor:
    x = torch.linspace(0, 1, 40).reshape(20, 2).requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return ((slope + u) ** 2).mean()


def of_a_critic_with_gradient_penalty(model: nn.Module) -> Tensor:
    real, fake = torch.linspace(0, 3, 20).reshape(10, 2), torch.linspace(-1, 1, 20).reshape(10, 2)
    between = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty


def with_a_weight_from_gradients(model: nn.Module) -> Tensor:
    """Such as VQGAN's: how much a second loss counts depends on gradients of the last layer."""
    y = model(torch.linspace(-1, 1, 20).reshape(10, 2))
    first, second, last = y.square().mean(), y.abs().mean(), model[2].weight
    a, b = (
        torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (first, second)
    )
    return first + (a / b).detach() * second


def truth(loss_of: Any) -> dict[str, Any]:
    """By layer the gradients of the loss for all outputs, in a plain run in float64."""
    model, outputs = net().double(), []
    for name in "0", "2":
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda m, i, o, name=name: outputs.append((name, o)))
    torch.set_default_dtype(torch.float64)
    try:
        loss = loss_of(model)
    finally:
        torch.set_default_dtype(torch.float32)
    grads = torch.autograd.grad(loss, [o for _, o in outputs], allow_unused=True)
    seen = [
        (name, g.flatten()) for (name, _), g in zip(outputs, grads, strict=True) if g is not None
    ]
    return {name: torch.cat([g for own, g in seen if own == name]) for name in ("0", "2")}


@pytest.mark.parametrize(
    "loss_of",
    [
        of_a_physics_informed_net,
        of_a_critic_with_gradient_penalty,
        with_a_weight_from_gradients,
    ],
)
def test_gradients_within_the_loss_are_not_recorded_as_gradients_of_it(loss_of: Any):
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    with watch(model, opt, stats := GradientStats()) as w:
        loss = loss_of(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
        w.loss(loss)

    record = stats.record()
    for name, grads in truth(loss_of).items():
        assert record.value("count", name).tolist() == [grads.numel()]
        want = grads.square().mean().sqrt().item()
        np.testing.assert_allclose(record.value("rms", name), [want], rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(record.value("max", name), [grads.max().item()], rtol=1e-4)


def test_parameters_gradients_from_autograd_grad_are_recorded():
    model, x = net(), torch.linspace(-1, 1, 20).reshape(10, 2)
    opt, params = torch.optim.SGD(model.parameters(), 0.1), list(model.parameters())

    with watch(model, opt, stats := GradientStats()):
        loss = model(x).square().mean()
        for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = grad
        opt.step()

    wanted = truth(lambda m: m(x.double()).square().mean())
    for name, grads in wanted.items():
        want = [grads.square().mean().sqrt().item()]
        np.testing.assert_allclose(stats.record().value("rms", name), want, rtol=1e-4)


def test_several_backwards_through_one_forward_are_warned_of_once():
    model, x = net(), torch.ones(4, 2)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        with watch(model, opt, GradientStats()):
            for _ in range(3):
                y = model(x)
                y.square().mean().backward(retain_graph=True)
                y.abs().mean().backward()
                opt.step()
                opt.zero_grad()

    with pytest.warns(
        HookkitWarning, match=r"more than once.*\(loss_a \+ loss_b\)\.back"
    ) as warned:
        train()
    assert len(warned) == 1
