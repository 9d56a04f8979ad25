"""Helpers for parameters: list them by name, find those that a step used, compute their norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit._core.devices import widest_float
from hookkit._core.modules import class_name, is_parametrization, join, submodules, walk
from hookkit.callbacks.optimizers import ids_of
from hookkit.recorders.moments import dot, has_numbers, plain, to_widest_float

_FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_TINY = 1e-16  # squares of values with a smaller norm underflow in float32


def named_parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (name, class of the owning module, parameter) of each parameter with values, once.

    >>> [(name, kind) for name, kind, _ in named_parameters(nn.Sequential(nn.Linear(2, 2)))]
    [('0.weight', 'Linear'), ('0.bias', 'Linear')]
    """
    seen: set[int] = set()
    for place, module, first in walk(model):
        held = list(module.named_parameters(recurse=False)) if first else []
        rules = submodules(module).get("parametrizations") if first else None
        if rules is not None and is_parametrization("parametrizations", rules):
            held += [(f"parametrizations.{key}", p) for key, p in rules.named_parameters()]
        for key, p in held:
            if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta or id(p) in seen:
                continue
            if p.is_quantized or has_numbers(p.dtype):  # quantized packs have a dtype of their own
                seen.add(id(p))
                yield join(place, key), class_name(module), p


def used_parameters(learn: Any, ids: set[int]) -> set[int]:
    """Return the `ids` of parameters that are in the optimizers of the last step.

    The `.grad` of other parameters belongs to another step or another loss (a GAN's other player),
    or was never zeroed. If none is in an optimizer, optimizers hold copies of weights: return all.
    """
    return ids & ids_of(learn.stepped_opts) or ids


def is_plain(t: Tensor) -> bool:
    """Return whether `t` is an ordinary dense tensor of floats, which can be read as it is."""
    dense = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
    return dense and t.dtype in _FLOATS and not (t.is_nested or t.is_neg())


def local_values(t: Tensor) -> Tensor:
    """Return a plain tensor with the values of `t`: of a local shard, or of a sparse gradient.

    A dtype without arithmetic (float8, bool) becomes an ordinary float. If the values cannot be
    read (see `moments.plain`), the result is empty.
    """
    t = t.detach()
    if t.layout is torch.sparse_coo:
        t = t.coalesce().values()
    if t.is_complex() and t.layout is torch.strided:
        t = torch.view_as_real(t.resolve_conj())
    values = plain(t)
    if values is None:
        return torch.zeros(0, dtype=torch.float32, device=t.device)
    return values if values.dtype in _FLOATS else to_widest_float(values)


def grad_norms(parameters: Sequence[nn.Parameter]) -> list[tuple[list[int], Tensor]]:
    """Return for each device the indices of parameters with a gradient, and the gradients' norms.

    >>> w = nn.Parameter(torch.ones(4)); w.sum().backward()
    >>> grad_norms([nn.Parameter(torch.ones(1)), w])
    [([1], tensor([2.], dtype=torch.float64))]
    """
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    for i, p in enumerate(parameters):
        if p.grad is not None:
            values = p.grad if is_plain(p.grad) else local_values(p.grad)
            places, grads = by_device.setdefault(values.device, ([], []))
            places.append(i)
            grads.append(values)
    return [(places, norms_of(grads)) for places, grads in by_device.values()]


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Return the (n,) 2-norms of tensors on one device, in its widest float and on it.

    On a CPU they have float32 precision even if squares overflow float32, and for large tensors, in
    which `torch.linalg.vector_norm` had an error of 1e-2.

    Args:
        tensors: plain tensors (see `is_plain`), or results of `local_values`.
    """
    if not tensors[0].is_cpu:
        wide = [t.float() if t.dtype.itemsize < 4 else t.detach() for t in tensors]
        wide = [t if t.numel() else t.new_zeros(1) for t in wide]
        # Private: `torch._foreach_norm` (since 2.0; torch's optimizers are made of such operations)
        # computes the norms of a list in few kernels. Without it, each tensor needs its own launch.
        kind = widest_float(wide[0].device)
        return torch.stack(torch._foreach_norm(wide, 2, kind)).to(kind)
    norms = np.empty(len(tensors))
    with np.errstate(all="ignore"):
        for i, t in enumerate(tensors):
            values = (t.float() if t.dtype.itemsize < 4 else t).detach().numpy().reshape(-1)
            norms[i] = norm = math.sqrt(dot(values, values))
            if values.size and not _TINY < norm < math.inf:  # squares over- or underflowed
                norms[i] = largest = max(abs(float(values.min())), abs(float(values.max())))
                if 0 < largest < math.inf:
                    values = values / largest
                    norms[i] *= math.sqrt(dot(values, values))
    return torch.from_numpy(norms)
