"""`Rows`: a model run batch by batch, and what its layers give, as rows for a store.

Hooks pass rows on to the store as the layers run: `Files`, `Accumulators`, or a stream's buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_choice, check_flag, check_function, check_module
from hookkit.collecting.accumulators import Accumulators
from hookkit.collecting.batches import WHO, Field, Reading
from hookkit.data import DataLoaders, batch_size, no_batches
from hookkit.errors import HookError, ModelRunError, OptionError
from hookkit.hooks.attach import Switch, attach, called
from hookkit.hooks.block import KINDS, StopForward
from hookkit.hooks.eager import EAGER, enter_eager
from hookkit.hooks.parts import part_at
from hookkit.modelinfo.untouched import untouched
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe, named_leaves
from hookkit.selecting import select


class Rows:
    """Runs a model batch by batch, and passes the rows that layers give on to a store.

    Args: as for `collect`, which are checked here.

    Attributes:
        layers: the modules by name.
        n_dims: how many dimensions are rows: 2 for samples and tokens.
        taken: the layers that have been called for this batch.
        shape: of samples, and tokens, as the first of them has it.
        at: the places of the rows that count, None if all do.
        ids: their ids.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        modules: Any,
        *,
        per: str,
        mask: Field,
        hook: Any,
        inputs: bool,
        dtype: Any,
        stop: bool,
        ids: Field = None,
        n: int | None = None,
    ) -> None:
        self.model = check_module(WHO, model, "The model comes first: collect(model, …).")
        check_choice(WHO, "per", per, ("sample", "token"))
        self.n_dims, self.n = 1 + (per == "token"), n
        self.inputs, self.stop = check_flag(WHO, "inputs", inputs), check_flag(WHO, "stop", stop)
        arguments = KINDS["pre" if self.inputs else "forward"]
        self.f = None if hook is None else check_function(WHO, hook, *arguments, name="hook")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise OptionError(
                f"{WHO}(dtype={dtype!r}): give a dtype of torch, such as torch.float16."
            )
        self.dtype, self.loader = dtype, DataLoaders(loader).train  # its check
        self.reading = Reading(model, self.loader, ids, mask)
        selectors = modules if isinstance(modules, list | tuple) else [modules]
        self.layers = select(unwrap(model), *selectors)

    def over(self, loader: Any, store: Any) -> None:
        """Has `store` take the rows of each batch that it has not."""
        self.store, self.switch = store, Switch(on=False)  # the loader's own calls do not count
        with ExitStack() as undo:
            undo.enter_context(untouched(self.model, observers=True))
            undo.callback(EAGER.end, self)
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
