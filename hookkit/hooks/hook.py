"""`Hook`: one module, one function, and what it stored, as the user sees it.

What happens at the module's calls, and what is stored, is in its `Capture`, which the module holds;
a `Hook` is the user's side of it: registering, the `with` block, reading, copying. (More than 300
lines, of which a third documents what users see.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from fastcore.foundation import L
from torch import nn

from hookkit.checks import OfLast, check_flag
from hookkit.errors import HookError, OptionError
from hookkit.hooks import calls
from hookkit.hooks.block import Block, Registered, warn_if_compiled
from hookkit.hooks.calls import Grads
from hookkit.hooks.capture import Capture
from hookkit.hooks.entries import check_hookable
from hookkit.hooks.reading import Values, gradient, read, stored
from hookkit.hooks.snapshot import Kind, Options, Snapshotter, StoredValue
from hookkit.nested import describe, is_path


class Hook(Registered):
    """One function, called at each forward (or backward) of one module; keeps what it returns.

    Args:
        m: the module. Held weakly; the module holds the hook.
        hook_func: `f(module, input, output)`, or `f(module, input)` with `pre=True`, or
            `f(module, grad_input, grad_output)` with `is_forward=False`. A function of one
            argument, or of none that Python can read, gets the last of these alone: `torch.mean`,
            `lambda o: o.std()`. What it returns is stored. `input` is an `Inputs`: a tuple of the
            positional inputs, keyword inputs by name. None stores the output (pre: the inputs) as
            it is.
        is_forward: False registers PyTorch's full backward hook.
        detach: `hook_func` sees detached tensors, and what is stored is detached. With `edit` it
            sees the live ones.
        cpu: what is stored is moved to the CPU; from CUDA without waiting, until it is read.
        gather: reading `stored` joins the ranks' batches; every rank has to read it.
        pre: before the forward instead of after it.
        edit: what `hook_func` returns (unless None) replaces the output (pre: the inputs, as one
            value, a tuple or `Inputs`; backward: `grad_input`). Of another structure it raises.
        keep: `"last"` call, `"all"` calls, in `.calls`, or `"none"`: no tensor is stored, which is
            what edits are made of.
        clone: None stores a snapshot (live tensors with `detach=False`); True clones; False
            stores the live tensor, and reading one that was overwritten since warns (torch does
            not notice what is written through `.data` or numpy).
        dtype: floating point tensors are stored as this.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
        prepend: before the hooks that the module has, instead of after them.
        name: what messages call the module.
        leaf: path into the output, such as `[0]`: stands for the output everywhere.

    Raises:
        ArgumentError: `m` is no module, `hook_func` no function.
        OptionError: an option has a value that cannot work.
        HookError: `m` is scripted; or, as the model runs, an edit gave another structure.

    >>> m = nn.Linear(2, 3)
    >>> with Hook(m, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = m(torch.zeros(4, 2))
    >>> h.stored, h.n_calls
    ((4, 3), 1)
    """

    __slots__ = ("__weakref__", "_capture")

    _capture: Capture

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
        clone: bool | None = None,
        dtype: torch.dtype | None = None,
        stop: bool = False,
        prepend: bool = False,
        name: str | None = None,
        leaf: str = "",
    ) -> None:
        kind = kind_of("Hook", is_forward, pre)
        how = (detach, cpu, gather, edit, keep, clone, dtype, stop)
        o = Options("Hook", kind, hook_func, *how, prepend=prepend)
        check_hookable(m, "Hook")
        if not isinstance(leaf, str) or not is_path(leaf):
            raise OptionError(
                f"Hook: leaf={leaf!r} is no path into what a module gives. Write it as [0], .name "
                "or ['key'], or one after the other."
            )
        self._capture = Capture(m, Block(o), name, leaf)
        self.register()

    @classmethod
    def of(cls, capture: Capture) -> Hook:
        """The hook around `capture`."""
        hook = cls.__new__(cls)
        hook._capture = capture
        return hook

    @classmethod
    def made(cls, m: nn.Module, options: Options) -> Hook:
        """A registered hook with these `options`."""
        check_hookable(m, options.who)
        hook = cls.of(Capture(m, Block(options)))
        hook.register()
        return hook

    @property
    def _captures(self) -> tuple[Capture]:  # type: ignore[override]
        return (self._capture,)

    @property
    def _block(self) -> Block:  # type: ignore[override]
        return self._capture.switch

    @property
    def hook(self) -> Self:
        """Itself: what fastai's Hook keeps here is the handle, with `remove()`."""
        return self

    def hook_fn(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Calls `hook_func(m, i, o)` as PyTorch does, and stores what it returns.

        As fastai's method of that name, to call by hand. A hook for gradients that has no function
        stores those given.

        Args:
            m: the module.
            i: its inputs, a tuple (backward: grad_input).
            o: its output (backward: grad_output); not used by a `pre` hook.

        Returns:
            With `edit`, what replaces the output (pre: the inputs); else None.

        >>> m, x = nn.Linear(2, 3), torch.zeros(4, 2)
        >>> h = Hook(m, lambda m, i, o: o.shape)
        >>> h.remove(); h.hook_fn(m, (x,), m(x)); h.stored
        torch.Size([4, 3])
        """
        c = self._capture
        kind, args, kwargs = c.options.kind, i, getattr(i, "kwargs", {})
        if not isinstance(i, tuple):
            args = (i,)
        if kind == "forward":
            return calls.after(c, m, args, kwargs, o)
        if kind == "pre":
            return calls.before(c, m, args, kwargs)
        if kind == "backward":
            return calls.backward(c, m, i, o)
        c.keep(Snapshotter(c.options).keep(i if kind == "pre_grad" else o))
        return None

    # -- how it captures ----------------------------------------------------------------------

    @property
    def hook_func(self) -> Callable[..., Any] | None:
        """The function it was made with; None stores what the module gives."""
        func = self._capture.options.hook_func
        return func.f if isinstance(func, OfLast) else func

    @property
    def detach(self) -> bool:
        """Whether what is stored is detached."""
        return self._capture.options.detach

    @property
    def cpu(self) -> bool:
        """Whether what is stored is moved to the CPU."""
        return self._capture.options.cpu

    @property
    def gather(self) -> bool:
        """Whether reading `stored` joins the ranks."""
        return self._capture.options.gather

    @property
    def module(self) -> nn.Module | None:
        """The hooked module, or None if it is gone."""
        return self._capture.module()

    @property
    def name(self) -> str | None:
        """What messages call the module."""
        return self._capture.name

    @property
    def leaf(self) -> str:
        """The path into the output that stands for it."""
        return self._capture.leaf

    @property
    def label(self) -> str:
        """The module's name, where it is known, and its class, for messages."""
        return self._capture.label()

    # -- what is stored -----------------------------------------------------------------------

    @property
    def stored(self) -> Any:
        """What the last call stored; None before the first.

        Waits for a copy from CUDA, warns of a live tensor that was overwritten, and with `gather`
        joins the ranks (all of them have to read it).
        """
        return stored([self._capture])[0]

    @property
    def grad(self) -> Any:
        """The gradient of `stored`, of the same call and structure; needs `retain_grad=True`.

        None until a backward pass has brought it, in a structure where none arrived.
        """
        return gradient(self._capture)

    @property
    def calls(self) -> L:
        """What each call stored, in the order of the forward calls; needs `keep="all"`."""
        c = self._capture
        if c.options.keep != "all":
            raise OptionError(
                f'{c.options.who}: .calls of {self.label} needs keep="all", and '
                f'keep="{c.options.keep}" does not store each call. Make the hook with keep="all".'
            )
        self._not_traced(".calls")
        if not c.all:
            warn_if_compiled(c)
        each = [(c, kept, f" in call {i}") for i, kept in enumerate(c.all)]
        return Values(read(each, c.options.gather))

    @property
    def n_calls(self) -> int:
        """How many forward calls were seen; of a full backward hook, backward calls."""
        self._not_traced(".n_calls")
        if not self._capture.count:
            warn_if_compiled(self._capture)
        return self._capture.count

    def _not_traced(self, what: str) -> None:
        c = self._capture
        if c.options.kind == "recorder":
            raise HookError(
                f"{c.options.who}: {what} of {self.label} is not known: the hook of a recorder "
                f"stores and counts nothing. Read the recorder itself, such as its `record()`."
            )
        if c.traced and c.options.keep != "none":
            raise HookError(
                f"{c.options.who}: {what} of {self.label} is not known, since it ran inside a "
                "compiled graph, which keeps only the last value. Run it in a `with` block."
            )

    def __repr__(self) -> str:
        c = self._capture
        seen = "1 call" if c.count == 1 else f"{c.count} calls"
        seen = "traced" if c.traced else seen
        seen = "recorded" if c.options.kind == "recorder" else seen
        seen += f", stored {held}" if (held := self._held()) else ""
        return f"Hook({self.label}, {seen}{', removed' if c.removed else ''})"

    def _held(self) -> str:
        """What is stored, in words; not of gradients, which are filled in later."""
        last = self._capture.last
        if last is None or isinstance(last, Grads):
            return ""
        return describe(last.value if isinstance(last, StoredValue) else last)

    # -- copies -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """A hook on the copy of its module, if that is being copied too; else a removed one."""
        c, module = self._capture, self._capture.module()
        on = bool(memo) and not c.removed and module is not None
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        o = copy.copy(c.options)
        object.__setattr__(o, "hook_func", copy.deepcopy(o.hook_func, memo))
        module = copy.deepcopy(module, memo) if on else None
        registered = copy.deepcopy(c.registered(), memo) if on else ()
        return new._take_over(module, o, c.name, c.leaf, registered)

    def __reduce__(self) -> Any:
        """No activations; the module only while the hook is on it, for a module that owns one."""
        c, module = self._capture, None if self.removed else self.module
        registered = () if module is None else c.registered()
        return _unpickled, (type(self), module, c.options, c.name, c.leaf, registered)

    def _take_over(
        self, m: nn.Module | None, o: Options, name: str | None, leaf: str, registered: Any
    ) -> Hook:
        """Makes this the hook of the entries that were copied with their module."""
        entries = [entry for _, entry in registered]
        # a capture that is registered itself is the entry
        own = entries and isinstance(entries[0], Capture)
        c = self._capture = entries[0] if own else Capture()
        c.__init__(m, Block(o), name, leaf)  # type: ignore[misc]
        c.handles = tuple(handle for handle, _ in registered)
        c.join(c.switch, entries)
        return self


def _unpickled(
    cls: type[Hook], module: nn.Module | None, o: Options, name: Any, leaf: str, registered: Any
) -> Hook:
    return cls.__new__(cls)._take_over(module, o, name, leaf, registered)


def kind_of(who: str, is_forward: bool, pre: bool) -> Kind:
    """The kind of hook that `is_forward` and `pre` mean."""
    pre = check_flag(who, "pre", pre)
    is_forward = check_flag(who, "is_forward", is_forward)
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False makes a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"
