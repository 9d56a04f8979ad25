"""A made-up input for a model, from what its first layer says: channels, dimensions, dtype.

Builds on `modules`. It is a guess from the order of definition, for when no example is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_module, is_whole
from hookkit.errors import ArgumentError, OptionError
from hookkit.modules import submodules, unwrap, walk

SIDE = 64  # pixels a side of a made-up image, steps of a made-up sequence

# What torch's layers call the size of their input, the surest name first.
_FEATURES = (
    *("in_channels", "in_features", "in1_features", "input_size", "embed_dim"),
    *("num_features", "num_channels", "num_embeddings"),
)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def first_layer(m: nn.Module) -> tuple[str, nn.Module]:
    """The first layer, in the order of definition, that says what its input looks like.

    Raises an ArgumentError if no layer says so.
    """
    for name, layer, _ in walk(m):
        if any(map(nn.parameter.is_lazy, layer.parameters(recurse=False))):
            raise ArgumentError(
                f'the first layer "{name}" of {type(unwrap(m)).__name__} is a '
                f"{type(layer).__name__}, which learns its channels from its first input. Run the "
                "model once, or give an example input: x=..."
            )
        if _features(layer) is not None:
            return name, layer
    raise ArgumentError(
        f"no layer of {type(unwrap(m)).__name__} says how many channels it takes. Give an example "
        "input: x=..."
    )


def _features(layer: nn.Module) -> int | None:
    """Channels (or features, or different ids) that `layer` takes; None if it does not say."""
    known = [n for name in _FEATURES if type(n := getattr(layer, name, None)) is int]
    if known and (type(layer).__module__.startswith("torch.") or not submodules(layer)):
        return known[0]
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return int(layer.normalized_shape[-1])
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() < 2 or submodules(layer):
        return None
    return int(weight.shape[1])


def in_channels(m: nn.Module) -> int:
    """How many channels (or features) a model takes.

    Args:
        m: a model.

    Returns:
        The number that the first layer takes that names one.

    Raises:
        ArgumentError: no layer says so, or the first one takes ids (an embedding).

    >>> in_channels(nn.Conv2d(8, 16, 3, groups=4)), in_channels(nn.ConvTranspose2d(8, 16, 3))
    (8, 8)
    """
    name, layer = first_layer(check_module("in_channels", m))
    if isinstance(layer, _EMBEDDINGS):
        raise ArgumentError(
            f'in_channels: the first layer "{name}" is an {type(layer).__name__}, which takes ids '
            f"below {layer.num_embeddings} and has no channels. "
            "hookkit.modelinfo.dummy_input(model) makes some."
        )
    return int(_features(layer) or 0)


def dummy_input(m: nn.Module, size: int | Iterable[int] | None = None) -> Tensor:
    """One made-up sample for `m`: (1, channels, *size) of its dtype, on its device.

    Args:
        m: the model.
        size: the dimensions beside batch and channels; by default 64 in each dimension that the
            first layer takes.

    Returns:
        Values uniform in [-1, 1), from a generator of its own; for an embedding, ids in range.

    Raises:
        OptionError: `size` is not made of whole numbers from 1.
        ArgumentError: no layer says what it takes.

    >>> dummy_input(nn.Conv2d(3, 8, 3), 32).shape
    torch.Size([1, 3, 32, 32])
    """
    _, layer = first_layer(check_module("dummy_input", m))
    n, dims, last = int(_features(layer) or 0), *_input_dims(layer)
    sides = _checked_sides(SIDE if size is None else size, dims)
    generator = torch.Generator().manual_seed(0)
    p = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    if isinstance(layer, _EMBEDDINGS):
        return torch.randint(n, (1, *sides), generator=generator, device="cpu").to(p.device)
    shape = (1, *sides, n) if last else (1, n, *sides)
    x = torch.empty(shape, device="cpu").uniform_(-1, 1, generator=generator)
    return x.to(p.device if p.device.type != "meta" else "cpu", p.dtype).to(p.device)


def _checked_sides(size: Any, dims: int) -> tuple[int, ...]:
    """`size` as one number for each of `dims` dimensions, or as many as it has itself."""
    sides = tuple(size) if isinstance(size, list | tuple) else (size,) * dims
    if not all(is_whole(side) and side > 0 for side in sides or (size,)):
        raise OptionError(f"size={size!r:.60}: sizes are whole numbers from 1, such as (64, 64)")
    return tuple(int(side) for side in sides)


def _input_dims(layer: nn.Module) -> tuple[int, bool]:
    """Dimensions beside batch and features of the input, and whether the features come last."""
    kind = type(layer).__name__
    for dims in (1, 2, 3):
        if kind.endswith(f"{dims}d"):
            return (0 if kind.startswith("BatchNorm1") else dims), False
    is_sequence = isinstance(layer, (nn.RNNBase, nn.MultiheadAttention, *_EMBEDDINGS))
    return (1 if is_sequence else 0), True
