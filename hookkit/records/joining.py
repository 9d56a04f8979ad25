"""Two records as one, and where a later run begins: what `run + later` is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.errors import OptionError
from hookkit.records.record import AXES, Record
from hookkit.records.values import Floats, same

if TYPE_CHECKING:
    from hookkit.records.run import Run

Shift = tuple[int, int, int]
"""By how many steps, epochs and batches what comes later is counted on."""

SLOTS = {"activation": "activations", "gradient": "gradients", "param": "params"}
"""Kind of a record → its field of a Run."""

_OPTIONS = ("eps", "window")
_AS_IT_BEGAN = ("constant", "first_variation", "given_rms", "given_max", "given_variation")


def joined_fields(run: Run, later: Run) -> dict[str, Any]:
    """The fields of `run + later`, as `Run.__add__` says."""
    n, shift = _seam(run, later)
    fields: dict[str, Any] = {}
    for slot in SLOTS.values():
        early, late = _before(getattr(run, slot), n), _moved(getattr(later, slot), shift)
        fields[slot] = joined_record(early, late)
    for name in ("losses", "grad_norms"):
        fields[name] = _joined_series(getattr(run, name), getattr(later, name), n, shift[0])
    fields["valid"] = [row for row in run.valid if row.get("step", -1) < n]
    for row in later.valid:
        by = {key: shift[i] for i, key in enumerate(("step", "epoch")) if key in row}
        fields["valid"].append({**row, **{key: row[key] + k for key, k in by.items()}})
    past = [i for i in run.incidents if i.step < n]
    fields["incidents"] = (*past, *(_moved_incident(i, shift) for i in later.incidents))
    known = {k: x for k, x in later.info.items() if x is not None and x != []}
    fields["info"] = {**later.info, **run.info, **known}
    if "train_iter" in fields["info"] and shift[2]:
        fields["info"]["train_iter"] = shift[2] + _n_batches(later)
    return fields


def _seam(run: Run, later: Run) -> tuple[int, Shift]:
    """The step before which `run` counts, and by how much `later` is counted on."""
    n, batches = _first_step(later), _n_batches(run)
    if not n:
        epochs = [row.get("epoch", 0) for row in later.valid[:1]]
        epochs += [int(r.epochs[0]) for r in later.records if len(r)]
        # a fit with `start_epoch` numbers its epochs as the whole training does, but not its steps
        return run.n_steps, (run.n_steps, 0 if min(epochs, default=0) else run.n_epochs, batches)
    batches = round(batches * min(1.0, n / max(run.n_steps, 1)))  # those of its first n steps
    begin = min((int(r.iters[0]) for r in later.records if len(r)), default=batches)
    return n, (0, 0, batches if begin < batches else 0)


def joined_record(a: Record | None, b: Record | None) -> Record | None:
    """The columns of `a`, then those of `b`; NaN where one has not a row or a statistic.

    Raises:
        OptionError: they were recorded with other options.
    """
    if a is None or b is None:
        return b if a is None else a
    ours, theirs = ({"bins": r.edges} | {k: r.meta.get(k) for k in _OPTIONS} for r in (a, b))
    for name, x in ours.items():
        if x is not None and theirs[name] is not None and not same(x, theirs[name]):
            raise OptionError(
                f"run + later: their {a.kind}s were recorded with another {name}. Record both with "
                f"the same options, or read them one by one."
            )
    types = dict(zip((*a.names, *b.names), (*a.types, *b.types), strict=True))
    names, edges = list(types), a.edges if a.edges is not None else b.edges
    axes: Any = {axis: np.concatenate([getattr(r, axis) for r in (a, b)]) for axis in AXES}
    values = {
        name: np.concatenate([_placed(r, names, r.values.get(name), (), np.nan) for r in (a, b)], 1)
        for name in dict.fromkeys((*a.values, *b.values))
    }
    hist = None
    if edges is not None:
        bins = (len(edges) - 1,)
        hist = np.concatenate([_placed(r, names, r.hist, bins, 0) for r in (a, b)], 2)
    fields: Any = {**axes, "values": values, "hist": hist, "edges": edges}
    meta = _joined_meta(a, b, names)
    return Record(a.kind, tuple(names), tuple(types.values()), **fields, meta=meta)


def _placed(record: Record, names: list[str], table: Any, shape: Any, absent: float) -> Any:
    """(names, *shape, columns): the rows of `table` in the places of their names, else `absent`."""
    whole = np.full((len(names), *shape, len(record)), absent, np.int64 if shape else np.float64)
    if table is not None:
        whole[[names.index(name) for name in record.names]] = table
    return whole


def _joined_meta(a: Record, b: Record, names: list[str]) -> dict[str, Any]:
    """Facts of the later record; of its absent rows, and of how a training began, of the former."""
    meta: dict[str, Any] = {**a.meta, **b.meta}
    for key, x in meta.items():
        both = a.meta.get(key), b.meta.get(key)
        first, last = both[::-1] if key in _AS_IT_BEGAN else both
        if isinstance(x, dict):
            meta[key] = {**(first or {}), **(last or {})}
        elif all(_is_by_row(r, key) for r in (a, b)):
            rows = [dict(zip(r.names, r.meta[key], strict=True)) for r in (a, b)]
            first, last = rows[::-1] if key in _AS_IT_BEGAN else rows
            meta[key] = [last.get(name, first.get(name)) for name in names]
            if key == "moved":  # in either
                meta[key] = [any(r.get(name, False) for r in rows) for name in names]
        else:
            meta[key] = first if last is None else last
    return meta


def _is_by_row(record: Record, key: str) -> bool:
    value = record.meta.get(key)
    return isinstance(value, list) and len(value) == len(record.names)


def _moved(record: Record | None, shift: Shift) -> Record | None:
    """The record with its steps, epochs and batches counted on."""
    if record is None:
        return None
    axes = dict(zip(AXES, shift, strict=False))
    return replace(record, **{axis: getattr(record, axis) + by for axis, by in axes.items()})


def _moved_incident(i: Any, shift: Shift) -> Any:
    steps, epochs, batches = shift
    at = {"step": i.step + steps, "epoch": i.epoch + epochs, "iter": i.iter + batches}
    return replace(i, **at, steps=i.steps + steps)


def _before(record: Record | None, step: int) -> Record | None:
    """The columns of `record` that begin before `step`."""
    if record is None:
        return None
    early = record.steps < step
    return replace(
        record,
        **{axis: getattr(record, axis)[early] for axis in AXES},
        values={name: table[:, early] for name, table in record.values.items()},
        hist=None if record.hist is None else record.hist[..., early],
    )


def _first_step(run: Run) -> int:
    """The first step that something is known of; 0 if nothing is."""
    firsts = [int(r.steps[0]) for r in run.records if len(r)]
    for series in (run.losses, run.grad_norms):
        firsts += np.flatnonzero(~np.isnan(series))[:1].tolist() if series is not None else []
    return min(firsts, default=0)


def _n_batches(run: Run) -> int:
    """How many training batches there were; up to its last column, where a run does not know it."""
    lasts = [int(r.iters[-1]) + 1 for r in run.records if len(r)]
    return int(run.info.get("train_iter", max(lasts, default=0)))


def _joined_series(a: Floats | None, b: Floats | None, n: int, shift: int) -> Floats | None:
    """The first `n` numbers of `a`, and those of `b` from step `shift` on; NaN where unknown."""
    if a is None and b is None:
        return None
    whole = np.full(max(n, shift + (0 if b is None else len(b))), np.nan)
    if a is not None:
        whole[: min(n, len(a))] = a[:n]
    if b is not None:
        np.copyto(whole[shift : shift + len(b)], b, where=~np.isnan(b))
    return whole
