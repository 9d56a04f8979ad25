"""`run_of`: what the recorders of a Learner or of a watched loop hold, as one `Run`.

Builds on `records`. Here the host reads from the device. `loop_text` shows who is called when.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.loss_facts import loss_name
from hookkit.errors import HookkitWarning
from hookkit.modules import class_name, unwrap
from hookkit.records import Exports, Record, Run


def gather(runner: Any) -> None:
    """Merges what the callbacks of a Learner or an `ExternalLoop` recorded on all ranks.

    Each rank has to call. Until more is recorded every rank then reads the whole, by itself. Raises
    a HookError if they recorded different steps or layouts, or if one of them does not come.
    """
    if not ranks.is_distributed():
        return
    for held in (*_all(runner), runner):
        if hasattr(type(held), "_gather"):
            with ranks.together(f"gather what {held!r} recorded in {runner.n_steps} steps"):
                held._gather()
    runner._gathered_at = runner.n_steps


def across_ranks(runner: Any) -> bool:
    """Whether every rank is here: in `distrib_ctx`. After it, one of them may be alone."""
    return getattr(runner, "accelerator", None) is not None and ranks.is_distributed()


def run_of(runner: Any, *, quiet: bool = False) -> Run:
    """Everything that the callbacks of a Learner or an `ExternalLoop` recorded.

    A record goes where its kind belongs, whatever the recorder's class is called. Of several
    recorders of a kind a Run holds the latest; unless `quiet`, a warning names the others.

    It waits for no other rank: the Run is of all ranks if `gather` was called since the last step,
    else of this one, and `info["rank"]` says which. Sync: one per recorder.
    """
    found = _recorded(runner, quiet)
    norms = getattr(found["param"][0], "grad_norms", None) if "param" in found else None
    records = {kind: record for kind, (_, record) in found.items()}
    alone = ranks.is_distributed() and runner._gathered_at != runner.n_steps
    history = runner._loss_history()
    losses = None if history is None else history.by_step(runner.n_steps)
    if losses is not None and not np.isfinite(losses).any():
        losses = None
    run = Run(
        activations=records.get("activation"),
        gradients=records.get("gradient"),
        params=records.get("param"),
        losses=losses,
        valid=runner._epochs(),
        grad_norms=None if norms is None else norms(runner.n_steps),
        incidents=tuple(i for cb in _all(runner) for i in vars(cb).get("incidents", ())),
        info={
            **info_of(runner),
            **({"rank": ranks.this_rank()} if alone else {}),
            **({} if history is None else history.facts()),
            "train_iter": runner.train_iter,
            **({"within_epoch": True} if vars(runner).get("_in_epoch") else {}),
            **({"first_step": first} if (first := vars(runner).get("first_step")) else {}),
            **vars(runner).get("info", {}),
        },
    )
    earlier = vars(runner).get("earlier")  # which a watched loop resumes
    return run if earlier is None else earlier + run


def _misses_steps(runner: Any) -> bool:
    """Whether a watched loop saw batches, no step, and weights that stay as they were.

    A Learner makes its steps itself.
    """
    cancelled = getattr(runner, "n_cancelled_steps", None)
    without = cancelled == 0 and runner.train_iter and not runner.n_steps
    return bool(without and runner.is_unchanged())


def is_recorder(kind: type) -> bool:
    """Whether callbacks of this class hold a record."""
    return issubclass(kind, Exports) and hasattr(kind, "record")


def _all(runner: Any) -> list[Callback]:
    """The callbacks, after those that were added for a past fit."""
    return [*runner._past, *runner.cbs]


def _recorded(runner: Any, quiet: bool) -> dict[str, tuple[Any, Record]]:
    """By kind the latest recorder that has something, else the latest, and its record."""
    found: dict[str, list[tuple[Any, Record]]] = {}
    for cb in _all(runner):
        if is_recorder(type(cb)):
            record = cb.record()
            found.setdefault(record.kind, []).append((cb, record))
    for kind, several in found.items():
        several[:] = [pair for pair in several if len(pair[1])] or several[-1:]
        others = [cb for cb, _ in several[:-1] if any(cb is c for c in runner.cbs)]
        if others and not quiet:
            _warn_not_in_run(kind, others, several[-1][0])
    return {kind: several[-1] for kind, several in found.items()}


def _warn_not_in_run(kind: str, others: list[Any], taken: Any) -> None:
    warnings.warn(
        f"run_record: several callbacks recorded {kind}s; the Run holds those of the last, "
        f"{taken!r}, without {', '.join(map(repr, others))}. Read the others by themselves: "
        f"diagnose(recorder), recorder.to_df(), recorder.save(path).",
        HookkitWarning,
        stacklevel=4,
    )


def info_of(runner: Any) -> dict[str, Any]:
    """What is known of the model, its loss and its optimizer: the facts of a `Run`.

    Of a watched loop that was copied or loaded they are those of the original.
    """
    if (kept := vars(runner).get("kept_info")) is not None:
        return dict(kept)
    opt = runner.opts[0] if runner.opts else None
    groups = [] if opt is None else opt.param_groups
    rates = runner._rates if len(runner._rates) == len(groups) else [g["lr"] for g in groups]
    dtypes = {p.dtype for p in runner.model.parameters() if p.is_floating_point()}
    return {
        "model": class_name(unwrap(runner.model)),
        "loss_func": loss_name(runner.loss_func),
        "optimizer": None if opt is None else type(opt).__name__,
        "lr": [float(rate) for rate in rates],
        "weight_decay": [float(g.get("weight_decay", 0.0)) for g in groups],
        "momentum": [float(g.get("momentum") or g.get("betas", (0.0,))[0]) for g in groups],
        "maximize": any(g.get("maximize", False) for g in groups),
        "dtype": ", ".join(sorted(str(t) for t in dtypes)),
        "n_epoch": runner.n_epoch,
        **runner._loss_facts.read(),
        **runner.batch_facts.read(),
        **({"no_step": True} if _misses_steps(runner) else {}),
        **_of_watched(runner),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _of_watched(runner: Any) -> dict[str, Any]:
    """Facts that a watched loop alone gathers."""
    seen = (vars(runner).get(name) for name in ("kept_gradients", "asked"))
    facts = {name: fact for s in seen if s is not None for name, fact in s.read().items()}
    n = vars(runner).get("n_eval_steps")
    return facts | ({"eval_steps": [n, runner.n_own_steps]} if n else {})


def loop_text(runner: Any) -> str:
    """The training loop as text: every event in its place, with the callbacks that have it."""
    depth, lines = 0, []
    for line in _LOOP.split():
        if line.startswith("end:"):
            depth -= 1
        heard = f": {list(runner.ordered_cbs(line))}" if "_" in line and ":" not in line else ""
        words = line.replace("start:", "Start ").replace("end:", "End ").replace("+", " ")
        lines.append(f"{'  ' * depth}{'- ' if heard else ''}{words}{heard}")
        if line.startswith("start:"):
            depth += 1
    return "\n".join(lines)


_LOOP = """
before_fit start:Fit
 before_epoch start:Epoch
  before_train start:Training
   before_batch start:Batch after_pred after_loss
    before_backward after_cancel_backward after_backward
    before_step after_cancel_step after_step
   end:Batch after_cancel_batch after_batch
  end:Training after_cancel_train after_train
  before_validate start:Validation+(batches+as+above,+without+backward+and+step)
  end:Validation after_cancel_validate after_validate
 end:Epoch after_cancel_epoch after_epoch
end:Fit after_cancel_fit after_fit
"""
