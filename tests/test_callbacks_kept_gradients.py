"""`KeptGradients`: a forgotten zero_grad, and the many ways not to forget it."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.callbacks.kept_gradients import MANY


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def nothing(model: nn.Module, opt: torch.optim.Optimizer) -> None: ...


def to_none(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    opt.zero_grad()


def to_zero(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    opt.zero_grad(set_to_none=False)


def of_model(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model.zero_grad()


def by_data(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def by_factor(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 0


Zero = Callable[[nn.Module, torch.optim.Optimizer], None]
WAYS = [
    (nothing, True),
    *((zero, False) for zero in (to_none, to_zero, of_model, by_data, by_factor)),
]


def kept(model: nn.Module, opt: torch.optim.Optimizer, zero: Zero, **how: int) -> list[int]:
    """What is known after 8 steps: of `n_batches` each, zeroed at their end, or begin."""
    with watch(model, opt) as w:
        for _ in range(how.get("n_steps", 8)):
            if how.get("first"):
                zero(model, opt)
            for _ in range(how.get("n_batches", 1)):
                model(torch.randn(4, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if not how.get("first"):
                zero(model, opt)
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    return w.run_record().info["kept_gradients"]


@pytest.mark.parametrize(("zero", "is_kept"), WAYS)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("n_batches", [1, 3])
def test_gradients_that_are_not_zeroed_are_counted(zero, is_kept, first, n_batches):
    model = net()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    n, of = kept(model, opt, zero, first=first, n_batches=n_batches)

    assert (n, of) == (7 * is_kept, 7)


def test_only_the_first_steps_are_looked_at():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    assert kept(model, opt, nothing, n_steps=40) == [MANY, MANY]


def test_players_whose_gradients_are_zeroed_just_before_their_own_backward():
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = (torch.optim.SGD(player.parameters(), 0.1) for player in (g, d))

    with watch([g, d], [of_g, of_d]) as w:
        for _ in range(6):
            of_d.zero_grad()
            (d(torch.randn(4, 2)) - d(g(torch.randn(4, 2)).detach())).mean().backward()
            of_d.step()
            of_g.zero_grad()
            d(g(torch.randn(4, 2))).mean().backward()  # adds to the gradients of d, too
            of_g.step()

    info = w.run_record().info
    assert (info["kept_gradients"], info["wasted_gradients"]) == ([0, 10], [5, 10])
    assert "unmoved" not in w.diagnose().rules


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_step_outside_the_loop_over_batches_wastes_their_gradients(accumulates):
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    with watch(model, opt, ParamStats()) as w:
        for _ in range(5):
            opt.zero_grad()
            for _ in range(40):
                if not accumulates:
                    opt.zero_grad()
                loss = model(torch.randn(4, 4)).square().mean()
                loss.backward()
                w.loss(loss)
            opt.step()

    assert w.run_record().info["wasted_gradients"] == [0 if accumulates else 4 * 39, 4]
    assert ("unmoved" in w.diagnose().rules) is not accumulates


def test_gradients_that_autograd_does_not_add_to_are_not_known():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    with watch(model, opt) as w:
        for _ in range(6):
            loss = model(torch.randn(4, 4)).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.grad = grad
            opt.step()

    assert "kept_gradients" not in w.run_record().info


@pytest.mark.parametrize("way", ["gradient", "data"])
def test_clipped_gradients_of_each_sample_are_not_wasted(way):
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    with watch(model, opt, ParamStats()) as w:
        for _ in range(5):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for x in torch.randn(40, 1, 4):
                opt.zero_grad()
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for t, p in zip(total, model.parameters(), strict=True):
                    t += p.grad
            for t, p in zip(total, model.parameters(), strict=True):
                if way == "gradient":
                    p.grad = t / 40
                else:
                    p.grad.data = t / 40
            opt.step()

    assert "wasted_gradients" not in w.run_record().info
    assert "unmoved" not in w.diagnose().rules


@pytest.mark.parametrize(("training", "in_parts"), [(False, False), (True, False), (True, True)])
def test_long_attacks_on_what_the_model_is_given_waste_nothing(training, in_parts):
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    call = model.forward if in_parts else model

    with watch(model, opt, ParamStats()) as w:
        for _ in range(5):
            x = torch.randn(4, 4)
            model.train(training)
            for _ in range(40):
                x = x.detach().requires_grad_()
                model.zero_grad()
                call(x).square().mean().backward()
                x = x + 0.01 * x.grad.sign()
            model.train()
            opt.zero_grad()
            call(x.detach()).square().mean().backward()
            opt.step()

    assert w.run_record().info["wasted_gradients"] == [0, 4]
    assert "unmoved" not in w.diagnose().rules


def test_gradients_without_those_of_the_step_before_are_not_kept():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)

    with watch(model, opt) as w:
        for _ in range(6):
            before = [0 if p.grad is None else p.grad.clone() for p in model.parameters()]
            model(torch.randn(4, 4)).square().mean().backward()
            for p, grad in zip(model.parameters(), before, strict=True):
                p.grad = p.grad - grad
            opt.step()

    assert "kept_gradients" not in w.run_record().info


def test_gradients_that_are_sparse_only_now_and_then():
    table = nn.Embedding(8, 4, sparse=True)
    opt = torch.optim.SGD(table.parameters(), 0.1)

    with watch(nn.Sequential(table), opt) as w:
        for i in range(8):
            opt.zero_grad()
            loss = table(torch.arange(3)).sum()
            loss = loss if i % 2 else loss + table.weight.sum()  # the sum of both is dense
            loss.backward()
            opt.step()

    assert "kept_gradients" not in w.run_record().info


def test_a_tensor_that_is_no_parameter_is_saved_without_a_warning():
    model, image = net(), torch.randn(3, 4, requires_grad=True)
    opt = torch.optim.SGD([{"params": [image]}, {"params": model.parameters()}], 0.1)

    with watch(model, opt) as w:
        for _ in range(5):
            opt.zero_grad()
            model(image).sum().backward()
            opt.step()
            torch.save(image, io.BytesIO())

    assert w.run_record().info["kept_gradients"] == [0, 4]


def test_a_step_that_a_scaler_skips_is_none():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    with watch(model, opt) as w:
        for i in range(8):
            loss = model(torch.randn(4, 4)).square().mean() * (torch.inf if i == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    assert w.run_record().info["kept_gradients"] == [0, 6]


def test_a_forgotten_zero_grad_is_the_first_finding_though_the_loss_falls():
    model = net()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(64, 4)

    with watch(model, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(100):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            opt.step()
            w.loss(loss)

    first = w.diagnose()[0]
    assert (first.rule, first.severity) == ("grads_pile_up", "warning")
    assert "zero_grad()" in first.fix
