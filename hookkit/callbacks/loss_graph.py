"""What the autograd graph of a loss shows: which of PyTorch's losses it is, and mistakes in it.

Builds on `autograd_graph`, `loss_pulls` and `loss_shapes`. All facts are exact: they are read from
the operations and from the shapes of their results, never from values. Nothing of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hookkit.autograd_graph import (
    SAME_VALUES,
    behind,
    first_input,
    only_input,
    op_name,
    saved,
    shape_of,
    softmax_dim,
    takes_one,
)
from hookkit.callbacks.loss_pulls import only_pulls
from hookkit.callbacks.loss_shapes import outer, wrong_dim

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

_SUMS = frozenset(("Add", "Sub", "Rsub", "Neg", "Sum", "Mean"))

_CLIPS = frozenset(("Minimum", "Maximum", "Clamp", "ClampMin", "ClampMax", "Relu"))

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
        chance_of_shares: the same of a cross entropy whose targets are shares of classes; larger
            if they are counts.
        n_classes: the size of the classes' dimension, of such a cross entropy.
        loss_input: `"Softmax"` or `"Sigmoid"` where a loss that applies its own is given what one
            of them gives; `"scores"` where one that expects logarithms of probabilities is given
            what a layer gives, `"probabilities"` where a KL divergence is given those; else `""`.
            Of a sum of losses, that of any of its terms.
        softmax_dim: in words, where the softmax before the loss is not over the classes.
        broadcast: in words, where one column is compared with each element of a row.
        outer_product: in words, where each number of a column is multiplied by n others and only
            the sum or mean of all is used.
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
    elif classes := _soft_classes(loss.grad_fn):
        found["chance_of_shares"] = math.log(classes)
    if loss.grad_fn is not None and (pulled := only_pulls(loss.grad_fn)):
        found["pulls"] = pulled
    terms = [*_terms(loss.grad_fn)]
    found |= _of_terms(terms)
    for node in _nodes_of_loss(loss):
        if node is top and _is_mean(node):
            found |= _of_one(node)
        found |= _of_operation(node, terms)
    return found


def _of_terms(terms: list[Any]) -> dict[str, Any]:
    """`loss_input` and `outer_product`, as far as the operations next to the loss say."""
    found = {}
    for term in terms:
        given = _of_divergence(term)
        if _is_softmax(given):
            found["loss_input"] = "probabilities"
        elif op_name(_unscaled(given)) in _GIVES_SCORES:
            found["loss_input"] = "scores"
        if op_name(term) == "Mul" and (shapes := outer(term)):
            found["outer_product"] = f"{shapes[0]} is multiplied to {shapes[2]}"
    return found


def _of_operation(node: Any, terms: list[Any]) -> dict[str, Any]:
    """`loss_input`, `softmax_dim` and `broadcast` of one operation of a loss."""
    name, found = op_name(node), dict[str, Any]()
    if wrong := _given_wrongly(node, name):
        found["loss_input"] = wrong
    if name in _LIKELIHOODS and (dim := wrong_dim(node, name)):
        found["softmax_dim"] = dim
    if name in _DIFFERENCES and (shapes := outer(node)):
        left, right, whole = shapes
        averaged = any(op_name(term) in _SIZES and first_input(term) is node for term in terms)
        on_purpose = op_name(only_input(node)) == "Unsqueeze"  # pairs, x[:, None] - y
        if name != "Sub" or averaged or (len(whole) == 2 and not on_purpose):
            found["broadcast"] = f"{left} is compared with {right}, which makes {whole}"
    return found


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


def _soft_classes(top: Any) -> int:
    """Over how many classes a cross entropy with shares of them as targets is; 0 of all else.

    It is the mean of what log_softmax times the targets adds up to over the classes, or the sum of
    all divided by a number, which is taken to be that of the samples.
    """
    above: list[str] = []
    node = top
    while op_name(node) in ("Neg", "Mean", "Div") and takes_one(node) and len(above) < 3:
        above.append(op_name(node))
        node = only_input(node)
    product = only_input(node) if op_name(node) == "Sum" else None
    scores = only_input(product) if op_name(product) == "Mul" else None
    if op_name(scores) != "LogSoftmax":
        return 0
    over, shape, classes = saved(node, "dim"), shape_of(scores), softmax_dim(scores)
    if not shape or classes is None:
        return 0
    by_sample = (
        "Mean" in above
        and over is not None
        and {d % len(shape) for d in over} == {classes % len(shape)}
    )
    return shape[classes] if by_sample or ("Div" in above and over is None) else 0


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
    """The operations whose results are only added, scaled and clipped on the way to a loss."""
    todo, seen = [top] if top is not None else [], {top}  # None: a leaf
    while todo:
        node = todo.pop()
        yield node
        scaled = op_name(node) in ("Mul", "Div") and takes_one(node)
        if scaled or op_name(node) in SAME_VALUES | _SUMS | _CLIPS:
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
    return only_input(by_target) if op_name(by_target) == "Mul" else None


def _before(node: Any, scaled: bool = False) -> Any:
    """The node whose output is the first input of `node`, behind views and factors."""
    return next((b for b in behind(node) if not _only_passes_on(b, scaled)), None)


def _unscaled(node: Any) -> Any:
    """`node`, or what it makes views of, or scales."""
    return node if not _only_passes_on(node, scaled=True) else _before(node, scaled=True)


def _only_passes_on(node: Any, scaled: bool) -> bool:
    by_factor = scaled and op_name(node) in ("Mul", "Div") and takes_one(node)
    return by_factor or op_name(node) in SAME_VALUES
