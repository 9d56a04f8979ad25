"""`FlightRecorder`: which module made the first NaN or Inf, when, and what came before.

Of each batch it keeps one number per layer, the norm of its output, which is not finite if any
value is not, and one per parameter, the norm of its gradient. On a CPU, and with `"skip"`, they are
looked at before the optimizer's step, so that bad gradients never reach the weights. On a GPU that
would wait, so the batch before is looked at: whether its norms are finite has arrived by then.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from threading import get_ident
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.checks import check_choice, check_number, shown
from hookkit.devices import sent
from hookkit.errors import HookkitWarning, NonFiniteError, OptionError
from hookkit.events import CancelStepException
from hookkit.hooks.entries import Placed, graph_task
from hookkit.hooks.snapshot import is_transforming
from hookkit.modules import class_name, unwrap
from hookkit.moments.graph_op import enlist, new_token, show_traced
from hookkit.recording import HookCallback
from hookkit.records import Incident
from hookkit.selecting import select
from hookkit.stats.layer_hooks import input_entries, output_entries
from hookkit.stats.param_norms import grad_norms_by_id
from hookkit.stats.parameters import named_parameters
from hookkit.stats.unscaling import inverse_scale, known_scaler

_LOSS, _INPUT = 0, 1  # the rows before those of layers
_NAMES = ["(loss)", "(input)"]
_MOST = 16  # incidents kept: later ones of a run that fails again and again add nothing


class _Batch:
    """The norms of one batch.

    Attributes:
        place: step, epoch and iteration.
        outputs: row → its norm and number of values, in execution order.
        grads: name of each parameter → the norm of its gradient.
    """

    def __init__(self, *place: int) -> None:
        self.place: Any = place
        self.outputs: dict[int, tuple[Tensor, int]] = {}
        self.grads: dict[str, Tensor] = {}
        self._answer: tuple[Tensor, torch.Event | None] | None = None

    def ask(self) -> None:
        """Has the device answer whether all norms are finite, and send it."""
        norms = [norm for norm, _ in self.outputs.values()] + [*self.grads.values()]
        if norms:
            together = torch.stack([x.to(norms[0].device, torch.float32) for x in norms])
            self._answer = sent(together.isfinite().all())

    @property
    def finite(self) -> bool:
        """The answer."""
        if self._answer is None:
            return True
        answer, arrived = self._answer
        if arrived is not None:
            arrived.synchronize()  # sync: with "skip", or for the batch before this one
        return bool(answer)

    def rms(self, row: int) -> float:
        """Of the outputs of a layer; NaN if it did not run."""
        norm, n = self.outputs.get(row, (math.nan, 1))
        return float(norm) / math.sqrt(n)  # sync: after an incident


class _Memory:
    """The last batches, and the `see` that hooks and compiled graphs call."""

    def __init__(self, n_batches: int) -> None:
        self.batches: deque[_Batch] = deque(maxlen=n_batches)
        self.names, self.types = [*_NAMES], ["", ""]
        self.thread, self.id, self.token = get_ident(), enlist(self), new_token()

    def row(self, name: str, kind: str) -> int:
        """The row of a layer. That of one that has left the model keeps its past."""
        if name not in self.names[2:]:
            self.names.append(name)
            self.types.append(kind)
        row = self.names.index(name, 2)
        self.types[row] = kind
        return row

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Adds a tensor to the norm of a layer, which may run several times in a batch."""
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
        elif t.is_floating_point() and t.layout is torch.strided and not _is_odd(t):
            t = t.detach()
            wide = torch.promote_types(t.dtype, torch.float32)
            norm = torch.linalg.vector_norm(t.to(wide) if t.itemsize < 2 else t, dtype=wide)
            outputs = self.batches[-1].outputs
            before, n = outputs.get(row, (None, 0))
            if before is not None:
                norm = torch.hypot(before.to(norm), norm)
            outputs[row] = norm, n + t.numel()


def _is_odd(t: Tensor) -> bool:
    return t.is_nested or t.is_meta or not t.numel() or is_transforming()


