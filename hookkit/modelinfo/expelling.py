"""Fake tensors that a forward put outside of the model are taken out again.

A mask behind `lru_cache`, a global dict, an attribute of the class: a run on fake tensors would
leave tensors without values there, and the next real forward would meet them. What the run made is
watched by weak references; normally all of it dies with the run and this costs nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_LEVELS = 6  # tensor, tuple, link of the cache, its table, the cache


def class_attributes(model: nn.Module) -> dict[type, dict[str, Any]]:
    """What the classes of the model's modules hold, below `nn.Module`."""
    classes = {c for m in model.modules() for c in type(m).__mro__ if issubclass(c, nn.Module)}
    return {c: dict(vars(c)) for c in classes if not c.__module__.startswith("torch.")}


def expel(
    made: Iterable[weakref.ref[Tensor]], model: nn.Module, before: dict[type, dict[str, Any]]
) -> None:
    """Takes what is left of `made` out of caches and containers; not out of `model`, our copy."""
    for kind, held in before.items():
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
        level = [o for o in above if not _taken_out(o, lost) and _leads_on(o)]
        seen.add(id(level))


def _taken_out(holder: Any, lost: set[int]) -> bool:
    """True if `holder` could be freed of what is lost."""
    if callable(clear := getattr(holder, "cache_clear", None)):
        clear()
    elif type(holder) is dict and "__module__" not in holder and "__name__" not in holder:
        for key in [k for k, v in list(holder.items()) if id(v) in lost]:
            del holder[key]
        return False  # it may be the table of a cache
    elif type(holder) is list:
        holder[:] = [v for v in holder if id(v) not in lost]
    else:
        return False
    return True


def _leads_on(holder: Any) -> bool:
    return isinstance(holder, tuple | dict) or "lru_list_elem" in type(holder).__name__
