"""`call_kind`: what kind of call a module gets; and what hooks make of each kind."""

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit.edits import scale
from hookkit.hooks import Hook, attach, hook_output
from hookkit.hooks.calls import CallKind, call_kind

X = torch.ones(2, 3)


KINDS = list[CallKind]()


class Layer(nn.Linear):
    """Tells what kind of call it gets, from inside of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        KINDS.append(call_kind(get_ident()))
        return super().forward(x)


def recomputed(layer: nn.Module) -> None:
    checkpoint(layer, X, use_reentrant=False).sum().backward()


def traced(layer: nn.Module) -> None:
    torch.jit.trace(layer, X, check_trace=False)


RUNS: dict[str, tuple[Callable[[nn.Module], Any], list[CallKind]]] = {
    "plain": (lambda layer: layer(X), ["first"]),
    "checkpoint": (recomputed, ["first", "recomputed"]),
    "torch.jit.trace": (traced, ["first"]),
    "export": (lambda layer: torch.export.export(layer, (X,), strict=False), ["exported"]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("run", RUNS)
def test_the_kind_of_a_call_is_told(run: str) -> None:
    call, kinds = RUNS[run]
    KINDS.clear()

    call(Layer(3, 3))

    assert kinds == KINDS


def test_a_call_in_another_thread_than_the_one_asked_for_is_told() -> None:
    kinds, here = list[CallKind](), get_ident()

    thread = threading.Thread(target=lambda: kinds.extend([call_kind(here), call_kind()]))
    thread.start()
    thread.join()

    assert kinds == ["other thread", "first"]
    assert call_kind(here) == "first"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:While compiling")
@pytest.mark.parametrize("strict", [False, True])
def test_an_export_has_the_edits_of_hooks_and_nothing_of_captures(strict: bool) -> None:
    layer = nn.Linear(3, 3)
    edit = Hook(layer, scale(2.0), edit=True)
    stored = [hook_output(layer), Hook(layer, lambda o: o * 3), hook_output(layer, grad=True)]

    graph = torch.export.export(layer, (X,), strict=strict).module()

    for h in (edit, *stored):
        h.remove()
    torch.testing.assert_close(graph(X), 2 * layer(X))
    assert [h.n_calls for h in stored[:2]] == [0, 0]


@pytest.mark.slow
def test_a_compiled_graph_is_told_while_it_is_traced() -> None:
    torch.compiler.reset()
    layer = nn.Linear(3, 3)

    def edit(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        return out * {"first": 1.0, "compiled": 5.0}[call_kind()]

    handle = attach(layer, edit, edit=True)
    compiled, eager = torch.compile(layer, backend="eager", fullgraph=True)(X), layer(X)
    handle.remove()

    torch.testing.assert_close(compiled, 5 * eager)
