"""Read the autograd graph of a loss: which of PyTorch's losses it is, and mistakes in it.

Builds on `_core/graph.py`. It reads operations and the shapes of their results, never values. The
walk goes from the root of a loss back to the last layers of the model, and stops there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookkit._core.graph import (
    PARTS,
    SAME_ORDER,
    SAME_VALUES,
    first_input,
    only_input,
    op_name,
    saved,
    shape_of,
    softmax_dim,
    source,
    walk,
)

_LOSSES = {
    "NllLoss": "nll_loss",
    "NllLoss2D": "nll_loss",
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "BinaryCrossEntropy": "binary_cross_entropy",
    "MseLoss": "mse_loss",
    "HuberLoss": "huber_loss",
    "SmoothL1Loss": "smooth_l1_loss",
}
_OF_LOGARITHMS = ("NllLoss", "NllLoss2D", "CtcLoss")
_DIFFERENCES = ("MseLoss", "HuberLoss", "SmoothL1Loss", "Sub")
_LAYERS = frozenset(
    (
        *("Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Convolution"),
        *("NativeLayerNorm", "NativeBatchNorm", "Embedding", "EmbeddingBag"),
    )
)
_GIVES_SCORES = _LAYERS | {"Relu", "Gelu", "Silu", "Tanh"}
"""Operations whose results can be above 0, so they are not logarithms of probabilities."""

_CLAMPS = frozenset(("Clamp", "ClampMin", "ClampMax"))
_ADDS = SAME_VALUES | {"Add", "Sum", "Mean", "Stack", "Cat"}
_SUMS = frozenset(("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Minimum", "Maximum", "Relu"))


def loss_facts(root: Any) -> dict[str, Any]:
    """Return facts about the loss whose `grad_fn` is `root`, before or after its backward pass.

    Returns:
        Those of these keys that apply:

        loss_func: the function, if the loss is the mean of one of PyTorch's losses.
        n_classes: the size of the classes' dimension, if it is a cross entropy.
        loss_input: `"Softmax"` or `"Sigmoid"` if a loss that applies this function gets its result;
            `"probabilities"` or `"scores"` if a loss that expects logarithms of probabilities gets
            these.
        softmax_dim: in words, if the softmax before the loss is not over the classes.
        broadcast: in words, if a column is compared with, or multiplied by, each element of a row,
            and only the mean or sum of all pairs is used.

    >>> import torch
    >>> scores, y = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2])
    >>> loss_facts(torch.nn.functional.cross_entropy(scores.softmax(1)[:2], y).grad_fn)
    {'loss_func': 'cross_entropy', 'n_classes': 3, 'loss_input': 'Softmax'}
    """
    facts = _identity(root)
    # the terms of the loss: nodes that are only added, scaled or clipped after them
    hands_on = SAME_VALUES | _SUMS | _CLAMPS
    terms = [n for n, _ in walk([root], lambda n: _scales(n) or op_name(n) in hands_on)]
    averaged = {first_input(term) for term in terms if op_name(term) in ("Pow", "Abs", "Mul")}
    for node in terms:
        if _given_to_kl(node) in ("Softmax", "probabilities"):
            facts["loss_input"] = "probabilities"
        if op_name(node) == "Mul" and (shapes := _all_with_all(node)):
            facts["broadcast"] = "{} is multiplied by {}, which makes {}".format(*shapes)
    for node, _ in walk([root], lambda node: op_name(node) not in _LAYERS):
        if (name := op_name(node)) in _LAYERS:
            continue
        if wrong := _wrong_input(node):
            facts["loss_input"] = wrong
        if name in _OF_LOGARITHMS and (dim := _wrong_dim(node)):
            facts["softmax_dim"] = dim
        compares = name in _DIFFERENCES and (name != "Sub" or node in averaged)
        if compares and (shapes := _all_with_all(node)):
            facts["broadcast"] = "{} is compared with {}, which makes {}".format(*shapes)
    return facts


FOUND = "hookkit: the loss that the model returned"
"""Key in a node's metadata for the indices of its outputs that are a returned loss."""


def is_found(loss: Tensor) -> bool:
    """Return whether a model returned the loss (see `FOUND`), or all its terms, up to factors.

    >>> import torch
    >>> own, other = (torch.ones(2, requires_grad=True).mean() for _ in range(2))
    >>> own.grad_fn.metadata[FOUND] = {own.output_nr}
    >>> is_found(own / 2), is_found(own + 0.1 * other), is_found(-own)
    (True, False, False)
    """
    todo: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    while todo:
        node, number = todo.pop()
        if number in node.metadata.get(FOUND, ()):
            continue
        name, inputs = op_name(node), list(node.next_functions)
        if name == "_DDPSink":  # DistributedDataParallel's identity: follow this output only
            inputs = inputs[number : number + 1]
        elif name in ("Mul", "Div", "Sub"):  # only with a number as the other operand
            if only_input(node) is None or (name != "Mul" and first_input(node) is None):
                return False
        elif name not in _ADDS | _CLAMPS | {"NanToNum", "Where"}:
            return False
        todo += [(before, i) for before, i in inputs if before is not None]
    return True


