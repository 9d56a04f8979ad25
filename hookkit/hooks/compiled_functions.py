"""Which modules the functions run that `torch.compile` has compiled.

A compiled function keeps no list of them. But each graph that the compiler made is guarded by a
tree of conditions on what the function reads, and each node of it has a source, such as
`G['model']` or `L['self'].model`: a path from a global or local variable. From there the path is
walked again: to a global's value, to a closure's, or, for an argument, from each object of its
class, since the graph serves any of them.

All of this is private to PyTorch (2.11 to 2.13 have it). It serves a warning; where a part of it
is gone, a hook that a compiled function ignores is not warned of.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from hookkit.nested import pick

_TORCH = str(Path(torch.__file__).parent)
_SOURCE = re.compile(r"([GL])\['([^']+)'\](.*)")


def run_by_functions(objects: list[Any]) -> Iterator[tuple[str, nn.Module]]:
    """`(which function, in words, module)` of what compiled functions run, the outermost modules.

    Args:
        objects: all there are, as `gc.get_objects()` gives them.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    convert: Any = sys.modules.get("torch._dynamo.convert_frame")
    try:
        entries = frames._debug_get_cache_entry_list
        # by id: code objects of equal functions are equal, and have graphs of their own
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
    """A model's forward: found by its model, while other models of its class are not compiled."""
    return code.co_name == "forward" or code.co_filename.startswith(_TORCH)


def _modules_of(
    root: Any, functions: list[FunctionType], code: CodeType, objects: list[Any]
) -> Iterator[nn.Module]:
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
    """The source and the class of each guarded value, but not of what is inside a module."""
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
