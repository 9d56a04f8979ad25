"""`collect`: runs a model over a loader and keeps what chosen layers give, a row for each sample.

Builds on `hooks`, `selecting` and `modelinfo.untouched`. Hooks pass rows on to a store as the
layers run: `Files`, or `Accumulators`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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
from hookkit.collecting.accumulators import Accumulators
from hookkit.collecting.activations import Activations
from hookkit.collecting.batches import WHO, Field, Reading
from hookkit.collecting.files import Files
from hookkit.collecting.settings import about, name_of
from hookkit.data import DataLoaders, batch_size, no_batches
from hookkit.errors import HookError, ModelRunError, OptionError
from hookkit.hooks.attach import Switch, attach, called
from hookkit.hooks.block import StopForward
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.parts import part_at
from hookkit.hooks.snapshot import FUNCTION_OF
from hookkit.modelinfo.untouched import untouched
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe, named_leaves
from hookkit.selecting import Selection, select


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
    check_module(WHO, model, "The model comes first: collect(model, loader, modules).")
    check_choice(WHO, "per", per, ("sample", "token"))
    kind: Any = "pre" if check_flag(WHO, "inputs", inputs) else "forward"
    n = n if n is None else check_number(WHO, "n", n, 1, whole=True, what="how many rows")
    f = None if hook is None else check_function(WHO, hook, *FUNCTION_OF[kind], name="hook")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"{WHO}(dtype={dtype!r}): give a dtype of torch, such as torch.float16.")
    if into is not None and to is not None:
        raise OptionError(f"{WHO}: into= keeps nothing on disk. Leave to= out, or into=.")
    batches = DataLoaders(loader).train  # its check
    reading = Reading(model, batches, ids, mask)
    layers = select(unwrap(model), *(modules if isinstance(modules, list | tuple) else [modules]))
    if n is not None and reading.ranks > 1:
        raise OptionError(
            f"{WHO}(n={n}): how many rows each of {reading.ranks} processes would have to write is "
            "known after all of them. Give a smaller data set, such as torch.utils.data.Subset."
        )
    stop = check_flag(WHO, "stop", stop)
    run = _Run(model, layers, reading, f, inputs, dtype, n, 1 + (per == "token"), stop)
    if into is not None:
        accumulators = Accumulators(into, [*layers], ids is not None)
        run.over(batches, accumulators)
        return accumulators.result()
    folder = check_path(WHO, "acts" if to is None else to, "to")
    settings = {
        "layers": [*layers],
        **{"per": per, "inputs": inputs, "dtype": dtype and str(dtype), "n": n},
        **{"hook": name_of(hook), "mask": name_of(mask), "ids": name_of(ids)},
        **about(model, batches),
        **{"rank": reading.rank, "ranks": reading.ranks},
    }
    files = Files(folder / f"rank{reading.rank}", settings)
    if not (files.done and settings["data set"] is not None):  # else its size is known
        run.over(batches, files)
    with ranks.together("call collect"):
        ranks.gather_object(None)  # all parts are whole from here on
    return Activations(folder)


@dataclass(eq=False)
class _Run:
    """Runs the model batch by batch, and passes the rows of each layer on to a store.

    Attributes:
        n_dims: how many dimensions are rows: 2 for samples and tokens.
        taken: the layers that have been called for this batch.
        shape: of samples, and tokens, as the first of them has it.
        at: the places of the rows that count, None if all do.
        ids: their ids.
    """

    model: nn.Module
    layers: Selection
    reading: Reading
    f: Callable[..., Any] | None
    inputs: bool
    dtype: torch.dtype | None
    n: int | None
    n_dims: int
    stop: bool

    def over(self, loader: Any, store: Any) -> None:
        """Has `store` take the rows of each batch that it has not."""
        self.store, self.switch = store, Switch(on=False)  # the loader's own calls do not count
        with ExitStack() as undo:
            undo.enter_context(untouched(self.model, observers=True))
            undo.callback(leave_eager, self)
            enter_eager(self)
            for number, (name, m) in enumerate(self.layers.items()):
                take = self._taker(number, name)
                undo.callback(attach(m, take, pre=self.inputs, switch=self.switch).remove)
            try:
                self._each(loader)
            except BaseException:
                with suppress(OSError):  # a full disk, perhaps, which is the error already
                    store.save()
                raise
        store.save(done=True)

    def _each(self, loader: Any) -> None:
        counts, number, items = self.store.counts, -1, 0
        start, known = counts["batches"], counts["items"]
        for number, batch in enumerate(loader):
            if self.n is not None and self.store.counts["n"] >= self.n:
                return
            if number < start:
                items += batch_size(batch)
            elif items == known:
                self._batch(number, batch)
            else:
                break
        if number < 0:
            raise ModelRunError(no_batches(f"{WHO}: the loader"))
        if items != known:
            raise OptionError(
                f"{WHO}: the first {start} batches of the loader are not of the size that they had "
                "when their rows were written. Give another folder in to=."
            )

    def _batch(self, number: int, batch: Any) -> None:
        self.batch, self.given = batch, self.reading.inputs(batch)
        self.taken, self.shape, self.fresh = set[int](), torch.Size(), None
        if isinstance(self.store, Accumulators) and self.store.shared:
            self.fresh = self.store.fresh(self.reading.sample_ids(batch))
        try:
            self.switch.on = True
            with torch.no_grad():
                self.model(*self.given, **self.given.kwargs)
            if missing := [x for i, x in enumerate(self.layers) if i not in self.taken]:
                raise HookError(
                    f"{WHO}: {len(missing)} of {len(self.layers)} modules were not called: "
                    f"{', '.join(map(repr, missing[:5]))}. Leave out what does not run for every "
                    "batch (module.forward(x) runs no hooks, module(x) does)."
                )
        except StopForward as e:
            if e.owner is not self:
                raise
        except Exception as error:
            what = describe(self.given)
            error.add_note(f"{WHO}: in batch {number}, for which the model was given {what}")
            raise
        finally:
            self.switch.on = False
        self.store.end_batch(self.ids, self.shape[0], batch_size(batch))

    def _taker(self, number: int, name: str) -> Callable[..., None]:
        """The hook of a layer, which has the store take what that gives, as rows."""
        leaf = self.layers.leaf(name)

        def take(module: nn.Module, args: Any, kwargs: Any, out: Any = None) -> None:
            if number not in self.taken:
                inputs = Inputs(args, kwargs)
                out = inputs if self.inputs else part_at(out, leaf, WHO, lambda: f'"{name}"')
                values = [inputs] if self.inputs else [inputs, out]
                self._take(number, name, called(self.f, module, *values) if self.f else out)
            elif not self.stop:
                raise HookError(
                    f'{WHO}: "{name}" is called more than once for a batch. Give stop=True, and '
                    "the first call counts, or select the module around it."
                )

        return take

    def _take(self, number: int, name: str, value: Any) -> None:
        t = self._tensor(name, value)
        if t.shape[: self.n_dims] != self.shape:
            self._settle(name, t)
        rows = t.flatten(0, self.n_dims - 1)
        rows = rows if self.at is None else rows[self.at.to(rows.device)]
        self.store.add(number, rows, self.ids)
        self.taken.add(number)
        if self.stop and len(self.taken) == len(self.layers):
            raise StopForward(self)

    def _settle(self, name: str, t: Tensor) -> None:
        """Which rows count, by the first layer; raises for another that has other samples."""
        x = next(iter([*self.given, *self.given.kwargs.values()]), None)
        n = x.shape[:1] if isinstance(x, Tensor) and x.ndim and not x.is_nested else t.shape[:1]
        shape = self.shape or n + t.shape[1 : self.n_dims]
        if t.ndim < self.n_dims or t.shape[: self.n_dims] != shape:
            words = zip(shape, ("samples", "tokens"), strict=False)
            raise HookError(
                f'{WHO}: "{name}" gives {describe(t)} for a batch of '
                f"{' and '.join(f'{n} {word}' for n, word in words)}, which have to be its first "
                'dimensions. Give hook= a function that returns such rows, choose per="sample" or '
                '"token", or collect this layer by itself.'
            )
        counts, self.shape = self.store.counts, shape
        self.at, self.ids = self.reading.rows(self.batch, shape, counts["samples"], self.fresh)
        if self.n is not None and (left := self.n - counts["n"]) < len(self.ids):
            every = torch.arange(len(self.ids), device="cpu") if self.at is None else self.at
            self.at, self.ids = every[:left], self.ids[:left]

    def _tensor(self, name: str, value: Any) -> Tensor:
        """The only tensor in what a layer gives."""
        tensors = named_leaves(value)
        t = tensors[0][1].detach() if tensors else torch.empty(0, device="cpu")
        if len(tensors) != 1 or t.is_nested or t.layout is not torch.strided or t.is_quantized:
            kind = f" ({t.layout}, {t.dtype})" * (len(tensors) == 1)
            paths = ", ".join(f'"{name}{path}"' for path, _ in tensors[:6])
            one = f"Select one of {paths}, or give" if tensors[1:] and not self.inputs else "Give"
            raise HookError(
                f'{WHO}: "{name}" has {describe(value)}{kind}, and one dense tensor is needed to '
                f"make rows. {one} hook= a function that returns it."
            )
        return t.to(self.dtype) if self.dtype is not None and t.is_floating_point() else t
