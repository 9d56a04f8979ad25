"""From a Learner to a `Run`: what its recorders hold, gathered as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hookkit.callbacks.outputs import loss_name
from hookkit.records import Run


def run_of(learn: Any) -> Run:
    """Everything the Learner's callbacks recorded; what nobody recorded is None.

    Reads from the device: one synchronisation for each recorder.
    """
    recorder = learn._cb_named("recorder")
    flight = learn._cb_named("flight_recorder")
    weights = learn._cb_named("param_stats")
    return Run(
        activations=_record(learn, "activation_stats"),
        gradients=_record(learn, "gradient_stats"),
        params=_record(learn, "param_stats"),
        losses=None if recorder is None else recorder.step_losses(),
        valid=[] if recorder is None else recorder.rows(),
        grad_norms=None if weights is None else weights.grad_norms(learn.n_steps),
        incidents=tuple(getattr(flight, "incidents", ())),
        info=_info(learn),
    )


def _record(learn: Any, name: str) -> Any:
    cb = learn._cb_named(name)
    return None if cb is None or not hasattr(cb, "record") else cb.record()


def _info(learn: Any) -> dict[str, Any]:
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
        "dtype": ", ".join(sorted(str(t) for t in dtypes)),
        "n_epoch": learn.n_epoch,
        **(scores.read() if scores is not None else {}),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
