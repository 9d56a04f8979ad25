"""A batch of a loader: the model's inputs, and which rows count, with their ids.

Builds on `data`. A batch is a tensor, a tuple or list, a mapping, or any other object, which is one
input as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from hookkit import ranks
from hookkit.checks import kind_of, shown
from hookkit.data import n_batches, to_device
from hookkit.errors import ArgumentError, OptionError
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe

WHO = "collect"
Field = str | int | Callable[[Any], Any] | None
"""Something that a batch has: a key, a position or an attribute, or a function of the batch."""


class Reading:
    """How batches are read.

    Without `ids` only torch's own sampler says which samples each of several processes gets.

    Attributes:
        rank: this process's samples are at the positions rank, rank + ranks, … of all.
        ranks: the number of processes.

    Raises:
        ArgumentError: `ids` or `mask` is no field of a batch.
        OptionError: there are several processes, and neither ids nor positions.
    """

    def __init__(self, model: nn.Module, loader: Any, ids: Field, mask: Field) -> None:
        for name, field in (("ids", ids), ("mask", mask)):
            known = field is None or callable(field) or isinstance(field, str | int)
            if isinstance(field, bool) or not known:
                raise ArgumentError(
                    f"{WHO}({name}={shown(field)}): give the name of a field of the batch, the "
                    "position of an item of it, or a function of the batch."
                )
        self.ids, self.mask = ids, mask
        self.rank, self.ranks, self.n_all = ranks.rank(), ranks.world_size(), None
        sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if type(sampler) is DistributedSampler and self.ranks in (1, sampler.num_replicas):
            self.rank, self.ranks = sampler.rank, sampler.num_replicas
            # behind its last sample it begins anew
            self.n_all = None if sampler.drop_last else n_batches(sampler.dataset)
        elif ids is None and self.ranks > 1:
            raise OptionError(
                f"{WHO}: it is not known which samples of this loader each of the {self.ranks} "
                "processes gets. Give ids=, or a DataLoader with torch's DistributedSampler over "
                "all of them."
            )
        devices = {t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
        self._device = devices.pop() if len(devices) == 1 else None  # of several: accelerate's
        params = inspect.signature(unwrap(model).forward).parameters
        self._masks = [name for name in params if "mask" in name]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
        self._left_out = ({ids} if takes_any else {ids, mask}) - {*params}

    def inputs(self, batch: Any) -> Inputs:
        """What the model is called with: a mapping by keyword, a tuple without its target.

        Ids are left out unless the model has an argument of that name; so is a mask that it cannot
        take.
        """
        if isinstance(batch, Mapping):
            kept = {k: self._moved(v) for k, v in batch.items() if k not in self._left_out}
            return Inputs((), kept)
        if not isinstance(batch, tuple | list):
            return Inputs([self._moved(batch)])
        at = self.ids % max(len(batch), 1) if isinstance(self.ids, int) else None
        *items, last = (self._moved(x) for i, x in enumerate(batch) if i != at)
        if not items:
            return Inputs([last])
        key = self._mask_argument(items[0], last, self._field(batch, "mask") is batch[-1])
        return Inputs(items, {key: last} if key else {})

    def _mask_argument(self, first: Any, last: Any, is_mask: bool) -> str:
        """The model's argument for the last item of a batch, if that is a mask and no target.

        That is what mask= says; else zeros and ones in the shape of the first item.
        """
        if not self._masks:
            return ""
        if not is_mask:
            tensors = isinstance(first, Tensor) and isinstance(last, Tensor)
            if not tensors or last.ndim < 2 or last.shape != first.shape[: last.ndim]:
                return ""
            if last.is_floating_point() or not ((last == 0) | (last == 1)).all():
                return ""
        return "attention_mask" if "attention_mask" in self._masks else self._masks[0]

    def _moved(self, x: Any) -> Any:
        if self._device is None:
            return x
        own = not isinstance(x, Tensor) and hasattr(x, "to")  # a user's object, such as a graph
        return x.to(self._device) if own else to_device(x, self._device)

    def rows(
        self, batch: Any, shape: torch.Size, first: int, fresh: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """The places of the rows that count, None if all do, and their ids.

        Args:
            batch: what the loader gave.
            shape: how many samples there are, and with `per="token"` tokens.
            first: how many samples this process had before.
            fresh: which samples count, None for all.

        Returns:
            `(n,)` int64, and `(n,)` int64, of tokens `(n, 2)`: sample, position in it.
        """
        start = first * self.ranks + self.rank
        positions = torch.arange(start, start + shape[0] * self.ranks, self.ranks, device="cpu")
        ids = positions if self.ids is None else self.sample_ids(batch)
        if ids.shape != shape[:1]:
            raise self._no_ids(f"{describe(ids)} for {shape[0]} samples")
        counts = None
        if self.mask is not None:
            counts = torch.as_tensor(self._field(batch, "mask"), device="cpu") != 0
            if counts.shape != shape:
                raise OptionError(
                    f"{WHO}(mask={shown(self.mask)}): the mask is {describe(counts)}, and the rows "
                    f"of the layers are {'×'.join(map(str, shape))} (samples, and tokens with "
                    'per="token"). Give a mask of that shape.'
                )
        new = None if self.n_all is None else positions < self.n_all
        for of_samples in (new, fresh):
            if of_samples is not None:
                whole = of_samples.view(-1, *[1] * (len(shape) - 1)).expand(shape)
                counts = whole if counts is None else counts & whole
        if len(shape) == 2:
            places = torch.arange(shape[1], device="cpu").expand(shape)
            ids = torch.stack([ids[:, None].expand(shape), places], -1).flatten(0, 1)
        if counts is None or counts.all():
            return None, ids
        at = counts.flatten().nonzero()[:, 0]
        return at, ids[at]

    def sample_ids(self, batch: Any) -> Tensor:
        """The ids of a batch's samples."""
        field = self._field(batch, "ids")
        try:
            ids = torch.as_tensor(field, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise self._no_ids(kind_of(field)) from None
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool or ids.ndim != 1:
            raise self._no_ids(f"{describe(ids)} of {ids.dtype}")
        return ids.to(torch.int64)

    def _no_ids(self, found: str) -> OptionError:
        return OptionError(
            f"{WHO}(ids={shown(self.ids)}): each sample of a batch needs a whole number, and this "
            f"is {found}. Number the samples, or leave ids= out."
        )

    def _field(self, batch: Any, option: str) -> Any:
        """What a batch has by key, position or attribute, or what the function gives."""
        field = getattr(self, option)
        if field is None or callable(field):
            return field and field(batch)
        try:
            by_key = isinstance(batch, Mapping) or isinstance(field, int)
            return batch[field] if by_key else getattr(batch, field)
        except (KeyError, IndexError, AttributeError, TypeError):
            raise OptionError(
                f"{WHO}({option}={field!r}): a batch has no such field; it is {describe(batch)}. "
                "Give a field that it has, or a function of the batch."
            ) from None
