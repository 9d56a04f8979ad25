"""From a Learner to a `Run`: what its recorders hold, gathered as plain values."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from hookkit.callbacks.callback import Callback
from hookkit.callbacks.outputs import loss_name
from hookkit.errors import HookkitWarning
from hookkit.records import Exports, Record, Run


def run_of(learn: Any) -> Run:
    """Everything the Learner's callbacks recorded; what nobody recorded is None.

    A record goes where its kind belongs, whatever the recorder's class is called. Of several
    recorders of a kind a Run holds the latest; a warning names the others.

    Reads from the device: one synchronisation for each recorder.
    """
    recorder, found = learn._cb_named("recorder"), _recorded(learn)
    norms = getattr(found["param"][0], "grad_norms", None) if "param" in found else None
    records = {kind: record for kind, (_, record) in found.items()}
    return Run(
        activations=records.get("activation"),
        gradients=records.get("gradient"),
        params=records.get("param"),
        losses=None if recorder is None else recorder.step_losses(),
        valid=[] if recorder is None else _epochs(recorder, learn.n_steps),
        grad_norms=None if norms is None else norms(learn.n_steps),
        incidents=tuple(i for cb in _all(learn) for i in vars(cb).get("incidents", ())),
        info=info_of(learn),
    )


def _epochs(recorder: Any, n_steps: int) -> list[dict[str, Any]]:
    """The recorder's rows, each with the last step of its epoch."""
    found = []
    for row, n_batches in zip(recorder.rows(), recorder.iters, strict=True):
        steps = recorder._steps[:n_batches][-1:]
        known = {"step": min(int(steps[0]), n_steps - 1)} if len(steps) and n_steps else {}
        found.append({"epoch": row.pop("epoch"), **known, **row})
    return found


def _all(learn: Any) -> list[Callback]:
    """The callbacks, after those that were added for a past fit."""
    return [*learn._past, *learn.cbs]


def _recorded(learn: Any) -> dict[str, tuple[Any, Record]]:
    """By kind the latest recorder that has something, else the latest, and its record."""
    found: dict[str, list[tuple[Any, Record]]] = {}
    for cb in _all(learn):
        if isinstance(cb, Exports) and hasattr(type(cb), "record"):
            record = cb.record()
            found.setdefault(record.kind, []).append((cb, record))
    for kind, several in found.items():
        several[:] = [pair for pair in several if len(pair[1])] or several[-1:]
        if mine := [cb for cb, _ in several[:-1] if any(cb is c for c in learn.cbs)]:
            _tell_left_out(kind, mine, several[-1][0])
    return {kind: several[-1] for kind, several in found.items()}


def _tell_left_out(kind: str, others: list[Any], taken: Any) -> None:
    warnings.warn(
        f"a run was read in which several callbacks recorded {kind}s; it holds those of the last, "
        f"{taken!r}, and leaves out {', '.join(map(repr, others))}. Read these by themselves: "
        f"diagnose(recorder), recorder.to_df(), recorder.save(path).",
        HookkitWarning,
        stacklevel=4,
    )


def info_of(learn: Any) -> dict[str, Any]:
    """What is known of the model, its loss and its optimizer: the facts of a `Run`.

    Of a watched loop that was copied or loaded they are those of the original.
    """
    if (kept := vars(learn).get("kept_info")) is not None:
        return dict(kept)
    opt = learn.opts[0] if learn.opts else None
    scores = getattr(learn._cb_named("recorder") or learn, "scores", None)
    groups = [] if opt is None else opt.param_groups
    dtypes = {p.dtype for p in learn.model.parameters() if p.is_floating_point()}
    return {
        "model": type(learn.model).__name__,
        "loss_func": loss_name(learn.loss_func),
        "optimizer": None if opt is None else type(opt).__name__,
        "lr": [float(g["lr"]) for g in groups],
        "weight_decay": [float(g.get("weight_decay", 0.0)) for g in groups],
        "momentum": [float(g.get("momentum", 0.0)) for g in groups],
        "maximize": any(g.get("maximize", False) for g in groups),
        "dtype": ", ".join(sorted(str(t) for t in dtypes)),
        "n_epoch": learn.n_epoch,
        **(scores.read() if scores is not None else {}),
        **(getattr(learn, "loss_facts", None) or {}),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
