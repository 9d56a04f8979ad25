"""The losses of a loop that is not ours: found in what a model returns, kept on their device.

Builds on `recorder.Scalars`: nothing is read by the host before somebody asks. `Criterion` finds
them in a loss function that is a module.
"""

from __future__ import annotations

from array import array
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookkit.callbacks.outputs import Scores
from hookkit.callbacks.recorder import Scalars
from hookkit.errors import ArgumentError
from hookkit.hooks.entries import attach, in_thread
from hookkit.nested import named_leaves
from hookkit.records import Floats
from hookkit.watching.checks import tell_no_loss, tell_twice


def loss_in(output: Any) -> tuple[Tensor | None, bool]:
    """The loss that a model returned by itself, and whether that is only a guess.

    It is the output, or its `loss`, or as a guess the only scalar with a gradient among others.

    >>> x = torch.ones(2, requires_grad=True)
    >>> loss_in({"logits": x, "loss": x.sum()}), loss_in((x, x.sum()))[1], loss_in(x)
    ((tensor(2., grad_fn=<SumBackward0>), False), True, (None, False))
    """
    if isinstance(output, Tensor):
        return output if output.dim() == 0 and output.requires_grad else None, False
    scalars = {p: t for p, t in named_leaves(output) if t.dim() == 0 and t.requires_grad}
    for path in (".loss", "['loss']"):
        if path in scalars:
            return scalars[path], False
    return next(iter(scalars.values())) if len(scalars) == 1 else None, True


def one_number(loss: Any) -> Tensor:
    """`loss` as a 0-d tensor, still in its graph.

    Raises:
        ArgumentError: it is not one real number.
    """
    try:
        value = loss if isinstance(loss, Tensor) else torch.as_tensor(loss)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(
            f"w.loss needs the batch's loss as one number, and was given {type(loss).__name__}. "
            f"Give the tensor you call backward() on, or a float."
        ) from None
    if value.numel() != 1 or value.is_complex():
        raise ArgumentError(
            f"w.loss needs the batch's loss as one number, and was given a tensor of shape "
            f"{tuple(value.shape)}{' of complex numbers' * value.is_complex()}. Reduce it first, "
            f"as in w.loss(loss.mean())."
        )
    return value if value.dim() == 0 else value.reshape(())


class LossTape:
    """The loss of each batch, kept on its device until read. Guesses count if there is no other.

    >>> tape = LossTape()
    >>> for step, loss in (0, 4.0), (0, 2.0), (2, 1.0):
    ...     tape.begin(step); tape.put(torch.tensor(loss))
    >>> tape.read(3)
    array([ 3., nan,  1.])
    >>> for loss in 0.5, 0.25:
    ...     tape.begin(3); tape.put(torch.tensor(loss), share=True)
    >>> tape.read(4)[3]
    np.float64(0.75)
    """

    def __init__(self) -> None:
        self._values, self._steps = Scalars(), array("q")
        self._guessed, self._shares = array("b"), array("b")
        self._step, self._now, self._guess = 0, None, False  # type: tuple[int, Tensor | None, bool]
        self._share = False
        self._device: torch.device | None = None

    @property
    def empty(self) -> bool:
        """Whether no batch has had a loss."""
        return self._now is None and not self._steps

    def begin(self, step: int) -> None:
        """A batch begins; `step` is the optimizer step it is for."""
        if self._now is not None:
            self._values.append(self._now)
            self._steps.append(self._step)
            self._guessed.append(self._guess)
            self._shares.append(self._share)
        self._step, self._now = step, None

    def put(self, loss: Tensor, guess: bool = False, share: bool = False) -> None:
        """The batch's loss; a second one, also after the step, takes the place of the first.

        Args:
            loss: 0-d.
            guess: it may be something else.
            share: the losses of a step's batches add up to the step's; else that is their mean.
        """
        self._device = self._device or loss.device
        self._now, self._guess, self._share = loss.to(self._device), guess, share

    def drop(self) -> None:
        """The batch does not count."""
        self._now = None

    def read(self, n_steps: int) -> Floats:
        """(n_steps,) float64 on the host: each step's loss, NaN if none of its batches' is known.

        Sync: one per 1024 losses.
        """
        self.begin(self._step)
        steps, losses = np.array(self._steps, np.int64), self._values.read()
        guessed, shares = np.array(self._guessed, bool), np.array(self._shares, bool)
        taken = steps < n_steps  # a batch at the end that no step followed
        taken &= ~guessed | guessed.all()
        counts = np.bincount(steps[taken], minlength=n_steps)
        added = np.bincount(steps[taken & shares], minlength=n_steps) > 0
        totals = np.bincount(steps[taken], losses[taken], n_steps)
        with np.errstate(invalid="ignore"):
            return np.asarray(totals / np.where(added, 1, counts))

    def __getstate__(self) -> dict[str, Any]:
        now = None if self._now is None else self._now.cpu()  # a pickle loads on any machine
        return {**vars(self), "_now": now, "_device": None}


class Criterion:
    """The user's loss function, if it is a module: what it gives is told as the batch's loss.

    Attributes:
        twice: it was called again within a batch, whose loss is then the last call's alone.

    Args:
        loop: the followed loop, which is told.
        loss_func: anything; what is no module cannot be watched.
    """

    def __init__(self, loop: Any, loss_func: Any) -> None:
        self.loop, self.loss_func, self.twice = loop, loss_func, False
        self._handle: Any = None
        self._thread: int | None = None
        self._last: Tensor | None = None

    def attach(self) -> None:
        """Begins to listen."""
        self._thread = get_ident()
        if isinstance(self.loss_func, nn.Module):
            self._handle = attach(self.loss_func, self._after)

    def tell(self) -> bool:
        """Warns of losses that it could not see, or not whole; whether there was a cause to."""
        missing = self.loss_func is not None and self.loop.n_steps and self.loop.losses.empty
        if missing:
            tell_no_loss(self.loss_func)
        elif self.twice:
            tell_twice(self.loss_func)
        return bool(missing or self.twice)

    def remove(self) -> None:
        """Ends it."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._last = None

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        loop = self.loop
        if torch.compiler.is_compiling() or not loop.training or not in_thread(self._thread):
            return
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            self.twice |= loop.loss is not None and loop.loss is self._last
            loop.report_loss(one_number(output))
            self._last = loop.loss
            if loop.scores is None and args:
                loop.scores = Scores(module, args[0])
