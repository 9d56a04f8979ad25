"""A user's hooks are part of what a model computes: a summary runs them, and keeps them apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookkit.hooks import Hook
from hookkit.inspection import summary


def convs() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1))


def larger(m: nn.Module, i: Any, o: Tensor) -> Tensor:
    return F.interpolate(o, scale_factor=2)


IMAGE = torch.zeros(1, 1, 8, 8)
TRUTH = 9 * 8 * 8 + 9 * 16 * 16  # what FlopCounterMode counts, halved


ADD: list[Callable[[nn.Module], Any]] = [
    lambda net: net[0].register_forward_hook(larger),
    lambda net: net[1].register_forward_pre_hook(lambda m, i: F.interpolate(i[0], scale_factor=2)),
    lambda net: Hook(net[0], larger, edit=True),
    lambda net: Hook(net[1], lambda m, i: F.interpolate(i[0], scale_factor=2), pre=True, edit=True),
]


@pytest.mark.parametrize("add", ADD)
def test_a_hook_that_changes_what_flows_is_part_of_the_model(add: Any) -> None:
    net = convs()
    handle = add(net)

    s = summary(net, IMAGE)

    assert (s.run, s.macs, s.output) == ("real", TRUTH, "1×1×16×16 float32")
    assert net(IMAGE).shape == (1, 1, 16, 16)
    handle.remove()
    assert summary(net, IMAGE).macs == 2 * 9 * 8 * 8


def test_a_hook_on_the_model_itself_changes_its_output() -> None:
    net = convs()
    net.register_forward_pre_hook(lambda m, i: (torch.cat([i[0], i[0]], -1),))
    net.register_forward_hook(lambda m, i, o: {"image": o})

    s = summary(net, IMAGE)

    assert s.output == "{'image': 1×1×8×16} float32"
    assert s.macs == 2 * 9 * 8 * 16


def test_what_a_hook_computes_counts_for_its_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    net[1].register_forward_hook(lambda m, i, o: o @ torch.ones(8, 3))

    assert [row.macs for row in summary(net, torch.ones(2, 4))] == [0, 2 * 4 * 8, 2 * 8 * 3]


def test_backward_hooks_are_on_and_not_called() -> None:
    net, called = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), []
    handle = net[0].register_full_backward_hook(lambda m, i, o: called.append(m))
    x = torch.ones(2, 3)

    with pytest.raises(RuntimeError) as real:
        net(x)
    with pytest.raises(RuntimeError) as seen:
        summary(net, x)
    handle.remove()

    assert str(seen.value) == str(real.value)
    assert called == []
    assert summary(net, x).output == "2×4 float32"
