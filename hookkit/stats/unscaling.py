"""Gradients of outputs under a GradScaler, divided by the scale of the loss.

Nothing in a backward pass says which scaler scaled its loss, or whether one did; that is known at
the step, when the gradients are gone. So until the first step the gradients are counted once for
each live scaler and once as they are, and the step selects the count that is recorded. One count
with a scale that is applied later would not do: how many values are near zero, and which bins they
fall into, cannot be computed afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookkit.callbacks.optimizers import live_scalers, unscaling
from hookkit.errors import HookkitWarning
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options
from hookkit.stats.stats_callback import StatsCallback


class ScaledAccumulator(StatsAccumulator):
    """Statistics of gradients whose scale may be known only after they were counted.

    >>> scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    >>> stats = ScaledAccumulator("gradient")
    >>> (row,) = stats.rows(["fc"], ["Linear"])
    >>> stats.divide_by([None, scaler])
    >>> stats.see(row, 0, "", torch.full((2,), 8.0))
    >>> stats.settle(scaler)
    True
    >>> stats.commit(0, 0, 0)
    >>> stats.record().value("mean", "fc")
    array([2.])
    """

    def __init__(self, kind: str, options: Options | None = None) -> None:
        super().__init__(kind, options)
        self._scalers: list[Any] = [None]
        self._twins: list[StatsAccumulator] = []  # one for each scaler but the first

    def divide_by(self, scalers: list[Any]) -> None:
        """Gradients from now on belong to a loss scaled by one of `scalers`; None: by none."""
        if [*map(id, scalers)] != [*map(id, self._scalers)]:
            self._scalers = scalers
            self._twins = [StatsAccumulator(self.kind, self.options, self) for _ in scalers[1:]]
        for stats, scaler in zip((self, *self._twins), scalers, strict=True):
            stats.unscale = inverse_scale(scaler)
        for twin in self._twins:
            twin.count_from(self.n_records)  # it samples the same values

    def settle(self, scaler: Any) -> bool:
        """`scaler` made the step: what was divided by its scale is the record's.

        False if it was none of those expected. Then all that was seen for this step is forgotten.
        """
        known = [*map(id, self._scalers)]
        if id(scaler) not in known:
            self.forget()
        elif i := known.index(id(scaler)):
            self._take_over(self._twins[i - 1])
        expected = id(scaler) in known
        self._scalers, self._twins = [scaler], []
        return expected

    def _take_over(self, twin: StatsAccumulator) -> None:
        twin.fold()
        self.take_kept(twin)

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
        return {**super().__getstate__(), "_scalers": [None], "_twins": []}


class UnscaledStats(StatsCallback):
    """What records gradients divides those of outputs by the scale of the loss.

    Attributes:
        scaler: the GradScaler, where it cannot be found: the step is not a torch optimizer's.
    """

    scaler: Any = None
    of = "outputs"
    _used: list[Any] | None = None  # what made the steps of this fit so far; before, what may
    _live: Sequence[Any] = ()  # the scalers that there were as the fit began
    _stepped = _settled = _missed = _warned = False

    def _new_accumulator(self, options: Options) -> StatsAccumulator:
        made = ScaledAccumulator if self.kind == "gradient" else StatsAccumulator
        return made(self.kind, options)

    def before_fit(self) -> None:
        """Hooks the modules; which scaler is used is found again."""
        if self.learn.fitting:
            self._used, self._stepped = None, False
        super().before_fit()

    def before_batch(self) -> None:
        """Notes by how much the loss of this batch may be scaled."""
        super().before_batch()
        self._settled = self._missed = False
        if self.recording and self.learn.training and (stats := self._scaled) is not None:
            stats.divide_by(self._possible())

    @property
    def _scaled(self) -> ScaledAccumulator | None:
        return (
            self.accumulator
            if self.of != "params" and isinstance(self.accumulator, ScaledAccumulator)
            else None
        )

    def _possible(self) -> list[Any]:
        """The scalers that may have scaled the loss of this batch; None stands for no scaling."""
        if (given := self._given_scaler()) is not None:
            return [given]
        if self._used is None:
            self._live = live_scalers()
            self._used = [None, *self._live]
        return self._used

    def _given_scaler(self) -> Any:
        learn = self.learn
        # the driver's own: its model may have a `scaler` of another kind
        given = (self.scaler, vars(learn).get("scaler"), getattr(learn.accelerator, "scaler", None))
        return next((scaler for scaler in given if scaler is not None), None)

    def _settle(self) -> None:
        """The step was made: by which scaler decides what its record is."""
        if self._settled or (stats := self._scaled) is None:
            return
        self._settled = True
        given = self._given_scaler()
        scaler = self.learn.step_scaler or unscaling(self._live) if given is None else given
        if not stats.settle(scaler):
            self._missed = True
            self._warn_of_new_scaler()
        known = [*(self._used or ())] if self._stepped else []
        if all(scaler is not one for one in known):
            known.append(scaler)
        self._used, self._stepped = sorted(known, key=lambda s: s is not None), True

    def _warn_of_new_scaler(self) -> None:
        if not self._warned:
            self._warned = True
            who = type(self).__name__
            warnings.warn(
                f"{who} saw step {self.learn.n_steps - 1} made with another GradScaler than "
                f"those before it (or with one for the first time, or with none any more): the "
                f"scale of its gradients was not known as they came, so its record leaves out "
                f"those of outputs. Steps after it are right. Make the GradScaler before the "
                f"loop begins, or give it: GradientStats(scaler=scaler).",
                HookkitWarning,
                stacklevel=2,
            )

    def _close(self) -> None:
        self._settle()
        if not (self._missed and self.of == "outputs"):
            super()._close()

    def cleanup_fit(self) -> None:
        """Takes the hooks off, and holds no scaler any longer."""
        super().cleanup_fit()
        if (stats := self._scaled) is not None:
            stats.divide_by([None])
        self._used, self._live = None, ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_used": None, "_live": ()}


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
    # Private: `GradScaler._scale`, the scale as a tensor on the device, None before the first use,
    # and `_init_scale`, its first value (both since 1.6). `get_scale()` would wait for the device;
    # without these two, gradients are recorded as if the scale were 1.
    scale = getattr(scaler, "_scale", None)
    if scale is None:
        scale = torch.tensor(
            float(getattr(scaler, "_init_scale", 1.0)), dtype=torch.float64, device="cpu"
        )
    return scale.detach().double().reciprocal()
