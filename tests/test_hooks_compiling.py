"""Hooks on compiled models: right in a block, right if there before the first call, or reported."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from hookkit.errors import CompiledWarning, HookError
from hookkit.hooks import (
    Hook,
    attach,
    attach_grad,
    gradients,
    hook_input,
    hook_output,
    hook_outputs,
)
from hookkit.hooks.entries import HookEntry
from hookkit.selecting import select

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for m in self:
            x = m(x)
        return x


@pytest.fixture
def net() -> nn.Sequential:
    return Net(nn.Linear(5, 10), nn.ReLU(inplace=True), nn.Linear(10, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 5)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_block_entered_on_a_compiled_model_captures_and_recompiles_nothing(
    in_place: bool, net: nn.Sequential, x: Tensor
) -> None:
    counter = CompileCounter()
    if in_place:
        net.compile(backend=counter)
        compiled = net
    else:
        compiled = torch.compile(net, backend=counter)
    want = compiled(x)

    with hook_outputs(select(compiled, "*")) as h, hook_outputs(net, grad=True) as g:
        got = compiled(x)
        got.sum().backward()
    compiled(x)

    torch.testing.assert_close(got, want)
    assert h.names == ("0", "1", "2")
    torch.testing.assert_close(h[0].stored, net[0](x).detach())
    assert g.stored[2][0].shape == (4, 3)
    assert counter.frame_count == 1


def test_a_compiled_training_step_is_captured_in_a_block(net: nn.Sequential, x: Tensor) -> None:
    step = torch.compile(lambda x: net(x).pow(2).sum(), backend="eager")
    step(x)

    with hook_output(net[2]) as h:
        step(x)

    torch.testing.assert_close(h.stored, net(x).detach())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_hooks_there_before_the_first_call_work_in_a_full_graph(
    backend: str, net: nn.Sequential, x: Tensor
) -> None:
    h = hook_outputs(net)
    compiled = torch.compile(net, backend=backend, fullgraph=True)

    for i in range(3):
        compiled(x + i)

    torch.testing.assert_close(h[0].stored, net[0](x + 2).detach())
    torch.testing.assert_close(h[1].stored, net[0](x + 2).relu().detach())
    with pytest.raises(HookError, match=r"\.n_calls of '0' \(Linear\) is not known, since it ran"):
        _ = h[0].n_calls
    h.remove()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own look at a non-leaf
def test_a_function_and_a_structure_work_in_a_full_graph(x: Tensor) -> None:
    lstm = nn.Linear(5, 5)

    class Dict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = lstm

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.fc(x), "x": x}

    model = Dict()
    h = hook_output(model)
    f = Hook(model.fc, lambda m, i, o: o.mean())
    torch.compile(model, backend="eager", fullgraph=True)(x)

    torch.testing.assert_close(h.stored["y"], model.fc(x).detach())
    torch.testing.assert_close(f.stored, model.fc(x).mean().detach())
    h.remove()
    f.remove()


@pytest.mark.traces_gradients
def test_attached_buffers_are_written_in_a_full_graph(net: nn.Sequential, x: Tensor) -> None:
    out, gradient = torch.zeros(4, 10), torch.zeros(4, 10)
    attach(net[0], lambda m, a, k, o: out.copy_(o.detach()))
    attach_grad(net[0], lambda m, i, g: gradient.copy_(g))
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)

    for _ in range(3):
        compiled(x).sum().backward()

    a = net[0](x).detach()
    torch.testing.assert_close(out, a)
    torch.testing.assert_close(gradient, net[2].weight.sum(0) * (a > 0))
    assert counter.frame_count == 1


@pytest.mark.traces_gradients
@pytest.mark.parametrize("short", [nn.Identity(), nn.Flatten(0)], ids=str)
def test_a_graph_with_a_gradient_hook_computes_what_it_computes_without(
    short: nn.Module, x: Tensor
) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short, self.act = short, nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            r = self.short(x)
            return self.act(x) * 2 + r.view(x.shape)  # type: ignore[no-any-return]

    net = nn.Sequential(nn.Linear(5, 10), Residual())
    want = net(x)
    handle = attach_grad(short, lambda m, i, g: None)

    got = torch.compile(net, backend="aot_eager", fullgraph=True)(x)

    handle.remove()
    torch.testing.assert_close(got, want)


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a torch that cannot trace a hook on a tensor."""
    monkeypatch.setattr(gradients, "TRACEABLE", False)
    monkeypatch.setattr(gradients, "_outside", None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("older")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
def test_gradient_hooks_break_the_graph_of_an_older_torch(net: nn.Sequential, x: Tensor) -> None:
    h, given = hook_output(net[0], grad=True), hook_input(net[2], grad=True)
    counter = CompileCounter()

    torch.compile(net, backend=counter)(x).sum().backward()

    assert counter.frame_count != 1  # torch 2.11 gives up the whole frame
    want = net[2].weight.sum(0).expand(4, 10)
    torch.testing.assert_close(given.stored[0], want)
    torch.testing.assert_close(h.stored[0], want * (net[0](x) > 0))
    h.remove()
    given.remove()


@pytest.mark.usefixtures("older")
def test_a_full_graph_of_an_older_torch_says_why_not(net: nn.Sequential, x: Tensor) -> None:
    h = hook_output(net[0], grad=True)

    with pytest.raises(Exception, match=r"cannot trace gradient hooks.*without fullgraph=True"):
        torch.compile(net, backend="eager", fullgraph=True)(x)

    h.remove()


def test_hooks_put_first_are_compiled_in_their_order(net: nn.Sequential, x: Tensor) -> None:
    late = attach(net[0], lambda m, a, k, o: o + 1, edit=True)
    first = attach(net[0], lambda m, a, k, o: o * 2, edit=True, prepend=True)

    y = torch.compile(net, backend="eager", fullgraph=True)(x)

    torch.testing.assert_close(y, net(x))
    late.remove()
    first.remove()


def test_a_hook_added_after_compilation_is_reported_by_name(net: nn.Sequential, x: Tensor) -> None:
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    h = hook_outputs(net)
    compiled(x)

    with pytest.warns(
        CompiledWarning, match=r"'1' \(ReLU\) has seen no call,.*compiled Net: torch"
    ):
        assert h[1].stored is None
    h.remove()


class Trainer:
    def __init__(self, net: nn.Module) -> None:
        self.nets = {"main": [net]}

    def step(self, x: Tensor) -> Tensor:
        return self.nets["main"][0](x).sum()


def closure_of(net: nn.Module) -> Any:
    return lambda x: net(x).sum()


def first_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


GLOBAL: Any = None


def uses_global(x: Tensor) -> Tensor:
    return GLOBAL(x).sum()


# how a compiled function comes to the module: a function of the model, which gives one of the input
WAYS: dict[str, Any] = {
    "a closure": lambda net, compiler: compiler(closure_of(net)),
    "a global variable": lambda net, compiler: compiler(uses_global),
    "an attribute": lambda net, compiler: compiler(Trainer(net).step),
    "an argument": lambda net, compiler: partial(compiler(first_loss), net),
    "a default": lambda net, compiler: compiler(lambda x, net=net: net(x).sum()),
}


def compiler(f: Any) -> Any:
    return torch.compile(f, backend="eager")


@pytest.mark.usefixtures("whole_heap")
@pytest.mark.slow
@pytest.mark.parametrize("read", ["stored", "n_calls", "calls"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_a_compiled_function_ignores_is_reported_by_name(
    way: str, read: str, net: nn.Sequential, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", net)
    run = WAYS[way](net, compiler)
    run(x)

    h = hook_outputs(select(net, "1"), keep="all")
    run(x)

    seen = r"'1' \(ReLU\) has seen no call, .* run by the compiled function \S+ \(test_hooks_comp"
    with pytest.warns(CompiledWarning, match=seen):
        getattr(h[0], read)
    assert not getattr(h[0], read)  # once
    h.remove()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_that_was_there_before_the_compiled_function_is_no_alarm(
    way: str, net: nn.Sequential, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", net)
    run = WAYS[way](net, compiler)

    h = hook_outputs(net)
    run(x)

    torch.testing.assert_close(h[1].stored, net[:2](x))
    h.remove()


@pytest.mark.parametrize("way", ["a closure", "a global variable", "an attribute", "a default"])
def test_a_layer_beside_the_model_that_a_compiled_function_runs_is_no_alarm(
    way: str, net: nn.Sequential, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", net)
    WAYS[way](net, compiler)(x)

    h = hook_outputs([nn.Linear(5, 10)])

    assert h.stored == [None]
    h.remove()


@pytest.mark.parametrize("compile_model", [compiler, lambda net: net.compile(backend="eager")])
def test_a_model_beside_a_compiled_one_of_its_class_is_no_alarm(
    compile_model: Any, net: nn.Sequential, x: Tensor
) -> None:
    (compile_model(net) or net)(x)

    h = hook_outputs(Net(nn.Linear(5, 10), nn.ReLU(inplace=True), nn.Linear(10, 3)))

    assert h.stored == [None, None, None]
    h.remove()


def test_all_hooks_are_looked_up_at_once(
    net: nn.Sequential, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr("hookkit.hooks.block.compiled_modules", lambda: looked.append(1) or {})
    h = hook_outputs(net)

    _ = h.stored, h.stored, h[0].n_calls

    assert len(looked) == 1
    h.remove()


def test_a_torch_without_these_guards_has_no_warning(
    net: nn.Sequential, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compiler(closure_of(net))
    run(x)
    h = hook_outputs(net)
    run(x)

    with monkeypatch.context() as gone:
        gone.delattr("torch._dynamo.convert_frame.input_codes")
        assert h[1].stored is None
    h.remove()


def test_exporting_leaves_no_trace_in_a_hook(net: nn.Sequential, x: Tensor) -> None:
    h = hook_outputs(net)
    torch.export.export(net, (x,))

    assert h.stored == [None, None, None]
    h.remove()


def test_a_hook_that_is_compiled_by_itself_is_no_function_that_runs_modules() -> None:
    entry = HookEntry(lambda module, x: x @ module.weight, edit=True)
    layer = nn.Linear(2, 2)
    torch.compile(entry.__call__, backend="eager")(layer, torch.ones(1, 2))

    h = hook_output(layer)
    assert h.stored is None  # and no warning: no compiled function runs this layer
    h.remove()
