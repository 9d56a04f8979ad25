"""`StatsCallback`: what the recording callbacks share, from the hook's flag to the step's record.

Builds on `HookCallback` (puts hooks on and takes them off) and `StatsAccumulator` (what is kept).
The step axis is the optimizer step: what several batches of one step gave is merged, and a batch
that was cancelled, or whose step was left out, leaves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.errors import OptionError
from hookkit.hooks.entries import Attached, check_hookable
from hookkit.interrupts import uninterrupted
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options
from hookkit.moments.numba_loader import machine
from hookkit.recording import HookCallback
from hookkit.recording.backward import BackwardHook
from hookkit.records import Record
from hookkit.selecting import leaf_modules
from hookkit.stats.looking import (
    Eye,
    Look,
    LookThrough,
    attach_gradients,
    attach_gradients_through,
    leaf_of,
)


class StatsCallback(HookCallback):
    """Base of the callbacks that record statistics of tensors; see `ActivationStats`.

    Attributes:
        tally: what was recorded in training, over all fits.
    """

    order = -20
    kind = "activation"

    def __init__(self, options: Options, *, on_valid: bool = False, **hooking: Any) -> None:
        super().__init__(on_valid=on_valid, **hooking)
        self.options = options
        self.accumulator, self.valid_accumulator = (
            self._new_accumulator(),
            StatsAccumulator(self.kind, options),
        )
        if self.kind == "activation":  # known from the graph of the first batches, see `_ask`
            self.accumulator.consumers = self.valid_accumulator.consumers = {}
        self._eye, self._valid_eye = Eye(self.accumulator), Eye(self.valid_accumulator)
        self._handles: dict[Any, Any] = {}
        self._clear_fit()

    def _new_accumulator(self) -> StatsAccumulator:
        return StatsAccumulator(self.kind, self.options)

    def _clear_fit(self) -> None:
        self._n_taken, self._iter = 0, 0
        self._tried = self._cancelled = self._through = self._begun = False
        self._n_asked = 0

    # --- hooks

    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        """What to record of one call of module `m`: its output `o`, unless a subclass returns else.

        Of recorders of gradients `i` and `o` are the gradients of the inputs and of the outputs.
        """
        return o

    @property
    def _function(self) -> Any:
        function = super()._function
        plain = getattr(function, "__func__", None) is StatsCallback.hook
        return None if plain else function  # the hooks show the output without a call

    @uninterrupted
    def _register(self, names: list[str], modules: Mapping[str, nn.Module]) -> None:
        # a hook that is on stays on, in its place among others: on the root before the driver's
        before, now = self._handles, dict[Any, Any]()
        try:
            for eye in (self._eye, self._valid_eye):
                types = [type(m).__name__ for m in modules.values()]
                rows = eye.accumulator.rows(names, types)
                if eye is self._eye or self.on_valid:
                    for row, (name, module) in zip(rows, modules.items(), strict=True):
                        key, leaf = (eye is self._eye, row, id(module)), leaf_of(modules, name)
                        now[key] = before.get(key) or self._attach(eye, row, module, leaf)
        except BaseException:
            for key in now.keys() - before.keys():
                now[key].remove()
            raise
        for key in before.keys() - now.keys():
            before[key].remove()
        self._handles = now

    def _attach(self, eye: Eye, row: int, module: nn.Module, leaf: str) -> Any:
        check_hookable(module, type(self).__name__)
        function = self._function
        if function is None:
            return Attached(module, Look((eye, row, leaf))).put_on()
        return Attached(module, LookThrough((eye, row, leaf, function))).put_on()

    def _attach_gradients(self, eye: Eye, row: int, module: nn.Module, leaf: str) -> Any:
        function = self._function
        if function is None:
            return attach_gradients(eye, row, module, leaf)
        return attach_gradients_through(eye, row, module, leaf, function)

    def _select(self, model: nn.Module) -> Any:
        found = super()._select(model)
        if self._selectors is not None:
            return found
        found = found or leaf_modules(model) or {"": model}
        # what runs no Python hooks is passed over, unless it was asked for by name
        return {n: m for n, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}

    @uninterrupted
    def _remove(self) -> None:
        super()._remove()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _record(self, on: bool) -> None:
        if not (on or self.recording):
            return
        self.recording = on
        training = self.learn is None or self.learn.training
        self._eye.on = on and training and not self._through
        self._eye.late = on and training and self._through
        self._valid_eye.on = on and not training and not self._through
        for (of_training, *_), handle in self._handles.items():
            if isinstance(handle, BackwardHook):
                handle.listen((self._eye if of_training else self._valid_eye).on)

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; what was recorded before stays, and is added to."""
        for eye in (self._eye, self._valid_eye):
            eye.thread = get_ident()
            # compiled graphs check it as they run; gradients may come in a thread of autograd's
            eye.accumulator.thread = eye.thread if self.kind == "activation" else None
        if self.learn.fitting:
            machine.load()
            self._clear_fit()
            self.accumulator.forget()
        super().before_fit()

    def before_batch(self) -> None:
        """Decides whether this batch is recorded: all batches of one optimizer step, or none."""
        self._tried = self._cancelled = self._through = False
        if self._begun:  # it never ended
            self.accumulator.drop()
            self.valid_accumulator.drop()
        if self.learn.training:
            self._iter = self.learn.train_iter
            on = self.on_train and self._n_taken % (self.every or 1) == 0
        else:
            on = self.on_valid and not self.learn.aside
        if on:
            self._follow()
        self._begun = on
        self._record(on)

    def before_step(self) -> None:
        """Notes that a step was tried: if none comes of it, AMP or a callback has skipped it.

        A closure may evaluate many batches before its step is made.
        """
        self._tried = not self.learn.in_closure

    def after_cancel_step(self) -> None:
        """A step that a callback leaves out leaves nothing, with a closure or without."""
        self._tried = True

    def after_cancel_batch(self) -> None:
        """A cancelled batch leaves nothing; in `watch` it is over with this."""
        self._cancelled = True
        if self.recording:
            (self.accumulator if self.learn.training else self.valid_accumulator).drop()

    def after_batch(self) -> None:
        """Closes the record of the step, or keeps this batch for it."""
        on, training = self.recording, self.learn.training
        self._record(False)
        self._close_batch(on, training)
        self._begun = False

    def _close_batch(self, on: bool, training: bool) -> None:
        if not training:
            if on:
                (self.valid_accumulator.drop if self._cancelled else self.valid_accumulator.fold)()
            return
        if self._cancelled:
            self.accumulator.drop()
        elif self.learn.stepped:
            if on:
                self._close()
            self._n_taken += 1
        elif self._tried:
            self.accumulator.forget()
        elif on:
            self._keep()

    def after_validate(self) -> None:
        """One record for the whole validation, at the step that it was made."""
        if self.on_valid and not self.learn.aside:
            step = max(self.learn.n_steps - 1, 0)
            self.valid_accumulator.commit(step, self.learn.epoch, self.learn.train_iter)

    def cleanup_fit(self) -> None:
        """Takes the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self._record(False)
        self.accumulator.forget()

    def _keep(self) -> None:
        self.accumulator.fold()

    def _close(self) -> None:
        self.accumulator.commit(self.learn.n_steps - 1, self.learn.epoch, self._iter)

    # --- reading

    def record(self, *, valid: bool = False, local: bool = False) -> Record:
        """Everything recorded so far, as plain numbers. The host reads the device here.

        Args:
            valid: the validations (one record each, needs `on_valid=True`) instead of training.
            local: this rank's own. Otherwise ranks are merged, and each has to call this.

        Raises:
            OptionError: validations are asked for that were not recorded.
        """
        if valid and not (self.on_valid or self.valid_accumulator.n_records):
            who = type(self).__name__ if self.kind == "activation" else "ActivationStats"
            raise OptionError(
                f"validations were asked for, {type(self).__name__} did not look at them. "
                f"Make it with {who}(on_valid=True)."
            )
        return (self.valid_accumulator if valid else self.accumulator).record(local=local)

    def __getstate__(self) -> dict[str, Any]:
        if self.learn is not None and self.learn.fitting:
            self.learn._remember_step(self)
        gone = dict.fromkeys(("hooks", "_hooked", "_parts"))
        return {**super().__getstate__(), **gone, "_handles": {}, "recording": False}


def unscale_of(driver: Any) -> Tensor | None:
    """1 / the scale that AMP's GradScaler has put on this batch's loss, on its device, or None."""
    scaler = vars(driver).get("scaler")  # its own: the model may have one of another kind
    if scaler is None and driver.accelerator is not None:
        scaler = getattr(driver.accelerator, "scaler", None)
    return inverse_scale(scaler)


def inverse_scale(scaler: Any) -> Tensor | None:
    """1 / its scale as a new 0-d tensor; None if there is no scaler or it is not in use."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)  # get_scale() would wait for the device
    if scale is None:  # nothing was scaled yet
        scale = torch.tensor(
            float(getattr(scaler, "_init_scale", 1.0)), dtype=torch.float64, device="cpu"
        )
    return scale.detach().double().reciprocal()
