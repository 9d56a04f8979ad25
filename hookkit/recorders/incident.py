"""Keep the batch of an incident, write it to a file, and run it again (`replay`).

While a batch trains, `ModelCalls` holds what is needed to run it again: references to the model's
inputs and output, the gradient of the output, and copies of the random states. Tensors are copied
only at an incident; if the batch has been overwritten by then, it is not used.
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
    """Keeps the outermost calls of a model, or of its modules, in the current batch.

    Args:
        outer: the model, in its wrappers.
        for_file: also keep the state of NumPy's generator, which takes longer than all the rest.

    Attributes:
        calls: the calls of the batch, in order.
    """

    def __init__(self, outer: nn.Module, for_file: bool) -> None:
        self.outer, self.root, self.for_file = outer, unwrap(outer), for_file
        self._params, self._thread = [*self.root.parameters()], get_ident()
        self._handles, self._on_parts = list[RemovableHandle](), list[RemovableHandle]()
        self.clear()

    def clear(self) -> None:
        """Discard the batch that was kept, before the next one begins."""
        self.calls, self._depth = list[ModelCall](), 0
        # how often the weights and each input had been written to when the model was called
        self._weights, self._inputs = 0, list[int]()

    def attach(self, switch: Switch) -> None:
        """Keep each outermost call that is made while `switch` is on."""
        for m in wrappers(self.outer):
            self._handles += self._hooks("", m, switch)
        # if a loop calls modules instead of the model; removed when the model itself is called
        for name, m, first in walk(self.root):
            if first and name and can_run(m):
                self._on_parts += self._hooks(name, m, switch)

    def _hooks(self, name: str, m: nn.Module, switch: Switch) -> Iterator[RemovableHandle]:
        yield attach(m, partial(self._before, name), pre=True, prepend=True, switch=switch)
        yield attach(m, self._after, always_call=True, switch=switch)

    def remove(self) -> None:
        """Remove the hooks and discard the batch; can be repeated."""
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
        """Return why the batch cannot be run again; `""` if it can."""
        if not self.calls:
            return "the model ran in compiled code, or in another thread"
        now = [_n_writes(t) for call in self.calls for t in tree_leaves(call.inputs)]
        return "its inputs were overwritten after the model had run" if now != self._inputs else ""

    @property
    def weights_changed(self) -> bool:
        """Return whether parameters were written to since the batch began."""
        return sum(map(_n_writes, self._params)) != self._weights

    def find_nonfinite(self, layer: str | None, loss: Callable[[Any], Tensor] | None) -> NonFinite:
        """Run the batch again; find what makes the first NaN or Inf in `layer`, or in the run."""
        backward = layer is None and (loss is not None or any(call.grads for call in self.calls))
        return search(self.root, self.calls, backward, loss if backward else None, layer)

    def write(self, path: Path, kind: str, incident: str, weights: bool) -> bool:
        """Write the batch to a file, with parameters and buffers if `weights`.

        Returns:
            Whether `replay` reads the file without `weights_only=False`.
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
    """Return a copy on the CPU; the copy of a view does not hold the rest of its memory."""
    return t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad)


def _digests(x: Any) -> list[str]:
    """Return each tensor's dtype, shape and a hash of its values, in which all NaN are equal."""
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
    """Return a call as dicts, lists, numbers and tensors, which `torch.load` can read safely."""
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
    """Holds what a model returned when it ran a saved batch again.

    It compares no layers, so it is no `Localisation`; hooks around `replay` see the layers.

    Attributes:
        output: what the model returned; if the batch made several calls, what the last one did.
        inputs: the inputs of that call, as in `model(*inputs, **inputs.kwargs)`.
        grads: the gradients of the parameters by name; empty if the batch had no backward.
        same: whether the weights and all outputs are the same as in training, bit for bit.
        repeated: whether the incident has happened again.
        incident: the incident in training, in words.
    """

    output: Any
    inputs: Inputs
    grads: dict[str, Tensor]
    same: bool
    repeated: bool
    incident: str

    def __repr__(self) -> str:
        same = "bit for bit as in training" if self.same else "not as in training, or the weights"
        again = "The incident is repeated" if self.repeated else "It does not repeat the incident"
        return f"{self.incident}\n  Replay: the output is {same}. {again}."


def replay(file: str | Path, model: nn.Module, *, weights_only: bool = True) -> Replay:
    """Run the batch that `FlightRecorder(save=…)` wrote again, with the same random numbers.

    The model runs in the modes and with the autocast of the training run, and the backward starts
    from the gradients that its output got. Hooks that are on see the run; a `watch` would count it
    as training, so end that first. The model's state is restored. If the file has weights
    (`FlightRecorder(weights=True)`), they are used; otherwise load those of that step first.

    Args:
        file: the path of the file.
        model: a model built like the one that was trained.
        weights_only: as for `torch.load`: refuse a file with objects other than tensors and plain
            values. With False the file can run any code, so use it for files that you trust.

    Raises:
        OptionError: `FlightRecorder` did not write the file, or it is damaged.
        ArgumentError: the file has other objects; `model` lacks a layer that the batch ran.
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
    # equal outputs are not enough: NaN in these weights gives NaN too, from another cause
    same &= [*map(_digests, outputs)] == [call.output for call in calls]
    if state["kind"] == "gradient":
        repeated = any(map(is_bad, grads.values()))
    else:
        bad = state["kind"] != "spike" and any(map(is_bad, tree_leaves(outputs)))
        repeated = same or bad
    return Replay(outputs[-1], calls[-1].inputs, grads, same, repeated, state["incident"])
