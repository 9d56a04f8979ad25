"""What one reads of a Learner: its callbacks and its model by name, and what they recorded.

Builds on `callbacks.readout` and `records`.
"""

from __future__ import annotations

from typing import Any

from fastcore.basics import PrettyString

from hookkit.callbacks.readout import run_of
from hookkit.errors import nearest
from hookkit.records import Floats, Run, Tables, Views


class ReadOut(Tables, Views):
    """The part of a Learner that reads: for a class that is also a `CallbackRunner`."""

    _named: Any
    _cb_named: Any
    ordered_cbs: Any
    n_steps: int

    def summary(self) -> Any:
        """The model as a table: shapes, parameters, optimizer, loss, callbacks. Changes nothing."""
        from hookkit.summaries import learner_summary

        return learner_summary(self)

    def run_record(self) -> Run:
        """Everything recorded so far, as plain values: what pictures, diagnosis and report read.

        `.save(path)` writes it, for `Run.load(path)`; the Learner's own `save` writes the weights.
        """
        return run_of(self)

    def _step_losses(self) -> Floats | None:
        recorder = self._cb_named("recorder")
        return None if recorder is None else recorder.step_losses()

    def _epochs(self) -> list[dict[str, Any]]:
        recorder = self._cb_named("recorder")
        return [] if recorder is None else recorder._epochs(self.n_steps)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property that raised AttributeError: its own error
            return object.__getattribute__(self, name)
        cb = None if name[0] == "_" or "cbs" not in vars(self) else self._cb_named(name)
        if cb is not None:
            return cb
        if not name.startswith("__") and "model" in vars(self):
            try:
                return getattr(self.model, name)
            except AttributeError:
                pass
        raise AttributeError(self._no_attribute(name), name=name, obj=self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(self._named() if "cbs" in vars(self) else ())]

    def _no_attribute(self, name: str) -> str:
        near = nearest(name, [n for n in {*dir(type(self)), *vars(self)} if n[0] != "_"])
        near += nearest(name, self._named() if "cbs" in vars(self) else ())
        hint = f" Nearest: {', '.join(near)}." if near else ""
        model = type(vars(self).get("model")).__name__
        return f"Neither the Learner, its callbacks nor its model ({model}) has {name!r}.{hint}"

    def __repr__(self) -> str:
        model, dls, cbs = (vars(self)[name] for name in ("model", "dls", "cbs"))
        return f"Learner({type(model).__name__}, {dls!r}, cbs={list(cbs)})"

    @property
    def smooth_loss(self) -> float | None:
        """The Recorder's smoothed training loss; reading it is a read from the device."""
        recorder: Any = self._cb_named("recorder")
        return None if recorder is None else recorder.smooth_loss

    def show_training_loop(self) -> PrettyString:
        """The loop as text: every event in its place, with the callbacks that have it."""
        depth, lines = 0, []
        for line in _LOOP.split():
            if line.startswith("end:"):
                depth -= 1
            heard = f": {list(self.ordered_cbs(line))}" if "_" in line and ":" not in line else ""
            words = line.replace("start:", "Start ").replace("end:", "End ").replace("+", " ")
            lines.append(f"{'  ' * depth}{'- ' if heard else ''}{words}{heard}")
            if line.startswith("start:"):
                depth += 1
        return PrettyString("\n".join(lines))


_LOOP = """
before_fit start:Fit
 before_epoch start:Epoch
  before_train start:Training
   before_batch start:Batch after_pred after_loss
    before_backward after_cancel_backward after_backward
    before_step after_cancel_step after_step
   end:Batch after_cancel_batch after_batch
  end:Training after_cancel_train after_train
  before_validate start:Validation+(batches+as+above,+without+backward+and+step)
  end:Validation after_cancel_validate after_validate
 end:Epoch after_cancel_epoch after_epoch
end:Fit after_cancel_fit after_fit
"""
