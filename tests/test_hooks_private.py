"""Capture without the private names of torch that hookkit likes to use: slower, and as right.

Each is looked up once, when hookkit is imported, so the core tests run in a process of their own,
in which `without_private` has taken the names away before.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CORE = ["test_hooks.py", "test_hooks_gradients.py", "test_hooks_functions.py"]

NAMES = [
    "torch._lazy_clone",
    "torch._C._current_graph_task_id",
    "torch.compiler._is_exporting_flag",
    "torch._C._are_functorch_transforms_active",
]
# Without functorch's names what it wraps cannot be taken out of its wrapper; without the number of
# the backward pass, what a checkpoint runs again is counted as a second call.
NEEDS_THEM = "vmap or transform or per_sample or checkpoint"


@pytest.mark.slow
def test_capture_is_right_without_any_of_torchs_private_names() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HOOKKIT_WITHOUT": " ".join(NAMES), "PYTHONPATH": path}
    options = ["-q", "-x", "-p", "without_private", "-p", "no:cacheprovider"]
    options += ["-k", f"not ({NEEDS_THEM})"]
    options += [str(TESTS / name) for name in CORE]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
