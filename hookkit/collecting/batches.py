"""A batch of a loader: the model's inputs, the samples' ids and mask, and what layers give as rows.

Builds on `data`. A batch is a tensor, a tuple or list, a mapping, or any other object, which is one
input as it is.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from hookkit import ranks
from hookkit.checks import kind_of, shown
from hookkit.data import split_batch, to_device
from hookkit.devices import widest_float
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.modules import class_name, unwrap
from hookkit.nested import Inputs, describe, leaves

WHO = "collect"
Field = str | int | Callable[[Any], Any] | None
"""Something that a batch has: a key, a position or an attribute, or a function of the batch."""


class Reading:
    """How batches are read, and what layers give for the one that `begin` was called with last.

    Without `ids` only torch's own samplers say which samples each of several processes gets.

    Attributes:
        rank: this process's samples are at the positions rank, rank + ranks, … of all.
        ranks: the number of parts.
        n_samples: of the batch.
        ids: of the batch's rows that count, (n,) int64; of tokens (n, 2): sample, position in it.

    Raises:
        ArgumentError: `ids` or `mask` is no field of a batch.
        OptionError: there are several processes, and neither ids nor positions.
    """

    def __init__(self, model: nn.Module, loader: Any, per: str, ids: Field, mask: Field) -> None:
        for name, given in (("ids", ids), ("mask", mask)):
            good = given is None or callable(given) or isinstance(given, str | int)
            if not good or isinstance(given, bool):
                raise ArgumentError(
                    f"{WHO}({name}={shown(given)}): give the name of a field of the batch, the "
                    "position of an item of it, or a function of the batch."
                )
        self._ids, self._mask, self._n_dims = ids, mask, 2 if per == "token" else 1
        self.rank, self.ranks, self._n_all = ranks.rank(), ranks.world_size(), None
        batches = getattr(loader, "batch_sampler", None)
        sampler: Any = getattr(batches, "sampler", None)
        known = type(batches) is BatchSampler and type(sampler) is DistributedSampler
        if known and self.ranks in (1, sampler.num_replicas):
            self.rank, self.ranks = sampler.rank, sampler.num_replicas
            # behind its last sample it begins anew
            self._n_all = None if sampler.drop_last else len(sampler.dataset)
        elif ids is None and self.ranks > 1:
            raise OptionError(
                f"{WHO}: of this loader it is not known which samples each of the {self.ranks} "
                "processes gets. Give ids=, or a DataLoader with torch's DistributedSampler over "
                "all of them."
            )
        devices = {t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
        self._device = devices.pop() if len(devices) == 1 else None  # of several: accelerate's
        params = inspect.signature(unwrap(model).forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
        self._left_out = ({ids} if takes_any else {ids, mask}) - {*params}

    def begin(self, batch: Any, first: int, left: int | None) -> Inputs:
        """What the model is called with for a batch: a mapping by keyword, a tuple without target.

        Ids are left out unless the model names such an argument; so is a mask that it cannot take.

        Args:
            batch: what the loader gave.
            first: how many samples this process had before.
            left: how many rows are wanted at most; None for all of them.
        """
        self._batch, self._first, self._left = batch, first, left
        self._shape: torch.Size | None = None  # of samples, and tokens, as the first layer has them
        self._at: Tensor | None = None  # of the rows that count; None if all of them do
        given = self._inputs(batch)
        self._n = _n_samples(given)
        return given

    def _inputs(self, batch: Any) -> Inputs:
        if isinstance(batch, Mapping):
            kept = {k: self._moved(v) for k, v in batch.items() if k not in self._left_out}
            return Inputs((), kept)
        if isinstance(batch, tuple | list) and isinstance(self._ids, int):
            at = self._ids % max(len(batch), 1)
            batch = (*batch[:at], *batch[at + 1 :])
        return Inputs(self._moved(x) for x in split_batch(batch)[0])

    def _moved(self, x: Any) -> Any:
        if self._device is None:
            return x
        own = not leaves(x) and hasattr(x, "to")  # a user's object, such as a graph
        return x.to(self._device) if own else to_device(x, self._device)

    def rows(self, name: str, t: Tensor) -> Tensor:
        """What a layer gives for the batch as rows: one for each sample, or token, that counts."""
        if t.shape[: self._n_dims] != self._shape:
            self._settle(self._checked(name, t))
        t = t.flatten(0, 1) if self._n_dims == 2 else t
        if self._at is None:
            return t
        self._at = self._at.to(t.device)
        return t[self._at]

    def _checked(self, name: str, t: Tensor) -> torch.Size:
        """The number of samples, and tokens, of the first layer; raises HookError for others."""
        n = t.shape[:1] if self._n is None else torch.Size([self._n])
        shape = self._shape or n + t.shape[1 : self._n_dims]
        if t.ndim < self._n_dims or t.shape[: self._n_dims] != shape:
            words = zip(shape, ("samples", "tokens"), strict=False)
            raise HookError(
                f'{WHO}: "{name}" gives {describe(t)} for a batch of '
                f"{' and '.join(f'{n} {word}' for n, word in words)}, which have to be its first "
                'dimensions. Give hook= a function that returns such rows, choose per="sample" or '
                '"token", or collect this layer by itself.'
            )
        return shape

    def _settle(self, shape: torch.Size) -> None:
        """Which rows count, and their ids, now that it is known how many there are."""
        self._shape, self.n_samples = shape, shape[0]
        ids, kept = self._ids_of_samples(shape[0]), self._kept(shape)
        if self._n_dims == 2:
            places = torch.arange(shape[1], device="cpu").expand(shape)
            ids = torch.stack([ids[:, None].expand(shape), places], -1).flatten(0, 1)
        if kept is not None or (self._left is not None and self._left < len(ids)):
            every = torch.arange(len(ids), device="cpu")
            self._at = (every if kept is None else every[kept.flatten()])[: self._left]
            ids = ids[self._at]
        self.ids = ids

    def _positions(self, n: int) -> Tensor:
        first = self._first * self.ranks + self.rank
        return torch.arange(first, first + n * self.ranks, self.ranks, device="cpu")

    def _ids_of_samples(self, n: int) -> Tensor:
        if self._ids is None:
            return self._positions(n)
        if (ids := self._given_ids(self._batch)).shape != (n,):
            raise self._no_ids(f"{describe(ids)} for {n} samples")
        return ids

    def _given_ids(self, batch: Any) -> Tensor:
        found = _field_of(batch, self._ids, "ids")
        try:
            ids = torch.as_tensor(found, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise self._no_ids(kind_of(found)) from None
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise self._no_ids(f"{describe(ids)} of {ids.dtype}")
        return ids.to(torch.int64)

    def _no_ids(self, found: str) -> OptionError:
        return OptionError(
            f"{WHO}(ids={shown(self._ids)}): each sample of a batch needs a whole number, and this "
            f"is {found}. Number the samples, or leave ids= out."
        )

    def _kept(self, shape: torch.Size) -> Tensor | None:
        """Which rows count, a bool tensor of `shape`; None if all of them do."""
        kept = None
        if self._mask is not None:
            kept = torch.as_tensor(_field_of(self._batch, self._mask, "mask"), device="cpu") != 0
            if kept.shape != shape:
                raise OptionError(
                    f"{WHO}(mask={shown(self._mask)}): the mask is {describe(kept)}, and the rows "
                    f"of the layers are {'×'.join(map(str, shape))} (samples, and tokens with "
                    'per="token"). Give a mask of that shape.'
                )
        if self._n_all is not None:
            new = (self._positions(shape[0]) < self._n_all).view(-1, *[1] * (len(shape) - 1))
            kept = new.expand(shape) if kept is None else kept & new
        return kept

    def digest(self, batch: Any) -> str:
        """A fingerprint of a batch, by its ids if it has some, else by its tensors."""
        return digest(leaves(batch) if self._ids is None else [self._given_ids(batch)])


def _n_samples(given: Inputs) -> int | None:
    """How many samples a model is called with, by its first input; None if that is unknown."""
    x = next(iter([*given, *given.kwargs.values()]), None)
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0])
    return x.shape[0] if isinstance(x, Tensor) and x.ndim and not x.is_nested else None


def digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint: shape, dtype, the sum of all bits, and about 1024 values in their order."""
    text = hashlib.blake2b(digest_size=8)
    for t in tensors:
        text.update(f"{tuple(t.shape)} {t.dtype}".encode())
        try:
            flat = t.detach().reshape(-1)
            bits = flat.view(_WHOLE.get(flat.itemsize, torch.int64))
            some = bits[:: flat.numel() // 1024 | 1]  # odd: else perhaps of a few columns alone
            sums = [part.sum(dtype=torch.int64) for part in torch.split(bits, _PIECE)]
            text.update(torch.stack(sums).cpu().numpy().data)
            text.update(some.cpu().contiguous().numpy().data)
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, nested, quantized, meta
            continue
    return text.hexdigest()


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PIECE = 2**20


def sketch(rows: Tensor) -> list[float]:
    """16 sums, of all values, that depend on their places; for `alike`."""
    wide = widest_float(rows.device)
    flat, turns = rows.reshape(-1), torch.arange(_PIECE, dtype=wide, device=rows.device).cos()
    sums = [
        sum(piece.to(wide) @ turns[: len(piece)] for piece in torch.split(part, _PIECE))
        for part in torch.split(flat, -(-flat.numel() // 16) or 1)
    ]
    return torch.stack([torch.as_tensor(x, dtype=wide, device=rows.device) for x in sums]).tolist()


def alike(a: list[float], b: list[float]) -> bool:
    """Whether two sketches are of the same rows, as far as any device computes the same."""
    near = _ROUNDING * np.nanmax(np.abs([*a, *b, 0.0]))
    return len(a) == len(b) and np.allclose(a, b, rtol=0, atol=near, equal_nan=True)


_ROUNDING = 3e-3


def fingerprint(model: nn.Module) -> dict[str, str]:
    """What distinguishes a model, in words: class, values and modes.

    Raises:
        ArgumentError: a parameter or buffer has no shape yet.
    """
    root = unwrap(model)
    named: dict[str, Any] = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    if lazy := [name for name, p in named.items() if nn.parameter.is_lazy(p)]:
        raise ArgumentError(f"{WHO}: '{lazy[0]}' has no shape yet. Run the model once.")
    # of a sharded parameter this rank's part
    values = digest(p.to_local() if hasattr(p, "to_local") else p for p in named.values())
    modes = [m.training for m in root.modules()]
    mode = "training" if any(modes) else "evaluation"
    if any(modes) and not all(modes):
        mode += f" in {sum(modes)} modules, {digest([torch.tensor(modes, device='cpu')])}"
    return {"model": f"{class_name(root)} with parameters and buffers {values}", "mode": mode}


def _field_of(batch: Any, field: Any, option: str) -> Any:
    """What `field` is of a batch: by key, position or attribute, or what the function gives."""
    if callable(field):
        return field(batch)
    try:
        by_key = isinstance(batch, Mapping) or isinstance(field, int)
        return batch[field] if by_key else getattr(batch, field)
    except (KeyError, IndexError, AttributeError, TypeError):
        raise OptionError(
            f"{WHO}({option}={field!r}): a batch has no such field; it is {describe(batch)}. Give "
            "a field that it has, or a function of the batch."
        ) from None
