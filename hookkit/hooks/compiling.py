"""What torch.compile does to hooks, and how capture works with it.

A compiled function ignores a hook that is added after it has run, and does not warn: empty hook
dicts are not guarded. Inside a `with` block compiled code therefore runs eagerly (the compiler's
own stance, no recompilation afterwards); a hook that stays has to be there before the first call.

`enter_eager` and `leave_eager` set and restore the stance, `compiled_modules` finds what compiled
code runs (for a warning), and `forget_graphs` has it compiled once more, with the new hooks.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import Lock
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from hookkit.interrupts import uninterrupted
from hookkit.modules import unwrap
from hookkit.nested import pick

FRAMES = "torch._dynamo.eval_frame"
"""The compiler's module for frames, loaded with the compiler."""

# -- how compiled code runs inside a block ----------------------------------------------------


def has_compiled() -> bool:
    """Whether anything has been compiled in this process; loading the compiler is not enough.

    An optimizer loads the compiler, and to set its stance would cost each block 145 µs.
    """
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None:
        return False
    # Private: `input_codes` of `torch._dynamo.convert_frame`, whose `seen` has the code that was
    # compiled (since 2.0). Without it each block sets the stance, and is slower.
    codes = getattr(convert, "input_codes", None)
    return bool(getattr(codes, "seen", True))


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
    if not has_compiled() or torch.compiler.is_compiling():
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


def compiled_modules() -> dict[int, str]:
    """The modules that compiled code runs: for the id of each, what it is part of, in words.

    Cost: about 50 ms, since it looks at all objects of the process once.
    """
    frames: Any = sys.modules.get(FRAMES)
    if frames is None or not has_compiled():
        return {}
    objects = gc.get_objects()
    found: dict[int, str] = {}
    for what, model in chain(_compiled_models(frames, objects), _run_by_functions(objects)):
        for module in model.modules():
            found.setdefault(id(module), what)
    return found


def _compiled_models(frames: Any, objects: list[Any]) -> Iterator[tuple[str, nn.Module]]:
    """Results of `torch.compile(model)` and modules on which `model.compile()` was called."""
    # Private: `OptimizedModule` is the class of what torch.compile(model) returns (since 2.0), and
    # `_compiled_call_impl` holds what model.compile() made (since 2.0). Without them an empty hook
    # on such a model is not warned of.
    wrapper: Any = getattr(frames, "OptimizedModule", ())
    for x in objects:
        kind = type(x)  # not isinstance: that asks proxies for their __class__
        if not issubclass(kind, nn.Module):
            continue
        if issubclass(kind, wrapper) or x.__dict__.get("_compiled_call_impl") is not None:
            yield f"part of a compiled {type(unwrap(x)).__name__}", x


# A compiled function keeps no list of the modules that it runs. But each graph that the compiler
# made is guarded by a tree of conditions on what the function reads, and each node of it has a
# source, such as `G['model']` or `L['self'].model`: a path from a global or local variable. The
# path is followed again from there: from a global's value, from a closure's, or, for an argument,
# from each object of its class, since the graph serves any of them.
#
# Private: `_debug_get_cache_entry_list` of FRAMES (the graphs of a code object), `input_codes` of
# `torch._dynamo.convert_frame` (the code objects that have graphs), and `guard_manager.root` with
# its methods `get_child_managers`, `get_key_value_managers`, `get_type_of_guarded_value` and
# `get_source` (the tree). Torch 2.11 to 2.13 have them. If one is missing, nothing is found, and
# hookkit does not warn of a hook that a compiled function ignores.
_LIBRARIES = tuple(f"{p}{os.sep}" for p in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_SOURCE = re.compile(r"([GL])\['([^']+)'\](.*)")


def _run_by_functions(objects: list[Any]) -> Iterator[tuple[str, nn.Module]]:
    """`(which function, in words, module)` for the outermost modules that compiled functions run.

    Args:
        objects: all objects of the process, as `gc.get_objects()` gives them.
    """
    frames: Any = sys.modules.get(FRAMES)
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    try:
        entries = frames._debug_get_cache_entry_list
        # by id, since code objects of equal functions are equal but have graphs of their own
        codes = {id(code): code for weak in convert.input_codes.seen if (code := weak())}
        graphs = [(c, entries(c)) for c in codes.values() if not _is_forward(c) and entries(c)]
        functions = [f for f in objects if graphs and type(f) is FunctionType]
        for code, found in graphs:
            what = f"run by the compiled function {code.co_name} ({_place(code)})"
            own = [f for f in functions if f.__code__ is code]
            for graph in found:
                for module in _modules_of(graph.guard_manager.root, own, code, objects):
                    yield what, module
    except (AttributeError, RuntimeError):
        return


def _place(code: CodeType) -> str:
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _is_forward(code: CodeType) -> bool:
    """Whether `code` is a model's forward, or what calls it and its hooks.

    All models of a class share that code, and the others of them need not be compiled:
    `_compiled_models` finds them by the model.
    """
    return code.co_name == "forward" or code.co_filename.startswith(_LIBRARIES)


def _modules_of(
    root: Any, functions: list[FunctionType], code: CodeType, objects: list[Any]
) -> Iterator[nn.Module]:
    """The modules that the sources of the guard tree `root` lead to."""
    kinds: dict[str, type] = {}
    for source, kind in _sources(root):
        kinds[source] = kind
        found = _SOURCE.fullmatch(source)
        if found is None or not issubclass(kind, nn.Module):
            continue
        scope, name, path = found.groups()
        if scope == "G":
            starts = [f.__globals__.get(name) for f in functions]
        elif name in code.co_freevars:
            at = code.co_freevars.index(name)
            starts = [_content(f.__closure__[at]) for f in functions if f.__closure__]
        else:
            starts = [x for x in objects if type(x) is kinds.get(f"L['{name}']")]
        for start in starts:
            try:
                value = pick(start, path)
            except (LookupError, AttributeError, TypeError, ValueError):
                continue
            if issubclass(type(value), nn.Module):
                yield value


def _sources(guard: Any) -> Iterator[tuple[str, type]]:
    """The source and the class of each guarded value; values inside a module are left out."""
    below = [*guard.get_child_managers()]
    if hasattr(guard, "get_key_value_managers"):  # of a dict
        below += [m for pair in guard.get_key_value_managers().values() for m in pair if m]
    for each in below:
        kind = each.get_type_of_guarded_value()
        if isinstance(kind, type):
            yield each.get_source(), kind
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            yield from _sources(each)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


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
