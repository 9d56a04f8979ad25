"""Training over several processes, on accelerate's engine: what `Learner.distrib_ctx` does.

Launching is `accelerate launch` or `torchrun`; DDP, FSDP, mixed precision and gradient accumulation
are the Accelerator's. Here the Learner's model, optimizer and loaders are only replaced by prepared
ones, and restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hookkit.callbacks import Callback
from hookkit.errors import missing_extra
from hookkit.interrupts import block


class AccelerateCallback(Callback):
    """Makes an optimizer step only where accelerate wants one: not for each accumulated batch."""

    order = -8
    run_valid = False
    _context: Any = None

    def before_batch(self) -> None:
        """Opens accelerate's accumulation context."""
        accelerator = self.learn.accelerator
        self._context = accelerator.accumulate(self.learn.model)
        self._context.__enter__()
        self.learn.steps_now = accelerator.sync_gradients

    def after_batch(self) -> None:
        """Closes it."""
        self.cleanup_fit()

    def cleanup_fit(self) -> None:
        """Closes the context if it is open."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
            self.learn.steps_now = True


@block
def distributed(learn: Any, accelerator: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Yields `learn` with model, optimizer and loaders prepared by accelerate; restores them."""
    try:
        from accelerate import Accelerator
    except ImportError:
        raise missing_extra("accelerate", "distributed", "train over several processes") from None
    engine = Accelerator(**options) if accelerator is None else accelerator
    learn._needs_data("distrib_ctx")
    if learn.opt is None:
        learn.create_opt()
    plain = learn.opts[0]
    loaders, device, logger = list(learn.dls.loaders), learn.dls.device, learn.logger
    try:
        learn.accelerator, learn.dls.device = engine, engine.device
        learn.model, learn.opt = engine.prepare(learn.model, plain)
        learn.dls.loaders = [None if dl is None else engine.prepare(dl) for dl in loaders]
        if not engine.is_main_process:
            learn.logger = lambda row: None
        with learn.added_cbs(AccelerateCallback()):
            yield learn
    finally:
        learn.model = engine.unwrap_model(learn.model, keep_fp32_wrapper=False)
        learn.opt, learn.accelerator, learn.logger = plain, None, logger
        learn.dls.loaders, learn.dls.device = loaders, device
