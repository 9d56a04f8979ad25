"""What torch.compile does to hooks: a compiled function ignores those that are added after its run.

Inside a `with` block compiled code therefore runs eagerly; a hook that stays has to be there before
the first call, or everything is compiled once more (`forget_graphs`).
"""

from __future__ import annotations

import sys
from threading import Lock
from typing import Any

import torch
from torch import nn

# The ids of the open blocks of all threads, and what has set the stance: the process has one, and
# blocks need not end in the reverse order of their beginning.
_lock = Lock()
_inside: set[int] = set()
_eager: Any = None


def has_compiled() -> bool:
    """Whether anything has been compiled in this process; loading the compiler is not enough.

    An optimizer loads the compiler, and to set its stance would cost each block 145 µs.
    """
    # Private: `input_codes` of `torch._dynamo.convert_frame`, whose `seen` has the code that was
    # compiled (since 2.0). Without it each block sets the stance, and is slower.
    convert = sys.modules.get("torch._dynamo.convert_frame")
    return convert is not None and bool(getattr(convert.input_codes, "seen", True))


def enter_eager(owner: object, always: bool = False) -> None:
    """Compiled functions run eagerly from now on, until `leave_eager(owner)`.

    Without `always` only if something has been compiled by now: then what is compiled for the first
    time inside a block is compiled with the block's hooks.
    """
    global _eager
    loaded = has_compiled() or (always and "torch._dynamo.eval_frame" in sys.modules)
    if not loaded or torch.compiler.is_compiling():
        return
    with _lock:
        if not _inside:
            _eager = torch.compiler.set_stance("force_eager")
        _inside.add(id(owner))


def leave_eager(owner: object) -> None:
    """Undoes `enter_eager`; the last block to end restores the stance. Can be repeated."""
    global _eager
    if id(owner) not in _inside:
        return
    with _lock:
        _inside.discard(id(owner))
        if not _inside and _eager is not None:
            _eager.__exit__(None, None, None)
            _eager = None


def forget_graphs(model: nn.Module) -> bool:
    """Has everything compiled again at its next call, with the hooks that are there by then.

    For hooks that stay and are added to a model that has run. Returns True if there was anything
    compiled. Values do not change.
    """
    if not has_compiled():
        return False
    torch.compiler.reset()
    return True
