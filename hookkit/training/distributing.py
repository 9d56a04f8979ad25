"""Train over several processes with accelerate: the implementation of `Learner.distrib_ctx`.

`accelerate launch` or `torchrun` starts the processes; the Accelerator does DDP, FSDP, mixed
precision and accumulation. This file replaces the Learner's model, optimizer and loaders by
prepared ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hookkit._core import distributed as ranks
from hookkit._core.batches import n_batches
from hookkit._core.messages import missing_extra, warn
from hookkit.callbacks import Callback
from hookkit.errors import OptionError


class AccelerateCallback(Callback):
    """Steps the optimizer only when accelerate syncs gradients; merges the ranks after a fit."""

    order = -8
    run_valid = False
    _context: Any = None

    def before_batch(self) -> None:
        """Open accelerate's accumulation context."""
        self._context = self.learn.accelerator.accumulate(self.learn.model)
        self._context.__enter__()
        self.learn.steps_now = self.learn.accelerator.sync_gradients

    def after_batch(self) -> None:
        """Close accelerate's accumulation context."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def after_fit(self) -> None:
        """Merge what all ranks have recorded, at the event that every rank reaches."""
        if self.learn.fitting:
            self.learn.gather()

    cleanup_fit = after_batch


@contextmanager
def distributed(learn: Any, accelerator: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Prepare model, optimizer and loaders of `learn` with accelerate, until the `with` ends."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise missing_extra("accelerate", "distributed", "train over several processes") from None
    on_cpu = not torch.accelerator.is_available()  # or accelerate sees one process on CPUs
    engine = accelerator or Accelerator(**{"cpu": on_cpu, **options})
    learn._needs_data("distrib_ctx")
    _check(engine, learn.dls.loaders)
    if learn.opt is None:
        learn.create_opt()
    plain = {name: getattr(learn, name) for name in ("model", "opt", "logger")}
    loaders, device = learn.dls.loaders, learn.dls.device
    try:
        learn.accelerator, learn.dls.device, learn._plain_loaders = engine, engine.device, loaders
        learn.model, learn.opt = engine.prepare(learn.model, learn.opt)
        learn.dls.loaders = [None if dl is None else engine.prepare(dl) for dl in loaders]
        if not engine.is_main_process:
            learn.logger = no_log
        with learn.added_cbs(AccelerateCallback()):
            yield learn
    finally:
        vars(learn).update(plain)
        learn.accelerator, learn.dls.loaders, learn.dls.device = None, loaders, device
        if engine.num_processes > 1:
            # A gloo thread needs the GIL to free the tensors of the last collective; if Python ends
            # first, it aborts the process (SIGABRT, torch 2.11, 2.14). Sleeping releases the GIL.
            time.sleep(0.02)


def _check(engine: Any, loaders: list[Any]) -> None:
    """Raise an OptionError for one process instead of several; warn of padding that counts."""
    n = max(int(os.environ.get("WORLD_SIZE", 1)), ranks.world_size())
    if n > 1 and engine.num_processes == 1:
        raise OptionError(
            f"distrib_ctx: {n} processes were started, and accelerate sees one alone. On CPUs make "
            f"it with Accelerator(cpu=True), or give no accelerator; the first one that a process "
            f"makes decides for all of its later ones."
        )
    if n > 1 and any(_counts_padding(engine, dl) for dl in loaders[1:]):
        warn(
            "distrib_ctx: accelerate adds rows so that all ranks have equally many, and removes "
            "them by the length of the data set. A validation loader has another length, so they "
            "may count in losses, metrics and predictions. Give a DataLoader without a sampler "
            "(of a torch.utils.data.Subset), and a stream without dispatch_batches=False.",
        )


def _counts_padding(engine: Any, dl: Any) -> bool:
    """Return whether accelerate cannot know how many rows of `dl` are the data's."""
    data = getattr(dl, "dataset", None)
    if isinstance(data, IterableDataset):
        return engine.dispatch_batches is False and n_batches(data) is None
    return data is not None and n_batches(getattr(dl, "sampler", data)) != n_batches(data)


def no_log(row: list[Any]) -> None:
    """Ignore a row; a function at module level, so that a Learner can be pickled."""
