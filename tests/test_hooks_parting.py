"""Gradients of layers whose output shares memory: the run is the same, or a warning says it is not.

The hook hands on a copy there. An in-place operation on one of the two reaches the other only
without the hook, so each case runs twice, with and without it, and is compared.
"""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.editing import edit_grad
from hookkit.errors import ArgumentError, HookkitWarning, OverwrittenWarning
from hookkit.hooks import attach_grad, hook_input, hook_output, hook_outputs


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def used_later(m: nn.Module, x: Tensor) -> Tensor:
    """The output is written, its input is used: what the U-Net's list of skips is to a ReLU."""
    y = m(x)
    y.mul_(3)
    return (x.flatten() + y.sum()).pow(2).sum()


def only_the_input_is_used(m: nn.Module, x: Tensor) -> Tensor:
    m(x).mul_(3)
    return x.pow(2).sum()


def input_is_written(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    x.mul_(3)
    return y.pow(2).sum()


def somebody_keeps_the_input(m: nn.Module, x: Tensor) -> Tensor:
    kept.append(x)
    return m(x).mul_(3).pow(2).sum()


kept: list[Tensor] = []

PARTED = [used_later, only_the_input_is_used, input_is_written, somebody_keeps_the_input]


def output_is_written(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).relu_().pow(2).sum()


def nothing_is_written(m: nn.Module, x: Tensor) -> Tensor:
    return (m(x).pow(2).sum() + x.exp().sum()).exp()


def the_input_is_read_before(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    out = y * 2
    return out.add_(x.reshape(out.shape)).pow(2).sum()


TOGETHER = [output_is_written, nothing_is_written, the_input_is_read_before]

HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda m: hook_output(m, grad=True),
    "input": lambda m: hook_input(m, grad=True),
    "edit": lambda m: edit_grad(m, lambda m, g: g),
}


def results(use: Callable[..., Tensor], m: nn.Module, hook: Any) -> tuple[Tensor, Tensor | None]:
    kept.clear()
    p = torch.tensor([[0.5, -1.0], [2.0, 3.0]], requires_grad=True)
    with hook:
        loss = use(m, p * 1)
        loss.backward()
    return loss.detach(), p.grad


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("m", [View(), nn.Identity(), nn.Flatten(0), nn.Dropout().eval()], ids=str)
@pytest.mark.parametrize("use", PARTED)
def test_a_write_that_does_not_reach_the_other_tensor_is_told_by_layer(
    use: Callable[..., Tensor], m: nn.Module, hook: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results(use, m, HOOKS[hook](m))

    texts = [str(w.message) for w in caught if issubclass(w.category, OverwrittenWarning)]
    assert len(texts) == 1  # once
    assert texts[0].startswith("gradients of ")
    assert type(m).__name__ in texts[0]
    assert "shares its memory with its input or a parameter" in texts[0]
    assert "values may differ. Hook the layer before or after it" in texts[0]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("m", [View(), nn.Identity(), nn.Flatten(0), nn.Dropout().eval()], ids=str)
@pytest.mark.parametrize("use", TOGETHER)
def test_where_nobody_looks_at_the_other_the_run_is_the_same_and_nothing_is_said(
    use: Callable[..., Tensor], m: nn.Module, hook: str
) -> None:
    want = results(use, m, nullcontext())

    made = HOOKS[hook](m)
    with warnings.catch_warnings():
        if hook == "input" and use is output_is_written:
            warnings.simplefilter("ignore", HookkitWarning)  # its gradient went with the write
        got = results(use, m, made)

    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_part_of_the_input_that_is_written_alone_is_no_matter() -> None:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).mul_(3).pow(2).sum()

    m = Part()
    want = results(use, m, nullcontext())

    got = results(use, m, hook_output(m, grad=True))

    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Twice(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, self.f(y)


def one_is_written(m: nn.Module, x: Tensor) -> Tensor:
    a, b = m(x)
    a.mul_(3)
    return (a.sum() + b.sum()).pow(2)


def the_other_is_written(m: nn.Module, x: Tensor) -> Tensor:
    a, b = m(x)
    b.mul_(3)
    return (a.sum() + b.sum()).pow(2)


@pytest.mark.parametrize("use", [one_is_written, the_other_is_written])
@pytest.mark.parametrize("f", [lambda y: y, lambda y: y.view(-1), lambda y: y.t()])
def test_outputs_that_share_their_memory_and_part_are_told(
    use: Callable[..., Tensor], f: Callable[[Tensor], Tensor]
) -> None:
    m = Twice(f)
    want = results(use, m, nullcontext())

    with pytest.warns(OverwrittenWarning, match=r"gradients of Twice.* or twice\. One of the two"):
        got = results(use, m, hook_output(m, grad=True))

    assert got[0] != want[0]  # which is what is told


def test_outputs_that_share_their_memory_and_are_only_read_have_a_gradient_each() -> None:
    m = Twice(lambda y: y)

    with hook_output(m, grad=True) as h:
        a, b = m(torch.ones(2, requires_grad=True))
        (a * 2 + b * 3).sum().backward()

    torch.testing.assert_close(h.stored, (torch.full((2,), 2.0), torch.full((2,), 3.0)))


def test_a_parameter_that_a_module_returns_is_told_when_it_is_written() -> None:
    m = Weight()
    h = hook_output(m, grad=True)
    loss = m(torch.zeros(1)).sum()
    with torch.no_grad():
        m.weight.mul_(2)

    with pytest.warns(OverwrittenWarning, match=r"gradients of Weight.* input or a parameter"):
        loss.backward()
    h.remove()


def test_an_optimizers_step_between_batches_is_no_matter() -> None:
    m = Weight()
    opt = torch.optim.SGD(m.parameters(), lr=0.1)

    with hook_output(m, grad=True) as h:
        for _ in range(3):
            opt.zero_grad()
            m(torch.zeros(1)).pow(2).sum().backward()
            opt.step()

    assert h.n_calls == 3


def test_attach_grad_tells_too_and_names_what_is_no_function() -> None:
    m = nn.Identity()
    handle = attach_grad(m, lambda m, i, g: None)
    with pytest.warns(OverwrittenWarning, match="gradients of Identity"):
        results(used_later, m, nullcontext())
    handle.remove()

    with pytest.raises(ArgumentError, match="attach_grad: fn must be a function, found int"):
        attach_grad(m, 3)  # type: ignore[arg-type]
    assert not m._forward_hooks


def test_the_watch_keeps_no_memory_and_no_model_alive() -> None:
    m = nn.Identity()
    h = hook_output(m, grad=True)
    x = torch.ones(1000, requires_grad=True) * 1
    memory = weakref.ref(x)
    gc.disable()
    try:
        loss = m(x).sum()
        del x
        loss.backward()
        gone = weakref.ref(m)
        del m, h, loss
        assert gone() is None
    finally:
        gc.enable()
    assert memory() is None


def test_the_layer_is_told_by_its_name_where_it_has_one() -> None:
    m = nn.Identity()
    h = hook_outputs({"skip": m}, grad=True)

    with pytest.warns(OverwrittenWarning, match=r"gradients of 'skip' \(Identity\) were asked for"):
        results(used_later, m, nullcontext())
    h.remove()
