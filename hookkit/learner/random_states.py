"""All of a process's random generators: their states, and how they are set again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from hookkit.devices import accelerator


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, and of every device's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "devices": _device_states(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "python": random.getstate(),
    }


def _device_states() -> list[torch.Tensor]:
    module = _device_module()
    if module is None:
        return []
    every = getattr(module, "get_rng_state_all", None)
    return [module.get_rng_state()] if every is None else list(every())


def _device_module() -> Any:
    """`torch.cuda`, `torch.mps`, … ; None where there is no accelerator."""
    return None if (kind := accelerator()) == "cpu" else torch.get_device_module(kind)


def set_random(state: dict[str, Any]) -> None:
    """Sets all generators, after new ones have taken these states."""
    kind, keys, *rest = state["numpy"]
    words = kind, np.array(keys, np.uint32), *rest
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(words)
    torch.Generator().set_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(words)
    torch.set_rng_state(state["torch"])
    module = _device_module()
    if module is None:
        return
    if not hasattr(module, "set_rng_state_all"):
        module.set_rng_state(*state["devices"][:1])
        return
    for i, each in enumerate(state["devices"][: module.device_count()]):
        module.set_rng_state(each, i)
