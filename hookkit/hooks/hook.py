"""`Hook`: one module, one function, and what it stored.

The module holds the hook (through its dispatchers), the hook holds the module weakly. A `with`
block records the calls of its own thread; a hook that is simply left in place records all.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from hookkit import ranks
from hookkit.checks import OfLast, check_flag
from hookkit.errors import HookError, OptionError
from hookkit.hooks.block import Block, warn_if_compiled, warn_of_references
from hookkit.hooks.entries import Dispatcher, brief, check_hookable
from hookkit.hooks.gradients import GradState, grad_dispatchers
from hookkit.hooks.observing import Backward, BackwardCheck, Forward, Grads, Pre, begin
from hookkit.hooks.snapshot import Kept, Kind, Options, Storer
from hookkit.interrupts import uninterrupted
from hookkit.nested import describe, is_path


class Hook:
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
        keep: `"last"` call, or `"all"` calls, in `.calls`.
        clone: None stores a snapshot (live tensors with `detach=False`); True clones; False
            stores the live tensor, and reading one that was overwritten since warns (torch does
            not tell what was written through `.data` or numpy).
        dtype: floating point tensors are stored as this.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
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

    _count = 0
    _last: Any = None
    _all: list[Any] | None = None
    _missed: str | None = None  # why calls were not recorded, for the report
    _traced = False
    _block: Block
    _muted: list[Any] | None = None
    _placed: Sequence[ref[Dispatcher]] = ()  # what is on the module
    _module: Callable[[], nn.Module | None]
    _waiting: deque[Grads]
    name: str | None
    leaf = ""
    removed = True

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
        name: str | None = None,
        leaf: str = "",
    ) -> None:
        kind = kind_of("Hook", is_forward, pre)
        o = Options("Hook", kind, hook_func, detach, cpu, gather, edit, keep, clone, dtype, stop)
        check_hookable(m, "Hook")
        if not isinstance(leaf, str) or not is_path(leaf):
            raise OptionError(
                f"Hook: leaf={leaf!r} is no path into what a module gives. Write it as [0], .name "
                "or ['key'], or one after the other."
            )
        self._revive(m, o, name, leaf)
        self.register()

    @classmethod
    def made(
        cls, m: nn.Module, options: Options, block: Block, name: str | None = None, leaf: str = ""
    ) -> Hook:
        """A registered hook with these `options`, on a module that `check_hookable` has passed."""
        hook = cls.__new__(cls)
        hook._revive(m, options, name, leaf, block)
        hook.register()
        return hook

    # -- life ---------------------------------------------------------------------------------

    def register(self) -> None:
        """Puts the hook on its module; nothing if it is there."""
        if not self.removed:
            return
        module = self._module()
        if module is None:
            raise HookError(
                f"{self._options.who}: the module of this hook is gone. Make a new hook."
            )
        self._block.compiled = None  # a model may have been compiled since
        calls = self._dispatchers(module)
        try:
            self._placed, self.removed = [ref(call) for call in calls], False
            for call in calls:
                call.put_on(module)
        except BaseException:
            self._take_off()
            raise

    def _dispatchers(self, module: nn.Module) -> tuple[Dispatcher, ...]:
        kind = self._options.kind
        if kind == "forward":
            return (Forward(self),)
        if kind == "pre":
            return (Pre(self),)
        if kind == "backward":
            return BackwardCheck(self), Backward(self)
        return grad_dispatchers(self._grad_state(), kind == "pre_grad", module)

    def _grad_state(self) -> GradState:
        return GradState(lambda m, x: begin(self, m, x), self.leaf)

    @uninterrupted
    def remove(self) -> None:
        """Takes the hook off its module; what was stored stays. Nothing if it is off already."""
        self._take_off()

    def _take_off(self) -> None:
        if self.removed:
            return
        module = self._module()
        for call in self._on_module():
            call.take_off(module)
        self._muted, self._placed, self.removed = None, (), True

    def _on_module(self) -> list[Dispatcher]:
        """Held weakly, as the dispatchers hold the hook: what it stores must not need the gc."""
        return [call for weak in self._placed if (call := weak()) is not None]

    def listen(self, on: bool) -> None:
        """Has a registered hook answer, or keep still until told otherwise; what is stored stays.

        Nothing is registered or removed, so a compiled model has two graphs at most.
        """
        if not on and self._muted is None:
            self._muted = [call.target for call in self._on_module()]
            for call in self._on_module():
                call.target = None
        elif on and self._muted is not None:
            for call, target in zip(self._on_module(), self._muted, strict=False):
                call.target = target
            self._muted = None

    def _clear(self) -> None:
        self._count, self._last, self._missed, self._traced = 0, None, None, False
        self._all = [] if self._options.keep == "all" else None
        self._waiting = deque(maxlen=256)

    def __enter__(self) -> Self:
        depth = self._block.depth
        try:
            if self.removed:
                self._clear()
                self.register()
            self._block.enter([self])
        except BaseException:
            if not depth:
                self._take_off()
                self._block.undo()
            raise
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if self._block.inner():
            return False
        try:
            self._take_off()
        finally:
            swallowed = self._block.leave([self], e)
        return swallowed

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
        kind, args, kwargs = self._options.kind, i, getattr(i, "kwargs", {})
        if not isinstance(i, tuple):
            args = (i,)
        if kind == "forward":
            return Forward(self)(m, args, kwargs, o)
        if kind == "pre":
            return Pre(self)(m, args, kwargs)
        if kind == "backward":
            return Backward(self)(m, i, o)
        self._keep(Storer(self._options).keep(i if kind == "pre_grad" else o))
        return None

    # -- what is stored -----------------------------------------------------------------------

    @property
    def hook_func(self) -> Callable[..., Any] | None:
        """The function it was made with; None stores what the module gives."""
        func = self._options.hook_func
        return func.f if isinstance(func, OfLast) else func

    @property
    def detach(self) -> bool:
        """Whether what is stored is detached."""
        return self._options.detach

    @property
    def cpu(self) -> bool:
        """Whether what is stored is moved to the CPU."""
        return self._options.cpu

    @property
    def gather(self) -> bool:
        """Whether reading `stored` joins the ranks."""
        return self._options.gather

    @property
    def hook(self) -> Self:
        """Itself: what fastai's Hook keeps here is the handle, with `remove()`."""
        return self

    @property
    def module(self) -> nn.Module | None:
        """The hooked module, or None if it is gone."""
        return self._module()

    @property
    def stored(self) -> Any:
        """What the last call stored; None before the first.

        Waits for a copy from CUDA, warns of a live tensor that was overwritten, and with `gather`
        joins the ranks (all of them have to read it).
        """
        last = self._last
        if type(last) is Tensor and not (self._options.gather or self._traced):
            return last  # the fast path stores it bare
        return read([self._stored()], self._options.gather)[0]

    def _stored(self) -> _Stored:
        """The last call's value, for `read`."""
        if self._last is None:
            warn_if_compiled(self)
        elif not isinstance(self._last, (Kept, Grads)):
            self._last = Kept(self._last)
        return self, self._last, ""

    @property
    def calls(self) -> L:
        """What each call stored, in the order of the forward calls; needs `keep="all"`."""
        if self._all is None:
            raise OptionError(
                f'{self._options.who}: .calls of {self.label} needs keep="all", and keep="last" '
                'stores only the last call. Make the hook with keep="all".'
            )
        self._not_traced(".calls")
        if not self._all:
            warn_if_compiled(self)
        each = [(self, kept, f" in call {i}") for i, kept in enumerate(self._all)]
        return L(read(each, self._options.gather))

    @property
    def n_calls(self) -> int:
        """How many forward calls were seen (by a full backward hook: backward calls)."""
        self._not_traced(".n_calls")
        if not self._count:
            warn_if_compiled(self)
        return self._count

    def _not_traced(self, what: str) -> None:
        if self._traced:
            raise HookError(
                f"{self._options.who}: {what} of {self.label} is not known, since it ran inside a "
                "compiled graph, which keeps only the last value. Run it in a `with` block."
            )

    def _keep(self, kept: Kept) -> None:
        self._last = kept
        self._count += 1
        if self._all is not None:
            self._all.append(kept)

    def _over_ranks(self) -> str:
        """What the hook stores, in words that are the same on all ranks."""
        name = type(self._module()).__name__ if self.name is None else f"'{self.name}'"
        return f"{_WHAT[self._options.kind]} of {name}{self.leaf}"

    @property
    def label(self) -> str:
        """The module in words, for messages: its name where it is known, and its class."""
        module = self._module()
        if self.name is not None:
            return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")
        return "a module that is gone" if module is None else brief(module)

    def __repr__(self) -> str:
        seen = "1 call" if self._count == 1 else f"{self._count} calls"
        seen = "traced" if self._traced else seen
        seen += f", stored {held}" if (held := self._held()) else ""
        return f"Hook({self.label}, {seen}{', removed' if self.removed else ''})"

    def _held(self) -> str:
        """What is stored, in words; gradients fill in later and are not told."""
        if self._last is None or isinstance(self._last, Grads):
            return ""
        return describe(self._last.value if isinstance(self._last, Kept) else self._last)

    # -- copies -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """A hook on the copy of its module, if that is being copied too; else one that is off."""
        module = self._module()
        live = bool(memo) and not self.removed and module is not None
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        options = copy.copy(self._options)
        object.__setattr__(options, "hook_func", copy.deepcopy(options.hook_func, memo))
        new._revive(copy.deepcopy(module, memo) if live else None, options, self.name, self.leaf)
        return new._take_over([copy.deepcopy(c, memo) for c in self._on_module()] if live else [])

    def __reduce__(self) -> Any:
        """No activations; the module only while the hook is on it, for a module that owns one."""
        module = None if self.removed else self._module()
        o, placed = self._options, self._on_module()
        return _unpickled, (type(self), module, o, self.name, self.leaf, placed)

    def _revive(
        self,
        m: nn.Module | None,
        options: Options,
        name: str | None,
        leaf: str,
        block: Block | None = None,
    ) -> None:
        self._block = block or Block(options)
        self._module = _gone if m is None else ref(m)
        self._options, self.name, self.leaf = options, name, leaf
        if not options.plain:
            self._clear()

    def _take_over(self, placed: Sequence[Dispatcher]) -> Hook:
        """Makes the inert dispatchers of a copied module call this hook."""
        by_grad = self._options.kind in ("grad", "pre_grad")
        target = self._grad_state() if by_grad else self
        for call in placed:
            call.target = target
        self._placed, self.removed = [ref(call) for call in placed], not placed
        return self


