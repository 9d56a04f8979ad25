"""A made-up input for a model, from what its first layer says: channels, dimensions, dtype.

Builds on `modules`. It is a guess from the order of definition, for when no example is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_module, is_whole
from hookkit.errors import ArgumentError, OptionError
from hookkit.modules import submodules, unwrap, walk
from hookkit.nested import Inputs, leaves, tmap

_SIDE = 64  # pixels a side of a made-up image, steps of a made-up sequence

# What torch's layers call the size of their input, the surest name first.
_FEATURES = (
    *("in_channels", "in_features", "in1_features", "input_size", "embed_dim"),
    *("num_features", "num_channels", "num_embeddings"),
)

# Norms that take inputs of several dimensions: a layer of another kind says more.
_VAGUE = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.SyncBatchNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def first_layer(m: nn.Module) -> tuple[str, nn.Module]:
    """The first layer, in the order of definition, that says what its input looks like.

    Norms that fit several kinds of input are skipped if a layer of another kind follows. Raises an
    ArgumentError if no layer says so.
    """
    vague: tuple[str, nn.Module] | None = None
    for name, layer, _ in walk(m):
        if isinstance(layer, _VAGUE):
            if vague is None and _features(layer) is not None:
                vague = name, layer
        elif _is_lazy(layer):
            raise ArgumentError(
                f'the first layer "{name}" of {type(unwrap(m)).__name__} is a '
                f"{type(layer).__name__}, which learns its channels from its first input. Run the "
                "model once, or give an example input: x=..."
            )
        elif _features(layer) is not None:
            return name, layer
    if vague is not None:
        return vague
    raise ArgumentError(
        f"no layer of {type(unwrap(m)).__name__} says how many channels it takes. Give an example "
        "input: x=..."
    )


def _is_lazy(layer: nn.Module) -> bool:
    """True if `layer` is torch's own and has not seen its first input."""
    lazy = isinstance(layer, nn.modules.lazy.LazyModuleMixin)
    return lazy and any(nn.parameter.is_lazy(p) for p in layer.parameters(recurse=False))


def _features(layer: nn.Module) -> int | None:
    """Channels (or features, or different ids) that `layer` takes; None if it does not say."""
    home = type(layer).__module__.split(".")[0]
    said = (getattr(layer, n, None) for n in _FEATURES)
    known = [n for n in said if isinstance(n, int) and n > 0]  # a lazy layer says 0
    if known and (home == "torch" or not submodules(layer)):
        return int(known[0])
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return int(layer.normalized_shape[-1])
    weight: Any = dict(layer.named_parameters(recurse=False)).get("weight")
    plain = weight is not None and not nn.parameter.is_lazy(weight) and weight.dim() >= 2
    return int(weight.shape[1]) if plain and not submodules(layer) else None


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
    n, dims, last = int(_features(layer) or 0), *input_dims(layer)
    sides = _fixed_sides(m, n, dims) if size is None else checked_sides(size, dims)
    generator = torch.Generator().manual_seed(0)
    p = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
    if isinstance(layer, _EMBEDDINGS):
        return torch.randint(n, (1, *sides), generator=generator, device="cpu").to(p.device)
    shape = (1, *sides, n) if last else (1, n, *sides)
    x = torch.empty(shape, device="cpu").uniform_(-1, 1, generator=generator)
    return x.to(p.device if p.device.type != "meta" else "cpu", p.dtype).to(p.device)


def doubled(m: nn.Module, given: Inputs) -> tuple[Inputs, int] | None:
    """An example input of `m` at twice the size, and how many dimensions of it are the batch's.

    Values are repeated, so that ids stay in range; of several inputs those grow that have the size
    of the first. None if the first layer of `m` does not say which dimensions are the size.
    """
    try:
        _, layer = first_layer(m)
    except ArgumentError:
        return None
    tensors, (dims, last) = leaves(given), input_dims(layer)
    if not tensors:
        return None
    x = tensors[0]
    n_features = 0 if isinstance(layer, _EMBEDDINGS) else 1
    n_batch = x.dim() - dims - n_features
    if not dims or n_batch not in (0, 1):
        return None
    start = n_batch if last else n_batch + n_features
    sides = slice(start, start + dims)

    def fit(t: Tensor) -> Tensor:
        if t.dim() != x.dim() or t.shape[sides] != x.shape[sides]:
            return t
        return t.detach().repeat([2 if start <= i < start + dims else 1 for i in range(t.dim())])

    larger: Inputs = tmap(fit, given)
    return larger, n_batch


def checked_sides(size: Any, dims: int) -> tuple[int, ...]:
    """`size` as one number for each of `dims` dimensions, or as many as it has itself.

    Raises an OptionError if it is not made of whole numbers from 1.
    """
    several = isinstance(size, Iterable) and not isinstance(size, str | bytes)
    unordered = isinstance(size, Tensor | Mapping | set | frozenset)
    sides = tuple(size) if several and not unordered else (size,) * max(dims, 1)
    if not all(is_whole(side) and side > 0 for side in sides):
        raise OptionError(f"size={size!r:.60}: sizes are whole numbers from 1, such as (64, 64)")
    return tuple(int(s) for s in sides) if several else sides[:dims]


def _fixed_sides(m: nn.Module, n: int, dims: int) -> tuple[int, ...]:
    """64 a side, unless the very first layer is a LayerNorm over whole samples."""
    first = next((layer for _, layer, _ in walk(m) if _features(layer) is not None), None)
    whole = tuple(first.normalized_shape) if isinstance(first, nn.LayerNorm) else ()
    return whole[1:] if len(whole) == dims + 1 > 1 and whole[0] == n else (_SIDE,) * dims


def input_dims(layer: nn.Module) -> tuple[int, bool]:
    """Dimensions beside batch and features of the input, and whether the features come last."""
    kind = type(layer).__name__
    for dims in (1, 2, 3):
        if kind.endswith(f"{dims}d"):
            return (0 if kind.startswith(("BatchNorm1", "SyncBatch")) else dims), False
    is_sequence = isinstance(layer, (nn.RNNBase, nn.MultiheadAttention, *_EMBEDDINGS))
    return (1 if is_sequence else 0), True
