"""`collect`: runs a model over a loader and keeps what chosen layers give, a row for each sample.

Builds on `hooks`, `selecting` and `modelinfo.sandbox`. Hooks are on the model only while it runs,
so that what a loader does is not recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.checks import (
    check_choice,
    check_flag,
    check_function,
    check_module,
    check_number,
    check_path,
)
from hookkit.collecting.activations import Activations
from hookkit.collecting.batches import WHO, Field, Reading, fingerprint, part_of
from hookkit.collecting.rows import Cutter, Rows, called
from hookkit.collecting.shards import Shards
from hookkit.data import DataLoaders, n_batches, no_batches
from hookkit.errors import ArgumentError, ModelRunError, OptionError
from hookkit.hooks import Hooks
from hookkit.hooks.snapshot import FUNCTION_OF, Options
from hookkit.interrupts import Undo
from hookkit.modelinfo import sandbox
from hookkit.modelinfo.progress import Progress
from hookkit.modelinfo.tree import Tree
from hookkit.modules import unwrap
from hookkit.nested import describe, named_leaves, tmap
from hookkit.selecting import Selection, select

_SHARD_BYTES = 2**27
_OUTPUTS = 'Select one: "{name}" with one of {paths} behind it, or give hook= a function of it.'
_INPUTS = "Give hook= a function of the inputs, such as lambda i: i[0]; there are {paths}."


def collect(
    model: nn.Module,
    loader: Any,
    modules: Any,
    to: str | Path = "acts",
    *,
    per: str = "sample",
    mask: Field = None,
    hook: Callable[..., Any] | None = None,
    inputs: bool = False,
    dtype: torch.dtype | None = None,
    n: int | None = None,
    ids: Field = None,
    into: Any = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Any:
    """What layers of a model give for all batches of a loader, a row for each sample or token.

    It is written to the folder `to` as safetensors files, batch by batch, in bounded memory, and
    read by `Activations`. Called again, it goes on where it was interrupted; a folder that is
    complete is only opened. The model runs in the modes in which it is, without gradients;
    buffers, modes and random states are restored. A compiled model runs eagerly.

    Over several processes each writes the samples that its loader gives it, and none twice:
    `Activations` reads all parts as one, in the order of the ids. Call it in each of them.

    Args:
        model: any model.
        loader: gives batches: a tensor, or a tuple whose last item is the target, or a mapping,
            which goes by keyword, or an object that the model takes. They are moved to its device.
        modules: selectors, as for `select`. A module that is called k times for each batch is k
            layers, `name:0` to `name:k-1`.
        to: the folder.
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
        into: an accumulator (`Mean()`, `Covariance()`, `TopK(k)`) in place of the folder: nothing
            is written. Merged over the processes.
        shard_bytes: how large the files become at most, about. A part is kept when its file is
            full, or the loader at its end.

    Returns:
        An `Activations`; with `into` a dict with an accumulator for each layer, on the CPU.

    Raises:
        SelectionError: no such layer.
        ArgumentError: `model`, `loader` or a field is of a kind that cannot work.
        OptionError: an option has a value that cannot work; the folder has rows of another model,
            other layers, settings or batches.
        HookError: a layer was not called for a batch, or gives no row for each sample.
        ModelRunError: there is no batch.
        MissingExtraError: safetensors is not installed, without `into`.

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
    check_module(WHO, model, "The model comes first: collect(model, loader, modules).")
    check_choice(WHO, "per", per, ("sample", "token"))
    kind: Any = "pre" if check_flag(WHO, "inputs", inputs) else "forward"
    n = n if n is None else check_number(WHO, "n", n, 1, whole=True, what="how many rows")
    size = check_number(WHO, "shard_bytes", shard_bytes, 1, whole=True, what="bytes in a file")
    options = Options(WHO, kind, _tensors_of(kind, hook), keep="all", dtype=dtype)
    batches = DataLoaders(loader).train  # its check
    part = part_of(batches, ids)
    layers = select(unwrap(model), *(modules if isinstance(modules, list | tuple) else [modules]))
    if n is not None and part.ranks > 1:
        raise OptionError(
            f"{WHO}(n={n}): how many rows each of {part.ranks} processes would have to write is "
            "known after all of them. Give a smaller data set, such as torch.utils.data.Subset."
        )
    run = _Run(model, layers, options, Reading(model, part, ids, mask), per, n)
    if into is not None:
        return _accumulated(run, batches, into, unused=to == "acts" and size == _SHARD_BYTES)
    settings = {
        **fingerprint(model),
        "layers": [*layers],
        **{"per": per, "inputs": kind == "pre", "dtype": dtype and str(dtype), "n": n},
        **{"hook": _name(hook), "mask": _name(mask), "ids": _name(ids)},
        **{"rank": part.rank, "ranks": part.ranks},
    }
    folder = check_path(WHO, to, "to")
    with Shards(folder, settings, size) as shards:
        _write(run, batches, shards)
    with ranks.together("call collect"):
        ranks.gather_object(None)  # until all parts are written
    return Activations(folder)


