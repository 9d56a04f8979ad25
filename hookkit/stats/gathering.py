"""`StatsCallback`: what the recording callbacks share, from the hook's flag to the step's record.

Builds on `HookCallback` (which modules, put on and taken off) and `Tally` (what is kept). The
step axis is the optimizer step: what several batches of one step gave is merged, and a batch that
was cancelled, or whose step was left out, leaves nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.errors import HookkitError, HookkitWarning
from hookkit.hooks import recomputing
from hookkit.hooks.compiling import forget_graphs
from hookkit.hooks.dispatching import Attached, Dispatcher, called, check_hookable
from hookkit.moments.banks import Options
from hookkit.moments.tallies import Tally
from hookkit.nested import named_leaves
from hookkit.recording import HookCallback
from hookkit.records import Record
from hookkit.selecting import leaf_modules
from hookkit.stats.parts import Parts


class Eye:
    """What the hooks look at: whether to record, and where to. All a compiled graph guards on."""

    def __init__(self, tally: Tally) -> None:
        self.on, self.tally = False, tally

    def __reduce__(self) -> Any:
        return Eye, (self.tally,)


class WhenOn(Dispatcher):
    """A hook that passes its call on to `target[1]` while the eye `target[0]` is on.

    Off, it costs this one test: 39 layers at every step of a training, whatever `every` is.
    """

    __slots__ = ()

    def __call__(self, *seen: Any) -> Any:
        """What the hook returns, None while the eye is off."""
        target = self.target
        return target[1](*seen) if target is not None and target[0].on else None


class PreWhenOn(WhenOn):
    """The same before the forward."""

    __slots__ = ()

    is_pre = True


class Look(Dispatcher):
    """Shows the eye every tensor that a module gives, or of what `pick(m, i, o)` gives, while on.

    Its target is `(eye, row, pick)`. One call and no more, since each costs µs in a cold cache.
    """

    __slots__ = ()

    with_kwargs = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward."""
        target = self.target
        if target is None or not target[0].on or recomputing():
            return
        eye, row, pick = target
        seen = output if pick is None else called(pick, module, args, output)
        if isinstance(seen, Tensor):
            eye.tally.see(row, 0, "", seen)
            return
        for leaf, (path, t) in enumerate(named_leaves(seen)):
            eye.tally.see(row, leaf, path, t)


