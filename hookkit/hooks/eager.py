"""Disable torch.compile and the fused TransformerEncoder path for a while: both skip hooks.

A compiled function ignores hooks that are added after its first run, so inside a `with` block
compiled code runs eagerly. A hook that stays has to be there before that run; otherwise everything
is compiled once more (`forget_graphs`). PyTorch's fused path of a TransformerEncoder looks for
hooks on its modules, but not for global hooks, or for modules that are swapped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import Any

import torch


class ProcessSetting:
    """Changes a setting of the process for its first owner, and restores it after the last one.

    Owners are blocks of all threads, which need not end in the reverse order of their beginning.
    """

    def __init__(self, change: Callable[[], Callable[[], Any]]) -> None:
        self.change = change  # returns the function that undoes it
        self.owners, self._lock = set[int](), Lock()
        self._undo: Callable[[], Any] | None = None

    def begin(self, owner: object) -> None:
        """Change the setting, unless it is changed already."""
        with self._lock:
            if not self.owners:
                self._undo = self.change()
            self.owners.add(id(owner))

    def end(self, owner: object) -> None:
        """Restore the setting if `owner` was the last one; can be repeated."""
        if id(owner) not in self.owners:
            return  # most blocks end here, without the lock
        with self._lock:
            self.owners.discard(id(owner))
            if not self.owners and self._undo is not None:
                self._undo()
                self._undo = None


def _disable_fused_path() -> Callable[[], None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


def _disable_compile() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")

    def undo() -> None:
        now: Any = torch.compiler.set_stance("default")
        ours = now.prev.stance == "force_eager"  # otherwise the user's, set inside the block
        (stance if ours else now).__exit__(None, None, None)

    return undo


EAGER, _UNFUSED = ProcessSetting(_disable_compile), ProcessSetting(_disable_fused_path)


def has_compiled() -> bool:
    """Return True if anything has been compiled in this process.

    That the compiler is loaded does not count: an optimizer loads it, and setting the stance would
    cost each block 20 µs.
    """
    # Private: `input_codes` of `torch._dynamo.convert_frame`, whose `seen` has the code that was
    # compiled (since 2.0). Without it, as while another thread loads that module, each block sets
    # the stance, and is slower.
    convert = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(convert, "input_codes", None)
    return convert is not None and bool(getattr(codes, "seen", True))


def enter_eager(owner: object, always: bool = False) -> None:
    """Let compiled functions run eagerly from now on, until `EAGER.end(owner)`.

    Args:
        always: do so even if nothing has been compiled, or given to the compiler, yet.
    """
    if always and "torch.nn.attention.flex_attention" in sys.modules:
        # Flex attention loads the compiler when it is called, which would be too late.
        import_module("torch._dynamo.eval_frame")
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # Private: `cached_backends` of `torch._dynamo.eval_frame`, the backends that torch.compile was
    # called with; None for an optimizer's (since 2.1). Without it a function that is first compiled
    # inside a block is compiled with its hooks, in graphs that layers of one class share.
    wanted = any(getattr(frames, "cached_backends", {}).values())
    loaded = has_compiled() or wanted or (always and frames is not None)
    if loaded and not torch.compiler.is_compiling():
        EAGER.begin(owner)


@contextmanager
def layer_by_layer(always: bool = False) -> Iterator[None]:
    """Open a block that runs no compiled code and no fused path, so every layer is called."""
    owner = object()
    try:
        enter_eager(owner, always)
        _UNFUSED.begin(owner)
        yield
    finally:
        _UNFUSED.end(owner)
        EAGER.end(owner)


def forget_graphs() -> bool:
    """Drop all compiled graphs; return True if there were any. Values do not change.

    For hooks that stay and are added to a model that has run: at its next call it is compiled again
    with the hooks that are there by then.
    """
    if not has_compiled():
        return False
    torch.compiler.reset()
    return True
