"""What torch.compile does to hooks, and how capture works with it.

A compiled function ignores a hook that is added after it has run, and does not warn: empty hook
dicts are not guarded. Inside a `with` block compiled code therefore runs eagerly (the compiler's
own stance, no recompilation afterwards); a hook that stays has to be there before the first call.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from threading import Lock
from types import CodeType
from typing import Any

import torch
from torch import nn

from hookkit.hooks.compiled_functions import run_by_functions
from hookkit.modules import unwrap

# Private: the compiler's module for frames, whose `_stance` says how compiled functions run and
# whose `DynamoStance` makes one (since 2.6). The fallback is the public
# `torch.compiler.set_stance`, at 9 µs a block against 1.
FRAMES = "torch._dynamo.eval_frame"


# The ids of the open blocks, over all threads, and how to restore the stance: it is the process's,
# and blocks of several threads need not end in the reverse order of their beginning.
_lock = Lock()
_inside: set[int] = set()
_undo: Callable[[], object] | None = None


def enter_eager(owner: object) -> None:
    """Compiled functions run eagerly from now on, until `leave_eager(owner)`.

    Nothing is done where no compiler is loaded or this is being compiled. Cost: 1 µs, against 9 for
    `torch.compiler.set_stance`, which is used if the parts of it that are used here ever go.
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
    """Sets the compiler's stance, if it can be set here; notes before how to restore it."""
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
    """Whether the stance is another one than a block has set."""
    return getattr(frames, "_stance", _stance) is not _stance


def _restore(frames: Any, before: Any) -> None:
    global _stance
    if not _changed(frames):
        frames._stance = before
    else:  # a `with set_stance` that ends after the block restores the block's: it is none now
        vars(_stance).update(vars(before))
        _stance = None


def _restore_publicly(own: Any) -> None:
    now = torch.compiler.set_stance("default")  # its `prev` is what was set before
    now.__exit__(None, None, None)
    if now.prev is own.stance:
        own.__exit__(None, None, None)


def compiled_modules() -> dict[int, str]:
    """The modules that compiled code runs, by id: what they are part of, in words.

    Cost: looks at all objects once, ~50 ms.
    """
    frames: Any = sys.modules.get(FRAMES)
    if frames is None:
        return {}
    objects = gc.get_objects()
    found: dict[int, str] = {}
    for what, model in chain(_compiled_models(frames, objects), run_by_functions(objects)):
        for module in model.modules():
            found.setdefault(id(module), what)
    return found


def _compiled_models(frames: Any, objects: list[Any]) -> Iterator[tuple[str, nn.Module]]:
    """Results of `torch.compile(model)` and modules on which `model.compile()` was called."""
    wrapper: Any = getattr(frames, "OptimizedModule", ())
    for x in objects:
        kind = type(x)  # not isinstance: that asks proxies for their __class__
        if not issubclass(kind, nn.Module):
            continue
        if issubclass(kind, wrapper) or x.__dict__.get("_compiled_call_impl") is not None:
            yield f"part of a compiled {type(unwrap(x)).__name__}", x


def forget_graphs(model: nn.Module) -> bool:
    """Has what `torch.compile` made of `model` or its parts be made again, hooks included.

    For hooks that stay, added to a model that has run: its next call compiles once more. True if
    there was anything to forget. Values do not change; a compiled function of the user's own that
    calls the model is not found here.
    """
    frames: Any = sys.modules.get(FRAMES)
    reset, entries = (getattr(frames, name, None) for name in _PRIVATE)
    if frames is None:
        return False
    codes = {getattr(getattr(type(m), "forward", None), "__code__", None) for m in model.modules()}
    codes |= _frames_around_library_modules()
    if reset is None or entries is None:  # a later torch: everything is made again
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
    """The frame that stands for the forward of a module of torch's own, such as a Sequential."""
    utils: Any = sys.modules.get("torch._dynamo.external_utils")
    code = getattr(getattr(utils, "wrap_inline", None), "__code__", None)
    return {c for c in getattr(code, "co_consts", ()) if isinstance(c, CodeType)}
