"""What a model has and what its layers return: counts, output sizes, features.

fastai's helpers by name (`fastai.callback.hook`, `fastai.layers`), on any `nn.Module`: Linear,
convolutions of any dimension, grouped and transposed, recurrent nets, embeddings. What a model
returns comes from one run of it (`tracing`), which leaves it as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hookkit.checks import check_module
from hookkit.errors import ModelRunError, OptionError
from hookkit.modelinfo.first_layer import dummy_input
from hookkit.modelinfo.tracer import Trace
from hookkit.modelinfo.tracing import trace
from hookkit.modelinfo.tree import Tree, numel
from hookkit.modelinfo.untouched import set_mode, untouched
from hookkit.modules import children, unwrap
from hookkit.nested import Inputs, describe

_LARGE = 224  # pixels a side for models that cannot take 64


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


def total_params(m: nn.Module) -> tuple[int, bool | float]:
    """The number of distinct parameters in `m`, each counted once, and whether they are trainable.

    Args:
        m: a module.

    Returns:
        `(n, trainable)`: True if all are, False if none is (or there is none), else the share that
        is, between 0 and 1.

    >>> total_params(nn.Linear(10, 32))
    (352, True)
    >>> net = nn.Linear(10, 30)
    >>> net.weight.requires_grad_(False).requires_grad, total_params(net)
    (False, (330, 0.09090909090909091))
    """
    params = {id(p): p for p in check_module("total_params", m).parameters()}.values()
    n = sum(numel(p) for p in params)
    return n, share(n, sum(numel(p) for p in params if p.requires_grad))


def share(n: int, n_trainable: int) -> bool | float:
    """How much of `n` parameters is trainable, in the terms of `total_params`."""
    return n_trainable > 0 if n_trainable in (0, n) else n_trainable / n


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
        inner = [child for _, child in children(at)]
        if isinstance(at, ParameterModule) or not inner:
            yield at
            continue
        bare = [ParameterModule(p) for p in at.parameters(recurse=False)]
        stack += [*inner, *bare][::-1]


def dummy_eval(m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None) -> Any:
    """What `m` returns in evaluation mode, without gradients, for a made-up or an example input.

    Hooks on `m` fire. Everything else stays as it was: modes, random state, parameters, buffers
    (see `hookkit.modelinfo.untouched`). Cost: one forward and one copy of parameters and buffers.

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
    inputs = _inputs(check_module("dummy_eval", m), size, x)
    tree = Tree(m)
    with untouched(tree, params=True, observers=True), torch.no_grad():
        set_mode(tree, False)
        try:
            return m(*inputs, **inputs.kwargs)
        except Exception as e:
            if x is not None:
                raise
            raise _cannot_take(m, inputs, e) from e


def _inputs(m: nn.Module, size: Any, x: Any) -> Inputs:
    """The example input `x`, or a made-up one."""
    if x is not None and size is not None:
        raise OptionError("got both size= and x=: give the size of a made-up input or an example")
    x = dummy_input(m, size) if x is None else x
    return x if isinstance(x, Inputs) else Inputs(x if isinstance(x, tuple) else (x,))


def _cannot_take(m: nn.Module, inputs: Inputs, error: Exception) -> ModelRunError:
    return ModelRunError(
        f"{type(unwrap(m)).__name__} cannot take a made-up input {describe(inputs[0])}: "
        f"{str(error).rstrip('. ')}. Give its size (size=...) or an example input (x=..., a tuple "
        "of several)"
    )


def _run(m: nn.Module, size: Any, x: Any) -> Trace:
    """A run in evaluation mode; raises the model's error."""
    tree, inputs = Tree(m), _inputs(m, size, x)
    result: Trace = trace(tree, inputs, lambda trace: trace, training=False)
    if result.error is None:
        return result
    if x is not None:
        raise result.error
    raise _cannot_take(m, inputs, result.error) from result.error


def model_sizes(
    m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None
) -> list[Any]:
    """The output size of each direct child of `m`, in the order of definition.

    One forward in evaluation mode, which leaves the model as it was (see `summary`).

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
    calls = _run(check_module("model_sizes", m), size, x).calls
    sizes: list[Any] = []
    n_places: Counter[str] = Counter()
    for place in Tree(m).places:
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

    Dimension 1 of an output of four or more dimensions, such as a batch of images; the last one of
    any other. So give a net that returns images with their channels last without its last permute.

    Args:
        m: a model.
        size: of a made-up input beside batch and channels; by default 64 a side, and 224 if the
            model cannot take that.
        x: an example input instead; a tuple is several inputs.

    Returns:
        The number.

    Raises:
        ModelRunError: the model cannot take the made-up input; its own error is the cause.

    >>> num_features_model(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3, stride=2)))
    24
    """
    check_module("num_features_model", m)
    try:
        result = _run(m, size, x)
    except ModelRunError:
        if size is not None or x is not None:
            raise
        result = _run(m, _LARGE, None)
    shape = next(_plain(result.calls[""].shapes[0]), None) if result.calls else None
    if not shape:
        raise ModelRunError(
            "num_features_model: the model returns no tensor with dimensions. Give a part of it "
            "that does"
        )
    return shape[1] if len(shape) >= 4 else shape[-1]


def _plain(shape: Any) -> Iterator[list[int]]:
    if isinstance(shape, list) and all(isinstance(n, int) for n in shape):
        yield shape
    elif isinstance(shape, dict | list | tuple):
        for part in shape.values() if isinstance(shape, dict) else shape:
            yield from _plain(part)
