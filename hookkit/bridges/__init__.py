"""Conveniences for training libraries. None is required: `watch` works around each of them.

    with watch(trainer.model, None, ActivationStats()) as w:
        trainer.train()

Give no optimizer: the one that the library makes is found when it steps the model's parameters. A
bridge adds what a library reports and PyTorch does not: where epochs end, the loss, the metrics.

    library        bridge                                                        around
    accelerate     none: watch(model, opt) takes prepared objects and plain      your loop
    Lightning      lightning.HookkitCallback(*cbs), a callback of the Trainer    trainer.fit
    Hugging Face   transformers.HookkitCallback(*cbs), one of the Trainer        trainer.train
    ignite         ignite.HookkitHandler(*cbs).attach(engine, model, opt)        engine.run
    skorch         skorch.HookkitCallback(*cbs), a callback of the net           net.partial_fit
    fastai         fastai.HookkitCallback(*cbs), a callback of the Learner       (OptimWrapper only)

Each bridge has `.watcher`, its `Watcher`: `bridge.watcher.diagnose()`. If a library has no callback
for exceptions (Hugging Face, skorch, fastai), the hooks of a training that raised stay until the
next one begins or until `bridge.end()`; a `with watch(…)` around the call removes them at once.
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

__all__ = ["Bridge", "base", "needs"]


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

    def begin(self, model: Any, opt: Any = None) -> None:
        """A training begins. If it is of the same model as the last one, it is appended to that."""
        self.end()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = watch(model, opt, *self.callbacks)
        else:
            self._watcher.follow(opt)
        self._watcher.start()

    def epoch(self, **values: Any) -> None:
        """An epoch ends; `values` are its numbers."""
        if self._watcher is not None:
            self._watcher.epoch()
            self.note(**values)

    def note(self, **values: Any) -> None:
        """Adds numbers to the last epoch; the library's own `epoch` and `step` as `logged_…`."""
        if self._watcher is not None:
            self._watcher.note(
                **{f"logged_{k}" if k in COUNTED else k: v for k, v in values.items()}
            )

    def loss(self, loss: Any) -> None:
        """Reports the loss of the current batch, if it is one number."""
        if self._watcher is not None and getattr(loss, "numel", lambda: 1)() == 1:
            self._watcher.loss(loss)

    def end(self, error: BaseException | None = None) -> None:
        """The training is over."""
        if self._watcher is not None:
            self._watcher.stop(error)


def base(package: str, *names: str) -> Any:
    """The first of these classes that is installed, to inherit from.

    If none is, a class that cannot be instantiated: its error says how to install `package`.

    >>> base("hookkit", "no_such_library.Callback", "hookkit.callbacks.Callback").__name__
    'Callback'
    """
    for name in names:
        module, _, cls = name.rpartition(".")
        with suppress(ImportError):
            return getattr(import_module(module), cls)

    class Missing:
        def __init__(self) -> None:
            raise needs(package)

    return Missing


def needs(package: str) -> MissingExtraError:
    """The error for a bridge whose library is not installed.

    >>> needs("skorch")
    MissingExtraError('this bridge needs skorch, which is not installed: pip install skorch')
    """
    return MissingExtraError(
        f"this bridge needs {package}, which is not installed: pip install {package}"
    )
