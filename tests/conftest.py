"""Golden files, rewritten by `--update-golden`; readers of CPU tensors; devices; old torches.

And the garbage collector looks at what a test makes, not at the million objects of the libraries:
`gc.collect()`, and what hookkit asks of `gc`, would take most of the suite's time.
"""

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_base import Entry

from hookkit._core.devices import accelerator

GOLDEN = Path(__file__).parent / "golden"
DEVICE = os.environ.get("HOOKKIT_TEST_DEVICE") or accelerator()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what is drawn now"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    old = torch.__version__ < (2, 13)
    skip = pytest.mark.skip(reason="torch < 2.13 cannot trace these tensor hooks")
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(param, Entry) for param in params):
            item.add_marker(pytest.mark.zoo)
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)
        if old and item.get_closest_marker("traces_gradients"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting the tests makes stays, so that a search for garbage meanwhile is a waste."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """What earlier files have left, such as libraries that they imported, stays as well."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def whole_heap() -> Iterator[None]:
    """For a test in which hookkit asks `gc` for something that was there when the test began."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def gpu() -> torch.device:
    """The accelerator that a test is run on, or what `HOOKKIT_TEST_DEVICE` names ("cuda:1")."""
    if DEVICE == "cpu":
        pytest.skip("needs an accelerator")
    return torch.empty(0, device=DEVICE).device  # with its number


@pytest.fixture
def cuda(gpu: torch.device) -> Iterator[torch.device]:
    """The same for a test that uses what CUDA alone has; waiting is allowed again after it."""
    if gpu.type != "cuda":
        pytest.skip("needs a CUDA device")
    with torch.cuda.device(gpu):
        yield gpu
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _no_device_unless_marked(request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    """Tests without the marker `gpu` are about CPUs: PyTorch's DataParallel, say, would move."""
    if accelerator() != "cpu" and not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)


@pytest.fixture(autouse=True)
def _figures_closed() -> Iterator[None]:
    """Pyplot holds every figure until it is closed, and warns when there are many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` holds `text` against the file `tests/golden/<name>`."""

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.write_text(text + "\n")
        assert file.exists(), f"no golden file {name}: write it with --update-golden"
        assert text + "\n" == file.read_text()

    return check
