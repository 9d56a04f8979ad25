"""Gradients of outputs under a GradScaler, divided by the scale of the loss.

Nothing in a backward pass says which scaler scaled its loss, or whether one did; that is known at
the step, when the gradients are gone. So until the first step the gradients are counted once for
each live scaler and once as they are, and the step selects the count that is recorded. One count
with a scale that is applied later would not do: how many values are near zero, and which bins they
fall into, cannot be computed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookkit.callbacks.optimizers import live_scalers, unscaling
from hookkit.devices import widened
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options


class ScaledAccumulator(StatsAccumulator):
    """Statistics of gradients whose scale may be known only after they were counted.

    >>> scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    >>> stats = ScaledAccumulator("gradient")
    >>> (row,) = stats.rows(["fc"], ["Linear"])
    >>> stats.begin_batch()
    >>> stats.see(row, 0, "", torch.full((2,), 8.0))
    >>> stats.settle(scaler)
    True
    >>> stats.commit(0, 0, 0)
    >>> stats.record().value("mean", "fc")
    array([2.])
    """

    def __init__(self, kind: str, options: Options | None = None) -> None:
        super().__init__(kind, options)
        self.end_fit()

    def end_fit(self) -> None:
        """Holds no scaler any longer; which one is in use is found again in the next fit."""
        self._made: list[Any] = []  # what made the steps of this fit so far; None: no scaler
        self._live: Sequence[Any] | None = None  # the scalers that there were as the fit began
        self._scalers: list[Any] = [None]  # those that may have scaled the loss of this batch
        self._twins: list[StatsAccumulator] = []  # one for each of them but the first
        self._settled: bool | None = None
        self.unscale = None

    def begin_batch(self, scaler: Any = None) -> None:
        """Gradients from now on belong to a loss that `scaler` has scaled.

        None: one of those that made the steps before; before the first step, any scaler or none.
        """
        self._settled = None
        if scaler is None and not self._made and self._live is None:
            self._live = live_scalers()
        scalers = self._made or [None, *(self._live or ())] if scaler is None else [scaler]
        if [*map(id, scalers)] != [*map(id, self._scalers)]:
            self._scalers = scalers
            self._twins = [StatsAccumulator(self.kind, self.options, self) for _ in scalers[1:]]
        for stats, one in zip((self, *self._twins), scalers, strict=True):
            stats.unscale = inverse_scale(one)
        for twin in self._twins:
            twin.count_from(self.n_records)  # it samples the same values

    def settle(self, scaler: Any) -> bool:
        """`scaler`, or one that has unscaled since, made the step: its count is the record's.

        Done once a step. False if it was none of those expected: then all that was seen for this
        step is forgotten.
        """
        if self._settled is not None:
            return self._settled
        scaler = scaler or unscaling(self._live or ())
        ids = [*map(id, self._scalers)]
        self._settled = id(scaler) in ids
        if not self._settled:
            self.forget()
        elif i := ids.index(id(scaler)):
            self._twins[i - 1].fold()
            self.take_kept(self._twins[i - 1])
        self._scalers, self._twins = [scaler], []
        if all(scaler is not one for one in self._made):
            self._made = sorted([*self._made, scaler], key=lambda s: s is not None)
        return self._settled

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Record `t`, as a `StatsAccumulator` does, for each scale that it may have."""
        super().see(row, leaf, path, t)
        if not torch.compiler.is_compiling():  # else this is called again as the graph runs
            for twin in self._twins:
                twin.see(row, leaf, path, t)

    def drop(self) -> None:
        """Forget what was seen since the last `fold` or `commit` (a cancelled batch)."""
        super().drop()
        for twin in self._twins:
            twin.drop()

    def fold(self, *, finite_only: bool = False) -> None:
        """Count what was seen towards the record of a later step."""
        super().fold(finite_only=finite_only)
        for twin in self._twins:
            twin.fold(finite_only=finite_only)

    def forget(self) -> None:
        """Forget everything since the last `commit`."""
        super().forget()
        for twin in self._twins:
            twin.forget()

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_made": [], "_live": None, "_scalers": [None], "_twins": []}
        return {**super().__getstate__(), **gone}


def known_scaler(driver: Any) -> Any:
    """The GradScaler of a Learner or a watched loop, if it has one; else None."""
    own = vars(driver).get("scaler")  # its own: the model may have one of another kind
    return getattr(driver.accelerator, "scaler", None) if own is None else own


def inverse_scale(scaler: Any) -> Tensor | None:
    """1 / its scale as a new 0-d tensor; None if there is no scaler or it is not in use."""
    if scaler is None or not scaler.is_enabled():
        return None
    # Private: `GradScaler._scale`, the scale as a tensor on the device, None before the first use,
    # and `_init_scale`, its first value (both since 1.6). `get_scale()` would wait for the device;
    # without these two, gradients are recorded as if the scale were 1.
    scale = getattr(scaler, "_scale", None)
    if scale is None:
        scale = torch.tensor(
            float(getattr(scaler, "_init_scale", 1.0)), dtype=torch.float64, device="cpu"
        )
    return widened(scale.detach()).reciprocal()