_Stored = tuple[Hook, Kept | Grads | None, str]  # the last is which call, in words
_WHAT: dict[Kind, str] = {
    "forward": "the output",
    "pre": "the inputs",
    "grad": "the gradient",
    "pre_grad": "the gradient of the inputs",
    "backward": "what the backward hook gave",
}


def read(stored: Sequence[_Stored], gather: bool) -> list[Any]:
    """The values of `stored`; with `gather`, over all ranks, which have to read the same."""
    values = list(map(_own, stored))
    todo = [i for i, (_, kept, _) in enumerate(stored) if kept is None or not kept.whole]
    if gather and todo:
        names = [stored[i][0]._over_ranks() + stored[i][2] for i in todo]
        for i, value in zip(todo, ranks.gather([values[i] for i in todo], names), strict=True):
            values[i], kept = value, stored[i][1]
            if isinstance(kept, Kept):
                kept.value, kept.whole = value, True
            elif kept is not None:
                kept.whole = value
    return values


def _own(stored: _Stored) -> Any:
    """What this rank stored."""
    hook, kept, _ = stored
    if isinstance(kept, Grads):
        return kept.whole or tuple(k and k.read(hook._options.who, hook) for k in kept.kept)
    if kept is None:
        return None
    if kept.references and "reference" not in hook._block.warned:
        warn_of_references(hook, kept.references)
    return kept.read(hook._options.who, hook)


def _gone() -> None:
    return None


def _unpickled(
    kind: type[Hook], module: nn.Module | None, o: Options, name: Any, leaf: str, placed: Any
) -> Hook:
    hook = kind.__new__(kind)
    hook._revive(module, o, name, leaf)
    return hook._take_over([] if module is None else placed)


def kind_of(who: str, is_forward: bool, pre: bool) -> Kind:
    """The kind of hook that `is_forward` and `pre` ask for."""
    pre = check_flag(who, "pre", pre)
    is_forward = check_flag(who, "is_forward", is_forward)
    if pre and not is_forward:
        raise OptionError(
            f"{who}: pre=True is for forward hooks, and is_forward=False asks for a backward one. "
            "Use hook_input(module, grad=True) for the gradients of inputs."
        )
    return "pre" if pre else "forward" if is_forward else "backward"
