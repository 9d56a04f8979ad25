"""`LayerRows`: runs a model over batches, and yields the outputs of layers as rows.

A row belongs to one sample, or to one token. The outputs for one batch are in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core import checks
from hookkit._core.batches import check_loader, no_batches, split_batch, to_device
from hookkit._core.modules import unwrap
from hookkit._core.pytree import Inputs, describe, tree_leaves_with_path
from hookkit.errors import ArgumentError, HookError, ModelRunError, OptionError
from hookkit.hooks.collection import Hooks
from hookkit.hooks.options import KINDS
from hookkit.hooks.selection import select

Field = str | int | Callable[[Any], Any] | None
"""A part of a batch: its key, its position, or a function of the batch."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(eq=False)
class LayerRows:
    """Runs a model over batches, and yields the outputs of layers as rows.

    The fields are the arguments of `collect`; `who` is the function called, for messages, and
    `to_cpu` moves the rows to the CPU.

    Attributes:
        layers: the modules, by name.
        kinds: the shape and the dtype of a row of each layer that ran.

    Raises:
        SelectionError, ArgumentError, OptionError: as `collect`.
    """

    who: str
    model: nn.Module
    loader: Any
    selectors: Any
    rows: str
    mask: Field
    hook: Any
    forward: Any
    stop: bool
    ids: Field = None
    max_rows: int | None = None
    to_cpu: bool = False

    def __post_init__(self) -> None:
        who, model = self.who, self.model
        checks.check_module(who, model, f"The model comes first: {who}(model, …).")
        check_loader("data", self.loader)
        checks.check_choice(who, "rows", self.rows, ("sample", "token"))
        checks.check_flag(who, "stop", self.stop)
        checks.check_callable(who, "forward", self.forward, "f(model, batch)")
        if self.hook is not None:
            self.hook = checks.check_function(who, self.hook, *KINDS["forward"], name="hook")
        if self.max_rows is not None:
            checks.check_number(who, "max_rows", self.max_rows, 1, whole=True)
        selectors = self.selectors if isinstance(self.selectors, list | tuple) else [self.selectors]
        self.layers = select(unwrap(model), *selectors)
        tensors = [*model.parameters(), *model.buffers()]
        if any(map(nn.parameter.is_lazy, tensors)):
            raise ArgumentError(f"{who}: a parameter has no shape yet. Run the model once.")
        self._devices = {t.device for t in tensors if not t.is_meta}
        self.kinds = dict[str, tuple[list[int], torch.dtype]]()
        self._n_rows = self._n_samples = self._n_batches = 0

    def run(self, batches: Iterable[Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Run the model on each batch, up to `max_rows`; yield (layer's name, rows, their ids)."""
        for batch in batches:
            data = to_device(batch, *self._devices) if len(self._devices) == 1 else batch
            try:
                tensors, kept, ids = self._run_one(data)
            except Exception as e:
                e.add_note(f"{self.who}: in batch {self._n_batches}, {describe(data)}")
                raise
            self._n_rows += len(ids)
            self._n_batches += 1
            for name, t in tensors.items():
                rows = t.flatten(0, ids.ndim - 1)
                yield name, rows if len(ids) == len(rows) else rows[kept.to(t.device)], ids
            if self.max_rows is not None and self._n_rows >= self.max_rows:
                break
        if not self._n_batches:
            raise ModelRunError(no_batches(f"{self.who}: the loader"))

    def _run_one(self, data: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return each layer's output for a batch, the indices of the rows to keep, their ids."""
        ids, mask = self._field(data, self.ids), self._field(data, self.mask)
        hooks = Hooks(self.layers, self.hook, cpu=self.to_cpu, keep="all", stop=self.stop)
        n_samples = None  # known from the model's first input, unless `forward` calls the model
        with hooks, torch.no_grad():
            if self.forward:
                self.forward(self.model, data)
            else:
                given = self._inputs(data, ids, mask)
                first: Any = next(iter([*given, *given.kwargs.values()]), None)
                if isinstance(first, Tensor) and first.ndim and not first.is_nested:
                    n_samples = len(first)
                self.model(*given, **given.kwargs)
            for name, n in hooks.n_calls.items():
                if n == 0 or (n > 1 and not self.stop):
                    raise HookError(
                        f'{self.who}: "{name}" was called {n} times for a batch, and not once. '
                        "Select modules that are called once (model.forward(x) calls no hook); "
                        "stop=True takes the first of several calls."
                    )
        tensors, shape = self._tensors(hooks, n_samples)
        kept = torch.arange(math.prod(shape), device="cpu")
        if mask is not None:
            kept = self._checked("mask", mask, shape, "zeros and ones").flatten().nonzero()[:, 0]
        if self.max_rows is not None:
            kept = kept[: self.max_rows - self._n_rows]
        sample_ids = torch.arange(self._n_samples, self._n_samples + shape[0], device="cpu")
        if ids is not None:
            sample_ids = self._checked("ids", ids, shape[:1], "whole numbers").long()
        self._n_samples += shape[0]
        if len(shape) == 1:
            return tensors, kept, sample_ids[kept]
        samples, tokens = kept // shape[1], kept % shape[1]
        return tensors, kept, torch.stack([sample_ids[samples], tokens], 1)

    @staticmethod
    def _field(data: Any, field: Any) -> Any:
        return field(data) if callable(field) else None if field is None else data[field]

    def _inputs(self, data: Any, ids: Any, mask: Any) -> Inputs:
        """Return the model's inputs: a mapping by keyword, a tuple without its target."""
        if isinstance(data, Mapping):
            return Inputs((), {k: x for k, x in data.items() if ids is None or x is not ids})
        if not isinstance(data, tuple | list):
            return Inputs((data,))
        inputs, targets = split_batch([x for x in data if ids is None or x is not ids])
        if mask is not None and any(mask is x for x in targets):
            raise OptionError(
                f"{self.who}: the last item of a batch is its target, which the model does not "
                "get, and here it is the mask. Say how to call the model: forward=lambda model, "
                "batch: model(batch[0], mask=batch[1])."
            )
        return Inputs(inputs)

    def _tensors(self, hooks: Hooks, n: int | None) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """Return each layer's output, and the sizes of the dimensions that are rows.

        Args:
            n: how many samples the model was given; None takes the number of the first layer.
        """
        n_dims, shape, found = 1 + (self.rows == "token"), None, dict[str, Tensor]()
        for name, hook in hooks.items():
            inside = tree_leaves_with_path(hook.calls[0])
            t = inside[0][1] if len(inside) == 1 else torch.empty((), device="cpu")
            # the default of PyTorch's RNNs and attention, whose rows would be steps in time
            if self.hook is None and t.ndim == 3 and not getattr(hook.module, "batch_first", True):
                raise HookError(
                    f'{self.who}: "{name}" has batch_first=False: its output begins with time, not '
                    "with samples. Give hook= a function that returns samples first, such as "
                    "lambda o: o[0].transpose(0, 1), and say by forward= how to run a batch."
                )
            dense = t.layout is torch.strided and not (t.is_nested or t.is_quantized)
            if shape is None and dense and t.ndim >= n_dims:
                shape = (len(t) if n is None else n, *t.shape[1:n_dims])
            if not dense or t.shape[:n_dims] != shape:
                sizes = shape or ("samples" if n is None else n, "tokens")[:n_dims]
                kind = "" if dense else f" ({t.layout})"
                paths = ", ".join(f'"{name}{path}"' for path, _ in inside[:6])
                raise HookError(
                    f'{self.who}: "{name}" gives {describe(hook.calls[0])}{kind}. Rows need one '
                    f"dense tensor that begins with {' × '.join(map(str, sizes))}, as the model's "
                    f"input. {f'Select one of {paths}, or give' if inside[1:] else 'Give'} hook= a "
                    "function that returns it, choose rows=, say by forward= how to run a batch, "
                    "or collect this layer by itself."
                )
            kind_of_row = [*t.shape[n_dims:]], t.dtype
            if self.kinds.setdefault(name, kind_of_row) != kind_of_row:
                raise HookError(
                    f'{self.who}: rows of "{name}" are {kind_of_row} now, and were '
                    f"{self.kinds[name]}. Give hook= a function that returns rows of one kind."
                )
            found[name] = t
        return found, shape or ()

    def _checked(self, option: str, value: Any, shape: tuple[int, ...], what: str) -> Tensor:
        """Return a batch's ids or mask as a tensor on the CPU."""
        t = torch.as_tensor(value, device="cpu")
        fits = t.dtype in _WHOLE if option == "ids" else bool(((t == 0) | (t == 1)).all())
        if t.shape != shape or not fits:
            raise OptionError(
                f"{self.who}({option}=…): {'×'.join(map(str, shape))} {what} are needed, and this "
                f"is {describe(t)} of {t.dtype}. Give an item of the batch, or a function of it."
            )
        return t
