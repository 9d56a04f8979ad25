"""Goes: the dispatchers that `gradients` had; until their users have moved to `attach_grads`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.hooks.entries import Dispatcher, is_compiling, put_first
from hookkit.hooks.taps import Receive, alias, on_grad, versions_of, with_aliases
from hookkit.hooks.views import ViewGradient, listen
from hookkit.nested import Inputs, leaves, tmap


class GradState:
    """What the dispatchers of one gradient hook share.

    `begin(module, x)` is called at each forward with the output (or inputs) and gives the function
    that receives its gradients, or None to leave this call alone. `leaf` is the path of the part
    of the output that is meant. `each_place`: an input that is passed twice has a gradient for
    each place, and comes as two tensors; else it stays one tensor, and each place has the sum.
    """

    __slots__ = ("__weakref__", "aliased", "begin", "each_place", "inputs", "leaf", "versions")

    def __init__(
        self,
        begin: Callable[[nn.Module, Any], Receive | None],
        leaf: str = "",
        each_place: bool = True,
    ) -> None:
        self.begin, self.leaf, self.aliased, self.each_place = begin, leaf, False, each_place
        # Never emptied per call, for modules that call themselves: a stale entry costs one alias.
        self.versions: dict[int, int] = {}
        self.inputs: list[tuple[int, Any, Any, ViewGradient]] = []


_MOST = 256


def note_version(state: GradState, t: Tensor) -> None:
    """What `_Before` notes of a module's inputs where `t` is the only one."""
    if len(state.versions) > _MOST:
        state.versions.clear()
    state.versions[id(t)] = t._version


# torch before 2.13 cannot trace a hook on a tensor: there it is set outside of the graph.
TRACEABLE: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]
_outside: Callable[..., Any] | None = None


def _prepare() -> None:
    """Loads the compiler (2 s, which a training loads anyway) where graphs must be broken."""
    global _outside
    if not TRACEABLE and _outside is None:
        why = (
            "hookkit: torch before 2.13 cannot trace gradient hooks, so each breaks the graph. "
            "Compile without fullgraph=True, or use torch 2.13"
        )
        disable: Any = torch.compiler.disable
        _outside = disable(lambda f, *seen: f(*seen), reason=why)


class _Sets(Dispatcher):
    """A dispatcher that sets hooks on tensors, in `run`."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *seen: Any) -> Any:
        state = self.target
        if state is None:
            return None
        if _outside is not None and is_compiling():
            return _outside(self.run, state, module, *seen)
        return self.run(state, module, *seen)

    def run(self, state: GradState, module: nn.Module, *seen: Any) -> Any:
        raise NotImplementedError


class _Before(Dispatcher):
    """Forward-pre hook: notes which inputs come in, and at which version."""

    __slots__ = ()

    is_pre = True
    keeps_live = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if (state := self.target) is not None and not is_compiling():
            if len(state.versions) > _MOST:
                state.versions.clear()
            state.versions.update(versions_of(args, kwargs))


class First(_Sets):
    """Forward hook before all others: what they keep of the output are the aliases."""

    __slots__ = ()

    keeps_live = False

    def put_on(self, module: nn.Module) -> None:
        """Makes this the first of the module's hooks."""
        super().put_on(module)
        put_first(module._forward_hooks, self.key)

    def run(self, state: GradState, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the forward."""
        if is_compiling():
            return None
        try:
            new = with_aliases(output, _versions(state, args, kwargs), state.leaf)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None  # there is no such leaf: the hook itself says so
        state.aliased = True
        return None if new is output else new


class _After(_Sets):
    """Forward hook: hooks the output's tensors, handing on aliases where they are needed."""

    __slots__ = ()

    keeps_live = False

    def run(self, state: GradState, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        receive = state.begin(module, output)
        if receive is None:
            return None
        given = args, kwargs
        versions = None if is_compiling() else _versions(state, *given)
        new = on_grad(output, receive, versions, state.leaf, state.aliased, given)
        return None if new is output else new


def _versions(state: GradState, args: Any, kwargs: Any) -> dict[int, int]:
    """The versions that `_Before` noted; of now where it was added during this very call."""
    return state.versions or versions_of(args, kwargs)


class _BeforeInputs(_Sets):
    """Forward-pre hook: the module gets an alias for each of its inputs, which is hooked."""

    __slots__ = ()

    is_pre = True

    def run(self, state: GradState, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        receive = state.begin(module, inputs)
        if receive is None or not torch.is_grad_enabled():
            return None
        numbers = iter(range(len(leaves(inputs))))
        made: dict[int, Tensor] = {}
        del state.inputs[:-_MOST]

        def one(t: Tensor) -> Tensor:
            i = next(numbers)
            if not t.requires_grad:
                return t
            if state.each_place or is_compiling():
                view = alias(t)
            else:
                view = made[id(t)] if id(t) in made else made.setdefault(id(t), alias(t))
            watch = listen(view, partial(receive, i))
            if isinstance(watch, ViewGradient) and view._base is not None:
                watch.mark(view._base)
                state.inputs.append((id(view), ref(t), ref(view._base), watch))
            return view

        new = tmap(one, inputs)
        return None if new is inputs else (tuple(new), new.kwargs)


class _AfterInputs(Dispatcher):
    """Forward hook before all others: sees which inputs the module has written.

    Where it returns one of them, the caller's own tensor is handed on, which is the same by then.
    """

    __slots__ = ()

    keeps_live = False

    def put_on(self, module: nn.Module) -> None:
        """Makes this the first of the module's hooks."""
        super().put_on(module)
        put_first(module._forward_hooks, self.key)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> Any:
        state = self.target
        if state is None or is_compiling():
            return None
        given = leaves(Inputs(args, kwargs))
        bases = {id(t._base) for t in given if t._base is not None}
        written: dict[int, Tensor] = {}
        # by the base: another hook may have made an alias of the alias, and given that
        others = []
        for entry in state.inputs:
            key, original, base, watch = entry
            root = base()
            if root is None:  # of a forward that raised
                continue
            if id(root) not in bases:
                others.append(entry)
            elif watch.written:
                watch.follow(root)
                if (own := original()) is not None:
                    written[key] = own
        state.inputs = others
        new = tmap(lambda t: written.get(id(t), t), output) if written else output
        return None if new is output else new


def grad_dispatchers(state: GradState, inputs: bool, module: nn.Module) -> tuple[Dispatcher, ...]:
    """The hooks of `module` that together receive gradients for `state`."""
    _prepare()
    if inputs:
        return _BeforeInputs(state), _AfterInputs(state)
    if keeps_output(module):
        return _Before(state), First(state), _After(state)
    return _Before(state), _After(state)


def keeps_output(module: nn.Module) -> bool:
    """Whether a hook of `module` may keep what it returns, in its graph."""
    return any(getattr(hook, "keeps_live", True) for hook in module._forward_hooks.values())
