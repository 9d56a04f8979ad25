"""What was recorded of a watched loop, read: as a `Run`, a diagnosis, a page.

Builds on `runs` and `losses`. Here, and only here, the host reads from the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hookkit.callbacks.runs import run_of
from hookkit.records import Exports, Floats, Run, Views
from hookkit.watching.external_loop import ExternalLoop


class ReadOut(Exports, Views):
    """The half of a `Watcher` that reads."""

    loop: ExternalLoop
    info: dict[str, Any]

    @property
    def losses(self) -> Floats:
        """(n_steps,) float64: the training loss by optimizer step, NaN where it was not told."""
        return self._losses()[self._own()]

    def _losses(self) -> Floats:
        """By step on the recorders' axis, NaN also where they recorded another loop."""
        return self.loop.losses.read(self.loop.n_steps)

    def _own(self) -> npt.NDArray[np.bool_]:
        """(loop.n_steps,) which of the steps were made here."""
        own = np.ones(self.loop.n_steps, np.bool_)
        for first, end in self.loop.elsewhere:
            own[first:end] = False
        return own

    def run(self) -> Run:
        """All that was recorded, as plain numpy values: for `diagnose`, pictures, your own use.

        By the recorders' steps: one that was given to another `watch` before goes on from there.

        Sync: one per recorder.
        """
        run, losses = run_of(self.loop), self._losses()
        rows = [self._row(i, losses) for i in range(len(self.loop.spans))]
        return replace(
            run,
            losses=losses if np.isfinite(losses).any() else None,
            valid=rows,
            info={**run.info, **self.info},
        )

    def _row(self, i: int, losses: Floats) -> dict[str, Any]:
        """Epoch `i` as Run wants it: number, last step, mean training loss, what was told of it."""
        spans, told = self.loop.spans, dict(self.loop.spans[i])
        first, row = told.pop("step"), {"epoch": told.pop("epoch")}
        end = spans[i + 1]["step"] if i + 1 < len(spans) else len(losses)
        if end > first:
            row["step"] = end - 1
        mine = losses[first:end][~np.isnan(losses[first:end])]
        if len(mine):
            row["train_loss"] = float(mine.mean())
        return row | {k: _plain(v) for k, v in told.items()}


def _plain(value: Any) -> Any:
    """A tensor, an array or a number of numpy's as Python numbers; anything else as it is."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value
