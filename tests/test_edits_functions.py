"""`edit_function`, against models whose forward has the change written into it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit.edits import add, edit_function, edit_outputs, patch_from, scale, zero
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.hooks import hook_function
from hookkit.hooks.selection import select


class Attention(nn.Module):
    """Attention by hand, whose softmax is `self.normalize`, and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.normalize: Any = lambda w: w.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = self.normalize(q @ k.mT / 2) @ v + F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(x.shape)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), nn.Linear(8, 8), Attention())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_a_softmax_is_replaced_and_gradients_flow(net: nn.Sequential, x: Tensor) -> None:
    def sparse(call: Any, inputs: Any, output: Tensor) -> Tensor:
        return F.relu(inputs[0]) / 5

    with edit_function(torch.softmax, sparse, within=net):
        y = net(x)
    for m in (net[0], net[2]):
        m.normalize = lambda w: F.relu(w) / 5  # type: ignore[assignment]
    expected = net(x)

    assert torch.equal(y, expected)
    parameters = list(net.parameters())
    for g, h in zip(
        torch.autograd.grad(y.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(g, h)


def test_inputs_are_edited(x: Tensor) -> None:
    with edit_function(F.softmax, lambda call, inputs: (inputs[0] * 3, *inputs[1:]), inputs=True):
        hot = x.softmax(-1)
    with edit_function(F.softmax, scale(3.0), inputs=True):
        by_name = torch.softmax(dim=-1, input=x)

    assert torch.equal(hot, torch.softmax(x * 3, -1))
    assert torch.equal(by_name, hot)


def test_gradients_are_edited(x: Tensor) -> None:
    given = x.requires_grad_()
    with edit_function(torch.exp, scale(5.0), grad=True) as edits:
        (given.exp() * 2).sum().backward()

    torch.testing.assert_close(given.grad, 10 * x.detach().exp())
    assert edits.n_calls == {"exp": 1}


def test_some_calls_are_edited_by_number(x: Tensor) -> None:
    with edit_function(torch.relu, zero(), calls=[0, 2]) as edits:
        sums = [F.relu(torch.ones(2)).sum().item() for _ in range(4)]

    assert sums == [0.0, 2.0, 0.0, 2.0]
    assert edits.n_calls == {"relu": 4}


def test_calls_are_patched_one_by_one_from_another_run(net: nn.Sequential, x: Tensor) -> None:
    with hook_function(F.softmax, within=net) as clean:
        expected = [net(x), net(2 * x)]
    other = torch.randn(2, 5, 8)
    stored = dict(clean.as_dict())

    def run(edit: Any) -> list[Tensor]:
        def record(call: Any, inputs: Any, output: Tensor) -> None:
            seen.append(output.detach())

        seen: list[Tensor] = []
        with edit_function(F.softmax, edit, within=net), edit_function(F.softmax, record):
            net(other), net(other)
        return seen

    assert len(expected) == 2
    for edit in (patch_from(clean), patch_from(stored)):
        assert all(torch.equal(a, b) for a, b in zip(run(edit), clean.stored, strict=True))


def test_what_is_captured_inside_an_edit_is_edited_and_outside_it_is_not(x: Tensor) -> None:
    with hook_function(F.relu) as own, edit_function(F.relu, add(1.0)), hook_function(F.relu) as e:
        F.relu(x)

    assert torch.equal(own[0].stored, F.relu(x))
    assert torch.equal(e[0].stored, F.relu(x) + 1)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", [Tensor.backward, torch.autograd.backward, torch.autograd.grad])
def test_a_checkpoint_is_edited_again(
    net: nn.Sequential, x: Tensor, reentrant: bool, how: Any
) -> None:
    def grads(run: Any) -> list[Tensor]:
        net.zero_grad()
        parameters = [*net.parameters()]
        with edit_function(F.softmax, scale(0.5), within=net) as edits:
            loss = run(x.detach().requires_grad_()).square().sum()
            got = how(loss, *([parameters] if how is torch.autograd.grad else []))
        assert edits.n_calls == {"0/softmax": 1, "2/softmax": 1}
        return got or [p.grad.clone() for p in parameters]  # type: ignore[union-attr]

    if reentrant and how is torch.autograd.grad:
        pytest.skip("PyTorch does not support it")
    checkpointed = grads(lambda x: checkpoint(net, x, use_reentrant=reentrant))
    for a, b in zip(checkpointed, grads(net), strict=True):
        torch.testing.assert_close(a, b)


class Encoder(nn.Module):
    """Checkpoints each of its layers, and once more inside of that."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant, act = reentrant, nn.Softmax(-1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), act) for _ in range(2))

    def again(self, f: Any, x: Tensor) -> Any:
        return f(x) if self.reentrant is None else checkpoint(f, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.again(lambda x, layer=layer: self.again(layer, x), x)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("within", ["1", "1.layers.1", "*"])
def test_a_checkpoint_inside_the_modules_of_within_is_edited_again(
    x: Tensor, reentrant: bool, within: str
) -> None:
    def grads(reentrant: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), Encoder(reentrant), nn.Softmax(-1))
        with edit_function(F.softmax, scale(3.0), within=select(net, within)) as edits:
            net(x.detach().requires_grad_()).square().sum().backward()
        assert sum(edits.n_calls.values()) == {"1": 2, "1.layers.1": 1, "*": 3}[within]
        return [p.grad for p in net.parameters()]  # type: ignore[misc]

    for a, b in zip(grads(reentrant), grads(None), strict=True):
        torch.testing.assert_close(a, b)


def test_a_forward_outside_the_block_is_not_edited_in_its_recomputation(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    wanted = torch.autograd.grad(net(x).square().sum(), [*net.parameters()])
    blocks: list[Any] = [
        lambda: edit_function(F.softmax, scale(3.0)),
        lambda: edit_function(F.softmax, scale(3.0), within=net),
        lambda: edit_function(F.softmax, scale(3.0), within=[nn.Sequential(net)]),
        lambda: edit_outputs(list(net), scale(3.0)),
    ]
    for block in blocks:
        net.zero_grad()
        loss: Any = checkpoint(net, x, use_reentrant=False).square().sum()  # type: ignore[no-untyped-call]
        with pytest.warns(NeverFiredWarning), block():
            loss.backward()
        for p, grad in zip(net.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, grad)


def test_a_checkpoint_of_a_module_that_is_shared_with_others_is_an_error(x: Tensor) -> None:
    class Part(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(8, 8), act

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.act, self.fc(x), use_reentrant=False)

    act = nn.Softmax(-1)
    net = nn.Sequential(Part(act), Part(act))

    def run(within: Any) -> None:
        with edit_function(F.softmax, scale(3.0), within=within):
            net(x).sum().backward()

    with pytest.raises(HookError, match="or a module that is shared"):
        run([net[0]])
    run(net)


def test_operators_are_edited_and_calls_in_place_are_refused() -> None:
    a = torch.full((2,), 2.0)

    with edit_function(torch.sub, scale(10)), edit_function(torch.div, scale(10)):
        assert (1 - a).tolist() == (a - 3).tolist() == [-10, -10]
        assert (1 / a).tolist() == [5, 5]
    with edit_function(Tensor.__getitem__, zero()):
        assert a[0] == 0
    with pytest.raises(HookError, match="add_ writes its"), edit_function(torch.add, zero()):
        a += 1
    with pytest.raises(HookError, match="writes"), edit_function(Tensor.__setitem__, zero()):
        a[0] = 1
