"""torch.jit.trace of a hooked model: hooks record nothing of it, edits are part of the graph."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookkit.editing import edit_function, edit_grads, edit_inputs, edit_outputs, scale
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.features import feature_extractor
from hookkit.hooks import (
    Hooks,
    hook_all,
    hook_function,
    hook_inputs,
    hook_output,
    hook_outputs,
    print_sizes,
)
from hookkit.selecting import select
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.swapping import Catcher, GramWrapper, swap
from hookkit.watching import watch

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning")


class Branches(nn.Module):
    """In-place operations, a view, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.flat = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.flat(self.fc(x))
        self.act(y)
        return y, self.flat(y * 2)


def net(kind: str, training: bool) -> nn.Module:
    torch.manual_seed(0)
    if kind == "branches":
        return Branches().train(training)
    return nn.Sequential(nn.Linear(4, 4), nn.Flatten()).train(training)


X = torch.arange(12.0).reshape(3, 4)


def graph(traced: Any) -> str:
    """The operations and the names of the values, without class names that torch numbers."""
    lines = str(traced.inlined_graph).splitlines()
    return "\n".join(line.split("#")[0] for line in lines if "__torch__" not in line)


def check(model: nn.Module, traced: Any) -> None:
    expected, found = model(X), traced(X)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def mean_of(module: nn.Module, i: Any, o: Tensor) -> float:
    return o.mean().item()


PASSIVE = {
    "outputs": lambda m: hook_outputs(select(m)),
    "all outputs": lambda m: hook_outputs(select(m), keep="all"),
    "live outputs": lambda m: hook_outputs(select(m), detach=False),
    "inputs": lambda m: hook_inputs(select(m)),
    "function": lambda m: Hooks(select(m, "0" if "0" in m._modules else "fc"), mean_of),
    "hook_all": lambda m: hook_all(lambda m, i, o: None, nn.Linear),
    "print_sizes": lambda m: print_sizes(m, io.StringIO()),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["sequential", "branches"])
@pytest.mark.parametrize("name", PASSIVE)
def test_a_hooked_model_is_traced_as_without_hooks(name: str, kind: str, training: bool) -> None:
    model = net(kind, training)
    bare = graph(torch.jit.trace(model, X))

    hooks: Any = PASSIVE[name](model)
    left_in_place = torch.jit.trace(model, X)
    hooks.remove()
    with PASSIVE[name](model):
        in_a_block = torch.jit.trace(model, X)
        model(X)

    assert graph(left_in_place) == graph(in_a_block) == bare
    check(model, in_a_block)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [hook_outputs, hook_inputs])
def test_a_forward_that_is_only_traced_is_reported_as_missing(make: Any, grad: bool) -> None:
    model = net("sequential", training=True)

    with (
        pytest.warns(NeverFiredWarning, match=r"called only by torch\.jit\.trace"),
        make(model, grad=grad) as h,
    ):
        traced = torch.jit.trace(model, X, check_trace=False)

    assert list(h.stored) == [None, None]
    check(model, traced)


def test_global_hooks_see_nothing_of_a_trace() -> None:
    model, file, seen = net("sequential", training=True), io.StringIO(), list[nn.Module]()

    with print_sizes(model, file), hook_all(lambda m, i, o: seen.append(m)):
        torch.jit.trace(model, X, check_trace=False)

    assert (file.getvalue(), seen) == ("", [])


def test_what_a_function_counts_in_a_buffer_is_no_part_of_the_graph() -> None:
    model, total = net("sequential", training=True), torch.zeros(())

    with Hooks(model, lambda m, i, o: total.add_(1)):
        traced = torch.jit.trace(model, X, check_trace=False)
        model(X)
    traced(X)

    assert total.item() == 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("edit", [edit_outputs, edit_inputs])
def test_an_edit_is_traced_with_the_model(edit: Any, training: bool) -> None:
    model = net("sequential", training)

    with edit([model[0]], lambda m, i, *o: (o or i)[0] + 1) as edits:
        traced = torch.jit.trace(model, X, check_trace=False)
        assert edits.n_calls == {"0": 1}
        check(model, traced)

    assert not torch.equal(traced(X), model(X))


def test_a_model_that_has_not_run_is_traced_in_a_block_that_sees_functions() -> None:
    model = net("branches", training=False)

    with pytest.warns(NeverFiredWarning, match="only by torch.jit.trace"), hook_function(F.relu):
        traced = torch.jit.trace(model, X)  # it runs the model again, and compares the graphs

    check(model, traced)


def test_an_edit_of_a_function_is_traced_with_a_model_that_has_not_run() -> None:
    model = net("branches", training=False)

    with edit_function(F.relu, lambda output: output + 1):
        traced = torch.jit.trace(model, X)
        check(model, traced)

    torch.testing.assert_close(traced(X)[0], model(X)[0] + 1, rtol=0, atol=0)


def test_an_edit_of_gradients_refuses_a_trace() -> None:
    model = net("sequential", training=True)

    with (
        pytest.raises(HookError, match=r"edit_grads on .*jit\.trace keeps no hooks on gradients"),
        edit_grads(model, scale(2)),
    ):
        torch.jit.trace(model, X)

    check(model, torch.jit.trace(model, X))


@pytest.mark.parametrize("wrapper", [Catcher, GramWrapper])
def test_a_wrapped_model_is_traced(wrapper: Any) -> None:
    model = net("sequential", training=False)

    with swap(model, {"0": wrapper}) as new:
        traced = torch.jit.trace(model, X, check_trace=False)
        assert not new["0"].n_calls
        model(X)
        n_rows = new["0"].n_calls

    check(model, traced)
    assert new["0"].n_calls == n_rows


def test_an_extractor_is_traced() -> None:
    model = net("sequential", training=False)

    traced = torch.jit.trace(feature_extractor(model, "0"), X, strict=False)

    torch.testing.assert_close(traced(X)["0"], model[0](X), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [ActivationStats, GradientStats, ParamStats, FlightRecorder])
@pytest.mark.parametrize("training", [True, False])
def test_a_trace_in_a_watched_training_is_no_batch(kind: Any, training: bool) -> None:
    def run(trace: bool) -> tuple[Any, Any]:
        model = nn.Sequential(net("sequential", training=True), nn.ReLU(), nn.Linear(4, 1))
        opt = torch.optim.SGD(model.parameters(), 0.1)
        traced = None
        with watch(model, opt, recorder := kind()):
            for _ in range(3):
                loss = model(X).square().mean()
                if trace:
                    model.train(training)
                    traced = torch.jit.trace(model, X)
                    model.train()
                opt.zero_grad()
                loss.backward()
                opt.step()
        model.eval()
        return recorder.record() if hasattr(recorder, "record") else recorder, traced

    (seen, traced), (alone, _) = run(True), run(False)

    assert traced is not None
    if kind is not FlightRecorder:
        assert seen.steps.tolist() == alone.steps.tolist()
        for key, values in alone.values.items():
            torch.testing.assert_close(
                torch.as_tensor(seen.values[key]), torch.as_tensor(values), equal_nan=True
            )


def test_a_hooked_model_in_a_traced_function() -> None:
    model = net("sequential", training=False).requires_grad_(False)

    with hook_output(model[1]) as h:
        model(X)
        traced = torch.jit.trace(lambda x: model(x) * 2, X)

    torch.testing.assert_close(traced(X), model(X) * 2, rtol=0, atol=0)
    torch.testing.assert_close(h.stored, model(X), rtol=0, atol=0)
