"""`FlightRecorder`: which module made the first NaN or Inf, when, and what came before.

For each batch it keeps the norm of each layer's output, which is not finite if any value is not,
and the norm of each parameter's gradient. On a CPU, and with `"skip"`, it looks at them before the
optimizer's step, so that bad gradients never reach the weights. On a GPU that would wait, so it
looks at the batch before, whose answer has arrived by then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit._core import distributed as ranks
from hookkit._core.checks import check_choice, check_flag, check_number, check_path, short_repr
from hookkit._core.devices import to_host_async, widest_float
from hookkit._core.messages import warn
from hookkit._core.modules import class_name, unwrap
from hookkit.callbacks.events import CancelStepException
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import NonFiniteError, OptionError
from hookkit.hooks.calls import graph_task
from hookkit.recorders.graph_op import enlist, show_traced
from hookkit.recorders.incident import ModelCalls
from hookkit.recorders.layer_hooks import LayerHooks
from hookkit.recorders.moments import norm, plain
from hookkit.recorders.parameters import grad_norms, named_parameters
from hookkit.records import Incident

_MOST = 16  # incidents kept: later ones of a run that fails again and again add nothing

_WINDOW, _FEW = 128, 20  # losses that a spike is measured by; fewer say nothing
_NOT_REPEATED = (
    "Run again, the batch does not repeat it: all is finite, or between 1.8e19 and Inf. The model "
    "is not deterministic, or the loss outside of it is not finite."
)
_LOSS, _INPUT = "(loss)", "(input)"  # the first two rows; those of layers follow
_SPOILED = "Its own weights are not finite: this step or the one before spoiled them."
_CURE = 'Look there first; FlightRecorder("skip") skips such steps, "report" only reports them.'


class FlightRecorder(HookCallback):
    """Find the first NaN or Inf in loss, activations and gradients, and report what led to it.

    The batch of an incident is run again before the weights change, with the same random numbers
    (those of NumPy with `save=` only), and the report names the function and the line that made it:
    see `find_nonfinite`. If the second run does not repeat the incident, the report says so.

    It costs one read of each output and gradient, every step: a few per cent of a large model's
    step, and more than that of a tiny one (see `benchmarks/TABLE.md`). Until the step it holds the
    model's inputs, outputs and the outputs' gradients, by reference.

    Args:
        on_nonfinite: `"raise"` a `NonFiniteError`; `"skip"` the optimizer step of that batch; or
            `"report"` only: it is then in `incidents`.
        n_batches: how many batches to remember: the norms of outputs and gradients, not the values.
        modules: which, as for `select`; None takes every module without children.
        save: a folder for the batches of incidents, which `replay` reads.
        spike: also save the batch of a loss that is this many standard deviations above the mean of
            the last 128, once there are 20. It is evidence, no alarm: nothing is reported.
        weights: also save the weights of then. Buffers are those after the forward.
        keep: how many files to write. The last is for a NaN or Inf.

    Attributes:
        incidents: what was found, a tuple of `Incident`; of several bad batches in a row the first.
        saved: the files that were written, a tuple of paths.

    A subclass's `hook(m, i, o)` is called for each layer, and what it returns is watched.

    Under a GradScaler overflowing gradients are no incident: it skips such steps. `"skip"` needs
    `backward()` first and a torch optimizer's `step()` after it, or a closure that is evaluated
    once. It refuses steps within the backward, and closures that are evaluated again.
    An output counts as not finite from 1.8e19 on, where its square leaves float32. Of several
    processes each looks for itself, and none runs a batch again; `gather()` of the Watcher or
    Learner joins what they found.

    On a GPU only `save=` and `"skip"` look before the step, which waits once a batch; otherwise no
    batch is run again. A `w.loss(loss)` after the step is too late for the weights of a spike.

    Raises:
        OptionError: an option that cannot work; as a fit begins: `"skip"` in several processes,
            `weights=True` of a sharded model; from a step that `"skip"` cannot skip.
        NonFiniteError: from the fit, with `"raise"`.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=FlightRecorder("report"), lr=1e30)
    >>> with learn.no_logging(): learn.fit(1)
    >>> learn.flight_recorder.incidents[0].kind
    'activation'
    """

    order = -30

    def __init__(
        self,
        on_nonfinite: str = "raise",
        *,
        n_batches: int = 64,
        modules: Any = None,
        save: str | Path | None = None,
        spike: float | None = None,
        weights: bool = False,
        keep: int = 5,
    ) -> None:
        who = "FlightRecorder"
        check_choice(who, "on_nonfinite", on_nonfinite, ("raise", "skip", "report"))
        n_batches = check_number(who, "n_batches", n_batches, 2, whole=True, what="in batches")
        super().__init__(modules, include_paramless=True, on_valid=False)
        self.on_nonfinite, self.n_batches = on_nonfinite, n_batches
        self.save = None if save is None else check_path(who, save, "save")
        self.spike = None if spike is None else check_number(who, "spike", spike, above=0)
        self.weights = check_flag(who, "weights", weights)
        self.keep = check_number(who, "keep", keep, 1, whole=True, what="files")
        if self.save is None and (spike is not None or weights):
            raise OptionError(f"{who}: spike= and weights= are for the files of save=folder.")
        self.incidents: tuple[Incident, ...] = ()
        self.saved: tuple[Path, ...] = ()
        self.hooks = self._switch = LayerHooks(who)
        self._memory: Any = None  # during a fit
        self._calls: Any = None  # during a fit: what the model was given in this batch
        self._waits = True
        self._losses, self._n_losses = deque[float](maxlen=_WINDOW), 0
        self._saw_loss = True

    # --- hooks

    def _select(self, model: nn.Module) -> Any:
        modules = super()._select(model)
        if self._selectors is not None and not modules:
            raise OptionError(
                f"FlightRecorder(modules={short_repr(self.modules)}): that selects no module, so "
                f"it would see nothing begin. Use None for all of them, or name some."
            )
        return modules

    def _register(self, named: Any) -> None:
        hooks, memory = self.hooks, self._memory
        hooks.thread, hooks.target = get_ident(), memory
        for name, module, path in named:
            memory.types[str(name)] = class_name(module)
            memory.names.append(str(name))
            row = len(memory.names) - 1
            hooks.attach_output_stats(module, row, path, self._function)
        if not isinstance(root := unwrap(self.learn.model), torch.jit.ScriptModule):
            hooks.attach_input_stats(root, memory.names.index(_INPUT))
            if self._waits or self.on_nonfinite == "skip":
                outer = getattr(self.learn, "outer_model", self.learn.model)
                self._calls = ModelCalls(outer, for_file=self.save is not None)
                self._calls.attach(self._switch)

    def _remove(self) -> None:
        super()._remove()
        if self._calls is not None:
            self._calls.remove()

    # --- events

    def before_fit(self) -> None:
        """Hook the modules. Of an earlier fit only the incidents are kept."""
        if self.learn.fitting:
            if self.on_nonfinite == "skip" and ranks.is_distributed():
                raise OptionError(
                    'FlightRecorder("skip"): one process alone would skip a step that the others '
                    'make. Use "raise" or "report".'
                )
            if self.weights and ranks.is_sharded(self.learn.model):
                raise OptionError(
                    "FlightRecorder(weights=True): the model is sharded, so each process has a "
                    "part of each weight only. Leave out weights=True."
                )
            self._losses.clear()
            on_cpu = all(p.is_cpu for p in self.learn.model.parameters())
            self._waits = on_cpu or self.save is not None
            self._memory, self._n_losses = Memory(self.n_batches), len(self.learn.losses)
        super().before_fit()

    def before_batch(self) -> None:
        """Begin the next batch in memory."""
        self._switch.late = False
        super().before_batch()
        if self.recording:
            self._see_loss(of_last=True)
            self._saw_loss, self._n_losses = False, len(self.learn.losses)
            if self._calls is not None:
                self._calls.clear()
            place = self.learn.n_steps, self.learn.epoch, self.learn.train_iter
            self._memory.batches.append(Batch(*place))

    def after_pred(self) -> None:
        """Note that the model has returned: a layer called now counts if it makes the loss."""
        self._switch.late = True

    def before_step(self) -> None:
        """Look at all norms, while bad gradients can still be kept from the weights."""
        if not self.recording:
            return
        if graph_task() != -1:
            self._refuse_to_skip("is made within the backward, before its gradients are there")
            return
        self._ask()
        self._see_loss()
        skips = self.on_nonfinite == "skip"
        if self._look(wait=skips or self._waits) and skips:
            raise CancelStepException

    def _refuse_to_skip(self, why: str) -> None:
        if self.on_nonfinite == "skip":
            raise OptionError(
                f'FlightRecorder("skip"): this step {why}. It cannot be skipped. Use "raise" or '
                f'"report"; or call `backward()` first and the optimizer\'s `step()` after it.'
            )

    def after_step(self) -> None:
        """Take the norms of the gradients that the step used; a closure computes them within."""
        if self.recording and self.learn.stepped and self._memory.batches[-1].is_finite is None:
            self._ask()

    def after_batch(self) -> None:
        """Look at a batch that no step followed."""
        if not self.recording:
            return
        if self.learn.in_closure:
            self._refuse_to_skip("evaluates its batch more than once in its closure")
        if self._memory.batches[-1].is_finite is None:
            # Gradients are read in each batch that a step collects, to name the one that spoiled
            # them. Whether a GradScaler makes the steps is not known before the first.
            known = self._calls is not None and self.learn.n_steps > self._first
            self._ask(grads=known)
        self._switch.on = False
        self._see_loss()
        self._look(wait=self._waits)

    def after_fit(self) -> None:
        """Read the last batch's answer."""
        super().after_fit()
        if self._memory is not None:  # a validation has none
            self._see_loss(of_last=True)
            self._look(wait=True)

    def cleanup_fit(self) -> None:
        """Take the hooks off."""
        super().cleanup_fit()
        self._switch.on = False
        self._memory = self._calls = self.hooks.target = None

    # --- looking

    def _ask(self, grads: bool = True) -> None:
        """Take the norms of the loss and the gradients, and ask whether all norms are finite."""
        memory, loss = self._memory, self.learn.loss
        if isinstance(loss, Tensor):
            memory.update(memory.names.index(_LOSS), 0, "", loss)
        if grads and self.learn.step_scaler is None:  # a GradScaler skips steps that overflow
            self._read_gradients(self.learn.model.parameters())
        memory.batches[-1].ask()

    def _read_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the norms of gradients that an optimizer has used, each once in a batch.

        Loops call it after each optimizer of several: the gradients may be reset before the end.
        """
        if self.recording:
            batch = self._memory.batches[-1]
            known = {i for ids, _ in batch.grads for i in ids}
            new = [p for p in parameters if id(p) not in known]
            batch.grads += [([id(new[i]) for i in at], norms) for at, norms in grad_norms(new)]

    def _look(self, wait: bool) -> bool:
        """Return whether this batch, if `wait`, or the one before has a value that is not finite.

        Keep what was not finite as an incident, of several bad batches in a row the first.
        """
        batches, bad = self._memory.batches, False
        for i in range(max(len(batches) - 2, 0), len(batches) if wait else len(batches) - 1):
            batch = batches[i]
            if batch.bad is None and batch.is_finite is not None:
                bad = batch.bad = not batch.is_finite()
                first = bad and not (i and batches[i - 1].bad)
                if first and len(self.incidents) < _MOST:
                    incident = self._memory.incident(batch, self.learn.model)
                    if batch is batches[-1] and self._calls is not None:
                        incident = self._with_evidence(incident)
                    self.incidents = (*self.incidents, incident)
                    if self.on_nonfinite == "raise":
                        raise NonFiniteError(f"{incident}\n  {_CURE}")
        return bad

    # --- evidence

    def _with_evidence(self, incident: Incident) -> Incident:
        """Run the batch of an incident again, and save it; return the incident with both noted."""
        learn, calls, notes = self.learn, self._calls, [incident.note]
        if calls.lost or calls.weights_changed or ranks.is_distributed():
            changed = "weights have changed since" if calls.weights_changed else ""
            why = calls.lost or changed or "other processes run beside it"
            notes.append(f"The batch is not run again: {why}.")
        else:
            loss = None
            if learn.loss_func is not None and hasattr(learn, "yb"):  # a Learner
                loss = lambda output: learn.loss_func(output, *learn.yb)  # noqa: E731
            layer = incident.name if incident.kind == "activation" else None
            try:
                if incident.kind == "loss" and loss is None:  # its function is not known here
                    notes.append("find_nonfinite(model, …, loss=…) names the line that made it.")
                else:
                    found = calls.find_nonfinite(layer, loss)
                    if found.rows and incident.origin == "function":
                        notes.clear()  # where to look is known now
                    notes.append(f"Run again: {found.verdict}." if found.rows else _NOT_REPEATED)
            except Exception as error:  # the report is right without it
                notes.append(f"It could not be run again ({type(error).__name__}: {error}).")
        incident = replace(incident, note=" ".join(filter(None, notes)))
        if self.save is None or calls.lost:
            return incident
        saved = self._save(incident.step, incident.kind, str(incident))
        return replace(incident, note=f"{incident.note} {saved}")

    def _save(self, step: int, kind: str, text: str) -> str:
        """Write the batch to a file; return in words where it is, or why it is not there."""
        folder, calls = self.save, self._calls
        assert folder is not None
        if calls.lost or len(self.saved) >= self.keep:
            return f"The batch is not saved: {calls.lost or f'there are {self.keep} (keep=)'}."
        name = f"step{step}_{kind}" + f"_rank{ranks.rank()}" * ranks.is_distributed()
        path, n = folder / f"{name}.pt", 2
        while path.exists():  # of another run
            path, n = folder / f"{name}_{n}.pt", n + 1
        weights = self.weights and not calls.weights_changed
        try:
            is_plain = calls.write(path, kind, text, weights)
        except Exception as error:  # a full disk, an object that cannot be pickled
            return f"The batch could not be saved ({type(error).__name__}: {error})."
        self.saved = (*self.saved, path)
        how = "" if is_plain else ", weights_only=False"
        late = " without weights, which the step has changed" * (self.weights and not weights)
        return f"Saved{late}: replay({str(path)!r}, model{how})."

    def _see_loss(self, of_last: bool = False) -> None:
        """Save the batch if its loss is a spike.

        Args:
            of_last: the batch is over, and its loss, if it was reported after the step, is in the
                loop's log alone.
        """
        if self.spike is None or self._saw_loss:
            return
        loss, losses = self.learn.loss, self.learn.losses
        if of_last:
            new = len(losses) > self._n_losses
            loss = losses.by_batch(len(losses) - 1)[0] if new else None
        if loss is None:
            return
        self._saw_loss, loss = True, float(loss)  # sync: one for each batch, with spike=
        past = np.array(self._losses)
        if math.isfinite(loss):
            self._losses.append(loss)
        mean, std = (past.mean(), past.std()) if len(past) >= _FEW else (0.0, math.inf)
        if math.isfinite(loss) and loss > mean + self.spike * std:
            step, epoch, _ = self._memory.batches[-1].place
            text = f"step {step} (epoch {epoch}): a spike of the loss, {loss:.4g}; the {len(past)} "
            text += f"before it have the mean {mean:.4g} and the standard deviation {std:.2g}"
            if len(self.saved) < self.keep - 1:  # the last place is for NaN and Inf
                saved = self._save(step, "spike", text)
                if not saved.startswith("Saved:"):
                    warn(f"FlightRecorder(spike={self.spike:g}): {text}. {saved}")

    def _gather(self) -> None:
        """Join the incidents of all ranks, in the order of their steps: each rank has to call."""
        first = dict[Any, Any]()
        for incident in (i for own in ranks.gather_object(self.incidents) for i in own):
            first.setdefault((incident.step, incident.kind, incident.name), incident)
        self.incidents = tuple(sorted(first.values(), key=lambda i: i.step))

    def __getstate__(self) -> dict[str, Any]:
        hooks = LayerHooks(type(self).__name__)
        gone = {"_memory": None, "_calls": None, "hooks": hooks, "_switch": hooks}
        return {**super().__getstate__(), **gone}

    def __repr__(self) -> str:
        n_saved = f", {len(self.saved)} saved" * bool(self.saved)
        return f"FlightRecorder({self.on_nonfinite!r}, {len(self.incidents)} incidents{n_saved})"


class Batch:
    """The norms of one batch.

    Attributes:
        place: step, epoch and iteration.
        outputs: name of each layer → its norm and number of values, in execution order.
        grads: ids of parameters, and the (n,) norms of their gradients.
        is_finite: waits for the answer whether all norms are finite; None before `ask`.
        bad: that answer, once it was read.
    """

    def __init__(self, *place: int) -> None:
        self.place: Any = place
        self.outputs: dict[str, tuple[Tensor, int]] = {}
        self.grads: list[tuple[list[int], Tensor]] = []
        self.is_finite: Callable[[], Any] | None = None
        self.bad: bool | None = None

    @torch.no_grad()
    def ask(self) -> None:
        """Ask the device whether all norms are finite, without waiting for the answer."""
        norms = [norm for norm, _ in self.outputs.values()] + [norms for _, norms in self.grads]
        if norms:
            device = norms[0].device
            flat = [x.reshape(-1).to(device, widest_float(device)) for x in norms]
            self.is_finite = to_host_async(torch.cat(flat).isfinite().all())

    def rms(self, name: str) -> float:
        """Return the root mean square of a layer's output; NaN if it did not run."""
        norm, n = self.outputs.get(name, (math.nan, 1))
        return float(norm) / math.sqrt(n)  # sync: after an incident

    def grad_norms(self, owners: dict[int, str]) -> dict[str, float]:
        """Return the joint norm of the gradients of each module, by the id of its parameters."""
        found: dict[str, float] = {}
        for ids, norms in self.grads:
            for i, own in zip(ids, norms.tolist(), strict=True):  # sync: after an incident
                name = owners.get(i, "")
                found[name] = math.hypot(found.get(name, 0.0), own)
        return found


