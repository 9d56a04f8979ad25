"""`FlightRecorder`: which module made the first NaN or Inf, when, and what came before.

It keeps one number per layer and batch, the norm of the whole output (one read; it is not finite
if any value is not), and one per parameter, the norm of its gradient, for the last few batches.
Anomaly mode costs half a step and sees the backward pass only; this costs about one per cent.

When it looks: on the CPU before each optimizer step, where reading costs nothing, so bad
gradients never reach the weights. On a GPU a flag is copied to the host as the batch ends and
looked at one batch later, when it has arrived: no waiting, and what it needs to tell is still in
its memory. With `"skip"` the answer is needed before the step: one wait per step.
"""

from __future__ import annotations

import warnings
from collections.abc import Container
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_choice, check_number, shown
from hookkit.errors import HookkitWarning, NonFiniteError, OptionError
from hookkit.events import CancelStepException
from hookkit.hooks import attach
from hookkit.hooks.entries import graph_task
from hookkit.interrupts import uninterrupted
from hookkit.modules import unwrap
from hookkit.recording import HookCallback
from hookkit.records import Incident
from hookkit.stats.gathering import unscale_of
from hookkit.stats.incidents import FIRST, INPUT, LOSS, Memory
from hookkit.stats.norm_history import GradTape, NormTape, input_hook, norm_hook
from hookkit.stats.parameters import Named, Parameters

ACTIONS = ("raise", "skip", "report")
_MOST = 16  # incidents kept: a run that breaks down again and again tells nothing new