def _identity(root: Any) -> dict[str, Any]:
    """Return `loss_func` and `n_classes`, if the loss is one of PyTorch's own."""
    node = source(root, _same_values) if _same_values(root) else root
    name = op_name(node)
    # 1 is "mean"; if the reduction is not known, a sum passes for a mean
    if name in _LOSSES and saved(node, "reduction") in (1, None):
        known = _LOSSES[name]
        if known != "nll_loss":
            return {"loss_func": known}
        scores, shape = source(node, _same_values), shape_of(first_input(node))
        known = "cross_entropy" if op_name(scores) == "LogSoftmax" else known
        classes = {"n_classes": shape[min(1, len(shape) - 1)]} if shape else {}
        return {"loss_func": known, **classes}
    inner = first_input(node) if name == "Mean" else None
    if inner is not None and op_name(first_input(inner)) == "Sub":  # written by hand
        squared = op_name(inner) == "Pow" and saved(inner, "exponent") == 2
        known = "mse_loss" if squared else "l1_loss" if op_name(inner) == "Abs" else ""
        return {"loss_func": known} if known else {}
    return {}


def _scales(node: Any) -> bool:
    """Return whether a node multiplies or divides by something without a gradient."""
    return op_name(node) in ("Mul", "Div") and only_input(node) is not None


def _same_values(node: Any) -> bool:
    return op_name(node) in SAME_VALUES


def _same_kind(node: Any) -> bool:
    """Return whether a node turns probabilities into probabilities, and scores into scores."""
    return op_name(node) in SAME_VALUES | PARTS | _CLAMPS


def _kind(node: Any) -> str:
    """Return the kind of a node's result: `"Softmax"`, `"Sigmoid"`, `"scores"`, or ""."""
    name = op_name(node)
    if name == "Softmax" or (name == "Exp" and op_name(first_input(node)) == "LogSoftmax"):
        return "Softmax"
    if name == "Add":  # a layer adds its bias separately if its input is not contiguous
        name = op_name(source(node, _same_values))
    return "Sigmoid" if name == "Sigmoid" else "scores" if name in _GIVES_SCORES else ""


def _wrong_input(node: Any) -> str:
    """Return `loss_input` for one operation of a loss."""
    name = op_name(node)
    if name in _OF_LOGARITHMS:
        given = _kind(source(node, _same_kind))
        return "probabilities" if given in ("Softmax", "Sigmoid") else given
    if name not in ("LogSoftmax", "BinaryCrossEntropyWithLogits"):
        return ""
    # skip a division by a temperature, as in distillation
    divides = name == "LogSoftmax"
    given = _kind(source(node, lambda n: _same_kind(n) or (divides and _scales(n))))
    return given if given in ("Softmax", "Sigmoid") else ""


def _given_to_kl(total: Any) -> str:
    """Return the kind of the first input of `F.kl_div`, if `total` is its sum or mean.

    It computes t log(t) - t x. The first operand of the difference needs no gradient.
    """
    parts = first_input(total)
    if op_name(parts) != "Sub" or first_input(parts) is not None:
        return ""
    product = parts.next_functions[1][0]
    given = only_input(product) if op_name(product) == "Mul" else None
    return _kind(source(given, _same_kind) if _same_kind(given) else given)


def _wrong_dim(loss: Any) -> str:
    """Return in words which wrong dimension the softmax before `loss` is over; or ""."""
    # only through operations that keep the order of dimensions
    node = source(loss, lambda node: op_name(node) in SAME_ORDER)
    shape, dim = shape_of(node), softmax_dim(node)
    if op_name(node) != "LogSoftmax" or not shape or dim is None:
        return ""
    right = 1 if op_name(loss) == "NllLoss2D" else len(shape) - 1
    dim %= len(shape)
    return f"over dimension {dim} of {shape}" if dim != right else ""


def _all_with_all(node: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of both operands and the result, if (n, 1, …) and (n, …) make (n, n, …).

    One operand, the targets, needs no gradient. If both need one, as in a ranking loss, or if a
    dimension was added, as in x[:, None] - y, all pairs are intended.
    """
    before = only_input(node)
    expands = op_name(before) == "Expand"
    whole, before = (shape_of(before), first_input(before)) if expands else (shape_of(node), before)
    given = shape_of(before)
    n, rest = (given or (0,))[0], given[1:]
    other = (n, *rest[1:]) if rest[:1] == (1,) else (n, 1, *rest)
    pairs = (n, n, *(rest[1:] if rest[:1] == (1,) else rest))
    wrong = n > 1 and whole == pairs and op_name(before) != "Unsqueeze"
    return (given, other, whole) if wrong else ()
