"""Callbacks for Lightning and for the Hugging Face Trainer. Neither is needed: `watch` works around
both, as around every loop (`docs/how-to/loops.md`).

    with watch(trainer.model, None, ActivationStats()) as w:
        trainer.train()

Give no optimizer: the one that the library makes is found when it steps the model's parameters. A
bridge adds what a library reports and PyTorch does not: where epochs end, the loss, the metrics,
and the numbers of epochs and steps in a training that is resumed.

lightning       `HookkitCallback(*callbacks)`, a callback of the Trainer.
transformers    `HookkitCallback(*callbacks)`, a callback of the Trainer.

Both have `.watcher`, their `Watcher`: `bridge.watcher.diagnose()`.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from hookkit.callbacks import Callback
from hookkit.checks import shown
from hookkit.errors import ArgumentError, HookError, MissingExtraError
from hookkit.watching import Watcher, watch
from hookkit.watching.checks import COUNTED

__all__ = ["Bridge"]


class Bridge:
    """Begins, marks and ends a `Watcher`, when a library calls its own callbacks.

    Args:
        callbacks: hookkit's, as for `watch`.

    Attributes:
        callbacks: as given.

    Raises:
        ArgumentError: one of `callbacks` is not a hookkit callback.
        MissingExtraError: the library is not installed.
    """

    def __init__(self, *callbacks: Any) -> None:
        super().__init__()  # of the library's own class, see `base`
        for cb in callbacks:
            if not issubclass(cb if isinstance(cb, type) else type(cb), Callback):
                raise ArgumentError(
                    f"{type(self).__name__}: expected callbacks of hookkit, found {shown(cb)}. "
                    f"Give each by itself, such as ActivationStats(), ParamStats()."
                )
        self.callbacks = callbacks
        self._watcher: Watcher | None = None

    @property
    def watcher(self) -> Watcher:
        """The `Watcher`: `run_record()`, `diagnose()`, `report()`, the callbacks by name.

        Raises:
            HookError: no training has begun.
        """
        if self._watcher is None:
            raise HookError(
                f"{type(self).__name__}.watcher: no training has begun. Give this callback to the "
                f"trainer and train, then read it."
            )
        return self._watcher

    def begin(self, model: Any, opt: Any = None, epoch: int = 0, step: int = 0) -> None:
        """A training begins. If it is of the same model as the last one, it is appended to that.

        Args:
            model, opt: as for `watch`.
            epoch, step: the library's first ones: not 0 if the training is resumed.
        """
        self.end()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = watch(model, opt, *self.callbacks)
            self._watcher.loop.number_from(step, epoch)
        else:
            self._watcher.follow(opt)
        self._watcher.start()

    def epoch(self, **values: Any) -> None:
        """An epoch ends; `values` are its numbers."""
        self.watcher.epoch()
        self.note(**values)

    def note(self, **values: Any) -> None:
        """Adds numbers to the last epoch of a training under way; does nothing after it.

        The library's own `epoch` and `step` are added as `logged_…`.
        """
        if self._watcher is not None and self._watcher.loop.fitting:
            self._watcher.note(
                **{f"logged_{k}" if k in COUNTED else k: v for k, v in values.items()}
            )

    def end(self, error: BaseException | None = None) -> None:
        """The training is over."""
        if self._watcher is not None:
            self._watcher.stop(error)


def base(package: str, *names: str) -> Any:
    """The first of these classes that is installed, to inherit from; its error says how to get one.

    >>> base("hookkit", "no_such_library.Callback", "hookkit.callbacks.Callback").__name__
    'Callback'
    """
    for name in names:
        module, _, cls = name.rpartition(".")
        with suppress(ImportError):
            return getattr(import_module(module), cls)

    class Missing:
        def __init__(self) -> None:
            raise MissingExtraError(
                f"this bridge needs {package}, which is not installed: pip install {package}"
            )

    return Missing
