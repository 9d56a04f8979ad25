"""`hook_function`: calls of torch functions, against what plain PyTorch computes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hooked import n_hooks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookkit
from hookkit import ActivationStats, watch
from hookkit.edits import edit_function, scale
from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError
from hookkit.hooks import hook_function, hook_output
from hookkit.hooks.selection import select
from hookkit.testing import RegModel


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def heads(self, x: Tensor) -> Tensor:
        return self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + F.relu(self.mlp(x)).softmax(-1)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def modes() -> int:
    """How many function modes this thread has."""
    return int(torch._C._len_torch_function_stack())


# -- what is stored


def test_each_call_is_stored_under_its_modules_name(net: nn.Sequential, x: Tensor) -> None:
    attention: Any = net[0].attn
    with hook_function(F.scaled_dot_product_attention, within=select(net, "*.attn")) as h:
        y = net(x)

    names = [f"{i}.attn/scaled_dot_product_attention:0" for i in (0, 1)]
    expected = F.scaled_dot_product_attention(*attention.heads(x))
    assert list(h.names) == names
    torch.testing.assert_close(h[names[0]].stored, expected, rtol=0, atol=0)
    assert not h[0].stored.requires_grad
    torch.testing.assert_close(y, net(x), rtol=0, atol=0)


def test_one_module_stands_for_all_in_it_and_the_innermost_gives_the_name(
    net: nn.Sequential, x: Tensor
) -> None:
    with hook_function(torch.softmax, within=net) as h:
        net(x)
    with hook_function(F.linear, within=net) as deep:
        net(x)

    assert h.names == ("0/softmax:0", "1/softmax:0")
    layers = ("0.attn.qkv", "0.mlp", "1.attn.qkv", "1.mlp")
    assert deep.names == tuple(f"{layer}/linear:0" for layer in layers)


def test_inputs_are_those_before_the_call_with_keywords_by_name(x: Tensor) -> None:
    t = x.clone()
    with hook_function(F.relu, inputs=True) as h:
        F.relu(t, inplace=True)

    assert torch.equal(h[0].stored[0], x)
    assert h[0].stored["inplace"] is True


def test_gradients_of_outputs_and_inputs(net: nn.Sequential, x: Tensor) -> None:
    given = x.requires_grad_()
    with (
        hook_function(F.relu, grad=True) as outputs,
        hook_function(F.relu, inputs=True, grad=True) as inputs,
    ):
        (F.relu(given) * torch.arange(8.0)).sum().backward()

    expected = torch.arange(8.0).expand_as(x)
    assert torch.equal(outputs[0].stored[0], expected)
    assert torch.equal(inputs[0].stored[0], expected * (x > 0))


def test_a_function_of_the_user_decides_what_is_stored(net: nn.Sequential, x: Tensor) -> None:
    seen: list[Any] = []

    def shape(call: Any, inputs: Any, output: Tensor) -> Any:
        seen.append((call.name, call.function))
        return tuple(inputs[0].shape)

    with hook_function(torch.softmax, within=net, hook=shape) as h:
        net(x)

    assert h.stored == [(2, 5, 8), (2, 5, 8)]
    assert seen[0] == ("0/softmax:0", Tensor.softmax)


# -- the same function


@pytest.mark.parametrize("f", [torch.softmax, F.softmax, Tensor.softmax])
def test_a_function_is_seen_however_it_is_reached(f: Any, x: Tensor) -> None:
    with hook_function(f) as h:
        torch.softmax(x, -1), F.softmax(x, -1), x.softmax(-1)

    assert h.names == ("softmax:0", "softmax:1", "softmax:2")


def test_the_functions_of_an_exported_program_are_seen(net: nn.Sequential, x: Tensor) -> None:
    program = torch.export.export(net, (x,)).module()

    with hook_function(F.relu) as h:
        program(x)
    with hook_function(F.relu) as expected:
        net(x)

    torch.testing.assert_close(h.stored, expected.stored)


def test_what_is_given_as_within_is_checked(net: nn.Sequential) -> None:
    with pytest.raises(ArgumentError, match="hook_function: expected modules, found the s"):
        hook_function(F.relu, within="0")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r'"0\[0\]" selects a part of an output. Leave out \[0\]'):
        hook_function(F.relu, within=select(net, "0[0]"))
    with pytest.raises(OptionError, match=r"hook= is for values, not for gradients. Leave out"):
        hook_function(F.relu, grad=True, hook=torch.mean)


# -- the block


def test_it_is_on_inside_the_block_only(net: nn.Sequential, x: Tensor) -> None:
    h = hook_function(F.relu, within=net)
    net(x)
    assert (h.removed, modes(), n_hooks(net)) == (True, 0, 0)

    with h:
        net(x)
    net(x)

    assert (len(h), h.removed, modes(), n_hooks(net)) == (2, True, 0, 0)
    with pytest.raises(HookError, match="hooks on functions are on inside their `with` only"):
        h.register()


def test_hooks_that_were_never_entered_say_so_when_they_are_gone(x: Tensor) -> None:
    h = hook_function(F.relu)
    h.remove()
    F.relu(x)

    assert (len(h), h.n_calls, h.removed) == (0, {}, True)
    with pytest.warns(NeverFiredWarning, match="hook_function: it was never entered"):
        del h


@pytest.mark.parametrize("keep", ["all", "last"])
@pytest.mark.parametrize("grad", [False, True])
def test_hooks_that_are_removed_in_their_block_see_nothing_until_they_are_registered(
    x: Tensor, keep: str, grad: bool
) -> None:
    with hook_function(F.relu, keep=keep, grad=grad) as h:
        F.relu(x.requires_grad_()).sum().backward()
        h.remove()
        h.remove()
        removed = h.removed
        F.relu(2 * x).sum().backward()
        h.register()
        F.relu(3 * x).sum().backward()

    assert removed
    assert sum(h.n_calls.values()) == 2
    assert len(h) == (2 if keep == "all" else 1)


def test_hooks_that_are_entered_twice_see_each_call_once(x: Tensor) -> None:
    with hook_function(F.relu) as h, edit_function(F.relu, scale(2)) as edit:
        with h, edit:
            inside = F.relu(x)
        outside = F.relu(x)

    assert torch.equal(inside, 2 * x.relu())
    assert torch.equal(outside, inside)
    assert len(h) == 2
    assert modes() == 0


def test_hooks_that_are_on_in_one_thread_are_not_entered_in_another(x: Tensor) -> None:
    with hook_function(F.relu) as h, ThreadPoolExecutor(1) as pool:
        with pytest.raises(HookError, match="are on in another thread"):
            pool.submit(h.__enter__).result()
        F.relu(x)

    assert len(h) == 1
    assert modes() == 0


@pytest.mark.parametrize("f", ["F.relu", "torch.relu", "torch.Tensor.relu"])
@pytest.mark.parametrize(
    ("file", "counts"), [("hookkit_models.py", 1), ("hookkit/_core/text.py", 0)]
)
def test_only_hookkits_own_calls_are_left_out(x: Tensor, file: str, counts: int, f: str) -> None:
    home, names = Path(hookkit.__file__).parents[1], dict[str, Any](F=F, torch=torch)
    exec(compile(f"def forward(x): return {f}(x)", home / file, "exec"), names)

    with hook_function(F.relu, keep="none") as h:
        names["forward"](x)
        F.relu(x)

    assert h.n_calls == {"relu": 1 + counts}


def test_calls_of_the_models_that_hookkit_ships_count(x: Tensor) -> None:
    with hook_function(torch.Tensor.mul, keep="none") as h:
        RegModel()(x)

    assert h.n_calls == {"mul": 1}


def test_entering_it_again_begins_anew(net: nn.Sequential, x: Tensor) -> None:
    with hook_function(F.relu, within=net) as h:
        net(x)
    with h:
        net(2 * x)

    assert h.names == ("0/relu:0", "1/relu:0")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_after_an_exception_and_the_names_are_right(
    net: nn.Sequential, x: Tensor, error: type[BaseException]
) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = nn.ModuleDict({"a": net, "b": nn.Sequential(Failing())})
    h = hook_function(F.relu, within=dict(model.named_modules()))

    def run() -> None:
        with h:
            try:
                model["b"](x)
            except error:
                model["a"](x)
            model["b"](x)

    with pytest.raises(error):
        run()

    assert h.names == ("a.0/relu:0", "a.1/relu:0")
    assert (modes(), n_hooks(model)) == (0, 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_not_stored(
    net: nn.Sequential, x: Tensor, reentrant: bool
) -> None:
    with hook_function(F.relu, within=net) as h:
        checkpoint(net, x.requires_grad_(), use_reentrant=reentrant).sum().backward()

    assert h.names == ("0/relu:0", "1/relu:0")


# -- other callers


def test_what_recorders_and_hooks_compute_is_no_call_of_the_model() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    functions = [torch.mean, torch.Tensor.detach, torch.clone, torch.Tensor.double, torch.abs]
    with watch(net, opt, ActivationStats(units=True, with_hist=True)):
        for f in functions:
            unfired = pytest.warns(NeverFiredWarning)
            with unfired, hook_function(f, within=net) as h, hook_output(net[0], clone=True):
                net(torch.randn(3, 4)).sum().backward()
                opt.step()
            assert h.names == ()


def test_the_last_call_of_each_module_or_none_is_kept() -> None:
    net = nn.Sequential(nn.Softmax(-1), nn.Softmax(-1))
    x, seen = torch.randn(3, 2, 4), list[Any]()

    with hook_function(F.softmax, within=net, keep="last") as h:
        outputs = [net(one) for one in x]
    with hook_function(
        F.softmax, within=net, keep="none", hook=lambda y: seen.append(y.shape)
    ) as n:
        net(x[0])

    assert h.names == ("0/softmax", "1/softmax")
    assert h.n_calls == {"0/softmax": 3, "1/softmax": 3}
    assert torch.equal(h["1/softmax"].stored, outputs[-1])
    assert seen == [(2, 4), (2, 4)]
    assert [x.stored for x in n] == [None, None]
    with pytest.raises(OptionError, match="keep"):
        hook_function(F.softmax, keep="first")
