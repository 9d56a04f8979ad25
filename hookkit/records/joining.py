"""Two records, or the facts of two runs, as one: what `run + later` is made of.

Builds on `record`. The rows and statistics of both are there: NaN where one has them not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_OPTIONS = ("eps", "sample", "exact_hist", "window")
_AS_IT_BEGAN = ("constant", "first_variation", "given_rms", "given_max", "given_variation")


def joined_record(a: Record | None, b: Record | None, shift: Shift) -> Record | None:
    """The columns of `a`, then those of `b`; an OptionError if their options differ."""
    if b is None:
        return a
    moved = zip(AXES, shift, strict=False)
    b = replace(b, **{axis: getattr(b, axis) + by for axis, by in moved})
    if a is None:
        return b
    _check_options(a, b)
    types = dict(zip((*a.names, *b.names), (*a.types, *b.types), strict=True))
    names, values = list(types), dict.fromkeys((*a.values, *b.values))
    hist = None
    if a.edges is not None or b.edges is not None:
        parts = [_placed(r, names, r.hist, 0) for r in (a, b)]
        width = max(part.shape[1] for part in parts)
        hist = np.concatenate([np.pad(p, _room(p, width)) for p in parts], 2)
    of_column: Any = {n: np.concatenate([getattr(r, n) for r in (a, b)]) for n in AXES}
    tables = {s: [_placed(r, names, r.values.get(s), np.nan) for r in (a, b)] for s in values}
    return Record(
        a.kind,
        tuple(names),
        tuple(types.values()),
        **of_column,
        values={name: np.hstack(pair) for name, pair in tables.items()},
        hist=hist,
        edges=a.edges if a.edges is not None else b.edges,
        meta=_joined_meta(a, b, names),
    )


def _check_options(a: Record, b: Record) -> None:
    ours, theirs = ({**r.meta, "edges of bins": r.edges} for r in (a, b))
    for name in (*_OPTIONS, "edges of bins"):
        known = [x for x in (ours.get(name), theirs.get(name)) if x is not None]
        if len(known) == 2 and not same(*known):
            raise OptionError(
                f"run + later: their {a.kind}s were recorded with another {name} "
                f"({_brief(known[0])} and {_brief(known[1])}). Record both with the same options, "
                f"or compare them: compare(run, later)."
            )


def _brief(x: Any) -> str:
    return f"{len(x) - 1} bins from {x[0]:g} to {x[-1]:g}" if isinstance(x, np.ndarray) else str(x)


def _placed(record: Record, names: Sequence[str], table: Any, absent: float) -> Any:
    """The rows of `table` in the places of their names; `absent` elsewhere."""
    if table is None:
        table = np.full((len(record.names), len(record)), absent)
        table = table[:, None].astype(np.int64) if absent == 0 else table
    whole = np.full((len(names), *table.shape[1:]), absent, table.dtype)
    whole[[names.index(name) for name in record.names]] = table
    return whole


def _room(hist: Any, width: int) -> list[tuple[int, int]]:
    return [(0, 0), (0, width - hist.shape[1]), (0, 0)]


def _joined_meta(a: Record, b: Record, names: Sequence[str]) -> dict[str, Any]:
    """Facts of the later record; of its absent rows, and of how a training began, of the former."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys((*a.meta, *b.meta)):
        parts = [r.meta.get(key) for r in ((b, a) if key in _AS_IT_BEGAN else (a, b))]
        known = [x for x in parts if x is not None]
        if all(isinstance(x, Mapping) for x in known):
            found[key] = {k: v for x in known for k, v in x.items()}
        elif all(_by_row(r, key) for r in (a, b)):
            of_row = [dict(zip(r.names, r.meta[key], strict=True)) for r in (a, b)]
            found[key] = [_fact(key, *(rows.get(name) for rows in of_row)) for name in names]
        else:
            found[key] = known[-1] if known else None
    return found


def _by_row(record: Record, key: str) -> bool:
    value = record.meta.get(key)
    return isinstance(value, list) and len(value) == len(record.names)


def _fact(key: str, a: Any, b: Any) -> Any:
    """One row's fact: `moved` in either, how it began in the former, else that of the latter."""
    if key == "moved":
        return bool(a or b)
    first, last = (b, a) if key in _AS_IT_BEGAN else (a, b)
    return first if last is None else last


def joined_series(a: Floats | None, b: Floats | None, n: int, shift: int) -> Floats | None:
    """(n + …,) float64: the first `n` numbers of `a`, and those of `b` from step `shift` on."""
    if a is None and b is None:
        return None
    many = max(n, shift + (0 if b is None else len(b)))
    whole = np.full(many, np.nan)
    if a is not None:
        whole[: len(a)] = a
    if b is not None:
        here = whole[shift : shift + len(b)]
        np.copyto(here, b, where=~np.isnan(b))
    return whole


