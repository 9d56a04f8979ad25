"""`Hooks`: many hooks as one, registered all or none.

They are registered when they are made and removed by `remove()` or at the end of a `with` block,
whatever happens in it; entering them again registers them again. (Just over 300 lines: one class.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, overload

import torch
from fastcore.foundation import L
from torch import nn
from torch.jit import ScriptModule

from hookkit.errors import ArgumentError, SelectionError, nearest
from hookkit.hooks.block import Block, Registered, reasons
from hookkit.hooks.capture import Capture
from hookkit.hooks.entries import check_hookable
from hookkit.hooks.hook import Hook, kind_of
from hookkit.hooks.reading import Values, stored
from hookkit.hooks.saving import save
from hookkit.hooks.snapshot import Options
from hookkit.interrupts import uninterrupted
from hookkit.modules import unwrap

T = TypeVar("T")
Modules = Iterable[nn.Module] | Mapping[str, nn.Module]
Named = tuple[str | None, nn.Module, str]
"""A module's name, the module, and the path of the part of its output that is meant."""


class Hooks(Registered, Collection[Hook], Iterator[Hook]):
    """Many hooks as one, each a `Hook`; registered all or none, entered and removed together.

    A Collection and an Iterator: `len`, `in`, iteration, `next`, `h[0]`, `h[1:3]`, and by name
    (`h["fc"]`) where names are known. A `with` block records the calls of its thread: of asyncio
    tasks that take turns in one, all.

    Args:
        ms: any number of modules. A Sequential stands for its children. Of a mapping, such as what
            `select` returns, the hooks can be read by name.
        hook_func: `f(module, input, output)`, or of one parameter `f(output)`; what it returns is
            stored. None stores the output.
        is_forward: False registers PyTorch's full backward hooks: `f(module, grad_in, grad_out)`.
        detach: `hook_func` sees detached tensors, and what is stored is detached.
        cpu: what is stored is moved to the CPU.
        gather: reading `stored` joins the batches of all ranks; every rank has to read it.
        pre: before the forward, `f(module, input)`, instead of after it.
        edit: what `hook_func` returns (unless None) replaces the output.
        keep: `"last"` call, `"all"` calls, or `"none"`.
        clone: None stores snapshots; True clones; False stores live tensors.
        dtype: floating point tensors are stored as this.
        stop: in a `with`, the forward ends, and the block with it, when all of them have fired.
        prepend: before the hooks that the modules have, instead of after them.

    Raises:
        ArgumentError, OptionError, HookError: as `Hook`, which has more on each option; then none
            is registered.

    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> with Hooks(net, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = net(torch.randn(4, 5))
    >>> list(h.stored)
    [(4, 10), (4, 10), (4, 3)]
    """

    _hooks: list[Hook] | None = None  # made on demand
    _next: Iterator[Hook] | None = None
    _select: Any = None
    _also: Mapping[str, str] = MappingProxyType({})  # other names, and the first of each module

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
        prepend: bool = False,
    ) -> None:
        kind = kind_of("Hooks", is_forward, pre)
        how = (detach, cpu, gather, edit, keep, clone, dtype, stop)
        o = Options("Hooks", kind, hook_func, *how, prepend=prepend)
        self._set_up(ms, o)

    @classmethod
    def of(cls, ms: Modules, options: Options, block: Block | None = None) -> Hooks:
        """Registered hooks with these `options`; `block` is their switch, if there is one."""
        hooks = cls.__new__(cls)
        hooks._set_up(ms, options, block)
        return hooks

    @classmethod
    def of_named(cls, found: Iterable[Named], options: Options) -> Hooks:
        """Registered hooks with these `options`, on what `named_modules_of` has found.

        One hook for a module that is given twice, by two of its names, which answers to both: an
        edit by scale(2) is not one by scale(4).
        """
        hooks, once = cls.__new__(cls), dict[Any, Named]()
        for name, m, leaf in found:
            first, _, _ = once.setdefault((id(m), leaf), (name, m, leaf))
            if name is not None and first is not None and name != first:
                hooks._also = {**hooks._also, name: first}
        hooks._make(once.values(), options)
        return hooks

    def _set_up(self, ms: Any, options: Options, block: Block | None = None) -> None:
        kinds = {*map(type, ms)} if type(ms) is list else set()
        if kinds and not any([issubclass(kind, tuple) for kind in kinds]):  # noqa: C419
            _check(kinds, ms, options.who)
            self._block = block = block or Block(options)
            self._captures = [Capture(m, block) for m in ms]
            self.register()
        else:
            self._select = ms if hasattr(ms, "aliases") else None
            self._make(named_modules_of(ms, options.who), options, block)

    def _make(self, found: Collection[Named], options: Options, block: Block | None = None) -> None:
        ms = [m for _, m, _ in found]
        _check({*map(type, ms)}, ms, options.who)
        self._block = block = block or Block(options)
        self._captures = [Capture(m, block, name, leaf) for name, m, leaf in found]
        self.register()

    @uninterrupted
    def _move_to(self, ms: Modules) -> None:
        """Has hooks on `ms` instead: those on the same module under the same name stay.

        In their place among others, too. If one cannot be registered, nothing changes.
        """
        here = {(c.name, c.leaf, id(c.module())): c for c in self._captures if not c.removed}
        captures = []
        who = self._block.options.who
        for name, m, leaf in named_modules_of(ms, who):
            check_hookable(m, who)
            key = name, leaf, id(m)
            captures.append(here.pop(key) if key in here else Capture(m, self._block, name, leaf))
        new = [c for c in captures if c.removed]
        try:
            for c in new:
                c.register()
        except BaseException:
            for c in new:
                c.remove()
            raise
        for c in here.values():
            c.remove()
        self._captures, self._hooks, self._next = captures, None, None

    @property
    def hooks(self) -> list[Hook]:
        """The hooks, in order."""
        if self._hooks is None:
            self._hooks = [Hook.of(c) for c in self._captures]
        return self._hooks

    @property
    def names(self) -> tuple[str, ...]:
        """The modules' names, or their positions as text where no names are known."""
        return tuple(str(i) if c.name is None else c.name for i, c in enumerate(self._captures))

    @property
    def stored(self) -> L:
        """What each hook stored in its last call, in order; None where it was not called.

        An `L`, as fastai's, that is a list too: `torch.stack(h.stored)`.
        """
        return Values(stored(self._captures))

    def as_dict(self) -> dict[str, Any]:
        """What each hook stored in its last call, by its name (or position); as `stored`."""
        return self._keyed(self.stored)

    def items(self) -> Iterable[tuple[str, Hook]]:
        """`(name, hook)` for each name (or position): for `stored`, `grad` and `calls` of each.

        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        >>> with Hooks(net, None) as h: y = net(torch.ones(1, 2))
        >>> [(name, tuple(hook.stored.shape)) for name, hook in h.items()]
        [('0', (1, 3)), ('1', (1, 3))]
        """
        return self._keyed(self.hooks).items()

    @property
    def n_calls(self) -> dict[str, int]:
        """How many forward calls each hook has seen, by its name or position; `Hook.n_calls`."""
        return self._keyed(h.n_calls for h in self.hooks)

    def _keyed(self, each: Iterable[T]) -> dict[str, T]:
        """`each`, one for each hook, by every name that it was selected by."""
        found = dict(zip(self.names, each, strict=True))
        if len(found) < len(self):
            several = [name for name, n in Counter(self.names).items() if n > 1]
            raise SelectionError(
                f"{self._block.options.who}: several hooks are called {several[0]!r}, so they "
                "cannot be read by name. Read them by position, or hook each model by itself."
            )
        return {**found, **{name: found[first] for name, first in self._also.items()}}

    @property
    def silent(self) -> dict[str, str]:
        """The hooks that have nothing so far, each with the reason as far as it can be known."""
        return reasons(self._captures)

    def save(self, path: str | Path) -> Path:
        """Writes what is stored to a safetensors file, for `compare_models` or any other reader.

        Tensors are called `name`, or `name:call` with `keep="all"`, with `/path` behind it where a
        module returns a structure; the metadata have the structures in words. What is no tensor is
        left out. Tensors are moved to the CPU one by one.

        Args:
            path: of the file; one that exists is replaced as a whole.

        Returns:
            The path.

        Raises:
            HookError: nothing is stored; or a sparse, nested or quantized tensor, or one of a
                dtype that safetensors has not.
            MissingExtraError: safetensors is not installed.
        """
        return save(self, path)

    def __len__(self) -> int:
        return len(self._captures)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __next__(self) -> Hook:
        if self._next is None:
            self._next = iter(self.hooks)
        return next(self._next)

    def __contains__(self, x: object) -> bool:
        if isinstance(x, str):
            return self._named(x) is not None
        return any(h is x or h.module is x for h in self.hooks)

    @overload
    def __getitem__(self, i: int | str) -> Hook: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hook]: ...
    def __getitem__(self, i: int | str | slice) -> Hook | list[Hook]:
        return self._by_name(i) if isinstance(i, str) else self.hooks[i]

    def _named(self, name: str) -> Hook | None:
        """The hook of that name, or on a module of which that is another name."""
        name = self._also.get(name, name)
        for h in self.hooks:
            if h.name == name:
                return h
        if self._select is not None:
            for h in self.hooks:
                if h.name is not None and name in self._select.aliases(h.name):
                    return h
        return None

    def _by_name(self, name: str) -> Hook:
        if (found := self._named(name)) is not None:
            return found
        near = nearest(name, self.names) or list(self.names)[:3]
        raise SelectionError(
            f'{self._block.options.who}: no hook is called "{name}". Nearest: '
            f"{', '.join(map(repr, near)) or 'there are none'}. .names lists all {len(self)}."
        )

    def _ipython_key_completions_(self) -> list[str]:
        """What IPython and Jupyter offer after `h["`: the names."""
        return [h.name for h in self.hooks if h.name is not None]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles. Of removed hooks no selection, which holds the modules."""
        chosen = None if self.removed else self._select
        return {
            "_options": self._block.options,
            "_hooks": self.hooks,
            "_select": chosen,
            "_also": {**self._also},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state.pop("_options")
        self.__dict__.update(state)
        self._block, self._captures = Block(options), [h._capture for h in self.hooks]
        for c in self._captures:
            c.join(self._block, [entry for _, entry in c.registered()])

    def __repr__(self) -> str:
        few = "1 hook" if len(self) == 1 else f"{len(self)} hooks"
        few += ", removed" if self.hooks and self.removed else ""
        pairs = zip(self.names, self.hooks, strict=True)
        held = [f"{name} {text}" for name, h in pairs if (text := h._held())]
        shown = f": {', '.join(held[:4])}{', …' if held[4:] else ''}" if held else ""
        return f"Hooks({few}{shown})"


def _check(kinds: Iterable[type], ms: Iterable[Any], who: str) -> None:
    """`check_hookable` of each; isinstance(m, ScriptModule) is ten times as slow: a metaclass."""
    for kind in kinds:
        if nn.Module not in kind.__mro__ or ScriptModule in kind.__mro__:
            for m in ms:
                check_hookable(m, who)


def named_modules_of(ms: Any, who: str) -> list[Named]:
    """What `ms` holds; names are None where there are none."""
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
    return [_named(m) for m in ms]


def _named(m: Any) -> Named:
    named = isinstance(m, tuple) and len(m) == 2 and isinstance(m[0], str)
    return (m[0], m[1], "") if named else (None, m, "")
