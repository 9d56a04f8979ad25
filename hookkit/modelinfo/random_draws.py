"""The random states of the process, kept where a run of a model would move them.

PyTorch, Python and NumPy have one generator each for all threads. To save its state and put it back
is therefore to repeat the numbers that another thread drew meanwhile. A run on fake tensors draws
nothing from PyTorch's generators, so they are left alone; they are restored only where this run is
known to have moved them.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hookkit.interrupts import block


@block
def kept(drew: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Puts back the random states that the code inside moved, also after an error.

    PyTorch's, if `drew()` says at the end that the code drew from them, or if it seeded them; what
    another thread draws meanwhile is then drawn again. Python's and NumPy's, if no other thread is
    alive: nobody can say which thread moved them, and one number skipped is better than one drawn
    twice.
    """
    torchs = [(g, g.initial_seed(), g.get_state()) for g in _generators()]
    others = [(get, put, get()) for get, put in _of_python_and_numpy()]
    alone = threading.active_count() == 1
    try:
        yield
    finally:
        for g, seed, state in torchs:
            moved = not torch.equal(g.get_state(), state)
            if moved and (drew() or _seeded(g, seed)):
                g.set_state(state)
        if alone and threading.active_count() == 1:
            for get, put, state in others:
                if pickle.dumps(get()) != pickle.dumps(state):
                    put(state)


def _generators() -> Iterator[torch.Generator]:
    """PyTorch's generators of the devices in use; one that was never used has no state to keep."""
    yield torch.default_generator
    for device in (torch.cuda, torch.xpu):
        if device.is_available() and device.is_initialized():
            yield from device.default_generators
    if torch.backends.mps.is_available():
        # Private, behind torch.mps.get_rng_state: without it a reseeding could not be seen.
        yield torch.mps._get_default_mps_generator()


def _seeded(g: torch.Generator, seed: int) -> bool:
    """True if `g` was seeded since its seed was `seed`: it has another, or stands at its start."""
    fresh = torch.Generator(g.device).manual_seed(g.initial_seed())
    return g.initial_seed() != seed or torch.equal(fresh.get_state(), g.get_state())


def _of_python_and_numpy() -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield lambda: numpy.random.get_state(legacy=False), numpy.random.set_state
