"""`collect`: keeps what layers of a model give for a loader, a row for each sample or token."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookkit import ranks
from hookkit.checks import check_number, check_path
from hookkit.collecting.accumulators import Accumulators
from hookkit.collecting.activations import Activations
from hookkit.collecting.batches import WHO, Field
from hookkit.collecting.files import Files
from hookkit.collecting.rows import Rows
from hookkit.data import batch_size, n_batches
from hookkit.errors import ArgumentError, OptionError
from hookkit.modules import class_name, unwrap


def collect(
    model: nn.Module,
    loader: Any,
    modules: Any,
    to: str | Path | None = None,
    *,
    per: str = "sample",
    mask: Field = None,
    hook: Callable[..., Any] | None = None,
    inputs: bool = False,
    dtype: torch.dtype | None = None,
    n: int | None = None,
    ids: Field = None,
    into: Any = None,
    stop: bool = False,
) -> Any:
    """What layers of a model give for all batches of a loader, a row for each sample or token.

    It is written to the folder `to`, a .npy file for each layer, as each layer runs, in bounded
    memory, and read by `Activations`. Called again, it goes on where it was interrupted; a folder
    that is complete is only opened. That the settings, the weights and the size of the loader are
    the same is checked, not that its batches are. The model runs in the modes in which it is,
    without gradients; buffers, modes and random states are restored. A compiled model runs eagerly.

    Over several processes each writes the samples that its loader gives it, and none counts twice:
    `Activations` reads all parts as one, in the order of the ids.

    Args:
        model: any model.
        loader: gives batches: a tensor, or a tuple whose last item is the target, or a mapping,
            which goes by keyword, or an object that the model takes. They are moved to its device.
            The last item is no target but the mask if `mask` says so, or if it has the shape of the
            first, and zeros and ones, and the model has an argument `…mask`.
        modules: selectors, as for `select`, of layers that run once for each batch.
        to: the folder, by default `acts`.
        per: `"sample"`: dimension 0 of what a layer gives are samples. `"token"`: dimensions 0
            and 1 are samples and tokens, and each token is a row.
        mask: which tokens (or samples) count, those of padding not: a field of the batch by name
            or position, or a function of the batch. Not 0 is yes.
        hook: `f(module, input, output)`, or `f(output)`: what it returns is stored instead.
        inputs: stores what the modules receive in place of what they give; `hook` is then
            `f(module, input)` or `f(input)`.
        dtype: floating point rows are stored as this.
        n: stops after so many rows; for a single process only.
        ids: the samples' ids, whole numbers: a field or function as for `mask`. By default their
            positions in the order of the loader: of the data set if it does not shuffle. A field
            of ids is not passed to the model.
        into: an accumulator (`Mean()`, `Covariance()`, `TopK(k)`) in place of rows on disk. Merged
            over the processes.
        stop: each forward ends when all of `modules` have been called: what follows them is not
            run, nor its hooks, and of what is called several times the first call counts.

    Returns:
        An `Activations`; with `into` a dict with an accumulator for each layer, on the CPU.

    Raises:
        SelectionError: no such layer.
        ArgumentError: `model`, `loader` or a field is of a kind that cannot work.
        OptionError: an option has a value that cannot work; the folder has rows of other layers,
            settings, weights or another loader.
        HookError: a layer was called not once for a batch, or gives no row for each sample.
        ModelRunError: there is no batch.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> batches = [*torch.randn(10, 2, 4)]
    >>> acts = collect(net, batches, nn.ReLU, to=tempfile.mkdtemp(), n=15)
    >>> acts["1"].shape
    (15, 3)
    >>> from hookkit.collecting import Mean
    >>> collect(net, batches, "1", into=Mean())["1"].mean.shape
    torch.Size([3])
    """
    if into is not None and to is not None:
        raise OptionError(f"{WHO}: into= keeps nothing on disk. Leave to= out, or into=.")
    n = n if n is None else check_number(WHO, "n", n, 1, whole=True, what="how many rows")
    chosen: dict[str, Any] = {"per": per, "mask": mask, "hook": hook, "inputs": inputs}
    rows = Rows(model, loader, modules, **chosen, dtype=dtype, stop=stop, ids=ids, n=n)
    layers, reading = [*rows.layers], rows.reading
    if n is not None and reading.ranks > 1:
        raise OptionError(
            f"{WHO}(n={n}): how many rows each of {reading.ranks} processes would have to write is "
            "known after all of them. Give a smaller data set, such as torch.utils.data.Subset."
        )
    if into is not None:
        accumulators = Accumulators(into, layers, ids is not None)
        rows.over(rows.loader, accumulators)
        return accumulators.result()
    folder = check_path(WHO, "acts" if to is None else to, "to")
    settings = {
        "layers": layers,
        **{"per": per, "inputs": inputs, "dtype": dtype and str(dtype), "n": n},
        **{"hook": _name(hook), "mask": _name(mask), "ids": _name(ids)},
        **_about(model, rows.loader),
        **{"rank": reading.rank, "ranks": reading.ranks},
    }
    files = Files(folder / f"rank{reading.rank}", settings)
    if not (files.done and settings["data set"] is not None):  # else its size is known
        rows.over(rows.loader, files)
    with ranks.together("call collect"):
        ranks.gather_object(None)  # all parts are whole from here on
    return Activations(folder)


def _name(x: Any) -> Any:
    """What stands for a function, whose code cannot be compared, in an index."""
    return getattr(x, "__qualname__", type(x).__name__) if callable(x) else x


def _about(model: nn.Module, loader: Any) -> dict[str, Any]:
    """What rows depend on, to be compared when a run goes on: weights, modes, the loader's size.

    What cannot be compared (batches, the code of functions, edits on the model) is not.
    """
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
