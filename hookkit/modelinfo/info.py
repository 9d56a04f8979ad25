"""What a model has and what its layers return: counts, output sizes, features.

fastai's helpers by name (`fastai.callback.hook`, `fastai.layers`), on any `nn.Module`: Linear,
convolutions of any dimension, grouped and transposed, recurrent nets, embeddings. Shapes come from
a run on fake tensors (`tracing`), so modes, random states and buffers stay as they are and nothing
is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from hookkit.checks import check_module
from hookkit.errors import ModelRunError, OptionError
from hookkit.modelinfo import sandbox
from hookkit.modelinfo.first_layer import (
    checked_sides,
    doubled,
    dummy_input,
    first_layer,
    input_dims,
)
from hookkit.modelinfo.tracer import Trace
from hookkit.modelinfo.tracing import trace
from hookkit.modelinfo.tree import Tree, numel
from hookkit.modules import children, unwrap
from hookkit.nested import Inputs, describe, leaves

_SMALLEST = 64  # pixels a side of the first try
_TOO_SMALL = (
    "size is too small",
    "Kernel size can't be greater",
    "should be at least",
    "must be >=",
)
_LARGEST = 512


class Partly(float):
    """A share of trainable parameters between none and all: true, and shown as such.

    >>> Partly(0.25), bool(Partly(0.25)), f"{Partly(0.25):.2f}"
    (partly (25%), True, '0.25')
    """

    def __repr__(self) -> str:
        return f"partly ({100 * self:.0f}%)"

    __str__ = __repr__


class ParameterModule(nn.Module):
    """A bare parameter as a module, which is how `flatten_model` lists it; never called."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.val = p

    def forward(self, x: Any) -> Any:
        """Returns `x` as it is."""
        return x


def has_params(m: nn.Module) -> bool:
    """Whether a module has parameters.

    Args:
        m: a module.

    Returns:
        True if `m` or any module inside it has one.

    >>> has_params(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), has_params(nn.ReLU())
    (True, False)
    """
    return next(iter(check_module("has_params", m).parameters()), None) is not None


def total_params(m: nn.Module) -> tuple[int, bool | Partly]:
    """The number of distinct parameters in `m`, each counted once, and whether they are trainable.

    Args:
        m: a module.

    Returns:
        `(n, trainable)`: True if all are, False if none is (or there is none), a `Partly` with the
        trainable share if some are; it is true in an `if`, like True.

    >>> total_params(nn.Linear(10, 32))
    (352, True)
    >>> net = nn.Linear(10, 30)
    >>> net.weight.requires_grad_(False).requires_grad, total_params(net)
    (False, (330, partly (9%)))
    """
    params = {id(p): p for p in check_module("total_params", m).parameters()}.values()
    n = sum(numel(p) for p in params)
    return n, share(n, sum(numel(p) for p in params if p.requires_grad))


def share(n: int, n_trainable: int) -> bool | Partly:
    """How much of `n` parameters is trainable, in the terms of `total_params`."""
    return n_trainable > 0 if n_trainable in (0, n) else Partly(n_trainable / n)


def flatten_model(m: nn.Module) -> list[nn.Module]:
    """The innermost modules of `m` in the order of definition, each once.

    Args:
        m: a model.

    Returns:
        The modules; a parameter that a module holds beside its children stands after them as a
        `ParameterModule`.

    >>> [type(l).__name__ for l in flatten_model(nn.MultiheadAttention(4, 2))]
    ['NonDynamicallyQuantizableLinear', 'ParameterModule', 'ParameterModule']
    """
    return list(_flat(unwrap(check_module("flatten_model", m)), set()))


