"""fastai: `Learner(..., cbs=HookkitCallback(ActivationStats()))`.

fastai's own optimizers run none of torch's step hooks, so here its callback events say when a step
is made. (hookkit's callbacks also work in hookkit's Learner, which has fastai's events.)
"""

from __future__ import annotations

from typing import Any

from ..watching import Watcher
from . import Bridge, base, needs

_Callback: Any = base("fastai.callback.core.Callback")


class HookkitCallback(Bridge, _Callback):  # type: ignore[misc]
    """Drives hookkit's callbacks in a fastai Learner, whichever optimizer it has.

    Each epoch keeps what fastai's Recorder has of it, under its names. Only its smoothed
    `train_loss` is left out: here that is the mean of the epoch's steps. `validate` and
    `get_preds`, by themselves or inside a fit, leave what was recorded as it is.

    Args:
        callbacks: hookkit's, as for `watch`.

    Raises:
        MissingExtraError: fastai is not installed.
    """

    order = 45  # before fastai's Recorder, which adds the time to what it has of an epoch

    def __init__(self, *callbacks: Any) -> None:
        if _Callback is object:
            raise needs("fastai")
        _Callback.__init__(self)
        Bridge.__init__(self, *callbacks)
        self._begun = self._aside = False

    def before_fit(self) -> None:
        """A fit, or a validation: validate and get_preds fire the events of a fit, too."""
        self._aside = True

    def before_train(self) -> None:
        """Begins, as this only a fit does."""
        if self._aside or not self._begun:
            self.begin(self.learn.model)
            self._begun, self._aside = True, False

    def begin(self, model: Any, opt: Any = None) -> None:
        """A training begins; its steps are told by hand."""
        self.end()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = Watcher(model, [], self.callbacks, by_hand=True)
        # fastai's MixedPrecision keeps it there, and has it step in another place than the weights
        self._watcher.loop.scaler = vars(self.learn).get("scaler")
        self._watcher.start()

    def before_step(self) -> None:
        """The weights are about to change."""
        self.watcher.loop.step_began(self.learn.opt, False)

    def after_step(self) -> None:
        """They have changed; the gradients are still there."""
        self.watcher.loop.step_ended(self.learn.opt)

    def after_batch(self) -> None:
        """Tells the loss."""
        if self.learn.training:
            self.loss(self.learn.loss_grad)

    def after_epoch(self) -> None:
        """Marks the epoch, with the numbers that fastai's Recorder has of it."""
        if self._begun and not self._aside:
            self.epoch(**_told(getattr(self.learn, "recorder", None)))

    def after_fit(self) -> None:
        """Ends, if this is the end of a fit."""
        if not self._aside:
            self.after_cancel_fit()
        self._aside = False

    def after_cancel_fit(self) -> None:
        """Ends."""
        self._begun = False
        self.end()


def _told(recorder: Any) -> dict[str, Any]:
    """The numbers of the epoch by name; nothing where they do not fit the names."""
    if recorder is None:
        return {}
    names = [name for name in recorder.metric_names[1:] if name != "time"]
    n_train = 1 + len(recorder.learn.metrics) * recorder.train_metrics
    kept = slice(n_train * recorder.cancel_train, n_train if recorder.cancel_valid else None)
    names, values = names[kept], list(recorder.log[1:])
    told = dict(zip(names, values, strict=True)) if len(names) == len(values) else {}
    return {k: v for k, v in told.items() if v is not None and k != "train_loss"}