def _tensors_of(kind: Any, hook: Any) -> Callable[..., dict[str, Tensor]]:
    """The hook function: what `hook` gives, or the layer, as tensors by path.

    Without it an object beside the tensors, such as a decoder's cache, would be stored as a
    reference, and a warning given as soon as a later layer changes it.
    """
    known = FUNCTION_OF[kind]
    f = None if hook is None else check_function(WHO, hook, *known, name="hook")
    return lambda *seen: dict(named_leaves(f(*seen) if f else seen[-1]))


def _name(x: Any) -> Any:
    """What stands for a function, whose code cannot be compared, in an index."""
    return getattr(x, "__qualname__", type(x).__name__) if callable(x) else x


class _Run:
    """Runs the model batch by batch, with hooks on the layers that are wanted."""

    def __init__(
        self,
        model: nn.Module,
        layers: Selection,
        options: Options,
        reading: Reading,
        per: str,
        n: int | None,
    ) -> None:
        self.model, self.options, self.reading = model, options, reading
        self.places = [(name, m, layers.leaf(name)) for name, m in layers.items()]
        self.cutter = Cutter(reading, per, n)

    def over(
        self,
        batches: Any,
        take: Callable[[int, Rows], None],
        wanted: Callable[[int, Any], bool] = lambda number, batch: True,
    ) -> None:
        """Calls `take` with the number and the rows of each batch that is `wanted`, until n."""
        progress, number = Progress(n_batches(batches), unit="batches"), -1
        with Undo() as stack:
            stack.enter_context(sandbox.restore_after(Tree(self.model), params=False))
            stack.enter_context(sandbox.preserve_random_states())
            stack.callback(progress.close)
            for number, batch in enumerate(batches):
                if wanted(number, batch):
                    take(number, self._rows(number, batch))
                if not ranks.rank():  # of several processes the first one shows how far it is
                    progress.called(number + 1)
                if self.cutter.is_full:
                    break
        if number < 0:
            raise ModelRunError(no_batches(f"{WHO}: the loader"))

    def _rows(self, number: int, batch: Any) -> Rows:
        given = self.reading.inputs(batch)
        try:
            with torch.no_grad(), Hooks.of_named(self.places, self.options) as hooks:
                self.model(*given, **given.kwargs)
                hint = _INPUTS if self.options.kind == "pre" else _OUTPUTS
                found = called(hooks, [name for name, _, _ in self.places], hint)
            return self.cutter.rows(batch, given, found)
        except Exception as error:
            what = describe(given)
            error.add_note(f"{WHO}: in batch {number}, for which the model was given {what}")
            raise


def _write(run: _Run, batches: Any, shards: Shards) -> None:
    """Writes the rows of all batches that are not written."""
    index, cutter = shards.index, run.cutter
    cutter.n_rows, cutter.samples = sum(index.rows) - index.skip, index.samples
    start = index.batches  # another thread counts on

    def wanted(number: int, batch: Any) -> bool:
        if number == 0:
            shards.check_first(run.reading.digest(batch))
        return number >= start and not index.done

    def take(number: int, rows: Rows) -> None:
        shards.add(rows, number + 1, cutter.samples)

    run.over(islice(batches, 1) if index.done else batches, take, wanted)
    if not index.done:
        shards.finish()


def _accumulated(run: _Run, batches: Any, into: Any, *, unused: bool) -> dict[str, Any]:
    """An accumulator for each layer, of the rows of all processes, on the CPU."""
    if isinstance(into, type) or not (hasattr(into, "update") and hasattr(into, "merge")):
        raise ArgumentError(
            f"{WHO}(into={into!r}): give an accumulator, such as Mean() or TopK(10), or an object "
            "with update(rows, ids) and merge(other)."
        )
    if not unused:
        raise OptionError(
            f"{WHO}: with into= nothing is written, so to= and shard_bytes= have no use. Leave "
            "them out, or into=."
        )
    found: dict[str, Any] = {}

    def take(number: int, rows: Rows) -> None:
        for name, t in rows[0].items():
            if name not in found:
                found[name] = copy.deepcopy(into)
            found[name].update(t, rows[1])

    run.over(batches, take)
    for each in found.values():
        for name, value in getattr(each, "__dict__", {}).items():
            setattr(each, name, tmap(Tensor.cpu, value))
    with ranks.together("call collect"):
        everyone = ranks.gather_object(found)
    merged: dict[str, Any] = {}
    for name, each in chain.from_iterable(one.items() for one in everyone):
        if name in merged:
            merged[name].merge(each)
        else:
            merged[name] = each
    return merged
