"""`FlightRecorder`: which module made the first NaN or Inf, when, and what came before.

It keeps one number per layer and batch, the norm of the whole output (one read; it is not finite
if any value is not), and one per parameter, the norm of its gradient, for the last few batches.
Anomaly mode costs half a step and sees the backward pass only; this costs about one per cent.

When it looks: on the CPU before each optimizer step, where reading costs nothing, so bad
gradients never reach the weights. On a GPU a flag is copied to the host as the batch ends and
read one batch later, when it has arrived: no waiting, and the norms that explain it are still in
memory. With `"skip"` the answer is needed before the step: one wait per step.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.callbacks.readout import across_ranks
from hookkit.checks import check_choice, check_number, shown
from hookkit.devices import sent
from hookkit.errors import HookkitWarning, NonFiniteError, OptionError
from hookkit.events import CancelStepException
from hookkit.hooks.entries import Placed, graph_task
from hookkit.hooks.snapshot import outside
from hookkit.modules import class_name, unwrap
from hookkit.recording import HookCallback
from hookkit.records import Incident
from hookkit.selecting import select
from hookkit.stats.layer_hooks import input_entries, output_entries
from hookkit.stats.norm_history import INPUT, LOSS, NormHistory
from hookkit.stats.parameters import Parameters
from hookkit.stats.unscaling import inverse_scale, known_scaler

ACTIONS = ("raise", "skip", "report")
_INPUT = "(input)"  # the name of the hook on the model's input
_MOST = 16  # incidents kept: later ones of a run that fails again and again add nothing


class FlightRecorder(HookCallback):
    """Finds the first NaN or Inf in loss, activations and gradients, and reports what led to it.

    Args:
        on_nonfinite: `"raise"` a `NonFiniteError`; `"skip"` the optimizer step of that batch; or
            `"report"` only: it is then in `incidents`.
        n_batches: how many batches to remember.
        modules: which, as for `select`; None takes every module without children. Modules
            that the model gets during a training are watched, too.

    Attributes:
        incidents: what was found, a tuple of `Incident`; of several bad batches in a row the first.

    A subclass's `hook(m, i, o)` is called for each layer, and what it returns is watched.

    In `distrib_ctx` a step that one rank has to skip is skipped by all: there `"skip"` sends
    one number a step.

    In a step with a closure the first evaluation decides whether the step is skipped. Under a
    GradScaler overflowing gradients are no incident: it skips such steps itself. An output counts
    as not finite from 1.8e19 on, where its square leaves float32.

    Raises:
        OptionError: an option that cannot work.
        NonFiniteError: from the fit, with `"raise"`.

    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=FlightRecorder("report"), lr=1e30)
    >>> with learn.no_logging(): learn.fit(1)
    >>> learn.flight_recorder.incidents[0].kind
    'activation'
    """

    order = -30
    _saved: ClassVar[tuple[str, ...]] = ("incidents", "_bad_before")

    def __init__(
        self,
        on_nonfinite: str = "raise",
        *,
        n_batches: int = 64,
        modules: Any = None,
    ) -> None:
        check_choice("FlightRecorder", "on_nonfinite", on_nonfinite, ACTIONS)
        n_batches = check_number(
            "FlightRecorder", "n_batches", n_batches, 2, whole=True, what="in batches"
        )
        super().__init__(modules, include_paramless=True, on_valid=False)
        self.on_nonfinite, self.n_batches = on_nonfinite, n_batches
        self.incidents: tuple[Incident, ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._norms: Any = None  # a `NormHistory`, and `Parameters`, during a fit
        self._parameters: Any = None
        self._flags: list[tuple[int, Tensor, Any]] = []
        self._checked = self._noted = self._warned = self._bad_before = False

    # --- hooks

    def _select(self, model: nn.Module) -> Any:
        found, root = super()._select(model), unwrap(model)
        if self._selectors is not None and not found:
            raise OptionError(
                f"FlightRecorder(modules={shown(self._given)}): that selects no module, so it "
                f"would see nothing begin. Use None for all of them, or name some."
            )
        if isinstance(root, torch.jit.ScriptModule):
            return found
        if self._selectors is not None:
            return select(model, *self._selectors, {"": _INPUT})
        return {**found, _INPUT: root}

    def _entries(self, name: str, module: nn.Module, leaf: str) -> list[Placed]:
        if name == _INPUT:
            return input_entries(self._switch, INPUT)
        row = self._norms.row(name, class_name(module))
        return output_entries(self._switch, row, leaf, self._function)

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; of an earlier fit only the incidents are kept."""
        if self.learn.fitting:
            self._clear()
            devices = (p.device for p in self.learn.model.parameters() if not p.is_meta)
            device = next(devices, torch.device("cpu"))
            self._norms = self._switch.target = NormHistory(self.n_batches, device)
            self._parameters = Parameters(self.learn.model)
        super().before_fit()

    def before_batch(self) -> None:
        """Begins the next batch in memory; on a GPU, reads what the flags of earlier ones say."""
        self._checked = self._switch.late = self._noted = False
        super().before_batch()
        if self.recording:
            self._look_late()
            self._norms.advance(self.learn.n_steps, self.learn.epoch, self.learn.train_iter)

    def after_pred(self) -> None:
        """The model has returned: a layer called on its own now counts if it makes the loss."""
        self._switch.late = True

    def before_step(self) -> None:
        """Checks all norms, while bad gradients can still be kept from the weights.

        Where the step comes before its batch there are none yet: `after_batch` checks them.
        """
        if not self.recording:
            return
        early = getattr(self.learn, "each_forward", False)
        within = graph_task() != -1  # an optimizer for each parameter: more gradients come
        if early or within:
            self._warn_too_late(_WITHIN if within else _UNSEEN)
        if early or not (self._on_cpu() or self.on_nonfinite == "skip"):
            return
        self._note_loss()
        self._note_gradients()
        bad = self._look_now()
        self._noted, self._checked = self._switch.late and not within, not within
        if self.on_nonfinite == "skip" and self._anywhere(bad):
            raise CancelStepException

    def _anywhere(self, bad: bool) -> bool:
        """Whether a rank has found something: in `distrib_ctx` all of them skip a step, or none."""
        if not across_ranks(self.learn):
            return bad
        with ranks.together(f"look for NaN and Inf before a step{self.learn._where()}"):
            return bool(ranks.greatest(torch.tensor(int(bad), device="cpu")))

    def _warn_too_late(self, why: str) -> None:
        if self.on_nonfinite == "skip" and not self._warned:
            self._warned = True
            warnings.warn(_TOO_LATE.format(why), HookkitWarning, stacklevel=2)

    def after_step(self) -> None:
        """Takes the norms of the gradients that the step used (a closure computes them in it)."""
        if self.recording and self.learn.stepped and not self._noted:
            self._note_gradients()

    def after_batch(self) -> None:
        """Checks all norms, or on a GPU copies the answer to the host, to be read later."""
        if not self.recording:
            return
        on_cpu = self._on_cpu()
        self._record(False)
        if not self._checked:
            self._note_loss()
            if on_cpu or self.on_nonfinite == "skip":
                if self._look_now() and self.learn.in_closure:
                    self._warn_too_late(_AGAIN)
            else:
                self._send_flag()

    def after_fit(self) -> None:
        """Reads the last batch's answer."""
        super().after_fit()
        self._look_late(wait=True)

    def cleanup_fit(self) -> None:
        """Takes the hooks off."""
        super().cleanup_fit()
        self._record(False)
        self._norms = self._parameters = self._switch.target = None

    # --- taking norms

    def _on_cpu(self) -> bool:
        return bool(self._norms.device.type == "cpu")

    def _note_loss(self) -> None:
        loss = self.learn.loss
        if isinstance(loss, Tensor):
            self._norms.see(LOSS, 0, "", loss)

    def _note_part(self, owned: list[nn.Parameter]) -> None:
        """Notes the gradients that one optimizer of several has used, while they are there."""
        if self.recording and not self._noted:
            self._note_gradients({id(p) for p in owned})

    def _note_gradients(self, only: Container[int] | None = None) -> None:
        scaled = inverse_scale(known_scaler(self.learn)) is not None or any(
            getattr(opt, "grad_scale", None) is not None for opt in self.learn.opts
        )
        if not scaled:
            self._norms.see_grads(self._parameters.now, only)

    def _look_now(self) -> bool:
        """Whether something of this batch is not finite; if so, reports it."""
        self._checked = True
        # sync: one per step, on a GPU for "skip" only
        fine = bool(self._norms.finite().cpu().numpy())
        return self._judge(self._norms.at, fine, late=self.learn.stepped)

    def _send_flag(self) -> None:
        with outside():
            self._flags.append((self._norms.at, *sent(self._norms.finite())))

    def _look_late(self, wait: bool = False) -> None:
        """Reads the flags of earlier batches, as far as they have arrived."""
        while self._flags:
            at, flag, arrived = self._flags[0]
            if wait and arrived is not None:
                arrived.synchronize()  # sync: one per fit
            if (
                arrived is not None
                and not arrived.query()
                and len(self._flags) < self.n_batches // 2
            ):
                return
            del self._flags[0]
            with outside():  # a forward inside of torch.func.grad may read the flags
                fine = bool(flag.numpy())
            self._judge(at, fine, late=True)

    # --- reporting

    def _judge(self, at: int, fine: bool, late: bool) -> bool:
        """Reports the batch in slot `at` unless it is `fine`; `late`: its step may be made."""
        first, self._bad_before = not fine and not self._bad_before, not fine
        if first and len(self.incidents) < _MOST:
            incident = self._norms.incident(at, self._parameters.now, late)
            self.incidents = (*self.incidents, incident)
            if self.on_nonfinite == "raise":
                raise NonFiniteError(f"{incident}\n  {_CURE}")
        return not fine

    def _gather(self) -> None:
        """Joins the incidents of all ranks, in the order of their steps: each rank has to call."""
        own = {f"{i.step} {i.kind} {i.name}": i for i in self.incidents}
        found = sorted(ranks.union(own).values(), key=lambda i: i.step)
        self.incidents = tuple(found)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_norms": None, "_parameters": None, "_flags": []}

    def __repr__(self) -> str:
        return f"FlightRecorder({self.on_nonfinite!r}, {len(self.incidents)} incidents)"


_CURE = 'Look there first; FlightRecorder("skip") skips such steps, "report" only reports them.'
_TOO_LATE = (
    'FlightRecorder("skip"): this step {}, so NaN and Inf are found too late to skip it, and are '
    "only reported. Call `backward()` first and a torch optimizer's `step()` after it."
)
_WITHIN, _UNSEEN = "is made within the backward", "is not seen (each_forward)"
_AGAIN = "evaluates its batch more than once in its closure"
