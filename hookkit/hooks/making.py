"""The functions that make hooks which store: of outputs, inputs, and the gradients of both."""

from __future__ import annotations

import torch
from torch import nn

from hookkit.checks import check_flag
from hookkit.hooks.collection import Hooks, Modules
from hookkit.hooks.hook import Hook
from hookkit.hooks.snapshot import BY_NAME, Kind, Options

_PLAIN = Options("hook_outputs")  # to make the same for each block would cost 5 µs
_LAST = "last"  # Python has one of it


def hook_output(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
    retain_grad: bool = False,
    prepend: bool = False,
) -> Hook:
    """A `Hook` that stores what `module` returns, or with `grad=True` the gradient of that.

    `stored` has the structure of the output: tuples, lists, dicts, deques and dataclasses, with
    copies of the tensors. Another object that holds tensors (a KV cache, a set) is stored as a
    reference; reading it warns if it has changed since, or if an option (`cpu`, `dtype`, …) was
    not applied to it.

    With `grad` it is a tuple with the gradient of each tensor of the output (None where none
    arrived), filled in by the backward pass: the sum over all uses of that tensor after the module
    has returned it. What the module itself computes from it does not count, nor, where the module
    returns its input, what else the input is used for.

    Args:
        module: the layer. It holds the hook, until `remove()` or the end of the `with`.
        detach: stores tensors without their graph; a snapshot, which later in-place operations
            do not change.
        cpu: moves what is stored to the CPU; from CUDA without waiting, until it is read.
        grad: stores the gradients instead, in the backward pass.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.
        keep: `"last"` stores the last call, `"all"` every call, in `.calls`.
        clone: True copies even with `detach=False`; False stores the live tensor, and reading one
            that was overwritten since warns (but in `inference_mode`, which counts no writes).
        dtype: floating point tensors are stored as this.
        stop: ends the forward, and the `with` block, when it has fired.
        retain_grad: stores both: the output in `.stored`, its gradient in `.grad`.
        prepend: runs before the hooks that the module has, and their edits, not after them.

    Returns:
        The `Hook`, registered already: `.stored`, `.n_calls`, `.remove()`; a context manager.

    Raises:
        ArgumentError: `module` is no module, or an option is of a wrong kind.
        OptionError: options that exclude each other.
        HookError: a module is scripted: it runs no hooks of Python.

    >>> m = nn.Linear(5, 3)
    >>> with hook_output(m) as h:
    ...     y = m(torch.randn(4, 5))
    >>> torch.equal(h.stored, y), h.stored.requires_grad
    (True, False)
    >>> with hook_output(m, retain_grad=True) as h:
    ...     m(torch.randn(4, 5)).sum().backward()
    >>> h.stored.shape, h.grad[0]
    (torch.Size([4, 3]), tensor([1., 1., 1.]))
    """
    kind: Kind = "grad" if check_flag("hook_output", "grad", grad, BY_NAME) else "forward"
    how = (detach, cpu, gather, False, keep, clone, dtype, stop)
    o = Options("hook_output", kind, None, *how, retain_grad=retain_grad, prepend=prepend)
    return Hook.made(module, o)


def hook_outputs(
    modules: Modules,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
    retain_grad: bool = False,
    prepend: bool = False,
) -> Hooks:
    """`Hooks` that store what each of `modules` returns, or the gradients of that.

    Each stores as `hook_output` does.

    Args:
        modules: any number of modules. A Sequential stands for its children, as in fastai. Of what
            `select` returns, or of a dict, the hooks can be read by name.
        detach: stores tensors without their graph; a snapshot, which later in-place operations
            do not change.
        cpu: moves what is stored to the CPU; from CUDA without waiting, until it is read.
        grad: stores the gradients instead, in the backward pass.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.
        keep: `"last"` stores the last call, `"all"` every call, in `.calls`.
        clone: True copies even with `detach=False`; False stores the live tensor, and reading one
            that was overwritten since warns (but in `inference_mode`, which counts no writes).
        dtype: floating point tensors are stored as this.
        stop: ends the forward, and the `with` block, when the last of them has fired.
        retain_grad: stores both: outputs in `.stored`, and in each hook's `.grad` their gradients.
        prepend: runs before the hooks that the module has, and their edits, not after them.

    Returns:
        The `Hooks`, registered already, all or none: `h["name"].stored`, `h[0]`, `.stored` of all.

    Raises:
        ArgumentError: something in `modules` is no module, or an option is of a wrong kind.
        OptionError: options that exclude each other.
        HookError: a module is scripted: it runs no hooks of Python.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> with hook_outputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(o.shape) for o in h.stored]
    [(4, 10), (4, 10), (4, 3)]
    """
    usual = detach is True and cpu is False and grad is False and gather is False
    usual = usual and retain_grad is False and prepend is False
    if usual and clone is None and dtype is None and stop is False and keep is _LAST:
        return Hooks.of(modules, _PLAIN)
    kind: Kind = "grad" if check_flag("hook_outputs", "grad", grad, BY_NAME) else "forward"
    how = (detach, cpu, gather, False, keep, clone, dtype, stop)
    o = Options("hook_outputs", kind, None, *how, retain_grad=retain_grad, prepend=prepend)
    return Hooks.of(modules, o)


