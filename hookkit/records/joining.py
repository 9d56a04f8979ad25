"""`join`: the implementation of `run + later`, two runs that follow each other as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hookkit.errors import OptionError
from hookkit.records.plain import same
from hookkit.records.run import SLOTS, Record, Run


def join(run: Run, later: Run) -> Run:
    """Return `run + later`, as `Run.__add__` describes it."""
    n, first = run.n_steps, int(later.info.get("first_step", 0))
    if first and n and first != n:
        raise OptionError(
            f"run + later: the first run has {n} steps, and the later one begins with step "
            f"{first}. Only runs that follow each other are joined: the later one begins with step "
            f"0 or with step {n}. Load both, and read them one by one."
        )
    epochs = [row["epoch"] for row in later.valid if "epoch" in row]
    epochs += [int(r.epochs[0]) for r in later.records if len(r)]
    shift = {  # what is added to the later run's numbers
        "step": 0 if first else n,
        "epoch": 0 if first or min(epochs, default=0) else run.n_epochs,
        "iter": _n_batches(run),
    }
    fields: dict[str, Any] = {
        slot: _joined_record(getattr(run, slot), getattr(later, slot), shift)
        for slot in SLOTS.values()
    }
    for name in ("losses", "grad_norms"):
        a, b = getattr(run, name), getattr(later, name)
        if a is not None or b is not None:
            whole = fields[name] = np.full(shift["step"] + later.n_steps, np.nan)
            for start, part in ((shift["step"], b), (0, a)):  # `a` overwrites a resumed run's NaN
                if part is not None:
                    whole[start : start + len(part)] = part
    rows = [{k: x + shift[k] if k in shift else x for k, x in r.items()} for r in later.valid]
    moved = []
    for incident in later.incidents:
        at: dict[str, Any] = {key: getattr(incident, key) + by for key, by in shift.items()}
        moved.append(replace(incident, steps=incident.steps + shift["step"], **at))
    # a fact of the later run wins, if it is known; counts add up
    known = {key: x for key, x in later.info.items() if x is not None and x != []}
    info = {**later.info, **run.info, **known}
    lost = [r.info.get("nan_losses") or [0, _n_batches(r)] for r in (run, later)]
    counts = {
        "n_steps": shift["step"] + later.n_steps,
        "first_step": int((run if n else later).info.get("first_step", 0)),
        "train_iter": shift["iter"] + _n_batches(later),
        "nan_losses": [sum(pair) for pair in zip(*lost, strict=True)],
    }
    info |= {key: x for key, x in counts.items() if key in info}
    fields |= {"valid": [*run.valid, *rows], "incidents": (*run.incidents, *moved)}
    return Run(**fields, info=info)


def _n_batches(run: Run) -> int:
    """Return the number of training batches of a run, or of those up to its last record."""
    lasts = [int(r.iters[-1]) + 1 for r in run.records if len(r)]
    return int(run.info.get("train_iter", max(lasts, default=0)))


def _joined_record(a: Record | None, b: Record | None, shift: dict[str, int]) -> Record | None:
    """Return the columns of `a`, then the columns of `b` with `shift` added to their numbers.

    Raises:
        OptionError: the two have other layers, statistics or options.
    """
    if b is not None:
        b = replace(b, **{f"{key}s": getattr(b, f"{key}s") + by for key, by in shift.items()})
    if a is None or b is None:
        return b if a is None else a
    pairs: dict[str, Any] = {key: (a.meta.get(key), b.meta.get(key)) for key in ("eps", "window")}
    pairs |= {"layers": (a.names, b.names), "bins": (a.edges, b.edges)}
    pairs["statistics"] = {*a.values}, {*b.values}
    for what, pair in pairs.items():
        if not same(*pair):
            raise OptionError(
                f"run + later: their {a.kind}s were recorded with another choice of {what}. Record "
                f"both with the same options, or read them one by one."
            )
    axes: Any = {
        axis: np.concatenate([getattr(a, axis), getattr(b, axis)])
        for axis in ("steps", "epochs", "iters", "spans")
    }
    values = {name: np.concatenate([x, b.values[name]], axis=1) for name, x in a.values.items()}
    hist = None if a.hist is None or b.hist is None else np.concatenate([a.hist, b.hist], axis=2)
    meta: dict[str, Any] = {**a.meta, **{key: x for key, x in b.meta.items() if x is not None}}
    for key, x in a.meta.items():
        if isinstance(x, dict):
            meta[key] = {**x, **meta[key]}
        elif key in ("constant", "input_rms"):  # facts of the first step of a training
            meta[key] = x
        elif key == "moved":
            meta[key] = [one or other for one, other in zip(x, meta[key], strict=True)]
    return replace(b, **axes, values=values, hist=hist, meta=meta)
