"""Fake tensors that a forward put outside of the model are taken out again.

A mask behind `lru_cache`, a global dict, an attribute of the class: a run on fake tensors would
leave tensors without values there, and the next real forward would meet them. What the run made is
watched by weak references; normally all of it dies with the run and this costs nothing.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import Tensor, nn

from hookkit.modelinfo import hooked

_LEVELS = 6  # tensor, tuple, link of the cache, its table, the cache


@dataclass
class Before:
    """What a run on fake tensors may overwrite outside of the model, as it was before."""

    classes: dict[type, dict[str, Any]]
    holders: dict[int, tuple[Any, Any]]  # by id: a list, dict or cell, and its content


def remember(model: nn.Module) -> Before:
    """What the classes of the model's modules hold, and what the user's hooks on it do."""
    classes = {c for m in model.modules() for c in type(m).__mro__ if issubclass(c, nn.Module)}
    held = {c: dict(vars(c)) for c in classes if not c.__module__.startswith("torch.")}
    holders: dict[int, tuple[Any, Any]] = {}
    for place in hooked.places_of(model):
        if id(place) not in holders:
            holders[id(place)] = place, _content(place)
    return Before(held, holders)


def _content(place: Any) -> Any:
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:  # not bound yet
            return None
    return copy.copy(place)


def expel(made: Iterable[weakref.ref[Tensor]], model: nn.Module, before: Before) -> None:
    """Takes what is left of `made` out of caches and containers; not out of `model`, our copy.

    Where it took the place of something that is remembered, that comes back.
    """
    for kind, held in before.classes.items():
        for key in [k for k, v in vars(kind).items() if held.get(k) is not v]:
            if key in held:
                setattr(kind, key, held[key])
            elif isinstance(vars(kind)[key], Tensor):
                delattr(kind, key)
    its = {id(t) for m in model.modules() for t in (*m.parameters(False), *m.buffers(False))}
    left = [t for ref in made if (t := ref()) is not None and id(t) not in its]
    ours = {id(vars(m)) for m in model.modules()}
    ours |= {id(d) for m in model.modules() for d in (m._parameters, m._buffers)}
    ours |= {id(left), id(ours)}
    seen = set(ours)
    level: list[Any] = left
    for _ in range(_LEVELS):
        above = [o for o in gc.get_referrers(*level) if id(o) not in seen] if level else []
        seen |= {id(o) for o in above} | {id(above)}
        lost = {id(o) for o in level}
        level = [o for o in above if not _taken_out(o, lost, before) and _leads_on(o)]
        seen.add(id(level))


def _taken_out(holder: Any, lost: set[int], before: Before) -> bool:
    """True if `holder` could be freed of what is lost."""
    _, old = before.holders.get(id(holder), (None, None))
    if callable(clear := getattr(holder, "cache_clear", None)):
        clear()
    elif type(holder) is dict and (old is not None or not _is_namespace(holder)):
        for key in [k for k, v in list(holder.items()) if id(v) in lost]:
            if old is not None and key in old:
                holder[key] = old[key]
            else:
                del holder[key]
        return False  # it may be the table of a cache
    elif type(holder) is list:
        n = len(old or ())
        kept = [(i, v) for i, v in enumerate(holder) if id(v) not in lost or i < n]
        holder[:] = [old[i] if id(v) in lost else v for i, v in kept]
    elif isinstance(holder, CellType) and id(holder) in before.holders:
        holder.cell_contents = old
    else:
        return False
    return True


def _is_namespace(holder: dict[Any, Any]) -> bool:
    return "__module__" in holder or "__name__" in holder


def _leads_on(holder: Any) -> bool:
    return isinstance(holder, tuple | dict) or "lru_list_elem" in type(holder).__name__