class Memory:
    """The last batches, and `update`, which hooks and compiled graphs call."""

    def __init__(self, n_batches: int) -> None:
        self.batches: deque[Batch] = deque(maxlen=n_batches)
        self.names = [_LOSS, _INPUT]  # by row, which is what a compiled graph can hold
        self.types: dict[str, str] = {}  # of the layers
        self.thread, (self.id, self.token) = get_ident(), enlist(self)

    def update(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Add a tensor to the norm of a layer, which may run several times in a batch."""
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
        elif t.is_floating_point() and (values := plain(t)) is not None and values.numel():
            outputs, name, whole = self.batches[-1].outputs, self.names[row], norm(values)
            before, n = outputs.get(name, (None, 0))
            if before is not None:
                whole = torch.hypot(before.to(whole), whole)
            outputs[name] = whole, n + values.numel()

    def incident(self, batch: Batch, model: nn.Module) -> Incident:
        """Return what was not finite in `batch`, and the norms of the batches before it."""
        past = [b for b in self.batches if b.place[2] < batch.place[2]]
        bad = [name for name in batch.outputs if not math.isfinite(batch.rms(name))]
        names, history = [name for name in bad if name in self.types], dict[str, Any]()
        named = [(name.rpartition(".")[0], kind, p) for name, kind, p in named_parameters(model)]
        if names:
            kind = "activation"
            own = [p for owner, _, p in named if owner == names[0]]
            origin, note = self._cause(batch, names[0], _INPUT in bad, own)
            history = {name: np.array([b.rms(name) for b in past]) for name in self.types}
        elif _LOSS in bad:
            kind, origin, note = "loss", "loss", "The layers' outputs are finite."
        else:
            kind, origin, note = "gradient", "gradient", "The history is of gradient norms."
            owners = {id(p): owner for owner, _, p in named}
            norms = batch.grad_norms(owners)
            # the backward begins at the end: the last layer to run comes first
            order = {name: -i for i, name in enumerate(batch.outputs)}
            names = [name for name, norm in norms.items() if not math.isfinite(norm)]
            names.sort(key=lambda name: (order.get(name, 1), name))
            before = [b.grad_norms(owners) for b in past]
            history = {name: np.array([b.get(name, 0.0) for b in before]) for name in names}
        name, *others = names or [""]
        types = {owner: kind for owner, kind, _ in named} | self.types
        steps = np.array([b.place[0] for b in past], np.int64)
        at = dict(zip(("step", "epoch", "iter"), batch.place, strict=True))
        past_of: Any = {"others": tuple(others), "steps": steps, "history": history}
        return Incident(kind, name, types.get(name, ""), **at, **past_of, note=note, origin=origin)

    def _cause(
        self, batch: Batch, name: str, bad_input: bool, own: list[nn.Parameter]
    ) -> tuple[str, str]:
        """Return what may have made a layer's output not finite: `Incident.origin`, and a sentence.

        Args:
            own: the parameters of the layer.
        """
        if bad_input:
            return "data", "The model's input was not finite: look at the data."
        if not all(bool(p.isfinite().all()) for p in own):  # sync: after an incident
            return "param", _SPOILED
        order = [layer for layer in batch.outputs if layer in self.types]
        if not (at := order.index(name)):
            return "function", ""
        head = "Its weights are finite: if" if own else "If"
        between = f"{order[at - 1]} and it"
        return "function", f"{head} its input was not, look at what runs between {between}."
