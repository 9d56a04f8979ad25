"""The rows of a summary: what each module owns, in the order of execution, counted once.

Parameters count by identity and their bytes by storage, in the row that comes first; a bare
parameter beside child modules is a row of its own, a parametrized module is one row with what its
parametrizations hold. Each row holds what its module owns itself, so that every column adds up to
the totals; what is below it too is in `row.total`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookkit._core.modules import can_run, join
from hookkit._core.pytree import describe
from hookkit.inspection.tracer import Trace
from hookkit.inspection.tree import Place, Tree, dtype_name, numel, storage_of


class Totals(NamedTuple):
    """Sums over a module and all below it, 0 where nothing ran."""

    n_params: int = 0
    n_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int = 0
    saved_bytes: int = 0


NUMBERS = Totals._fields
_NONE = Totals()


def share(n: int, n_trainable: int) -> bool | float:
    """Return how much of `n` parameters is trainable: True, False, or a fraction in between."""
    return n_trainable > 0 if n_trainable in (0, n) else n_trainable / n


@dataclass(frozen=True)
class Row:
    """One module, bare parameter, or further place of a shared module.

    Attributes:
        name: qualified, without wrappers; "" for the model itself.
        kind: "module", "parameter" (held beside child modules) or "again" (shared, see `notes`).
        depth: 0 for the model.
        outputs: the different outputs of its calls as text, `4×10` or `(4×10, {'h': 2×3})`.
        shape, in_shape: of the first call as lists in the containers they came in; None if unknown.
        calls: times it ran; None where nothing was run or it has no forward of its own.
        n_params .. saved_bytes: its own share; parameters and memory count where they come first.
        macs: multiply-accumulates of one forward that no module inside it accounts for.
        saved_bytes: memory of the tensors that autograd saves for the backward pass.
        trainable: True, False, the trainable share of its own parameters, None without any.
        leaf: it has no modules inside.
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
    n_params: int = 0
    n_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int = 0
    saved_bytes: int = 0
    trainable: bool | float | None = None
    notes: tuple[str, ...] = ()
    dtype: str = ""
    extra: str = ""
    leaf: bool = True
    total: Totals = _NONE

    @property
    def own(self) -> Totals:
        """Its own share, as `Totals`."""
        return Totals(*(getattr(self, n) for n in NUMBERS))


def rows_of(tree: Tree, trace: Trace | None) -> tuple[Row, ...]:
    """One row per place of a module and per bare parameter of `tree`, with what `trace` saw."""
    counted = _Counted()
    rows = [row for place in _in_order(tree, trace) for row in _rows_at(place, trace, counted)]
    sums, above, parents = [row.own for row in rows], list[int](), list[int]()
    for i, row in enumerate(rows):
        del above[row.depth :]
        parents.append(above[-1] if above else -1)
        above.append(i)
    for i in range(len(rows) - 1, 0, -1):
        sums[parents[i]] = Totals(*map(sum, zip(sums[parents[i]], sums[i], strict=True)))
    return tuple(replace(row, total=total) for row, total in zip(rows, sums, strict=True))


def _in_order(tree: Tree, trace: Trace | None) -> Iterator[Place]:
    """All places, parents first, siblings in the order in which something in them first ran.

    What did not run stays behind the sibling that it was defined after.
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
    """The parameters and storages that have been counted, and in which row."""

    def __init__(self) -> None:
        self.homes: dict[int, str] = {}
        self.storages: set[Any] = set()

    def bytes_of(self, t: Tensor) -> int:
        """Bytes behind `t` that no tensor before it has."""
        key, size = storage_of(t)
        new = key not in self.storages
        self.storages.add(key)
        return size if new else 0

    def of(self, name: str, params: dict[str, Tensor], buffers: list[Tensor]) -> dict[str, Any]:
        """The numbers of what `name` holds, as a row has them, and notes on what is odd."""
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
        sizes = [(numel(p), p.requires_grad) for p in params.values()]
        if not any(n for n, _ in sizes):
            sizes = [(1, trains) for _, trains in sizes]  # lazy ones have no elements yet
        free = share(sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains))
        return {
            "n_params": sum(map(numel, new)),
            "n_trainable": sum(numel(p) for p in new if p.requires_grad),
            "param_bytes": sum(map(self.bytes_of, new)),
            "buffer_bytes": sum(map(self.bytes_of, buffers)),
            "trainable": free if params else None,
            "dtype": ", ".join(dict.fromkeys(map(dtype_name, params.values()))),
            "notes": tuple(notes),
        }


def _rows_at(place: Place, trace: Trace | None, counted: _Counted) -> Iterator[Row]:
    """The row of the module at `place`, then those of its bare parameters."""
    m, name = place.module, place.name
    kind = str(getattr(m, "original_name", type(m).__name__))  # of a scripted module the user's
    if not place.is_first:
        note = f"same as {place.first or 'the model itself'}"
        yield Row(name, "again", kind, place.depth, notes=(note,), leaf=False)
        return
    bare = place.params if place.inside else {}
    held = counted.of(name, {} if bare else place.params, place.buffers)
    called = _of_calls(place, trace) if trace is not None else {}
    computed = ("parametrized " + ", ".join(place.parametrized),) if place.parametrized else ()
    held["dtype"] = held["dtype"] or called.get("dtype", "")
    held["notes"] += (*computed, *called.get("notes", ()))
    about = {**called, **held, "extra": _extra(m), "leaf": not place.inside}
    yield Row(name, "module", kind, place.depth, **about)
    for key, p in bare.items():
        here, lazy = join(name, key), nn.parameter.is_lazy(p)
        shape = {} if lazy else {"shape": [int(n) for n in p.shape]}
        about = {**shape, "outputs": () if lazy else (describe(p.detach()),)}
        about |= counted.of(name, {key: p}, [])
        yield Row(here, "parameter", "Parameter", place.depth + 1, **about)


def _extra(m: nn.Module) -> str:
    try:
        return m.extra_repr()
    except Exception:  # a user's extra_repr may expect a built model
        return ""


def _of_calls(place: Place, trace: Trace) -> dict[str, Any]:
    """What the calls of a module showed, as a row has it, and a note on how many there were."""
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
        "shape": call.shapes[0] if call.shapes else None,
        "in_shape": call.in_shape,
        "calls": call.n,
        "dtype": ", ".join(call.dtypes),
        "notes": (f"called {call.n}×",) if call.n > 1 else (),
    }
