"""Change the output, the input or the gradient of a layer, inside a `with` block.

An edit is a hook that replaces the value it sees and stores nothing: `Hooks(edit=True,
keep="none")`. Hooks run in the order in which they were written: a capture before the edit sees
the layer's own output, a capture after it the edited one.

    with hook_output(layer) as own, edit_output(layer, zero()), hook_output(layer) as edited:
        model(x)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from hookkit._core.checks import check_flag, check_function, check_module, is_whole, short_repr
from hookkit.edits.changes import add, patch_from, replace, scale, zero
from hookkit.errors import ArgumentError, HookError, OptionError
from hookkit.hooks import FunctionHooks, Hooks
from hookkit.hooks.attach import add_hook_note
from hookkit.hooks.attention import AttentionHooks
from hookkit.hooks.calls import call_kind
from hookkit.hooks.collection import Modules, Named, hooks_of, named_modules_of, require_modules
from hookkit.hooks.functions import Within, function_kind
from hookkit.hooks.hook import NOT_WANTED
from hookkit.hooks.options import KINDS, HookOptions
from hookkit.hooks.selection import select

Function = Callable[..., Any]
Calls = int | Collection[int] | Callable[[int], bool] | None


def edit_output(
    modules: nn.Module | Modules,
    f: Function | Mapping[str, Function],
    *,
    calls: Calls = None,
) -> Hooks:
    """Replace what a module returns by what `f(module, input, output)` returns, inside a `with`.

    The edit is on inside its `with` block only, on all modules or none. The end of the block warns
    of layers that were never reached. Compiled models run eagerly in the block. Activation
    checkpointing runs layers again in the backward pass: run that inside the block too, or its
    gradients are those of the layers without the edit.

    `Hook(module, f, edit=True)` edits in the same way from when it is made until `remove()`, and
    stores the result; with `prepend=True` it edits before the hooks that the module has.
    `edit_outputs` is another name of this function.

    Args:
        modules: one module (a Sequential counts as one), or several: an iterable of modules, a
            ModuleList, or what `select` returns, with its names and paths: for `"lstm[0]"` `f` gets
            only that tensor. A module that is given twice is edited once.
        f: `f(module, input, output)`, with the inputs as an `Inputs` tuple and the live output; or
            `f(output)`. It returns the replacement, of the same structure, or None to change
            nothing, and must not write into the output. Or a ready-made edit: `zero`, `scale`,
            `add`, `replace`, `patch_from`. Or a dict with another edit for each layer of a model,
            `{"blocks.3": add(v), "blocks.5": zero()}`, whose keys are what `select` takes. Other
            layers are not changed.
        calls: which calls of a module are edited, by their number, from 0 in each `with`: a
            collection of numbers, one number, or a function `f(number)`; None edits all. In
            `generate` call 0 is the prompt and each further call a token; give each `generate` its
            own `with`.

    Returns:
        `Hooks` that store nothing, also for one module. `n_calls` counts the calls of each layer
        (or its gradients), by its name or position, without those that a checkpoint repeats and
        those of a compiled graph.

    Raises:
        ArgumentError: `modules` holds something that is not a module; `f` is not a function; or it
            is a dict, and `modules` is not a model.
        SelectionError: a key of `f` selects nothing.
        OptionError: no module is given; two keys of `f` select one layer; `calls` holds something
            that is not the number of a call.
        HookError: a module is scripted. Later, in the forward: a replacement has another structure;
            a ready-made edit finds no tensor; or `calls` is given where numbers are not known: in a
            compiled graph, and in a checkpoint's recomputation of several calls. If a ready-made
            edit does not fit, PyTorch's own error gets a note with the layer.

    >>> import torch
    >>> from hookkit.edits import zero
    >>> from hookkit.hooks.selection import select
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> with edit_output(net[1], lambda module, input, output: output + 1) as edits:
    ...     _ = net(torch.ones(1, 2))
    >>> with edit_output(select(net, nn.Linear), zero()) as edits:
    ...     net(torch.ones(1, 2)).sum().item(), edits.n_calls
    (0.0, {'0': 1, '2': 1})
    """
    return _edits("edit_output", "forward", modules, f, calls)


def edit_input(
    modules: nn.Module | Modules,
    f: Function | Mapping[str, Function],
    *,
    calls: Calls = None,
) -> Hooks:
    """Replace the inputs of a module by what `f(module, input)` returns, inside a `with`.

    The rest works as in `edit_output`. `edit_inputs` is another name of this function.

    Args:
        modules, calls: as in `edit_output`; paths are into the inputs.
        f: `f(module, input)` or `f(input)`, with an `Inputs`: a tuple of the positional inputs,
            keyword inputs by name (`input["mask"]`, `input.kwargs`). It returns the one positional
            input, a tuple of as many as there are (keyword inputs stay), an `Inputs` for all, or
            None. Or a ready-made edit, or a dict of edits.

    Returns:
        `Hooks` that store nothing, as `edit_output`.

    >>> import torch
    >>> from hookkit.edits import scale
    >>> with edit_input(layer := nn.Identity(), scale(2)):
    ...     layer(torch.ones(2))
    tensor([2., 2.])
    """
    return _edits("edit_input", "pre", modules, f, calls)


def edit_grad(modules: nn.Module | Modules, f: Function | Mapping[str, Function]) -> Hooks:
    """Replace the gradient of each tensor that a module returns by what `f(module, grad)` returns.

    The backward pass goes on with the replacement. Forward and backward have to run inside the
    block. `f` sees the gradient after the edits and hooks that were written before it, and after
    those on an inner module that returns the same tensor. The rest works as in `edit_output`.
    `edit_grads` is another name of this function.

    Args:
        modules: as in `edit_output`.
        f: `f(module, grad)` or `f(grad)`, called for each tensor of the output when its gradient
            arrives. It returns a tensor of the same shape, or None, and must not write into the
            gradient. Or a ready-made edit, or a dict of edits.

    Returns:
        `Hooks` that store nothing; `n_calls` counts the gradients that were edited.

    >>> import torch
    >>> from hookkit.edits import scale
    >>> x = torch.ones(2, requires_grad=True)
    >>> with edit_grad(layer := nn.Identity(), scale(5)):
    ...     layer(x).sum().backward()
    >>> x.grad
    tensor([5., 5.])
    """
    return _edits("edit_grad", "grad", modules, f)


edit_outputs, edit_inputs, edit_grads = edit_output, edit_input, edit_grad


def edit_function(
    f: Callable[..., Any],
    edit: Function,
    within: Within = None,
    *,
    inputs: bool = False,
    grad: bool = False,
    calls: Calls = None,
) -> FunctionHooks:
    """Replace what calls of the torch function `f` return, inside a `with`.

    The example ablates a head inside fused attention: the output of
    `F.scaled_dot_product_attention` is (batch, head, position, channel). In `generate` models with
    grouped queries pack their heads, and a warning says so; then edit the input of the output
    projection, `edit_input(attn.o_proj, …)`.

    `hook_function` says which calls are seen. Editing a call that works in place, or has `out=`,
    raises an error.

    Args:
        f, within: as for `hook_function`.
        edit: `edit(call, inputs, output)` or `edit(output)`. It returns the replacement, of the
            same structure, or None to change nothing. Or a ready-made edit: `zero`, `scale`, `add`,
            `replace`, `patch_from` (from what `hook_function` stored, call by call).
        inputs: edit the inputs of the function instead: `edit(call, inputs)`, see `edit_input`.
        grad: edit the gradients of its outputs instead: `edit(call, grad)`, see `edit_grad`.
        calls: which calls are edited, by the number that `hook_function` would give them in their
            module: a collection of numbers, one number, or a function `f(number)`; None: all.

    Returns:
        `FunctionHooks`, to be entered: one hook for each module that calls `f`, by a name such as
        `blocks.3.attn/softmax`. `n_calls` counts the calls of each.

    Raises:
        ArgumentError: `f` is not a function of torch; `edit` is not a function.
        OptionError: `inputs` and `grad` are given together; `calls` holds something that is not the
            number of a call.
        HookError: later, in the forward: a replacement has another structure; a call is in place.

    >>> import torch
    >>> from hookkit.edits import zero
    >>> import torch.nn.functional as F
    >>> q = torch.ones(1, 2, 3, 4)
    >>> with edit_function(F.scaled_dot_product_attention, zero(at=(slice(None), 1))) as edits:
    ...     F.scaled_dot_product_attention(q, q, q).sum((0, 2, 3))  # of each head
    tensor([12.,  0.])
    >>> edits.n_calls
    {'scaled_dot_product_attention': 1}
    """
    kind = function_kind("edit_function", inputs, grad)
    if kind == "pre_grad":
        raise OptionError(
            "edit_function: inputs=True edits what the function takes, grad=True the gradients of "
            "what it gives. Give one of the two, and nest two blocks for both."
        )
    return FunctionHooks(
        f, within, _edit_options("edit_function", kind, edit, calls), numbered=False
    )


def edit_attention(
    within: Within,
    edit: Function,
    *,
    scores: bool = False,
    calls: Calls = None,
) -> FunctionHooks:
    """Replace the attention pattern of each attention in `within`, inside a `with`.

    An edited attention is computed from its pattern, `dropout(pattern) @ value`. All other calls
    stay fused, and hooks on functions in outer blocks see only these. `hook_attention` says which
    attention is seen, and how layers are named. In `generate`, `at` counts keys from the first
    token, and queries from the first query of the call.

        edit_attention(model, zero(at=(..., 7, 2)))             # the edge from query 7 to key 2
        edit_attention(model, replace(-math.inf, at=(..., 7, 2)), scores=True)  # the rest sums to 1
        edit_attention(select(model, "h.5.attn"), zero(at=(slice(None), 3)))    # head 3 of a layer
        edit_attention(model, patch_from(clean))                # from `hook_attention(model)`

    Args:
        within: as for `hook_attention`.
        edit: `edit(call, inputs, pattern)` or `edit(pattern)`: (batch, heads, queries, keys). It
            returns the replacement, or None to change nothing. Or a ready-made edit.
        scores: edit the inputs of the softmax instead: `edit(call, scores)`.
        calls: which calls of each module are edited, as for `edit_output`: in `generate` 0 is the
            prompt.

    Returns:
        `FunctionHooks` that store nothing; `n_calls` counts the calls of each module.

    Raises:
        ArgumentError: `within` holds no modules, or `edit` is not a function.
        OptionError: `calls` holds something that is not the number of a call.
        HookError: later, before the pattern is used: the edit returned another shape, or the
            attention does not have four dimensions. If `at` is out of bounds, PyTorch's own error
            gets a note.

    >>> import torch
    >>> from hookkit.edits import zero
    >>> layer = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with edit_attention(layer, zero(at=(..., 0))):  # nobody attends to the first position
    ...     _, pattern = layer(*[torch.randn(1, 5, 8)] * 3)
    >>> pattern[..., 0]
    tensor([[0., 0., 0., 0., 0.]], grad_fn=<SelectBackward0>)
    """
    who = "edit_attention"
    kind = "pre" if check_flag(who, "scores", scores) else "forward"
    return AttentionHooks(within, _edit_options(who, kind, edit, calls), numbered=False)


def _edits(who: str, kind: str, modules: Any, f: Any, calls: Calls = None) -> Hooks:
    """Return hooks that edit and store nothing, one for each module (or part of its output)."""
    if isinstance(f, Mapping):
        named, f = _by_layer(who, modules, f)
    elif isinstance(modules, nn.Module) and not _is_bare_container(modules):
        named = [(None, modules, "")]
    else:
        named = require_modules(named_modules_of(modules, who), who)
    once = {(id(m), path): (name, m, path) for name, m, path in named}
    options = _edit_options(who, kind, f, calls)
    return hooks_of(list(once.values()), options, modules, only_in_with=True)


def _is_bare_container(module: nn.Module) -> bool:
    """Return True for a ModuleList or ModuleDict without a forward of its own."""
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return is_container and type(module).forward is nn.Module.forward


def _by_layer(
    who: str, model: Any, edits: Mapping[str, Function]
) -> tuple[list[Named], dict[str, Function]]:
    """Return the layers of `model` that the keys of `edits` select, and name → its edit."""
    check_module(who, model, f"A dict of edits selects in a model: {who}(model, {{name: edit}}).")
    layers, by_name, keys = list[Named](), dict[str, Function](), dict[tuple[int, str], str]()
    for key, edit in edits.items():
        for name, module, path in named_modules_of(select(model, key), who):
            if (other := keys.setdefault((id(module), path), key)) != key:
                raise OptionError(
                    f'{who}: two keys mean the layer "{name}", {other!r} and {key!r}. Give it one '
                    "edit."
                )
            by_name[str(name)] = edit
            layers.append((name, module, path))
    return require_modules(layers, who), by_name


def _edit_options(who: str, kind: str, f: Any, calls: Calls) -> HookOptions:
    """Return the options of hooks that edit by `f` (or a dict, by name) and store nothing.

    Args:
        who: the public function that was called, for messages.
        kind: a key of `KINDS`, which has the arguments of an edit.
        f: a function of these arguments, or of the last one; or a ready-made edit, which also gets
            the hook.
        calls: as in `edit_output`.
    """

    def checked(f: Any) -> Any:
        if any(f is maker for maker in (add, patch_from, replace, scale, zero)):
            raise ArgumentError(
                f"{who}: {f.__name__} makes an edit, and is none itself. Call it: {f.__name__}(…)."
            )
        is_ready_made = getattr(f, "wants_hook", False)
        return f if is_ready_made else check_function(who, f, *KINDS[kind], name="f")

    several = isinstance(f, Mapping)
    f = {name: checked(edit) for name, edit in f.items()} if several else checked(f)
    if several or calls is not None:
        f = _Edit(who, f, calls)
    return HookOptions(who, kind, f, edit=True, keep="none")


class _Edit:
    """Calls an edit (from a dict, the edit of the layer) in the calls that `calls=` chooses."""

    wants_hook = True

    def __init__(self, who: str, f: Any, calls: Any) -> None:
        self.who, self.f = who, f
        self.wanted: Any = None
        if callable(calls):
            self.wanted = check_function(who, calls, "number", name="calls")
        elif calls is not None:
            numbers = calls if isinstance(calls, Collection) else [calls]
            if not all(is_whole(n) and n >= 0 for n in numbers):
                raise OptionError(
                    f"{who}(calls={short_repr(calls)}): calls are numbered 0, 1, … in each `with`. "
                    "Give a collection of such numbers, or a function f(number) that is true for "
                    "some."
                )
            self.wanted = frozenset(numbers).__contains__

    def __call__(self, module: nn.Module, *seen: Any, hook: Any) -> Any:
        """Return the replacement, or None to change nothing."""
        if self.wanted is not None and not self._is_wanted(hook):
            return None
        f = self.f[hook.name] if isinstance(self.f, dict) else self.f
        try:
            if getattr(f, "wants_hook", False):
                return f(module, *seen, hook=hook)
            return f(module, *seen)
        except Exception as e:
            add_hook_note(e, f, hook.label)
            raise

    def _is_wanted(self, hook: Any) -> bool:
        call = call_kind()
        if call == "compiled" or (call == "recomputed" and hook.n_calls > 1):
            raise HookError(
                f"{self.who} on {hook.label}: compiled code and checkpoints that run a layer "
                "several times do not say which call this is, so `calls` cannot be followed. Use "
                "the edit in a `with` block, without checkpoints."
            )
        edits = bool(self.wanted(0 if call == "recomputed" else hook.n_calls))
        # NOT_WANTED makes `Hook.fired` False; "edited" stays once a call was edited
        hook.silent_reason = "edited" if edits else hook.silent_reason or NOT_WANTED
        return edits
