"""What a Learner has recorded and is made of: its record, its summary, its callbacks by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from fastcore.basics import PrettyString

from hookkit.callbacks.losses import LossHistory
from hookkit.callbacks.readout import Readable
from hookkit.callbacks.runner import no_attribute
from hookkit.learner.distributing import no_log
from hookkit.learner.predicting import Predicting
from hookkit.records import Tables, Views

if TYPE_CHECKING:
    from hookkit.summaries.fastai_layout import SummaryText


_LOOP = """
before_fit
  before_epoch
    before_train
      before_batch after_pred after_loss
        before_backward after_cancel_backward after_backward
        before_step after_cancel_step after_step
      after_cancel_batch after_batch
    after_cancel_train after_train
    before_validate after_cancel_validate after_validate
  after_cancel_epoch after_epoch
after_cancel_fit after_fit
"""


class Reading(Predicting, Readable, Tables, Views):
    """The part of a Learner that is read."""

    logger: Any = print

    def summary(self) -> SummaryText:
        """The model as a table: shapes, parameters, optimizer, loss, callbacks. Changes nothing."""
        from hookkit.summaries import learner_summary

        return learner_summary(self)

    def _loss_history(self) -> LossHistory | None:
        return getattr(self._cb_named("recorder"), "_losses", None)

    def _epochs(self) -> list[dict[str, Any]]:
        recorder = self._cb_named("recorder")
        return [] if recorder is None else recorder._epochs(self.n_steps)

    @property
    def smooth_loss(self) -> float | None:
        """The Recorder's smoothed training loss; reading it is a read from the device."""
        return getattr(self._cb_named("recorder"), "smooth_loss", None)

    def show_training_loop(self) -> PrettyString:
        """The loop as text: every event in its place, with the callbacks that have it."""
        lines = []
        for line in _LOOP.strip("\n").split("\n"):
            heard = [f"{e}: {list(cbs)}" for e in line.split() if (cbs := self.ordered_cbs(e))]
            lines += [" " * (len(line) - len(line.lstrip())) + one for one in heard]
        return PrettyString("\n".join(lines))

    @contextmanager
    def no_logging(self) -> Iterator[Self]:
        """The Learner without printing its log, until the end of the `with`."""
        before, self.logger = self.logger, no_log
        try:
            yield self
        finally:
            self.logger = before

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised AttributeError: its own error
            return object.__getattribute__(self, name)
        if name[0] != "_" and "cbs" in vars(self):
            if (cb := self._cb_named(name)) is not None:
                return cb
            with suppress(AttributeError):
                return getattr(self.model, name)
        raise no_attribute(self, name, "Neither the Learner, its callbacks nor its model")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self._named() if "cbs" in vars(self) else ())]

    def __repr__(self) -> str:
        return f"Learner({type(self.model).__name__}, {self.dls!r}, cbs={list(self.cbs)})"
