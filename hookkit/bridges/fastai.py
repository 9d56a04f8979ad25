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

    Args:
        callbacks: hookkit's, as for `watch`.

    Raises:
        MissingExtraError: fastai is not installed.
    """

    order = 45  # before fastai's Recorder

    def __init__(self, *callbacks: Any) -> None:
        if _Callback is object:
            raise needs("fastai")
        _Callback.__init__(self)
        Bridge.__init__(self, *callbacks)

    def before_fit(self) -> None:
        """Begins."""
        if getattr(self, "gather_preds", None) is not None:
            return  # validate and get_preds fire the events of a fit, too
        self.begin(self.learn.model)

    def begin(self, model: Any, opt: Any = None) -> None:
        """A training begins; its steps are told by hand."""
        self.end()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = Watcher(model, [], self.callbacks, by_hand=True)
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
        """Marks the epoch."""
        self.epoch()

    def after_fit(self) -> None:
        """Ends."""
        self.end()

    def after_cancel_fit(self) -> None:
        """Ends."""
        self.end()
