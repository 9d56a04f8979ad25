"""skip_module: a model runs without one of its modules."""

import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookkit.editing import skip_module
from hookkit.errors import (
    ArgumentError,
    HookError,
    NeverFiredWarning,
)

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


def test_a_skipped_module_does_not_run_whatever_it_is_called_with() -> None:
    net, x = block(), X[None]

    def fail(*_: Any) -> None:
        raise AssertionError("it runs")

    handles = [m.register_forward_hook(fail) for m in (net.attn, net.fc)]
    handles += [m.register_forward_pre_hook(fail) for m in (net.attn, net.fc)]
    with skip_module(net.attn, (torch.ones(1, 2, 4), None)), skip_module(net.fc, 2 * x):
        y = net(x)

    torch.testing.assert_close(y, x + 1 + 2 * x)
    for handle in handles:
        handle.remove()
    assert not any("_compiled_call_impl" in vars(m) for m in net.modules())
    assert torch.equal(net(x), block()(x))


def test_a_function_gets_the_inputs() -> None:
    net, x = block(), X[None]
    with skip_module(net.fc, lambda input: 2 * input), skip_module(net.attn, lambda **kw: [0.0]):
        torch.testing.assert_close(net(x), x + 4 * x)


def test_an_error_in_a_function_names_the_module() -> None:
    net = block()
    with pytest.raises(TypeError, match="unexpected") as e, skip_module(net.fc, lambda x: x):
        net(X[None])  # which gives it the keyword `input`
    assert [n for n in e.value.__notes__ if re.search("raised by .*lambda> on Linear", n)]


def test_the_value_is_never_written_and_gets_its_gradient() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    value = X.clone().requires_grad_()
    with skip_module(net[0], value):
        net(X).sum().backward()
        net(X).sum().backward()

    assert torch.equal(value.detach(), X)
    torch.testing.assert_close(value.grad, 2 * (X > 0) * net[2].weight)
    assert net[0].weight.grad is None


def test_a_skip_ends_with_its_block_also_after_an_error_and_within_another() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    y = net(X)
    with pytest.raises(KeyError), skip_module(net[0], X):
        raise KeyError

    with skip_module(net[0], X):
        with skip_module(net[0], 2 * X):
            assert torch.equal(net(X), 2 * X)
        assert torch.equal(net(X), X)
    assert torch.equal(net(X), y)
    first, second = skip_module(net[0], X), skip_module(net[0], 2 * X)
    first.__enter__(), second.__enter__()
    net(X)
    with pytest.warns(NeverFiredWarning, match="nothing was skipped"):
        first.__exit__(None, None, None)
    assert torch.equal(net(X), 2 * X)
    second.__exit__(None, None, None)
    assert torch.equal(net(X), y)
    assert "_compiled_call_impl" not in vars(net[0])


def test_copies_and_pickles_made_in_the_block_run() -> None:
    net = block()
    plain = net(X[None])
    parametrize.register_parametrization(net.fc, "weight", nn.Identity())

    with skip_module(net.fc, X[None]), skip_module(net.attn, lambda **kw: [0.0]):
        copied = copy.deepcopy(net)
        loaded = pickle.loads(pickle.dumps(net.attn))
        net(X[None])

    torch.testing.assert_close(copied(X[None]), plain)
    x = X[None]
    assert torch.equal(loaded(x, x, x)[0], net.attn(x, x, x)[0])


def in_a_thread(f: Callable[[], Any]) -> None:
    thread = threading.Thread(target=f)
    thread.start(), thread.join()


def test_calls_of_other_threads_run_the_module() -> None:
    layer, found = nn.Identity(), list[Tensor]()
    with skip_module(layer, 2 * X):
        in_a_thread(lambda: found.append(layer(X)))
        assert torch.equal(layer(X), 2 * X)
    assert torch.equal(found[0], X)
    with (
        pytest.warns(NeverFiredWarning, match="skip_module: nothing was .* only from another thr"),
        skip_module(layer, 2 * X),
    ):
        in_a_thread(lambda: layer(X))


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


def test_a_module_that_was_not_skipped_is_reported() -> None:
    net, x = block(), X[None]
    with (
        pytest.warns(NeverFiredWarning, match="nothing was skipped.*MultiheadAttention uses its"),
        skip_module(net.attn.out_proj, x),
    ):
        net(x)
    with pytest.raises(ArgumentError, match="skip_module"), skip_module("fc", x):  # type: ignore[arg-type]
        pass
    scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(HookError, match=r"skip_module: .* is scripted"), skip_module(scripted, x):
        pass
