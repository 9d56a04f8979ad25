"""Training over several processes, on accelerate's engine: what `Learner.distrib_ctx` does.

Launching is `accelerate launch` or `torchrun`; DDP, FSDP, mixed precision and gradient accumulation
are the Accelerator's. Here the Learner's model, optimizer and loaders are only replaced by prepared
ones, and restored. FSDP2 shards a model in place, so it is given a copy; what that has learnt is
put into the Learner's own model and optimizer at the end.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from hookkit import ranks
from hookkit.callbacks import Callback
from hookkit.callbacks.readout import gather
from hookkit.data import batch_size, n_batches
from hookkit.errors import HookkitWarning, OptionError, missing_extra
from hookkit.events import CancelBatchException
from hookkit.interrupts import block
from hookkit.learner.checkpoints import sharded_opt
from hookkit.nested import tmap


class AccelerateCallback(Callback):
    """Makes an optimizer step only where accelerate wants one: not for each accumulated batch.

    Where nothing is learned it removes the rows that accelerate has added, so that each row is seen
    once. A batch of such rows alone is cancelled after its forward, which sharded models make
    together.
    """

    order = -8
    _context: Any = None
    _only_padding = False

    def __init__(self, model: nn.Module) -> None:
        self._trained = _trained(model)

    def before_train(self) -> None:
        """Wraps the model in DDP again where other parameters are trained than when it was."""
        # DDP averages the gradients of those parameters only that were trained then: of others
        # each rank would learn its own, and one that is frozen since makes it wait
        learn, trained = self.learn, _trained(self.learn.model)
        if trained == self._trained or not isinstance(learn.model, DistributedDataParallel):
            return
        self._trained, engine = trained, learn.accelerator
        plain = engine.unwrap_model(learn.model, keep_fp32_wrapper=False)
        learn.model = engine.prepare_model(plain)

    def before_batch(self) -> None:
        """Opens accelerate's accumulation context; in evaluation, removes added rows."""
        learn = self.learn
        self._only_padding = False
        if not learn.training:
            self._keep_own_rows()
            return
        self._context = learn.accelerator.accumulate(learn.model)
        self._context.__enter__()
        learn.steps_now = learn.accelerator.sync_gradients

    def _keep_own_rows(self) -> None:
        learn = self.learn
        n = batch_size((learn.xb, learn.yb))
        own = own_rows(learn.dl, n)
        self._only_padding = own == 0
        if 0 < own < n:
            batch = learn.xb, learn.yb
            learn.xb, learn.yb = tmap(lambda t: t[:own] if t.shape[:1] == (n,) else t, batch)

    def after_pred(self) -> None:
        """Cancels a batch that has nothing but added rows."""
        if self._only_padding:
            self.learn.pred = None
            raise CancelBatchException

    def after_batch(self) -> None:
        """Closes the context."""
        self.cleanup_fit()

    def after_fit(self) -> None:
        """Merges what all ranks have recorded, once, where each of them is."""
        if self.learn.fitting:
            gather(self.learn)

    def cleanup_fit(self) -> None:
        """Closes the context if it is open."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
            self.learn.steps_now = True


def _trained(model: nn.Module) -> list[bool]:
    return [p.requires_grad for p in model.parameters()]


def own_rows(loader: Any, n: int) -> int:
    """How many of the current batch's `n` rows are this rank's share of the data.

    accelerate fills up the last batches with rows of the first ones, which come after the data.
    """
    if ranks.world_size() == 1 or not getattr(loader, "end_of_dataloader", False):
        return n
    parts = (loader.batch_sampler, loader.sampler, loader.dataset)
    shard: Any = next((p for p in parts if hasattr(p, "process_index")), None)
    left: int
    if shard is not None:
        left, place = _rows_of_last_round(shard, n), int(shard.process_index)
    else:  # the first rank reads, and sends each rank its rows
        left, place = max(loader.remainder, 0), ranks.rank()
    return min(max(left - place * n, 0), n) if left else n


def _rows_of_last_round(shard: Any, n: int) -> int:
    """How many rows of data the last batches of all ranks have together; 0 if they have no others.

    accelerate's `remainder` is by the length of the data set, of which a sampler may take a part.
    """
    if shard.drop_last or not getattr(shard, "even_batches", True):
        return 0
    if shard.batch_size is None:  # of a batch sampler that says none: whole batches are added
        return len(shard.batch_sampler) % int(shard.num_processes) * n
    together: int = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    batches = getattr(shard, "batch_sampler", None)
    n_rows = n_batches(shard.dataset if batches is None else batches.sampler)
    if n_rows is None:
        warnings.warn(_NO_LENGTH, HookkitWarning, stacklevel=2)
    return (n_rows or 0) % together


_NO_LENGTH = (
    "distrib_ctx: the validation data have no length, so the rows that accelerate adds to make the "
    "ranks' batches equal count in losses, metrics and predictions. Give the IterableDataset a "
    "__len__, or leave out dispatch_batches=False: then the first process reads for all."
)


def _check_processes(engine: Any) -> None:
    """An OptionError if accelerate sees one process where several were started."""
    n = max(int(os.environ.get("WORLD_SIZE", 1)), ranks.world_size())
    if n > 1 and engine.num_processes == 1:
        raise OptionError(
            f"distrib_ctx: {n} processes were started, and accelerate sees one alone. On CPUs make "
            f"it with Accelerator(cpu=True), or give no accelerator; the first one that a process "
            f"makes decides for all of its later ones."
        )


def _check_batches(engine: Any, loaders: list[Any]) -> None:
    """An OptionError if a data set makes its batches itself, which accelerate cannot share out."""
    whole = [
        role
        for role, dl in zip(("training", "validation"), loaders, strict=False)
        if isinstance(dl, DataLoader)
        and dl.batch_sampler is None
        and not isinstance(dl.dataset, IterableDataset)
    ]
    if whole and engine.num_processes > 1 and not engine.dispatch_batches:
        raise OptionError(
            f"distrib_ctx: the {whole[0]} loader has batch_size=None, and accelerate shares out "
            f"batches by their batch sampler. Give a DataLoader with a batch_size or batch_sampler;"
            f" or distrib_ctx(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), "
            f"where the first process reads for all."
        )


@block
def _sharding_allowed(engine: Any, plugin: Any) -> Iterator[None]:
    """Has accelerate use its `fsdp_plugin` on CPUs too, until the end of the `with`.

    accelerate (1.15) shards on devices only, and takes DDP on CPUs. Its own code for FSDP2 runs
    there once its state says so, which all accelerators of a process share.
    """
    from accelerate.utils import DistributedType

    state = engine.state
    if plugin is None or engine.distributed_type != DistributedType.MULTI_CPU:
        yield
        return
    if getattr(plugin, "fsdp_version", 1) != 2:
        raise OptionError(
            "distrib_ctx: accelerate runs version 1 of FSDP on devices only, and these are CPUs. "
            "Use FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    try:
        yield
    finally:
        state.distributed_type, state.fsdp_plugin = DistributedType.MULTI_CPU, None


def _prepared(engine: Any, model: nn.Module, opt: Any, sharded: bool) -> tuple[nn.Module, Any]:
    """Both as accelerate has them; sharded ones are copies, with the optimizer's state so far."""
    if not sharded:
        return engine.prepare(model, opt)  # type: ignore[no-any-return]
    model, new = copy.deepcopy((model, opt))
    new.state.clear()  # accelerate gives the groups their sharded parameters, and not the state
    model, new = engine.prepare(model, new)
    new.load_state_dict(sharded_opt(new, opt.state_dict()))
    return model, new


