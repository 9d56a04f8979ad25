"""What torch.compile does to hooks, and how capture works with it.

A compiled function ignores a hook that is added after it has run, and does not warn: empty hook
dicts are not guarded. Inside a `with` block compiled code therefore runs eagerly (the compiler's
own stance, no recompilation afterwards); a hook that stays has to be there before the first call.

`enter_eager` and `leave_eager` set and restore the stance, `compiled_kinds` finds what compiled
code runs (for a warning), and `forget_graphs` has it compiled once more, with the new hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any

import torch
from torch import nn

from hookkit.interrupts import uninterrupted

FRAMES = "torch._dynamo.eval_frame"
"""The compiler's module for frames, loaded with the compiler."""

# -- how compiled code runs inside a block ----------------------------------------------------


# The ids of the open blocks of all threads, and what has set the stance. The process has one
# stance, and blocks of several threads need not end in the reverse order of their beginning.
_lock = Lock()
_inside: set[int] = set()
_eager: Any = None


@uninterrupted
def enter_eager(owner: object) -> None:
    """Compiled functions run eagerly from now on, until `leave_eager(owner)`.

    Does nothing if the compiler is not loaded, or while this call itself is being compiled.
    """
    global _eager
    if FRAMES not in sys.modules or torch.compiler.is_compiling():
        return
    with _lock:
        _inside.add(id(owner))
        try:
            now: Any = torch.compiler.set_stance("force_eager")
        except RuntimeError:  # inside a compiled region, which traces its hooks
            return
        if _is_ours(now):
            now.__exit__(None, None, None)  # an open block has set it, and it stays
        else:
            _eager = now


@uninterrupted
def leave_eager(owner: object) -> None:
    """Undoes `enter_eager`; the last block to end restores the stance.

    A stance that somebody else has set meanwhile stays.
    """
    global _eager
    if id(owner) not in _inside:
        return
    with _lock:
        _inside.discard(id(owner))
        if _inside or _eager is None:
            return
        now: Any = torch.compiler.set_stance("default")
        now.__exit__(None, None, None)
        if _is_ours(now):
            _eager.__exit__(None, None, None)
        else:  # a `with set_stance` that ends after the block restores the block's stance object,
            # so that object becomes a copy of the stance from before the block
            vars(_eager.stance).update(vars(_eager.prev))
        _eager = None


def _is_ours(now: Any) -> bool:
    """Whether the stance that `now` has replaced is the one that a block has set."""
    # `stance` and `prev`, what a `set_stance` sets and what it restores, are not documented (torch
    # 2.6 to 2.13). There is no other way to see whether somebody else has set the stance.
    return _eager is not None and now.prev is _eager.stance


# -- which modules compiled code runs ---------------------------------------------------------

# Compiled code keeps no list of the modules that it runs. But each graph is guarded by a tree of
# conditions on what the code reads, which has a node for each module, with its class. The graph
# serves any module of that class, so the class is all that there is to know.
#
# Private: `_debug_get_cache_entry_list` and `reset_code` of FRAMES (the graphs of a code object,
# and forgetting them), `input_codes` of `torch._dynamo.convert_frame` (the code objects that have
# graphs), and `guard_manager.root` with its methods `get_child_managers`, `get_key_value_managers`
# and `get_type_of_guarded_value` (the tree). Torch 2.11 to 2.13 have them. If one is missing,
# hookkit does not warn of a hook that compiled code ignores, and `forget_graphs` forgets all.


def compiled_kinds() -> dict[type, str]:
    """The classes of modules that compiled code runs, and for each which code that is, in words."""
    found: dict[type, str] = {}
    try:
        for code, kind, _ in _graphs():
            place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            found.setdefault(kind, f"{code.co_name} ({place})")
    except (AttributeError, RuntimeError):
        pass
    return found


def forget_graphs(model: nn.Module) -> bool:
    """Forgets the graphs of compiled code that runs `model` or a part of it.

    Its next call compiles it again, with hooks that were added since and stay. Returns True if
    there was anything to forget. Values do not change.
    """
    kinds = {type(m) for m in model.modules()}
    try:
        # by id, since code objects of equal functions are equal but have graphs of their own
        codes = {id(code): code for code, kind, outer in _graphs() if outer and kind in kinds}
        for code in codes.values():
            sys.modules[FRAMES].reset_code(code)
    except (AttributeError, RuntimeError):
        torch.compiler.reset()
        return True
    return bool(codes)


def _graphs() -> Iterator[tuple[CodeType, type, bool]]:
    """For each module that compiled code runs: the code, the module's class, and whether it is
    outermost, so in no other module."""
    frames: Any = sys.modules.get(FRAMES)
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None or convert is None:
        return
    for code in filter(None, [weak() for weak in convert.input_codes.seen]):
        for graph in frames._debug_get_cache_entry_list(code):
            for kind, outer in _guarded(graph.guard_manager.root):
                yield code, kind, outer


def _guarded(guard: Any, outer: bool = True) -> Iterator[tuple[type, bool]]:
    """The classes of the modules that the tree below `guard` has conditions on."""
    below = [*guard.get_child_managers()]
    if hasattr(guard, "get_key_value_managers"):  # of a dict
        below += [m for pair in guard.get_key_value_managers().values() for m in pair if m]
    for each in below:
        kind = each.get_type_of_guarded_value()
        is_module = isinstance(kind, type) and issubclass(kind, nn.Module)
        if is_module:
            yield kind, outer
        yield from _guarded(each, outer and not is_module)
