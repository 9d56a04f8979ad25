"""The batch of an incident: kept while it trains, written to a file, and run again by `replay`.

While a batch trains, `ModelCalls` holds references to the inputs of the model, its output and the
gradient of the output, and a copy of the random states. Tensors are copied at an incident only; if
the batch was overwritten by then, it is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from hookkit._core.devices import accelerator
from hookkit._core.files import atomic_write
from hookkit._core.modules import can_run, find, unwrap, walk, wrappers
from hookkit._core.pytree import Inputs, tree_leaves, tree_map
from hookkit._core.random_state import random_states, set_random_states
from hookkit.errors import ArgumentError, OptionError
from hookkit.hooks.attach import Switch, attach, remove_all
from hookkit.hooks.calls import call_kind
from hookkit.inspection.differences import dense
from hookkit.inspection.nonfinite import NonFinite, is_bad, search
from hookkit.inspection.preserve import copied_inputs, preserve_state

_MOST_CALLS = 64  # of parts of a model in one batch; a model that runs itself makes one call


@dataclass
class ModelCall:
    """One call of a model, or of a part of it, with all that is needed to make it again.

    Attributes:
        name: of the module, `""` for the model itself.
        inputs: not copied.
        random: the random states before the call.
        autocast: for each type of device whether autocast was on, and its dtype.
        grad: whether gradients were on.
        versions: how often each input had been written to.
        output: what the call returned, detached and not copied; or digests of its tensors.
        grads: by the number of a tensor in the output, its gradient. If a loss is in the output,
            only that of the loss.
    """

    name: str
    inputs: Inputs
    random: dict[str, Any] = field(default_factory=random_states)
    autocast: dict[str, Any] = field(default_factory=lambda: _autocast())
    grad: bool = field(default_factory=torch.is_grad_enabled)
    versions: list[int] = field(default_factory=list)
    output: Any = None
    grads: dict[int, Tensor] = field(default_factory=dict)

    def repeat(self, root: nn.Module, inputs: Inputs) -> Any:
        """Make the call again with `inputs`, a copy of its own; return what the module returns."""
        set_random_states(self.random)
        with ExitStack() as undo:
            for device, (enabled, dtype) in self.autocast.items():
                undo.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            undo.enter_context(torch.set_grad_enabled(self.grad))
            found: Any = find(root, self.name)
            return found[1](*inputs, **inputs.kwargs)


class ModelCalls:
    """The outermost calls of a model and its parts in one batch.

    Attributes:
        calls: as they were made.
        n_calls: how many were made; the first 64 are kept.
    """

    def __init__(self, outer: nn.Module) -> None:
        self.outer, self.root = outer, unwrap(outer)
        self._params, self._thread = [*self.root.parameters()], get_ident()
        self._handles, self._on_parts = list[RemovableHandle](), list[RemovableHandle]()
        self.clear()

    def clear(self) -> None:
        """Forget the batch: the next one begins."""
        self.calls, self.n_calls, self._depth, self._weights = list[ModelCall](), 0, 0, 0

    def attach(self, switch: Switch) -> None:
        """Keep each outermost call that is made while `switch` is on."""
        for m in wrappers(self.outer):
            self._handles += self._hooks("", m, switch)
        for name, m, first in walk(self.root):  # while the model's own forward is not known to run
            if first and name and can_run(m):
                self._on_parts += self._hooks(name, m, switch)

    def _hooks(self, name: str, m: nn.Module, switch: Switch) -> Iterable[RemovableHandle]:
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
        if self._depth == 1:
            if not name and self._on_parts:
                remove_all(self._on_parts)
                self._on_parts = []
            if not self.n_calls:
                self._weights = sum(map(_version, self._params))
            self.n_calls += 1
            if self.n_calls <= _MOST_CALLS:
                inputs = Inputs(args, kwargs)
                versions = [*map(_version, tree_leaves(inputs))]
                self.calls.append(ModelCall(name, inputs, versions=versions))

    def _after(self, m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if call_kind(self._thread) != "first" or not self._depth:
            return
        self._depth -= 1
        if self._depth or self.n_calls > _MOST_CALLS or output is None:
            return
        call = self.calls[-1]
        call.output = tree_map(Tensor.detach, output)
        if torch.is_grad_enabled():
            loss, is_guess = loss_in(output)
            for i, t in enumerate(tree_leaves(output)):
                if t.requires_grad and (loss is None or is_guess or t is loss):
                    t.register_hook(partial(call.grads.__setitem__, i))

    # --- at an incident

    @property
    def lost(self) -> str:
        """Why the batch is not known any more; `""` if it is."""
        if not self.calls:
            return "the model ran in compiled code, or in another thread"
        if self.n_calls > _MOST_CALLS:
            return f"it made {self.n_calls} calls of parts of the model"
        written = any(
            [*map(_version, tree_leaves(call.inputs))] != call.versions for call in self.calls
        )
        return "its inputs were written to after the model had run" if written else ""

    @property
    def late(self) -> bool:
        """Whether weights have been written to since the batch began."""
        return sum(map(_version, self._params)) != self._weights

    def find_nonfinite(self, layer: str | None, backward: bool, loss: Any = None) -> NonFinite:
        """Run the batch again, and name what makes the first NaN or Inf; see `search`."""
        given = [(call.name, call.inputs) for call in self.calls]
        leaves = [(call, i) for call in self.calls for i in range(len(tree_leaves(call.output)))]
        grads = [call.grads.get(i) for call, i in leaves]

        def run(copied: list[Inputs]) -> list[Any]:
            pairs = zip(self.calls, copied, strict=True)
            return [call.repeat(self.root, inputs) for call, inputs in pairs]

        backward = backward and (loss is not None or any(g is not None for g in grads))
        ends: Any = grads if loss is None else None
        return search(self.root, given, run, backward=backward, loss=loss, grads=ends, layer=layer)

    def write(self, path: Path, kind: str, incident: str, weights: bool) -> bool:
        """Write the batch to a file; return whether `torch.load(weights_only=True)` can read it.

        Args:
            path: replaced whole, or not at all.
            kind: of the incident.
            incident: in words.
            weights: the model's parameters and buffers, too.
        """
        state = {
            "hookkit": 1,
            "kind": kind,
            "incident": incident,
            "calls": [_to_plain(call) for call in self.calls],
            "training": [name for name, m, first in walk(self.root) if first and m.training],
            "weights": tree_map(_on_cpu, dict(self.root.state_dict())) if weights else None,
        }
        with atomic_write(path) as file:
            torch.save(state, file)
        return not torch.serialization.get_unsafe_globals_in_checkpoint(path)


def _version(t: Tensor) -> int:
    # Private: `_version`, the counter of writes in place (since 0.4). Without it a batch that was
    # overwritten counts as the one that the model was given.
    return 0 if t.is_inference() else t._version


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    devices = dict.fromkeys(("cpu", accelerator()))
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}


def _on_cpu(t: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU, without the rest of the memory that it is a view of."""
    return t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad)


