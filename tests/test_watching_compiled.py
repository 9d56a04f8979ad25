"""`watch` around compiled models: seen from outside the graph, no graph break, or a warning."""

import pytest
import torch
from hooked import n_hooks
from test_watching import BATCH, CLOSE, OPEN, Log, net, sgd, train
from torch import nn

from hookkit.errors import CompiledWarning
from hookkit.recorders import ActivationStats
from hookkit.training import watch

# torch's own warnings while it traces
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*record_function.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, graph, inputs):
        self.n += 1
        return graph.forward


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_compiled_model_is_seen_without_a_graph_break(ran_before: bool, in_place: bool):
    inner, log, graphs = Net(), Log(), Graphs()
    if in_place:
        inner.compile(backend=graphs, fullgraph=True)
    model = inner if in_place else torch.compile(inner, backend=graphs, fullgraph=True)
    opt = sgd(inner)
    if ran_before:
        train(model, opt, 1)
    compiled = inner._compiled_call_impl

    with watch(model, opt, log):
        train(model, opt)

    assert log.events == OPEN + BATCH * 3 + CLOSE
    assert graphs.n <= 2
    assert inner._compiled_call_impl is compiled
    assert n_hooks(inner, opt) == 0


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("how", ["a Sequential", "whole", "in place", "a part in place"])
def test_the_layers_of_a_compiled_model_are_recorded_also_if_it_ran_before(how, ran_before):
    inner = called = net(1) if how == "a Sequential" else Net()
    if how == "in place":
        inner.compile(backend="eager", fullgraph=True)
    elif how == "a part in place":
        inner.a.compile(backend="eager")
    else:
        called = torch.compile(inner, backend="eager", fullgraph=True)
    opt, acts = sgd(inner), ActivationStats()
    if ran_before:
        train(called, opt, 2)

    with watch(called, opt, acts):
        train(called, opt, 3)

    counts = acts.record().value("count")
    assert counts.shape[1] == 3
    assert (counts > 0).all()
    assert n_hooks(inner, opt) == 0


def test_compiling_the_whole_of_which_only_the_inside_was_given_is_reported():
    inner = Net()
    opt = sgd(inner)

    with watch(inner, opt) as w:
        model = torch.compile(nn.Sequential(inner), backend="eager", fullgraph=True)
        with pytest.warns(CompiledWarning, match=r"Give watch what torch\.compile returned"):
            train(model, opt)

    assert w.n_steps == 3
