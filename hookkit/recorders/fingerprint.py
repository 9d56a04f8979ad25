"""`Fingerprint` writes sketches of all tensors that each training step computes to a file.

`Sketches` holds the hooks, and collects the current step: a row for each tensor that a module takes
or returns, with the number of its sketch, so that a tensor which many modules pass on is read once.
At the end of the step, the rows (which tensors there are, the same in most steps) and the sketches
(their values) are written. `inspection/run_file.py` describes and reads the file.
"""

from __future__ import annotations

import json
import weakref
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit._core import distributed as ranks
from hookkit._core.checks import check_path
from hookkit._core.devices import to_host_async
from hookkit._core.files import append_lines, first_line
from hookkit._core.modules import calls_children, can_run, class_name, submodules, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves_with_path
from hookkit._core.random_state import random_states
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import HookError, OptionError
from hookkit.hooks.attach import Switch, attach, remove_all
from hookkit.hooks.calls import call_kind
from hookkit.hooks.grads import listen_output
from hookkit.inspection.first_difference import Call, CallTree
from hookkit.inspection.run_file import HEADER, SKETCH
from hookkit.recorders.graph_op import enlist, show_traced
from hookkit.recorders.parameters import named_parameters
from hookkit.recorders.sketch import sketch

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Hyperparameters that choose a kernel, and do not change what a step computes."""


class Fingerprint(HookCallback):
    """Writes to a file what each training step computes, for `compare_runs`.

    The file has no values, but a 64-bit hash, the norm and four random projections of each tensor:
    of what each layer takes and returns, of the gradients of outputs and parameters, and of weights
    and buffers before and after the step. It also has the hyperparameters, the scale of a
    GradScaler, and hashes of the random states. Each step is written as it ends, so the file of a
    killed process is readable up to its last whole step. On a GPU a step is written when the next
    recorded one ends, so that no step waits for the device.

    Args:
        path: the file. With several processes each writes its own: `path.rank0`, `path.rank1`. The
            fingerprint of another run is overwritten when the first step ends.
        every: record the optimizer steps whose number is a multiple of `every`.
        modules: the modules to record, as for `select`; None records all.

    Gradients of outputs are recorded for modules without children. A forward without gradients in
    evaluation mode is not recorded. In a watched loop a whole model in evaluation mode is recorded
    only after `w.batch()`. A tensor is read again only after an in-place write; weights are read
    before and after each step.

    Cost: three reads of each tensor. On a CPU a step of a small transformer takes about 1.3 times
    as long with a batch of 8 times 128 tokens, and twice as long with 32 tokens.

    Raises:
        OptionError: as the fit begins: a file that is no fingerprint is at `path`.
        HookError: as the fit begins: it has recorded another run with steps of the same numbers.

    >>> import tempfile
    >>> from hookkit import compare_runs
    >>> from hookkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(n_trn=3, cbs=Fingerprint(f"{folder}/run.fp"))
    ...     with learn.no_logging(): learn.fit(1)
    ...     compare_runs(f"{folder}/run.fp", f"{folder}/run.fp")
    3 steps compared: no difference, bit for bit
    """

    order = -25

    def __init__(self, path: str | Path, every: int = 1, *, modules: Any = None) -> None:
        every = 1 if every is None else every
        super().__init__(modules, every, include_paramless=True, on_valid=False)
        self.path = check_path("Fingerprint", path)
        self._last = -1  # the number of the last recorded step
        self._begun = False  # whether this recorder has written to the file
        self._layout: Any = None  # the layout that was written last
        # waits for the sketches of the last step, and returns its lines
        self._waiting: Callable[[], list[str]] | None = None

    # --- hooks

    def _select(self, model: nn.Module) -> Any:
        if self._selectors is not None:
            return super()._select(model)
        return {name: m for name, m, first in walk(model) if first and can_run(m)}

    def _register(self, named: Any) -> None:
        for name, module, _ in named:
            self.hooks.attach(str(name), module)

    # --- events

    def before_fit(self) -> None:
        """Hook the modules. The file is left alone until a step has ended."""
        if self.learn.fitting:
            rank = f".rank{ranks.rank()}" * ranks.is_distributed()
            self._file = self.path.with_name(self.path.name + rank)
            if self.learn.n_steps <= self._last:
                raise HookError(
                    f"{self!r} has recorded another run, whose steps have the same numbers. Make "
                    f"another for this one: Fingerprint(…) with another path."
                )
            if not self._begun and self._file.exists() and first_line(self._file) != HEADER:
                raise OptionError(
                    f"Fingerprint({str(self.path)!r}): there is a file that is no fingerprint, or "
                    f"one of another version of hookkit. Remove it, or choose another path."
                )
            self.hooks = self._switch = Sketches()
        super().before_fit()

    def before_batch(self) -> None:
        """Decide whether this batch is recorded; before a step's first batch note the weights."""
        self._switch.on = self.learn.training and self.learn.n_steps % self.every == 0
        if self.recording:
            if not self.hooks.trees:
                self.hooks.parameters = [*named_parameters(self.learn.model)]
                self._note_weights("before", "before")
            self.hooks.begin_batch()

    def before_step(self) -> None:
        """Note the loss, and the gradients that the optimizer gets."""
        if self.recording:
            if isinstance(loss := self.learn.loss, Tensor):
                self.hooks.note("loss", "", 0, "", loss)
            if (scaler := self.learn.step_scaler) is not None:
                # its scale as a tensor: `get_scale` waits for the device
                one = torch.ones(1, device=self.hooks.parameters[0][2].device)
                self.hooks.note("scale", "GradScaler", 0, "", scaler.scale(one))
            self._read_gradients(p for _, _, p in self.hooks.parameters)
            self.hooks.training = unwrap(self.learn.model).training

    def after_step(self) -> None:
        """Note the gradients that the step has changed, and the weights; write the step."""
        if self.recording and self.learn.stepped:
            self._read_gradients(p for _, _, p in self.hooks.parameters)
            self._note_weights("weight", "buffer")
            self._write(self.learn.n_steps - 1)
            self.hooks.end_step()

    def cleanup_fit(self) -> None:
        """Remove the hooks, and write the last step."""
        super().cleanup_fit()
        self.hooks = None
        self._flush()

    # --- what no hook sees

    def _note_weights(self, weight: str, buffer: str) -> None:
        self.hooks.known.clear()  # `.data` may have been written without a new version
        for name, _, p in self.hooks.parameters:
            self.hooks.note(weight, name, 0, "", p)
        for name, b in unwrap(self.learn.model).named_buffers():
            self.hooks.note(buffer, name, 0, "", b)

    def _read_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients that have changed since they were last noted.

        Loops call it after each optimizer of several: the gradients may be reset before the end.
        """
        if self.recording:
            wanted = {id(p) for p in parameters}
            for name, _, p in reversed(self.hooks.parameters):
                if id(p) in wanted and p.grad is not None and not self.hooks.knows(p.grad):
                    self.hooks.note_next("param_grad", name, "", p.grad)

    def _settings(self) -> dict[str, Any]:
        """Return the hyperparameters by name: `lr of group 0`, numbered across all optimizers."""
        found: dict[str, Any] = {}
        i = 0
        for n, opt in enumerate(self.learn.stepped_opts):
            found[f"optimizer {n}"] = type(opt).__name__
            for group, rate in zip(opt.param_groups, self.learn.rates_of(opt), strict=True):
                for key in getattr(opt, "defaults", group):  # a scheduler adds keys of its own
                    value = rate if key == "lr" else group.get(key)
                    if isinstance(value, Tensor):
                        value = value.tolist()  # sync: if it is on a device
                    if key not in _IMPLEMENTATION:
                        found[f"{key} of group {i}"] = value
                i += 1
        return found

    # --- the file

    def _write(self, step: int) -> None:
        """Write the step when its sketches have arrived: now if they are on the CPU."""
        layout = {**self.hooks.layout(), "selected": self._selectors is not None}
        settings = self._settings()
        is_new, self._layout = layout != self._layout, layout
        read, arrived = self.hooks.read_later()

        def lines() -> list[str]:
            sketches = b64encode(read().tobytes()).decode()
            head = {"step": step, "settings": settings, "sketches": sketches}
            texts = [json.dumps({"layout": layout})] * is_new
            return [*texts, json.dumps(head, default=repr)]

        self._flush()
        self._last, self._waiting = step, lines
        if arrived:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            lines = waiting()
            if not self._begun:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text("", encoding="utf-8")
                lines, self._begun = [HEADER, *lines], True
            append_lines(self._file, lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_waiting": None}

    def __repr__(self) -> str:
        return f"Fingerprint({str(self.path)!r})"


class Sketches(Switch):
    """Holds the hooks of one recorder, and what they have seen in the current step.

    Attributes:
        on: whether the hooks note anything.
        thread: the thread whose forwards are noted.
        id, token: by which compiled graphs find it (`graph_op.enlist`).
        trees: the calls of each batch of the step.
        parameters: the model's parameters at the beginning of the step.
        training: whether the model was in training mode as the step was made.
        known: id of a tensor that was read → (weak reference, version, number of its sketch).
    """

    def __init__(self) -> None:
        super().__init__(on=False)
        self.thread, (self.id, self.token) = get_ident(), enlist(self)
        # by number, the `row` below: a compiled graph can hold no module
        self._modules: list[tuple[str, nn.Module]] = []
        self._handles: list[RemovableHandle] = []
        self.end_step()

    def end_step(self) -> None:
        """Clear what was collected; the next step begins."""
        self.trees: list[CallTree] = []
        self.parameters: list[tuple[str, str, nn.Parameter]] = []
        self.training = True
        # for each batch: as a call begins (name, class, mode, `extra_repr`), as it ends (name,)
        self._events: list[list[tuple[Any, ...]]] = []
        # (what, batch, name, call, path) → the number of a sketch, dtype and shape
        self._rows: dict[tuple[str, int, str, int, str], tuple[int, str, tuple[int, ...]]] = {}
        self._sketches: list[Tensor] = []
        self.known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._n_grads = Counter[tuple[str, str, str]]()
        self._call: Call | None = None  # whose inputs or outputs are being noted

    def begin_batch(self) -> None:
        """Begin a batch of the step, and note the random states."""
        self.trees.append(CallTree())
        self._events.append([])
        for name, state in random_states().items():
            for path, t in tree_leaves_with_path(state):
                self.note("random", name, 0, path, t)

    # --- hooks

    def attach(self, name: str, module: nn.Module) -> None:
        """Register hooks that note the inputs and outputs of a module.

        If it calls no other modules, the gradients of its outputs are noted too; for other modules
        they are mostly those of a module inside.
        """
        row = len(self._modules)
        self._modules.append((name, module))
        is_inner = not submodules(module) or not calls_children(module)

        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            kind, leaves = call_kind(self.thread), tree_leaves_with_path(Inputs(args, kwargs))
            if kind == "first" and not leaves:
                self._begin(row)
            if kind in ("first", "compiled"):
                for i, (path, t) in enumerate(leaves):
                    self.update(row, i, f"input {path}", t)

        def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            kind, leaves = call_kind(self.thread), tree_leaves_with_path(output)
            if kind == "first" and not leaves:
                self._end(row)
            if kind in ("first", "compiled"):
                for i, (path, t) in enumerate(leaves):
                    self.update(row, i, f"output {path}", t)
            elif kind != "recomputed":  # the gradients may come from the second forward
                return None
            paths = [path for path, _ in leaves]  # `receive` lives as long as the graph

            def receive(i: int, grad: Tensor) -> None:
                self.update(row, i, f"grad {paths[i]}", grad)

            return listen_output(module, args, kwargs, output, receive) if is_inner else None

        self._handles.append(attach(module, begins, pre=True, prepend=True, switch=self))
        self._handles.append(attach(module, ends, edit=True, observes=True, switch=self))

    def remove(self) -> None:
        """Remove the hooks; can be repeated."""
        remove_all(self._handles)
        self._handles, self._modules = [], []

    def update(self, row: int, leaf: int, place: str, t: Tensor) -> None:
        """Note an input, an output or a gradient of a module; compiled graphs call this too.

        Args:
            row: the number of the module.
            leaf: the number of the tensor; with the first one a call begins or ends.
            place: "input", "output" or "grad", and the path of the tensor.
            t: the tensor.
        """
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, place, t)
            return
        what, _, path = place.partition(" ")
        if not self.on:
            return
        if what == "grad":
            self.note_next(what, self._modules[row][0], path, t)
            return
        if leaf == 0 and what == "input":
            self._begin(row)
        elif leaf == 0:
            self._end(row)
        # parameters that are inputs are noted as weights
        if self._call is not None and (what == "output" or not isinstance(t, nn.Parameter)):
            self.note(what, *self._call, path, t)

    def _begin(self, row: int) -> None:
        name, module = self._modules[row]
        self._call = None
        # an evaluation between the training steps is not recorded
        if module.training or torch.is_grad_enabled() or self.trees[-1].current is not None:
            self._call = self.trees[-1].begin(name)
            # `extra_repr` of PyTorch's modules shows attributes that may differ between two runs
            is_torch = type(module).__module__.startswith("torch.nn.modules")
            says = module.extra_repr() if is_torch and not submodules(module) else ""
            self._events[-1].append((name, class_name(module), module.training, says))

    def _end(self, row: int) -> None:
        name = self._modules[row][0]
        self._call = self.trees[-1].end(name)
        self._events[-1].append((name,))

    # --- rows

    def note(self, what: str, name: str, call: int, path: str, t: Tensor) -> None:
        """Add a row for a tensor; sketch the tensor unless the sketch of this version is there."""
        if not self.knows(t):
            found = sketch(t)
            number = -1 if found is None else len(self._sketches)
            self._sketches += [] if found is None else [found]
            self.known[id(t)] = weakref.ref(t), _version(t), number
        batch = len(self.trees) - 1 if what in ("random", "input", "output") else 0
        number = self.known[id(t)][2]
        self._rows[what, batch, name, call, path] = number, str(t.dtype)[6:], tuple(t.shape)

    def note_next(self, what: str, name: str, path: str, t: Tensor) -> None:
        """Add a row for a gradient; its call number counts the gradients that came there before."""
        arrived = self._n_grads[what, name, path]
        self._n_grads[what, name, path] += 1
        self.note(what, name, arrived, path, t)

    def knows(self, t: Tensor) -> bool:
        """Return whether this tensor was sketched, and has not been written since."""
        known = self.known.get(id(t))
        return known is not None and known[0]() is t and known[1] == _version(t)

    # --- the end of a step

    def layout(self) -> dict[str, Any]:
        """Return the calls and rows of the step, without values, as the file has them."""
        rows = [(*key, *row) for key, row in self._rows.items()]
        return {"calls": self._events, "rows": rows, "training": self.training}

    def read_later(self) -> tuple[Callable[[], Any], bool]:
        """Begin to copy the sketches to the host.

        Returns:
            A function that waits for them and returns an array of `SKETCH`; and whether all of them
            are on the CPU, so that it need not wait.
        """
        devices = [found.device for found in self._sketches]
        copies = {
            device: to_host_async(torch.stack([s for s in self._sketches if s.device == device]))
            for device in set(devices)
        }

        def read() -> Any:
            parts = {device: iter(wait().numpy()) for device, wait in copies.items()}
            found = np.array([next(parts[device]) for device in devices]).reshape(-1, 6)
            array = np.zeros(len(found), SKETCH)
            array["hash"] = found[:, 0]
            array["numbers"] = found[:, 1:].astype(np.int32).view(np.float32)
            return array

        return read, all(device.type == "cpu" for device in copies)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version
