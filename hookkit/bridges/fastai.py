"""fastai: `Learner(..., cbs=HookkitCallback(ActivationStats()))`.

fastai's own optimizers do not run torch's step hooks, so its callback events report the steps.
(hookkit's callbacks also work in hookkit's Learner, which has fastai's events.)
"""

from __future__ import annotations

from typing import Any

from hookkit.bridges import Bridge, base
from hookkit.watching import Watcher

_Callback: Any = base("fastai", "fastai.callback.core.Callback")


class HookkitCallback(Bridge, _Callback):  # type: ignore[misc]
    """Runs hookkit's callbacks in a fastai Learner, with any optimizer.

    Each epoch has the numbers of fastai's Recorder, under its names, except its smoothed
    `train_loss`: here that is the mean over the epoch's steps. `validate` and `get_preds`, by
    themselves or inside a fit, do not change what was recorded.
    """

    order = 45  # before fastai's Recorder, which appends the time to the numbers of an epoch

    def __init__(self, *callbacks: Any) -> None:
        super().__init__(*callbacks)
        self._begun = self._in_validation = False

    def before_fit(self) -> None:
        """A fit or a validation begins: validate and get_preds fire `before_fit`, too."""
        self._in_validation = True

    def before_train(self) -> None:
        """Begins: only a fit fires this."""
        if self._in_validation or not self._begun:
            self.begin(self.learn.model)
            self._begun, self._in_validation = True, False

    def begin(self, model: Any, opt: Any = None) -> None:
        """A training begins; its steps are reported by the events below."""
        self.end()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = Watcher(model, [], self.callbacks, by_hand=True)
        # fastai's MixedPrecision keeps its scaler there; the scaler does not make the step itself
        self._watcher.loop.scaler = vars(self.learn).get("scaler")
        self._watcher.start()

    def before_step(self) -> None:
        """The weights are about to change."""
        self.watcher.loop.step_began(self.learn.opt, False)

    def after_step(self) -> None:
        """They have changed; the gradients are still there."""
        self.watcher.loop.step_ended(self.learn.opt)

    def after_batch(self) -> None:
        """Reports the loss."""
        if self.learn.training:
            self.loss(self.learn.loss_grad)

    def after_epoch(self) -> None:
        """Marks the epoch, with the numbers that fastai's Recorder has of it."""
        if self._begun and not self._in_validation:
            self.epoch(**_numbers(getattr(self.learn, "recorder", None)))

    def after_fit(self) -> None:
        """Ends, if this is the end of a fit."""
        if not self._in_validation:
            self.after_cancel_fit()
        self._in_validation = False

    def after_cancel_fit(self) -> None:
        """Ends."""
        self._begun = False
        self.end()


def _numbers(recorder: Any) -> dict[str, Any]:
    """The numbers of the epoch by name; nothing where they do not fit the names."""
    if recorder is None:
        return {}
    names = [name for name in recorder.metric_names[1:] if name != "time"]
    n_train = 1 + len(recorder.learn.metrics) * recorder.train_metrics
    kept = slice(n_train * recorder.cancel_train, n_train if recorder.cancel_valid else None)
    names, values = names[kept], list(recorder.log[1:])
    found = dict(zip(names, values, strict=True)) if len(names) == len(values) else {}
    return {k: v for k, v in found.items() if v is not None and k != "train_loss"}
