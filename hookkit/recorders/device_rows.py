"""A step's numbers on their way from a device: combined there for all layers, then sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hookkit.devices import sent
from hookkit.recorders import triton_rows

if TYPE_CHECKING:
    from hookkit.recorders.running_stats import Entries


def arriving(entries: Entries, bins: Any) -> Callable[[], Entries]:
    """Sends what a step has on devices; the function that reads it, when it has arrived."""
    with torch.inference_mode(False), torch.no_grad():
        by_device: dict[torch.device, Entries] = {}
        for row, entry in entries.items():
            if isinstance(entry.row, Tensor):
                by_device.setdefault(entry.row.device, {})[row] = entry
        on_way = [(some, _sent_together(some, bins)) for some in by_device.values()]

    def read() -> Entries:
        found = dict(entries)
        for some, parts in on_way:
            rows, counts, alive, full = (_arrived(part) for part in parts)
            at, values = 0, iter(() if full is None else full.tolist())
            for i, (row, entry) in enumerate(some.items()):
                n = 0 if entry.alive is None else entry.alive.numel()
                found[row] = entry._replace(
                    row=tuple(rows[i].tolist()),
                    counts=None if counts is None else counts[i],
                    alive=alive[at : at + n] if n else None,
                    full=None if entry.full is None else next(values),
                )
                at += n
        return found

    return read


def _arrived(part: Any) -> Any:
    if part is None:
        return None
    host, event = part
    if event is not None:
        event.synchronize()  # sync: sent up to 8 steps ago
    return host.numpy()


def _sent_together(entries: Entries, bins: Any) -> tuple[Any, ...]:
    """Rows, counts of bins, living units and full values of the entries on one device."""
    several = list(entries.values())
    device = several[0].row.device
    fused = [entry.row for entry in several if entry.row.ndim == 2]
    by_tensors = [entry.row for entry in several if entry.row.ndim == 1]
    parts = [triton_rows.collapse(torch.stack(fused))] if fused else []
    rows = torch.cat([*parts, *([torch.stack(by_tensors)] if by_tensors else [])])
    order = sorted(range(len(several)), key=lambda i: several[i].row.ndim == 1)
    if order != list(range(len(several))):
        rows = rows[np.argsort(order).tolist()]
    counts = None
    if bins is not None:
        places = tuple((i, len(x)) for i, entry in enumerate(several) for x in entry.counts)
        classes = bins.classes(torch.cat([x for entry in several for x in entry.counts]))
        classes += _offsets(places, bins.width, device)
        table = torch.zeros(len(several) * bins.width, dtype=torch.int32, device=device)
        table.scatter_add_(0, classes, torch.ones_like(classes, dtype=torch.int32))
        counts = sent(table.view(len(several), -1))
    alive = [entry.alive for entry in several if entry.alive is not None]
    full = [entry.full for entry in several if entry.full is not None]
    units = sent(torch.cat(alive)) if alive else None
    return sent(rows), counts, units, sent(torch.stack(full)) if full else None


@lru_cache(16)
def _offsets(places: tuple[tuple[int, int], ...], width: int, device: torch.device) -> Tensor:
    """Of each sample's values the first of its row's counts."""
    rows, sizes = zip(*places, strict=True)
    first = np.repeat(np.array(rows, np.int64) * width, sizes)
    return torch.from_numpy(first).to(device)  # sync: once for the layout of a step
