"""A batch of a loader: the model's inputs, the ids of its samples, and its mask.

Builds on `data`. A batch is a tensor, a tuple or list, a mapping, or any other object, which is one
input as it is.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from hookkit import ranks
from hookkit.checks import kind_of, shown
from hookkit.data import split_batch, to_device
from hookkit.errors import ArgumentError, OptionError
from hookkit.modules import class_name, unwrap
from hookkit.nested import Inputs, describe, leaves

WHO = "collect"
Field = str | int | Callable[[Any], Any] | None
"""Something that a batch has: a key, a position or an attribute, or a function of the batch."""


class Reading:
    """How batches are read: what `model` gets of them, their samples' ids, and the mask.

    Without `ids` only torch's own samplers say which samples each of several processes gets.

    Attributes:
        rank: this process's samples are at the positions rank, rank + ranks, … of all.
        ranks: the number of parts.
        n_samples: the length of the data set, behind which a sampler begins it anew; else None.

    Raises:
        ArgumentError: `ids` or `mask` is no field of a batch.
        OptionError: there are several processes, and neither ids nor positions.
    """

    def __init__(self, model: nn.Module, loader: Any, ids: Field, mask: Field) -> None:
        for name, given in (("ids", ids), ("mask", mask)):
            good = given is None or callable(given) or isinstance(given, str | int)
            if not good or isinstance(given, bool):
                raise ArgumentError(
                    f"{WHO}({name}={shown(given)}): give the name of a field of the batch, the "
                    "position of an item of it, or a function of the batch."
                )
        self.ids, self.mask = ids, mask
        self.rank, self.ranks, self.n_samples = ranks.rank(), ranks.world_size(), None
        batches = getattr(loader, "batch_sampler", None)
        sampler: Any = getattr(batches, "sampler", None)
        known = type(batches) is BatchSampler and type(sampler) is DistributedSampler
        if known and self.ranks in (1, sampler.num_replicas):
            self.rank, self.ranks = sampler.rank, sampler.num_replicas
            self.n_samples = None if sampler.drop_last else len(sampler.dataset)
        elif ids is None and self.ranks > 1:
            raise OptionError(
                f"{WHO}: of this loader it is not known which samples each of the {self.ranks} "
                "processes gets. Give ids=, or a DataLoader with torch's DistributedSampler over "
                "all of them."
            )
        devices = {t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
        self.device = devices.pop() if len(devices) == 1 else None  # of several: accelerate's
        params = inspect.signature(unwrap(model).forward).parameters
        self.takes = {*params}
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())

    def inputs(self, batch: Any) -> Inputs:
        """What the model is called with: a mapping by keyword, a tuple without its target.

        Ids are left out unless the model names such an argument; so is a mask that it cannot take.
        """
        if isinstance(batch, Mapping):
            own = {self.ids} if self.takes_any else {self.ids, self.mask}
            kept = {k: v for k, v in batch.items() if k not in own or k in self.takes}
            return Inputs((), {k: self._moved(v) for k, v in kept.items()})
        if isinstance(batch, tuple | list) and isinstance(self.ids, int):
            at = self.ids % max(len(batch), 1)
            batch = (*batch[:at], *batch[at + 1 :])
        return Inputs(self._moved(x) for x in split_batch(batch)[0])

    def _moved(self, x: Any) -> Any:
        if self.device is None:
            return x
        own = not leaves(x) and hasattr(x, "to")  # a user's object, such as a graph
        return x.to(self.device) if own else to_device(x, self.device)

    def positions(self, n: int, first: int) -> Tensor:
        """Of `n` samples of this process, before which it had `first`."""
        return torch.arange(first, first + n, device="cpu") * self.ranks + self.rank

    def ids_of(self, batch: Any, n: int, first: int) -> Tensor:
        """The ids of a batch's `n` samples, (n,) int64, before which this process had `first`."""
        if self.ids is None:
            return self.positions(n, first)
        if (ids := self._given_ids(batch)).shape != (n,):
            raise self._no_ids(f"{describe(ids)} for {n} samples")
        return ids

    def _given_ids(self, batch: Any) -> Tensor:
        found = field_of(batch, self.ids, "ids")
        try:
            ids = torch.as_tensor(found, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise self._no_ids(kind_of(found)) from None
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise self._no_ids(f"{describe(ids)} of {ids.dtype}")
        return ids.to(torch.int64)

    def _no_ids(self, found: str) -> OptionError:
        return OptionError(
            f"{WHO}(ids={shown(self.ids)}): each sample of a batch needs a whole number, and this "
            f"is {found}. Number the samples, or leave ids= out."
        )

    def kept(self, batch: Any, shape: torch.Size, first: int) -> Tensor:
        """Which rows of a batch count, a bool tensor of `shape`."""
        kept = torch.ones(shape, dtype=torch.bool, device="cpu")
        if self.n_samples is not None:
            kept[self.positions(shape[0], first) >= self.n_samples] = False
        if self.mask is not None:
            mask = torch.as_tensor(field_of(batch, self.mask, "mask"), device="cpu") != 0
            if mask.shape != shape:
                raise OptionError(
                    f"{WHO}(mask={shown(self.mask)}): the mask is {describe(mask)}, and the rows "
                    f"of the layers are {'×'.join(map(str, shape))} (samples, and tokens with "
                    'per="token"). Give a mask of that shape.'
                )
            kept &= mask
        return kept

    def digest(self, batch: Any) -> str:
        """A fingerprint of a batch, by its ids if it has some, else by its tensors."""
        return digest(leaves(batch) if self.ids is None else [self._given_ids(batch)])


def digest(tensors: Iterable[Tensor]) -> str:
    """A fingerprint: shape, dtype and about 1024 values of each, spread evenly, for little cost."""
    text = hashlib.blake2b(digest_size=8)
    for t in tensors:
        text.update(f"{tuple(t.shape)} {t.dtype}".encode())
        try:
            some = t.detach().reshape(-1)[:: max(1, t.numel() // 1024)].cpu().contiguous()
            text.update(some.view(torch.uint8).numpy().data)
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, nested, quantized, meta
            continue
    return text.hexdigest()


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
    mixed = (
        f"training in {modes.count(True)} modules, {digest([torch.tensor(modes, device='cpu')])}"
    )
    return {
        "model": f"{class_name(root)} with parameters and buffers {values}",
        "mode": mixed if len({*modes}) == 2 else "training" if modes[0] else "evaluation",
    }


def field_of(batch: Any, field: Any, option: str) -> Any:
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
