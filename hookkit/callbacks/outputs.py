"""What a classifier's scores look like: how many classes, and whether they are probabilities.

Looked at once a fit, on the scores' own device; the host reads the answer when somebody asks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookkit.autograd_graph import VIEWS, first_input, op_name
from hookkit.hooks.snapshot import is_transforming


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
    """`loss_func` and `loss_input` of a loss as autograd knows them; {} of any other.

    Some five nodes of its graph are looked at, also after backward(); nothing is kept.

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
    if name is None or getattr(node, "_saved_reduction", 1) != 1:  # a sum is no measure
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
    """The first batch of what a model feeds to a cross entropy.

    Args:
        loss_func: the loss; of others than cross entropies only probabilities are told, and those
            only where None was named.
        pred: (n, n_classes, …) floats, or anything else, which tells nothing.
        fed: `pred` is what the loss is given. What a model returns need not be: with three
            dimensions it may be flattened first, and classes may be the last of them.

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
        by_class &= not name.startswith(("binary", "poisson", "gaussian"))  # columns of their own
        by_class &= getattr(loss_func, "reduction", "mean") == "mean"  # else ln C is no measure
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
    """About so many values: logits of a language model in float32 may not fit the device twice."""
    some = pred[: max(_MANY // max(pred[0].numel(), 1), 1)]
    if not fed and pred.ndim == 3:
        some = some[:, : max(_MANY // max(len(some) * pred.shape[2], 1), 1)]
    return some
