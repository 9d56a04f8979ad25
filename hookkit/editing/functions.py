"""`edit_function`: change what a torch function gives, takes, or gets as gradient.

The edits of `edits`, on the calls that `hooks.functions` sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookkit.checks import check_flag
from hookkit.editing.edits import Calls, Function, edit_options
from hookkit.errors import OptionError
from hookkit.hooks.function_calls import Within
from hookkit.hooks.functions import KINDS, FunctionHooks


def edit_function(
    f: Callable[..., Any],
    edit: Function,
    within: Within = None,
    *,
    inputs: bool = False,
    grad: bool = False,
    calls: Calls = None,
) -> FunctionHooks:
    """Replaces what calls of the torch function `f` return, for the time of a `with`.

    A head inside fused attention is ablated so: what `F.scaled_dot_product_attention` returns has
    the heads as a dimension, (batch, head, position, channel), in `nn.MultiheadAttention` too.

    Which calls are seen is described at `hook_function`. Of one that works in place, `x.relu_()` or
    `F.relu(x, inplace=True)`, the replacement is in `x` too; to edit one with `out=` is an error.

    Args:
        f, within: as for `hook_function`.
        edit: `edit(call, inputs, output)`, or of one argument, the output; gives the replacement,
            of the same structure, or None to leave it. Or a ready-made edit: `zero`, `scale`,
            `add`, `replace`, `patch_from` (from what `hook_function` stored, call by call).
        inputs: edits what the function is called with: `edit(call, inputs)`, see `edit_input`.
        grad: edits the gradients of what it returns: `edit(call, grad)`, see `edit_grad`.
        calls: which calls are edited, by the number that `hook_function` would give them in their
            module: a collection of numbers, one number, or a function `f(number)`; None: all.

    Returns:
        `FunctionHooks`, to be entered: one hook for each module that calls `f`, by a name such as
        `blocks.3.attn/softmax`. `n_calls` counts the calls of each.

    Raises:
        ArgumentError: PyTorch reports no calls of `f`; `edit` is no function.
        OptionError: `inputs` and `grad` together; `calls` has what is no number of a call.
        HookError: later, in the forward: a replacement of another structure; a call with out=.

    >>> import torch
    >>> import torch.nn.functional as F
    >>> from hookkit.editing import zero
    >>> q = torch.ones(1, 2, 3, 4)
    >>> with edit_function(F.scaled_dot_product_attention, zero(at=(slice(None), 1))) as edits:
    ...     F.scaled_dot_product_attention(q, q, q).sum((0, 2, 3))  # of each head
    tensor([12.,  0.])
    >>> edits.n_calls
    {'scaled_dot_product_attention': 1}
    """
    who = "edit_function"
    inputs, grad = check_flag(who, "inputs", inputs), check_flag(who, "grad", grad)
    if inputs and grad:
        raise OptionError(
            "edit_function: inputs=True edits what the function takes, grad=True the gradients of "
            "what it gives. Give one of the two, and nest two blocks for both."
        )
    o = edit_options(who, KINDS[inputs, grad], edit, calls)
    return FunctionHooks([f], within, o, numbered=False)
