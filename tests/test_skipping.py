"""skip_module: a model runs without one of its modules."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hookkit.editing import skip_module

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(nn.Module):
    """Calls its parts with positional and keyword inputs, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(query=x, key=x, value=x, need_weights=False)[0]
        return x + self.fc(self.fc(input=x))


def block() -> Block:
    torch.manual_seed(0)
    return Block().eval()


# --- skip_module


def test_a_function_gets_the_inputs() -> None:
    net, x = block(), X[None]
    with skip_module(net.fc, lambda input: 2 * input), skip_module(net.attn, lambda **kw: [0.0]):
        torch.testing.assert_close(net(x), x + 4 * x)


def test_the_value_is_never_written_and_gets_its_gradient() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    value = X.clone().requires_grad_()
    with skip_module(net[0], value):
        net(X).sum().backward()
        net(X).sum().backward()

    assert torch.equal(value.detach(), X)
    torch.testing.assert_close(value.grad, 2 * (X > 0) * net[2].weight)
    assert net[0].weight.grad is None


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_a_compiled_model_is_skipped_in_the_block_and_compiled_after_it(how: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model: Callable[[Tensor], Tensor] = net
    if how == "torch.compile":
        model = torch.compile(net, backend="eager")
    else:
        net[0].compile(backend="eager")
    y = model(X)
    before = vars(net[0]).get("_compiled_call_impl")

    with skip_module(net[0], X):
        assert torch.equal(model(X), X.tanh())

    assert torch.equal(model(X), y)
    assert vars(net[0]).get("_compiled_call_impl") is before
    torch.compiler.reset()


def test_a_part_of_a_fused_transformer_layer_is_skipped() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x = X[None]
    with torch.no_grad(), skip_module(layer.self_attn, (x, None)):
        y = layer(x)

    norm = layer.norm1(x + x)
    wanted = layer.norm2(norm + layer.linear2(layer.linear1(norm).relu()))
    torch.testing.assert_close(y, wanted)
    assert torch.backends.mha.get_fastpath_enabled()
