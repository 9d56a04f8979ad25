"""Hugging Face: `Trainer(..., callbacks=[HookkitCallback(ActivationStats(every=10))])`.

`watch` sees batches, steps and the loss; the Trainer reports epochs and evaluations.
"""

from __future__ import annotations

from typing import Any

from hookkit.bridges import Bridge, base

_Callback: Any = base("transformers", "transformers.TrainerCallback")


class HookkitCallback(Bridge, _Callback):  # type: ignore[misc]
    """Runs hookkit's callbacks in a Hugging Face Trainer.

    The Trainer has no callback for exceptions: after one the hooks stay until the next `train()` or
    `end()`. `with watch(trainer.model, None, …): trainer.train()` has no such gap.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the watch."""
        opt = kwargs.get("optimizer")
        self.begin(kwargs["model"], opt, int(state.epoch or 0), state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the epoch."""
        self.epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the numbers of an evaluation to the epoch: `eval_loss` as `valid_loss`."""
        found = {k.removeprefix("eval_"): v for k, v in kwargs.get("metrics", {}).items()}
        self.note(**{"valid_loss" if k == "loss" else k: v for k, v in found.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch."""
        self.end()
