"""Another edit for each layer, edits that take a layer's name, and parts of another run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.edits import (
    add,
    edit_grads,
    edit_inputs,
    edit_outputs,
    scale,
    zero,
)
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.hooks.selection import select


class Net(nn.Module):
    """Three layers that add 1, 10 and 100."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        for i, m in enumerate(self.blocks):
            nn.init.eye_(m.weight)  # type: ignore[arg-type]
            nn.init.constant_(m.bias, 10**i)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for m in self.blocks:
            x = m(x)
        return x


X = torch.zeros(1, 2)


def test_each_layer_of_a_selection_has_its_own_edit_and_the_others_none() -> None:
    net = Net()
    layers = select(net, "blocks.*")

    with edit_outputs(layers, {"blocks.0": add(0.5), "blocks.1": zero()}) as edits:
        y = net(X)

    assert y.tolist() == [[100.0, 100.0]]
    assert edits.n_calls == {"blocks.0": 1, "blocks.1": 1}


def test_of_a_model_the_keys_select() -> None:
    net = Net()
    with edit_outputs(net, {"blocks.[01]": add(0.5), "blocks.2": lambda o: 2 * o}):
        assert net(X).tolist() == [[224.0, 224.0]]
    with edit_inputs(net, {"blocks.1": zero()}):
        assert net(X).tolist() == [[110.0, 110.0]]
    x = X.clone().requires_grad_()
    with edit_grads(net, {"blocks.1": lambda grad: 3 * grad}):
        net(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("edits", "error", "says"),
    [
        ({"blocks.7": zero()}, SelectionError, "'blocks.7', and no layer of that name among the 3"),
        ({}, OptionError, "no module was given"),
        ({"blocks.0": zero}, ArgumentError, "makes an edit, and is none itself"),
        ({"blocks.0": 3}, ArgumentError, "must be a function"),
    ],
)
def test_dicts_that_cannot_be_meant_change_nothing(edits: Any, error: Any, says: str) -> None:
    net = Net()

    with pytest.raises(error, match=says):
        edit_outputs(select(net, "blocks.*"), edits)

    assert not any(m._forward_hooks for m in net.modules())


def test_keys_that_mean_the_same_layer_or_none() -> None:
    with pytest.raises(OptionError, match='two keys mean the layer "blocks'):
        edit_outputs(Net(), {"blocks.*": zero(), "blocks.0": add(1.0)})
    with pytest.raises(SelectionError, match='no module matches "block'):
        edit_outputs(Net(), {"block.0": zero()})


def test_two_names_of_a_shared_module_are_one_layer() -> None:
    net = nn.ModuleDict({"act": nn.Identity(), "other": nn.Identity()})
    net["again"] = net["act"]

    for modules in (net, select(net, "act", "again")):
        with pytest.raises(OptionError, match=r"two keys mean the layer.*'act' and 'again'"):
            edit_outputs(modules, {"act": scale(10), "again": add(1)})
    assert not net["act"]._forward_hooks


def test_an_error_in_a_dict_of_edits_names_the_layer() -> None:
    net = Net()
    edits = edit_outputs(net, {"blocks.1": lambda o: 1 / 0})

    with pytest.raises(ZeroDivisionError) as caught, edits:
        net(X)

    assert caught.value.__notes__[0].endswith("on 'blocks.1' (Linear)")
