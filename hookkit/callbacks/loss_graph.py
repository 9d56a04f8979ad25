"""What the autograd graph of a loss shows: which of PyTorch's losses it is, and mistakes in it.

Builds on `autograd_graph`. All facts are exact: they are read from the operations and from the
shapes of their results, never from values. Nothing is kept of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from hookkit.autograd_graph import (
    SAME_ORDER,
    SAME_VALUES,
    first_input,
    graph_nodes,
    op_name,
    shape_of,
    softmax_dim,
    takes_one,
)
from hookkit.callbacks.loss_pulls import only_pulls

_LOSSES = {
    "NllLoss": "nll_loss",
    "NllLoss2D": "nll_loss",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "BinaryCrossEntropy": "binary_cross_entropy",
    "MseLoss": "mse_loss",
    "HuberLoss": "huber_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "CtcLoss": "ctc_loss",
}
_LIKELIHOODS = ("NllLoss", "NllLoss2D", "CtcLoss")
"""Losses that expect logarithms of probabilities."""

_DIFFERENCES = ("MseLoss", "HuberLoss", "SmoothL1Loss", "Sub")

_SIZES = ("Pow", "Abs", "Mul")
"""Operations that make the size of an error of a difference: its square or absolute value."""

_LAYERS = frozenset(
    (
        *("Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Convolution"),
        *("NativeLayerNorm", "NativeBatchNorm", "Embedding", "EmbeddingBag"),
    )
)
"""Operations of a model: what is behind them is no part of the loss."""

_GIVES_SCORES = _LAYERS | {"Relu", "Gelu", "Silu", "Tanh"}
"""Operations whose results are no logarithms of probabilities, since they can be above 0."""


def loss_by_graph(loss: Tensor) -> dict[str, Any]:
    """What is known of a loss that autograd computed, after backward() too; {} for any other.

    Returns:
        Of these, what applies:

        loss_func: the function, if the loss is the mean of one of PyTorch's own.
        chance: the loss of guessing, ln C, where that is known; of a sum, that of its terms.
        n_classes: the size of the classes' dimension, of such a cross entropy.
        loss_input: `"Softmax"` or `"Sigmoid"` where a loss that applies its own is given what one
            of them gives; `"scores"` where one that expects logarithms of probabilities is given
            what a layer gives, `"probabilities"` where a KL divergence is given those; else `""`.
            Of a sum of losses, that of any of its terms.
        softmax_dim: in words, where the softmax before the loss is not over the classes.
        broadcast: in words, where one column is compared with each element of a row.
        pulls: in words, what it pulls together and nothing keeps apart (see `only_pulls`).

    >>> import torch
    >>> scores, y = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2])
    >>> loss_by_graph(torch.nn.functional.cross_entropy(scores.softmax(1), y))
    {'chance': 1.0986..., 'loss_func': 'cross_entropy', 'n_classes': 3, 'loss_input': 'Softmax'}
    """
    found: dict[str, Any] = {}
    top = loss.grad_fn
    if op_name(top) in SAME_VALUES:
        top = _before(top)
    if own := _by_hand(top):
        found |= {"loss_func": own, "loss_input": ""}
    if chance := _chance(loss.grad_fn):
        found["chance"] = chance
    if loss.grad_fn is not None and (pulled := only_pulls(loss.grad_fn)):
        found["pulls"] = pulled
    for given in filter(None, map(_of_divergence, _terms(loss.grad_fn))):
        if _is_softmax(given):
            found["loss_input"] = "probabilities"
        elif op_name(_unscaled(given)) in _GIVES_SCORES:
            found["loss_input"] = "scores"
    averaged = {first_input(term) for term in _terms(loss.grad_fn) if op_name(term) in _SIZES}
    for node in _nodes_of_loss(loss):
        name = op_name(node)
        if node is top and _is_mean(node):
            found |= _of_one(node)
        if given := _given_wrongly(node, name):
            found["loss_input"] = given
        if name in _LIKELIHOODS and (dim := _wrong_dim(node, name)):
            found["softmax_dim"] = dim
        if name in _DIFFERENCES and (pair := _broadcast(node, name != "Sub" or node in averaged)):
            found["broadcast"] = pair
    return found


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


def _nodes_of_loss(loss: Tensor) -> Iterator[Any]:
    """The operations between the model's last layers and the loss."""
    todo: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []  # a number has no graph
    seen = {*todo}
    while todo:
        node = todo.pop()
        if op_name(node) not in _LAYERS:
            yield node
            inputs = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= inputs
            todo += inputs


def _chance(top: Any) -> float:
    """What guessing gives: the sum of ln C of a loss's terms; 0 if one of them is none of those.

    The terms are means of PyTorch's cross entropies, binary (C = 2) or not, and are only added, or
    averaged: by what several are divided is taken to be their number.
    """
    averaged = op_name(top) == "Div" and takes_one(top)
    total, n, todo = 0.0, 0, [first_input(top) if averaged else top]
    while todo:
        node = todo.pop()
        if op_name(node) == "Add":  # `sum(losses)` adds a 0, which is no part
            todo += [before for before, _ in node.next_functions if before is not None]
            continue
        binary = _is_mean(node) and op_name(node).startswith("BinaryCrossEntropy")
        classes = 2 if binary else _of_one(node).get("n_classes", 0) if _is_mean(node) else 0
        if classes < 2:
            return 0.0
        total, n = total + math.log(classes), n + 1
    return (total / n if n > 1 else 0.0) if averaged else total


