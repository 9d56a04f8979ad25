"""A pytest plugin: hookkit is imported as if torch had lost the private names it likes to use.

    HOOKKIT_WITHOUT="torch._lazy_clone" pytest -p without_private tests/test_hooks.py

torch itself gets them back, since its own code needs them.
"""

import importlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.compiler


@contextmanager
def lost(names: list[str]) -> Iterator[None]:
    """The names are gone in the block."""
    kept: list[tuple[Any, str, Any]] = []
    for name in names:
        owner, _, last = name.rpartition(".")
        parent: Any = torch
        for part in owner.split(".")[1:]:
            parent = getattr(parent, part)
        kept.append((parent, last, getattr(parent, last)))
        delattr(parent, last)
    try:
        yield
    finally:
        for parent, last, value in kept:
            setattr(parent, last, value)


NAMES = os.environ.get("HOOKKIT_WITHOUT", "").split()

with lost(NAMES):
    package = importlib.import_module("hookkit.hooks")
    for found in pkgutil.iter_modules(package.__path__, "hookkit.hooks."):
        importlib.import_module(found.name)


def pytest_configure() -> None:
    """The tests would pass with the names there as well: hookkit lacks one, and torch has it."""
    from hookkit.hooks.values import lazy_clone

    assert (lazy_clone is torch.Tensor.clone) == ("torch._lazy_clone" in NAMES)
    assert hasattr(torch, "_lazy_clone")
