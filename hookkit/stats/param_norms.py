"""Norms of parameters, of their gradients and of what a step has changed.

They are taken of all parameters at once, by PyTorch's batched (`_foreach`) operations; on a CPU, up
to some millions of values, by `moments.cpu.norms`, which reads each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.devices import widened, widest_float
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
    """(n,) 2-norms on the tensors' device, in its widest float; right also where squares overflow.

    16-bit tensors are read in float32, since their squares overflow early.
    """
    wide = [t.float() if t.dtype.itemsize < 4 else t for t in tensors]
    wide = [t if t.numel() else t.new_zeros(1) for t in wide]
    # Private: `torch._foreach_norm`, and `_foreach_sub_` and `_foreach_copy_`: one operation for a
    # list of tensors, in few kernels on a GPU (since 2.0; torch's optimizers are made of them).
    # Without them each tensor costs a launch of its own.
    dtype = None
    if not (wide[0].is_cpu or any(t.is_complex() for t in wide)):
        dtype = widest_float(wide[0].device)
    norms = widened(torch.stack([n.real for n in torch._foreach_norm(wide, 2, dtype)]))
    if norms.is_cpu:
        found = norms.numpy()
        for i in np.flatnonzero((found < _SMALL) | (found == math.inf)):
            kind = torch.complex128 if wide[i].is_complex() else torch.float64
            norms[i] = torch.linalg.vector_norm(wide[i], dtype=kind).real
    return norms


_SMALL = 1e-16  # below, squares leave float32; and above 1.8e19, where the norm is Inf


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


class WeightCopies:
    """The weights as they were before a step, and the norms of what the step has made of them.

    Two ways to the same numbers: few float32 values on a CPU are arrays, each read once; others are
    tensors, subtracted and summed in batched operations, for each device.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._arrays: list[Any] | None = None  # of the same memory, where numpy reads it
        self._norms: list[float] = []  # of these arrays

    def take(self, live: dict[str, nn.Parameter]) -> bool:
        """Copies the parameters. Whether they are others than before, or of another kind."""
        arrays, old, same = _arrays_of(live.values()), self._arrays, [*live] == [*self._tensors]
        if arrays is None or sum(map(len, arrays)) > FEW:
            arrays = None
        is_usual = arrays is not None and old is not None and same and _alike(arrays, old)
        changed = not is_usual and self._make_room(live)
        self._arrays = old if is_usual else arrays and _arrays_of(self._tensors.values())
        if arrays is None or self._arrays is None:
            now = [local_values(p) for p in live.values()]
            with torch.no_grad():
                torch._foreach_copy_(list(self._tensors.values()), now)  # private: see above
            self._arrays = None
        else:
            self._norms = norms(arrays, self._arrays)
        return changed

    def _make_room(self, live: dict[str, nn.Parameter]) -> bool:
        now = {name: local_values(p) for name, p in live.items()}
        if {n: _kind(t) for n, t in now.items()} == {n: _kind(t) for n, t in self._tensors.items()}:
            return False
        self._tensors = {name: torch.empty_like(t) for name, t in now.items()}
        return True

    def tables(
        self, live: dict[str, nn.Parameter], grads: dict[str, Tensor | None], rows: list[str]
    ) -> dict[torch.device, Tensor]:
        """By device the (rows, `FIELDS`) float64 table of the step that was made.

        Args:
            live: the same parameters after it.
            grads: the gradient that it used for each of them, or the norm of that; None for none.
            rows: names of the table's rows.
        """
        arrays = None if self._arrays is None else _arrays_of(live.values())
        if arrays is not None and self._arrays is not None and _alike(arrays, self._arrays):
            table = self._by_arrays(arrays, list(grads.values()))
            return {torch.device("cpu"): _spread(table, list(live), rows)}
        tables = {}
        now = {name: local_values(p) for name, p in live.items()}
        # a step may have given a parameter another shape, or moved it: nothing to subtract from
        same = [n for n, t in self._tensors.items() if _kind(t)[:2] == _kind(now[n])[:2]]
        for device in {now[name].device for name in same}:
            names = [name for name in same if now[name].device == device]
            some = [None if (g := grads[n]) is None else local_values(g) for n in names]
            table = self._by_tensors(names, [now[n] for n in names], some)
            tables[device] = _spread(table, names, rows)
        return tables

    def _by_tensors(
        self, names: list[str], now: list[Tensor], grads: list[Tensor | None]
    ) -> Tensor:
        """The rows of parameters on one device, in a few operations for all."""
        before = [self._tensors[name] for name in names]
        weight = norms_of(before)
        # unrounded: 16-bit tensors in float32, others into the copies themselves
        moved = [t.float() if t.dtype.itemsize < 4 else t for t in before]
        torch._foreach_sub_(moved, now)
        update, one, zero = norms_of(moved), torch.ones_like(weight), torch.zeros_like(weight)
        known = [g for g in grads if g is not None]
        grad, has_grad = norms_of(known) if known else zero, one
        if len(known) < len(grads):
            found = iter(grad)
            grad = torch.stack([zero[0] if g is None else next(found) for g in grads])
            has_grad = torch.stack([zero[0] if g is None else one[0] for g in grads])
        ratio = torch.where((weight == 0) & (update == 0), 0.0, update / weight)
        bad = widened(~torch.isfinite(weight + update + grad))
        return torch.stack([weight, grad, update, ratio, bad, one, has_grad], dim=1)

    def _by_arrays(self, now: list[Any], grads: list[Tensor | None]) -> Tensor:
        """The same of arrays, each read once."""
        flat = [None if g is None or not g.ndim else floats_of(g) for g in grads]
        known = iter(norms([x for x in flat if x is not None]))
        updates, rows = norms(now, minus=self._arrays), []
        for weight, update, g, x in zip(self._norms, updates, grads, flat, strict=True):
            grad = 0.0
            if x is not None:
                grad = next(known)
            elif g is not None:  # of one number, such as a norm, the size
                grad = float(norms_of([local_values(g)])) if g.ndim else abs(float(g))
            ratio = update / weight if weight else math.inf * update if update else 0.0
            bad = not math.isfinite(weight + update + grad)
            rows.append((weight, grad, update, ratio, bad, 1.0, g is not None))
        return torch.from_numpy(np.array(rows, dtype=np.float64))


def _arrays_of(tensors: Iterable[Tensor]) -> list[Any] | None:
    """The flat float32 arrays of CPU tensors; None if one of them has none."""
    arrays = [floats_of(t) for t in tensors]
    return None if any(x is None for x in arrays) else arrays


def _alike(arrays: list[Any], copies: list[Any]) -> bool:
    return [len(x) for x in arrays] == [len(x) for x in copies]


def _kind(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.device, t.dtype


def _spread(table: Tensor, names: list[str], rows: list[str]) -> Tensor:
    """The rows of `names` at their places among `rows`, zeros elsewhere."""
    if names == rows:
        return table
    found = dict(zip(names, table.unbind(), strict=True))
    blank = torch.zeros_like(table[0])
    return torch.stack([found.get(name, blank) for name in rows])