def _flat(m: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    stack: list[nn.Module] = [m]
    while stack:
        at = stack.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        inner, own = [child for _, child in children(at)], list(at.parameters(recurse=False))
        closed = own and all(id(child) in seen for child in inner)  # it holds its own parents
        if isinstance(at, ParameterModule) or not inner or closed:
            yield at
            continue
        bare = [ParameterModule(p) for p in own]
        stack += [*inner, *bare][::-1]


def _inputs(m: nn.Module, size: Any, x: Any) -> tuple[Inputs, bool]:
    """The inputs to run `m` on, and whether they are made up.

    An example may be given in the place of the size, as the second argument.
    """
    if x is None and leaves(size):
        size, x = None, size
    if x is not None and size is not None:
        raise OptionError("got both size= and x=: give the size of a made-up input or an example")
    made_up = x is None
    x = dummy_input(m, size) if made_up else x
    return x if isinstance(x, Inputs) else Inputs(x if isinstance(x, tuple) else (x,)), made_up


def dummy_eval(m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None) -> Any:
    """What `m` returns in evaluation mode, without gradients, for a made-up or an example input.

    Hooks on `m` fire. Everything else stays as it was: modes, random state, buffers. Cost: one
    forward and one copy of parameters and buffers.

    Args:
        m: a model.
        size: of the made-up input beside batch and channels, (64, 64) for images by default.
        x: an example input instead; a tuple is several inputs.

    Returns:
        The model's output, of whatever structure it is.

    Raises:
        ModelRunError: the model cannot take the made-up input; its own error is the cause.

    >>> dummy_eval(nn.Conv2d(3, 8, 3), (32, 32)).shape
    torch.Size([1, 8, 30, 30])
    """
    check_module("dummy_eval", m)
    given, made_up = _inputs(m, size, x)
    tree = Tree(m)
    with (
        sandbox.preserve_global_state(),
        sandbox.preserve_random_states(),
        sandbox.restore_after(tree),
        torch.no_grad(),
    ):
        sandbox.set_mode(tree, False)
        try:
            return m(*given, **given.kwargs)
        except Exception as e:
            if not made_up:
                raise
            raise _cannot_take(m, given, "", e) from e


def _cannot_take(m: nn.Module, given: Inputs, where: str, error: BaseException) -> ModelRunError:
    place = f' in "{where}"' if where else ""
    why = str(error).rstrip(". ")
    cure = "Give its size (size=...) or an example input (x=...)"
    if len(needed := _needed_inputs(unwrap(m))) > 1:  # of which one is made up, whatever its size
        cure = f"It takes several inputs: give an example of all, x=({', '.join(needed)})"
    return ModelRunError(
        f"{type(unwrap(m)).__name__} cannot take a made-up input {describe(given[0])}: {why}"
        f"{place}. {cure}"
    )


def _needed_inputs(m: nn.Module) -> list[str]:
    """The names of the positional inputs that `m` has no default for; none where it is unknown."""
    try:
        params = signature(m.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in params if p.kind in positional and p.default is Parameter.empty]


def _run(tree: Tree, size: Any, x: Any) -> Trace:
    given, made_up = _inputs(tree.model, size, x)
    done = trace(tree, given, training=False, macs=False)
    if done.error is not None:
        if not made_up:
            raise done.error
        where = done.failed[-1] if done.failed else ""
        raise _cannot_take(tree.model, given, where, done.error) from done.error
    return done


def model_sizes(
    m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None
) -> list[Any]:
    """The output size of each direct child of `m`, in the order of definition.

    Runs on fake tensors where possible.

    Args:
        m: a model. A layer without children gives its own output's size.
        size: of a made-up input beside batch and channels, (64, 64) for images by default.
        x: an example input instead; a tuple is several inputs.

    Returns:
        A `torch.Size` for each child; for one that returns a structure, the same structure of
        sizes; None for one that does not run.

    Raises:
        ModelRunError: the model cannot take the made-up input; its own error is the cause.

    >>> model_sizes(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2)), (64, 64))
    [torch.Size([1, 16, 64, 64]), torch.Size([1, 16, 32, 32])]
    """
    tree = Tree(check_module("model_sizes", m))
    calls = _run(tree, size, x).calls
    sizes: list[Any] = []
    n_places: Counter[str] = Counter()
    for place in tree.places:
        shapes = calls[place.first].shapes if place.first in calls else []
        n_places[place.first] += 1  # the second place of a shared layer shows its second call
        if place.depth == 1:
            i = min(n_places[place.first], len(shapes)) - 1
            sizes.append(_sized(shapes[i]) if shapes else None)
    return sizes if sizes or "" not in calls else [_sized(s) for s in calls[""].shapes]


def _sized(shape: Any) -> Any:
    if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
        return torch.Size(shape)
    if isinstance(shape, dict):
        return {k: _sized(v) for k, v in shape.items()}
    return type(shape)(_sized(s) for s in shape) if isinstance(shape, list | tuple) else shape


def num_features_model(
    m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None
) -> int:
    """The number of channels (or features) that `m` returns.

    The dimension beside the batch that does not grow with the input: channels of a conv net, the
    last dimension of a vision transformer or of a channels-last net. Where the input size cannot
    change, dimension 1 of an image and the last one of anything else. An example is run at twice
    its size too, with its values repeated.

    Args:
        m: a model.
        size: of a made-up input beside batch and channels, (64, 64) for images by default.
        x: an example input instead; a tuple is several inputs.

    Returns:
        The number.

    Raises:
        ModelRunError: the model cannot take the made-up input; its own error is the cause.

    >>> num_features_model(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3, stride=2)))
    24
    """
    tree = Tree(check_module("num_features_model", m))
    if x is not None or leaves(size):
        given, _ = _inputs(m, size, x)
        small = _out(_run(tree, None, given))
        return _channels(small, *_larger_example(tree, given))
    dims = input_dims(first_layer(m)[1])[0]
    if size is not None:
        sides = checked_sides(size, dims)
        small = _out(_run(tree, sides, None))
    else:
        sides, small = _smallest(tree, dims)
    return _channels(small, _larger(tree, sides))


def _smallest(tree: Tree, dims: int) -> tuple[tuple[int, ...], list[int]]:
    """The first size from 64 on that the model takes, doubled each time, and its output's shape."""
    side = _SMALLEST
    while True:
        try:
            return (side,) * dims, _out(_run(tree, (side,) * dims, None))
        except ModelRunError as e:
            if side >= _LARGEST or not any(text in str(e) for text in _TOO_SMALL):
                raise  # no size would help
            side *= 2


def _larger(tree: Tree, sides: tuple[int, ...]) -> list[int] | None:
    """The output shape for an input twice the size; None if the model takes one size only."""
    try:
        return _out(_run(tree, tuple(2 * side for side in sides), None)) if sides else None
    except ModelRunError:
        return None


def _larger_example(tree: Tree, given: Inputs) -> tuple[list[int] | None, int]:
    """The same for an example input, and how many dimensions of it are the batch's."""
    try:
        if (found := doubled(tree.model, given)) is not None:
            larger, n_batch = found
            large = _out(_run(tree, None, larger))
            # a model may make a batch of one sample
            return large, n_batch if len(large) <= leaves(given)[0].dim() else 1
    except Exception:  # the model's own, of whatever kind
        pass
    return None, 1


def _out(done: Trace) -> list[int]:
    """The shape of the first tensor that the model returned."""
    found = list(_plain(done.calls[""].shapes[0])) if done.calls else []
    if not found:
        raise ModelRunError(
            "num_features_model: the model returns no tensor. Give a part of it that does"
        )
    return found[0]


def _plain(shape: Any) -> Iterator[list[int]]:
    if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
        yield shape
    elif isinstance(shape, dict | list | tuple):
        for part in shape.values() if isinstance(shape, dict) else shape:
            yield from _plain(part)


def _channels(small: list[int], large: list[int] | None, n_batch: int = 1) -> int:
    if len(small) < 2:
        return small[-1] if small else 1
    if large is not None and len(large) == len(small):
        same = [i for i in range(n_batch, len(small)) if small[i] == large[i]]
        if same:
            return small[same[0]]
    return small[1] if len(small) >= 4 else small[-1]
