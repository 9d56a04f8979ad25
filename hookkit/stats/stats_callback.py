"""`StatsCallback`: what the recorders of tensors share, from a layer's hook to the step's record.

Builds on `HookCallback`, which registers and removes hooks, and on `StatsAccumulator`, which keeps
the numbers.
The step axis is the optimizer step: what several batches of one step gave is merged, and a batch
that was cancelled, or whose step was skipped, records nothing.

The hooks stay registered and do nothing while their `RecordSwitch` is off, so that a compiled model
need not be compiled again. Its `target` is the accumulator of training, or that of validation; both
have the same rows, so one hook serves them.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from torch import nn

from hookkit import ranks
from hookkit.callbacks.readout import across_ranks
from hookkit.errors import HookkitWarning, OptionError
from hookkit.hooks.entries import Placed
from hookkit.modules import class_name
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options
from hookkit.moments.numba_loader import machine
from hookkit.moments.variation import EVERY, Variation
from hookkit.recording import HookCallback
from hookkit.records import Record
from hookkit.stats.layer_hooks import gradient_entries, output_entries
from hookkit.stats.unscaling import ScaledAccumulator, known_scaler


class StatsCallback(HookCallback):
    """Base of the callbacks that record statistics of tensors; see `ActivationStats`.

    Attributes:
        accumulator: what was recorded in training, over all fits.
        valid_accumulator: what was recorded in validation.
        scaler: the GradScaler, where it cannot be found: the step is not a torch optimizer's.
    """

    order = -20
    _saved: ClassVar[tuple[str, ...]] = (
        *HookCallback._saved,
        "accumulator",
        "valid_accumulator",
        "_n_taken",
    )
    of = "outputs"
    scaler: Any = None
    _warned = False

    def __init__(self, options: Options, *, on_valid: bool = False, **hooking: Any) -> None:
        super().__init__(on_valid=on_valid, **hooking)
        kind = "activation" if self.is_forward else "gradient"
        plain = self.is_forward or self.of == "params"
        made = StatsAccumulator if plain else ScaledAccumulator
        self.options, self.accumulator = options, made(kind, options)
        self.valid_accumulator = StatsAccumulator(kind, options, like=self.accumulator)
        if self.is_forward:  # known from the graph of the first batches
            self.accumulator.consumers = self.valid_accumulator.consumers = {}
            self.accumulator.variation = Variation()
        self._clear_fit()

    def _clear_fit(self) -> None:
        self._n_taken = 0
        self._step_tried = self._cancelled = self._begun = False

    # --- hooks

    def _entries(self, name: str, module: nn.Module, leaf: str) -> list[Placed]:
        (row,) = self.accumulator.rows([name], [class_name(module)])
        if self.is_forward:
            return output_entries(self._switch, row, leaf, self._function)
        return gradient_entries(self._switch, row, leaf, self._function, module)

    # --- events

    def before_fit(self) -> None:
        """Hooks the modules; what was recorded before stays, and is added to."""
        if self.learn.fitting:
            machine.load()
            self._clear_fit()
            self.accumulator.forget()
        super().before_fit()
        # compiled graphs check it as they run; gradients may come in a thread of autograd's
        thread = self._switch.thread if self.is_forward else None
        self.accumulator.thread = self.valid_accumulator.thread = thread

    def before_batch(self) -> None:
        """Decides whether this batch is recorded: all batches of one optimizer step, or none."""
        self._step_tried = self._cancelled = self._switch.late = False
        if self._begun:  # it never ended
            self.accumulator.drop()
            self.valid_accumulator.drop()
        training = self.learn.training
        self._switch.target = self.accumulator if training else self.valid_accumulator
        super().before_batch()
        self._begun = self.recording
        self.accumulator.looks = training and self.accumulator.n_records % EVERY == 0
        seen, first = self.accumulator.variation, training and not self.accumulator.n_records
        self._switch.given = seen.see_given if seen is not None and first else None
        if self._begun and training and isinstance(self.accumulator, ScaledAccumulator):
            self.accumulator.begin_batch(self._scaler)

    def _is_recorded(self) -> bool:
        if self.learn.training:
            return self.on_train and self._n_taken % (self.every or 1) == 0
        return self.on_valid and not self.learn.eval_pass

    def before_step(self) -> None:
        """Notes that a step was tried: if none follows, AMP or a callback has skipped it.

        A closure may evaluate many batches before its step is made.
        """
        self._step_tried = not self.learn.in_closure

    def after_cancel_step(self) -> None:
        """A step that a callback skips records nothing, with a closure or without."""
        self._step_tried = True

    def after_cancel_batch(self) -> None:
        """A cancelled batch records nothing; in `watch` it is over with this."""
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
                stats = self.valid_accumulator
                (stats.drop if self._cancelled else stats.fold)()
            return
        if self._cancelled:
            self.accumulator.drop()
        elif self.learn.stepped:
            if on:
                self._close()
            self._n_taken += 1
        elif self._step_tried:
            self.accumulator.forget()
        elif on:  # a batch whose gradients have Inf is one whose step AMP has skipped
            self.accumulator.fold(finite_only=not self.is_forward)

    def after_validate(self) -> None:
        """One record for the whole validation, at the step that it was made."""
        if self.on_valid and not self.learn.eval_pass:
            step = max(self.learn.n_steps - 1, 0)
            self.valid_accumulator.commit(step, self.learn.epoch, self.learn.train_iter)

    def cleanup_fit(self) -> None:
        """Takes the hooks off; a batch that was under way is forgotten."""
        super().cleanup_fit()
        self._record(False)
        self.accumulator.forget()
        if isinstance(self.accumulator, ScaledAccumulator):
            self.accumulator.end_fit()

    @property
    def _scaler(self) -> Any:
        """The GradScaler that scales the loss, where it is known beforehand."""
        return known_scaler(self.learn) if self.scaler is None else self.scaler

    def _settle(self) -> bool:
        """The step was made: by which scaler decides its record. Whether it was one expected."""
        stats = self.accumulator
        if not isinstance(stats, ScaledAccumulator):
            return True
        settled = stats.settle(self._scaler or self.learn.step_scaler)
        if not (settled or self._warned):
            self._warned = True
            _warn_of_new_scaler(type(self).__name__, self.learn.n_steps - 1)
        return settled

    def _close(self) -> None:
        if self._settle() or self.of != "outputs":
            self.accumulator.commit(self.learn.n_steps - 1, self.learn.epoch, self._last_iter)

    # --- reading

    def record(self, *, valid: bool = False, local: bool = False) -> Record:
        """Everything recorded so far, as plain numbers. The host reads the device here.

        Args:
            valid: the validations (one record each, needs `on_valid=True`) instead of training.
            local: this rank's own, also where what all ranks recorded was gathered.

        Raises:
            OptionError: `valid=True`, and validations were not recorded.
        """
        if valid and not (self.on_valid or self.valid_accumulator.n_records):
            who = type(self).__name__ if self.is_forward else "ActivationStats"
            raise OptionError(
                f"record(valid=True): {type(self).__name__} did not record validations. "
                f"Make it with {who}(on_valid=True)."
            )
        return (self.valid_accumulator if valid else self.accumulator).record(local=local)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded, on the CPU; in `distrib_ctx` on all ranks, and each has to call."""
        whole = across_ranks(self.learn)
        stats = self.accumulator.stored(whole=whole)
        valid = self.valid_accumulator.stored(stats, whole=whole and self.on_valid)
        return {**super().state_dict(), "accumulator": stats, "valid_accumulator": valid}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; the hooks then add to it.

        Raises:
            OptionError: it was recorded with other options, or is damaged.
        """
        found = getattr(state.get("accumulator"), "options", None)
        if str(found) != str(self.options):
            raise OptionError(
                f"{type(self).__name__} was made with {self.options}, and the checkpoint's with "
                f"{found}. Make it with the same options, or leave it out and record anew."
            )
        super().load_state_dict(state)
        if across_ranks(self.learn) and ranks.rank():  # rank 0 has it for all
            self.accumulator.empty()
            self.valid_accumulator.empty()
        if self.learn is not None and self.learn.fitting:
            self._remove()
            self._hook_all(self.learn.model)  # the rows of layers are those of the checkpoint

    def _gather(self) -> None:
        """Merges what all ranks recorded, for `record()`: each of them has to call."""
        self.accumulator.gather()
        if self.on_valid:
            self.valid_accumulator.gather()

    def __getstate__(self) -> dict[str, Any]:
        if self.learn is not None and self.learn.fitting:
            self.learn._remember_step(self)
        return super().__getstate__()


def _warn_of_new_scaler(who: str, step: int) -> None:
    warnings.warn(
        f"{who} saw step {step} made with another GradScaler than those before it (or with one for "
        f"the first time, or with none any more): the scale of its gradients was not known as they "
        f"came, so its record leaves out those of outputs. Steps after it are right. Make the "
        f"GradScaler before the loop begins, or give it: GradientStats(scaler=scaler).",
        HookkitWarning,
        stacklevel=3,
    )