def hook_input(
    module: nn.Module,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
    retain_grad: bool = False,
    prepend: bool = False,
) -> Hook:
    """A `Hook` that stores what `module` is called with, as `Inputs`, before it can change it.

    With `grad=True` the gradients of that: a tuple with one entry for each tensor among the
    positional inputs and then the keyword inputs, None where none arrived. Each place has its own
    gradient, so a tensor that is passed twice comes to the module as two views of it, as with
    PyTorch's full backward hook. `MultiheadAttention`, which tests `query is key`, then computes
    its projections one by one, and the last digits can differ. Other values of the run stay as they
    are, but not always its gradients: where an input has several uses, in the module or beside it
    (a residual), they are summed in another order, so that gradients of the layers before can
    differ in the last digits. All this holds for `retain_grad=True` too.

    Args:
        module: the layer. It holds the hook, until `remove()` or the end of the `with`.
        detach: stores tensors without their graph; a snapshot, which later in-place operations
            do not change.
        cpu: moves what is stored to the CPU; from CUDA without waiting, until it is read.
        grad: stores the gradients instead, in the backward pass.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.
        keep: `"last"` stores the last call, `"all"` every call, in `.calls`.
        clone: True copies even with `detach=False`; False stores the live tensor, and reading one
            that was overwritten since warns (but in `inference_mode`, which counts no writes).
        dtype: floating point tensors are stored as this.
        stop: ends the forward, and the `with` block, when it has fired.
        retain_grad: stores both: the inputs in `.stored`, its gradient in `.grad`.
        prepend: runs before the hooks that the module has, and their edits, not after them.

    Returns:
        The `Hook`, registered already; `.stored` is an `Inputs`: a tuple of the positional inputs
        that has keyword inputs by name.

    Raises:
        ArgumentError: `module` is no module, or an option is of a wrong kind.
        OptionError: options that exclude each other.
        HookError: a module is scripted: it runs no hooks of Python.

    >>> m = nn.Linear(5, 3)
    >>> with hook_input(m) as h:
    ...     y = m(input=torch.randn(4, 5))
    >>> h.stored["input"].shape
    torch.Size([4, 5])
    """
    kind: Kind = "pre_grad" if check_flag("hook_input", "grad", grad, BY_NAME) else "pre"
    how = (detach, cpu, gather, False, keep, clone, dtype, stop)
    o = Options("hook_input", kind, None, *how, retain_grad=retain_grad, prepend=prepend)
    return Hook.made(module, o)


def hook_inputs(
    modules: Modules,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    keep: str = "last",
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    stop: bool = False,
    retain_grad: bool = False,
    prepend: bool = False,
) -> Hooks:
    """`Hooks` that store what each of `modules` is called with, or the gradients of that.

    Each stores as `hook_input` does.

    Args:
        modules: any number of modules. A Sequential stands for its children, as in fastai. Of what
            `select` returns, or of a dict, the hooks can be read by name.
        detach: stores tensors without their graph; a snapshot, which later in-place operations
            do not change.
        cpu: moves what is stored to the CPU; from CUDA without waiting, until it is read.
        grad: stores the gradients instead, in the backward pass.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.
        keep: `"last"` stores the last call, `"all"` every call, in `.calls`.
        clone: True copies even with `detach=False`; False stores the live tensor, and reading one
            that was overwritten since warns (but in `inference_mode`, which counts no writes).
        dtype: floating point tensors are stored as this.
        stop: ends the forward, and the `with` block, when the last of them has fired.
        retain_grad: stores both: inputs in `.stored`, its gradient in `.grad`.
        prepend: runs before the hooks that the module has, and their edits, not after them.

    Returns:
        The `Hooks`, registered already, all or none: `h["name"].stored`, `h[0]`, `.stored` of all.

    Raises:
        ArgumentError: something in `modules` is no module, or an option is of a wrong kind.
        OptionError: options that exclude each other.
        HookError: a module is scripted: it runs no hooks of Python.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with hook_inputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(i[0].shape) for i in h.stored]
    [(4, 5), (4, 10)]
    """
    kind: Kind = "pre_grad" if check_flag("hook_inputs", "grad", grad, BY_NAME) else "pre"
    how = (detach, cpu, gather, False, keep, clone, dtype, stop)
    o = Options("hook_inputs", kind, None, *how, retain_grad=retain_grad, prepend=prepend)
    return Hooks.of(modules, o)
