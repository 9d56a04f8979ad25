"""Helpers of `validate` and `get_preds`: choose the batches, and keep and join the results."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, stack
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from hookkit._core.batches import has_samples
from hookkit._core.pytree import (
    PLAIN,
    is_container,
    tree_children,
    tree_leaves,
    tree_map,
    tree_rebuild,
)
from hookkit.callbacks import Callback
from hookkit.callbacks.metrics import gathered


class Keep(Callback):
    """Keeps each batch's predictions and targets on the CPU, and on request inputs and losses."""

    order = 70

    def __init__(self, with_input: bool, with_loss: bool) -> None:
        self.with_input, self.with_loss = with_input, with_loss
        self.batches: list[tuple[Any, ...]] = []

    def before_batch(self) -> None:
        """Copy the input before the model can change it."""
        self._x = tree_map(lambda t: t.detach().clone(), self.learn.x) if self.with_input else None

    def after_batch(self) -> None:
        """Keep the batch, unless it was cancelled before its prediction."""
        learn = self.learn
        if learn.pred is None:
            return
        batch = [self._x] * self.with_input + [learn.pred, learn.y]
        if self.with_loss:
            batch.append(_losses(learn))
        batch = gathered(learn, tuple(batch))
        self.batches.append(tree_map(lambda t: t.detach().to("cpu", copy=True), batch))


def _losses(learn: Any) -> Any:
    """Return (n,) the loss of each sample, or the batch's loss if there is no `reduction`."""
    f = learn.loss_func
    if not hasattr(f, "reduction") or not learn.yb:
        return learn.loss
    before, f.reduction = f.reduction, "none"
    try:
        losses = f(learn.pred, *learn.yb)
    finally:
        f.reduction = before
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def concat_batches(batches: list[Any]) -> Any:
    """Return the structures of all batches as one: tensors concatenated, 0-d tensors stacked.

    Lists without tensors (file names) and lists of dicts have an item per sample, and are
    concatenated too. A number or text that is equal in all batches stays; any other object becomes
    a list with one item per batch. Raises torch's error, or a ValueError, if structures differ.

    >>> import torch
    >>> concat_batches([(torch.ones(2, 3), ["a", "b"]), (torch.ones(1, 3), ["c"])])[1]
    ['a', 'b', 'c']
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return cat(batches) if first.ndim else stack(batches)
    if type(first) in (list, tuple) and (has_samples(first) or not tree_leaves(first)):
        return type(first)(item for batch in batches for item in batch)
    if not is_container(first):
        constant = type(first) in PLAIN and all(batch == first for batch in batches)
        return first if constant else batches
    parts = [dict(tree_children(batch)) for batch in batches]
    if other := next((p for p in parts if p.keys() != parts[0].keys()), None):
        raise ValueError(f"a batch has {list(other)}, and the first one {list(parts[0])}")
    return tree_rebuild(first, [concat_batches([p[step] for p in parts]) for step in parts[0]])


def loader_of(learn: Any, ds_idx: int, dl: Any, who: str) -> Any:
    """Return the loader of a pass: unshuffled and complete; in `distrib_ctx`, this rank's part."""
    if dl is None:
        learn._needs_data(who)
        own = learn.dls if learn.accelerator is None else learn._plain_loaders
        dl = in_order(own[ds_idx])
        if dl is own[ds_idx]:
            return learn.dls[ds_idx]
    prepared = not isinstance(dl, DataLoader) or hasattr(dl, "end_of_dataloader")
    if learn.accelerator is None or prepared:
        return dl
    return learn.accelerator.prepare_data_loader(dl)


def in_order(dl: Any) -> Any:
    """Return `dl`, or a torch DataLoader like it that yields every row in the order of the data.

    A loader that shuffles is read in order, and so are the indices of a SubsetRandomSampler. Other
    samplers, and batch samplers, are kept.
    """
    if type(dl) is not DataLoader or dl.batch_size is None:
        return dl
    sampler: Any = dl.sampler
    if isinstance(sampler, RandomSampler):
        sampler = None
    elif isinstance(sampler, SubsetRandomSampler):
        sampler = sampler.indices
    elif not dl.drop_last:
        return dl
    return DataLoader(
        dl.dataset,
        dl.batch_size,
        sampler=None if isinstance(dl.dataset, IterableDataset) else sampler,
        collate_fn=dl.collate_fn,
        num_workers=dl.num_workers,
        pin_memory=dl.pin_memory,
        worker_init_fn=dl.worker_init_fn,
        multiprocessing_context=dl.multiprocessing_context,
    )