def _digest(t: Tensor) -> str:
    """Return a hash of a tensor's values, in which all NaN are alike."""
    values = dense(t).cpu()
    if values.is_floating_point():
        values = values.masked_fill(values.isnan(), float("nan"))
    data = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{t.dtype} {tuple(t.shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _to_plain(call: ModelCall) -> dict[str, Any]:
    """Return a call as dicts, lists, numbers and tensors on the CPU."""
    inputs = copied_inputs(call.inputs, _on_cpu)
    kind, keys, *rest = call.random["numpy"]
    return {
        "name": call.name,
        "args": tuple(inputs),
        "kwargs": inputs.kwargs,
        "random": {**call.random, "numpy": (kind, keys.tolist(), *rest)},
        "autocast": call.autocast,
        "grad": call.grad,
        "output": [_digest(t) for t in tree_leaves(call.output)],
        "grads": {i: _on_cpu(g) for i, g in call.grads.items()},
    }


# --- running it again


@dataclass(frozen=True, repr=False)
class Replay:
    """What a model returned when it ran a kept batch again.

    It is no `Localisation`, since it compares nothing by layer: hooks that are on have seen the
    layers.

    Attributes:
        output: what the model returned; if the batch made several calls, the last one's.
        outputs: of each call.
        inputs: of the last call, as in `model(*inputs, **inputs.kwargs)`.
        grads: by name, the gradients of the parameters; empty if the batch had no backward.
        same: the outputs are those of then, bit for bit.
        repeated: the incident has happened again.
        incident: that of then, in words.
    """

    output: Any
    outputs: list[Any]
    inputs: Inputs
    grads: dict[str, Tensor]
    same: bool
    repeated: bool
    incident: str

    def __repr__(self) -> str:
        same = "the same as then, bit for bit" if self.same else "not the same as then"
        again = "The incident is repeated" if self.repeated else "It does not repeat the incident"
        return f"{self.incident}\n  Replay: the output is {same}. {again}."


def replay(file: str | Path, model: nn.Module, *, weights_only: bool = True) -> Replay:
    """Run the batch of a file of `FlightRecorder(save=…)` again, with the same random states.

    The model runs each call that the batch made, in the modes, the precision and with the random
    numbers of then; then its backward, from the gradients that its output got. Hooks that are on
    see it. Afterwards the model and the random states are as before.

    With weights in the file (`FlightRecorder(weights=True)`) the model runs with those; otherwise
    with its own, so give it those of that step.

    Args:
        file: a path.
        model: as the one that was trained; its weights may be others.
        weights_only: as for `torch.load`: refuse a file with objects other than tensors, numbers
            and texts in plain containers. With False the file may run any code: only for files
            that you trust.

    Raises:
        OptionError: the file cannot be read, or has other objects.
        ArgumentError: `model` has not the layers of the file, or other weights.

    >>> import tempfile
    >>> from hookkit import FlightRecorder, hook_output
    >>> from hookkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorder = FlightRecorder("report", save=folder)
    ...     learn = synth_learner(cbs=recorder, lr=1e30)
    ...     with learn.no_logging(): learn.fit(1)
    ...     with hook_output(learn.model) as h:
    ...         again = replay(recorder.saved[0], learn.model)
    >>> h.stored.shape, again.output is not None
    (torch.Size([16, 1]), True)
    """
    path, root = check_path("replay", file), unwrap(check_module("replay", model))
    try:
        state = torch.load(path, map_location="cpu", weights_only=weights_only)
        calls = [ModelCall(c["name"], Inputs(c["args"], c["kwargs"]), c["random"], c["autocast"],
                 c["grad"], [], c["output"], c["grads"]) for c in state["calls"]]  # fmt: skip
    except UnpicklingError as why:
        raise OptionError(
            f"replay: {path} holds objects that are not loaded without your consent. If you trust "
            f"the file: replay(…, weights_only=False). {str(why).splitlines()[0]}"
        ) from why
    except (OSError, LookupError, TypeError, RuntimeError) as why:
        raise OptionError(f"replay: {path} is no file that FlightRecorder wrote ({why}).") from why
    if unknown := [call.name for call in calls if find(root, call.name) is None]:
        raise ArgumentError(f"replay: the model has no layer {unknown[0]!r}, which the batch ran.")
    own, weights = root.state_dict(), state["weights"] or {}
    other = [k for k in {**own, **weights} if weights and _shape(own, k) != _shape(weights, k)]
    if other:
        raise ArgumentError(f"replay: the file has weights of another model: {other[0]} differs.")
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    outputs, grads = list[Any](), dict[str, Tensor]()
    with preserve_state(root, params=True, observers=True), torch.enable_grad():
        with torch.no_grad():
            for name, t in weights.items():
                own[name].copy_(t)
        for name, m, first in walk(root):
            if first:
                m.training = name in state["training"]
        for call in calls:
            call.inputs = tree_map(lambda t: t.to(device), call.inputs)
            outputs.append(call.repeat(root, call.inputs))
        same = [[_digest(t) for t in tree_leaves(o)] for o in outputs] == [c.output for c in calls]
        ends = [
            (tree_leaves(o)[i], g)
            for o, call in zip(outputs, calls, strict=True)
            for i, g in call.grads.items()
        ]
        if ends:
            for p in root.parameters():
                p.grad = None
            torch.autograd.backward([t for t, _ in ends], [g.to(t.device) for t, g in ends])
            grads = {n: p.grad for n, p in root.named_parameters() if p.grad is not None}
    found = {"gradient": grads, "spike": ()}.get(state["kind"], outputs)
    repeated = any(map(is_bad, tree_leaves(found))) or (same and state["kind"] != "gradient")
    return Replay(outputs[-1], outputs, calls[-1].inputs, grads, same, repeated, state["incident"])


def _shape(weights: Any, name: str) -> Any:
    return weights[name].shape if name in weights else None
