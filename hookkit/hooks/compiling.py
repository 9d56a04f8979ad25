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
# Private: `_debug_get_cache_entry_list` of FRAMES (the graphs of a code object), `input_codes` of
# `torch._dynamo.convert_frame` (the code objects that have graphs), and `guard_manager.root` with
# its methods `get_child_managers`, `get_key_value_managers` and `get_type_of_guarded_value` (the
# tree). Torch 2.11 to 2.13 have them. If one is missing, nothing is found, and hookkit does not
# warn of a hook that compiled code ignores.


def compiled_kinds() -> dict[type, str]:
    """The classes of modules that compiled code runs, and for each which code that is, in words."""
    frames: Any = sys.modules.get(FRAMES)
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    found: dict[type, str] = {}
    try:
        for code in filter(None, [weak() for weak in convert.input_codes.seen]):
            where = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
            for graph in frames._debug_get_cache_entry_list(code):
                for kind in _guarded(graph.guard_manager.root):
                    if issubclass(kind, nn.Module):
                        found.setdefault(kind, where)
    except (AttributeError, RuntimeError):
        pass
    return found


def _guarded(guard: Any) -> Iterator[type]:
    """The classes of all values that the tree below `guard` has conditions on."""
    below = [*guard.get_child_managers()]
    if hasattr(guard, "get_key_value_managers"):  # of a dict
        below += [m for pair in guard.get_key_value_managers().values() for m in pair if m]
    for each in below:
        kind = each.get_type_of_guarded_value()
        if isinstance(kind, type):
            yield kind
        yield from _guarded(each)


# -- compiling once more ----------------------------------------------------------------------


def forget_graphs(model: nn.Module) -> bool:
    """Forgets what `torch.compile` made of `model` and its parts; their next call compiles again.

    For hooks that stay and are added to a model that has run. Returns True if there was anything to
    forget. Values do not change. A compiled function of the user that calls the model is not found.
    """
    frames: Any = sys.modules.get(FRAMES)
    reset, entries = (getattr(frames, name, None) for name in _PRIVATE)
    if frames is None:
        return False
    codes = {getattr(getattr(type(m), "forward", None), "__code__", None) for m in model.modules()}
    codes |= _frames_around_library_modules()
    if reset is None or entries is None:  # a later torch: everything is compiled again
        torch.compiler.reset()
        return True
    used = [code for code in codes if code is not None and entries(code)]
    for code in used:
        reset(code)
    return bool(used)


# Private: `reset_code` forgets the graphs of one code object, `_debug_get_cache_entry_list` lists
# them (since 2.1). Without them everything that was compiled is compiled again.
_PRIVATE = ("reset_code", "_debug_get_cache_entry_list")


def _frames_around_library_modules() -> set[Any]:
    """The frames around the forward of a module of torch's own, such as a Sequential."""
    # Private: torch.compile calls such a forward through a function that `wrap_inline` of
    # `torch._dynamo.external_utils` makes (2.11 has it). Without it such graphs are not forgotten,
    # and a hook that is added to a compiled Sequential later is ignored.
    utils: Any = sys.modules.get("torch._dynamo.external_utils")
    code = getattr(getattr(utils, "wrap_inline", None), "__code__", None)
    return {c for c in getattr(code, "co_consts", ()) if isinstance(c, CodeType)}
