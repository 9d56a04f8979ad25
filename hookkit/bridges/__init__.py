"""Conveniences for training libraries. None is needed: `watch` works around each of them as it is.

    with watch(trainer.model, None, ActivationStats()) as w:
        trainer.train()

Give no optimizer: the one that the library makes is found when it steps the model's parameters. A
bridge only adds what a library tells and PyTorch does not: where epochs end, the loss, the metrics.

    library        bridge                                                        around
    accelerate     none: watch(model, opt) takes prepared objects and plain      your loop
    Lightning      lightning.HookkitCallback(*cbs), a callback of the Trainer    trainer.fit
    Hugging Face   transformers.HookkitCallback(*cbs), one of the Trainer        trainer.train
    ignite         ignite.HookkitHandler(*cbs).attach(engine, model, opt)        engine.run
    skorch         skorch.HookkitCallback(*cbs), a callback of the net           net.partial_fit
    fastai         fastai.HookkitCallback(*cbs), a callback of the Learner       (OptimWrapper only)

Each bridge has `.watcher`, the `Watcher` it drives: `bridge.watcher.diagnose()`. Where a library
says nothing of an exception (Hugging Face, skorch, fastai), the hooks of a training that raised
stay until the next one begins or `bridge.end()`; a `with` around the call has no such gap.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from ..callbacks import Callback
from ..errors import ArgumentError, HookError, MissingExtraError
from ..watching import Watcher, watch
from ..watching.checks import COUNTED

__all__ = ["Bridge", "base", "needs"]


class Bridge:
    """Begins, marks and ends a `Watcher`, as a library's own callbacks tell it.

    Args:
        callbacks: hookkit's, as for `watch`.

    Attributes:
        callbacks: as given.

    Raises:
        ArgumentError: one of `callbacks` is none of hookkit's.
    """

    def __init__(self, *callbacks: Any) -> None:
        for cb in callbacks:
            if not issubclass(cb if isinstance(cb, type) else type(cb), Callback):
                raise ArgumentError(
                    f"{type(self).__name__} was given {cb!r:.60}, which is no callback of "
                    f"hookkit's. Give such as ActivationStats(), each by itself."
                )
        self.callbacks = callbacks
        self._watcher: Watcher | None = None

    @property
    def watcher(self) -> Watcher:
        """What follows the training: `run()`, `diagnose()`, `report()`, the callbacks by name.

        Raises:
            HookError: no training has begun.
        """
        if self._watcher is None:
            raise HookError(
                f"{type(self).__name__}.watcher was asked for; no training has begun. Give it to "
                f"the trainer and train, then read it."
            )
        return self._watcher

    def begin(self, model: Any, opt: Any = None) -> None:
        """A training begins. One that went before on the same model is appended to."""
        self.end()
        if self._watcher is None or self._watcher.model is not model:
            self._watcher = watch(model, opt, *self.callbacks)
        else:
            self._watcher.follow(opt)
        self._watcher.start()

    def epoch(self, **values: Any) -> None:
        """An epoch ends."""
        if self._watcher is not None:
            self._watcher.epoch()
            self.note(**values)

    def note(self, **values: Any) -> None:
        """Numbers of the last epoch; the library's own `epoch` and `step` as `logged_…`."""
        if self._watcher is not None:
            self._watcher.note(
                **{f"logged_{k}" if k in COUNTED else k: v for k, v in values.items()}
            )

    def loss(self, loss: Any) -> None:
        """The loss of the batch at hand, if it is one number."""
        if self._watcher is not None and getattr(loss, "numel", lambda: 1)() == 1:
            self._watcher.loss(loss)

    def end(self, error: BaseException | None = None) -> None:
        """The training is over."""
        if self._watcher is not None:
            self._watcher.stop(error)


def base(*names: str) -> Any:
    """The first of these classes that is installed, to inherit from; `object` if none is.

    >>> base("no_such_library.Callback", "hookkit.callbacks.Callback").__name__
    'Callback'
    """
    for name in names:
        module, _, cls = name.rpartition(".")
        with suppress(ImportError):
            return getattr(import_module(module), cls)
    return object


def needs(package: str) -> MissingExtraError:
    """The error for a bridge whose library is not installed.

    >>> needs("skorch")
    MissingExtraError('this bridge needs skorch, which is not installed: pip install skorch')
    """
    return MissingExtraError(
        f"this bridge needs {package}, which is not installed: pip install {package}"
    )
