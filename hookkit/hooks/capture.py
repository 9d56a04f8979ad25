"""The functions that make hooks: `hook_output(s)` and `hook_input(s)` capture values or gradients.

`hook_tensor`, `hook_all` and `print_sizes` are for a quick look: at one tensor, at every module of
the process, at the shapes in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hookkit._core.checks import check_flag, check_function
from hookkit._core.pytree import Inputs, describe, tree_map
from hookkit.hooks.attach import call_with_note, check_hookable
from hookkit.hooks.calls import recomputing
from hookkit.hooks.collection import Hooks, Modules, hooks_of, named_modules_of, require_modules
from hookkit.hooks.eager import layer_by_layer
from hookkit.hooks.functions import modules_inside
from hookkit.hooks.hook import Hook, hook_of
from hookkit.hooks.options import BY_NAME, KINDS, HookOptions, HookScope


def hook_output(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool = True,
    stop: bool = False,
    prepend: bool = False,
) -> Hook:
    """Store the output of `module` in a `Hook`, or with `grad=True` its gradients.

    `stored` has the structure of the output: tuples, lists, dicts, deques and dataclasses, with
    copies of the tensors. Another object that holds tensors (a KV cache, a set) is stored as it is.

    With `grad` it is a tuple that the backward pass fills in: the gradient of each tensor of the
    output, or None where none arrived. As `retain_grad()` gives it, a gradient includes every use
    of the tensor, also a use inside the module. If the module returns its input, or the same tensor
    twice, each returned place has a gradient of its own. There are two exceptions, which have the
    gradient of all uses: tensors in a list or dict that the caller owns, and a returned input that
    is written in place or not used afterwards. Any other view that is later written in place has
    None. For values and gradients of one run make two hooks:
    `with hook_outputs(ms) as v, hook_outputs(ms, grad=True) as g:`.

    Args:
        module: the layer. It holds the hook, until `remove()` or the end of the `with`.
        detach: stores snapshots, which later in-place operations do not change. False stores the
            tensors themselves, in their graph; reading one that was written in place since warns.
        cpu: moves stored values to the CPU; from CUDA without waiting, until they are read.
        grad: stores the gradients instead, in the backward pass.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.
        keep: `"last"` stores the last call, `"all"` every call, in `.calls`.
        clone: False stores the detached tensor without a copy.
        stop: ends the forward, and the `with` block, when it has fired (of several: all of them).
        prepend: runs before the hooks that the module has, and their edits, not after them.

    Returns:
        The `Hook`, registered already: `.stored`, `.n_calls`, `.remove()`; a context manager.

    Raises:
        ArgumentError: `module` is no module, or an option is of a wrong kind.
        OptionError: options that exclude each other.
        HookError: a module is scripted: it runs no hooks of Python.

    >>> import torch
    >>> m = nn.Linear(5, 3)
    >>> with hook_output(m) as h, hook_output(m, grad=True) as g:
    ...     y = m(torch.randn(4, 5))
    ...     y.sum().backward()
    >>> torch.equal(h.stored, y), h.stored.requires_grad, g.stored[0][0]
    (True, False, tensor([1., 1., 1.]))
    """
    kind = _kind("hook_output", "forward", grad)
    more: Any = {"keep": keep, "clone": clone, "stop": stop, "prepend": prepend}
    return _hook(module, HookOptions("hook_output", kind, None, detach, cpu, gather, **more))


def hook_outputs(
    modules: Modules,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool = True,
    stop: bool = False,
    prepend: bool = False,
) -> Hooks:
    """Store the output of each of `modules` in `Hooks`, or the gradients of the outputs.

    Args:
        modules: any number of modules. A Sequential stands for its children, as in fastai. If they
            come from `select`, or in a dict, the hooks can be read by name.
        detach, cpu, grad, gather, keep, clone, stop, prepend: as for `hook_output`.

    Returns:
        The `Hooks`, registered already, all or none: `h["name"].stored`, `h[0]`, `.stored` of all.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> with hook_outputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(o.shape) for o in h.stored]
    [(4, 10), (4, 10), (4, 3)]
    """
    kind = _kind("hook_outputs", "forward", grad)
    more: Any = {"keep": keep, "clone": clone, "stop": stop, "prepend": prepend}
    options = HookOptions("hook_outputs", kind, None, detach, cpu, gather, **more)
    named = require_modules(named_modules_of(modules, "hook_outputs"), "hook_outputs")
    return hooks_of(named, options, modules)


def hook_input(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool = True,
    stop: bool = False,
    prepend: bool = False,
) -> Hook:
    """Store the inputs of `module`, as `Inputs`, before the module can change them.

    With `grad=True` it stores a tuple with the gradient of each tensor among the positional inputs,
    then the keyword inputs; None where none arrived. The module gets each tensor as a view, which
    has a gradient of its own. There are two exceptions, which have the gradient of all uses: the
    input of a layer with `inplace=True`, and tensors in lists and dicts, which a module may change
    for its caller. Last digits can differ from a run without the hook: `MultiheadAttention` tests
    `query is key`, and then computes its projections one by one; and gradients of an input with
    several uses (a residual) are summed in another order.

    Args:
        module: the layer.
        detach, cpu, grad, gather, keep, clone, stop, prepend: as for `hook_output`.

    Returns:
        The `Hook`, registered already; `.stored` is an `Inputs`: a tuple of the positional inputs
        that has keyword inputs by name.

    >>> import torch
    >>> m = nn.Linear(5, 3)
    >>> with hook_input(m) as h:
    ...     y = m(input=torch.randn(4, 5))
    >>> h.stored["input"].shape
    torch.Size([4, 5])
    """
    kind = _kind("hook_input", "pre", grad)
    more: Any = {"keep": keep, "clone": clone, "stop": stop, "prepend": prepend}
    return _hook(module, HookOptions("hook_input", kind, None, detach, cpu, gather, **more))


def hook_inputs(
    modules: Modules,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool = True,
    stop: bool = False,
    prepend: bool = False,
) -> Hooks:
    """Store the inputs of each of `modules` in `Hooks`, or the gradients of the inputs.

    Args:
        modules, detach, cpu, grad, gather, keep, clone, stop, prepend: as for `hook_outputs`.

    Returns:
        The `Hooks`, registered already, all or none; each stores as `hook_input` does.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with hook_inputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(i[0].shape) for i in h.stored]
    [(4, 5), (4, 10)]
    """
    kind = _kind("hook_inputs", "pre", grad)
    more: Any = {"keep": keep, "clone": clone, "stop": stop, "prepend": prepend}
    options = HookOptions("hook_inputs", kind, None, detach, cpu, gather, **more)
    named = require_modules(named_modules_of(modules, "hook_inputs"), "hook_inputs")
    return hooks_of(named, options, modules)


class GlobalHook(ExitStack):
    """Is on when it is made, until `remove()` or the end of its `with`."""

    remove = ExitStack.close


class TensorHook(GlobalHook):
    """Has the gradient of one tensor in `stored`, None before the first. See `hook_tensor`."""

    stored: Tensor | None = None


def hook_tensor(t: Tensor) -> TensorHook:
    """Store a copy of the gradient of `t`, of which PyTorch keeps none, in `.stored`.

    Call it before the backward pass; each pass replaces what the last one stored. The hook is on at
    once. If `t` requires no gradient, PyTorch raises a RuntimeError.

    >>> import torch
    >>> y = torch.ones(2, requires_grad=True) + 2
    >>> with hook_tensor(y) as h: (y**2).sum().backward()
    >>> h.stored
    tensor([6., 6.])
    """
    hook = TensorHook()

    def keep(grad: Tensor) -> None:
        hook.stored = grad.detach().clone()

    hook.callback(t.register_hook(keep).remove)  # type: ignore[no-untyped-call]
    return hook


def hook_all(
    hook_func: Callable[..., Any],
    types: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module,
) -> GlobalHook:
    """Call `hook_func(module, input, output)` at each call of every module of the process.

    This is PyTorch's global hook, on at once, also for modules made later, for losses, and for what
    summaries run. Tensors are detached, keyword inputs are not given, and what the function returns
    is ignored; it must not call such a module itself. TorchScript runs no hooks; compiled code runs
    eagerly meanwhile, in all threads.

    Args:
        hook_func: `f(module, input, output)` or `f(output)`; `input` is a tuple.
        types: only modules of this class, or of one of a tuple of classes.

    >>> import torch
    >>> seen = []
    >>> with hook_all(lambda m, i, o: seen.append(tuple(o.shape)), nn.Linear):
    ...     y = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))(torch.randn(4, 5))
    >>> seen
    [(4, 10), (4, 3)]
    """
    func = check_function("hook_all", hook_func, *KINDS["forward"])
    isinstance(None, types)  # Python's error now, and not in the first call

    def call(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, types) and not recomputing():
            seen = tree_map(Tensor.detach, (Inputs(args), output))
            call_with_note(func, module, *seen)

    hook = GlobalHook()
    hook.enter_context(layer_by_layer())
    hook.callback(register_module_forward_hook(call).remove)
    return hook


def print_sizes(model: nn.Module) -> Hooks:
    """Print `input shape → output shape`, name and class of each module of `model` as it runs.

    A line is printed when a call ends, so inner modules come first. The `Hooks` are on at once.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with print_sizes(net): y = net(torch.randn(4, 5))
    4×5 → 4×10  0 (Linear)
    4×10 → 4×10  1 (ReLU)
    4×5 → 4×10  (model) (Sequential)
    """
    modules = modules_inside(model, "print_sizes")
    names = {id(m): name or "(model)" for name, m in modules.items()}

    def write(module: nn.Module, inputs: Inputs, output: Any) -> None:
        name = names.get(id(module), "(a copy)")  # DataParallel's
        line = f"{describe(inputs)} → {describe(output)}  {name} ({type(module).__name__})"
        print(line)  # noqa: T201 - it is what the function is for

    options = HookOptions("print_sizes", "forward", write, keep="none")
    return hooks_of(named_modules_of(modules, "print_sizes"), options)


# --- shared helpers


def _kind(who: str, kind: str, grad: bool) -> str:
    """Return the kind of hook for values, or with `grad` the one for their gradients."""
    if grad is False or not check_flag(who, "grad", grad, BY_NAME):
        return kind
    return "pre_grad" if kind == "pre" else "grad"


def _hook(module: nn.Module, options: HookOptions) -> Hook:
    check_hookable(module, options.who)
    hook = hook_of(module, HookScope(options))
    hook.register()
    return hook
