"""Lightning: `Trainer(callbacks=[HookkitCallback(ActivationStats(), ParamStats())])`.

`watch` sees batches and steps; Lightning reports the epochs, the loss and its logged metrics.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookkit.bridges import Bridge, base

_Callback: Any = base("lightning", "lightning.pytorch.Callback", "pytorch_lightning.Callback")

_NAMES = {"val_loss": "valid_loss", "train_loss": "logged_train_loss"}


class HookkitCallback(Bridge, _Callback):  # type: ignore[misc]
    """Runs hookkit's callbacks in a Lightning Trainer."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__(*callbacks)
        self._seen: dict[str, Tensor] = {}  # the metrics, when they were last looked at

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the watch, after the sanity check, when the optimizers are made."""
        opts = list(trainer.optimizers) or None
        self.begin(pl_module, opts, trainer.current_epoch, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss; Lightning's is divided by the number of accumulated batches."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # a step that optimizes by hand may return anything
        if isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1):
            self.watcher.loss(loss * trainer.accumulate_grad_batches)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Add the metrics of the module's own `on_train_epoch_end`, which comes later."""
        self.note(**self._new_metrics(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the metrics of one validation: an epoch may have several."""
        if not trainer.sanity_checking:
            self.note(**self._new_metrics(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Mark the epoch; its validation, if it has one, has run."""
        self.epoch(**self._new_metrics(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the last metrics, and end the watch."""
        self.note(**self._new_metrics(trainer))
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch; all that was recorded stays."""
        self.end(exception)

    def _new_metrics(self, trainer: Any) -> dict[str, Tensor]:
        """Return the metrics that were computed since the last look.

        Lightning keeps all others, in the same tensors: of a validation some epochs ago, say.
        """
        seen, self._seen = self._seen, dict(trainer.callback_metrics)
        return {_NAMES.get(k, k): v for k, v in self._seen.items() if v is not seen.get(k)}
