"""What rows depend on, to be compared when a run goes on: the guard of a folder.

What cannot be compared (batches, the code of functions, edits on the model) is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hookkit.collecting.batches import WHO
from hookkit.data import batch_size, n_batches
from hookkit.errors import ArgumentError
from hookkit.modules import class_name, unwrap


def name_of(x: Any) -> Any:
    """What stands for a function, whose code cannot be compared, in an index."""
    return getattr(x, "__qualname__", type(x).__name__) if callable(x) else x


def about(model: nn.Module, loader: Any) -> dict[str, Any]:
    """What rows depend on and can be compared: weights, modes, autocast, the loader's size."""
    root = unwrap(model)
    tensors = [*root.parameters(), *root.buffers()]
    if any(map(nn.parameter.is_lazy, tensors)):
        raise ArgumentError(f"{WHO}: a parameter has no shape yet. Run the model once.")
    modes = [m.training for m in root.modules()]
    device = tensors[0].device.type if tensors else "cpu"
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    n_samples = n_batches(getattr(loader, "dataset", None))
    if isinstance(loader, list | tuple):
        n_samples = sum(map(batch_size, loader))
    return {
        "model": f"{class_name(root)} with weights {_check_sum(tensors):08x}",
        "mode": f"training in {sum(modes)} of {len(modes)} modules",
        "autocast": str(autocast),
        **{"batches": n_batches(loader), "data set": n_samples},
    }


def _check_sum(tensors: Iterable[Any]) -> int:
    """Of shapes and of the sum of all bytes of each tensor."""
    texts = []
    for t in tensors:
        t = t.to_local() if hasattr(t, "to_local") else t  # this rank's part of a sharded one
        texts.append(f"{tuple(t.shape)} {t.dtype}")
        with suppress(RuntimeError, NotImplementedError):  # sparse, quantized, on meta
            raw = t.detach().contiguous().flatten().view(torch.uint8)
            texts.append(str(int(raw.sum(dtype=torch.int64))))
    return zlib.crc32(" ".join(texts).encode())