class FlightRecorder(HookCallback):
    """Finds the first NaN or Inf in loss, activations and gradients, and reports what led to it.

    It costs one read of each output and of each gradient, every step: a few per cent of the step of
    a large model, and more than the step itself of a tiny one (see `benchmarks/TABLE.md`).

    Args:
        on_nonfinite: `"raise"` a `NonFiniteError`; `"skip"` the optimizer step of that batch; or
            `"report"` only: it is then in `incidents`.
        n_batches: how many batches to remember: the norms of outputs and gradients, not the values.
        modules: which, as for `select`; None takes every module without children.

    Attributes:
        incidents: what was found, a tuple of `Incident`; of several bad batches in a row the first.

    A subclass's `hook(m, i, o)` is called for each layer, and what it returns is watched.

    In a step with a closure the first evaluation decides whether the step is skipped; what comes
    later, and steps that are made within the backward, is reported and cannot be skipped, as a
    warning says. Under a GradScaler overflowing gradients are no incident: it skips such steps. An output counts as not finite from
    1.8e19 on, where its square leaves float32. Of several processes each looks for itself.

    Raises:
        OptionError: an option that cannot work; as a fit begins: `"skip"` in several processes.
        NonFiniteError: from the fit, with `"raise"`.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=FlightRecorder("report"), lr=1e30)
    >>> with learn.no_logging(): learn.fit(1)
    >>> learn.flight_recorder.incidents[0].kind
    'activation'
    """

    order = -30
    _saved: ClassVar[tuple[str, ...]] = (*HookCallback._saved, "incidents")

    def __init__(
        self, on_nonfinite: str = "raise", *, n_batches: int = 64, modules: Any = None
    ) -> None:
        who = "FlightRecorder"
        check_choice(who, "on_nonfinite", on_nonfinite, ("raise", "skip", "report"))
        n_batches = check_number(who, "n_batches", n_batches, 2, whole=True, what="in batches")
        super().__init__(modules, include_paramless=True, on_valid=False)
        self.on_nonfinite, self.n_batches = on_nonfinite, n_batches
        self.incidents: tuple[Incident, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._memory: Any = None  # during a fit
        self._unread: list[_Batch] = []  # whose answer has not been read
        self._on_cpu = True
        self._noted = self._warned = self._bad_before = False

    # --- hooks

    def _select(self, model: nn.Module) -> Any:
        modules, root = super()._select(model), unwrap(model)
        if self._selectors is not None and not modules:
            raise OptionError(
                f"FlightRecorder(modules={shown(self._given)}): that selects no module, so it "
                f"would see nothing begin. Use None for all of them, or name some."
            )
        if isinstance(root, torch.jit.ScriptModule):
            return modules
        if self._selectors is not None:
            return select(model, *self._selectors, {"": _NAMES[_INPUT]})
        return {**modules, _NAMES[_INPUT]: root}

    def _entries(self, name: str, module: nn.Module, leaf: str) -> list[Placed]:
        if name == _NAMES[_INPUT]:
            return input_entries(self._switch, _INPUT)
        row = self._memory.row(name, class_name(module))
        return output_entries(self._switch, row, leaf, self._function)

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; of an earlier fit only the incidents are kept."""
        if self.learn.fitting:
            if self.on_nonfinite == "skip" and ranks.is_distributed():
                raise OptionError(
                    'FlightRecorder("skip"): one process alone would skip a step that the others '
                    'make. Use "raise" or "report".'
                )
            self._clear()
            self._on_cpu = all(p.is_cpu for p in self.learn.model.parameters())
            self._memory = self._switch.target = _Memory(self.n_batches)
        super().before_fit()

    def before_batch(self) -> None:
        """Begins the next batch in memory."""
        self._switch.late = self._noted = False
        super().before_batch()
        if self.recording:
            place = self.learn.n_steps, self.learn.epoch, self.learn.train_iter
            self._memory.batches.append(batch := _Batch(*place))
            self._unread = [*self._unread, batch]

    def after_pred(self) -> None:
        """The model has returned: a layer called on its own now counts if it makes the loss."""
        self._switch.late = True

    def before_step(self) -> None:
        """Looks at all norms, while bad gradients can still be kept from the weights."""
        if not self.recording:
            return
        if getattr(self.learn, "each_forward", False) or graph_task() != -1:
            self._warn_too_late("is made before its gradients are there (within the backward)")
        else:
            self._note()
            skips = self.on_nonfinite == "skip"
            if self._look(wait=skips or self._on_cpu) and skips:
                raise CancelStepException

    def _warn_too_late(self, why: str) -> None:
        if self.on_nonfinite == "skip" and not self._warned:
            self._warned = True
            warnings.warn(
                f'FlightRecorder("skip"): this step {why}, so NaN and Inf are found too late to '
                f"skip it, and are only reported. Call `backward()` first and a torch optimizer's "
                f"`step()` after it.",
                HookkitWarning,
                stacklevel=2,
            )

    def after_step(self) -> None:
        """Takes the norms of the gradients that the step used (a closure computes them in it)."""
        if self.recording and self.learn.stepped and not self._noted:
            self._note()

    def after_batch(self) -> None:
        """Looks at what had no step before it."""
        if not self.recording:
            return
        self._record(False)
        if not self._noted:
            self._note(grads=False)
        if self._look(wait=self._on_cpu) and self.learn.in_closure:
            self._warn_too_late("evaluates its batch more than once in its closure")

    def after_fit(self) -> None:
        """Reads the last batch's answer."""
        super().after_fit()
        self._look(wait=True)

    def cleanup_fit(self) -> None:
        """Takes the hooks off."""
        super().cleanup_fit()
        self._record(False)
        self._memory = self._switch.target = None
        self._unread = []

    # --- looking

    def _note(self, grads: bool = True) -> None:
        """Takes the norms of the loss and the gradients, and asks whether all are finite."""
        batch, self._noted = self._memory.batches[-1], True
        if isinstance(self.learn.loss, Tensor):
            self._memory.see(_LOSS, 0, "", self.learn.loss)
        scaled = inverse_scale(known_scaler(self.learn)) is not None or any(
            getattr(opt, "grad_scale", None) is not None for opt in self.learn.opts
        )
        if grads and not scaled:
            parameters = {name: p for name, _, p in named_parameters(self.learn.model)}
            norms = grad_norms_by_id(parameters.values())
            batch.grads = {n: norms[id(p)] for n, p in parameters.items() if id(p) in norms}
        batch.ask()

    def _look(self, wait: bool) -> bool:
        """Whether something is not finite: of this batch with `wait`, else of those before."""
        ready = self._unread if wait else self._unread[:-1]
        self._unread = self._unread[len(ready) :]
        bad = False
        for batch in ready:
            bad = not batch.finite
            first, self._bad_before = bad and not self._bad_before, bad
            if first and len(self.incidents) < _MOST:
                incident = self._incident(batch)
                self.incidents = (*self.incidents, incident)
                if self.on_nonfinite == "raise":
                    raise NonFiniteError(f"{incident}\n  {_CURE}")
        return bad

    def _incident(self, batch: _Batch) -> Incident:
        memory = self._memory
        past = [b for b in memory.batches if b.place[2] < batch.place[2]]
        bad = [row for row in batch.outputs if not math.isfinite(batch.rms(row))]
        rows = [row for row in bad if row not in (_LOSS, _INPUT)]
        history, note, kind = {}, "The layers' outputs are finite.", "loss"
        if rows:
            names = dict(enumerate(memory.names[2:], 2))
            history = {n: np.array([b.rms(row) for b in past]) for row, n in names.items()}
            note, kind = self._why(batch, rows[0], _INPUT in bad), "activation"
        names = [memory.names[row] for row in rows]
        if not rows and _LOSS not in bad:
            names, kind, note = self._owners(batch), "gradient", "The history is of gradient norms."
            history = {n: np.array([_grad_norm(b, n) for b in past]) for n in names}
        name, *others = names or [""]
        type_ = self._types().get(name, "")
        steps = np.array([b.place[0] for b in past], np.int64)
        return Incident(kind, name, type_, *batch.place, tuple(others), steps, history, note)

    def _types(self) -> dict[str, str]:
        owners = {_owner(name): kind for name, kind, _ in named_parameters(self.learn.model)}
        return owners | dict(zip(self._memory.names[2:], self._memory.types[2:], strict=True))

    def _owners(self, batch: _Batch) -> list[str]:
        """Modules with a bad gradient. The backward begins at the end: the last to run is first."""
        ran = {self._memory.names[row]: i for i, row in enumerate(batch.outputs)}
        owners = {_owner(n) for n, norm in batch.grads.items() if not math.isfinite(float(norm))}
        return sorted(owners, key=lambda name: (-ran.get(name, -1), name))

    def _why(self, batch: _Batch, row: int, bad_input: bool) -> str:
        """What may have made the output of the layer in `row` not finite, in a sentence."""
        if bad_input:
            return "The model's input was not finite: look at the data."
        name = self._memory.names[row]
        own = [p for n, _, p in named_parameters(self.learn.model) if _owner(n) == name]
        if not all(bool(p.isfinite().all()) for p in own):  # sync: after an incident
            late = self.learn.stepped or batch is not self._memory.batches[-1]
            return _SPOILED_BY_NOW if late else _SPOILED
        order = [r for r in batch.outputs if r not in (_LOSS, _INPUT)]
        if not (at := order.index(row)):
            return ""
        head, before = "Its weights are finite: if" if own else "If", order[at - 1]
        between = f"look at what runs between {self._memory.names[before]} and it."
        return f"{head} its input was not, {between}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_memory": None, "_unread": []}

    def __repr__(self) -> str:
        return f"FlightRecorder({self.on_nonfinite!r}, {len(self.incidents)} incidents)"


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _grad_norm(batch: _Batch, module: str) -> float:
    """The norm of the gradients of a module's parameters together."""
    own = [float(norm) for name, norm in batch.grads.items() if _owner(name) == module]
    return math.hypot(*own)


_CURE = 'Look there first; FlightRecorder("skip") skips such steps, "report" only reports them.'
_SPOILED = "Its own weights were not finite: the step before has spoiled them."
_SPOILED_BY_NOW = "Its own weights are not finite now: this step or the one before spoiled them."
