"""Hook attention patterns, which fused attention never computes.

If a model calls `F.scaled_dot_product_attention`, the pattern is computed from the arguments, and
the fused result is kept unless an edit returned another pattern. If attention is written out, the
pattern is the result of its softmax.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax
from torch.overrides import handle_torch_function, has_torch_function_unary

from hookkit._core.checks import check_choice, check_flag, check_module
from hookkit._core.pytree import tree_map
from hookkit.errors import HookError
from hookkit.hooks.functions import FunctionHooks, Within, call_outer, plain_name, running_modules
from hookkit.hooks.options import HookOptions

_thread = local()  # .seen: all blocks have seen the pattern of the fused call that is running


def hook_attention(
    within: Within,
    detach: bool = True,
    cpu: bool = False,
    *,
    scores: bool = False,
    hook: Callable[..., Any] | None = None,
    keep: str = "all",
) -> FunctionHooks:
    """Store the attention pattern of each attention in `within`, inside a `with`.

    Attention is `F.scaled_dot_product_attention`, fused or not; `nn.MultiheadAttention`, also in an
    encoder layer; and any softmax over the last of four dimensions, as eager attention has it. If a
    model has such a softmax that is no attention, name the attention layers in `within`. Masks, the
    causal mask, scale, groups of heads and caches are those of the call; dropout is not applied.
    With an attention sink (gpt-oss) the last column is the sink's.

    The run is not changed, and fused attention stays fused. Only `nn.TransformerEncoder` in
    evaluation mode runs layer by layer, so that padded positions have values in place of 0. Memory:
    all patterns, unless `keep` says otherwise.

    Not seen: `flex_attention`, a softmax over three dimensions (`hook_function(F.softmax)` stores
    it), and other threads.

    Args:
        within: a model (all modules in it), or modules, as `select` gives them; None stores every
            call in the block, without a module's name.
        detach, cpu: as for `hook_output`. A pattern that only hookkit computes has no gradient.
        scores: store the input of the softmax: logits, scaled and masked (-inf, or as the model
            masks).
        hook: `hook(call, inputs, output)`, or of one argument, the pattern; its result is stored.
        keep: as for `hook_function`: `"all"` calls, `"last"` or `"none"`.

    Returns:
        `FunctionHooks`, to be entered. Names are those of the innermost module of `within`:
        `h["blocks.3.attn/attention:0"]`. Each stores (batch, heads, queries, keys), where the layer
        has these dimensions: fused attention of three stores three, and Longformer (batch, queries,
        heads, window). Scores are float32 at least. A query that may attend to nothing has a
        pattern of 0.

    Raises:
        ArgumentError: `within` holds no modules.
        HookError: later, in the forward: attention over nested tensors.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with hook_attention(layer) as h:
    ...     y = layer(torch.randn(1, 5, 8))
    >>> h.names, h[0].stored.shape
    (('self_attn/attention:0',), torch.Size([1, 2, 5, 5]))
    """
    who = "hook_attention"
    check_choice(who, "keep", keep, ("last", "all", "none"))
    kind = "pre" if check_flag(who, "scores", scores) else "forward"
    each = "none" if keep == "none" else "last"
    options = HookOptions(who, kind, hook, detach, cpu, keep=each)
    return AttentionHooks(within, options, numbered=keep == "all")


def attention_weights(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Run `model(*inputs, **kwargs)` and return its attention patterns by the name of their layer.

    The forward runs inside `hook_attention`, without gradients, in the mode that the model is in;
    hooks and edits run too. Memory: all patterns at once.

    Args:
        model: any model.
        *inputs: its positional inputs.
        **kwargs: its keyword inputs.

    Returns:
        (batch, heads, queries, keys) for each layer, in the order of the calls. If a layer
        attends several times, each call has a number: `name:0`, `name:1`.

    Raises:
        ArgumentError: `model` is no module.
        HookError: it calls no attention that is seen; or with nested tensors.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> weights = attention_weights(nn.Sequential(layer), torch.randn(1, 5, 8))
    >>> {name: tuple(w.shape) for name, w in weights.items()}
    {'0.self_attn': (1, 2, 5, 5)}
    """
    check_module("attention_weights", model)
    hooks = AttentionHooks(model, HookOptions("attention_weights"))
    hooks.quiet = True
    with torch.no_grad(), hooks:
        model(*inputs, **kwargs)
    if not len(hooks):
        raise HookError(hooks.never_called())
    layers = [name.rpartition("/")[0] for name in hooks.names]
    times, seen = Counter(layers), Counter[str]()
    found = {}
    for layer, weights in zip(layers, hooks.stored, strict=True):
        found[f"{layer}:{seen[layer]}" if times[layer] > 1 else layer] = weights
        seen[layer] += 1
    return found


