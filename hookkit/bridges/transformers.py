"""Hugging Face: `Trainer(..., callbacks=[HookkitCallback(ActivationStats(every=10))])`.

Batches, steps and the loss are seen by `watch`; the Trainer tells epochs and evaluations.
"""

from __future__ import annotations

from typing import Any

from . import Bridge, base, needs

_Callback: Any = base("transformers.TrainerCallback")


class HookkitCallback(Bridge, _Callback):  # type: ignore[misc]
    """Drives hookkit's callbacks in a Hugging Face Trainer.

    The Trainer says nothing of an exception: after one the hooks stay until the next `train()` or
    `end()`. `with watch(trainer.model, None, …): trainer.train()` has no such gap.

    Args:
        callbacks: hookkit's, as for `watch`.

    Raises:
        MissingExtraError: transformers is not installed.
    """

    def __init__(self, *callbacks: Any) -> None:
        if _Callback is object:
            raise needs("transformers")
        super().__init__(*callbacks)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins."""
        self.begin(kwargs["model"], kwargs.get("optimizer"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Marks the epoch."""
        self.epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the numbers of an evaluation with the epoch: `eval_loss` as `valid_loss`."""
        found = {k.removeprefix("eval_"): v for k, v in kwargs.get("metrics", {}).items()}
        self.note(**{"valid_loss" if k == "loss" else k: v for k, v in found.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends."""
        self.end()
