"""The attention pattern: how much each query attends to each key, read and edited.

Fused attention never computes the pattern, so it is computed from what
`F.scaled_dot_product_attention` is called with, and the fused result is kept unless an edit gave
another pattern. Of attention that is written out, the pattern is what its softmax gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.functional import (
    dropout,
    multi_head_attention_forward,
    scaled_dot_product_attention,
    softmax,
)
from torch.overrides import handle_torch_function, has_torch_function_unary

from hookkit.checks import check_choice, check_flag, check_module
from hookkit.editing.edits import Calls, Function, edit_block
from hookkit.errors import ArgumentError, HookError
from hookkit.hooks.block import Block
from hookkit.hooks.collection import Modules
from hookkit.hooks.functions import FunctionHooks, passed_on, plain_name, running_modules

_MULTI_HEAD = signature(multi_head_attention_forward)
_thread = local()  # .seen: the pattern of the fused call that runs now was shown to all blocks


def hook_attention(
    within: nn.Module | Modules,
    detach: bool = True,
    cpu: bool = False,
    *,
    scores: bool = False,
    hook: Callable[..., Any] | None = None,
    keep: str = "all",
) -> FunctionHooks:
    """Stores the attention pattern of each attention in `within`, for the time of a `with`.

    Attention is `F.scaled_dot_product_attention`, fused or not; `nn.MultiheadAttention`, also in an
    encoder layer; and a softmax over the last of four dimensions, as eager attention has it. Masks,
    the causal mask, scale, groups of heads and caches are those of the call; dropout is left out.
    The run is not changed, and fused attention stays fused. Memory: all patterns, unless `keep`
    says otherwise.

    Not seen: `flex_attention`, a softmax over three dimensions (`hook_function(F.softmax)` stores
    it), and other threads.

    Args:
        within: a model (all modules in it), or modules, as `select` gives them.
        detach, cpu: as for `hook_output`. What fused attention does not compute has no gradient.
        scores: stores what the softmax is given: logits, scaled and masked (-inf, or as the model
            masks).
        hook: `hook(call, inputs, output)`, or of one argument, the pattern, gives what to store.
        keep: as for `hook_function`: `"all"` calls, `"last"` or `"none"`.

    Returns:
        `FunctionHooks`, to be entered. Names are those of the innermost module of `within`:
        `h["blocks.3.attn/attention:0"]`. Each stores (batch, heads, queries, keys), without the
        batch where there is none; scores are float32 at least. A query that may attend to nothing
        has a pattern of 0.

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
    block = Block(who, kind, hook, detach, cpu, keep=each)
    return _Attention(_given(who, within), block, numbered=keep == "all")


def edit_attention(
    within: nn.Module | Modules,
    edit: Function,
    *,
    scores: bool = False,
    calls: Calls = None,
) -> FunctionHooks:
    """Replaces the attention pattern of each attention in `within`, for the time of a `with`.

    Attention whose pattern is edited is computed from it, `dropout(pattern) @ value`; all other
    calls stay as they are, fused. Of which attention is seen, and how layers are named: see
    `hook_attention`. Around `generate`, `at` counts the keys from the first token and the queries
    from the first of the call.

        edit_attention(model, zero(at=(..., 7, 2)))             # the edge from query 7 to key 2
        edit_attention(model, replace(-math.inf, at=(..., 7, 2)), scores=True)  # the rest sums to 1
        edit_attention(select(model, "h.5.attn"), zero(at=(slice(None), 3)))    # head 3 of a layer
        edit_attention(model, patch_from(clean))                # from `hook_attention(model)`

    Args:
        within: as for `hook_attention`.
        edit: `edit(call, inputs, output)`, or of one argument, the pattern: (batch, heads, queries,
            keys); gives the replacement, or None to leave it. Or a ready-made edit.
        scores: edits what the softmax is given instead: `edit(call, scores)`.
        calls: which calls of each module are edited, as for `edit_output`: in `generate` 0 is the
            prompt.

    Returns:
        `FunctionHooks` that store nothing; `n_calls` counts the calls of each module.

    Raises:
        ArgumentError: `within` holds no modules, or `edit` is no function.
        OptionError: `calls` has what is no number of a call.
        HookError: later, before the pattern is used: it gave another shape, or `at` is outside.

    >>> from hookkit.editing import zero
    >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with edit_attention(layer, zero(at=(..., 0))):  # nobody attends to the first position
    ...     _, pattern = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> pattern[..., 0]
    tensor([[0., 0., 0., 0., 0.]], grad_fn=<SelectBackward0>)
    """
    who = "edit_attention"
    kind = "pre" if check_flag(who, "scores", scores) else "forward"
    block = edit_block(who, kind, edit, calls)
    return _Attention(_given(who, within), block, numbered=False)


