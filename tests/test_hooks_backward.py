"""A module's gradients, in and out, on any structure, and nothing disturbed."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.errors import ArgumentError, SelectionError
from hookkit.hooks import Hooks
from hookkit.hooks.snapshot import Options
from hookkit.selecting import select


def backward_hooks(modules: Any, func: Any) -> Hooks:
    """As `HookCallback(is_forward=False)` makes them."""
    return Hooks.of(modules, Options("HookCallback", "both", func))


def both(m: nn.Module, gi: Any, go: Any) -> Any:
    return gi, go


def test_gradients_are_those_of_pytorchs_full_backward_hook() -> None:
    net, x = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 2)
    x.requires_grad_()
    truth: dict[nn.Module, Any] = {}
    handles = [
        m.register_full_backward_hook(lambda m, gi, go: truth.update({m: (gi, go)})) for m in net
    ]
    net(x).pow(2).sum().backward()
    for handle in handles:
        handle.remove()

    hooks = backward_hooks(dict(net.named_children()), both)
    net(x).pow(2).sum().backward()

    for m, (gi, go) in zip(net, hooks.stored, strict=True):
        torch.testing.assert_close((*gi, *go), (*truth[m][0], *truth[m][1]), rtol=0, atol=0)


def test_in_place_layers_and_first_layers_work_without_a_warning() -> None:
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(inplace=True), nn.Linear(5, 1))
    x = torch.randn(4, 2)
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()

    hooks = backward_hooks(select(net), both)
    net(x).sum().backward()

    (none,), (go,) = hooks["0"].stored
    assert none is None
    assert go.equal(hooks["1"].stored[0][0])
    grads = [p.grad for p in net.parameters()]
    assert all(g is not None and g.equal(e) for g, e in zip(grads, expected, strict=True))


class TwoOut(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x * 2, "b": x * 3}


class Adds(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        assert a is b  # as attention asks of its query and key
        return a.mul_(2) + b * 3


def test_an_input_passed_twice_stays_one_tensor_and_has_the_sum_in_both_places() -> None:
    net = Adds()
    hooks = backward_hooks({"": net}, both)
    x = torch.ones(1, requires_grad=True)
    a = x * 1

    (net(a, a).sum() + a.detach().sum()).backward()

    assert [g.item() for g in hooks[0].stored[0]] == [8.0, 8.0]
    assert x.grad is not None
    assert x.grad.item() == 8.0


def test_outputs_that_are_not_used_have_none_and_the_function_runs_at_the_end() -> None:
    net = TwoOut()
    hooks = backward_hooks({"two": net}, both)
    x = torch.ones(1, requires_grad=True)

    net(x)["b"].sum().backward()

    (gi,), (a, b) = hooks["two"].stored
    assert (gi.item(), a, b.item()) == (3.0, None, 1.0)


def test_a_leaf_of_a_structured_output() -> None:
    root = nn.Sequential(nn.LSTM(2, 3))
    hooks = backward_hooks(select(root, "0[0]"), both)
    out, _ = root(torch.ones(1, 1, 2))

    out.sum().backward()

    assert [g.shape for g in hooks[0].stored[1]] == [(1, 1, 3)]


def test_two_passes_over_one_graph_each_count() -> None:
    net, calls = nn.Linear(2, 1), list[Any]()
    hooks = backward_hooks({"": net}, lambda m, gi, go: calls.append(go[0].sum().item()))
    y = net(torch.ones(3, 2)).sum()

    y.backward(retain_graph=True)
    (2 * y).backward()

    assert calls == [3.0, 6.0]
    assert len(hooks) == 1


def test_a_module_used_twice_is_called_twice() -> None:
    net, calls = nn.Linear(2, 2), list[Any]()
    _hooks = backward_hooks({"": net}, lambda m, gi, go: calls.append(1))

    net(net(torch.ones(1, 2))).sum().backward()

    assert calls == [1, 1]


def test_switched_off_or_removed_it_keeps_still_and_what_was_stored_stays() -> None:
    net = nn.Linear(2, 1)
    hooks = backward_hooks({"": net}, both)
    net(torch.ones(1, 2)).sum().backward()

    hooks.switch.on = False
    net(torch.zeros(5, 2)).sum().backward()
    hooks.remove()
    net(torch.zeros(5, 2)).sum().backward()

    assert hooks.stored[0][1][0].shape == (1, 1)
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_no_grad_and_frozen_modules_are_left_alone() -> None:
    net = nn.Linear(2, 1).requires_grad_(False)
    hooks = backward_hooks({"": net}, both)

    with torch.no_grad():
        net(torch.ones(1, 2))
    net(torch.ones(1, 2))

    assert hooks.stored == [None]


def test_what_is_stored_does_not_change_with_the_gradients() -> None:
    w = nn.Parameter(torch.ones(3))

    class Direct(nn.Module):
        def forward(self) -> Tensor:
            return w * 1

    net = Direct()
    hooks = backward_hooks({"": net}, both)
    net().sum().backward()

    w.grad.mul_(100)  # type: ignore[union-attr]

    assert hooks[0].stored[1][0].tolist() == [1, 1, 1]


def test_one_bad_module_registers_none() -> None:
    net = nn.Linear(1, 1)

    with pytest.raises(ArgumentError):
        backward_hooks({"a": net, "b": 3}, both)

    assert not net._forward_hooks


def test_names_positions_and_near_misses() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    hooks = backward_hooks(select(net), both)

    assert hooks.names == ("0", "1")
    assert hooks._ipython_key_completions_() == ["0", "1"]
    assert hooks["1"] is hooks[1] is list(hooks)[1]
    assert hooks[1].module is net[1]
    assert repr(hooks) == "Hooks(2 hooks)"
    with pytest.raises(SelectionError, match=r"no hook is called \"2\".*\.names lists all 2"):
        hooks["2"]


def test_neither_graph_nor_module_keeps_the_hooks_alive() -> None:
    net = nn.Linear(1, 1)
    hooks = backward_hooks({"": net}, both)
    y = net(torch.ones(1, 1)).sum()
    weak = weakref.ref(hooks[0])
    hooks.remove()

    del hooks
    gc.collect()

    assert weak() is None
    y.backward()


def test_passing_a_parameter_through_without_gradients_needs_no_tap() -> None:
    net = nn.Identity()
    hooks = backward_hooks({"": net}, both)

    with torch.no_grad():
        y = net(nn.Parameter(torch.ones(1)))

    assert y.item() == 1
    assert hooks.stored == [None]
