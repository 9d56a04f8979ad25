"""Batches: their size, inputs, targets, device and loss; the first one of a loader.

A loader is anything that can be iterated over again and again to give batches: a torch DataLoader,
a list of batches, an object of your own. Nothing here loads, shuffles or collates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hookkit._core.checks import kind_of
from hookkit._core.pytree import (
    is_container,
    tree_children,
    tree_leaves,
    tree_leaves_with_path,
    tree_rebuild,
)
from hookkit._core.random_state import preserve_random_state
from hookkit.errors import ArgumentError, ModelRunError


def to_device(x: Any, device: torch.device) -> Any:
    """Return `x` with every tensor, and every object that has `.to`, moved to `device`.

    Structures keep their type, and `x` itself is returned if nothing has to be moved. PyTorch
    Geometric's `Data` has `.to`, and a batch of your own may have it.
    """
    if isinstance(x, Tensor):
        return x if x.device == device else x.to(device, non_blocking=True)
    is_plain = type(x) is tuple or type(x) is list  # the usual batch: no paths are needed
    if not (is_plain or is_container(x)):
        return x.to(device) if hasattr(x, "to") else x
    parts = x if is_plain else [part for _, part in tree_children(x)]
    moved = [to_device(part, device) for part in parts]
    return x if all(a is b for a, b in zip(moved, parts, strict=True)) else tree_rebuild(x, moved)


def batch_size(*parts: Any) -> int:
    """Return the number of samples in a batch, given as its parts: inputs, targets, predictions.

    The first part that tells decides: a list of dicts has a dict for each sample, as in detection;
    otherwise it is the length of the first tensor with dimensions. Returns 1 if no part tells.

    >>> batch_size(torch.ones(3, 2)), batch_size([{"boxes": torch.ones(5, 4)}] * 2)
    (3, 2)
    """
    for part in parts:
        if has_samples(part):
            return len(part)
        if sizes := [t.shape[0] for t in tree_leaves(part) if t.ndim]:
            return sizes[0]
    return 1


def has_samples(x: Any) -> bool:
    """Return whether `x` is a list or tuple of dicts, as detection has one for each image."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(i, Mapping) for i in x)


def split_batch(batch: Any, n_inp: int | None = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split a batch into (inputs of the model, targets), two tuples.

    The first `n_inp` items of a tuple or list are inputs (None: all but the last, if there are two
    or more), the rest are targets. A mapping is returned on both sides, because the model takes it
    by keyword and finds its targets in it. Anything else is one input without targets.

    >>> split_batch((1, 2, 3)), split_batch((1, 2, 3), 1), split_batch((1,))
    (((1, 2), (3,)), ((1,), (2, 3)), ((1,), ()))
    """
    if isinstance(batch, (tuple, list)):
        n = n_inp if n_inp is not None else max(len(batch) - 1, 1)
        return tuple(batch[:n]), tuple(batch[n:])
    return (batch,), (batch,) if isinstance(batch, Mapping) else ()


def loss_in(output: Any) -> tuple[Tensor | None, bool]:
    """Return the loss in a model's output, and whether that is only a guess.

    It is the output itself, or its `loss`, or, as a guess, its only scalar that has a gradient.

    >>> x = torch.ones(2, requires_grad=True)
    >>> loss_in({"logits": x, "loss": x.sum()}), loss_in((x, x.sum()))[1], loss_in(x)
    ((tensor(2., grad_fn=<SumBackward0>), False), True, (None, False))
    """
    if isinstance(output, Tensor):
        return output if output.dim() == 0 and output.requires_grad else None, False
    scalars = {p: t for p, t in tree_leaves_with_path(output) if t.dim() == 0 and t.requires_grad}
    for path in (".loss", "['loss']"):
        if path in scalars:
            return scalars[path], False
    return next(iter(scalars.values())) if len(scalars) == 1 else None, True


def n_batches(loader: Any) -> int | None:
    """Return `len(loader)`, the number of batches; None if the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def no_batches(what: str) -> str:
    """Return the message for a loader that gave no batch."""
    return (
        f"{what} gave no batch. A generator can be read only once: give a list or a DataLoader; "
        f"and drop_last=True drops a dataset smaller than a batch."
    )


def check_loader(role: str, loader: Any) -> None:
    """Raise unless `loader` gives batches; a validation loader has to give them again and again."""
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    once = role in ("valid", "further") and isinstance(loader, Iterator)
    samples = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if iterable and not once and not samples and not isinstance(loader, (Tensor, str, Mapping)):
        return
    why = "gives its batches only once" if once else "gives no batches"
    why = "gives samples" if samples else why
    raise ArgumentError(
        f"The {role} loader is {kind_of(loader)}, which {why}. Give a torch DataLoader, a list of "
        f"batches, or any object that can be iterated over repeatedly."
    )


def first_batch(loader: Any, name: str) -> Any:
    """Return the first batch of `loader` without starting a worker; random states are restored.

    Raises:
        ModelRunError: there is no batch; the message calls the loader `name`.
    """
    if type(loader) is DataLoader:  # a class of its own may make batches in its own way
        loader = copy.copy(loader)
        loader.num_workers = loader.timeout = 0
    with preserve_random_state(loader):
        for batch in loader:
            return batch
    raise ModelRunError(no_batches(name))
