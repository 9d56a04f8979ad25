"""`collect` and `activation_stream`: the outputs of layers for all batches of a loader, as rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hookkit._core.checks import check_flag, check_number
from hookkit._core.messages import warn
from hookkit._core.random_state import random_states, set_random_states
from hookkit.errors import ArgumentError, OptionError
from hookkit.inspection.accumulators import Mean
from hookkit.inspection.activations import Activations, RowFiles
from hookkit.inspection.layer_rows import Field, LayerRows
from hookkit.inspection.preserve import preserve_state


def collect(
    model: nn.Module,
    loader: Any,
    layers: Any,
    out_dir: str | Path | None = None,
    *,
    rows: str = "sample",
    mask: Field = None,
    hook: Callable[..., Any] | None = None,
    ids: Field = None,
    accumulate: Any = None,
    stop: bool = False,
    max_rows: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    overwrite: bool = False,
) -> Any:
    """Write the outputs of layers for a whole loader to a folder, a row for each sample.

    The model runs once over the loader, in its own modes and without gradients; buffers, modes and
    random states are restored. A compiled model runs eagerly. Over several processes each collects
    the batches of its own loader: give each a folder of its own.

    Args:
        model: any model.
        loader: an iterable of batches, which are moved to the model's device. A mapping goes to the
            model by keyword, a tuple or list without its last item (the target) if it has several;
            anything else as it is.
        layers: selectors, as for `select`, of layers that run once for each batch.
        out_dir: an empty folder, or one that is to be made. Left out with `accumulate` only.
        rows: `"sample"`: dimension 0 of a layer's output is samples. `"token"`: dimensions 0 and 1
            are samples and tokens, and each token is a row.
        mask: which rows count: zeros and ones in the shape of samples (and tokens). The key or the
            position of an item of the batch, or a function of the batch.
        hook: `f(module, input, output)`, or `f(output)`; its result takes the place of the output.
        ids: the samples' ids, whole numbers: an item as for `mask`, which the model does not get.
            By default their positions in the order of the loader; if that is not the order of the
            data set, a warning says so.
        accumulate: `Mean()`, `Covariance()`, `TopK(k)`, or an object with `update(rows, ids)`: each
            layer's rows go to a copy of it.
        stop: ends each forward when all of `layers` have run; their first call counts.
        max_rows: stops after so many rows.
        forward: `f(model, batch)`, which calls the model on a batch.
        overwrite: first deletes the files that an earlier call wrote to `out_dir`.

    Returns:
        `Activations`; with `accumulate` a dict from layer to accumulator, on the layer's device.

    Raises:
        SelectionError: no such layer.
        ArgumentError, OptionError: an argument cannot work, `out_dir` is not empty, or another
            process writes to it.
        HookError: a layer was not called once for a batch, or gave no row for each sample.
        ModelRunError: there is no batch.

    >>> import tempfile
    >>> net, batches = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [*torch.randn(10, 2, 4)]
    >>> collect(net, batches, nn.ReLU, tempfile.mkdtemp(), max_rows=15)["1"].shape
    (15, 3)
    >>> from hookkit.inspection import Mean
    >>> collect(net, batches, "1", accumulate=Mean())["1"].mean.shape
    torch.Size([3])
    """
    check_flag("collect", "overwrite", overwrite)
    if (out_dir is None) == (accumulate is None):
        raise OptionError("collect: give a folder for the rows, out_dir=, or else accumulate=.")
    if out_dir is None and (isinstance(accumulate, type) or not hasattr(accumulate, "update")):
        raise ArgumentError(
            f"collect(accumulate={accumulate!r}): give an accumulator, such as Mean() or TopK(10), "
            "or an object with update(rows, ids)."
        )
    options = (rows, mask, hook, forward, stop, ids, max_rows, out_dir is not None)
    source = LayerRows("collect", model, loader, layers, *options)
    # type(): a subclass, or a batch sampler of the user's own, may give any order
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    if ids is None and not isinstance(accumulate, Mean) and isinstance(loader, DataLoader):
        other = [s for s in samplers if type(s) not in (SequentialSampler, BatchSampler, NoneType)]
        if other and not isinstance(loader.dataset, IterableDataset):
            warn(
                f"collect: the loader's {type(other[0]).__name__} does not give the samples in the "
                "order of the data set, so the ids of the rows, which are positions in the "
                "loader's order, are not the samples' numbers. Give ids=, an item of the batch "
                "with these numbers, or a loader in order (shuffle=False)."
            )
    files = None if out_dir is None else RowFiles(out_dir, overwrite, [*source.layers])
    each = {name: copy.deepcopy(accumulate) for name in source.layers}
    with preserve_state(model, observers=True):
        for name, found, row_ids in source.run(loader):
            if files is None:
                each[name].update(found, row_ids)
            else:
                files.add(name, found, row_ids)
    if files is None:
        return each
    files.finish(source.kinds)
    return Activations(files.folder)


def activation_stream(
    model: nn.Module,
    loader: Any,
    layer: Any,
    *,
    batch_size: int = 4096,
    buffer: int | None = None,
    rows: str = "sample",
    mask: Field = None,
    hook: Callable[..., Any] | None = None,
    stop: bool = False,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield the outputs of a layer in shuffled batches, as the model runs: for a probe or an SAE.

    A buffer is filled and shuffled; half of it is yielded in batches, and it is filled up again.
    Each row is yielded once. The model runs as in `collect`, and is restored whenever the buffer is
    full; the random state goes on, as in a loop over the loader.

    Args:
        model, loader, rows, mask, hook, stop, forward: as for `collect`; the loader may be endless.
        layer: a selector, as for `select`, of one layer.
        batch_size: rows of a batch; only the last can have fewer.
        buffer: rows of the buffer, by default 16 batches. They stay on the layer's device.
        seed: of the order.

    Returns:
        An iterator of tensors (batch_size, …), detached.

    Raises: as `collect`.

    >>> net, batches = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), [*torch.randn(10, 2, 4)]
    >>> [len(rows) for rows in activation_stream(net, batches, "1", batch_size=8)]
    [8, 8, 4]
    """
    who = "activation_stream"
    size = check_number(who, "batch_size", batch_size, 1, whole=True, what="rows of a batch")
    buffer = 16 * size if buffer is None else buffer
    room = check_number(who, "buffer", buffer, size, whole=True, what="rows, at least a batch")
    source = LayerRows(who, model, loader, layer, rows, mask, hook, forward, stop)
    if len(source.layers) != 1:
        raise OptionError(f"{who}: one layer gives one stream; select one of {[*source.layers]}.")
    return _batches(source, size, room, torch.Generator().manual_seed(seed))


def _batches(source: LayerRows, size: int, room: int, random: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of `size` rows from a buffer for `room` rows, refilled when half is given."""
    loader, parts, n, ended = iter(source.loader), list[Tensor](), 0, False

    def until_full() -> Iterator[Any]:
        while n < room and (batch := next(loader, loader)) is not loader:
            yield batch

    while not ended:
        # once a refill and not around the loop: between two batches the model is the user's
        with ExitStack() as later, preserve_state(source.model, observers=True):
            for _, found, _ in source.run(until_full()):
                parts.append(found)
                n += len(found)
            later.callback(set_random_states, random_states())  # `preserve_state` rewinds them
        ended = n < room
        order = torch.randperm(n, generator=random, device="cpu")
        shuffled = torch.cat(parts)[order.to(parts[0].device)]
        n_given = n if ended else max(size, room // 2 // size * size)
        yield from torch.split(shuffled[:n_given], size) if n else ()
        parts = [shuffled[n_given:].clone()]  # without the memory of the rows that were given
        n -= n_given
