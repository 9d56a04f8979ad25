"""Losses: by batch and by optimizer step, which of PyTorch's they are, and what they are given.

Builds on torch alone. Everything is kept on the losses' own device; the host reads it on
demand. So recording costs about a microsecond a batch and no synchronisation.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookkit.autograd_graph import VIEWS, first_input, op_name
from hookkit.hooks.snapshot import is_transforming

Floats = npt.NDArray[np.float64]

_PACK = 1024  # 0-d tensors kept before they are packed: each holds 512 bytes on a GPU


class Scalars:
    """Numbers as they come, kept on their device until read.

    >>> s = Scalars()
    >>> s.append(torch.tensor(2.0)); s.append(3.0)
    >>> len(s), s.read()
    (2, array([2., 3.]))
    """

    def __init__(self) -> None:
        self._host = array("d")
        self._packed: list[Tensor] = []
        self._loose: list[Tensor] = []
        self._n = 0

    def append(self, value: Tensor | float) -> None:
        """Adds one number, or the mean of a tensor of several."""
        t = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        self._loose.append(t.mean() if t.ndim else t)
        self._n += 1
        if len(self._loose) >= _PACK:
            self._pack()

    def _pack(self) -> None:
        self._packed.append(torch.stack(self._loose).double())
        self._loose = []

    def read(self, start: int = 0) -> Floats:
        """(n − start,) float64 on the host: all numbers from `start` on."""
        if self._loose:
            self._pack()
        for t in self._packed:
            self._host.extend(t.cpu().tolist())  # sync: one per read-out
        self._packed = []
        return np.array(self._host[start:], dtype=np.float64)

    def __len__(self) -> int:
        return self._n

    def __getstate__(self) -> dict[str, Any]:
        self.read()  # a pickle loads on any machine
        return {**vars(self), "_host": self._host[:]}


class LossHistory:
    """The training loss of each batch, and the optimizer step that the batch is for.

    >>> losses = LossHistory()
    >>> for step, loss in (0, 4.0), (0, 2.0), (2, 1.0):
    ...     losses.begin(step); losses.put(torch.tensor(loss))
    >>> losses.by_batch(), losses.by_step(3)
    (array([4., 2., 1.]), array([ 3., nan,  1.]))
    >>> for loss in 0.5, 0.25:
    ...     losses.begin(3); losses.put(torch.tensor(loss), share=True)
    >>> losses.by_step(4)[3]
    np.float64(0.75)
    """

    def __init__(self) -> None:
        self._values, self._steps = Scalars(), array("q")
        self._guesses, self._shares = array("q"), array("q")  # which batches, see `put`
        # of the current batch; None while it has no loss
        self._step, self._now, self._guess, self._share = 0, None, False, False
        self._device: torch.device | None = None

    _now: Tensor | None

    def begin(self, step: int) -> None:
        """A batch begins; `step` is the optimizer step it is for."""
        if self._now is not None:
            if self._guess:
                self._guesses.append(len(self._steps))
            if self._share:
                self._shares.append(len(self._steps))
            self._values.append(self._now)
            self._steps.append(self._step)
        self._step, self._now = step, None

    def put(self, loss: Tensor, guess: bool = False, share: bool = False) -> None:
        """The batch's loss; a second one, also after the step, replaces the first.

        Args:
            loss: one number, or several, whose mean it is then. Detached, not copied.
            guess: it may be something else: it does not count if others are known for certain.
            share: the losses of a step's batches add up to the step's; else that is their mean.
        """
        device = loss.device
        if self._device is None:
            self._device = device
        self._now = (loss if device == self._device else loss.to(self._device)).detach()
        self._guess, self._share = guess, share

    def drop(self) -> None:
        """The current batch does not count."""
        self._now = None

    def by_batch(self, start: int = 0) -> Floats:
        """(n − start,) float64 on the host: the batches' losses from batch `start` on."""
        self.begin(self._step)
        return self._values.read(start)

    def steps(self) -> npt.NDArray[np.int64]:
        """(n,) int64: the optimizer step of each batch whose loss is known."""
        self.begin(self._step)
        return np.array(self._steps, np.int64)

    def by_step(self, n_steps: int) -> Floats:
        """(n_steps,) float64 on the host: each step's loss, NaN if none of its batches' is known.

        Sync: one per 1024 losses.
        """
        losses, steps = self.by_batch(), self.steps()
        guessed, shares = np.zeros((2, len(steps)), np.bool_)
        guessed[self._guesses] = shares[self._shares] = True
        taken = steps < n_steps  # no step has followed the batches at the end
        taken &= ~guessed | guessed.all()
        counts = np.bincount(steps[taken], minlength=n_steps)
        added = np.bincount(steps[taken & shares], minlength=n_steps) > 0
        totals = np.bincount(steps[taken], losses[taken], n_steps)
        with np.errstate(invalid="ignore"):
            return np.asarray(totals / np.where(added, 1, counts), np.float64)

    def __len__(self) -> int:
        return len(self._steps) + (self._now is not None)

    def __getstate__(self) -> dict[str, Any]:
        now = None if self._now is None else self._now.cpu()  # a pickle loads on any machine
        return {**vars(self), "_now": now, "_device": None}


def loss_name(loss_func: Any) -> str | None:
    """A loss function's name, else its class's.

    >>> loss_name(torch.nn.functional.cross_entropy), loss_name(torch.nn.MSELoss()), loss_name(None)
    ('cross_entropy', 'MSELoss', None)
    """
    if loss_func is None:
        return None
    name = getattr(loss_func, "__name__", None)
    return name if isinstance(name, str) else type(loss_func).__name__


