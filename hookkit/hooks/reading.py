"""What a hook stored, and how it captures, as the user reads it: a base of `Hook`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookkit import ranks
from hookkit.checks import OfLast
from hookkit.errors import CompiledWarning, OptionError, OverwrittenWarning, nearest, warn
from hookkit.hooks.attach import HookEntry, brief
from hookkit.hooks.block import NOT_WANTED, Block
from hookkit.hooks.eager import has_compiled
from hookkit.hooks.snapshot import settled, version_of
from hookkit.nested import describe


class Values(L, list[Any]):  # type: ignore[misc]
    """An `L` that is a list: PyTorch takes no other sequence of tensors (`torch.stack`).

    The values are the list's own; `items`, which all methods of `L` read, is a copy.
    """

    def __init__(self, items: Any = (), **_: Any) -> None:
        list.__init__(self, items)

    def __getitem__(self, at: Any) -> Any:
        found = L.__getitem__(self, at)
        return Values(found) if type(found) is L else found  # a slice, in fastcore up to 2.1

    @property
    def items(self) -> list[Any]:
        """The values as a plain list."""
        return list.copy(self)

    __len__, __iter__ = list.__len__, list.__iter__
    __setitem__, __delitem__ = list.__setitem__, list.__delitem__


class Reading(HookEntry):
    """What a `Hook` stored, and its options."""

    removed: bool
    switch: Block
    leaf: str
    name: str | None
    _module: Callable[[], nn.Module | None]

    handle: RemovableHandle | None = None
    registered = False  # what a compiled graph can ask, unlike the handle
    n_calls = 0
    last: Any = None
    all: list[Any] | None = None
    version = -1
    source: tuple[int, ...] = ()  # which call the gradients in `last` are of
    n_cleared = 0
    why = ""

    @property
    def module(self) -> nn.Module | None:
        """The hooked module, or None if it is gone."""
        return self._module()

    @property
    def stored(self) -> Any:
        """What the last call stored; None before the first.

        Waits for a copy from CUDA, warns of a live tensor that was written in place since, and with
        `gather` joins the ranks (all of them have to read it, equally often).
        """
        value = self._own()
        if self.switch.gather:
            value = ranks.gather([value], [f"what is stored of {self.label}"])[0]
        return value

    def _own(self) -> Any:
        """What this rank stored."""
        wait_for(self.switch)
        if self.last is None:
            self._warn_if_compiled()
        elif self.version != -1 and self.version_is_old():
            self.version = -1
            warn(
                f"{self.switch.who}: what is stored of {self.label} was overwritten in place after "
                "it was stored (a layer with inplace=True, or an operation such as `+=`), so this "
                "is not what the layer gave. Store a copy: Hook(m, torch.clone, detach=False).",
                OverwrittenWarning,
            )
        self.last = settled(self.last)
        return self.last

    def version_is_old(self) -> bool:
        """Whether a live tensor that is stored was written in place since."""
        block = self.switch
        live = not block.kind.endswith("grad") and not (block.detach and block.clone)
        return live and version_of(self.last) != self.version

    @property
    def calls(self) -> L:
        """What each call stored, in the order of the forward calls; needs `keep="all"`."""
        if self.switch.keep != "all":
            raise OptionError(
                f'{self.switch.who}: .calls of {self.label} needs keep="all", and it has '
                f'keep="{self.switch.keep}". Make the hook with keep="all".'
            )
        wait_for(self.switch)
        values = settled(self.all or [])
        if self.switch.gather:
            names = [f"what is stored of {self.label} in call {i}" for i in range(len(values))]
            values = ranks.gather(values, names)
        return Values(values)

    def _warn_if_compiled(self) -> None:
        """Warns once that compiled code may be why a hook that stays has seen nothing."""
        block = self.switch
        if block.depth or block.warned or not self.registered or self.n_calls or self.why:
            return
        if not has_compiled() or self.module is None:
            return
        block.warned = True
        warn(
            f"{block.who}: the hook on {self.label} has seen no call. If it is part of a compiled "
            "model that had run before: torch.compile ignores hooks that are added after the first "
            "call, of this model or of another of its class. Add the hook before that call, use it "
            "in a `with` block, or call torch.compiler.reset().",
            CompiledWarning,
        )

    if not TYPE_CHECKING:  # a checker shall see a misspelt name

        def __getattr__(self, name: str) -> Any:
            """Only for a name that is not there: what somebody looks for in the tensor."""
            own = {n for n in dir(type(self)) if n[0] != "_"}.difference(HookEntry.__slots__)
            has = hasattr(self.last, name)
            near = "" if has else "".join(f"nearest: .{n}; " for n in nearest(name, own, n=1))
            cure = f"{near}what it stored is in .stored. Write .stored{f'.{name}' if has else ''}."
            raise AttributeError(f"a Hook has no {name!r}: {cure}", name=name, obj=self)

    @property
    def fired(self) -> bool:
        """Whether it has stored something, or seen a call that stores nothing."""
        block = self.switch
        if self.last is not None:
            return True
        if block.kind.endswith("grad") and not block.edit:
            return False  # it counts forward calls
        return self.n_calls > 0 and self.why != NOT_WANTED

    @property
    def label(self) -> str:
        """The module's name, where it is known, and its class, for messages."""
        module = self._module()
        if self.name is None:
            return "a module that is gone" if module is None else brief(module)
        return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")

    def __repr__(self) -> str:
        seen = "1 call" if self.n_calls == 1 else f"{self.n_calls} calls"
        held = f", stored {text}" if (text := self._held()) else ""
        return f"Hook({self.label}, {seen}{held}{', removed' if self.removed else ''})"

    def _held(self) -> str:
        """What is stored, in words; not of gradients, which are filled in later."""
        grads = self.switch.kind.endswith("grad")
        return "" if self.last is None or grads else describe(self.last)

    # fastai's names

    @property
    def hook_func(self) -> Callable[..., Any] | None:
        """The function it was made with; None stores what the module gives."""
        func = self.switch.func
        return func.f if isinstance(func, OfLast) else func

    @property
    def detach(self) -> bool:
        """Whether what is stored is detached."""
        return self.switch.detach

    @property
    def cpu(self) -> bool:
        """Whether what is stored is moved to the CPU."""
        return self.switch.cpu

    @property
    def gather(self) -> bool:
        """Whether reading `stored` joins the ranks."""
        return self.switch.gather


def wait_for(block: Block) -> None:
    """Waits for copies to the CPU that are on their way."""
    while block.pending:
        torch.accelerator.synchronize(block.pending.pop())  # sync: once for each device
