"""Save the random states of the process and of loaders, and restore them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch


def random_state(*loaders: Any) -> Callable[[], None]:
    """Save the random states that are in use; return a function that restores them.

    These are the states of PyTorch on the CPU and on each accelerator that is initialized, of
    Python's `random`, of NumPy's global generator, and of the generators that `loaders` draw from.

    >>> restore = random_state()
    >>> x = torch.rand(2)
    >>> restore(); torch.equal(torch.rand(2), x)
    True
    """
    restore: list[Callable[[], Any]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]
    for device in (torch.cuda, torch.xpu):
        if device.is_available() and device.is_initialized():
            restore.append(partial(device.set_rng_state_all, device.get_rng_state_all()))
    if torch.backends.mps.is_available():
        restore.append(partial(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    for generator in (g for loader in loaders for g in generators_of(loader)):
        restore.append(partial(generator.set_state, generator.get_state()))

    def put_back() -> None:
        for put in restore:
            put()

    return put_back


@contextmanager
def preserve_random_state(*loaders: Any) -> Iterator[None]:
    """Restore the random states of the process and of `loaders` at the end of the `with` block."""
    restore = random_state(*loaders)
    try:
        yield
    finally:
        restore()


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the random generators of a loader and of its samplers, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    generators.append(getattr(loader, "synchronized_generator", None))  # accelerate's
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())
