"""Norms of parameters, their gradients and their updates, all parameters at once.

By PyTorch's batched (`_foreach`) operations; on a CPU, up to some millions of values, by numpy,
which reads each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit.moments.cpu import norms
from hookkit.moments.moments import floats_of, plain, working_dtype

FEW = 1 << 23
"""Values up to which numpy's one read of each is faster than torch's several, on many threads."""

FIELDS = ("weight_norm", "grad_norm", "update_norm", "update_ratio", "bad", "n", "n_grad")


def local_values(t: Tensor) -> Tensor:
    """What a norm can be taken of: the local shard, the values of a sparse gradient.

    Of other layouts and of dtypes without arithmetic (float8, quantized, bool) the values as
    ordinary floats; none where there are no numbers (`plain`).
    """
    t = t.detach()
    if hasattr(t, "to_local"):
        t = t.to_local()
    if t.layout is torch.sparse_coo:
        t = t.coalesce().values()
    usual = t.is_complex() or (t.is_floating_point() and t.dtype.itemsize > 1)
    if usual and t.layout is torch.strided and not t.is_nested:
        return t
    values = plain(t)
    if values is None:
        return torch.zeros(0, dtype=torch.float32, device=t.device)
    return values.to(working_dtype(values))


def norms_of(tensors: list[Tensor]) -> Tensor:
    """(n,) float64 2-norms on the tensors' device; float32 arithmetic for 16-bit tensors."""
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
    wide = [t if t.numel() else t.new_zeros(1) for t in wide]
    norms = torch.stack([n.real for n in torch._foreach_norm(wide, 2)]).double()
    if norms.is_cpu:
        found = norms.numpy()
        for i in np.flatnonzero((found < _SMALL) | (found == math.inf)):
            norms[i] = _wider_norm(wide[i])
    return norms


def changes(before: list[Tensor], now: list[Tensor]) -> list[Tensor]:
    """`before` less `now`, unrounded: 16-bit tensors in float32, others into `before` itself."""
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in before]
    torch._foreach_sub_(wide, now)
    return wide


def grad_norms_by_id(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Of each of `parameters` that has a gradient: its id, and the gradient's norm, 0-d float64."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for p in parameters:
        if p.grad is not None:
            values = local_values(p.grad)
            by_device.setdefault(values.device, []).append((id(p), values))
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for some in by_device.values():
            found |= zip([i for i, _ in some], norms_of([t for _, t in some]), strict=True)
    return found


def arrays_of(tensors: Iterable[Tensor]) -> list[Any] | None:
    """The flat float32 arrays of CPU tensors; None if one of them has none."""
    arrays = [floats_of(t) for t in tensors]
    return None if any(x is None for x in arrays) else arrays


_SMALL = 1e-16  # below, squares leave float32; and above 1.8e19, where the norm is Inf


def _wider_norm(t: Tensor) -> Tensor:
    wider = torch.complex128 if t.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(t, dtype=wider).real.double()
    return norm


def rows_of(weight: Tensor, update: Tensor, grads: list[Tensor | None]) -> Tensor:
    """(parameters, fields) float64 of one device, from norms, in a few operations for all."""
    one, known = torch.ones_like(weight), [g for g in grads if g is not None]
    grad, has_grad = norms_of(known) if known else torch.zeros_like(weight), one
    if len(known) < len(grads):
        zero, found = torch.zeros_like(weight[0]), iter(grad)
        grad = torch.stack([zero if g is None else next(found) for g in grads])
        has_grad = torch.stack([zero if g is None else one[0] for g in grads])
    ratio = torch.where((weight == 0) & (update == 0), 0.0, update / weight)
    bad = (~torch.isfinite(weight + update + grad)).double()
    return torch.stack([weight, grad, update, ratio, bad, one, has_grad], dim=1)


def rows_swept(
    weights: list[float], copies: list[Any], now: list[Any], grads: list[Tensor | None]
) -> Tensor:
    """The same where all parameters are arrays, from what they were and what they are."""
    flat = [None if g is None or not g.ndim else floats_of(g) for g in grads]
    known = iter(norms([x for x in flat if x is not None]))
    rows = []
    for weight, update, g, x in zip(weights, norms(now, minus=copies), grads, flat, strict=True):
        grad = 0.0
        if x is not None:
            grad = next(known)
        elif g is not None:  # of one number, such as a norm, the size
            grad = float(norms_of([local_values(g)])) if g.ndim else abs(float(g))
        ratio = update / weight if weight else math.inf * update if update else 0.0
        bad = not math.isfinite(weight + update + grad)
        rows.append((weight, grad, update, ratio, bad, 1.0, g is not None))
    return torch.from_numpy(np.array(rows, dtype=np.float64))


def spread(table: Tensor, names: list[str], rows: list[str]) -> Tensor:
    """The rows of `names` at their places among `rows`, zeros elsewhere."""
    if names == rows:
        return table
    found = dict(zip(names, table.unbind(), strict=True))
    blank = torch.zeros_like(table[0])
    return torch.stack([found.get(name, blank) for name in rows])
