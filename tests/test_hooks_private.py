"""Capture without the private names of torch that hookkit likes to use: slower, and as right.

Each is looked up once, when hookkit is imported, so the core tests run in a process of their own,
in which `without_private` has taken the names away before.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import hookkit.hooks.compiling as compiling
from hookkit.hooks import hook_outputs

TESTS = Path(__file__).parent

CORE = ["test_hooks.py", "test_hooks_gradients.py", "test_hooks_taps.py", "test_hooks_functions.py"]

NAMES = [
    "torch._lazy_clone",
    "torch._C._current_graph_task_id",
    "torch.compiler._is_exporting_flag",
    "torch._C._functorch",
    "torch._C._are_functorch_transforms_active",
    "torch._C._is_tracing",
    "torch.overrides._pop_mode",
    "torch.autograd._unsafe_preserve_version_counter",
]
# Without functorch's names what it wraps cannot be taken out of its wrapper.
NEEDS_FUNCTORCH = "vmap or transform or per_sample"
# Without the stack of modes, blocks of functions have to end in the reverse order.
NEEDS_STACK = "removed_inside_another"


@pytest.mark.slow
def test_capture_is_right_without_any_of_torchs_private_names() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HOOKKIT_WITHOUT": " ".join(NAMES), "PYTHONPATH": path}
    options = ["-q", "-x", "-p", "without_private", "-p", "no:cacheprovider"]
    options += ["-k", f"not ({NEEDS_FUNCTORCH} or {NEEDS_STACK})"]
    options += [str(TESTS / name) for name in CORE]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


# --- dynamo's names, looked up when they are needed


@pytest.fixture
def compiled() -> Any:
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(5, 3), nn.ReLU())
    counter = CompileCounter()
    model = torch.compile(net, backend=counter)
    yield SimpleNamespace(net=net, model=model, counter=counter)
    torch.compiler.reset()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 5)


def test_graphs_are_forgotten_without_dynamos_private_names(
    compiled: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_PRIVATE", ("gone", "gone too"))
    compiled.model(x)
    h = hook_outputs(compiled.net)

    assert compiling.forget_graphs(compiled.net)
    y = compiled.model(x)

    torch.testing.assert_close(h[1].stored, y.detach())
    h.remove()


def test_nothing_is_forgotten_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)

    assert not compiling.forget_graphs(nn.Linear(2, 2))
    assert compiling.compiled_modules() == {}
    compiling.enter_eager(owner := object())
    assert not compiling._inside
    compiling.leave_eager(owner)


def test_a_stance_that_cannot_be_set_is_left(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("inside a compiled region")

    monkeypatch.setattr(torch.compiler, "set_stance", refuse)

    with hook_outputs(net := nn.Sequential(nn.Linear(5, 3))) as h:
        net(x)

    assert h[0].n_calls == 1
    assert not compiling._inside
