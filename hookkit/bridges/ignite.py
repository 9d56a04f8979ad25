"""ignite: `HookkitHandler(ActivationStats()).attach(trainer, model, opt)`.

`watch` sees batches and steps; the engine reports the epochs, and the loss if its
`process_function` returns it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookkit.bridges import Bridge, needs


class HookkitHandler(Bridge):
    """Runs hookkit's callbacks in an ignite Engine that trains."""

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
            # ignite does not raise an exception that has a handler: raised here if it has no other
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