_LOSSES = {
    "NllLoss": "nll_loss",
    "NllLoss2D": "nll_loss",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "BinaryCrossEntropy": "binary_cross_entropy",
    "MseLoss": "mse_loss",
    "HuberLoss": "huber_loss",
    "SmoothL1Loss": "smooth_l1_loss",
}
_VIEWS = VIEWS | {"Clone", "ToCopy"}


def loss_by_graph(loss: Tensor) -> dict[str, str]:
    """`loss_func` and `loss_input` of a loss that autograd computed; {} for any other.

    Reads about five nodes of its graph, also after backward(); keeps none.

    >>> scores, y = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2])
    >>> loss_by_graph(torch.nn.functional.cross_entropy(scores.softmax(1), y))
    {'loss_func': 'cross_entropy', 'loss_input': 'Softmax'}
    >>> loss_by_graph(torch.nn.functional.mse_loss(scores, torch.ones(2, 3)))
    {'loss_func': 'mse_loss', 'loss_input': ''}
    >>> loss_by_graph(scores.mean())
    {}
    """
    node = loss.grad_fn
    if op_name(node) in _VIEWS:
        node = _before(node)
    name = _LOSSES.get(op_name(node))
    # Private: `_saved_reduction`, the loss's `reduction` as its node keeps it (since 1.9); 1 is the
    # mean. A sum grows with the batch, so that it has no level to compare with. Without the
    # attribute a sum is taken for a mean.
    if name is None or getattr(node, "_saved_reduction", 1) != 1:
        return {}
    node = _before(node)
    if name == "nll_loss" and op_name(node) == "LogSoftmax":
        name, node = "cross_entropy", _before(node)
    given = op_name(node)
    return {"loss_func": name, "loss_input": given if given in ("Softmax", "Sigmoid") else ""}


def _before(node: Any) -> Any:
    """The node whose output is the first input of `node`, behind views."""
    for _ in range(8):
        node = first_input(node)
        if node is None or op_name(node) not in _VIEWS:
            return node
    return None


class Scores:
    """What a classifier's scores look like: how many classes, and whether they are probabilities.

    Args:
        loss_func: the loss. For losses other than cross entropies only `output_is_probabilities` is
            reported, and only if no loss function was given.
        pred: (n, n_classes, …) floats, the first batch; anything else is ignored.
        fed: `pred` is the loss's own input. If it is the model's output instead, it may be
            flattened before the loss, so that of three dimensions the last may be the classes.

    >>> Scores(torch.nn.CrossEntropyLoss(), torch.full((2, 4), 0.25)).read()
    {'n_classes': 4, 'output_is_probabilities': True}
    >>> Scores(torch.nn.MSELoss(), torch.ones(2, 4)).read()
    {}
    >>> Scores(torch.nn.functional.cross_entropy, torch.full((2, 3, 5), 0.2), fed=False).read()
    {'n_classes': 5, 'output_is_probabilities': True}
    """

    def __init__(self, loss_func: Any, pred: Any, *, fed: bool = True) -> None:
        self.sizes: list[int] = []
        name = (loss_name(loss_func) or "").lower().replace("_", "")
        scores = isinstance(pred, Tensor) and pred.ndim >= 2 and pred.is_floating_point()
        scores = scores and pred.layout is torch.strided and not pred.is_nested
        scores = scores and not is_transforming()  # torch.func's values end with it
        by_class = "crossentropy" in name or "nll" in name
        # whose columns are no classes
        by_class &= not name.startswith(("binary", "poisson", "gaussian"))
        # else the loss is no mean, and not comparable with the ln C of a guess
        by_class &= getattr(loss_func, "reduction", "mean") == "mean"
        self.by_class = by_class
        if scores and pred.numel() and (by_class or (loss_func is None and not fed)):
            dims = [1] if fed or pred.ndim == 2 else [1, pred.ndim - 1]
            with torch.no_grad():
                p = _some(pred.detach(), fed).float()
                self.sizes = [pred.shape[d] for d in dims]
                self._positive = (p >= 0).all()
                self._off_one = torch.stack([(p.sum(d) - 1).abs().amax() for d in dims])

    def __getstate__(self) -> dict[str, Any]:
        return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in vars(self).items()}

    def read(self) -> dict[str, Any]:
        """`n_classes` and `output_is_probabilities`, as far as known. Reads the device once."""
        if not self.sizes:
            return {}
        off_one = self._off_one.tolist() if self._positive else []  # sync: one per read-out
        hit = [n for n, off in zip(self.sizes, off_one, strict=False) if off < 1e-3 and n > 1]
        known = hit[-1:] or (self.sizes if len(self.sizes) == 1 else [])
        if not self.by_class:
            return {"output_is_probabilities": True} if hit else {}
        classes = {"n_classes": known[0]} if known else {}
        return {**classes, "output_is_probabilities": bool(hit)}


_MANY = 1 << 22


def _some(pred: Tensor, fed: bool) -> Tensor:
    """About `_MANY` values: a language model's logits in float32 may not fit the device twice."""
    some = pred[: max(_MANY // max(pred[0].numel(), 1), 1)]
    if not fed and pred.ndim == 3:
        some = some[:, : max(_MANY // max(len(some) * pred.shape[2], 1), 1)]
    return some
