"""`Cut`: what layers gave for a batch, as rows: one for each sample, or for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hookkit.collecting.batches import WHO, Reading
from hookkit.errors import HookError
from hookkit.nested import Inputs, describe


class Cut:
    """Cuts what layers give for one batch into rows, all alike: those that count.

    Args:
        reading: of the loader's batches.
        batch: what the loader gave.
        given: what the model is called with, which has as many samples.
        per: `"sample"` or `"token"`.
        samples: how many samples there were before.
        left: how many rows are wanted at most; None for all of them.

    Attributes:
        shape: the number of samples, and of tokens; None until the first layer is cut.
        ids: of the rows that count, (n,) int64; of tokens (n, 2): sample, position in it.
    """

    def __init__(
        self, reading: Reading, batch: Any, given: Inputs, per: str, samples: int, left: int | None
    ) -> None:
        self._reading, self._batch, self._samples, self._left = reading, batch, samples, left
        self._n_dims = 2 if per == "token" else 1
        self._n = _n_samples(given)
        self.shape: torch.Size | None = None
        self._at: Tensor | None = None  # of the rows that count; None if all of them do

    def rows(self, name: str, t: Tensor) -> Tensor:
        """The rows of a layer."""
        n = t.shape[:1] if self._n is None else torch.Size([self._n])
        shape = self.shape or n + t.shape[1 : self._n_dims]
        if t.ndim < self._n_dims or t.shape[: self._n_dims] != shape:
            words = zip(shape, ("samples", "tokens"), strict=False)
            raise HookError(
                f'{WHO}: "{name}" gives {describe(t)} for a batch of '
                f"{' and '.join(f'{n} {word}' for n, word in words)}, which have to be its first "
                'dimensions. Give hook= a function that returns such rows, choose per="sample" or '
                '"token", or collect this layer by itself.'
            )
        if self.shape is None:
            self._settle(shape)
        t = t.flatten(0, 1) if self._n_dims == 2 else t
        if self._at is None:
            return t
        self._at = self._at.to(t.device)
        return t[self._at]

    def _settle(self, shape: torch.Size) -> None:
        """Which rows count, and their ids, now that it is known how many there are."""
        kept = self._reading.kept(self._batch, shape, self._samples)
        ids = self._reading.ids_of(self._batch, shape[0], self._samples)
        if self._n_dims == 2:
            places = torch.arange(shape[1], device="cpu").repeat(shape[0])
            ids = torch.stack([ids.repeat_interleave(shape[1]), places], 1)
        if not kept.all() or (self._left is not None and self._left < len(ids)):
            self._at = kept.flatten().nonzero()[: self._left, 0]
            ids = ids[self._at]
        self.shape, self.n_samples, self.ids = shape, shape[0], ids


def _n_samples(given: Inputs) -> int | None:
    """How many samples a model is called with, by its first input; None if that is unknown."""
    x = next(iter([*given, *given.kwargs.values()]), None)
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0])
    return x.shape[0] if isinstance(x, Tensor) and x.ndim and not x.is_nested else None
