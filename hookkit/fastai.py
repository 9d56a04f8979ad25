"""fastai's names of its hooks, for `from hookkit.fastai import *` in the place of

    from fastai.callback.hook import *

with the helpers that exist for them alone. It brings no `Learner` and no other name that fastai's
own notebooks have from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core.checks import check_module, is_whole
from hookkit._core.modules import can_run, children, unwrap, walk
from hookkit._core.pytree import Inputs, describe, tree_leaves, tree_map
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import ArgumentError, ModelRunError, OptionError
from hookkit.hooks import Hook, Hooks, hook_output, hook_outputs
from hookkit.hooks.attach import attach
from hookkit.hooks.eager import layer_by_layer
from hookkit.inspection import layer_info, module_summary
from hookkit.inspection.preserve import preserve_state
from hookkit.inspection.summary_rows import share
from hookkit.inspection.tree import numel
from hookkit.recorders import ActivationStats

__all__ = [
    "ActivationStats",
    "Hook",
    "HookCallback",
    "Hooks",
    "dummy_eval",
    "flatten_model",
    "has_params",
    "hook_output",
    "hook_outputs",
    "in_channels",
    "layer_info",
    "model_sizes",
    "module_summary",
    "num_features_model",
    "total_params",
]


class ParameterModule(nn.Module):
    """Holds a bare parameter as a module, for `flatten_model`; PyTorch never calls it."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.val = p

    def forward(self, x: Any) -> Any:
        """Return `x` as it is."""
        return x


def has_params(m: nn.Module) -> bool:
    """Return whether a module has parameters.

    Args:
        m: a module.

    Returns:
        True if `m`, or any module inside it, has one.

    >>> has_params(nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), has_params(nn.ReLU())
    (True, False)
    """
    return next(iter(check_module("has_params", m).parameters()), None) is not None


def total_params(m: nn.Module) -> tuple[int, bool | float]:
    """Count the distinct parameters of `m`, each once, and say whether they are trainable.

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


def flatten_model(m: nn.Module) -> list[nn.Module]:
    """List the innermost modules of `m` in the order of definition, each once.

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
    if id(m) in seen:
        return
    seen.add(id(m))
    inner = [child for _, child in children(m)]
    if not inner:
        yield m
        return
    for child in inner:
        yield from _flat(child, seen)
    yield from map(ParameterModule, m.parameters(recurse=False))


def in_channels(m: nn.Module) -> int:
    """Count the channels (or features) that a model takes.

    Args:
        m: a model that begins with a convolution, a linear layer or a BatchNorm.

    Returns:
        The number that its first layer with parameters takes.

    Raises:
        ArgumentError: its first layer does not say so, such as an embedding or a lazy layer.

    >>> in_channels(nn.Conv2d(8, 16, 3, groups=4)), in_channels(nn.ConvTranspose2d(8, 16, 3))
    (8, 8)
    """
    return _first_layer("in_channels", m)[1]


def _first_layer(who: str, m: nn.Module) -> tuple[nn.Module, int]:
    """Return the first layer of `m` that has parameters, and the channels or features it takes."""
    found = "no layer has parameters, which say"
    for name, layer, _ in walk(check_module(who, m)):
        if next(children(layer), None) or not has_params(layer):
            continue
        for key in ("in_channels", "in_features", "num_features"):
            n = getattr(layer, key, None)
            if type(n) is int and n > 0:  # a lazy layer says 0
                return layer, n
        found = f'the first layer "{name}" is a {type(layer).__name__}, which does not say'
        break
    raise ArgumentError(
        f"{who}: {found} how many channels {type(unwrap(m)).__name__} takes. Run the model on an "
        "example: model_sizes(model, x=...), summary(model, x)."
    )


