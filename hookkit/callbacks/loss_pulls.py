"""Whether a loss only pulls outputs of the model together, so that equal outputs are its best.

Builds on `autograd_graph`. Such a loss compares outputs with outputs: both sides get a gradient,
no target takes part, and nothing keeps samples apart (negatives, a stopped gradient, a variance).
The graph is followed from the loss down, with the sign of each term; at the first operation that is
not known here the answer is no.
"""

from __future__ import annotations

from typing import Any

from hookkit.autograd_graph import SAME_VALUES, first_input, op_name, shape_of, takes_one

_PARTS = SAME_VALUES | {"Slice", "Select", "Split", "SplitWithSizes", "Chunk", "Unbind", "Narrow"}
_RISING = _PARTS | {"Mean", "Sum", "Add", "Expand", "LogSigmoid", "Softplus", "Sqrt"}
"""Operations whose results rise with what they are given."""

_FALLING = frozenset(("Neg", "Rsub"))
_LENGTHS = frozenset(("LinalgVectorNorm", "Norm"))
_SIZES = _LENGTHS | {"Pow", "Abs"}
_DISTANCES = frozenset(("MseLoss", "SmoothL1Loss", "HuberLoss"))
_LAYERS = frozenset(
    (
        *("Addmm", "Mm", "Bmm", "Convolution", "Embedding"),
        *("NativeLayerNorm", "NativeBatchNorm", "Relu", "Tanh"),
    )
)
"""What gives a model's output."""

_PULLS, _PUSHES = 1, -1


def only_pulls(loss: Any) -> str:
    """In words, what a loss (its `grad_fn`) pulls together and nothing keeps apart; "" if not so.

    >>> import torch
    >>> net, x, y = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 3)
    >>> only_pulls((net(x) - net(y)).pow(2).mean().grad_fn)
    'two outputs of shape (4, 2)'
    >>> only_pulls((net(x) - net(y).detach()).pow(2).mean().grad_fn)
    ''
    """
    pairs: list[tuple[int, tuple[int, ...]]] = []  # which way each goes, and its shape
    todo: list[tuple[Any, int]] = [(loss, _PULLS)]
    while todo:
        node, sign = todo.pop()
        if 0 in shape_of(node):
            continue  # an empty part: no negatives at all
        if (terms := _terms(node, sign)) is not None:
            todo += terms
        elif (pair := _pair(node, sign)) is not None:
            pairs.append(pair)
        else:
            return ""
    pulls = bool(pairs) and all(way == _PULLS for way, _ in pairs)
    return f"two outputs of shape {pairs[0][1]}" if pulls else ""


def _terms(node: Any, sign: int) -> list[tuple[Any, int]] | None:
    """What `node` rises or falls with, and which way; None if it does something else."""
    name, inputs = op_name(node), _inputs(node)
    if name in _FALLING:
        return [(before, -sign) for before in inputs]
    if name in _RISING or (name in ("Mul", "Div") and len(inputs) == 1):
        return [(before, sign) for before in inputs]
    if name == "Sub" and len(inputs) == 2 and len(shape_of(node)) < 2:
        return [(inputs[0], sign), (inputs[1], -sign)]
    if name == "Sub" and not shape_of(node):
        return [(inputs[0], sign)]  # a number is subtracted; from more than one, a target may be
    return None


def _pair(node: Any, sign: int) -> tuple[int, tuple[int, ...]] | None:
    """The way in which `node` compares two outputs, and their shape; None if it does not."""
    name, sides = op_name(node), _inputs(node)
    if name in _SIZES:
        within = first_input(node)
        while op_name(within) == "Add" and takes_one(within):  # an eps
            within = first_input(within)
        sides = _inputs(within) if op_name(within) == "Sub" else []
    elif name == "Mul":
        sign = -sign
    elif name not in _DISTANCES:
        return None
    shape = shape_of(sides[0]) if len(sides) == 2 else ()
    alike = len(shape) > 1 and shape[-1] > 1 and shape_of(sides[1]) == shape
    return (sign, shape) if alike and all(map(_is_output, sides)) else None


def _inputs(node: Any) -> list[Any]:
    """The nodes whose results `node` takes."""
    return [before for before, _ in node.next_functions if before is not None]


def _is_output(node: Any) -> bool:
    """Whether a layer gives it, normed or not."""
    for _ in range(8):
        if op_name(node) in _LAYERS:
            return True
        if not (op_name(node) in _PARTS or _is_normed(node)):
            return False
        node = first_input(node)
    return False


def _is_normed(node: Any) -> bool:
    """Whether `node` divides by a length."""
    if op_name(node) != "Div" or takes_one(node):
        return op_name(node) == "Div"
    length = node.next_functions[1][0]
    while op_name(length) in ("Expand", "Clone", "ClampMin", "Add"):
        length = first_input(length)
    return op_name(length) in _LENGTHS
