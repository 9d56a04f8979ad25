"""`DataLoaders`: the loaders of one run, training first, and the device their batches go to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hookkit._core.batches import check_loader, first_batch, n_batches, to_device
from hookkit._core.checks import kind_of
from hookkit.errors import ArgumentError, SelectionError


class DataLoaders:
    """Holds the training and validation loaders (and more, if any), and where batches go.

    Args:
        train: gives the batches to learn from.
        valid: gives the batches to validate on; None for a run without validation.
        others: further loaders, for `learn.validate(2)`.
        device: batches are moved there, and the model at the start of a fit. None: the model stays
            where it is and batches follow it.
        n_inp: how many items of a batch are inputs of the model; None: all but the last one.

    Raises:
        ArgumentError: a loader cannot be iterated over.

    >>> batches = [(torch.ones(4, 2), torch.zeros(4))] * 3
    >>> dls = DataLoaders(batches, batches[:1])
    >>> len(dls.train), len(dls.valid), dls[0] is dls.train
    (3, 1, True)
    """

    def __init__(
        self,
        train: Any,
        valid: Any = None,
        *others: Any,
        device: torch.device | str | int | None = None,
        n_inp: int | None = None,
    ) -> None:
        self.loaders = [train, valid, *others]
        for i, loader in enumerate(self.loaders):
            if i == 0 or loader is not None:
                check_loader(("train", "valid")[i] if i < 2 else "further", loader)
        # an empty tensor knows the number of its device
        self.device = None if device is None else torch.empty(0, device=device).device
        self.n_inp = n_inp

    @property
    def train(self) -> Any:
        """Return the loader to learn from."""
        return self.loaders[0]

    @property
    def valid(self) -> Any:
        """Return the loader to validate on, or None."""
        return self.loaders[1]

    @property
    def train_ds(self) -> Any:
        """Return the dataset of the training loader, or None if it has none."""
        return getattr(self.train, "dataset", None)

    @property
    def valid_ds(self) -> Any:
        """Return the dataset of the validation loader, or None if it has none."""
        return getattr(self.valid, "dataset", None)

    def __getitem__(self, i: int) -> Any:
        loader = self.loaders[i] if -len(self) <= i < len(self) else None
        if loader is None:
            raise SelectionError(
                f"there is no loader {i!r}: DataLoaders has {len(list(self))} (0 is training, "
                f"1 validation). Give it to DataLoaders, or a `dl=` to the call."
            )
        return loader

    def __len__(self) -> int:
        return len(self.loaders)

    def __iter__(self) -> Iterator[Any]:
        return iter(x for x in self.loaders if x is not None)

    def one_batch(self, i: int = 0) -> Any:
        """Return the first batch of loader `i`, on `device`; draw no random number."""
        batch = first_batch(self[i], f"loader {i}")
        return batch if self.device is None else to_device(batch, self.device)

    def __repr__(self) -> str:
        lengths = (n_batches(x) for x in self)
        sizes = " + ".join("?" if n is None else str(n) for n in lengths)
        return f"DataLoaders({sizes} batches, device={self.device})"


def as_loaders(dls: Any) -> Any:
    """Make `DataLoaders` of a pair or of one loader; return other loaders as they are."""
    if dls is None or (hasattr(dls, "train") and not isinstance(dls, nn.Module)):
        return dls
    if isinstance(dls, (tuple, list)) and len(dls) == 2:
        return DataLoaders(*dls)
    if isinstance(dls, DataLoader):
        return DataLoaders(dls)
    first = "The data come first: Learner(dls, model, loss_func). " * isinstance(dls, nn.Module)
    raise ArgumentError(
        f"Learner(dls=…): expected DataLoaders, found {kind_of(dls)}. {first}Give "
        f"DataLoaders(train, valid), the pair (train, valid), or one DataLoader."
    )
