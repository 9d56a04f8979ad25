"""Settings of a model's layers that are mistakes in themselves: of dropout, of batch norm.

Builds on `modules` and `autograd_graph`. They are read once, and need no statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from torch import nn

from hookkit.autograd_graph import op_name, shape_of
from hookkit.modules import walk

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def dropouts(model: nn.Module) -> dict[str, float]:
    """Name of each layer in training mode that drops values → the share that it drops.

    >>> dropouts(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9), nn.LSTM(2, 2, 2, dropout=0.1)))
    {'1': 0.9, '2': 0.1}
    """
    rates = {name: _rate(m) for name, m, first in walk(model) if first and m.training}
    return {name: rate for name, rate in rates.items() if rate > 0}


def _rate(module: nn.Module) -> float:
    if isinstance(module, _DROPOUTS):
        return float(module.p)
    if isinstance(module, nn.RNNBase):
        return float(module.dropout) if module.num_layers > 1 else 0.0
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention) else 0.0


def least_samples(nodes: Iterable[Any]) -> dict[str, int]:
    """Of the batch norm whose means are of the fewest values: its samples, and those values.

    Args:
        nodes: of the autograd graph of the model's output.

    >>> import torch
    >>> from hookkit.autograd_graph import users_of
    >>> norm, x = nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    >>> least_samples(users_of(norm(x))), least_samples(users_of(norm.eval()(x)))
    ({'norm_samples': 2, 'norm_values': 32}, {})
    """
    nodes = (node for node in nodes if op_name(node).endswith("BatchNorm"))
    # Private: `_saved_training` (since 1.9): in eval mode a batch norm takes no mean. Without it
    # no batch norm is judged.
    shapes = [shape_of(node) for node in nodes if getattr(node, "_saved_training", False)]
    sizes = [(prod(shape) // shape[1], shape[0]) for shape in shapes if len(shape) > 1 and shape[1]]
    if not sizes:
        return {}
    values, samples = min(sizes)
    return {"norm_samples": samples, "norm_values": values}
