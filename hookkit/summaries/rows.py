"""The rows of a summary: what each module owns, in the order of execution, counted once.

`rows_of(tree, trace)` turns a model's tree and a run of it into plain values. Parameters count by
identity and their bytes by storage, in the row that comes first; a bare parameter beside child
modules is a row of its own, a parametrized module is one row with what its parametrizations hold.
Each row holds what its module owns itself, so that every column adds up to the totals; what is
below it too is in `row.total`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.modelinfo.info import share
from hookkit.modelinfo.tracer import Call, Trace
from hookkit.modelinfo.tree import Place, Tree, dtype_name, numel, storage_of
from hookkit.modules import can_run, join
from hookkit.nested import describe

NUMBERS = ("n_params", "n_trainable", "param_bytes", "buffer_bytes", "macs", "saved_bytes")


@dataclass(frozen=True)
class Totals:
    """Sums over a module and all below it, 0 where nothing ran; `macs` are None if not counted."""

    n_params: int = 0
    n_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    macs: int | None = 0
    saved_bytes: int = 0

    def times(self, n: int) -> Totals:
        """The sums of `n` that are equal to this one."""
        numbers = ((name, getattr(self, name)) for name in NUMBERS)
        return Totals(**{name: one and n * one for name, one in numbers})


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
        macs: multiply-accumulates of one forward that no module inside it accounts for; None if
            they were not counted.
        saved_bytes: memory of the tensors that autograd saves for the backward pass.
        trainable: True, False, the trainable share of its own parameters, None without any.
        tied: where its first tied parameter is; "" if it has none.
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
    macs: int | None = 0
    saved_bytes: int = 0
    trainable: bool | float | None = None
    tied: str = ""
    notes: tuple[str, ...] = ()
    dtype: str = ""
    extra: str = ""
    training: bool = True
    leaf: bool = True
    total: Totals = Totals()

    @property
    def own(self) -> Totals:
        """Its own share, as `Totals`."""
        return Totals(*(getattr(self, n) for n in NUMBERS))


Fields = dict[str, Any]  # of a Row, before its total is known


def rows_of(tree: Tree, trace: Trace | None) -> tuple[Row, ...]:
    """One row per place of a module and per bare parameter of `tree`, with what `trace` saw."""
    counted = _Counted()
    rows: list[Fields] = []
    for place in _in_order(tree, trace.calls if trace else {}):
        rows += _rows_at(place, trace, counted)
    totals = _totals(rows)
    if trace is not None and not trace.counted:
        rows = [{**row, "macs": None} for row in rows]
        totals = [replace(total, macs=None) for total in totals]
    return tuple(Row(**row, total=total) for row, total in zip(rows, totals, strict=True))


def _in_order(tree: Tree, calls: dict[str, Call]) -> list[Place]:
    """All places, parents first, siblings in the order in which something in them first ran.

    What did not run stays behind the sibling that it was defined after.
    """
    began: dict[str, int] = {}
    for place in reversed(tree.places):
        times = [t for p in place.inside if (t := began[p.name]) >= 0]
        call = calls.get(place.name)
        began[place.name] = min([*times, call.first] if call else times, default=-1)
    ordered, stack = [], [tree.root]
    while stack:
        place = stack.pop()
        ordered.append(place)
        at, keyed = -1, []
        for i, p in enumerate(place.inside):
            at = began[p.name] if began[p.name] >= 0 else at
            keyed.append((at, i, p))
        stack += [p for _, _, p in sorted(keyed, key=lambda k: k[:2])][::-1]
    return ordered


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

    def own(self, name: str, params: dict[str, Tensor], buffers: list[Tensor]) -> Fields:
        """The numbers of a row that holds `params` and `buffers`."""
        fields: Fields = dict.fromkeys(("n_params", "n_trainable", "param_bytes"), 0)
        fields["buffer_bytes"] = sum(map(self.bytes_of, buffers))
        if not params:
            return fields
        tied = ""
        for key, p in params.items():
            here = join(name, key)
            if (home := self.homes.setdefault(id(p), here)) != here:
                tied = tied or home
                continue
            fields["n_params"] += numel(p)
            fields["n_trainable"] += numel(p) * p.requires_grad
            fields["param_bytes"] += self.bytes_of(p)
        kinds = dict.fromkeys(map(dtype_name, params.values()))
        return {
            **fields,
            "trainable": _trainable(params.values()),
            "tied": tied,
            "dtype": ", ".join(kinds),
        }


def _trainable(params: Any) -> bool | float:
    """The trainable share of `params`, tied ones included; lazy ones have no elements yet."""
    sizes = [numel(p) for p in params]
    sizes = sizes if any(sizes) else [1] * len(sizes)
    state = share(sum(sizes), sum(n for n, p in zip(sizes, params, strict=True) if p.requires_grad))
    return state if isinstance(state, bool) else float(state)


def _rows_at(place: Place, trace: Trace | None, counted: _Counted) -> Iterator[Fields]:
    """The row of the module at `place`, then those of its bare parameters."""
    m, name = place.module, place.name
    kind = str(getattr(m, "original_name", type(m).__name__))  # of a scripted module the user's
    row: Fields = {"name": name, "kind": "module", "type": kind, "depth": place.depth}
    if not place.is_first:
        note = f"same as {place.first or 'the model itself'}"
        yield {**row, "kind": "again", "notes": (note,), "leaf": False}
        return
    bare = place.params if place.inside else {}
    row |= counted.own(name, {} if bare else place.params, place.buffers)
    row |= {"leaf": not place.inside, "training": m.training, "extra": _extra(m)}
    notes = [f"tied → {row['tied']}"] if row.get("tied") else []
    notes += _oddities(place)
    if trace is not None:
        row |= {"macs": trace.macs[name], "saved_bytes": trace.saved[name]}
        notes += _add_calls(row, place, trace)
    yield {**row, "notes": tuple(notes)}
    for key, p in bare.items():
        yield _parameter_row(place, key, p, counted)


def _parameter_row(place: Place, key: str, p: Tensor, counted: _Counted) -> Fields:
    own = counted.own(place.name, {key: p}, [])
    lazy = nn.parameter.is_lazy(p)
    return {
        "name": join(place.name, key),
        "kind": "parameter",
        "type": "Parameter",
        "depth": place.depth + 1,
        "outputs": () if lazy else (describe(p.detach()),),
        "shape": None if lazy else [int(n) for n in p.shape],
        "notes": (f"tied → {own['tied']}",) if own["tied"] else (),
        **own,
    }


def _extra(m: nn.Module) -> str:
    try:
        return m.extra_repr()
    except Exception:  # a user's extra_repr may expect a built model
        return ""


def _add_calls(row: Fields, place: Place, trace: Trace) -> list[str]:
    """Adds to `row` what its calls showed; returns notes about how often it was called."""
    call = trace.calls.get(place.name)
    if call is None:
        runs = can_run(place.module) and not isinstance(place.module, torch.jit.ScriptModule)
        row["calls"] = 0 if runs else None
        return ["not called"] if runs and place.opened and not trace.failed else []
    row |= {
        "inputs": call.inputs,
        "outputs": tuple(call.outputs),
        "shape": call.shapes[0] if call.shapes else None,
        "in_shape": call.in_shape,
        "calls": call.n,
        "dtype": row.get("dtype") or ", ".join(call.dtypes),
    }
    return [f"called {call.n}×"] if call.n > 1 else []


def _oddities(place: Place) -> list[str]:
    """Notes on an unusual way of holding weights."""
    notes = []
    if place.parametrized:
        notes.append("parametrized " + ", ".join(place.parametrized))
    if any(nn.parameter.is_lazy(p) for p in place.params.values()):
        notes.append("lazy: no shape yet")
    return notes


def _totals(rows: list[Fields]) -> list[Totals]:
    """The sums of each row and of all rows below it."""
    sums = [[row.get(n, 0) for n in NUMBERS] for row in rows]
    above: list[int] = []
    parents: list[int] = []
    for i, row in enumerate(rows):
        del above[row["depth"] :]
        parents.append(above[-1] if above else -1)
        above.append(i)
    for i in range(len(rows) - 1, 0, -1):
        sums[parents[i]] = [*map(add, sums[parents[i]], sums[i])]
    return [Totals(*numbers) for numbers in sums]
