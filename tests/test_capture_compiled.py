"""Capture, edits, swaps and features on compiled models: in a block, before the first call, after.

What a block does to a compiled model's graphs is counted: it runs eagerly in the block and is what
it was after it.
"""

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import hookkit.hooks.eager as eager
from hookkit.edits import edit_grad, edit_input, edit_output, zero
from hookkit.edits.swapping import Catcher, swap
from hookkit.hooks import (
    Hook,
    hook_all,
    hook_function,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # dynamo looks at non-leaves itself
]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(5, 10), nn.ReLU(inplace=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.act(self.a(x)))
        return out


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 5)


BLOCKS: dict[str, Callable[[Net], Any]] = {
    "outputs": lambda net: hook_outputs(net.children()),
    "inputs": lambda net: hook_inputs(net.children()),
    "output gradients": lambda net: hook_outputs(net.children(), grad=True),
    "input gradients": lambda net: hook_inputs([net.b], grad=True),
    "stop": lambda net: hook_output(net.a, stop=True),
    "edit": lambda net: edit_output(net.b, lambda m, i, o: o.clone()),
    "edit input": lambda net: edit_input(net.b, lambda m, i: i[0].clone()),
    "edit gradient": lambda net: edit_grad(net.b, lambda m, g: g.clone()),
    "function": lambda net: hook_function(torch.relu, within=net),
    "swap": lambda net: swap(net, {"b": Catcher}),
    "everywhere": lambda net: hook_all(lambda *seen: None),
}


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize("block", BLOCKS)
def test_no_block_makes_a_compiled_model_compile_again(block: str, net: Net, x: Tensor) -> None:
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter)
    want = compiled(x)
    want.sum().backward()
    before = counter.frame_count

    for _ in range(2):
        with BLOCKS[block](net):
            got = compiled(x)
            got.sum().backward()
        torch.testing.assert_close(compiled(x), want)

    assert counter.frame_count == before
    assert not eager.EAGER.owners


def test_an_exception_in_a_block_leaves_the_compiler_as_it_was(net: Net, x: Tensor) -> None:
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter)
    compiled(x)

    with pytest.raises(KeyboardInterrupt), hook_outputs([net.a]), edit_output(net.b, zero()):
        raise KeyboardInterrupt
    compiled(x)
    compiled(torch.cat([x, x]))

    assert counter.frame_count == 2  # a new shape is compiled: the stance is not eager
    assert not eager.EAGER.owners


@pytest.fixture
def stance() -> Iterator[Any]:
    """Reads the compiler's stance; it is the usual one before and after the test."""
    frames = sys.modules["torch._dynamo.eval_frame"]
    torch.compiler.set_stance("default")
    yield lambda: frames._stance.stance
    torch.compiler.set_stance("default")


silent = pytest.mark.filterwarnings("ignore::hookkit.errors.NeverFiredWarning")


@silent
@pytest.mark.parametrize("block", BLOCKS)
def test_a_stance_that_is_set_in_a_block_stays(
    block: str, net: Net, x: Tensor, stance: Any
) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(x)  # from now on blocks set a stance

    with BLOCKS[block](net):
        torch.compiler.set_stance("fail_on_recompile")

    assert stance() == "fail_on_recompile"


def test_a_block_that_is_entered_and_dropped_leaves_the_compiler_as_it_was(
    x: Tensor, stance: Any
) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(x)

    h = hook_outputs([nn.Linear(5, 5)])
    h.__enter__()
    inside = stance()
    del h

    assert (inside, stance()) == ("force_eager", "default")


# --- there before the first call


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", [hook_input, hook_output])
def test_inputs_and_outputs_in_a_full_graph_before_the_first_call(
    made: Any, backend: str, net: Net, x: Tensor
) -> None:
    h = made(net.b)
    compiled = torch.compile(net, backend=backend, fullgraph=True)

    for i in range(3):
        y = compiled(x + i)

    want = net.a(x + 2).relu() if made is hook_input else y
    stored = h.stored[0] if made is hook_input else h.stored
    torch.testing.assert_close(stored, want.detach())
    h.remove()


@pytest.mark.traces_gradients
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_edits_in_a_full_graph_before_the_first_call(backend: str, net: Net, x: Tensor) -> None:
    def truth() -> tuple[Tensor, Tensor]:
        net.zero_grad()
        y = net.b(0.5 * (2 * net.a(x)).relu())
        y.sum().backward()
        assert net.a.weight.grad is not None
        return y.detach(), net.a.weight.grad.clone()

    want = truth()
    edits = [
        Hook(net.a, lambda m, i, o: 2 * o, edit=True),
        Hook(net.b, lambda m, i: 0.5 * i[0], pre=True, edit=True),
    ]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(net, backend=counter, fullgraph=True)

    for _ in range(3):
        net.zero_grad()
        y = compiled(x)
        y.sum().backward()

    torch.testing.assert_close((y.detach(), net.a.weight.grad), want)
    assert counter.frame_count == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # they were traced: nothing was ignored
        for edit in edits:
            edit.remove()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_a_hook_there_before_the_first_call_are_right(
    backend: str, net: Net, x: Tensor
) -> None:
    h, i = hook_output(net.a, grad=True), hook_input(net.b, grad=True)
    compiled = torch.compile(net, backend=backend)

    for k in range(2):
        net.zero_grad()
        y = compiled(x + k)
        y.pow(2).sum().backward()

    into = 2 * y.detach() @ net.b.weight.detach()
    torch.testing.assert_close(i.stored[0], into)
    torch.testing.assert_close(h.stored[0], into * (net.a(x + 1) > 0))
    h.remove()
    i.remove()


def test_an_export_with_a_gradient_hook_on_is_one_graph(net: Net, x: Tensor) -> None:
    h = hook_output(net.b, grad=True)

    exported = torch.export.export(net, (x,)).module()

    torch.testing.assert_close(exported(x), net(x))
    h.remove()


# --- a model of a class that was compiled before


@pytest.mark.parametrize("optimizer", [False, True])
def test_what_is_first_called_in_a_block_runs_eagerly_in_it(optimizer: bool, x: Tensor) -> None:
    nets = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
    if optimizer:
        torch.optim.Adam(nets.parameters())
    own = [nets[1][0](nets[0](k * x)) for k in (1, 2)]
    ablated = [nets[2](nets[1][1](0 * own[0]))] * 2
    for net in nets:  # graphs that all of them share
        net.compile(backend="eager")

    with hook_output(nets[1][0], keep="all") as h:
        for k in (1, 2):
            nets(k * x)
    with edit_output(nets[1][0], zero()):
        edited = [nets(k * x) for k in (1, 2)]
    with hook_output(nets[1][0], stop=True) as stopped:
        nets(x)
        raise AssertionError("not reached")

    torch.testing.assert_close(h.calls, [t.detach() for t in own])
    torch.testing.assert_close(edited, ablated)
    torch.testing.assert_close(stopped.stored, own[0].detach())


# --- forgetting graphs


def test_forgetting_graphs_makes_hooks_that_stay_be_seen(net: Net, x: Tensor) -> None:
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    h = hook_outputs([net.a])

    assert eager.forget_graphs()
    compiled(x)

    torch.testing.assert_close(h[0].stored, net.a(x).detach())
    h.remove()


def test_a_capture_works_while_another_thread_loads_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch._dynamo.convert_frame"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # nothing is in it as yet
    net = nn.Linear(2, 2)

    with hook_output(net) as h:
        out = net(torch.ones(1, 2))

    assert torch.equal(h.stored, out)
