"""What torch.compile does to hooks, and how capture works with it.

A compiled function ignores a hook that is added after it has run, and does not warn: empty hook
dicts are not guarded. Inside a `with` block compiled code therefore runs eagerly (the compiler's
own stance, no recompilation afterwards); a hook that stays has to be there before the first call.

`enter_eager` and `leave_eager` set and restore the stance, `compiled_kinds` finds what compiled
code runs (for a warning), and `forget_graphs` has it compiled once more, with the new hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from types import CodeType
from typing import Any

import torch
from torch import nn

# Private: the compiler's module for frames, whose `_stance` says how compiled functions run and
# whose `DynamoStance` makes one (since 2.6). `torch._C._dynamo.eval_frame.get_eval_frame_callback`
# (2.11 has it) says whether this code runs inside of a compiled region. If one of them is missing,
# the public `torch.compiler.set_stance` is called instead, at 9 µs a block against 1.
FRAMES = "torch._dynamo.eval_frame"

# -- how compiled code runs inside a block ----------------------------------------------------


# The ids of the open blocks of all threads, and how to restore the stance. The process has one
# stance, and blocks of several threads need not end in the reverse order of their beginning.
_lock = Lock()
_inside: set[int] = set()
_undo: Callable[[], object] | None = None


def enter_eager(owner: object) -> None:
    """Compiled functions run eagerly from now on, until `leave_eager(owner)`.

    Does nothing if the compiler is not loaded, or while this call itself is being compiled.
    """
    frames: Any = sys.modules.get(FRAMES)
    if frames is None or torch.compiler.is_compiling():
        return
    with _lock:
        _inside.add(id(owner))
        if _undo is None or _changed(frames):
            _set_eager(frames)


def leave_eager(owner: object) -> None:
    """Undoes `enter_eager`, also half of it; the last block to end restores the stance.

    A stance that somebody else has set meanwhile stays.
    """
    global _undo
    if id(owner) not in _inside:
        return
    with _lock:
        if _inside == {id(owner)} and _undo is not None:
            _undo()
            _undo = None
        _inside.discard(id(owner))


def _set_eager(frames: Any) -> None:
    """Sets the compiler's stance, if it can be set here; first notes how to restore it."""
    global _undo
    callback = getattr(
        getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None),
        "get_eval_frame_callback",
        None,
    )
    try:
        if callback and hasattr(frames, "_stance") and hasattr(frames, "DynamoStance"):
            if callback() not in (None, False):  # inside a compiled region, which traces its hooks
                return
            eager = _force_eager(frames)
            _undo = partial(_restore, frames, frames._stance)
            frames._stance = eager
        elif hasattr(frames, "set_stance"):
            _undo = partial(_restore_publicly, torch.compiler.set_stance("force_eager"))
    except RuntimeError:  # inside a compiled region
        pass


_stance: Any = None


def _force_eager(frames: Any) -> Any:
    global _stance
    if _stance is None:
        _stance = frames.DynamoStance("force_eager")
    return _stance


def _changed(frames: Any) -> bool:
    """Whether somebody else has set the stance since a block did."""
    return getattr(frames, "_stance", _stance) is not _stance


def _restore(frames: Any, before: Any) -> None:
    global _stance
    if not _changed(frames):
        frames._stance = before
    else:  # a `with set_stance` that ends after the block restores the block's stance object,
        # so that object becomes a copy of the stance from before the block
        vars(_stance).update(vars(before))
        _stance = None


def _restore_publicly(own: Any) -> None:
    now = torch.compiler.set_stance("default")  # its `prev` is what was set before
    now.__exit__(None, None, None)
    if now.prev is own.stance:
        own.__exit__(None, None, None)


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
