"""Forwards that are not for training, in a loop that is not ours: validation, and rollouts.

Builds on `driving`. Each is a batch of its own with `training` False, as in the Learner, and
several in a row are a validation. One that comes amid a training batch, between its forward and its
step, has no events: there recording is only switched off for as long as it takes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hookkit.callbacks.runner import Driver
from hookkit.events import CancelBatchException


class Asides(Driver):
    """The part of a followed loop that does not train."""

    pred: Any

    def _no_asides(self) -> None:
        self._aside = self._amid = self._validating = False
        self._recorders: list[Any] = []
        self._paused: list[Any] = []

    def _find_recorders(self) -> None:
        """The HookCallbacks: what has a `recording` to switch."""
        self._recorders = [cb for cb in self.cbs if hasattr(type(cb), "_record")]

    def _aside_began(self) -> None:
        self._amid, self.training, self._aside = self.training, False, True
        self._pause()
        if self._amid:
            return
        if not self._validating:
            self._validating = True
            self("before_validate")
        with suppress(CancelBatchException):
            self("before_batch")

    def _aside_ended(self, output: Any, *events: str) -> None:
        self._aside = False
        try:
            if not self._amid:
                self.pred = output
                with suppress(CancelBatchException):
                    self(*events)
        finally:
            self.pred, self.training = None, self._amid
            self._resume() if self._amid else self._pause()

    def _end_validation(self) -> None:
        if self._validating:
            self._validating = False
            self("after_validate")

    def _pause(self) -> None:
        """Between training batches nothing is recorded, also in a forward that cannot be seen."""
        if self._recorders:
            self._paused = [cb for cb in self._recorders if cb.recording]
            for cb in self._paused:
                cb._record(False)

    def _resume(self) -> None:
        for cb in self._paused:
            cb._record(True)
