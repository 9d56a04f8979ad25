"""`activation_stream`: what a layer gives, in shuffled batches, without a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_number
from hookkit.collecting.batches import Field
from hookkit.collecting.rows import Rows
from hookkit.data import no_batches
from hookkit.errors import ModelRunError, OptionError
from hookkit.hooks.snapshot import snapshot

WHO = "activation_stream"
_END = object()


def activation_stream(
    model: nn.Module,
    loader: Any,
    module: Any,
    *,
    batch_size: int = 4096,
    buffer: int | None = None,
    per: str = "sample",
    mask: Field = None,
    hook: Callable[..., Any] | None = None,
    inputs: bool = False,
    dtype: torch.dtype | None = None,
    stop: bool = False,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Batches of what a layer gives, in a random order, as the model runs: for a probe or an SAE.

    A buffer is filled and shuffled; half of it is given in batches, and it is filled up again, so
    each batch has rows of many of the loader's batches. Each row is given once. The model runs as
    in `collect`, and only while the next batch is asked for.

    Args:
        model, loader: as for `collect`; a loader without end gives a stream without end.
        module: a selector, as for `select`, of one layer.
        batch_size: rows of a batch; only the last can have fewer.
        buffer: rows of the buffer, by default 16 batches. They stay on the layer's device.
        per, mask, hook, inputs, dtype, stop: as for `collect`.
        seed: of the order.

    Returns:
        An iterator of tensors (batch_size, …), detached, of the layer's dtype and device.

    Raises:
        SelectionError: no such layer.
        ArgumentError, OptionError: an argument that cannot work, or several layers.
        HookError, ModelRunError: later, as for `collect`.

    >>> net, batches = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [*torch.randn(10, 2, 4)]
    >>> [len(rows) for rows in activation_stream(net, batches, "1", batch_size=8)]
    [8, 8, 4]
    """
    size = check_number(WHO, "batch_size", batch_size, 1, whole=True, what="rows of a batch")
    buffer = 16 * size if buffer is None else buffer
    room = check_number(WHO, "buffer", buffer, size, whole=True, what="rows, at least a batch")
    chosen: dict[str, Any] = {"per": per, "mask": mask, "hook": hook, "inputs": inputs}
    rows = Rows(model, loader, module, **chosen, dtype=dtype, stop=stop)
    if len(rows.layers) != 1:
        raise OptionError(
            f"{WHO}: one layer gives one stream, and these are {len(rows.layers)}: "
            f"{', '.join(map(repr, list(rows.layers)[:5]))}. Select one of them."
        )
    return _batches(rows, size, room, torch.Generator().manual_seed(seed))


def _batches(rows: Rows, size: int, room: int, generator: torch.Generator) -> Iterator[Tensor]:
    store, source, ended = _Buffer(), iter(rows.loader), False
    while not ended:
        while len(store) < room and not ended:
            batch = next(source, _END)
            if ended := batch is _END:
                break
            rows.over([batch], store)
        if not store.parts:
            raise ModelRunError(no_batches(f"{WHO}: the loader"))
        shuffled = store.shuffled(generator)
        n_given = len(shuffled) if ended else max(size, room // 2 // size * size)
        if len(shuffled):  # else the last batch has emptied the buffer
            yield from torch.split(shuffled[:n_given], size)
        store.parts = [shuffled[n_given:].clone()]  # the rest, without the memory of what was given


class _Buffer:
    """A store of `Rows` that keeps them in memory."""

    def __init__(self) -> None:
        self.parts = list[Tensor]()
        self.counts = dict.fromkeys(("n", "samples", "batches", "items"), 0)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """All rows in a random order."""
        rows = torch.cat(self.parts)
        return rows[torch.randperm(len(rows), generator=generator, device="cpu").to(rows.device)]

    def add(self, number: int, rows: Tensor, ids: Tensor) -> None:
        """Takes the rows that the layer gave for a batch."""
        self.parts.append(snapshot(rows))

    def end_batch(self, ids: Tensor, n_samples: int, n_items: int) -> None:
        """Nothing: batches are not counted."""

    def save(self, *, done: bool = False) -> None:
        """Nothing is kept."""
