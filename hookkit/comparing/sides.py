"""One side of a comparison: a run of a model, and what its modules gave in it.

Builds on `hooks`, `selecting` and `modelinfo.untouched`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookkit.comparing.measures import Parts, parts_in
from hookkit.errors import ArgumentError
from hookkit.hooks.attach import Switch, attach, recomputing
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.global_hooks import switch_fused_path
from hookkit.hooks.snapshot import snapshot
from hookkit.modelinfo.untouched import real_inputs, untouched
from hookkit.nested import Inputs, describe, leaves

WHO = "compare_models"


class Key(NamedTuple):
    """One value of a run: an output or a gradient, of one call of one module."""

    name: str
    what: str
    call: int


Hooked = dict[str, tuple[nn.Module, tuple[str, ...]]]
"""Modules by name, each with the paths in its results that are meant, `""` for all of it."""

Alone = Callable[[str, Inputs], tuple[Parts, str]]
"""Gives what the second side's module has for a call, by the name on the first; and a note."""


@dataclass
class Recorded:
    """What the modules of one side gave, in the order in which they finished.

    Attributes:
        values: the tensors of each call, and gradients.
        types: the modules' classes by name, `""` where they are not known.
        paths: for each module, the paths in its results that are meant, `""` for all of it.
        functions: the modules without parameters, which another model may have as functions.
        own: for each call, what the second side's module gave for the same inputs, and a note.
        last: whether it has only the last call of each module.
    """

    values: dict[Key, Parts] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    own: dict[Key, tuple[Parts, str]] = field(default_factory=dict)
    last: bool = False

    def add(self, key: Key, parts: Parts, paths: tuple[str, ...] = ("",)) -> None:
        """Keeps copies of the parts at `paths`; the last value where several have one key."""
        self.values.pop(key, None)
        at = "|".join(re.escape(path) + r"(?=[.\[]|$)" * bool(path) for path in paths)
        self.values[key] = copied_parts([part for part in parts if re.match(at, part[0])])

    def last_calls(self) -> Recorded:
        """The same with the last call of each module alone, as its first."""
        values = {key._replace(call=0): parts for key, parts in self.values.items()}
        return replace(self, values=values)


def copied_parts(parts: Parts) -> Parts:
    """`parts` with snapshots of the tensors, which no later operation in place changes."""
    return [(p, snapshot(t.detach()) if isinstance(t, Tensor) else t) for p, t in parts]


class Run:
    """A run of `model`, which records what its modules give.

    The model, its random states and the inputs are as before afterwards.

    Args:
        model: as the user calls it; compiled parts run eagerly.
        hooked: its modules.
        into: where their values are added, in the order in which they finish.
        last: numbers all calls 0, so that the last one counts.
        loss: gives what is differentiated from the output; None for no gradients.
        alone: called as a module begins with its name and inputs, for `Recorded.own`.
    """

    def __init__(
        self, model: nn.Module, hooked: Hooked, into: Recorded, *, last: bool = False,
        loss: Callable[[Any], Any] | None = None, alone: Alone | None = None,
    ) -> None:  # fmt: skip
        self.model, self.hooked, self.into, self.last = model, hooked, into, last
        self.loss, self.alone = loss, alone
        self.switch, self.calls = Switch(), Counter[str]()
        self.begun: list[tuple[str, tuple[Parts, str]]] = []  # the innermost call last
        self.grads: dict[Key, Parts] = {}
        into.types |= {name: type(m).__name__ for name, (m, _) in hooked.items()}
        into.functions |= {n for n, (m, _) in hooked.items() if next(m.parameters(), None) is None}

    def __call__(self, inputs: Inputs) -> None:
        """Runs it once."""
        with ExitStack() as undo:
            undo.enter_context(untouched(self.model))
            undo.enter_context(torch.set_grad_enabled(self.loss is not None))
            undo.callback(switch_fused_path, self, on=False)  # it calls no layers
            switch_fused_path(self, on=True)
            undo.callback(leave_eager, self)
            enter_eager(self, always=True)
            for name, (m, _) in self.hooked.items():
                if self.alone is not None:
                    begin = self._named(self._begin, name)
                    undo.callback(attach(m, begin, pre=True, switch=self.switch).remove)
                end = self._named(self._end, name)
                undo.callback(attach(m, end, switch=self.switch).remove)
            copied = real_inputs(inputs)
            out = self.model(*copied, **copied.kwargs)
            if self.loss is not None:
                self._differentiate(self.loss(out), leaves(copied))

    def _named(self, f: Callable[..., None], name: str) -> Callable[..., None]:
        """`f` as a hook of the module of this name."""
        return lambda _m, *values: f(name, *values)

    def _begin(self, name: str, args: Any, kwargs: Any) -> None:
        if self.alone is None or recomputing():
            return
        self.switch.on = False  # the second model may have the same modules
        try:
            self.begun.append((name, self.alone(name, Inputs(args, kwargs))))
        finally:
            self.switch.on = True

    def _end(self, name: str, _args: Any, _kwargs: Any, out: Any) -> None:
        if recomputing():  # a checkpoint's second run
            return
        key = Key(name, "output", 0 if self.last else self.calls[name])
        self.calls[name] += 1
        while self.begun:
            began, own = self.begun.pop()
            if began == name:  # else the model has caught an exception of the call that began
                self.into.own[key] = own
                break
        parts = parts_in(out)
        self.into.add(key, parts, self.hooked[name][1])
        for path, t in parts if self.loss else ():
            if isinstance(t, Tensor) and t.requires_grad:
                see = partial(self._add_grad, key._replace(what="grad"), path)
                t.register_hook(see)  # type: ignore[no-untyped-call]

    def _add_grad(self, key: Key, path: str, grad: Tensor) -> None:
        self.grads.setdefault(key, []).append((path, grad.detach()))

    def _differentiate(self, loss: Any, inputs: list[Tensor]) -> None:
        """Records the gradients of the outputs, the last one first, and of the parameters."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                f"{WHO}: loss gave {describe(loss)}, and one number with a gradient is needed. "
                "Give models with parameters that require one, and a loss that gives a scalar."
            )
        wanted = [*{id(p): p for p in self.model.parameters() if p.requires_grad}.values()]
        free = [t for t in inputs if t.requires_grad]
        grads = torch.autograd.grad(loss, [*wanted, *free], allow_unused=True)
        by_id = {id(p): grad for p, grad in zip(wanted, grads, strict=False)}
        for key in [*self.into.values][::-1]:
            key = key._replace(what="grad")
            if key in self.grads:
                self.into.add(
                    key, sorted(self.grads[key], key=lambda part: part[0]), self.hooked[key.name][1]
                )
        for name, (m, _) in self.hooked.items():
            own = [(f".{k}" if name else k, by_id.get(id(p)))
                   for k, p in m.named_parameters(recurse=False)]  # fmt: skip
            parts = [(k, grad) for k, grad in own if grad is not None]
            self.into.add(Key(name, "param_grad", 0), parts)