class AttentionHooks(FunctionHooks):
    """Hooks the step from the scores of an attention to its pattern, as if it were a function."""

    def __init__(self, within: Any, options: HookOptions, numbered: bool = True) -> None:
        super().__init__(softmax, within, options, numbered)
        self.wanted = {"attention"}
        self.path = "[0]" if options.kind == "pre" else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` for PyTorch, and hook the pattern of attention. The mode is off meanwhile."""
        kwargs, name = kwargs or {}, plain_name(func)
        if not self.scope.on:
            return call_outer(func, args, kwargs)
        if name == "attention" and getattr(func, "__module__", "") == __name__:
            self._check_axes(args[0].shape)
            return self._run_hooked(func, name, args, kwargs)
        if func is _needs_graph:
            wanted = self.options.edit or not self.options.detach
            return (wanted and self._caller() is not None) or call_outer(func, args, kwargs)
        if func is scaled_dot_product_attention and not getattr(_thread, "seen", False):
            return self._fused(func, args, kwargs)
        if name == "softmax" and (found := _written_out(*args, **kwargs)):
            scores, options = found
            shape = _shape(scores)
            if len(shape) == 4:
                self._check_axes(shape)
                pattern = self._run_hooked(func, "attention", (scores.reshape(shape),), options)
                return self._check_shape(pattern, shape).reshape(scores.shape)
        return super().__torch_function__(func, types, args, kwargs)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of fused attention, or the result for a pattern that was edited.

        The open blocks see the pattern by a call of `attention`, a function that the mode of each
        block sees in turn. If the call returns the tensor that was made for it (`made`), nothing
        was edited, and the fused function runs as the model called it.
        """
        if self._caller() is None:
            return call_outer(func, args, kwargs)
        inputs = _SDPA.bind(*args, **kwargs).arguments
        dtype, made = inputs["value"].dtype, list[Tensor]()

        def attention(scores: Tensor) -> Tensor:
            """Return the pattern after each open block has seen it, the innermost last."""
            if has_torch_function_unary(scores):
                shown: Tensor = handle_torch_function(attention, (scores,), scores)
                return shown
            nowhere = scores.isneginf().all(-1, keepdim=True)
            made[:] = scores, scores.softmax(-1).masked_fill(nowhere, 0).to(dtype)
            return made[1]

        with self._seeing_inside():
            needs_graph = _needs_graph(inputs["query"])
        # a checkpoint repeats only edits, and has to save as many tensors as its forward did, so a
        # pattern that is only stored must not be in the graph
        if not needs_graph:
            inputs = tree_map(lambda x: x.detach() if x.requires_grad else x, inputs)
        scores = attention_scores(**inputs)
        seen = scores.reshape(_shape(scores))
        with self._seeing_inside():
            pattern = attention(seen)
        if pattern is made[1] and seen is made[0]:
            _thread.seen = True
            try:
                return call_outer(func, args, kwargs)
            finally:
                _thread.seen = False
        value, rate = inputs["value"], inputs.get("dropout_p", 0.0)
        if inputs.get("enable_gqa"):
            value = value.repeat_interleave(scores.size(-3) // value.size(-3), -3)
        pattern = self._check_shape(pattern, seen.shape).reshape(scores.shape)
        return dropout(pattern.to(value.dtype), rate) @ value

    def _check_axes(self, shape: tuple[int, ...]) -> None:
        """Raise if an edit would mistake another dimension for the heads."""
        heads = _n_heads(next(running_modules(), None))
        if len(shape) == 4 and not shape[1] != heads == shape[2]:  # Longformer's are in the third
            return
        if not self.options.edit or (where := self._caller()) is None:
            return
        raise HookError(
            f"{self.options.who} on {where[0] or 'the model'}: its attention pattern is "
            f"{'×'.join(map(str, shape))}, which is not (batch, heads, queries, keys). Leave this "
            "layer out of within=; edit_function(F.softmax, …) or edit_output may do instead."
        )

    def _check_shape(self, pattern: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return `pattern`; raise if an edit changed its shape."""
        if pattern.shape == shape:
            return pattern
        where, _ = self._caller() or ("the model", None)
        raise HookError(
            f"{self.options.who} on {where or 'the model'}: the edited attention pattern has the "
            f"shape {tuple(pattern.shape)}, and the layer's is {tuple(shape)}, (batch, heads, "
            "queries, keys). Give one of the same shape."
        )

    def never_called(self) -> str:
        """Return the warning that no attention was seen."""
        return (
            f"{self.options.who}: no attention was seen. Run the model inside the block, in this "
            "thread, and give it or its attention layers. Seen are F.scaled_dot_product_attention, "
            "nn.MultiheadAttention, and a softmax over the last of four dimensions; "
            "hook_function(F.softmax, within=model) stores any other."
        )


def _needs_graph(query: Tensor) -> bool:
    """Return True if an open block edits this call, or stores its pattern with the graph."""
    if has_torch_function_unary(query):
        return bool(handle_torch_function(_needs_graph, (query,), query))
    return False


def _n_heads(owner: nn.Module | None) -> Any:
    """Return the number of heads that `owner`, or its `config`, has as an attribute, or None."""
    config = getattr(owner, "config", None)
    return getattr(owner, "num_heads", None) or getattr(config, "num_attention_heads", None)


def _shape(scores: Tensor) -> tuple[int, ...]:
    """Return (batch, heads, queries, keys) of scores, in which the first three may be packed.

    `nn.MultiheadAttention` joins the batch and the heads. For a single token, transformers packs
    the heads that share their keys as queries: (batch, key heads, group, keys).
    """
    shape, owner = tuple(scores.shape), next(running_modules(), None)
    heads = _n_heads(owner)
    if len(shape) == 3 and isinstance(owner, nn.MultiheadAttention):
        return (shape[0] // heads, heads, *shape[1:])
    group = heads // shape[1] if isinstance(heads, int) and len(shape) == 4 else 1
    return (shape[0], heads, 1, shape[-1]) if 1 < group == shape[-2] else shape


def _written_out(
    input: Tensor, dim: Any = None, *rest: Any, dtype: Any = None, out: Any = None, **_: Any
) -> tuple[Tensor, dict[str, Any]] | None:
    """Return scores and options of a softmax call; None unless it is over the last dimension."""
    if dim not in (-1, input.dim() - 1) or not input.is_floating_point() or out is not None:
        return None
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), dtype)
    return input, {"dim": -1} | ({} if dtype is None else {"dtype": dtype})


def attention_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the scores that the softmax of `F.scaled_dot_product_attention` gets.

    Source: the equivalent code in the documentation of `torch.nn.functional` (2.13).

    Returns:
        (…, queries, keys), in float32 at least; -inf where a mask forbids.
    """
    if query.is_nested or key.is_nested:
        raise HookError(
            "the attention scores of nested tensors cannot be put into one tensor. Give the model "
            "a padded batch, with a mask."
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    dtype = torch.promote_types(query.dtype, torch.float32)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    device = query.device.type
    with torch.autocast(device, enabled=False) if is_autocast_available(device) else nullcontext():
        scores = (query.to(dtype) * scale) @ key.to(dtype).mT
    n_earlier = 0  # how many keys come before the first query's own
    # by name: importing torch.nn.attention.bias takes a second
    if isinstance(attn_mask, Tensor) and type(attn_mask).__name__ == "CausalBias":
        bias: Any = attn_mask
        n_earlier = (bias.seq_len_kv - bias.seq_len_q) * (bias.variant.name == "LOWER_RIGHT")
        attn_mask, is_causal = None, True
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        attn_mask = attn_mask.tril(n_earlier)
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -math.inf)
    return scores + attn_mask


_SDPA = signature(attention_scores)
