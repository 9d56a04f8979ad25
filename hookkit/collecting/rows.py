"""What layers gave for a batch, as rows: one for each sample, or for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hookkit.collecting.batches import WHO, Reading
from hookkit.errors import HookError
from hookkit.hooks import Hooks
from hookkit.nested import Inputs, describe

Rows = tuple[dict[str, Tensor], Tensor]
"""(n_rows, …) by layer, and (n_rows,) int64 ids; of tokens (n_rows, 2): sample, position in it."""


def called(hooks: Hooks, names: list[str], hint: str) -> dict[str, Tensor]:
    """The tensor that each module gave; those of a module called k times as `name:0` to k - 1.

    Raises:
        HookError: a module was not called, or gave no dense tensor, or several.
    """
    if silent := hooks.silent:
        label, why = next(iter(silent.items()))
        raise HookError(
            f"{WHO}: {len(silent)} of {len(hooks)} modules were not called: {label}: {why}. Leave "
            "out what does not run for every batch."
        )
    return {
        name if len(calls) == 1 else f"{name}:{i}": _tensor(name, value, hint)
        for name in names
        for calls in [hooks[name].calls]
        for i, value in enumerate(calls)
    }


def _tensor(name: str, found: dict[str, Tensor], hint: str) -> Tensor:
    """The only tensor of those that were found, by path."""
    if len(found) != 1:
        paths = ", ".join(f'"{path}"' for path in [*found][:6])
        cure = hint.format(name=name, paths=paths) if found else "Give hook= a function of it."
        words = ", ".join(map(describe, found.values())) or "none"
        raise HookError(
            f'{WHO}: of "{name}" one tensor is needed to make rows, and there is {words}. {cure}'
        )
    t = next(iter(found.values()))
    if t.is_nested or t.is_quantized or t.layout is not torch.strided or t.is_complex():
        raise HookError(
            f'{WHO}: "{name}" gives a tensor of {t.dtype} ({t.layout}), and rows are dense and '
            "real. Give hook= a function that returns such a tensor."
        )
    return t


class Cutter:
    """Cuts what layers gave into rows, at most `n` in all (None: no limit).

    `n_rows` and `samples` count what there was until now.
    """

    def __init__(self, reading: Reading, per: str, n: int | None) -> None:
        self.reading, self.n_dims, self.n = reading, 2 if per == "token" else 1, n
        self.n_rows = self.samples = 0

    @property
    def is_full(self) -> bool:
        """Whether there are `n` rows."""
        return self.n is not None and self.n_rows >= self.n

    def rows(self, batch: Any, given: Inputs, found: dict[str, Tensor]) -> Rows:
        """The rows of a batch that count; what was `given` to the model has as many samples."""
        shape = self._shape(found, _n_samples(given))
        ids = self._ids(batch, shape)
        kept = self.reading.kept(batch, shape, self.samples)
        if self.n is not None and kept is None and self.n - self.n_rows < shape.numel():
            kept = torch.ones(shape, dtype=torch.bool)
        if self.n_dims == 2:
            found = {name: t.flatten(0, 1) for name, t in found.items()}
        if kept is not None:
            left = None if self.n is None else self.n - self.n_rows
            at = kept.flatten().nonzero()[:left, 0]
            found, ids = {name: t[at.to(t.device)] for name, t in found.items()}, ids[at]
        self.samples += shape[0]
        self.n_rows += len(ids)
        return found, ids

    def _ids(self, batch: Any, shape: torch.Size) -> Tensor:
        if self.reading.ids is None:
            ids = self.reading.positions(shape[0], self.samples)
        elif (ids := self.reading.given_ids(batch)).shape != shape[:1]:
            raise self.reading.no_ids(f"{describe(ids)} for {shape[0]} samples")
        if self.n_dims == 1:
            return ids
        places = torch.arange(shape[1]).repeat(shape[0])
        return torch.stack([ids.repeat_interleave(shape[1]), places], 1)

    def _shape(self, found: dict[str, Tensor], n: int | None) -> torch.Size:
        """The number of samples, and of tokens, which is the same in all layers."""
        first = next(iter(found.values())).shape[: self.n_dims]
        shape = first if n is None else torch.Size([n, *first[1:]])
        for name, t in found.items():
            if t.ndim < self.n_dims or t.shape[: self.n_dims] != shape:
                words = zip(shape, ("samples", "tokens"), strict=False)
                raise HookError(
                    f'{WHO}: "{name}" gives {describe(t)} for a batch of '
                    f"{' and '.join(f'{n} {word}' for n, word in words)}, which have to be its "
                    "first dimensions. Give hook= a function that returns such rows, choose "
                    'per="sample" or "token", or collect this layer by itself.'
                )
        return shape


def _n_samples(given: Inputs) -> int | None:
    """How many samples a model is called with, by its first input; None if that is unknown."""
    x = next(iter([*given, *given.kwargs.values()]), None)
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0])
    return x.shape[0] if isinstance(x, Tensor) and x.ndim and not x.is_nested else None
