"""`StatsCallback`: what the recorders of tensors share, from a layer's hook to the step's record.

`HookCallback` registers and removes the hooks; they stay registered and do nothing while their
switch is off, so that a compiled model need not be compiled again. A `Tally` keeps the numbers. The
step axis is the optimizer step: what several batches of one step gave is merged, and a batch that
was cancelled, or whose step was skipped, records nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit import ranks
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.devices import widened
from hookkit.errors import warn
from hookkit.modules import class_name
from hookkit.recorders.layer_hooks import see_gradients, see_outputs
from hookkit.recorders.parameters import Turns
from hookkit.recorders.running_stats import Options, Tally
from hookkit.recorders.to_record import gathered, record_of
from hookkit.records import Record


class _Now:
    """How far a fit is: apart from the callback, whose attributes cost a call each to set.

    Attributes:
        begun, tried, cancelled: of this batch, a step of it, and whether it was cancelled.
        scaler: the GradScaler of this batch's loss.
    """

    def __init__(self) -> None:
        self.scaler = None
        self.begun = self.tried = self.cancelled = False


class StatsCallback(HookCallback):
    """Base of the callbacks that record statistics of tensors; see `ActivationStats`.

    Attributes:
        tally: what was recorded, over all fits.
        scaler: the GradScaler, where it cannot be found: the step is not a torch optimizer's.
    """

    order = -20
    of = "outputs"
    scaler: Any = None
    _warned = False

    def __init__(self, options: Options, **hooking: Any) -> None:
        super().__init__(on_valid=False, **hooking)
        self.tally = Tally("activation" if self.is_forward else "gradient", options)
        # with the numbers of records and rows that they are of
        self._own: tuple[tuple[int, int], Record] | None = None
        self._whole: tuple[tuple[int, int], Record] | None = None
        self._turns = Turns()
        self._clear_fit()

    def _clear_fit(self) -> None:
        self._now = _Now()

    def _attach(self, name: str, module: nn.Module, leaf: str) -> RemovableHandle:
        row = self.tally.row(name, class_name(module))
        see = see_outputs if self.is_forward else see_gradients
        return see(module, self._switch, row, leaf, self._function)

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; what was recorded before stays, and is added to."""
        if self.learn.fitting:
            self._clear_fit()
            self.tally.forget()
        super().before_fit()
        self._switch.target = self.tally
        # compiled graphs check it as they run; gradients may come in a thread of autograd's
        self.tally.thread = self._switch.thread if self.is_forward else None

    def before_batch(self) -> None:
        """Decides whether this batch is recorded: all batches of one optimizer step, or none."""
        now, tally, switch = self._now, self.tally, self._switch
        if now.begun:  # it never ended
            tally.drop()
        super().before_batch()
        now.tried = now.cancelled = switch.late = False
        now.begun = switch.on
        if self.is_forward:
            switch.given = None if tally.n_records else tally.see_inputs
        elif switch.on:
            now.scaler = self._scaler()
            tally.unscale = inverse_scale(now.scaler)

    def before_step(self) -> None:
        """Notes that a step was tried: if none follows, AMP or a callback has skipped it.

        A closure may evaluate many batches before its step is made.
        """
        self._now.tried = not self.learn.in_closure

    def after_cancel_step(self) -> None:
        """A step that a callback skips records nothing, with a closure or without."""
        self._now.tried = True

    def after_cancel_batch(self) -> None:
        """A cancelled batch records nothing; in `watch` it is over with this."""
        self._now.cancelled = True
        if self._switch.on:
            self.tally.drop()

    def after_batch(self) -> None:
        """Closes the record of the step, or keeps this batch for it."""
        now, learn, on = self._now, self.learn, self._switch.on
        self._record(False)
        now.begun = False
        if not learn.training:
            return
        if now.cancelled:
            self.tally.drop()
        elif learn.stepped:
            if not self.is_forward:
                self._turns.see(self, on)
            if on:
                self._close(learn)
            else:  # gradients of a forward that was recorded, which another step has used
                self.tally.drop()
        elif now.tried:
            self.tally.forget()
        elif on:  # a batch whose scaled gradients have Inf is one whose step AMP has skipped
            self.tally.fold(finite_only=self.tally.unscale is not None)

    def _scaler(self) -> Any:
        """Return the GradScaler of the loss: the one given, else the loop's."""
        return self.scaler or self.learn.step_scaler

    def _close(self, learn: Any) -> None:
        scaled = not self.is_forward and self.of == "outputs"
        if scaled and self._scaler() is not self._now.scaler:
            self.tally.forget()  # the scale of these gradients was not known as they came
            if self.tally.n_records and not self._warned:  # else only the first record is missing
                self._warned = True
                _warn_of_new_scaler(type(self).__name__, learn.n_steps - 1)
        else:
            self.tally.commit(learn.n_steps - 1, learn.epoch, self._last_iter)

    def cleanup_fit(self) -> None:
        """Takes the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self._record(False)
        self.tally.forget()
        self.tally.unscale = self._now.scaler = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_now": _Now()}

    # --- reading

    def record(self) -> Record:
        """Everything recorded so far, as plain numbers. The host waits for the device here.

        Of all ranks, if they were gathered since the last record; else of this one alone, named in
        `meta["rank"]`; it waits for no other.
        """
        n = self._n
        if self._whole is not None and self._whole[0] == n:
            return self._whole[1]
        if self._own is None or self._own[0] != n:
            self._own = n, record_of(self.tally)
        return self._own[1]

    def _since(self, step: int) -> Record:
        """What was recorded after `step`, and at least the last record."""
        if self._whole is not None and self._whole[0] == self._n:
            return self._whole[1]
        return record_of(self.tally, step)

    @property
    def _n(self) -> tuple[int, int]:
        return self.tally.n_records, len(self.tally.names)

    def _gather(self) -> None:
        """Merges what all ranks recorded, for `record()`: each of them has to call."""
        if ranks.is_distributed():
            self._whole = self._n, gathered(self.tally)


def inverse_scale(scaler: Any) -> Tensor | None:
    """1 / its scale as a new 0-d tensor; None if there is no scaler or it is not in use.

    >>> inverse_scale(torch.amp.GradScaler("cpu", init_scale=4.0))
    tensor(0.2500, dtype=torch.float64)
    """
    if scaler is None or not scaler.is_enabled():
        return None
    # Private: `GradScaler._scale`, the scale as a tensor on the device, None before the first use,
    # and `_init_scale`, its first value (both since 1.6). `get_scale()` would wait for the device;
    # without these two, gradients are recorded as if the scale were 1.
    scale = getattr(scaler, "_scale", None)
    if scale is None:
        first = float(getattr(scaler, "_init_scale", 1.0))
        scale = torch.tensor(first, dtype=torch.float64, device="cpu")
    return widened(scale.detach()).reciprocal()


def _warn_of_new_scaler(who: str, step: int) -> None:
    warn(
        f"{who} saw step {step} made with another GradScaler than the one before it: the scale of "
        f"its gradients was not known as they came, so it has no record. Use one GradScaler, and "
        f"give it: GradientStats(scaler=scaler).",
    )
