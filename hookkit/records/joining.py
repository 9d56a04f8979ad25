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
_AS_IT_BEGAN = ("constant", "given_rms")


def joined_fields(run: Run, later: Run) -> dict[str, Any]:
    """The fields of `run + later`, as `Run.__add__` says."""
    shift = _shift(run, later)
    fields: dict[str, Any] = {}
    for slot in SLOTS.values():
        fields[slot] = joined_record(getattr(run, slot), _moved(getattr(later, slot), shift))
    for name in ("losses", "grad_norms"):
        fields[name] = _joined_series(getattr(run, name), getattr(later, name), shift[0])
    fields["valid"] = [*run.valid]
    for row in later.valid:
        by = {key: shift[i] for i, key in enumerate(("step", "epoch")) if key in row}
        fields["valid"].append({**row, **{key: row[key] + k for key, k in by.items()}})
    moved = (_moved_incident(i, shift) for i in later.incidents)
    fields["incidents"] = (*run.incidents, *moved)
    fields["info"] = _joined_info(run, later, shift)
    return fields


def _shift(run: Run, later: Run) -> Shift:
    """By how much `later` is counted on: it begins with step 0, or goes on where `run` ends."""
    first, n, batches = _first_step(later), run.n_steps, _n_batches(run)
    if not first:
        return n, 0 if _first_epoch(later) else run.n_epochs, batches
    if first != n and n:
        raise OptionError(
            f"run + later: the first run has {n} steps, and the later one begins with step "
            f"{first}. Only runs that follow each other are joined: the later one begins with step "
            f"0 or with step {n}. Load both, and read them one by one."
        )
    return 0, 0, batches


def _joined_info(run: Run, later: Run, shift: Shift) -> dict[str, Any]:
    """Facts of the later run; of the first where the later one knows none. Counts add up."""
    known = {k: x for k, x in later.info.items() if x is not None and x != []}
    info = {**later.info, **run.info, **known}
    if "n_steps" in info:
        info["n_steps"] = shift[0] + later.n_steps
    if "first_step" in info:
        info["first_step"] = _first_step(run if run.n_steps else later)
    if "train_iter" in info and shift[2]:
        info["train_iter"] = shift[2] + _n_batches(later)
    if "nan_losses" in info:
        known_of = [r.info.get("nan_losses") or [0, _n_batches(r)] for r in (run, later)]
        info["nan_losses"] = [sum(pair) for pair in zip(*known_of, strict=True)]
    return info


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


def _first_step(run: Run) -> int:
    """The number of its first step: not 0 where a library goes on with a training."""
    return int(run.info.get("first_step", 0))


def _first_epoch(run: Run) -> int:
    """The first epoch: not 0 in `fit(…, start_epoch=n)`, which numbers no steps, but epochs."""
    known = [int(row["epoch"]) for row in run.valid if "epoch" in row]
    return min([*known, *(int(r.epochs[0]) for r in run.records if len(r))], default=0)


def _n_batches(run: Run) -> int:
    """How many training batches there were; up to its last column, where a run does not know it."""
    lasts = [int(r.iters[-1]) + 1 for r in run.records if len(r)]
    return int(run.info.get("train_iter", max(lasts, default=0)))


def _joined_series(a: Floats | None, b: Floats | None, shift: int) -> Floats | None:
    """The numbers of `a`, and those of `b` from step `shift` on; NaN where unknown."""
    if a is None and b is None:
        return None
    whole = np.full(max(shift + (0 if b is None else len(b)), 0 if a is None else len(a)), np.nan)
    if a is not None:
        whole[: len(a)] = a
    if b is not None:
        np.copyto(whole[shift : shift + len(b)], b, where=~np.isnan(b))
    return whole
