"""Dead units: one index of a layer's channel dimension, judged over a window of records.

A unit is dead if its greatest value over the window is at most 0. Kept are two halves of the
window, of which the older is dropped when the newer is full: so a judgement rests on 25 to 50
records. Also here: which dimension counts units, and which classes of modules have flat ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookkit.autograd_graph import op_name

WINDOW = 50
"""Records that a judgement looks back on."""

CLAMPING = ("ReLU", "ReLU6")
"""Classes that give 0 for every value below 0."""

_FIRST = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "SyncBatchNorm", "LazyConv")
_LAST = ("Linear", "LayerNorm", "Embedding", "Bilinear", "RMSNorm", "LSTM", "GRU", "RNN")
_FLAT_ENDS = {"Tanh": 0.0, "Softsign": 0.0, "Sigmoid": 0.5}  # "Hardtanh" ends with "tanh", …
_FIRST_OPS = ("Conv", "Mkldnn", "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm")
_LAST_OPS = ("Addmm", "Mm", "Bmm", "Linear", "NativeLayerNorm", "FusedRmsNorm", "Embedding")
_TURNS = ("Permute", "Transpose", "T", "Movedim")
_PART = 1 << 15  # values whose tops are searched at once


def channel_dim(kind: str, t: Tensor) -> int:
    """Which dimension of the output `t` of a module of class `kind` counts its units.

    Dimension 1 for convolutions and their norms, the last one for layers that work on features. The
    channels of anything else, such as a ReLU, are those of the layer before it, as the autograd
    graph shows; where it does not, dimension 1 of four or more, else the last.
    """
    ndim = t.ndim
    if ndim < 2 or kind.startswith(_LAST) or kind.endswith(_LAST):
        return max(ndim - 1, 0)
    first = kind.startswith(_FIRST)
    spatial = kind[-2] if kind.endswith("d") and "Conv" in kind else ""
    if spatial.isdigit() and ndim == int(spatial) + 1:
        return 0  # one image without a batch dimension
    node = None if first else t.grad_fn
    for _ in range(32):  # through a residual block, not through a whole network
        if node is None or (name := op_name(node)) in _TURNS:
            break
        if name.startswith(_FIRST_OPS):
            return 1
        if name.startswith(_LAST_OPS):
            return ndim - 1
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return 1 if first or ndim >= 4 else ndim - 1


def middle(kind: str) -> float | None:
    """The middle of the range of a bounded activation; None for other classes of modules.

    >>> middle("Hardtanh"), middle("Sigmoid"), middle("ReLU")
    (0.0, 0.5, None)
    """
    ends = (value for name, value in _FLAT_ENDS.items() if kind.lower().endswith(name.lower()))
    return next(ends, None)


def array_tops(x: Any, dim: int) -> Any:
    """(units,) float32 greatest value of each unit of an array.

    The batch is read in parts until all units are above 0: only that decides whether one is dead.
    """
    if not dim:
        return x.reshape(len(x), -1).max(1).astype(np.float32)
    tops, axes = None, tuple(d for d in range(x.ndim) if d != dim)
    at_once = max(_PART * len(x) // x.size, 1)
    for start in range(0, len(x), at_once):
        part = x[start : start + at_once].max(axes)
        tops = part if tops is None else np.maximum(tops, part)
        if tops.min() > 0:
            break
    return np.asarray(tops, np.float32)


def greatest(a: Any, b: Any) -> Any:
    """The greatest values of each unit over two calls; None is of one without values.

    Those of `b` alone if there are other units now.
    """
    if a is None or b is None:
        return b if a is None else a
    join: Any = torch.maximum if isinstance(a, Tensor) else np.maximum
    return join(a, b) if len(a) == len(b) else b


class Units(NamedTuple):
    """The greatest value of each unit, by row, in the two halves of the window."""

    older: dict[int, Any] = {}  # noqa: RUF012  # never changed: `after` makes new ones
    newer: dict[int, Any] = {}  # noqa: RUF012

    def after(self, tops: dict[int, Any], n: int) -> tuple[dict[int, float], Units]:
        """The share of dead units of each row that ran in record `n`, and what is kept then."""
        newer = dict(self.newer)
        for row, top in tops.items():
            newer[row] = greatest(newer.get(row), top)
        units = Units(self.older, newer)
        shares = {row: float(units.dead(row).mean()) for row in tops}
        return shares, Units(newer, {}) if (n + 1) % (WINDOW // 2) == 0 else units

    def dead(self, row: int) -> Any:
        """(units,) bool; None if the row did not run."""
        tops = greatest(self.older.get(row), self.newer.get(row))
        return None if tops is None else tops <= 0
