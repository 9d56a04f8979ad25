"""What a classifier's scores look like: how many classes, and whether they are probabilities.

Looked at once a fit, on the scores' own device; the host reads the answer when somebody asks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def loss_name(loss_func: Any) -> str | None:
    """A loss function's name, else its class's.

    >>> loss_name(torch.nn.functional.cross_entropy), loss_name(torch.nn.MSELoss()), loss_name(None)
    ('cross_entropy', 'MSELoss', None)
    """
    if loss_func is None:
        return None
    name = getattr(loss_func, "__name__", None)
    return name if isinstance(name, str) else type(loss_func).__name__


class Scores:
    """The first batch of what a model feeds to a cross entropy.

    Args:
        loss_func: the loss; others than cross entropies have no classes, and tell nothing.
        pred: (n, n_classes, …) floats, or anything else, which tells nothing.

    >>> Scores(torch.nn.CrossEntropyLoss(), torch.full((2, 4), 0.25)).read()
    {'n_classes': 4, 'output_is_probabilities': True}
    >>> Scores(torch.nn.MSELoss(), torch.ones(2, 4)).read()
    {}
    """

    def __init__(self, loss_func: Any, pred: Any) -> None:
        self.n_classes: int | None = None
        name = (loss_name(loss_func) or "").lower().replace("_", "")
        scores = isinstance(pred, Tensor) and pred.ndim >= 2 and pred.is_floating_point()
        by_class = "crossentropy" in name or "nll" in name
        by_class &= getattr(loss_func, "reduction", "mean") == "mean"  # else ln C is no measure
        if scores and by_class and pred.numel():
            with torch.no_grad():
                p = pred.detach().float()
                self.n_classes = p.shape[1]
                self._positive = (p >= 0).all()
                self._off_one = (p.sum(1) - 1).abs().amax()

    def read(self) -> dict[str, Any]:
        """`n_classes` and `output_is_probabilities`, or nothing. Reads the device once."""
        if self.n_classes is None:
            return {}
        is_one = bool(self._positive and self._off_one < 1e-3)  # sync: one per read-out
        return {"n_classes": self.n_classes, "output_is_probabilities": is_one}
