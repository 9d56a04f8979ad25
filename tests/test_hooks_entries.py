"""`HookEntry`, its switch and its handle: the one thing that hookkit puts on modules."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from hookkit.errors import HookError
from hookkit.hooks import Hooks, attach, attach_grad
from hookkit.hooks.entries import HookEntry, Switch, check_same, part_at
from hookkit.hooks.snapshot import Options


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


def both_sides(m: nn.Module, f: Any) -> Hooks:
    return Hooks.of([m], Options("Hooks", "both", f))


def test_one_switch_serves_many_hooks(net: nn.Sequential, x: Tensor) -> None:
    seen: list[nn.Module] = []
    switch = Switch(on=False)
    for m in net:
        attach(m, lambda m, *_: seen.append(m), switch=switch)

    net(x)
    assert seen == []
    switch.on = True
    net(x)

    assert seen == list(net)


def test_a_switched_recorder_has_two_graphs_and_no_break(net: nn.Sequential, x: Tensor) -> None:
    switch, sums = Switch(on=False), torch.zeros(3)
    for i, m in enumerate(net):
        attach(m, lambda m, a, k, o, i=i: sums[i].add_(o.detach().sum()), switch=switch)
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)

    for on in (False, True, False, True, False):
        switch.on = on
        compiled(x)

    assert counter.frame_count == 2
    torch.testing.assert_close(sums[2], 2 * net(x).sum())


def test_a_handle_removes_once_and_for_all(net: nn.Sequential, x: Tensor) -> None:
    seen: list[int] = []
    handle = attach(net, lambda *_: seen.append(1))
    other = net.register_forward_hook(lambda *_: None)

    handle.remove()
    handle.remove()
    net(x)

    assert (seen, n_hooks(net)) == ([], 1)
    other.remove()


def test_an_always_called_hook_sees_a_forward_that_raised(net: nn.Sequential) -> None:
    seen: list[Any] = []
    attach(net, lambda m, a, k, o: seen.append(o), always_call=True)

    with pytest.raises(RuntimeError):
        net(torch.ones(3, 7))

    assert seen == [None]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_hooked_module_do_nothing(copied: Any, net: nn.Sequential, x: Tensor) -> None:
    seen: list[nn.Module] = []
    attach(net[0], lambda m, *_: seen.append(m))
    attach(net[1], lambda m, a, k, o: o * 0, edit=True)
    attach_grad(net[2], lambda m, i, g: seen.append(m))
    both_sides(net[2], lambda m, gi, go: seen.append(m))

    twin = copied(net)
    twin(x).sum().backward()

    assert seen == []
    entries = [h for m in twin.modules() for h in m._forward_hooks.values()]
    assert all(isinstance(h, HookEntry) and h.callback is None for h in entries)


def test_a_function_gets_both_sides_of_a_backward_once(net: nn.Sequential, x: Tensor) -> None:
    seen: list[Any] = []
    handle = both_sides(net[2], lambda m, gi, go: seen.append((gi, go)))

    net(x).sum().backward()
    handle.remove()
    net(x).sum().backward()

    [((given,), (out,))] = seen
    torch.testing.assert_close(out, torch.ones(3, 2))
    torch.testing.assert_close(given, out @ net[2].weight)
    assert n_hooks(net) == 0


def test_gradient_hooks_have_a_switch_too(net: nn.Sequential, x: Tensor) -> None:
    seen: list[Any] = []
    switch = both_sides(net[2], lambda m, gi, go: seen.append(go)).switch

    for switch.on in (False, True):
        net(x).sum().backward()

    assert len(seen) == 1


def test_what_a_linear_gives_for_three_dimensions_has_its_own_shape_of_gradient(x: Tensor) -> None:
    seen: list[Tensor] = []
    layer = nn.Linear(4, 2)
    attach_grad(layer, lambda m, i, g: seen.append(g) or g * 2, edit=True)

    x = x[None].expand(6, 3, 4).clone().requires_grad_()
    torch.relu_(layer(x) + 0).sum().backward()

    assert seen[0].shape == (6, 3, 2)
    torch.testing.assert_close(x.grad, 2 * seen[0] @ layer.weight)


def test_a_part_that_is_not_there_is_an_error_with_those_that_are() -> None:
    with pytest.raises(HookError, match=r"f: Linear has nothing at \[2\]; there is \(1, 2\)\."):
        part_at((torch.ones(1), torch.ones(2)), "[2]", "f", lambda: "Linear")


def test_another_structure_is_an_error() -> None:
    with pytest.raises(HookError, match=r"f on Linear: the replacement is 1, the layer gave tuple"):
        check_same("f", lambda: "Linear", (torch.ones(1),), torch.ones(1))
