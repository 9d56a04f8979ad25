"""A thousand times, and gone at the end: hooks, edits, swaps and extractors."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn

from hookkit.edits import edit_grad, edit_input, edit_output, zero
from hookkit.edits.swapping import Catcher, GramWrapper, swap
from hookkit.hooks import (
    Hook,
    hook_all,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
    hook_tensor,
)
from hookkit.inspection.features import feature_extractor


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(4, 5)


def state(model: nn.Module) -> list[Any]:
    """Everything that a guest could leave on a module, but for a flag of PyTorch's own hooks."""
    found = []
    for name, m in model.named_modules():
        tables = [(key, x) for key, x in vars(m).items() if "hook" in key and isinstance(x, dict)]
        hooks = [(key, list(table)) for key, table in tables if table]
        found.append((name, id(m), sorted(vars(m)), hooks))
    return found


USES: dict[str, Callable[[nn.Sequential, Tensor], Any]] = {
    "outputs": lambda net, x: _within(hook_outputs(net), net, x),
    "all calls": lambda net, x: _within(hook_outputs(net, keep="all"), net, x),
    "live": lambda net, x: _within(hook_outputs(net, detach=False), net, x),
    "inputs": lambda net, x: _within(hook_inputs(net), net, x),
    "output gradients": lambda net, x: _within(hook_outputs(net, grad=True), net, x),
    "input gradients": lambda net, x: _within(hook_input(net[2], grad=True), net, x),
    "backward": lambda net, x: _within(Hook(net[2], None, is_forward=False), net, x),
    "function": lambda net, x: _within(Hook(net[0], lambda m, i, o: o.mean()), net, x),
    "stop": lambda net, x: _within(hook_output(net[0], stop=True), net, x),
    "edit": lambda net, x: _within(edit_output(net[0], zero()), net, x),
    "edit input": lambda net, x: _within(edit_input(net[0], zero()), net, x),
    "edit gradient": lambda net, x: _within(edit_grad(net[0], zero()), net, x),
    "swap": lambda net, x: _within(swap(net, {"0": Catcher, "2": GramWrapper}), net, x),
    "features": lambda net, x: feature_extractor(net, "0")(x)["0"].sum().backward(),
    "everywhere": lambda net, x: _within(hook_all(lambda *seen: None), net, x),
    "tensor": lambda net, x: _within(hook_tensor(net[0](x)), net, x),
}


def _within(block: Any, net: nn.Module, x: Tensor) -> None:
    with block:
        net(x).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_many_cycles_leave_nothing_behind(use: str, net: nn.Sequential, x: Tensor) -> None:
    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        USES[use](net, x)
    clean, before = state(net), objects()

    for _ in range(1000 if use in ("outputs", "edit", "swap", "features") else 200):
        USES[use](net, x)

    assert state(net) == clean
    assert objects() - before < 50


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_model_that_was_captured_can_die(use: str, x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    gone = [weakref.ref(m) for m in net.modules()]

    USES[use](net, x)
    del net
    gc.collect()

    assert [ref() for ref in gone] == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_threads_do_not_meet(use: str, x: Tensor) -> None:
    nets = [nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(3)]
    errors: list[BaseException] = []

    def work(net: nn.Sequential) -> None:
        try:
            for _ in range(10):
                USES[use](net, x)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    for net in nets:
        assert n_hooks(net) == 0