def _inputs(who: str, m: nn.Module, size: int | Iterable[int] | None, x: Any) -> Inputs:
    """Return the example `x`, or one made-up sample, uniform in [-1, 1) from its own generator.

    The sample has the shape (1, channels, *size), and the dtype and device of the first layer.
    """
    check_module(who, m)
    if x is not None:
        if size is not None:
            raise OptionError(f"{who}: got both size= and x=: give one of them")
        return x if isinstance(x, Inputs) else Inputs(x if isinstance(x, tuple) else (x,))
    layer, n = _first_layer(who, m)
    kind = type(layer).__name__
    dims = int(kind[-2]) if kind[-2:] in ("1d", "2d", "3d") and "BatchNorm1" not in kind else 0
    side: Any = 64 if size is None else size
    sides = tuple(side) if isinstance(side, list | tuple) else (side,) * dims
    if not all(is_whole(n) and n > 0 for n in sides or (side,)):
        raise OptionError(f"size={side!r:.60}: sizes are whole numbers from 1, such as (64, 64)")
    generator = torch.Generator().manual_seed(0)
    made = torch.empty((1, n, *sides), device="cpu").uniform_(-1, 1, generator=generator)
    p = next((p for p in layer.parameters() if p.is_floating_point()), made)
    return Inputs((made.to(p),))


def dummy_eval(m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None) -> Any:
    """Run `m` in evaluation mode, without gradients, on a made-up or an example input.

    Hooks on `m` fire. Everything else stays as it was: modes, random state, parameters, buffers.
    Cost: one forward and one copy of parameters and buffers.

    Args:
        m: a model. An input can be made up if it begins with a convolution, a linear layer or a
            BatchNorm.
        size: of the made-up input beside batch and channels, 64 in each dimension by default.
        x: an example input instead; a tuple is several inputs.

    Returns:
        The model's output, of whatever structure it is.

    Raises:
        ArgumentError: the first layer does not say what it takes.
        ModelRunError: the model cannot take the made-up input; its own error is the cause.
        OptionError: `size` is not made of whole numbers from 1.

    >>> dummy_eval(nn.Conv2d(3, 8, 3), (32, 32)).shape
    torch.Size([1, 8, 30, 30])
    """
    inputs = _inputs("dummy_eval", m, size, x)
    with preserve_state(m, training=False, grad=False, params=True, observers=True):
        try:
            return m(*inputs, **inputs.kwargs)
        except Exception as e:
            if x is not None:
                raise
            raise ModelRunError(
                f"{type(unwrap(m)).__name__} cannot take a made-up input {describe(inputs[0])}: "
                f"{str(e).rstrip('. ')}. Give its size (size=...) or an example input (x=..., a "
                "tuple of several)"
            ) from e


def model_sizes(
    m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None
) -> list[Any]:
    """Return the output size of each direct child of `m`, in the order of definition.

    Runs `dummy_eval`, which leaves the model as it was.

    Args:
        m: a model. A layer without children gives its own output's size.
        size, x: as for `dummy_eval`.

    Returns:
        A `torch.Size` for each child, of its last call; for one that returns a structure, the same
        structure of sizes; None for one that does not run.

    Raises:
        ArgumentError, ModelRunError, OptionError: as `dummy_eval`.

    >>> model_sizes(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2)), (64, 64))
    [torch.Size([1, 16, 64, 64]), torch.Size([1, 16, 32, 32])]
    """
    layers = [child for _, child in children(unwrap(check_module("model_sizes", m)))] or [m]
    sizes = dict[int, Any]()

    def store(layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        sizes[id(layer)] = tree_map(lambda t: t.shape, out)

    with ExitStack() as undo:
        undo.enter_context(layer_by_layer(always=True))  # compiled code would skip the hooks
        for layer in filter(can_run, layers):
            undo.callback(attach(layer, store).remove)
        dummy_eval(m, size, x=x)
    return [sizes.get(id(layer)) for layer in layers]


def num_features_model(
    m: nn.Module, size: int | Iterable[int] | None = None, *, x: Any = None
) -> int:
    """Count the channels (or features) that `m` gives.

    Give a net that returns images with their channels last without its last permute.

    Args:
        m, size, x: as for `dummy_eval`.

    Returns:
        The size of dimension 1 of an output with four or more dimensions, such as a batch of
        images; of the last dimension of any other output.

    Raises:
        ArgumentError, ModelRunError, OptionError: as `dummy_eval`; also where the model returns no
            tensor with dimensions.

    >>> num_features_model(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3, stride=2)))
    24
    """
    out = dummy_eval(check_module("num_features_model", m), size, x=x)
    tensors: Iterable[Tensor] = tree_leaves(out)
    shape = next((t.shape for t in tensors if t.dim()), None)
    if shape is None:
        raise ModelRunError(
            "num_features_model: the model returns no tensor with dimensions. Give a part of it "
            "that does"
        )
    return shape[1] if len(shape) >= 4 else shape[-1]
