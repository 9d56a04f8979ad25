"""`LossFacts`: which of PyTorch's losses it is, of how many classes, and what it is given.

Builds on `loss_graph`. The facts of a `Run` that rules of `diagnose` need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.autograd_graph import graph_nodes
from hookkit.callbacks.loss_graph import loss_by_graph
from hookkit.hooks.snapshot import is_transforming


def loss_name(loss_func: Any) -> str | None:
    """A loss function's name, else its class's; None for None."""
    if loss_func is None:
        return None
    name = getattr(loss_func, "__name__", None)
    return name if isinstance(name, str) else type(loss_func).__name__


class LossFacts:
    """What the first batch says of the loss, its scores and its graph; later batches are ignored.

    >>> facts = LossFacts()
    >>> facts.see_scores(torch.nn.CrossEntropyLoss(), torch.full((2, 4), 0.25)); facts.read()
    {'n_classes': 4, 'output_is_probabilities': True}
    """

    def __init__(self) -> None:
        self._sizes: list[int] | None = None  # of the scores' dimensions that may be the classes
        self._by_class = False
        self._by_graph: dict[str, Any] | None = None
        self._by_root: dict[str, Any] | None = None
        self._root: tuple[Tensor, int] | None = None  # its value, and its batch
        self._number: tuple[Tensor, int] | None = None

    def see_loss(self, loss: Tensor, own: Iterable[Tensor] = ()) -> None:
        """Reads the graph of a loss: see `loss_by_graph`, and `others_weights` beside `own`."""
        if self._by_graph is None:
            self._by_graph = _facts_of(loss, own)
            self._by_class |= self._by_graph.get("loss_func") in ("cross_entropy", "nll_loss")

    def see_root(self, root: Tensor, own: Iterable[Tensor], batch: int, named: bool) -> None:
        """Reads the graph of what backward() is called on, which may be another number.

        A loss that is divided (by the batches of a step), scaled or a part of the reported one
        shows its mistakes all the same; what it is, and how high chance is, is taken from it only
        if it has the value that is reported for its `batch` (see `see_number`). `named`: the user
        has said what it is.
        """
        if self._by_root is None:
            self._by_root = _facts_of(root, own)
            if named:
                self._by_root.pop("loss_func", None)
            self._root = root.detach().sum().clone(), batch

    def see_number(self, loss: Tensor, batch: int) -> None:
        """Notes the first loss that is reported in the batch of the root, or before it is seen."""
        if self._root is None or (self._number is None and self._root[1] == batch):
            self._number = loss, batch

    def see_scores(self, loss_func: Any, pred: Any, fed: bool = True) -> None:
        """Looks at a classifier's scores, without reading from the device.

        Args:
            loss_func: the loss. For losses other than cross entropies only
                `output_is_probabilities` is reported, and only if no loss function was given.
            pred: (n, n_classes, …) floats; anything else is ignored.
            fed: `pred` is the loss's own input. The model's output may be flattened before the
                loss, so that of its three dimensions the last may be the classes.
        """
        if self._sizes is not None:
            return
        self._sizes = []
        by_class = _is_by_class(loss_func)
        self._by_class |= by_class
        if not (_are_scores(pred) and (by_class or (loss_func is None and not fed))):
            return
        dims = [1] if fed or pred.ndim == 2 else [1, pred.ndim - 1]
        with torch.no_grad():
            p = _some(pred.detach(), fed).float()
            self._sizes = [pred.shape[d] for d in dims]
            self._positive = (p >= 0).all()
            self._off_one = torch.stack([(p.sum(d) - 1).abs().amax() for d in dims])

    def read(self) -> dict[str, Any]:
        """`loss_func`, `n_classes` and the other facts that are known; reads the device."""
        return {**self._of_scores(), **self._of_root(), **(self._by_graph or {})}

    def _of_root(self) -> dict[str, Any]:
        facts = dict(self._by_root or {})
        if not self._is_reported():
            for name in _OF_ITS_SIZE:
                facts.pop(name, None)
            if not facts.get("loss_input"):
                facts.pop("loss_input", None)
        return facts

    def _is_reported(self) -> bool:
        """Whether what backward() was called on is what was reported for that batch."""
        if self._root is None or self._number is None or self._root[1] != self._number[1]:
            return False
        root, number = (float(t) for t, _ in (self._root, self._number))  # sync: one per read-out
        return abs(root - number) <= _SAME * abs(root)

    def _of_scores(self) -> dict[str, Any]:
        if not self._sizes:
            return {}
        off_one = self._off_one.tolist() if self._positive else []  # sync: one per read-out
        hit = [n for n, off in zip(self._sizes, off_one, strict=False) if off < 1e-3 and n > 1]
        known = hit[-1:] or (self._sizes if len(self._sizes) == 1 else [])
        if not self._by_class:
            return {"output_is_probabilities": True} if hit else {}
        classes = {"n_classes": known[0]} if known else {}
        return {**classes, "output_is_probabilities": bool(hit)}

    def __getstate__(self) -> dict[str, Any]:
        return {k: _on_cpu(v) for k, v in vars(self).items()}


def others_weights(loss: Tensor, own: Iterable[Tensor]) -> int:
    """How many parameters beside `own` take part in a loss: those of a discriminator or a critic.

    0 where none of `own` does, as under FSDP, which computes with parameters of its own. Cost: one
    walk through the graph, on the host alone.

    >>> import torch
    >>> net, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    >>> others_weights(critic(net(torch.ones(4, 2))).mean(), net.parameters())
    2
    """
    known = {id(p) for p in own}
    held = [node.variable for node, _ in graph_nodes(loss) if hasattr(node, "variable")]
    others = {id(p) for p in held if isinstance(p, nn.Parameter)} - known
    return len(others) if any(id(p) in known for p in held) else 0


_OF_ITS_SIZE = ("loss_func", "chance", "chance_of_shares", "n_classes")
"""Facts from which follows how high a loss should be."""

# Relative: a loss may have been rounded to four digits, or computed in half precision
_SAME = 2e-3


def _facts_of(loss: Tensor, own: Iterable[Tensor]) -> dict[str, Any]:
    facts = loss_by_graph(loss)
    if n_others := others_weights(loss, own):
        facts["others_weights"] = n_others
    return facts


def _on_cpu(kept: Any) -> Any:
    """A tensor, or one in a pair, where any machine can load it."""
    if isinstance(kept, tuple):
        return tuple(map(_on_cpu, kept))
    return kept.cpu() if isinstance(kept, Tensor) else kept


def _is_by_class(loss_func: Any) -> bool:
    """Whether a loss has a column for each class, and is a mean, to compare with ln C."""
    name = (loss_name(loss_func) or "").lower().replace("_", "")
    by_class = "crossentropy" in name or "nll" in name
    no_classes = name.startswith(("binary", "poisson", "gaussian"))
    return by_class and not no_classes and getattr(loss_func, "reduction", "mean") == "mean"


def _are_scores(pred: Any) -> bool:
    if not (isinstance(pred, Tensor) and pred.ndim >= 2 and pred.is_floating_point()):
        return False
    whole = pred.layout is torch.strided and not pred.is_nested and pred.numel() > 0
    return whole and not is_transforming()  # torch.func's values end with it


_MANY = 1 << 22


def _some(pred: Tensor, fed: bool) -> Tensor:
    """About `_MANY` values: a language model's logits in float32 may not fit the device twice."""
    some = pred[: max(_MANY // max(pred[0].numel(), 1), 1)]
    if not fed and pred.ndim == 3:
        some = some[:, : max(_MANY // max(len(some) * pred.shape[2], 1), 1)]
    return some
