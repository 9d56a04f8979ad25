"""skorch: `NeuralNetClassifier(..., callbacks=[HookkitCallback(ActivationStats())])`.

`watch` sees batches and steps; skorch reports the epochs, the loss and the epoch's scores.
"""

from __future__ import annotations

from typing import Any

from hookkit.bridges import Bridge, base

_Callback: Any = base("skorch", "skorch.callbacks.Callback")


class HookkitCallback(Bridge, _Callback):  # type: ignore[misc]
    """Runs hookkit's callbacks in a skorch net.

    skorch has no callback for exceptions other than Ctrl-C: after one the hooks stay until the next
    `fit` or `end()`.
    """

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """None: scikit-learn has nothing to search over. A clone shares this callback."""
        return {}

    def __sklearn_clone__(self) -> HookkitCallback:
        return self

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Begins."""
        self.begin(net.module_, net.optimizer_)

    def on_batch_end(
        self, net: Any, batch: Any = None, training: Any = None, **kwargs: Any
    ) -> None:
        """Reports the loss."""
        if training and kwargs.get("loss") is not None:
            self.loss(kwargs["loss"])

    def on_epoch_end(
        self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **kwargs: Any
    ) -> None:
        """Marks the epoch, with its numbers from skorch's history."""
        row = net.history[-1]
        self.epoch(**{k: row[k] for k in ("valid_loss", "valid_acc", "dur") if k in row})

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Ends; also after Ctrl-C."""
        self.end()
