"""The input of a model, read off its first layer: how many channels, how many dimensions.

Builds on `walking`. It is a guess from the order of definition, made only when no example is given.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hookkit.errors import ArgumentError, OptionError
from hookkit.walking import submodules, unwrap, walk

_SIDE = 64  # pixels a side of a made-up image, steps of a made-up sequence

# What torch's layers call the size of their input, in the order of trust.
_FEATURES = (
    "in_channels",
    "in_features",
    "in1_features",
    "input_size",
    "embed_dim",
    "num_features",
    "num_channels",
    "num_embeddings",
)


def first_layer(m: nn.Module) -> tuple[str, nn.Module]:
    """The first layer, in the order of definition, that says what its input looks like."""
    for name, layer, _ in walk(m):
        if _features(layer) is not None:
            return name, layer
    raise ArgumentError(
        f"asked for the input of {type(unwrap(m)).__name__}: none of its layers says how many "
        "channels it takes. Give an example input: x=..."
    )


def _features(layer: nn.Module) -> int | None:
    """Channels (or features, or different ids) that `layer` takes; None if it does not say."""
    home = type(layer).__module__.split(".")[0]
    known = [getattr(layer, n) for n in _FEATURES if isinstance(getattr(layer, n, None), int)]
    if known and (home == "torch" or not submodules(layer)):
        return int(known[0])
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return int(layer.normalized_shape[-1])
    weight = layer.__dict__.get("_parameters", {}).get("weight")
    plain = weight is not None and not nn.parameter.is_lazy(weight) and weight.dim() >= 2
    return int(weight.shape[1]) if plain and not submodules(layer) else None


def in_channels(m: nn.Module) -> int:
    """Channels (or features) that the first layer of `m` with a say takes.

    >>> in_channels(nn.Conv2d(8, 16, 3, groups=4)), in_channels(nn.ConvTranspose2d(8, 16, 3))
    (8, 8)

    Raises:
        ArgumentError: no layer says so, or the first one takes ids (an embedding).
    """
    name, layer = first_layer(m)
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        raise ArgumentError(
            f'asked for in_channels: the first layer "{name}" is an {type(layer).__name__}, '
            f"which takes ids below {layer.num_embeddings} and has no channels"
        )
    return int(_features(layer) or 0)


def dummy_input(m: nn.Module, size: int | Iterable[int] | None = None) -> Tensor:
    """One made-up sample for `m`: (1, channels, *size) of its dtype, on its device.

    Values are uniform in [-1, 1) from a generator of its own; ids (for an embedding) are in range.
    `size` is what stands beside batch and channels; by default 64 in each dimension that the
    first layer wants.
    """
    _, layer = first_layer(m)
    n, dims, last = int(_features(layer) or 0), *input_dims(layer)
    sides = (
        (size,) * dims if isinstance(size, int) else (_SIDE,) * dims if size is None else (*size,)
    )
    if any(side < 1 for side in sides):
        raise OptionError(f"size={size}: sizes are whole numbers from 1, such as (64, 64)")
    mine = torch.Generator().manual_seed(0)
    p = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return torch.randint(n, (1, *sides), generator=mine).to(p.device)
    shape = (1, *sides, n) if last else (1, n, *sides)
    x = torch.empty(shape).uniform_(-1, 1, generator=mine)
    return x.to(p.device if p.device.type != "meta" else "cpu", p.dtype).to(p.device)


def input_dims(layer: nn.Module) -> tuple[int, bool]:
    """Dimensions beside batch and features of the input, and whether the features come last."""
    kind = type(layer).__name__
    for dims in (1, 2, 3):
        if kind.endswith(f"{dims}d"):
            return (0 if kind.startswith(("BatchNorm1", "SyncBatch")) else dims), False
    recurrent = isinstance(
        layer, nn.RNNBase | nn.MultiheadAttention | nn.Embedding | nn.EmbeddingBag
    )
    return (1 if recurrent else 0), True
