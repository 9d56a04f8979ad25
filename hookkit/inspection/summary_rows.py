"""Make the rows of a summary: the modules in the order of execution, each tensor counted once.

A parameter counts by identity, and its bytes by storage, in the first row that has it. A bare
parameter beside child modules is a row of its own; a parametrized module is one row, with the
tensors of its parametrizations. The numbers of a row are its module's own, so that every column
adds up to the totals; `row.total` adds all rows below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core.modules import can_run, join
from hookkit._core.pytree import describe
from hookkit.inspection.tracer import Trace
from hookkit.inspection.tree import Place, Tree, dtype_name, numel, storage_of


@dataclass(frozen=True)
class Totals:
    """Holds the numbers of a module, or their sums over several; 0 where nothing ran.

    Attributes:
        n_params: distinct parameters, in elements.
        n_trainable: distinct parameters with `requires_grad`, in elements.
        param_bytes, buffer_bytes: bytes of their distinct storages.
        macs: multiply-accumulates of one forward.
        saved_bytes: bytes of the tensors that autograd saves for the backward pass of one forward.
    """

    n_params: int = 0
    n_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int = 0
    saved_bytes: int = 0


NUMBERS = tuple(f.name for f in fields(Totals))


def share(n: int, n_trainable: int) -> bool | float:
    """Return how much of `n` parameters is trainable: True, False, or a fraction in between."""
    return n_trainable > 0 if n_trainable in (0, n) else n_trainable / n


@dataclass(frozen=True, kw_only=True)
class Row(Totals):
    """Describes one module, bare parameter, or further place of a shared module.

    The numbers of `Totals` are its own share: parameters and memory count in the first row that has
    them, multiply-accumulates and saved bytes in the row of the innermost running module.

    Attributes:
        name: qualified, without wrappers; "" for the model itself.
        kind: "module", "parameter" (held beside child modules) or "again" (shared, see `notes`).
        depth: 0 for the model.
        outputs: the different outputs of its calls as text, `4×10` or `(4×10, {'h': 2×3})`.
        shape, in_shape: of the first call as lists in the containers they came in; None if unknown.
        calls: how often it ran; None if nothing was run, or if it has no forward of its own.
        trainable: True, False, the trainable share of its own parameters, None without any.
        leaf: whether it has no modules inside.
        total: its own share and that of all rows below it.
    """

    name: str
    kind: str
    type: str
    depth: int
    inputs: str = ""
    outputs: tuple[str, ...] = ()
    shape: Any = None
    in_shape: Any = None
    calls: int | None = None
    trainable: bool | float | None = None
    notes: tuple[str, ...] = ()
    dtype: str = ""
    extra: str = ""
    leaf: bool = True
    total: Totals = Totals()


def rows_of(tree: Tree, trace: Trace | None) -> tuple[Row, ...]:
    """Return a row for each place of a module and each bare parameter of `tree`.

    `trace` is the record of a run; None if nothing was run.
    """
    counted = _Counted()
    found = [row for place in _in_order(tree, trace) for row in _rows_at(place, trace, counted)]
    sums = [[row.get(n, 0) for n in NUMBERS] for row in found]
    above, parents = list[int](), list[int]()
    for i, row in enumerate(found):
        del above[row["depth"] :]
        parents.append(above[-1] if above else -1)
        above.append(i)
    for i in range(len(found) - 1, 0, -1):
        sums[parents[i]] = [a + b for a, b in zip(sums[parents[i]], sums[i], strict=True)]
    return tuple(Row(**row, total=Totals(*n)) for row, n in zip(found, sums, strict=True))


def _in_order(tree: Tree, trace: Trace | None) -> Iterator[Place]:
    """Yield all places, parents first, siblings in the order in which they, or their parts, ran.

    A place that did not run stays behind the sibling that it was defined after.
    """
    calls = trace.calls if trace else {}
    began: dict[str, int] = {}
    for place in reversed(tree.places):
        times = [began[p.name] for p in place.inside if p.name in began]
        if times := times + [calls[n].first for n in (place.name,) if n in calls]:
            began[place.name] = min(times)
    stack = [tree.root]
    while stack:
        place = stack.pop()
        yield place
        at, keyed = -1, []
        for p in place.inside:
            at = began.get(p.name, at)
            keyed.append((at, p))
        stack += [p for _, p in sorted(keyed, key=lambda k: k[0])][::-1]


class _Counted:
    """Remembers the parameters and storages that have been counted, and in which row."""

    def __init__(self) -> None:
        self.homes: dict[int, str] = {}
        self.storages: set[Any] = set()

    def bytes_of(self, t: Tensor) -> int:
        """Return the bytes of the storage of `t`; 0 if that storage was counted before."""
        key, size = storage_of(t)
        new = key not in self.storages
        self.storages.add(key)
        return size if new else 0

    def of(self, name: str, params: dict[str, Tensor], buffers: list[Tensor]) -> dict[str, Any]:
        """Count the tensors that `name` holds; return the fields of its row."""
        new, notes = [], list[str]()
        for key, p in params.items():
            here = join(name, key)
            home = self.homes.setdefault(id(p), here)
            if home == here:
                new.append(p)
            elif not notes:
                notes.append(f"tied → {home}")
        if any(map(nn.parameter.is_lazy, params.values())):
            notes.append("lazy: no shape yet")
        free = [p for p in params.values() if p.requires_grad]
        n = sum(map(numel, params.values()))  # 0 of lazy ones
        return {
            "n_params": sum(map(numel, new)),
            "n_trainable": sum(numel(p) for p in new if p.requires_grad),
            "param_bytes": sum(map(self.bytes_of, new)),
            "buffer_bytes": sum(map(self.bytes_of, buffers)),
            "trainable": (share(n, sum(map(numel, free))) if n else bool(free)) if params else None,
            "dtype": ", ".join(dict.fromkeys(map(dtype_name, params.values()))),
            "notes": tuple(notes),
        }


def _rows_at(place: Place, trace: Trace | None, counted: _Counted) -> Iterator[dict[str, Any]]:
    """Yield the fields of the row of the module at `place`, then those of its bare parameters."""
    m, name = place.module, place.name
    about: dict[str, Any] = {"name": name, "kind": "module", "depth": place.depth}
    about["type"] = str(getattr(m, "original_name", type(m).__name__))  # a scripted module's class
    if not place.is_first:
        note = f"same as {place.first or 'the model itself'}"
        yield {**about, "kind": "again", "notes": (note,), "leaf": False}
        return
    bare = place.params if place.inside else {}
    held = counted.of(name, {} if bare else place.params, place.buffers)
    called = _of_calls(place, trace) if trace is not None else {}
    computed = ("parametrized " + ", ".join(place.parametrized),) if place.parametrized else ()
    held["dtype"] = held["dtype"] or called.get("dtype", "")
    held["notes"] += (*computed, *called.get("notes", ()))
    try:
        extra = m.extra_repr()
    except Exception:  # a user's extra_repr may expect a built model
        extra = ""
    yield {**about, **called, **held, "extra": extra, "leaf": not place.inside}
    for key, p in bare.items():
        about = {"name": join(name, key), "kind": "parameter", "type": "Parameter"}
        if not nn.parameter.is_lazy(p):
            about |= {"shape": [int(n) for n in p.shape], "outputs": (describe(p.detach()),)}
        yield {**about, "depth": place.depth + 1, **counted.of(name, {key: p}, [])}


def _of_calls(place: Place, trace: Trace) -> dict[str, Any]:
    """Return the fields of a module's row that its calls determine."""
    name, call = place.name, trace.calls.get(place.name)
    counts = {"macs": trace.macs[name], "saved_bytes": trace.saved[name]}
    if call is None:
        if not can_run(place.module) or isinstance(place.module, torch.jit.ScriptModule):
            return counts
        missed = place.opened and not trace.failed
        return {**counts, "calls": 0, "notes": ("not called",) if missed else ()}
    return {
        **counts,
        "inputs": call.inputs,
        "outputs": tuple(call.outputs),
        "shape": call.shape,
        "in_shape": call.in_shape,
        "calls": call.n,
        "dtype": ", ".join(call.dtypes),
        "notes": (f"called {call.n}×",) if call.n > 1 else (),
    }
