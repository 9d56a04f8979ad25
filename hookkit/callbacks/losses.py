"""`LossHistory`: the losses of a run, by batch and by optimizer step.

Builds on `ranks`. Everything is kept on the losses' own device; the host reads it on
demand. So recording costs about a microsecond a batch and no synchronisation.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookkit import ranks
from hookkit.devices import widened

Floats = npt.NDArray[np.float64]

_PACK = 1024  # 0-d tensors kept before they are packed: each holds 512 bytes on a GPU


class Scalars:
    """Numbers as they come, kept on their device until read."""

    def __init__(self) -> None:
        self._host = array("d")
        self._packed: list[Tensor] = []
        self._loose: list[Tensor] = []
        self._n = 0

    def append(self, value: Tensor | float) -> None:
        """Adds one number, or the mean of a tensor of several."""
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), device="cpu")
        t = value.detach()
        self._loose.append(t.mean() if t.ndim else t)
        self._n += 1
        if len(self._loose) >= _PACK:
            self._pack()

    def _pack(self) -> None:
        self._packed.append(widened(torch.stack(self._loose)))
        self._loose = []

    def read(self, start: int = 0) -> Floats:
        """(n − start,) float64 on the host: all numbers from `start` on."""
        if self._loose:
            self._pack()
        for t in self._packed:
            self._host.extend(t.cpu().tolist())  # sync: one per read-out
        self._packed = []
        return np.array(self._host[start:], dtype=np.float64)

    def replace(self, start: int, values: Floats) -> None:
        """Puts `values` in the place of the numbers from `start` on."""
        self.read(start)
        self._host[start:] = array("d", values)
        self._n = len(self._host)

    def __len__(self) -> int:
        return self._n

    def __getstate__(self) -> dict[str, Any]:
        self.read()  # a pickle loads on any machine
        return {**vars(self), "_host": self._host[:]}


class LossHistory:
    """The training loss of each batch, and the optimizer step that the batch is for.

    >>> losses = LossHistory()
    >>> for step, loss in (0, 4.0), (0, 2.0), (2, 1.0):
    ...     losses.begin(step); losses.put(torch.tensor(loss))
    >>> losses.by_batch(), losses.by_step(3)
    (array([4., 2., 1.]), array([ 3., nan,  1.]))
    """

    def __init__(self) -> None:
        self._values, self._steps = Scalars(), array("q")
        self._n_gathered = 0  # of the values
        self._certain = self._shares = False  # see `put`
        # of the current batch; None while it has no loss
        self._step, self._now = 0, None  # type: int, Tensor | None
        self._dropped = False  # the current batch, of which a loss may still be reported
        self._device: torch.device | None = None

    def begin(self, step: int) -> None:
        """A batch begins; `step` is the optimizer step it is for."""
        self._keep()
        self._step, self._dropped = step, False

    def _keep(self) -> None:
        if self._now is not None:
            self._values.append(self._now)
            self._steps.append(self._step)
        self._now = None

    def put(self, loss: Tensor, guess: bool = False, share: bool = False) -> None:
        """The batch's loss; a second one, also after the step, replaces the first.

        Args:
            loss: one number, or several, whose mean it is then. Detached, not copied.
            guess: it may be something else: once another is known for certain, none counts.
            share: the losses of a step's batches add up to the step's; else that is their mean.
                A run has losses of one kind.
        """
        if self._dropped or (guess and self._certain):
            return
        if not (guess or self._certain):
            self._certain, self._n_gathered = True, 0
            self._values, self._steps = Scalars(), array("q")
        device = loss.device
        if self._device is None:
            self._device = device
        self._now = (loss if device == self._device else loss.to(self._device)).detach()
        self._shares = share

    def drop(self, step: int | None = None) -> None:
        """The current batch does not count, nor do, with a `step`, the batches that are for it.

        Sync: one, for a step that has batches.
        """
        if step is not None:
            self._keep()
            n = len(self._steps)
            while n and self._steps[n - 1] == step:
                n -= 1
            if n < len(self._steps):
                self._values.replace(n, np.empty(0))
                del self._steps[n:]
                self._n_gathered = min(self._n_gathered, n)
        self._now, self._dropped = None, True

    def gather(self, where: str) -> None:
        """Replaces the losses since the last time by means over the ranks: all of them call.

        Two reductions: how many batches there are at most, and two numbers for each.

        Args:
            where: how far the run is, should a rank not come.
        """
        start = self._n_gathered
        own = torch.from_numpy(self.by_batch(start))
        with ranks.together(f"average training losses{where}"):
            n = int(ranks.greatest(torch.tensor(len(own), device="cpu")))
            sums = torch.zeros(2, n, dtype=torch.float64, device="cpu")
            sums[0, : len(own)], sums[1, : len(own)] = own, 1.0
            total, n_ranks = ranks.total(sums)[:, : len(own)]
        self._values.replace(start, (total / n_ranks).numpy())
        self._n_gathered = len(self._values)

    def by_batch(self, start: int = 0) -> Floats:
        """(n − start,) float64 on the host: the batches' losses from batch `start` on."""
        self._keep()
        return self._values.read(start)

    def steps(self) -> npt.NDArray[np.int64]:
        """(n,) int64: the optimizer step of each batch whose loss is known."""
        self._keep()
        return np.array(self._steps, np.int64)

    def by_step(self, n_steps: int) -> Floats:
        """(n_steps,) float64: each step's loss, NaN if none of its batches' is known."""
        losses, steps = self.by_batch(), self.steps()
        taken = steps < n_steps  # no step has followed the batches at the end
        counts = np.bincount(steps[taken], minlength=n_steps)
        totals = np.bincount(steps[taken], losses[taken], n_steps)
        with np.errstate(invalid="ignore"):
            return totals / (counts > 0 if self._shares else counts)

    def facts(self) -> dict[str, Any]:
        """`nan_losses`: how many are not finite, and of how many batches; nothing if none is."""
        losses = self.by_batch()
        n = int((~np.isfinite(losses)).sum())
        return {"nan_losses": [n, len(losses)]} if n else {}

    def __len__(self) -> int:
        return len(self._steps) + (self._now is not None)

    def __getstate__(self) -> dict[str, Any]:
        now = None if self._now is None else self._now.cpu()  # a pickle loads on any machine
        return {**vars(self), "_now": now, "_device": None}