class FlightRecorder(HookCallback):
    """Watches for the first NaN or Inf in loss, activations and gradients, and tells its story.

    Args:
        on_nonfinite: `"raise"` a `NonFiniteError`; `"skip"` the optimizer step of that batch; or
            `"report"` only: it is then in `incidents`.
        keep: how many batches to remember.
        modules: which, as for `select`; None takes every module without children. What comes into
            the model amid a training is watched, too.

    Attributes:
        incidents: what was found, a tuple of `Incident`; of several bad batches in a row the first.

    A subclass's `hook(m, i, o)` is called for each layer, and what it returns is watched.

    Of a step with a closure the first evaluation decides whether it is left out. Under a
    GradScaler gradients that overflow are its own business, and no incident. An output counts as
    not finite from 1.8e19 on, where its square leaves float32.

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

    def __init__(
        self,
        on_nonfinite: str = "raise",
        *,
        keep: int = 64,
        modules: Any = None,
    ) -> None:
        check_choice("FlightRecorder", "on_nonfinite", on_nonfinite, ACTIONS)
        keep = check_number("FlightRecorder", "keep", keep, 2, whole=True, what="in batches")
        super().__init__(modules, include_paramless=True, on_valid=False)
        if self._selectors is not None:
            _check_some(self._selectors, modules)
        self.on_nonfinite, self.keep = on_nonfinite, keep
        self.incidents: tuple[Incident, ...] = ()
        self._tape: NormTape | None = None
        self._handles: dict[tuple[int, int], Any] = {}
        self._clear()

    def _clear(self) -> None:
        self._types: dict[str, str] = {}  # of every layer that was hooked, in the order of rows
        self._grads = GradTape()
        self._bad_before = False
        self._flags: list[tuple[int, Tensor, Any]] = []
        self._known: Parameters | None = None
        self._checked = self._through = self._noted = self._told = False

    # --- hooks

    def _select(self, model: nn.Module) -> Any:
        found = super()._select(model)
        if self._selectors is not None:
            _check_some(found, self._selectors)
            return found
        found = found or {"": unwrap(model)}
        return {n: m for n, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}

    @uninterrupted
    def _register(self, names: list[str], modules: Any) -> None:
        # amid a fit what has come is added: a hook that is on stays in its place among others, and
        # the row of what has gone keeps its past
        if not self._handles or self._tape is None:
            self._clear()
            devices = (p.device for p in self.learn.model.parameters() if not p.is_meta)
            device = next(devices, torch.device("cpu"))
            self._tape = NormTape(FIRST + len(names), self.keep, device)
        self._tape.thread = get_ident()
        tape, types = self._tape, {**self._types, **{n: _type(m) for n, m in modules.items()}}
        tape.grow(FIRST + len(types))
        rows = {name: row for row, name in enumerate(types, FIRST)}
        wanted = {(rows[name], id(m)): m for name, m in modules.items()}
        root = unwrap(self.learn.model)
        if not isinstance(root, torch.jit.ScriptModule):
            wanted[INPUT, id(root)] = root
        self._hook_only(wanted, tape)
        self._types = types

    def _hook_only(self, wanted: dict[tuple[int, int], nn.Module], tape: NormTape) -> None:
        """Has hooks on `wanted`, by row and id, and on nothing else; if it raises, as before."""
        added: dict[tuple[int, int], Any] = {}
        try:
            for key, module in wanted.items():
                if key not in self._handles:
                    is_input = key[0] == INPUT
                    hook = norm_hook(tape, key[0], self._function)
                    hook = input_hook(tape, INPUT) if is_input else hook
                    added[key] = attach(module, hook, pre=is_input)
        except BaseException:
            for handle in added.values():
                handle.remove()
            raise
        for key in self._handles.keys() - wanted.keys():
            self._handles.pop(key).remove()
        self._handles |= added

    @uninterrupted
    def _remove(self) -> None:
        super()._remove()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._grads, self._known = GradTape(), None

    def _record(self, on: bool) -> None:
        self.recording = on
        if self._tape is not None:
            self._tape.on = on and not self._through

    # --- events

    def before_batch(self) -> None:
        """The next place in its memory; on a GPU, a look at what the last batch left."""
        self._checked = self._through = self._noted = False
        super().before_batch()
        if self.recording and self._tape is not None:
            self._look_late()
            self._tape.turn(self.learn.n_steps, self.learn.epoch, self.learn.train_iter)
            self._grads.turn(self._tape.at)

    def after_pred(self) -> None:
        """The batch is through: a layer called by itself from here on is no part of it."""
        self._through = True
        self._record(self.recording)

    def before_step(self) -> None:
        """Looks, while bad gradients can still be kept from the weights.

        Where the step comes before its batch there is nothing to look at yet: `after_batch` does.
        """
        if not self.recording:
            return
        early = getattr(self.learn, "each_forward", False)
        within = graph_task() != -1  # an optimizer for each parameter: more gradients come
        if early or within:
            self._tell_too_late(_WITHIN if within else _UNSEEN)
        if early or not (self._on_cpu() or self.on_nonfinite == "skip"):
            return
        self._note_loss()
        self._note_gradients()
        bad = self._look_now()
        self._noted, self._checked = self._through and not within, not within
        if bad and self.on_nonfinite == "skip":
            raise CancelStepException

    def _tell_too_late(self, why: str) -> None:
        if self.on_nonfinite == "skip" and not self._told:
            self._told = True
            warnings.warn(_TOO_LATE.format(why), HookkitWarning, stacklevel=2)

    def after_step(self) -> None:
        """Notes the gradients that the step used (a closure makes them within the step)."""
        if self.recording and self.learn.stepped and not self._noted:
            self._note_gradients()

    def after_batch(self) -> None:
        """Looks, or on a GPU sends for the answer."""
        if not (self.recording and self._tape is not None):
            return
        on_cpu = self._on_cpu()
        self._record(False)
        if not self._checked:
            self._note_loss()
            if on_cpu or self.on_nonfinite == "skip":
                if self._look_now() and self.learn.in_closure:
                    self._tell_too_late(_AGAIN)
            else:
                self._send_flag()

    def after_fit(self) -> None:
        """The last batch's answer."""
        super().after_fit()
        self._look_late(wait=True)

    def cleanup_fit(self) -> None:
        """Takes the hooks off."""
        super().cleanup_fit()
        self._record(False)

    # --- noting

    def _on_cpu(self) -> bool:
        return self._tape is not None and self._tape.device.type == "cpu"

    def _note_loss(self) -> None:
        loss = self.learn.loss
        if isinstance(loss, Tensor) and self._tape is not None:
            self._tape.see(LOSS, 0, "", loss)

    @property
    def _parameters(self) -> list[Named]:
        if self._known is None:
            self._known = Parameters(self.learn.model)
        return self._known.now

    def _note_part(self, owned: list[nn.Parameter]) -> None:
        """Notes the gradients that one optimizer of several has used, while they are there."""
        if self.recording and not self._noted:
            self._note_gradients({id(p) for p in owned})

    def _note_gradients(self, only: Container[int] | None = None) -> None:
        scaled = unscale_of(self.learn) is not None or any(
            getattr(opt, "grad_scale", None) is not None for opt in self.learn.opts
        )
        if not scaled:
            self._grads.note(self._parameters, only)

    def _finite(self) -> Tensor:
        """0-d bool: nothing of this batch is NaN or Inf."""
        tape = self._tape
        assert tape is not None
        fine = torch.isfinite(tape.norms[tape.at]).all()
        for norms in self._grads.now():
            fine = fine & torch.isfinite(norms).all().to(fine.device)
        return fine

    def _look_now(self) -> bool:
        """Reads whether all was finite; tells if not. True if something was bad."""
        assert self._tape is not None
        self._checked = True
        fine = bool(self._finite().cpu().numpy())  # sync: one per step, on a GPU for "skip" only
        return self._judge(self._tape.at, fine, late=self.learn.stepped)

    def _send_flag(self) -> None:
        assert self._tape is not None
        fine = self._finite()
        flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=fine.is_cuda)
        flag.copy_(fine, non_blocking=True)
        arrived: Any = None
        if fine.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._flags.append((self._tape.at, flag, arrived))

    def _look_late(self, wait: bool = False) -> None:
        """What the flags of earlier batches say, as far as they have arrived."""
        while self._flags:
            at, flag, arrived = self._flags[0]
            if wait and arrived is not None:
                arrived.synchronize()  # sync: one per fit
            if arrived is not None and not arrived.query() and len(self._flags) < self.keep // 2:
                return
            del self._flags[0]
            self._judge(at, bool(flag.numpy()), late=True)

    # --- telling

    def _judge(self, at: int, fine: bool, late: bool) -> bool:
        """Tells of the batch in slot `at`; `late`: its step may have been made meanwhile."""
        first, self._bad_before = not fine and not self._bad_before, not fine
        if first and len(self.incidents) < _MOST:
            assert self._tape is not None
            memory = Memory(self._tape, self._types, self._grads.norms, self._parameters)
            incident = memory.incident(at, late)
            self.incidents = (*self.incidents, incident)
            if self.on_nonfinite == "raise":
                raise NonFiniteError(f"{incident}\n  {_CURE}")
        return not fine

    def __getstate__(self) -> dict[str, Any]:
        gone = dict.fromkeys(("_tape", "hooks", "_hooked", "_parts", "_known"))
        kept: dict[str, Any] = {"_handles": {}, "_grads": GradTape(), "_flags": []}
        return {**super().__getstate__(), **gone, **kept, "recording": False}

    def __repr__(self) -> str:
        return f"FlightRecorder({self.on_nonfinite!r}, {len(self.incidents)} incidents)"


_CURE = 'Look there first; FlightRecorder("skip") leaves such steps out, "report" only notes them.'
_TOO_LATE = (
    'FlightRecorder("skip") was asked for; this step {}, so what is not finite is found too late '
    "for it to be left out, and noted only. Call `backward()` first and a torch `opt.step()` after."
)
_WITHIN, _UNSEEN = "is made within the backward", "is not seen (each_forward)"
_AGAIN = "evaluates its batch more than once in its closure"


def _check_some(found: Any, asked: Any) -> None:
    if not found:
        raise OptionError(
            f"FlightRecorder(modules={shown(asked)}): that selects no module, so it would see "
            f"nothing begin. Use None for all of them, or name some."
        )


def _type(module: nn.Module) -> str:
    return type(module).__name__
