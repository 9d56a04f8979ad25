"""Norms of parameters, of their gradients and of what a step has changed.

They are taken of all parameters at once, by PyTorch's batched (`_foreach`) operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.devices import sent, widened, widest_float
from hookkit.recorders.moments import plain, widened as as_floats

_SMALL = 1e-16  # below, squares leave float32; and above 1.8e19, where the norm is Inf


def local_values(t: Tensor) -> Tensor:
    """What a norm can be taken of: the local shard, the values of a sparse gradient.

    Of dtypes without arithmetic (float8, bool) the values as ordinary floats; none where there are
    no numbers (`plain`).
    """
    t = t.detach()
    if t.layout is torch.sparse_coo:
        t = t.coalesce().values()
    if t.is_complex() and t.layout is torch.strided:
        t = torch.view_as_real(t.resolve_conj())
    values = plain(t)
    if values is None:
        return torch.zeros(0, dtype=torch.float32, device=t.device)
    usual = values.is_floating_point() and values.dtype.itemsize > 1
    return values if usual else as_floats(values)


def norms_of(tensors: list[Tensor]) -> Tensor:
    """(n,) 2-norms on the tensors' device, in its widest float; right also where squares overflow.

    16-bit tensors are read in float32, since their squares overflow early.
    """
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
    wide = [t if t.numel() else t.new_zeros(1) for t in wide]
    # Private: `torch._foreach_norm`, and `_foreach_sub_` and `_foreach_copy_`: one operation for a
    # list of tensors, in few kernels on a GPU (since 2.0; torch's optimizers are made of them).
    # Without them each tensor costs a launch of its own.
    dtype = None if wide[0].is_cpu else widest_float(wide[0].device)
    norms = widened(torch.stack(torch._foreach_norm(wide, 2, dtype)))
    if norms.is_cpu:
        sizes = norms.numpy()
        for i in np.flatnonzero((sizes < _SMALL) | (sizes == math.inf)):
            norms[i] = torch.linalg.vector_norm(wide[i], dtype=torch.float64)
    return norms


def grad_norms_by_id(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Of each of `parameters` that has a gradient: its id, and the gradient's norm, 0-d float64."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for p in parameters:
        if p.grad is not None:
            values = local_values(p.grad)
            by_device.setdefault(values.device, []).append((id(p), values))
    norms: dict[int, Tensor] = {}
    with torch.no_grad():
        for some in by_device.values():
            norms |= zip([i for i, _ in some], norms_of([t for _, t in some]), strict=True)
    return norms


class WeightCopies:
    """The weights as they were before a step, and the norms of what the step has made of them."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, live: dict[str, nn.Parameter]) -> bool:
        """Copies the parameters. Whether they are others than before, or of another kind."""
        now = {name: local_values(p) for name, p in live.items()}
        if changed := _kinds(now) != _kinds(self._copies):
            self._copies = {name: torch.empty_like(t) for name, t in now.items()}
        with torch.no_grad():
            for names in _by_device(self._copies).values():
                copies = [self._copies[name] for name in names]
                torch._foreach_copy_(copies, [now[name] for name in names])  # private: see above
        return changed

    def moved(self, live: dict[str, nn.Parameter]) -> list[tuple[list[str], Tensor]]:
        """Names, and (2, names) norms before the step and of the update, for each device."""
        now = {name: local_values(p) for name, p in live.items()}
        # a step may have given a parameter another shape, or moved it: nothing to subtract from
        kind: Callable[[Tensor], Any] = lambda t: (t.shape, t.device)  # noqa: E731
        same = {n: t for n, t in self._copies.items() if kind(t) == kind(now[n])}
        norms = []
        with torch.no_grad():
            for names in _by_device(same).values():
                before = [same[name] for name in names]
                weights = norms_of(before)
                # unrounded: 16-bit tensors in float32, others into the copies themselves
                update = [t.float() if t.dtype.itemsize < 4 else t for t in before]
                torch._foreach_sub_(update, [now[name] for name in names])  # private: see above
                norms.append((names, torch.stack([weights, norms_of(update)])))
        return norms


def _kinds(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (t.shape, t.device, t.dtype) for name, t in tensors.items()}


def _by_device(tensors: dict[str, Tensor]) -> dict[torch.device, list[str]]:
    names: dict[torch.device, list[str]] = {}
    for name, t in tensors.items():
        names.setdefault(t.device, []).append(name)
    return names


def arriving(parts: list[tuple[list[str], Tensor]]) -> Callable[[], dict[str, Any]]:
    """Sends (…, names) tensors from their devices; what reads them: name → its numbers."""
    on_way = [(names, *sent(t)) for names, t in parts]

    def read() -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        for names, host, event in on_way:
            if event is not None:
                event.synchronize()  # sync: sent up to 8 steps ago
            numbers |= zip(names, host.double().t().numpy(), strict=True)
        return numbers

    return read