def attention_weights(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The attention patterns of `model(*inputs, **kwargs)`, by the name of their layer.

    `hook_attention` around one forward, without gradients, in the mode that the model is in; hooks
    and edits run too. Memory: all patterns at once.

    Args:
        model: any model.
        *inputs: what its forward takes.
        **kwargs: its keyword inputs.

    Returns:
        (batch, heads, queries, keys) for each layer, in the order of the calls. Of a layer that
        attends several times each call has a number: `name:0`, `name:1`.

    Raises:
        ArgumentError: `model` is no module.
        HookError: it calls no attention that is seen; or with nested tensors.

    >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> weights = attention_weights(nn.Sequential(layer), torch.randn(1, 5, 8))
    >>> {name: tuple(w.shape) for name, w in weights.items()}
    {'0.self_attn': (1, 2, 5, 5)}
    """
    check_module("attention_weights", model)
    hooks = _Attention(model, Block("attention_weights"))
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


def _given(who: str, within: Any) -> Any:
    if within is None:
        raise ArgumentError(f"{who}: give the model, or some of its modules, found None.")
    return within


class _Attention(FunctionHooks):
    """Hooks on a function that no model calls: from the scores of an attention to its pattern."""

    quiet = False

    def __init__(self, within: Any, block: Block, numbered: bool = True) -> None:
        super().__init__([softmax], within, block, numbered)
        self.wanted = {"attention"}
        self.leaf = "[0]" if block.kind == "pre" else ""
        self.multi_head: list[tuple[int, ...]] = []  # the shapes of patterns, outermost first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in the place of `func`; the mode is off meanwhile."""
        kwargs, name = kwargs or {}, plain_name(func)
        if not self.switch.on:
            return passed_on(func, args, kwargs)
        if name == "attention" and getattr(func, "__module__", "") == __name__:
            return self._hooked(func, name, args, kwargs)
        if func is scaled_dot_product_attention and not getattr(_thread, "seen", False):
            return self._fused(func, args, kwargs)
        if name == "softmax" and (found := _written_out(self.multi_head, *args, **kwargs)):
            scores, shape, options = found
            pattern = self._hooked(func, "attention", (scores.reshape(shape),), options)
            return self._fitting(pattern, shape).reshape(scores.shape)
        if func is multi_head_attention_forward:
            with self._inside(args, kwargs):
                return super().__torch_function__(func, types, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @contextmanager
    def _inside(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Keeps how the pattern of this `nn.MultiheadAttention` is shaped, while it runs."""
        given = _MULTI_HEAD.bind(*args, **kwargs).arguments
        query, heads = given["query"], given["num_heads"]
        batch = (query.shape[1],) if query.dim() == 3 else ()
        self.multi_head.append((*batch, heads))
        try:
            yield
        finally:
            self.multi_head.pop()

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What fused attention gives; with an edited pattern, what follows from that."""
        if self._where() is None:
            return passed_on(func, args, kwargs)
        given = _SDPA.bind(*args, **kwargs).arguments
        scores = attention_scores(**given)
        dtype, made = given["value"].dtype, list[Tensor]()

        def attention(scores: Tensor) -> Tensor:
            """The pattern, shown to each block that is open, the innermost last."""
            if has_torch_function_unary(scores):
                shown: Tensor = handle_torch_function(attention, (scores,), scores)
                return shown
            nowhere = scores.isneginf().all(-1, keepdim=True)
            made[:] = scores, scores.softmax(-1).masked_fill(nowhere, 0).to(dtype)
            return made[1]

        seen = scores.reshape(self._shape(scores))
        with self._pushed():
            pattern = attention(seen)
        if pattern is made[1] and seen is made[0]:
            _thread.seen = True
            try:
                return passed_on(func, args, kwargs)
            finally:
                _thread.seen = False
        value, rate = given["value"], given.get("dropout_p", 0.0)
        if given.get("enable_gqa"):
            value = value.repeat_interleave(scores.size(-3) // value.size(-3), -3)
        pattern = self._fitting(pattern, seen.shape).reshape(scores.shape)
        return dropout(pattern.to(value.dtype), rate) @ value

    def _fitting(self, pattern: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`pattern`, if an edit has left it its shape."""
        if pattern.shape == shape:
            return pattern
        where, _ = self._where() or ("the model", None)
        raise HookError(
            f"{self.switch.who} on {where or 'the model'}: the edited attention pattern has the "
            f"shape {tuple(pattern.shape)}, and the layer's is {tuple(shape)}, (batch, heads, "
            "queries, keys). Give one of the same shape."
        )

    def _shape(self, scores: Tensor) -> tuple[int, ...]:
        """(batch, heads, queries, keys) of scores, in which a single query may be packed.

        transformers packs the queries of one token that share their keys as (batch, key heads,
        group, keys).
        """
        shape = tuple(scores.shape)
        if self.multi_head:
            return (*self.multi_head[-1], *shape[-2:])
        owner = next(running_modules(), None)
        config = getattr(owner, "config", None)
        heads: Any = getattr(owner, "num_heads", None)
        heads = heads or getattr(config, "num_attention_heads", None)
        group = heads // shape[-3] if isinstance(heads, int) and len(shape) == 4 else 1
        return (shape[0], heads, 1, shape[-1]) if 1 < group == shape[-2] else shape

    def _warn_of_nothing(self) -> None:
        if not self.quiet:
            super()._warn_of_nothing()

    def never_called(self) -> str:
        """In words: that no attention was seen."""
        return (
            f"{self.switch.who}: no attention was seen. Run the model inside the block, in this "
            "thread, and give it or its attention layers. Seen are F.scaled_dot_product_attention, "
            "nn.MultiheadAttention, and a softmax over the last of four dimensions; "
            "hook_function(F.softmax, within=model) stores any other."
        )


def _written_out(
    multi_head: list[tuple[int, ...]],
    input: Tensor,
    dim: Any = None,
    *rest: Any,
    dtype: Any = None,
    **_: Any,
) -> tuple[Tensor, tuple[int, ...], dict[str, Any]] | None:
    """The scores, the shape of their pattern and options, where attention calls softmax."""
    shape, n = tuple(input.shape), input.dim()
    if dim not in (-1, n - 1) or not input.is_floating_point():
        return None
    if n == 3 and multi_head:
        shape = (*multi_head[-1], *shape[1:])
    elif n != 4:
        return None
    dtype = next((x for x in rest if isinstance(x, torch.dtype)), dtype)
    return input, shape, {"dim": -1} | ({} if dtype is None else {"dtype": dtype})


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
    """What the softmax of `F.scaled_dot_product_attention`, called so, is given.

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
    # Private: `CausalBias._materialize`, the mask that this class of tensors stands for (since
    # 2.3). It has no public name; without it the class cannot be added to a tensor.
    if attn_mask is not None and hasattr(attn_mask, "_materialize"):
        attn_mask = attn_mask._materialize(query.device)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -math.inf)
    return scores + attn_mask


_SDPA = signature(attention_scores)
