"""The attention pattern, how much each query attends to each key: read and edited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.checks import check_choice, check_flag, check_module
from hookkit.editing.edit import Calls, Function, edit_options
from hookkit.errors import HookError
from hookkit.hooks.attention import AttentionHooks
from hookkit.hooks.functions import FunctionHooks, Within
from hookkit.hooks.options import HookOptions


def hook_attention(
    within: Within,
    detach: bool = True,
    cpu: bool = False,
    *,
    scores: bool = False,
    hook: Callable[..., Any] | None = None,
    keep: str = "all",
) -> FunctionHooks:
    """Stores the attention pattern of each attention in `within`, for the time of a `with`.

    Attention is `F.scaled_dot_product_attention`, fused or not; `nn.MultiheadAttention`, also in an
    encoder layer; and any softmax over the last of four dimensions, as eager attention has it (also
    one that is none: name the attention layers in `within` if a model has such). Masks, the causal
    mask, scale, groups of heads and caches are those of the call; dropout is left out, and so is
    the column of an attention sink (gpt-oss): there rows sum to less than 1.
    The run is not changed, and fused attention stays fused; only that of `nn.TransformerEncoder`
    in evaluation mode runs layer by layer, so that padded positions have values in place of 0.
    Memory: all patterns, unless `keep` says otherwise.

    Not seen: `flex_attention`, a softmax over three dimensions (`hook_function(F.softmax)` stores
    it), and other threads.

    Args:
        within: a model (all modules in it), or modules, as `select` gives them; None is every call
            in the block, without a module's name.
        detach, cpu: as for `hook_output`. What fused attention does not compute has no gradient.
        scores: stores what the softmax is given: logits, scaled and masked (-inf, or as the model
            masks).
        hook: `hook(call, inputs, output)`, or of one argument, the pattern, gives what to store.
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


def edit_attention(
    within: Within,
    edit: Function,
    *,
    scores: bool = False,
    calls: Calls = None,
) -> FunctionHooks:
    """Replaces the attention pattern of each attention in `within`, for the time of a `with`.

    Attention whose pattern is edited is computed from it, `dropout(pattern) @ value`; all other
    calls stay as they are, fused, and only these are seen by hooks on functions further out. Which
    attention is seen, and how layers are named: see `hook_attention`. Around `generate`, `at`
    counts the keys from the first token and the queries from the first of the call.

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
        HookError: later, before the pattern is used: it gave another shape, or the attention has
            not four dimensions. Where `at` is outside, PyTorch's own error, with a note.

    >>> from hookkit.edits import zero
    >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with edit_attention(layer, zero(at=(..., 0))):  # nobody attends to the first position
    ...     _, pattern = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> pattern[..., 0]
    tensor([[0., 0., 0., 0., 0.]], grad_fn=<SelectBackward0>)
    """
    who = "edit_attention"
    kind = "pre" if check_flag(who, "scores", scores) else "forward"
    return AttentionHooks(within, edit_options(who, kind, edit, calls), numbered=False)


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