def cut_record(record: Record, n: int) -> Record:
    """The columns of `record` that begin before step `n`."""
    kept = record.steps < n
    return replace(
        record,
        **{axis: getattr(record, axis)[kept] for axis in AXES},
        values={name: table[:, kept] for name, table in record.values.items()},
        hist=None if record.hist is None else record.hist[..., kept],
    )


def cut_epochs(rows: Sequence[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The epochs that begin before step `n`; of the last one, which may go on, what is counted.

    >>> rows = [{"epoch": 0, "step": 3, "score": 1}, {"epoch": 1, "step": 7, "score": 2}]
    >>> cut_epochs(rows, 6)
    [{'epoch': 0, 'step': 3, 'score': 1}, {'epoch': 1, 'step': 5}]
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        if found and found[-1].get("step", 0) + 1 >= n:
            break
        if row.get("step", 0) >= n:
            row = {k: x for k, x in row.items() if k in ("epoch", "train_loss")} | {"step": n - 1}
        found.append(row)
    return found


def joined_epochs(
    a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], losses: Floats | None
) -> list[dict[str, Any]]:
    """The epochs of `a`, then those of `b`: one row for the epoch that `a` ended within.

    >>> rows = [{"epoch": 0, "step": 0, "train_loss": 9.0}], [{"epoch": 0, "step": 1, "score": 1}]
    >>> joined_epochs(*rows, np.array([9.0, 1.0]))
    [{'epoch': 0, 'step': 1, 'train_loss': 5.0, 'score': 1}]
    """
    if not a or not b or a[-1].get("epoch") != b[0].get("epoch"):
        return [*a, *b]
    row = {**a[-1], **b[0]}
    if "train_loss" in a[-1] and "step" in row and losses is not None:
        first = a[-2].get("step", -1) + 1 if len(a) > 1 else 0
        row["train_loss"] = float(np.nanmean(losses[first : row["step"] + 1]))
    return [*a[:-1], row, *b[1:]]


def moved_epoch(row: dict[str, Any], shift: Shift) -> dict[str, Any]:
    """An epoch's row, counted on."""
    by = dict(zip(("step", "epoch"), shift, strict=False))
    return {name: value + by[name] if name in by else value for name, value in row.items()}


def joined_info(run: Run, later: Run) -> dict[str, Any]:
    """The facts of both; where they differ, those of the later one."""
    known = {
        k: x for k, x in later.info.items() if not (x is None or (isinstance(x, list) and not x))
    }
    info = {**later.info, **run.info, **known}
    if "train_iter" in info:
        info["train_iter"] = n_batches(run) + n_batches(later)
    for fact, of in (("within_epoch", later), ("first_step", run)):
        if fact not in of.info:
            info.pop(fact, None)
    return info


def n_batches(run: Run) -> int:
    """How many training batches there were; up to its last column, where a run does not know it."""
    lasts = [int(r.iters[-1]) + 1 for r in run.records if len(r)]
    return int(run.info.get("train_iter", max(lasts, default=0)))


def shift_after(run: Run, later: Run) -> Shift:
    """By how many steps, epochs and batches `later` is to be counted on."""
    firsts = [int(r.steps[0]) for r in later.records if len(r)]
    for values in (later.losses, later.grad_norms):
        firsts += np.flatnonzero(~np.isnan(values))[:1].tolist() if values is not None else []
    firsts = firsts or [int(row["step"]) for row in later.valid if "step" in row]
    if min(firsts, default=later.info.get("first_step", 0)) >= run.n_steps:
        return 0, 0, n_batches(run)
    n_epochs = run.n_epochs - bool(run.info.get("within_epoch"))
    return run.n_steps, n_epochs, n_batches(run)


def run_until(run: Run, n: int) -> Run:
    """The run before step `n`."""
    own = vars(run).items()
    cut: dict[str, Any] = {slot: cut_record(r, n) for slot, r in own if isinstance(r, Record)}
    cut |= {slot: series[:n] for slot, series in own if isinstance(series, np.ndarray)}
    return replace(
        run,
        **cut,
        valid=cut_epochs(run.valid, n),
        incidents=tuple(i for i in run.incidents if i.step < n),
        info={**run.info, "train_iter": _batches_until(run, n)},
    )


def _batches_until(run: Run, n: int) -> int:
    """How many batches the first `n` steps had; where none was recorded, in proportion."""
    known = {0: 0, run.n_steps: n_batches(run)}
    for r in run.records:
        known |= dict(zip((r.steps + 1).tolist(), (r.iters + 1).tolist(), strict=True))
    steps = sorted(known)
    return round(np.interp(n, steps, [known[step] for step in steps]))
