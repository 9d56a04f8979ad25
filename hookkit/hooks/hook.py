"""`Hook`: one function on one module, and what it stored.

A `Hook` is what PyTorch calls. It is registered when it is made, removed by `remove()` or at the
end of its `with` block, and shares its `Block` with the hooks that were made with it. The module
holds the hook, the hook holds the module weakly. Copies and pickles of a hook, also those made with
its module, are on no module and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self
from weakref import ref

from torch import Tensor, nn

from hookkit.checks import check_flag
from hookkit.errors import HookError, OptionError
from hookkit.hooks.attach import check_hookable, graph_task
from hookkit.hooks.block import Block, Registered
from hookkit.hooks.calls import MISSING, Calls, is_compiling
from hookkit.hooks.snapshot import snapshot, version_of
from hookkit.nested import is_path


class Hook(Calls, Registered):
    """One function, called at each forward (or backward) of one module; keeps what it returns.

    Args:
        m: the module. Held weakly; the module holds the hook.
        hook_func: `f(module, input, output)`, or `f(module, input)` with `pre=True`, or
            `f(module, grad_input, grad_output)` with `is_forward=False`. A function of one
            argument, or of none that Python can read, gets the last of these alone: `torch.mean`,
            `lambda o: o.std()`. What it returns is stored. `input` is an `Inputs`: a tuple of the
            positional inputs, keyword inputs by name. None stores the output (pre: the inputs).
        is_forward: False registers PyTorch's full backward hook.
        detach: `hook_func` sees detached tensors, and what is stored is a snapshot. Without it
            the tensors themselves are stored, in their graph; reading one that was written in place
            since warns. An `edit` always sees the live tensors.
        cpu: what is stored is moved to the CPU; from CUDA without waiting, until it is read.
        gather: reading `stored` joins the ranks' batches; every rank has to read it.
        pre: before the forward instead of after it.
        edit: what `hook_func` returns (unless None) replaces the output (pre: the inputs, as one
            value, a tuple or `Inputs`; backward: `grad_input`). Of another structure it raises.
        keep: `"last"` call, `"all"` calls, in `.calls`, or `"none"`: nothing is stored.
        clone: False stores the detached tensor without a copy.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
        prepend: before the hooks that the module has, instead of after them.
        name: what messages call the module.
        leaf: path into the output, such as `[0]`: stands for the output everywhere.

    Raises:
        ArgumentError: `m` is no module, `hook_func` no function.
        OptionError: an option has a value that cannot work.
        HookError: `m` is scripted; or, as the model runs, an edit gave another structure.

    >>> import torch
    >>> m = nn.Linear(2, 3)
    >>> with Hook(m, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = m(torch.zeros(4, 2))
    >>> h.stored, h.n_calls
    ((4, 3), 1)
    """

    def __init__(
        self,
        m: nn.Module,
        hook_func: Callable[..., Any] | None,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = False,
        gather: bool = False,
        *,
        pre: bool = False,
        edit: bool = False,
        keep: str = "last",
        clone: bool = True,
        stop: bool = False,
        prepend: bool = False,
        name: str | None = None,
        leaf: str = "",
    ) -> None:
        kind = kind_of("Hook", is_forward, pre)
        block = Block(
            "Hook",
            kind,
            hook_func,
            detach,
            cpu,
            gather,
            edit=edit,
            keep=keep,
            clone=clone,
            stop=stop,
            prepend=prepend,
        )
        check_hookable(m, "Hook")
        if not isinstance(leaf, str) or not is_path(leaf):
            raise OptionError(
                f"Hook: leaf={leaf!r} is no path into what a module gives. Write it as [0], .name "
                "or ['key'], or one after the other."
            )
        self._set(m, block, name, leaf)
        self.register()

    @classmethod
    def of(cls, m: nn.Module, block: Block, name: str | None = None, leaf: str = "") -> Self:
        """A hook of `block` on `m`, which is not registered yet."""
        hook = cls.__new__(cls)
        hook._set(m, block, name, leaf)
        return hook

    def _set(self, m: nn.Module | None, block: Block, name: str | None, leaf: str) -> None:
        self._module = _gone if m is None else ref(m)
        self.switch, self.observes, self.name, self.leaf = block, not block.edit, name, leaf

    def _clear(self) -> None:
        self.n_calls, self.last, self.all, self.version, self.why = 0, None, None, -1, ""
        self.source, self.n_cleared = (), self.n_cleared + 1

    def _each(self) -> tuple[Hook]:
        return (self,)

    def _put(self) -> None:
        """Registers it on its module."""
        if self.registered:
            return
        m, block = self._module(), self.switch
        if m is None:
            raise HookError(f"{block.who}: the module of this hook is gone. Make a new hook.")
        kind, first = block.kind, block.prepend
        if kind == "forward" or kind == "grad":
            kwargs = not block.fast or self.leaf != ""
            self.handle = m.register_forward_hook(self, prepend=first, with_kwargs=kwargs)
        elif kind == "backward":
            self.handle = m.register_full_backward_hook(self, prepend=first)
        else:
            self.handle = m.register_forward_pre_hook(self, prepend=first, with_kwargs=True)
        self.registered = True

    # -- called by PyTorch --------------------------------------------------------------------

    def __call__(
        self, module: nn.Module, args: Any, x: Any = MISSING, output: Any = MISSING
    ) -> Any:
        """After the forward, before it, or in the backward. First a snapshot of one tensor."""
        block = self.switch
        # PyTorch calls a hook that was removed during this same call once more
        if not self.registered or not block.on:
            return None
        if not block.fast or type(x) is not Tensor or is_compiling() or graph_task() != -1:
            return self._run(module, args, x, output)
        self.n_calls += 1
        if block.detach:
            self.last = snapshot(x)
        else:
            self.last, self.version = x, version_of(x)
        return None

    @property
    def hook(self) -> Self:
        """Itself: what fastai's Hook keeps here is the handle, with `remove()`."""
        return self

    def hook_fn(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Calls `hook_func(m, i, o)` as PyTorch does, and stores what it returns.

        >>> import torch
        >>> m, x = nn.Linear(2, 3), torch.zeros(4, 2)
        >>> h = Hook(m, lambda m, i, o: o.shape)
        >>> h.remove(); h.hook_fn(m, (x,), m(x)); h.stored
        torch.Size([4, 3])
        """
        args, kwargs = i if isinstance(i, tuple) else (i,), getattr(i, "kwargs", {})
        if self.switch.kind in ("forward", "pre"):
            return self._forward(m, args, kwargs, o)
        return self._backward(m, i, i if self.switch.kind == "pre_grad" else o)

    def __reduce__(self) -> Any:
        return _inert, ()


def kind_of(who: str, is_forward: bool, pre: bool) -> str:
    """The kind of hook that `is_forward` and `pre` mean."""
    pre = check_flag(who, "pre", pre)
    is_forward = check_flag(who, "is_forward", is_forward)
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False makes a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"


def _gone() -> None:
    return None


def _inert() -> Hook:
    """What a copy or a pickle of a hook is: on no module."""
    hook = Hook.__new__(Hook)
    hook._set(None, Block(), None, "")
    return hook
