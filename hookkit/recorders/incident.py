"""The batch of an incident: kept while it trains, written to a file, and run again by `replay`.

While a batch trains, `ModelCalls` holds what it takes to run it again: references to the inputs of
the model and to its output, the gradient of the output, and copies of the random states. Tensors
are copied at an incident only; if the batch was overwritten by then, it is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit._core.batches import loss_in
from hookkit._core.checks import check_module, check_path
from hookkit._core.files import atomic_write
from hookkit._core.modules import can_run, find, unwrap, walk, wrappers
from hookkit._core.pytree import Inputs, tree_leaves, tree_map
from hookkit._core.random_state import random_states
from hookkit.errors import ArgumentError, OptionError
from hookkit.hooks.attach import Switch, attach, remove_all
from hookkit.hooks.calls import call_kind
from hookkit.inspection.differences import dense
from hookkit.inspection.nonfinite import ModelCall, NonFinite, is_bad, search
from hookkit.inspection.preserve import copy_inputs, preserve_state


class ModelCalls:
    """Keep the outermost calls of a model and its parts in one batch.

    Args:
        outer: the model, in its wrappers.
        for_file: also keep the state of NumPy's generator, which takes longer than all the rest.

    Attributes:
        calls: as they were made.
    """

    def __init__(self, outer: nn.Module, for_file: bool) -> None:
        self.outer, self.root, self.for_file = outer, unwrap(outer), for_file
        self._params, self._thread = [*self.root.parameters()], get_ident()
        self._handles, self._on_parts = list[RemovableHandle](), list[RemovableHandle]()
        self.clear()

    def clear(self) -> None:
        """Forget the batch: the next one begins."""
        self.calls, self._depth = list[ModelCall](), 0
        self._weights, self._inputs = 0, list[int]()  # how often they had been written to

    def attach(self, switch: Switch) -> None:
        """Keep each outermost call that is made while `switch` is on."""
        for m in wrappers(self.outer):
            self._handles += self._hooks("", m, switch)
        for name, m, first in walk(self.root):  # until the model's own forward runs
            if first and name and can_run(m):
                self._on_parts += self._hooks(name, m, switch)

    def _hooks(self, name: str, m: nn.Module, switch: Switch) -> Iterator[RemovableHandle]:
        yield attach(m, partial(self._before, name), pre=True, prepend=True, switch=switch)
        yield attach(m, self._after, always_call=True, switch=switch)

    def remove(self) -> None:
        """Remove the hooks, and forget the batch; can be repeated."""
        remove_all([*self._handles, *self._on_parts])
        self.clear()

    def _before(self, name: str, m: nn.Module, args: Any, kwargs: Any) -> None:
        if call_kind(self._thread) != "first":
            return
        self._depth += 1
        if self._depth > 1:
            return
        if not name and self._on_parts:
            remove_all(self._on_parts)
            self._on_parts = []
        if not self.calls:
            self._weights = sum(map(_n_writes, self._params))
        states = random_states(with_numpy=self.for_file)
        self.calls.append(ModelCall(name, Inputs(args, kwargs), states))
        self._inputs += map(_n_writes, tree_leaves((args, kwargs)))

    def _after(self, m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if call_kind(self._thread) != "first" or not self._depth:
            return
        self._depth -= 1
        if self._depth or output is None:
            return
        call = self.calls[-1]
        call.output = tree_map(Tensor.detach, output)
        if torch.is_grad_enabled():
            loss, is_guess = loss_in(output)
            for i, t in enumerate(tree_leaves(output)):
                # a parameter that is returned would keep the hook
                if t.grad_fn is not None and (loss is None or is_guess or t is loss):
                    keep: Any = partial(call.grads.__setitem__, i)
                    t.register_hook(keep)  # type: ignore[no-untyped-call]

    # --- at an incident

    @property
    def lost(self) -> str:
        """Why the batch is not known any more; `""` if it is."""
        if not self.calls:
            return "the model ran in compiled code, or in another thread"
        now = [_n_writes(t) for call in self.calls for t in tree_leaves(call.inputs)]
        return "its inputs were overwritten after the model had run" if now != self._inputs else ""

    @property
    def late(self) -> bool:
        """Whether weights were written to since the batch began."""
        return sum(map(_n_writes, self._params)) != self._weights

    def find_nonfinite(self, layer: str | None, loss: Callable[[Any], Tensor] | None) -> NonFinite:
        """Run the batch again, and name what makes the first NaN or Inf: in `layer`, or without one
        in the loss or the gradients.
        """
        backward = layer is None and (loss is not None or any(call.grads for call in self.calls))
        return search(self.root, self.calls, backward, loss if backward else None, layer)

    def write(self, path: Path, kind: str, incident: str, weights: bool) -> bool:
        """Write the batch, and if `weights` the parameters and buffers, to a file; return whether
        `replay` reads it without `weights_only=False`.
        """
        state = {
            "hookkit": 1,
            "kind": kind,
            "incident": incident,
            "calls": [_plain(call) for call in self.calls],
            "params": _digests([*self.root.parameters()]),
            "training": [name for name, m, first in walk(self.root) if first and m.training],
            "weights": tree_map(_on_cpu, dict(self.root.state_dict())) if weights else None,
        }
        with atomic_write(path) as file:
            torch.save(state, file)
        return not torch.serialization.get_unsafe_globals_in_checkpoint(path)


def _n_writes(t: Tensor) -> int:
    # Private: `_version`, the counter of writes in place (since 0.4). Without it a batch that was
    # overwritten counts as the one that the model was given.
    return 0 if t.is_inference() else t._version


def _on_cpu(t: Tensor) -> Tensor:
    """Return a copy of a tensor, without the rest of the memory that it is a view of."""
    return t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad)


def _digests(x: Any) -> list[str]:
    """Return for each tensor in `x` its dtype, its shape and a hash of its values.

    All NaN are alike.
    """
    texts = []
    for t in tree_leaves(x):
        values = dense(t).cpu()
        if values.is_floating_point():
            values = values.masked_fill(values.isnan(), float("nan"))
        data: Any = values.contiguous().reshape(-1).view(torch.uint8).numpy()
        text = hashlib.blake2b(data, digest_size=16).hexdigest()
        texts.append(f"{t.dtype} {tuple(t.shape)} {text}")
    return texts


def _plain(call: ModelCall) -> dict[str, Any]:
    """Return a call as dicts, lists, numbers and tensors, in which there is no object of NumPy."""
    inputs = copy_inputs(call.inputs, _on_cpu)
    kind, keys, *rest = call.random["numpy"]
    return {
        **vars(call),
        "inputs": (tuple(inputs), inputs.kwargs),
        "random": {**call.random, "numpy": (kind, keys.tolist(), *rest)},
        "output": _digests(call.output),
        "grads": {i: _on_cpu(g) for i, g in call.grads.items()},
    }


# --- running it again


@dataclass(frozen=True, repr=False)
class Replay:
    """What a model returned when it ran a saved batch again.

    It is no `Localisation`, since it compares no layers: the hooks that are on have seen them.

    Attributes:
        output: what the model returned; if the batch made several calls, the last one.
        inputs: of that call, as in `model(*inputs, **inputs.kwargs)`.
        grads: by name, the gradients of the parameters; empty if the batch had no backward.
        same: the weights and the outputs of all calls are those of then, bit for bit.
        repeated: the incident has happened again.
        incident: that of then, in words.
    """

    output: Any
    inputs: Inputs
    grads: dict[str, Tensor]
    same: bool
    repeated: bool
    incident: str

    def __repr__(self) -> str:
        same = (
            "the same as then, bit for bit" if self.same else "not the same as then, or the weights"
        )
        again = "The incident is repeated" if self.repeated else "It does not repeat the incident"
        return f"{self.incident}\n  Replay: the output is {same}. {again}."


def replay(file: str | Path, model: nn.Module, *, weights_only: bool = True) -> Replay:
    """Run the batch of a file of `FlightRecorder(save=…)` again, with the same random numbers.

    The model runs in the modes and the precision of then, and its backward from the gradients that
    its output got. Hooks that are on see it; a `watch` would count it, so leave that first.
    Afterwards the model is as before. The weights are those of the file, if it has any
    (`FlightRecorder(weights=True)`), or the model's own: give it those of that step.

    Args:
        file: a path.
        model: built as the one that was trained.
        weights_only: as for `torch.load`: refuse a file with objects other than tensors and plain
            values. With False it can run any code: for files that you trust.

    Raises:
        OptionError: `FlightRecorder` did not write the file, or it is damaged.
        ArgumentError: the file has other objects; `model` has not the layers of the file.
        RuntimeError: PyTorch's, if the file has weights that do not fit.

    >>> import tempfile
    >>> from hookkit import FlightRecorder, hook_output
    >>> from hookkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorder = FlightRecorder("report", save=folder, weights=True)
    ...     learn = synth_learner(cbs=recorder, lr=1e30)
    ...     with learn.no_logging(): learn.fit(1)
    ...     with hook_output(learn.model) as h:
    ...         again = replay(recorder.saved[0], learn.model)
    >>> h.stored.shape, again.same, again.repeated
    (torch.Size([16, 1]), True, True)
    """
    path, root = check_path("replay", file), unwrap(check_module("replay", model))
    try:
        objects = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if not (objects and weights_only):
            state = torch.load(path, map_location="cpu", weights_only=not objects)
            calls = [ModelCall(**call) for call in state["calls"]]
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, UnpicklingError) as why:
        raise OptionError(f"replay: {path} is no file that FlightRecorder wrote ({why}).") from why
    if objects and weights_only:
        raise ArgumentError(
            f"replay: {path} holds objects of {', '.join(objects)[:200]}, and to load them can run "
            f"any code. If you trust the file: replay(…, weights_only=False)."
        )
    if unknown := [call.name for call in calls if find(root, call.name) is None]:
        raise ArgumentError(f"replay: the model has no layer {unknown[0]!r}, which the batch ran.")
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    outputs, ends = list[Any](), list[Any]()
    with preserve_state(root, params=True, observers=True), torch.enable_grad():
        if state["weights"] is not None:
            root.load_state_dict(state["weights"])
        same = _digests([*root.parameters()]) == state["params"]
        for name, m, first in walk(root):
            if first:
                m.training = name in state["training"]
        for call in calls:
            args, kwargs = call.inputs
            call.inputs = tree_map(lambda t: t.to(device), Inputs(args, kwargs))
            outputs.append(call.repeat(root, call.inputs))
            ends += call.ends(outputs[-1])
        for p in root.parameters():
            p.grad = None
        if ends:
            torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
        grads = {name: p.grad for name, p in root.named_parameters() if p.grad is not None}
    # weights of NaN make the same output, of NaN, as a batch that made it with others
    same &= [*map(_digests, outputs)] == [call.output for call in calls]
    if state["kind"] == "gradient":
        repeated = any(map(is_bad, grads.values()))
    else:
        bad = state["kind"] != "spike" and any(map(is_bad, tree_leaves(outputs)))
        repeated = same or bad
    return Replay(outputs[-1], calls[-1].inputs, grads, same, repeated, state["incident"])
