"""`run_of`: what the recorders of a Learner or of a watched loop hold, as one `Run`.

Here the host reads from the device.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.modules import class_name, unwrap
from hookkit.recorders.probes import loss_name
from hookkit.records import Record, Reportable, Run, grad_norms


def gather(runner: Any) -> None:
    """Merges what the callbacks of a Learner or a watched loop recorded on all ranks.

    Each rank has to call. Until more is recorded every rank then reads the whole, by itself.
    """
    if ranks.is_distributed():
        for held in (*_all(runner), runner):
            if hasattr(type(held), "_gather"):
                with ranks.together(f"gather what {held!r} recorded in {runner.n_steps} steps"):
                    held._gather()
        runner._gathered_at = runner.n_steps


def run_of(runner: Any, since: int = -1) -> Run:
    """Everything that the callbacks of a Learner or a watched loop recorded.

    With `since` the records have the columns after this step alone, and at least their last one:
    a log that grows with the run costs the same at each writing.

    Of several recorders of a kind a Run holds the latest that has something. It waits for no other
    rank: the Run is of all ranks if `gather` was called since the last step. Sync: one each.
    """
    records: dict[str, Record] = {}
    for cb in _all(runner):
        if is_recorder(type(cb)):
            parts = since >= 0 and hasattr(cb, "_since")
            record = cb._since(since) if parts else cb.record()
            if len(record) or record.kind not in records:
                records[record.kind] = record
    params = records.get("param")
    norms = None if params is None else grad_norms(params, runner.n_steps)
    alone = ranks.is_distributed() and runner._gathered_at != runner.n_steps
    history = runner._loss_history()
    reported = history is not None and len(history) and runner.n_steps
    return Run(
        activations=records.get("activation"),
        gradients=records.get("gradient"),
        params=params,
        losses=history.by_step(runner.n_steps) if reported else None,
        valid=runner._epochs(),
        grad_norms=norms,
        incidents=tuple(i for cb in _all(runner) for i in vars(cb).get("incidents", ())),
        info={
            **info_of(runner),
            **({"rank": ranks.this_rank()} if alone else {}),
            **({} if history is None else history.facts()),
            "train_iter": runner.train_iter,
            **({"within_epoch": True} if vars(runner).get("_in_epoch") else {}),
            "first_step": runner.first_step,
            "n_steps": runner.n_steps,
            **runner.info,
        },
    )


class Readable:
    """The reading that a Learner and a Watcher have in common."""

    @property
    def _runner(self) -> Any:
        """What owns the callbacks."""
        return self

    def gather(self) -> Self:
        """Merges what the ranks of a process group recorded; returns itself. Each rank has to call.

        Until the next step every rank then reads the whole, without waiting; before it, each reads
        its own. A fit in `distrib_ctx` ends with it.

        Raises:
            HookError: the ranks recorded different steps or layouts; or one of them does not come.
        """
        gather(self._runner)
        return self

    def run_record(self) -> Run:
        """Everything recorded so far, as plain values: what pictures, diagnosis and report read.

        Sync: one per recorder.
        """
        return run_of(self._runner)


def is_recorder(kind: type) -> bool:
    """Whether callbacks of this class hold a record."""
    return issubclass(kind, Reportable) and hasattr(kind, "record")


def _all(runner: Any) -> list[Callback]:
    """The callbacks, after those that were added for a past fit."""
    return [*runner._past, *runner.cbs]


def info_of(runner: Any) -> dict[str, Any]:
    """What is known of the model, its loss and its optimizer: the facts of a `Run`."""
    opt = runner.opts[0] if runner.opts else None
    groups = [] if opt is None else opt.param_groups
    rates = [] if opt is None else runner.rates_of(opt)
    dtypes = {p.dtype for p in runner.model.parameters() if p.is_floating_point()}
    return {
        "model": class_name(unwrap(runner.model)),
        "loss_func": loss_name(runner.loss_func),
        "optimizer": None if opt is None else type(opt).__name__,
        "lr": [float(rate) for rate in rates],
        "weight_decay": [float(g.get("weight_decay", 0.0)) for g in groups],
        "dtype": ", ".join(sorted(str(t) for t in dtypes)),
        "n_epoch": runner.n_epoch,
        **runner.probes.read(runner.n_steps, runner.fitting),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
