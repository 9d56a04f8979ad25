"""Hooks that remember: `Hook` for one module, `Hooks` for many, and the functions that make them.

A hook is registered when it is made and removed by `remove()` or at the end of its `with` block,
whatever happens in it; entering it again registers it again. Everything public about hooks can be
imported from here; the parts are

    dispatching   how a hook sits in a module; attach
    capturing     what is stored: snapshots, copies to the CPU, what reading checks
    gradients     gradients of outputs and inputs, by tensor hooks; attach_grad
    observing     what happens at a call of a hooked module
    hooking       Hook
    silence       what a block reports when it ends
    compiling     torch.compile
    everywhere    hooks on a tensor, and on all modules of the process
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, overload

import torch
from fastcore.foundation import L
from torch import nn
from torch.jit import ScriptModule

from hookkit.errors import ArgumentError, SelectionError, nearest
from hookkit.hooks.capturing import Kind, Options
from hookkit.hooks.dispatching import attach, check_hookable, recomputing
from hookkit.hooks.everywhere import GlobalHook, TensorHook, hook_all, hook_tensor, print_sizes
from hookkit.hooks.gradients import attach_grad, on_grad
from hookkit.hooks.hooking import Hook, kind_of
from hookkit.hooks.silence import Block, StopForward, reasons
from hookkit.nested import Inputs
from hookkit.walking import unwrap

__all__ = [
    "GlobalHook",
    "Hook",
    "Hooks",
    "Inputs",
    "StopForward",
    "TensorHook",
    "attach",
    "attach_grad",
    "hook_all",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "hook_tensor",
    "on_grad",
    "print_sizes",
    "recomputing",
]

# Options are values; making the same ones for each `with` block would cost 2 µs.
_known_options = lru_cache(maxsize=64)(Options)


def _options(*values: Any) -> Options:
    try:
        return _known_options(*values)
    except ArgumentError:
        raise
    except TypeError:  # a value that cannot be hashed, and so is none that an option can have
        return Options(*values)


Modules = Iterable[nn.Module] | Mapping[str, nn.Module]


class Hooks(Collection[Hook], Iterator[Hook]):
    """Many `Hook`s as one: registered all or none, entered, left and removed together.

    A Collection and an Iterator: `len`, `in`, iteration, `next`, `h[0]`, `h[1:3]`, and by name
    (`h["fc"]`) where names are known.
    """

    def __init__(
        self,
        ms: Iterable[nn.Module] | Mapping[str, nn.Module],
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
    ) -> None:
        kind = kind_of("Hooks", is_forward, pre)
        o = Options("Hooks", kind, hook_func, detach, cpu, gather, edit, keep, clone, dtype, stop)
        self._set_up(ms, o)

    @classmethod
    def of(cls, ms: Iterable[nn.Module] | Mapping[str, nn.Module], options: Options) -> Hooks:
        """Registered hooks with these `options`."""
        hooks = cls.__new__(cls)
        hooks._set_up(ms, options)
        return hooks

    def _set_up(self, ms: Any, options: Options) -> None:
        found = named_modules_of(ms, options.who)
        self._options, self._block = options, Block()
        self._select = ms if hasattr(ms, "aliases") else None
        self._next: Iterator[Hook] | None = None
        self.hooks: list[Hook] = []
        for _, module, _ in found:
            if not isinstance(module, nn.Module) or isinstance(module, ScriptModule):
                check_hookable(module, options.who)
        try:
            for name, module, leaf in found:
                self.hooks.append(Hook.made(module, options, self._block, name, leaf))
        except BaseException:
            self.remove()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The modules' names, or their positions as text where no names are known."""
        return tuple(str(i) if h.name is None else h.name for i, h in enumerate(self.hooks))

    @property
    def stored(self) -> L:
        """What each hook stored in its last call, in order; None where it was not called."""
        return L(h.stored for h in self.hooks)

    @property
    def silent(self) -> dict[str, str]:
        """The hooks that have nothing so far, each with the reason as far as it can be known."""
        return reasons(self.hooks)

    @property
    def removed(self) -> bool:
        """True when no hook is registered."""
        return all(h.removed for h in self.hooks)

    def register(self) -> None:
        """Puts all hooks on their modules again, or none."""
        try:
            for h in self.hooks:
                h.register()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes all hooks off their modules; what was stored stays."""
        for h in self.hooks:
            h.remove()

    def __enter__(self) -> Self:
        if self.removed:
            for h in self.hooks:
                h._clear()
            self.register()
        self._block.enter(self.hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if self._block.inner():
            return False
        self.remove()
        return self._block.leave(self.hooks, e)

    def __len__(self) -> int:
        return len(self.hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __next__(self) -> Hook:
        if self._next is None:
            self._next = iter(self.hooks)
        return next(self._next)

    def __contains__(self, x: object) -> bool:
        if isinstance(x, str):
            return any(h.name == x for h in self.hooks)
        return any(h is x or h.module is x for h in self.hooks)

    @overload
    def __getitem__(self, i: int | str) -> Hook: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hook]: ...
    def __getitem__(self, i: int | str | slice) -> Hook | list[Hook]:
        return self._by_name(i) if isinstance(i, str) else self.hooks[i]

    def _by_name(self, name: str) -> Hook:
        for h in self.hooks:
            if h.name == name:
                return h
        if self._select is not None:
            for h in self.hooks:
                if h.name is not None and name in self._select.aliases(h.name):
                    return h
        near = nearest(name, self.names) or list(self.names)[:3]
        raise SelectionError(
            f'{self._options.who}: no hook is called "{name}". Nearest: '
            f"{', '.join(map(repr, near)) or 'there are none'}. .names lists all {len(self)}."
        )

    def __repr__(self) -> str:
        few = "1 hook" if len(self) == 1 else f"{len(self)} hooks"
        return f"Hooks({few}{', removed' if self.hooks and self.removed else ''})"


def named_modules_of(ms: Any, who: str) -> list[tuple[str | None, nn.Module, str]]:
    """What `ms` holds, as (name, module, leaf path); names are None where there are none."""
    if isinstance(ms, nn.Module):
        ms = unwrap(ms)
    if isinstance(ms, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return [(name, m, "") for name, m in ms._modules.items() if m is not None]
    if isinstance(ms, Mapping):
        leaf = getattr(ms, "leaf", lambda name: "")
        return [(name, m, leaf(name)) for name, m in ms.items()]
    if isinstance(ms, (str, nn.Module)) or not isinstance(ms, Iterable):
        what = f'the string "{ms}"' if isinstance(ms, str) else type(ms).__name__
        one = "Hook" if who == "Hooks" else who.removesuffix("s")
        raise ArgumentError(
            f"{who}: expected several modules, found {what}. Pass select(model, ...), a list of "
            f"modules, or model.children(); {one} takes a single module."
        )
    found = []
    for m in ms:
        named = isinstance(m, tuple) and len(m) == 2 and isinstance(m[0], str)
        found.append((m[0], m[1], "") if named else (None, m, ""))
    return found


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
) -> Hook:
    """A `Hook` that stores what `module` returns, or with `grad=True` the gradient of that.

    `stored` has the structure of the output. With `grad` it is a tuple with the gradient of each
    tensor of the output (None where none arrived), filled in by the backward pass.

    >>> m = nn.Linear(5, 3)
    >>> with hook_output(m) as h:
    ...     y = m(torch.randn(4, 5))
    >>> torch.equal(h.stored, y), h.stored.requires_grad
    (True, False)
    """
    kind: Kind = "grad" if grad else "forward"
    o = _options("hook_output", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    check_hookable(module, o.who)
    return Hook.made(module, o, Block())


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
) -> Hooks:
    """`Hooks` that store what each of `modules` returns, or the gradients of that: `hook_output`.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> with hook_outputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(o.shape) for o in h.stored]
    [(4, 10), (4, 10), (4, 3)]
    """
    kind: Kind = "grad" if grad else "forward"
    o = _options("hook_outputs", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
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
) -> Hook:
    """A `Hook` that stores what `module` is called with, as `Inputs`, before it can change it.

    With `grad=True` the gradients of that: a tuple with one entry for each tensor among the
    positional inputs and then the keyword inputs, None where none arrived.

    >>> m = nn.Linear(5, 3)
    >>> with hook_input(m) as h:
    ...     y = m(input=torch.randn(4, 5))
    >>> h.stored["input"].shape
    torch.Size([4, 5])
    """
    kind: Kind = "pre_grad" if grad else "pre"
    o = _options("hook_input", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    check_hookable(module, o.who)
    return Hook.made(module, o, Block())


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
) -> Hooks:
    """`Hooks` that store what each of `modules` is called with, or the gradients: `hook_input`.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    >>> with hook_inputs(net) as h:
    ...     y = net(torch.randn(4, 5))
    >>> [tuple(i[0].shape) for i in h.stored]
    [(4, 5), (4, 10)]
    """
    kind: Kind = "pre_grad" if grad else "pre"
    o = _options("hook_inputs", kind, None, detach, cpu, gather, False, keep, clone, dtype, stop)
    return Hooks.of(modules, o)
