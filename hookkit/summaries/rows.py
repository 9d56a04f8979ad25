"""The rows of a summary: what each module owns, in the order of execution, counted once.

`rows_of(model, trace)` walks the module tree once. Parameters count by identity and their bytes by
storage, at the row that comes first; a bare parameter beside child modules is a row of its own, a
parametrized module is one row with what its parametrizations hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.modelinfo.info import numel, share
from hookkit.modelinfo.sandbox import is_sharded
from hookkit.modelinfo.saved_tensors import storage_of
from hookkit.modelinfo.tracing import Call, Trace
from hookkit.modules import can_run, children, join, opens, submodules, unwrap
from hookkit.nested import describe
from hookkit.summaries.result import Row


@dataclass
class _Place:
    """One place of a module in the tree; `again` names the first place of a shared module."""

    name: str
    module: nn.Module
    depth: int
    again: str | None
    inside: list[_Place]
    opened: bool  # False below modules that use their children without calling them
    first: float = -1.0


def _tree(model: nn.Module) -> _Place:
    """The places below `model`; a shared module is gone through at its first place only."""
    root = _Place("", unwrap(model), 0, None, [], True)
    seen = {id(root.module): ""}
    stack = [root]
    while stack:
        at = stack.pop()
        for key, child in children(at.module):
            name = join(at.name, key)
            again = seen.get(id(child))
            opened = at.opened and opens(at.module)
            place = _Place(name, child, at.depth + 1, again, [], opened)
            at.inside.append(place)
            seen.setdefault(id(child), name)
        stack += [p for p in at.inside if p.again is None][::-1]
    return root


def _in_order(root: _Place, calls: dict[str, Call]) -> list[_Place]:
    """All places, parents first, siblings in the order in which something in them first ran.

    What did not run stays behind the sibling that it was defined after.
    """
    places = [root]
    for place in places:
        places += place.inside
    for place in reversed(places):
        ran = [p.first for p in place.inside if p.first >= 0]
        call = calls.get(place.name)
        place.first = min([*ran, *([call.first] if call else [])], default=-1.0)
    ordered, stack = [], [root]
    while stack:
        place = stack.pop()
        ordered.append(place)
        at, keyed = -1.0, []
        for i, p in enumerate(place.inside):
            at = p.first if p.first >= 0 else at
            keyed.append((at, i, p))
        stack += [p for _, _, p in sorted(keyed, key=lambda k: k[:2])][::-1]
    return ordered


class _Ledger:
    """Which parameters, buffers and storages have been counted, and where."""

    def __init__(self) -> None:
        self.homes: dict[int, str] = {}
        self.storages: set[Any] = set()
        self.keep: list[Tensor] = []  # ids stay theirs while they are alive

    def bytes_of(self, t: Tensor) -> int:
        key, size = storage_of(t)
        new = key not in self.storages
        self.storages.add(key)
        return size if new else 0

    def enter(
        self, name: str, params: list[tuple[str, Tensor]], buffers: list[Tensor]
    ) -> dict[str, Any]:
        """The numbers of a row that holds `params` and `buffers`."""
        n = trainable = param_bytes = declared = declared_trainable = 0
        tied = ""
        for key, p in params:
            size = numel(p)
            declared += size
            declared_trainable += size * p.requires_grad
            home = self.homes.setdefault(id(p), join(name, key))
            if home != join(name, key):
                tied = tied or home
                continue
            self.keep.append(p)
            n, trainable = n + size, trainable + size * p.requires_grad
            param_bytes += self.bytes_of(p)
        buffer_bytes = sum(self.bytes_of(b) for b in buffers)
        self.keep += buffers
        if not declared:  # lazy ones have no elements yet
            declared, declared_trainable = len(params), sum(p.requires_grad for _, p in params)
        state = share(declared, declared_trainable) if params else None
        return {
            "n_params": n,
            "n_trainable": trainable,
            "param_bytes": param_bytes,
            "buffer_bytes": buffer_bytes,
            "trainable": state if state is None or isinstance(state, bool) else float(state),
            "tied": tied,
            "dtype": _dtypes(p for _, p in params),
        }


def _dtypes(tensors: Any) -> str:
    return ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))


def _held(m: nn.Module) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
    """Parameters and buffers of `m` itself, with those of its parametrizations."""
    params: dict[str, Tensor] = dict(m.named_parameters(recurse=False))
    buffers = list(m.buffers(recurse=False))
    rule = submodules(m).get("parametrizations")
    if isinstance(rule, nn.ModuleDict):
        params |= {f"parametrizations.{k}": p for k, p in rule.named_parameters()}
        buffers += list(rule.buffers())
    return list(params.items()), buffers


def rows_of(model: nn.Module, trace: Trace | None) -> tuple[Row, ...]:
    """One row per place of a module and per bare parameter of `model`, with what `trace` saw."""
    calls = trace.calls if trace else {}
    ledger = _Ledger()
    rows: list[Row] = []
    for place in _in_order(_tree(model), calls):
        rows += _rows_at(place, trace, ledger)
    return _with_totals(rows)


def _rows_at(place: _Place, trace: Trace | None, ledger: _Ledger) -> Iterator[Row]:
    m, name = place.module, place.name
    kind = type_name(m)
    if place.again is not None:
        note = f"same as {place.again or 'the model itself'}"
        yield Row(name, "again", kind, place.depth, notes=(note,), leaf=False)
        return
    params, buffers = _held(m)
    bare = params if place.inside else []
    row = Row(name, "module", kind, place.depth, leaf=not place.inside, training=m.training)
    own = ledger.enter(name, [] if bare else params, buffers)
    row = replace(row, **own, extra=_extra(m))
    yield _ran(row, place, trace)
    for key, p in bare:
        entry = ledger.enter(name, [(key, p)], [])
        notes = (f"tied → {entry['tied']}",) if entry["tied"] else ()
        lazy = nn.parameter.is_lazy(p)
        shape = None if lazy else [int(n) for n in p.shape]
        text = () if lazy else (describe(p.detach()),)
        yield Row(join(name, key), "parameter", "Parameter", place.depth + 1, outputs=text,
                  shape=shape, notes=notes, **entry)  # fmt: skip


def type_name(m: nn.Module) -> str:
    """The class a user wrote, also of scripted modules and of those that `fully_shard` renamed."""
    name = str(getattr(m, "original_name", type(m).__name__))
    return name.removeprefix("FSDP") if is_sharded(m) else name


def _extra(m: nn.Module) -> str:
    try:
        return m.extra_repr()
    except Exception:  # a user's extra_repr may expect a built model
        return ""


def _ran(row: Row, place: _Place, trace: Trace | None) -> Row:
    """`row` with what the run saw of it, and its notes."""
    notes = [f"tied → {row.tied}"] if row.tied else []
    notes += _oddities(place.module)
    if trace is None:
        return replace(row, notes=tuple(notes))
    call = trace.calls.get(row.name)
    callable_ = can_run(place.module) and not isinstance(place.module, torch.jit.ScriptModule)
    if call is None:
        if callable_ and place.opened and not trace.failed:
            notes.append("not called")
        return replace(row, calls=0 if callable_ else None, notes=tuple(notes),
                       macs=trace.macs[row.name], saved_bytes=trace.saved[row.name])  # fmt: skip
    if call.n > 1:
        notes.append(f"called {call.n}×")
    return replace(
        row,
        inputs=call.inputs,
        outputs=tuple(call.outputs),
        shape=call.shapes[0] if call.shapes else None,
        in_shape=call.in_shape,
        calls=call.n,
        macs=trace.macs[row.name],
        saved_bytes=trace.saved[row.name],
        notes=tuple(notes),
        dtype=row.dtype or ", ".join(call.dtypes),
    )


def _oddities(m: nn.Module) -> list[str]:
    """What is worth a word about how `m` holds its weights."""
    notes = []
    rule = submodules(m).get("parametrizations")
    if isinstance(rule, nn.ModuleDict):
        notes.append("parametrized " + ", ".join(rule))
    if any(nn.parameter.is_lazy(p) for p in m.parameters(recurse=False)):
        notes.append("lazy: no shape yet")
    if callable(packed := getattr(type(m), "_weight_bias", None)):
        try:
            weight, bias = packed(m)
            n = weight.numel() + (0 if bias is None else bias.numel())
            notes.append(f"packed {n:,} {str(weight.dtype).removeprefix('torch.')}")
        except Exception:  # it says nothing about itself
            notes.append("packed")
    return notes


def _with_totals(rows: list[Row]) -> tuple[Row, ...]:
    totals = [row.own for row in rows]
    above: list[int] = []
    parents = []
    for i, row in enumerate(rows):
        del above[row.depth :]
        parents.append(above[-1] if above else None)
        above.append(i)
    for i in range(len(rows) - 1, 0, -1):
        if (parent := parents[i]) is not None:
            totals[parent] = totals[parent] + totals[i]
    return tuple(replace(row, total=t) for row, t in zip(rows, totals, strict=True))