def _by_hand(top: Any) -> str:
    """The name of the loss that a mean of squared or absolute differences is."""
    if op_name(top) != "Mean":
        return ""
    inner = first_input(top)
    # Private: `_saved_exponent` of a power, since 1.9. Without it such a loss has no name.
    squared = op_name(inner) == "Pow" and getattr(inner, "_saved_exponent", 0) == 2
    name = "mse_loss" if squared else "l1_loss" if op_name(inner) == "Abs" else ""
    return name if op_name(first_input(inner)) == "Sub" else ""


def _is_mean(node: Any) -> bool:
    # Private: `_saved_reduction`, the loss's `reduction` as its node keeps it (since 1.9); 1 is the
    # mean. A sum grows with the batch, so that it has no level to compare with. Without the
    # attribute a sum is taken for a mean.
    return op_name(node) in _LOSSES and getattr(node, "_saved_reduction", 1) == 1


def _of_one(node: Any) -> dict[str, Any]:
    """`loss_func`, `loss_input`, and `n_classes` of a cross entropy."""
    name, before = _LOSSES[op_name(node)], _before(node)
    if name != "nll_loss":
        return {"loss_func": name, "loss_input": ""}
    shape = shape_of(first_input(node))
    classes = {"n_classes": shape[min(1, len(shape) - 1)]} if shape else {}
    name = "cross_entropy" if op_name(before) == "LogSoftmax" else name
    return {"loss_func": name, **classes, "loss_input": ""}


def _given_wrongly(node: Any, name: str) -> str:
    """`loss_input` for one operation of a loss."""
    if name not in ("LogSoftmax", "BinaryCrossEntropyWithLogits", *_LIKELIHOODS):
        return ""
    before = _before(node)
    given = "Softmax" if _is_softmax(before) else op_name(before)
    if given in ("Softmax", "Sigmoid"):
        return given
    if name == "LogSoftmax":  # divided by a temperature, as a distillation does
        return "Softmax" if op_name(_before(node, scaled=True)) == "Softmax" else ""
    if name in _LIKELIHOODS and given == "Add":  # of a bias, where the input is not contiguous
        given = op_name(_before(before))
    return "scores" if name in _LIKELIHOODS and given in _GIVES_SCORES else ""


def _is_softmax(node: Any) -> bool:
    """Whether a node gives probabilities: a softmax, or exp of a log softmax."""
    by_log = op_name(node) == "Exp" and op_name(first_input(node)) == "LogSoftmax"
    return by_log or op_name(node) == "Softmax"


def _terms(top: Any) -> Iterator[Any]:
    """The operations of a loss that are only added up and scaled on the way to it."""
    todo, seen = [top] if top is not None else [], {top}  # None: a leaf
    while todo:
        node = todo.pop()
        yield node
        scaled = op_name(node) in ("Mul", "Div") and takes_one(node)
        if scaled or op_name(node) in SAME_VALUES or op_name(node) in ("Add", "Sum", "Mean"):
            new = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= new
            todo += new


def _of_divergence(total: Any) -> Any:
    """What `F.kl_div` is given as logarithms, if `total` is its sum or mean; else None.

    It computes t log(t) - t x. The first part of the difference needs no gradient.
    """
    parts = first_input(total)
    if op_name(parts) != "Sub" or first_input(parts) is not None:
        return None
    by_target = parts.next_functions[1][0]
    if op_name(by_target) != "Mul" or not takes_one(by_target):
        return None
    return next(before for before, _ in by_target.next_functions if before is not None)


def _before(node: Any, scaled: bool = False) -> Any:
    """The node whose output is the first input of `node`, behind views and factors."""
    return next((b for b in _behind(node) if not _only_passes_on(b, scaled)), None)


def _unscaled(node: Any) -> Any:
    """`node`, or what it makes views of, or scales."""
    return node if not _only_passes_on(node, scaled=True) else _before(node, scaled=True)


def _only_passes_on(node: Any, scaled: bool) -> bool:
    by_factor = scaled and op_name(node) in ("Mul", "Div") and takes_one(node)
    return by_factor or op_name(node) in SAME_VALUES


def _behind(node: Any) -> Iterator[Any]:
    """The first inputs of a node, of that, and so on."""
    for _ in range(8):
        node = first_input(node)
        if node is None:
            return
        yield node


def _wrong_dim(loss: Any, name: str) -> str:
    """In words, if the softmax before a likelihood is not over the dimension of its classes."""
    for node in _behind(loss):
        if op_name(node) == "LogSoftmax":
            shape, dim = shape_of(node), softmax_dim(node)
            if not shape or dim is None:
                return ""
            right = 1 if name == "NllLoss2D" else len(shape) - 1
            dim %= len(shape)
            return f"over dimension {dim} of {shape}" if dim != right else ""
        if op_name(node) not in SAME_ORDER:
            return ""  # dimensions may have changed places
    return ""


def _broadcast(node: Any, averaged: bool) -> str:
    """In words, if `node` compares (n, 1, …) with (n, …), which makes (n, n, …).

    The targets need no gradient. Where both sides do, as in a ranking loss, all pairs are meant; so
    they are where rows of numbers are compared and the result is not merely averaged.
    """
    before = first_input(node)
    expands = op_name(before) == "Expand"
    whole, before = (shape_of(before), first_input(before)) if expands else (shape_of(node), before)
    given = shape_of(before)
    n, rest = (given or (0,))[0], given[1:]
    other = (n, *rest[1:]) if rest[:1] == (1,) else (n, 1, *rest)
    pairs = (n, n, *(rest[1:] if rest[:1] == (1,) else rest))
    if n < 2 or whole != pairs or not takes_one(node) or not (averaged or len(whole) == 2):
        return ""
    return f"{given} is compared with {other}, which makes {whole}"