class StatsCallback(HookCallback):
    """Base of the callbacks that record statistics of tensors; see `ActivationStats`.

    Attributes:
        tally: what was recorded in training, over all fits.
    """

    order = -20
    kind = "activation"

    def __init__(self, options: Options, **hooking: Any) -> None:
        super().__init__(**hooking)
        self.options = options
        self.tally, self.valid_tally = Tally(self.kind, options), Tally(self.kind, options)
        self._eye, self._valid_eye = Eye(self.tally), Eye(self.valid_tally)
        self._handles: dict[Any, Any] = {}
        self._parts: Parts | None = None
        self._clear_fit()

    def _clear_fit(self) -> None:
        self._n_taken, self._iter = 0, 0
        self._tried = self._cancelled = self._through = False

    # --- hooks

    def _register(self, names: list[str], modules: Mapping[str, nn.Module]) -> None:
        # a hook that is on stays on, in its place among others: on the root before the driver's
        before, self._handles = self._handles, {}
        try:
            for eye in (self._eye, self._valid_eye):
                types = [type(m).__name__ for m in modules.values()]
                rows = eye.tally.rows(names, types)
                if eye is self._eye or self.on_valid:
                    for row, module in zip(rows, modules.values(), strict=True):
                        key = eye is self._eye, row, id(module)
                        handle = before.pop(key, None) or self._attach(eye, row, module)
                        self._handles[key] = handle
        except BaseException:
            self._remove()
            raise
        finally:
            for handle in before.values():
                handle.remove()

    def _attach(self, eye: Eye, row: int, module: nn.Module) -> Any:
        check_hookable(module, type(self).__name__)
        return Attached(module, Look((eye, row, self._given_hook)))

    def _select(self, model: nn.Module) -> Any:
        found = super()._select(model)
        if self.modules is not None:
            return found
        found = found or leaf_modules(model) or {"": model}
        # what runs no Python hooks is passed over, unless it was asked for by name
        return {n: m for n, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}

    def _remove(self) -> None:
        super()._remove()
        while self._handles:
            self._handles.popitem()[1].remove()

    def _follow(self) -> None:
        """Hooks what has come into the model since; the rows of what has gone keep their past."""
        if self._parts is None or not self._parts.changed():
            return
        model = self.learn.model
        try:
            found = self._select(model)
            self.names = list(found)
            self._register(self.names, found)
            forget_graphs(model)
        except HookkitError as error:
            _tell_changed(self, error)
        self._parts = Parts(model)  # only now: it has kept what was hooked, so no id came twice

    def _record(self, on: bool) -> None:
        self.recording = on
        training = self.learn is None or self.learn.training
        self._eye.on = on and training and not self._through
        self._valid_eye.on = on and not training and not self._through

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; what was recorded before stays, and is added to."""
        if self.learn.fitting:
            self._clear_fit()
            self.tally.forget()
        super().before_fit()
        if self._handles:
            self._parts = Parts(self.learn.model)

    def before_batch(self) -> None:
        """Decides whether this batch is recorded: all batches of one optimizer step, or none."""
        self._tried = self._cancelled = self._through = False
        if self.learn.training:
            self._iter = self.learn.train_iter
            on = self.on_train and self._n_taken % (self.every or 1) == 0
        else:
            on = self.on_valid and not self.learn.aside
        if on:
            self._follow()
        self._record(on)

    def before_step(self) -> None:
        """Notes that a step was tried: if none comes of it, AMP or a callback has skipped it.

        A closure's step begins before its first batch, and may evaluate many.
        """
        self._tried = not self.learn.in_closure

    def after_cancel_batch(self) -> None:
        """A cancelled batch leaves nothing."""
        self._cancelled = True

    def after_batch(self) -> None:
        """Closes the record of the step, or keeps this batch for it."""
        on, training = self.recording, self.learn.training
        self._record(False)
        if not training:
            if on:
                (self.valid_tally.drop if self._cancelled else self.valid_tally.fold)()
            return
        if self._cancelled:
            self.tally.drop()
        elif self.learn.stepped:
            if on:
                self._close()
            self._n_taken += 1
        elif self._tried:
            self.tally.forget()
        elif on:
            self._keep()

    def after_validate(self) -> None:
        """One record for the whole validation, at the step that it was made."""
        if self.on_valid and not self.learn.aside:
            step = max(self.learn.n_steps - 1, 0)
            self.valid_tally.commit(step, self.learn.epoch, self.learn.train_iter)

    def cleanup_fit(self) -> None:
        """Takes the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self._record(False)
        self.tally.forget()
        self._parts = None

    def _keep(self) -> None:
        self.tally.fold()

    def _close(self) -> None:
        self.tally.commit(self.learn.n_steps - 1, self.learn.epoch, self._iter)

    # --- reading

    def record(self, *, valid: bool = False, local: bool = False) -> Record:
        """Everything recorded so far, as plain numbers. The host reads the device here.

        Args:
            valid: the validations (one record each, needs `on_valid=True`) instead of training.
            local: this rank's own. Otherwise ranks are merged, and each has to call this.
        """
        return (self.valid_tally if valid else self.tally).record(local=local)

    def __getstate__(self) -> dict[str, Any]:
        if self.learn is not None and self.learn.fitting:
            self.learn._part_from(self)
        gone = dict.fromkeys(("hooks", "learn", "_parts"))
        return {**self.__dict__, **gone, "_handles": {}, "recording": False}


def _tell_changed(cb: StatsCallback, error: HookkitError) -> None:
    who = type(cb).__name__
    left = "what is hooked is recorded on" if cb._handles else "nothing is recorded from here on"
    warnings.warn(
        f"{who} found other modules in the model than when the training began, and cannot hook "
        f"them, so {left}: {error} Start again, with {who}(modules=…) naming what is there.",
        HookkitWarning,
        stacklevel=2,
    )


def unscale_of(driver: Any) -> Tensor | None:
    """1 / the scale that AMP's GradScaler has put on this batch's loss, on its device, or None."""
    scaler = getattr(driver, "scaler", None)
    if scaler is None:
        scaler = getattr(getattr(driver, "accelerator", None), "scaler", None)
    return inverse_scale(scaler)


def inverse_scale(scaler: Any) -> Tensor | None:
    """1 / its scale as a new 0-d tensor; None if there is no scaler or it is not in use."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)  # get_scale() would wait for the device
    if scale is None:  # nothing was scaled yet
        scale = torch.tensor(float(getattr(scaler, "_init_scale", 1.0)))
    return scale.detach().double().reciprocal()
