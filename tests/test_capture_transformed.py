"""Capture on models that another tool has made: scripted, traced, fx, exported, replicated."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, stack_module_state, vmap

from hookkit.editing import edit_grads, edit_inputs, edit_output, edit_outputs, zero
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.features import feature_extractor
from hookkit.hooks import (
    Hook,
    attach,
    attach_grad,
    hook_all,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
    print_sizes,
)
from hookkit.selecting import select
from hookkit.swapping import Catcher, swap

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Mixed(nn.Module):
    """An ordinary layer before and after one that TorchScript has made."""

    def __init__(self, way: str, x: Tensor) -> None:
        super().__init__()
        self.before, self.after = Block(), Block()
        made = Block()
        self.jit = torch.jit.script(made) if way == "script" else torch.jit.trace(made, x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.jit(self.before(x)))
        return out


ON_SEVERAL: dict[str, Callable[[Any], Any]] = {
    "hook_outputs": hook_outputs,
    "hook_inputs": hook_inputs,
    "grad": lambda ms: hook_outputs(ms, grad=True),
    "edit_outputs": lambda ms: edit_outputs(ms, zero()),
    "edit_inputs": lambda ms: edit_inputs(ms, zero()),
    "edit_grads": lambda ms: edit_grads(ms, zero()),
    "Hook": lambda ms: Hook(next(iter(ms.values())), None),
    "attach": lambda ms: attach(next(iter(ms.values())), print),
    "attach_grad": lambda ms: attach_grad(next(iter(ms.values())), print),
}


@pytest.mark.parametrize("make", ON_SEVERAL)
@pytest.mark.parametrize("name", ["jit", "jit.fc"])
def test_what_is_inside_torchscript_is_refused_by_every_function(
    name: str, make: str, x: Tensor
) -> None:
    model = Mixed("script", x)

    with pytest.raises(HookError, match=r"is scripted or traced, .* Hook the model it was made fr"):
        ON_SEVERAL[make](select(model, name))


@pytest.mark.parametrize("make", ON_SEVERAL)
def test_what_is_inside_a_traced_module_is_refused_by_every_function(make: str, x: Tensor) -> None:
    model = Mixed("trace", x)

    with pytest.raises(HookError, match="is scripted or traced"):
        ON_SEVERAL[make](select(model, "jit.fc"))


def test_scripting_a_model_inside_a_block_is_an_error_that_says_what_to_do(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU())

    for block in (hook_outputs(model), hook_inputs(model), edit_outputs(model, zero())):
        with (
            pytest.raises(AttributeError, match=r"compiles the hooks .* Script the model outs"),
            block,
        ):
            torch.jit.script(model)

    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


def test_a_traced_module_itself_runs_hooks_and_is_captured_with_the_rest(x: Tensor) -> None:
    model = Mixed("trace", x)
    into = model.before(x).detach()

    with (
        hook_outputs(select(model)) as h,
        hook_input(model.jit) as i,
        hook_outputs([model.jit], grad=True) as g,
        hook_inputs([model.jit], grad=True) as gi,
    ):
        y = model(x)
        y.sum().backward()
    with edit_output(model.jit, zero()):
        edited = model(x)

    assert h.names == ("before", "before.fc", "after", "after.fc", "jit")
    torch.testing.assert_close(h["jit"].stored, model.jit(into).detach())
    torch.testing.assert_close(i.stored[0], into)
    assert g[0].stored[0].shape == gi[0].stored[0].shape == (4, 5)
    torch.testing.assert_close(edited, model.after(torch.zeros(4, 5)))
    torch.testing.assert_close(feature_extractor(model, "jit")(x)["jit"], h["jit"].stored)
    assert not model.jit._forward_hooks
    assert not model.jit._forward_pre_hooks


@pytest.mark.parametrize("way", ["script", "trace"])
def test_the_layers_around_torchscript_are_captured(way: str, x: Tensor) -> None:
    model = Mixed(way, x)
    around = select(model, "before", "before.fc", "after", "after.fc")

    with (
        hook_outputs(around) as h,
        hook_inputs(around) as i,
        hook_outputs(around, grad=True) as g,
    ):
        y = model(x)
        y.sum().backward()

    torch.testing.assert_close(h["after"].stored, y.detach())
    torch.testing.assert_close(i["after"].stored[0], model.jit(model.before(x)).detach())
    torch.testing.assert_close(g["after"].stored[0], torch.ones(4, 5))
    assert g["before.fc"].stored[0].shape == (4, 5)


@pytest.mark.parametrize("way", ["script", "trace"])
def test_a_feature_behind_torchscript_is_extracted_and_one_inside_refused(
    way: str, x: Tensor
) -> None:
    model = Mixed(way, x)

    torch.testing.assert_close(
        feature_extractor(model, "after.fc")(x)["after.fc"],
        model.after.fc(model.jit(model.before(x))),
    )
    with pytest.raises(HookError, match=r"feature_extractor: .* is scripted or traced"):
        feature_extractor(model, "jit.fc")


@pytest.mark.parametrize("way", ["script", "trace"])
def test_a_wrapper_around_torchscript_sees_what_no_hook_can(way: str, x: Tensor) -> None:
    model = Mixed(way, x)
    want = model(x)

    with swap(model, {"jit": Catcher}) as caught:
        torch.testing.assert_close(model(x), want)

    torch.testing.assert_close(caught["jit"].calls[0].inputs[0], model.before(x).detach())


@pytest.mark.parametrize("way", ["script", "trace"])
def test_looking_at_everything_passes_torchscript_by(
    way: str, x: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    model, seen = Mixed(way, x), []

    with hook_all(lambda m, i, o: seen.append(m)), print_sizes(model):
        model(x)

    assert {id(model), id(model.before), id(model.after.fc)} <= {id(m) for m in seen}
    printed = capsys.readouterr().out
    assert "after.fc (Linear)" in printed
    assert "jit.fc" not in printed


def test_tracing_a_captured_model_gives_the_same_graph(x: Tensor) -> None:
    model = Block()

    with hook_outputs([model.fc]) as h:
        traced = torch.jit.trace(model, x)

    torch.testing.assert_close(traced(x), model(x))
    torch.testing.assert_close(h[0].stored, model.fc(x).detach())
    assert not model.fc._forward_hooks


# --- fx


class Inlined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.act = Block(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.block(x))
        return out


def test_modules_of_an_fx_graph_are_captured_edited_and_extracted(x: Tensor) -> None:
    graph = torch.fx.symbolic_trace(Inlined())

    with hook_outputs(select(graph)) as h, hook_output(graph, grad=True) as g:
        y = graph(x)
        y.sum().backward()
    with edit_output(graph.act, zero()):
        edited = graph(x)

    assert h.names == ("block.fc", "act")
    torch.testing.assert_close(h["act"].stored, y.detach())
    torch.testing.assert_close(g.stored[0], torch.ones(4, 5))
    assert not edited.any()
    torch.testing.assert_close(
        feature_extractor(graph, "block.fc")(x)["block.fc"], h["block.fc"].stored
    )


def test_a_module_that_fx_has_inlined_is_reported_to_be_silent(x: Tensor) -> None:
    class LeavesBlocks(torch.fx.Tracer):
        pass

    model = Inlined()
    graph = torch.fx.GraphModule(model, LeavesBlocks().trace(model))
    graph.add_submodule("block", model.block)

    with pytest.warns(NeverFiredWarning, match=r"'block' \(Block\): not called") as w:
        _ran(hook_outputs(select(graph, "block", "block.fc")), graph, x)
    assert "1 of 2 hooks never fired" in str(w[0].message)


def _ran(block: Any, model: nn.Module, *args: Any) -> Any:
    with block as h:
        model(*args)
    return h


# --- exported


def test_an_exported_model_is_captured_as_a_whole_and_its_insides_are_reported(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    exported = torch.export.export(model, (x,)).module()

    h = _ran(hook_output(exported), exported, x)
    torch.testing.assert_close(h.stored, model(x).detach())

    inside = [m for name, m in exported.named_modules() if name == "0"]
    with pytest.warns(NeverFiredWarning, match="1 of 1 hooks never fired"):
        _ran(hook_outputs(inside), exported, x)


def test_hooks_that_are_on_are_not_part_of_an_export(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    h, i, g = hook_outputs(model), hook_inputs(model), hook_outputs(model, grad=True)

    exported = torch.export.export(model, (x,)).module()

    torch.testing.assert_close(exported(x), model(x))
    for hooks in (h, i, g):
        hooks.remove()


# --- replicas


def test_a_replica_of_data_parallel_is_the_reason_reported(x: Tensor) -> None:
    """There are no devices here: the replica and its thread are made as it makes them."""
    model = Block()
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(model._modules)

    def as_data_parallel_does() -> None:
        with hook_output(model):
            thread = threading.Thread(target=replica, args=(x,))
            thread.start()
            thread.join()

    with pytest.warns(
        NeverFiredWarning,
        match=r"called only in DataParallel's replicas.* hook the DataParallel module itself, or",
    ):
        as_data_parallel_does()


def test_data_parallel_itself_is_captured_under_the_models_own_names(x: Tensor) -> None:
    model = Inlined()
    parallel = nn.DataParallel(model)

    with (
        hook_outputs(select(parallel)) as h,
        hook_output(parallel) as whole,
        hook_input(model.block, grad=True) as g,
    ):
        y = parallel(x.requires_grad_())
        y.sum().backward()

    assert h.names == ("block", "block.fc", "act")
    torch.testing.assert_close(whole.stored, y.detach())
    torch.testing.assert_close(h["act"].stored, y.detach())
    torch.testing.assert_close(g.stored[0], x.grad)


# --- torch.func


@pytest.mark.parametrize("make", ["hook", "edit", "swap", "features"])
def test_an_ensemble_under_vmap(make: str, x: Tensor) -> None:
    nets = [Inlined() for _ in range(3)]
    params, buffers = stack_module_state(nets)
    base = copy.deepcopy(nets[0])

    def run(p: Any, b: Any) -> Any:
        return functional_call(base, (p, b), (x,))

    if make == "hook":
        with hook_output(base.block.fc) as h:
            vmap(run)(params, buffers)
        for i, net in enumerate(nets):
            torch.testing.assert_close(h.stored[i], net.block.fc(x).detach())
    elif make == "edit":
        with edit_output(base.act, zero()):
            assert not vmap(run)(params, buffers).any()
    elif make == "swap":
        base = nn.Sequential(base)
        with swap(base, {"0": Catcher}) as caught:
            vmap(lambda t: base(t))(torch.stack([x, x + 1]))
        assert caught["0"].calls[0].output.shape == (2, 4, 5)
    else:
        extract = feature_extractor(base, "block.fc")
        got = vmap(lambda t: extract(t)["block.fc"])(torch.stack([x, x + 1]))
        torch.testing.assert_close(got[1], base.block.fc(x + 1))


def test_forward_mode_differentiation_stores_plain_values(x: Tensor) -> None:
    model = Inlined()

    with hook_output(model.block.fc) as h, hook_output(model.block.fc, keep="all") as every:
        jvp(model, (x,), (torch.ones_like(x),))

    torch.testing.assert_close(h.stored, model.block.fc(x).detach())
    torch.testing.assert_close(every.calls[0], model.block.fc(x).detach())
    h.stored.sum().item()
