"""ignite: `HookkitHandler(ActivationStats()).attach(trainer, model, opt)`.

Batches and steps are seen by `watch`; the engine tells the epochs, and the loss if that is its
`process_function`'s output.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import Bridge, needs


class HookkitHandler(Bridge):
    """Drives hookkit's callbacks in an ignite Engine that trains.

    Args:
        callbacks: hookkit's, as for `watch`.
    """

    def attach(self, engine: Any, model: Any, opt: Any = None) -> HookkitHandler:
        """Adds the handlers to `engine`; the handler itself.

        Raises:
            MissingExtraError: ignite is not installed.
        """
        try:
            from ignite.engine import Events
        except ImportError:
            raise needs("pytorch-ignite") from None

        def on_error(engine: Any, error: BaseException) -> None:
            self.end(error)
            # ignite takes an exception with a handler as dealt with: only others may say so
            if len(engine._event_handlers[Events.EXCEPTION_RAISED]) == 1:
                raise error

        engine.add_event_handler(Events.STARTED, lambda engine: self.begin(model, opt))
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._on_iteration)
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: self.epoch())
        engine.add_event_handler(Events.COMPLETED, lambda engine: self.end())
        engine.add_event_handler(Events.EXCEPTION_RAISED, on_error)
        return self

    def _on_iteration(self, engine: Any) -> None:
        out = engine.state.output
        out = out.get("loss") if isinstance(out, dict) else out
        if isinstance(out, (float, Tensor)):
            self.loss(out)
