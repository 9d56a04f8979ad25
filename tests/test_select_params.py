"""select_params: parameters by name, their gradients, and edits that end with the block."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from hookkit.editing import add, patch_from, replace, scale, select_params, zero
from hookkit.errors import ArgumentError, HookError
from hookkit.selecting import select

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    """Tied weights, a shared module, a list, an LSTM, a frozen and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bare = nn.Parameter(torch.ones(4))
        self.emb = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in "ab"])
        self.again = self.blocks[0]
        self.lstm = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.emb.weight
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x * self.bare)
        for block in (*self.blocks, self.again):
            x = block(x)
        return self.head(self.lstm(x)[0])


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


# --- which


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("bare", ["bare"]),
        ("*.weight", ["emb.weight"]),  # the head's is the same parameter
        ("head.*", ["head.weight", "head.bias"]),
        (
            "blocks.*.0.{weight,bias}",
            [f"blocks.{i}.0.{k}" for i in (0, 1) for k in ("weight", "bias")],
        ),
        ("**.bias_hh_l?", ["lstm.bias_hh_l0"]),
        ("blocks.[!0].**", [f"blocks.1.{i}.{k}" for i in (0, 1) for k in ("weight", "bias")]),
        (re.compile("norm|bare"), ["bare"]),
        (lambda p: p.dim() == 1 and not p.requires_grad, ["head.bias"]),
        (lambda name, p: name.endswith("ih_l0"), ["lstm.weight_ih_l0", "lstm.bias_ih_l0"]),
        (nn.LayerNorm, [f"blocks.{i}.1.{k}" for i in (0, 1) for k in ("weight", "bias")]),
        (["bare", "head.bias"], ["bare", "head.bias"]),
        ("again.0.bias", ["again.0.bias"]),
    ],
)
def test_parameters_are_selected_by_name_pattern_class_or_function(
    what: Any, names: list[str]
) -> None:
    net = Net()
    found = select_params(net, what)

    assert list(found) == names
    assert all(p is net.get_parameter(name) for name, p in found.items())


def test_all_of_them_are_the_models_each_once() -> None:
    net = Net()
    assert [*map(id, select_params(net).values())] == [*map(id, net.parameters())]
    assert (
        dict(select_params(torch.compile(net, backend="eager"))).keys() == select_params(net).keys()
    )
    assert len(select_params(net, net.again, select(net, "blocks.0"))) == 4


# --- gradients


def test_gradients_of_a_block_are_those_of_autograd_and_grad_stays_as_it_was() -> None:
    net = Net()
    trained = select_params(net, lambda p: p.requires_grad)
    net(X).sum().backward()
    wanted = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    net.zero_grad()

    with trained.grads() as grads:
        net(X).sum().backward()

    assert grads.keys() == wanted.keys() == trained.keys()
    for name, p in trained.items():
        assert torch.equal(grads[name], wanted[name])
        assert torch.equal(p.grad, wanted[name])
        assert grads[name] is not p.grad
    with trained.grads() as twice:
        net(X).sum().backward()
        net(X).sum().backward()
    torch.testing.assert_close(twice["bare"], 2 * wanted["bare"])
    net(X).sum().backward()
    torch.testing.assert_close(twice["bare"], 2 * wanted["bare"])  # after the block: nothing


def test_a_reentrant_checkpoint_brings_a_gradient_in_parts() -> None:
    layer = nn.Linear(4, 4)
    with select_params(layer, "weight").grads() as grads:
        y = X.clone().requires_grad_()
        for _ in range(3):
            y = checkpoint(layer, y, use_reentrant=True)
        y.sum().backward()

    torch.testing.assert_close(grads["weight"], layer.weight.grad)


# --- edits


@pytest.mark.parametrize(
    ("f", "wanted"),
    [
        (zero(at=0), lambda w: torch.cat([0 * w[:1], w[1:]])),
        (scale(2), lambda w: 2 * w),
        (add(torch.ones(4)), lambda w: w + 1),
        (replace(torch.eye(4)), lambda w: torch.eye(4)),
        (patch_from({"emb.weight": torch.ones(4, 4)}), lambda w: torch.ones(4, 4)),
        (lambda p: p.T, lambda w: w.T),
        (lambda p, name: p.mul_(len(name)), lambda w: 10 * w),
        (lambda p: None, lambda w: w),
    ],
)
def test_an_edit_holds_in_its_block_and_every_bit_is_as_before(f: Any, wanted: Any) -> None:
    net = Net()
    before, weight = values(net), net.emb.weight

    with select_params(net, "emb.weight").edit(f) as edited:
        assert edited["emb.weight"] is weight is net.head.weight
        torch.testing.assert_close(weight.detach(), wanted(before["emb.weight"]))
    assert same(net, before)
    assert weight.requires_grad


def test_tied_and_recurrent_parameters_are_edited_once_and_where_they_are_used() -> None:
    net = Net()
    before = values(net)
    with torch.no_grad(), select_params(net).edit(scale(0.5)):
        assert all(torch.equal(t, before[name] / 2) for name, t in net.state_dict().items())
        y = net(X)
        half = Net()
        half.load_state_dict({name: t / 2 for name, t in before.items()})
        assert torch.equal(y, half(X))
    assert same(net, before)


def test_values_come_back_after_errors_and_where_the_edit_fails() -> None:
    net = Net()
    before = values(net)
    with pytest.raises(KeyError), select_params(net).edit(zero()):
        raise KeyError

    message = r"edit of the parameter 'head.bias': the replacement is 2, the parameter is 4"
    with (
        pytest.raises(HookError, match=message),
        select_params(net, "head.*").edit(lambda p: p[:2] if p.dim() == 1 else 0 * p),
    ):
        pass
    with pytest.raises(IndexError, match=r"zero\(\) on 'bare' \(Parameter\)"):
        select_params(net, "bare").edit(zero(at=7)).__enter__()
    with pytest.raises(ArgumentError, match="edit: zero makes an edit, and is none itself"):
        select_params(net).edit(zero).__enter__()
    with pytest.raises(ArgumentError, match=r"edit: f must be a function.*f\(parameter\)"):
        select_params(net).edit(3).__enter__()  # type: ignore[arg-type]
    assert same(net, before)


def test_gradients_of_an_edited_model_and_graphs_that_cross_the_edge_of_the_block() -> None:
    layer = nn.Linear(4, 4)
    x = X.clone().requires_grad_()
    with select_params(layer, "weight").edit(scale(2)):
        layer(x).sum().backward()
        inside = layer(x).sum()
    torch.testing.assert_close(x.grad, 2 * layer.weight.detach().sum(0).expand(2, 4))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()  # its weights are gone
    outside = layer(x).sum()
    with (
        select_params(layer, "weight").edit(scale(2)),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        outside.backward()


def test_a_parametrized_weight_is_edited_where_it_is_kept() -> None:
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", nn.Identity())
    w = layer.weight.detach().clone()
    names = ["bias", "parametrizations.weight.original"]
    assert list(select_params(layer)) == names

    with select_params(layer, "**.original").edit(scale(3)):
        torch.testing.assert_close(layer.weight, 3 * w)
    assert torch.equal(layer.weight, w)
