"""Names of `untouched` under which rooms that are not switched over yet import it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hookkit.hooks.global_hooks import switch_fused_path
from hookkit.interrupts import Undo, block
from hookkit.modelinfo.tree import Tree
from hookkit.modelinfo.untouched import real_inputs, set_mode, untouched

__all__ = ["preserve_global_state", "real_inputs", "set_mode"]


@block
def restore_after(tree: Tree, *, params: bool = True) -> Iterator[None]:
    """`untouched` with observers on."""
    with untouched(tree, params=params, observers=True):
        yield


@block
def preserve_random_states(drew: Any = None) -> Iterator[None]:
    """Random states are restored."""
    with untouched(nn.Module(), observers=True):
        yield


@block
def preserve_global_state() -> Iterator[None]:
    """Grad mode, no inference mode, fused path off."""
    token = object()
    with Undo() as stack:
        stack.callback(switch_fused_path, token, False)
        switch_fused_path(token, True)
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.enter_context(torch.inference_mode(False))
        yield


def random_states() -> list[bytes]:
    """The states of PyTorch's, Python's and NumPy's generators, to compare."""
    states = [torch.get_rng_state().numpy().tobytes(), pickle.dumps(random.getstate())]
    return [*states, pickle.dumps(np.random.get_state())]
