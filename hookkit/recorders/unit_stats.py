"""Dead units: one index of a layer's channel dimension, judged over a window of records.

A unit is dead if none of its values in the window is above 0. The window has two halves. When the
newer half is full, the older one is dropped, so the window covers 25 to 50 records. This file also
knows which dimension of an output counts units, and which modules have bounded outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookkit._core.graph import op_name, saved
from hookkit.recorders.moments import to_widest_float

WINDOW = 50
"""The number of records in a full window."""

CLAMPING = ("ReLU", "ReLU6")
"""Classes that return 0 for every value below 0."""

_FIRST = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "SyncBatchNorm", "LazyConv")
_LAST = ("Linear", "LayerNorm", "Embedding", "Bilinear", "RMSNorm", "LSTM", "GRU", "RNN")
_MIDDLES = {"Tanh": 0.0, "Hardtanh": 0.0, "Softsign": 0.0, "Sigmoid": 0.5, "Hardsigmoid": 0.5}
"""Bounded activations, whose range has flat ends → the middle of the range."""

_FIRST_OPS = ("Conv", "Mkldnn", "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm")
_LAST_OPS = ("Addmm", "Mm", "Bmm", "Linear", "NativeLayerNorm", "FusedRmsNorm", "Embedding")
_TURNS = ("Permute", "Transpose", "T", "Movedim")
_PART = 1 << 15  # how many values are searched at once


Before = tuple[torch.Size, int]
"""The shape of a tensor that came before, and the dimension of its units."""


def channel_dim(kind: str, t: Tensor, before: Before | None = None) -> int | None:
    """Return which dimension of `t`, an output of a module of class `kind`, counts its units.

    It is dimension 1 for convolutions and their norms (0 without a batch), and the last one for
    layers that work on features. Other modules, such as a ReLU, have the units of the layer before
    them, which the autograd graph shows. A frozen or compiled layer has no graph: then it is the
    dimension of the tensor recorded `before`, if the shapes are equal. Otherwise it is dimension 1
    of four or more, the last of two, and None of three, which may be channels or positions.
    """
    ndim = t.ndim
    if ndim < 2 or kind.startswith(_LAST) or kind.endswith(_LAST):
        return max(ndim - 1, 0)
    first = kind.startswith(_FIRST)
    spatial = kind[-2] if kind.endswith("d") and ("Conv" in kind or "Instance" in kind) else ""
    if spatial.isdigit() and ndim == int(spatial) + 1:
        return 0  # one image without a batch dimension
    if first:
        return 1
    node, unbatched = t.grad_fn, False
    for _ in range(32):  # through a residual block, not through a whole network
        if node is None:
            break
        name = op_name(node)
        if name in _TURNS:
            return ndim - 1 if ndim == 2 else None
        if name.startswith(_FIRST_OPS):
            return 0 if unbatched else 1
        if name.startswith(_LAST_OPS):
            return ndim - 1
        # A convolution of one image adds a batch and takes it away. Where `dim` is not known,
        # dimension 1 is taken.
        unbatched |= name == "Squeeze" and saved(node, "dim") == 0
        node = next((before for before, _ in node.next_functions if before is not None), None)
    if before is not None and before[0] == t.shape:
        return before[1]
    return {2: 1, 3: None}.get(ndim, 1)


def is_clamped(consumers: Mapping[str, Any], name: str, kind: str) -> bool:
    """Return whether the layer is a ReLU, or only a ReLU reads its output."""
    return kind in CLAMPING or consumers.get(name) in CLAMPING


def look_at(x: Tensor, kind: str, dim: int | None) -> tuple[Any, Any]:
    """Return which units of an output are alive, and how many of its values are saturated.

    Returns:
        (n_units,) bool, whether a unit has a value above 0 or NaN; None if `dim` is None. And a 0-d
        tensor, the number of values at the flat ends of a bounded activation; None for other
        classes. Both are on the device of `x`.
    """
    if not x.numel():
        return None, None
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        x = to_widest_float(x)  # bool and float8 have no arithmetic
    middle, full = _MIDDLES.get(kind), None
    if middle is not None:
        full = ((x - middle).abs() > 0.97 * (1 - middle)).sum().to(torch.float32)
    if dim is None:
        return None, full
    # a CPU stops when all units are alive; on a device, checking that would wait for it
    at_once = max(_PART * len(x) // x.numel(), 1) if x.is_cpu and dim else len(x)
    alive: Any = None
    for start in range(0, len(x), at_once):
        top = x[start : start + at_once]
        if dim < x.ndim - 1:  # reduce contiguous values first: 5 times as fast as all dimensions
            top = top.flatten(dim + 1).amax(-1)
        found = ~(top.reshape(-1, top.shape[-1]).amax(0) <= 0)
        alive = found if alive is None else alive | found
        if x.is_cpu and alive.numpy().all():
            break
    return alive, full


def either(a: Any, b: Any) -> Any:
    """Return (n_units,) bool: which units are alive in at least one of two calls.

    None stands for a call without values. If the number of units has changed, return `b`.
    """
    if a is None or b is None:
        return b if a is None else a
    return a | b if len(a) == len(b) else b


class Units:
    """Keeps for each row the dimension of its units, and which are alive in each half window."""

    def __init__(self) -> None:
        self._dims: dict[tuple[int, int], int | None] = {}  # by row and `ndim`
        self._before: Before | None = None  # the last tensor whose units are known
        self._older: dict[int, Any] = {}
        self._newer: dict[int, Any] = {}

    def dim(self, row: int, kind: str, t: Tensor) -> int | None:
        """Return `channel_dim` of a row's output, computed once for each `t.ndim`."""
        key = row, t.ndim
        if key not in self._dims:
            self._dims[key] = channel_dim(kind, t, self._before) if t.ndim else None
        if (dim := self._dims[key]) is not None:
            self._before = t.shape, dim
        return dim

    def after(self, alive: dict[int, Any], n: int) -> dict[int, float]:
        """Add record `n`; return row → fraction of dead units, for the rows in `alive`."""
        for row, found in alive.items():
            self._newer[row] = either(self._newer.get(row), found)
        shares = {row: float(self.dead(row).mean()) for row in alive}
        if (n + 1) % (WINDOW // 2) == 0:
            self._older, self._newer = self._newer, {}
        return shares

    def dead(self, row: int) -> Any:
        """Return (n_units,) bool: which are dead; None if the row's units are not known."""
        alive = either(self._older.get(row), self._newer.get(row))
        return None if alive is None else ~alive