@block
def distributed(learn: Any, accelerator: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Yields `learn` with model, optimizer and loaders prepared by accelerate; restores them."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise missing_extra("accelerate", "distributed", "train over several processes") from None
    if accelerator is None:  # which by itself takes several processes on CPUs for one
        options = {"cpu": not torch.accelerator.is_available(), **options}
        accelerator = Accelerator(**options)
    _check_processes(accelerator)
    learn._needs_data("distrib_ctx")
    _check_batches(accelerator, learn.dls.loaders)
    if learn.opt is None:
        learn.create_opt()
    with _sharding_allowed(accelerator, options.get("fsdp_plugin")):
        yield from _prepared_learner(learn, accelerator)


def _prepared_learner(learn: Any, engine: Any) -> Iterator[Any]:
    own, plain = learn.model, learn.opts[0]
    sharded = bool(getattr(engine, "is_fsdp2", False))
    loaders, device, logger = list(learn.dls.loaders), learn.dls.device, learn.logger
    try:
        learn.accelerator, learn.dls.device = engine, engine.device
        learn.model, learn.opt = _prepared(engine, own, plain, sharded)
        learn.dls.loaders = [None if dl is None else engine.prepare(dl) for dl in loaders]
        if not engine.is_main_process:
            learn.logger = lambda row: None
        with learn.added_cbs(AccelerateCallback(learn.model)):
            yield learn
        if sharded:
            own.load_state_dict(ranks.whole(learn.model.state_dict()))
            plain.load_state_dict(ranks.whole(learn.opts[0].state_dict()))
    finally:
        model = engine.unwrap_model(learn.model, keep_fp32_wrapper=False)
        learn.model = own if sharded else model
        learn.opt, learn.accelerator, learn.logger = plain, None, logger
        learn.dls.loaders, learn.dls.device = loaders, device
