"""Two runs that follow each other as one: what `run + later` is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hookkit.errors import OptionError
from hookkit.records.plain import same
from hookkit.records.run import Record, Run


def join(run: Run, later: Run) -> Run:
    """Return `run + later`, as `Run.__add__` describes it."""
    n, first = run.n_steps, int(later.info.get("first_step", 0))
    if first and n and first != n:
        raise OptionError(
            f"run + later: the first run has {n} steps, and the later one begins with step "
            f"{first}. Only runs that follow each other are joined: the later one begins with step "
            f"0 or with step {n}. Load both, and read them one by one."
        )
    # what is added to the later run's numbers
    known = [row["epoch"] for row in later.valid if "epoch" in row]
    known += [int(r.epochs[0]) for r in later.records if len(r)]
    shift = {
        "step": 0 if first else n,
        "epoch": 0 if first or min(known, default=0) else run.n_epochs,
        "iter": _n_batches(run),
    }
    fields: dict[str, Any] = {}
    for slot in ("activations", "gradients", "params"):
        fields[slot] = _joined_record(getattr(run, slot), getattr(later, slot), shift)
    for name in ("losses", "grad_norms"):
        a, b = getattr(run, name), getattr(later, name)
        if a is not None or b is not None:
            unknown = np.full(n - (0 if a is None else len(a)), np.nan)
            parts = [a, unknown, None if b is None else b[n - shift["step"] :]]
            fields[name] = np.concatenate([part for part in parts if part is not None])
    rows = [{k: x + shift[k] if k in shift else x for k, x in r.items()} for r in later.valid]
    moved = [
        replace(
            incident,
            steps=incident.steps + shift["step"],
            **{key: getattr(incident, key) + by for key, by in shift.items()},
        )
        for incident in later.incidents
    ]
    fields |= {"valid": [*run.valid, *rows], "incidents": (*run.incidents, *moved)}
    return Run(**fields, info=_joined_info(run, later, shift))


def _joined_info(run: Run, later: Run, shift: dict[str, int]) -> dict[str, Any]:
    """Take facts from the later run, or from the first if the later one knows none; add counts."""
    known = {key: x for key, x in later.info.items() if x is not None and x != []}
    info = {**later.info, **run.info, **known}
    if "n_steps" in info:
        info["n_steps"] = shift["step"] + later.n_steps
    if "first_step" in info:
        info["first_step"] = int((run if run.n_steps else later).info.get("first_step", 0))
    if "train_iter" in info:
        info["train_iter"] = shift["iter"] + _n_batches(later)
    if "nan_losses" in info:
        both = [r.info.get("nan_losses") or [0, _n_batches(r)] for r in (run, later)]
        info["nan_losses"] = [sum(pair) for pair in zip(*both, strict=True)]
    return info


def _n_batches(run: Run) -> int:
    """Return how many training batches a run had, if only up to its last record."""
    lasts = [int(r.iters[-1]) + 1 for r in run.records if len(r)]
    return int(run.info.get("train_iter", max(lasts, default=0)))


def _joined_record(a: Record | None, b: Record | None, shift: dict[str, int]) -> Record | None:
    """Return the columns of `a`, then those of `b` with their numbers moved.

    Raises:
        OptionError: they have other layers, statistics or options.
    """
    if b is not None:
        moved: Any = {f"{key}s": getattr(b, f"{key}s") + by for key, by in shift.items()}
        b = replace(b, **moved)
    if a is None or b is None:
        return b if a is None else a
    ours, theirs = (
        {"layers": r.names, "statistics": {*r.values}, "bins": r.edges}
        | {key: r.meta.get(key) for key in ("eps", "window")}
        for r in (a, b)
    )
    for what, x in ours.items():
        if not same(x, theirs[what]):
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
    for key, first in a.meta.items():
        last = b.meta.get(key)
        if isinstance(first, dict) and isinstance(last, dict):
            meta[key] = {**first, **last}
        elif key in ("constant", "input_rms"):  # how a training began
            meta[key] = first
        elif key == "moved" and last is not None:
            meta[key] = [x or y for x, y in zip(first, last, strict=True)]
    return replace(b, **axes, values=values, hist=hist, meta=meta)
