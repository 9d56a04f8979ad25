"""`attention_weights`: how much each query attends to each key, in every attention of a model.

Fused attention does not compute the weights, so they are computed from what it is called with, seen
by `hooks.functions`.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

from hookkit.checks import check_module
from hookkit.errors import HookError
from hookkit.hooks.block import Block
from hookkit.hooks.functions import FunctionCall, FunctionHooks
from hookkit.nested import Inputs

_MULTI_HEAD = signature(multi_head_attention_forward)


def attention_weights(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The attention weights of `model(*inputs, **kwargs)`, by the name of the layer that made them.

    Of every `F.scaled_dot_product_attention` and `nn.MultiheadAttention`, fused or in an encoder
    layer: what a softmax of the logits gives, with the masks, the causal mask, the scale and the
    groups of heads of the call; without dropout. The model runs once, without gradients, in the
    mode that it is in; hooks and edits run too. Memory: all weights at once.

    Of a model that applies a softmax itself, `hook_function(F.softmax, within=model)` stores them.

    Args:
        model: any model.
        *inputs: what its forward takes.
        **kwargs: its keyword inputs.

    Returns:
        (batch, heads, queries, keys) for each layer (without the batch where the layer had none),
        in the dtype of the queries, in the order of the calls. Of a layer that attends several
        times each call has a number: `name:0`, `name:1`. A query that may attend to nothing has
        weights of 0, as PyTorch's fused attention has it.

    Raises:
        ArgumentError: `model` is no module.
        HookError: it calls no such attention; or with nested tensors.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> weights = attention_weights(nn.Sequential(layer), torch.randn(1, 5, 8))
    >>> {name: tuple(w.shape) for name, w in weights.items()}
    {'0.self_attn': (1, 2, 5, 5)}
    """
    check_module("attention_weights", model)
    functions = [scaled_dot_product_attention, multi_head_attention_forward]
    hooks = _Hooks(functions, model, Block("attention_weights", "forward", _weights, False))
    with torch.no_grad(), hooks:
        model(*inputs, **kwargs)
    if not len(hooks):
        raise HookError(
            f"{hooks.never_called()} Give a model that uses F.scaled_dot_product_attention or "
            'nn.MultiheadAttention (in transformers attn_implementation="sdpa"), or store what '
            "its softmax gives: hook_function(F.softmax, within=model)."
        )
    layers = [name.rpartition("/")[0] for name in hooks.names]
    times, seen = Counter(layers), Counter[str]()
    found = {}
    for layer, weights in zip(layers, hooks.stored, strict=True):
        found[f"{layer}:{seen[layer]}" if times[layer] > 1 else layer] = weights
        seen[layer] += 1
    return found


class _Hooks(FunctionHooks):
    """Function hooks that warn of nothing: no call is an error, and packed heads are unpacked."""

    def _warn_of_nothing(self) -> None:
        pass

    def _see_heads(self, where: str, query: Tensor) -> None:
        pass


def _weights(call: FunctionCall, inputs: Inputs, output: Any) -> Tensor:
    """The weights of one call of either function."""
    if call.function is multi_head_attention_forward:
        given = _MULTI_HEAD.bind(*inputs, **inputs.kwargs).arguments
        given |= {"need_weights": True, "average_attn_weights": False, "training": False}
        weights: Tensor = multi_head_attention_forward(**given)[1]
        return torch.where(weights.isnan().all(-1, keepdim=True), 0, weights)
    logits = attention_logits(*inputs, **inputs.kwargs)
    nowhere = logits.isneginf().all(-1, keepdim=True)
    weights = logits.softmax(-1).masked_fill(nowhere, 0).to(output.dtype)
    owner = call.__dict__["owner"]
    config = getattr(owner, "config", None)
    heads = getattr(owner, "num_heads", None) or getattr(config, "num_attention_heads", None)
    group = heads // weights.shape[-3] if isinstance(heads, int) and weights.dim() == 4 else 1
    if group > 1 and weights.shape[-2] == group:  # grouped queries, packed for a single token
        weights = weights.flatten(1, 2).unsqueeze(2)
    return weights


def attention_logits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The logits of `F.scaled_dot_product_attention`, called so; -inf where a mask forbids.

    Source: the equivalent code in the documentation of `torch.nn.functional` (2.13).

    Returns:
        (…, queries, keys), in float32 at least.
    """
    if query.is_nested or key.is_nested:
        raise HookError(
            "the attention logits of nested tensors cannot be put into one tensor. Give the model "
            "a padded batch, with a mask."
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    device = query.device.type
    with torch.autocast(device, enabled=False) if is_autocast_available(device) else nullcontext():
        logits = (query.to(dtype) * scale) @ key.to(dtype).mT
    # Private: `CausalBias._materialize`, the mask that this class of tensors stands for (since
    # 2.3). It has no public name; without it the class cannot be added to a tensor.
    if attn_mask is not None and hasattr(attn_mask, "_materialize"):
        attn_mask = attn_mask._materialize(query.device)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if attn_mask is None:
        return logits
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -math.inf)
    return logits + attn_mask
