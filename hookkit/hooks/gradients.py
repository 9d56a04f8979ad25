"""Gradients of what modules return and take, by tensor hooks that are set while the forward runs.

PyTorch's module backward hooks fail, stay silent or are wrong on in-place operations, dicts,
nested tuples and partial graphs; a hook on the tensor itself is right on all of them.

The gradient of an output is the sum of what its uses send back, whoever makes them: the caller, or
a hook that keeps the tensor. Uses inside the module by another of its outputs do not count, since
that output has a gradient of its own. Nor do other uses of the same memory: of the module's
input where it returns that, of a parameter, of the same tensor at another place in the output.
`taps` and `views` separate these uses. Closures in the graph hold nothing strongly, so graphs are
freed as ever.

The values of the run are those without the hook, bit by bit. So are its gradients, except where a
tensor that has an alias (an input that is hooked, an output that is the module's own input) has
several uses: the gradients of the alias's uses are added up before the others, so the sum has
another order, and the gradients of what is before it can differ in the last digits. PyTorch's full
backward hooks do the same.

Once the memory of an output that is a view (or the module's input) is written in place, all that
share it are one tensor to autograd, and the gradient of each is that of its part of it. In a graph
of torch.compile there is none then (hook the layer before or after it), and uses by hooks that ran
earlier do not count.

`attach_grad` is the simple way in, recorders register `GradHooks(…).entries`; `backward` has both
sides.
The five hooks of `GradHooks` are read together, so they are one file of more than 300 lines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import ArgumentError
from hookkit.hooks.entries import Handle, HookEntry, Placed, check_hookable, is_compiling, put
from hookkit.hooks.taps import Receive, alias, is_alias, on_grad, versions_of, with_aliases
from hookkit.hooks.views import ViewGradient, listen
from hookkit.nested import Inputs, leaves, tmap

Begin = Callable[[nn.Module, Any], Receive | None]

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


_PLACES = {
    "before": {"pre": True},
    "first": {"prepend": True},
    "after": {},
    "take": {"pre": True},
    "give": {"prepend": True},
}

# Entries of `versions` and `aliases` are not removed call by call, since modules call themselves; a
# stale one costs an alias. So many are kept at most.
_MOST = 256


class GradHooks:
    """The forward hooks of one module that together receive gradients of its output or inputs.

    For the output: `before` notes which inputs come in, `after` sets hooks on the output's tensors,
    and returns an alias where a tensor has uses that are not the output's. `first` makes these
    aliases before other hooks keep the output, so that their uses count too; it is registered only
    where there are such hooks. For the inputs: `take` hands an alias of each to the module and
    hooks it, `give` sees which of them the module has written.

    Args:
        begin: called at each forward with the module and its output (or its `Inputs`); gives the
            function `receive(i, grad)` that gets the gradients of this call, None for none.
        inputs: gradients of the inputs, not of the output.
        leaf: path of the part of the output that is meant.
        each_place: an input that is passed twice has a gradient for each place, and comes to the
            module as two tensors; else it stays one tensor, and each place has the sum.
    """

    __slots__ = (
        "__weakref__",
        "aliased",
        "aliases",
        "begin",
        "each_place",
        "inputs",
        "leaf",
        "versions",
    )
    observes = True  # its edits are aliases, of the same values

    def __init__(
        self, begin: Begin, inputs: bool = False, leaf: str = "", each_place: bool = True
    ) -> None:
        self.begin, self.inputs, self.leaf, self.each_place = begin, inputs, leaf, each_place
        self.aliased = False  # whether `first` has seen this module's output
        # noted by `before`; empty, and read later, where the hooks are added during the very call
        self.versions: dict[int, int] = {}
        self.aliases: list[tuple[int, Any, Any, ViewGradient]] = []

    def entries(self, first: bool, prepend: bool = False) -> list[Placed]:
        """The entries to register, in their order, each with its place.

        Args:
            first: other hooks may keep the output (`keeps_output(module)`), so `first` is needed.
            prepend: before the other hooks, so that `first` is not.
        """
        _prepare()
        if self.inputs:
            callbacks: list[Callable[..., Any]] = [self.take, self.give]
        else:
            callbacks = [self.before, *([self.first] if first and not prepend else []), self.after]
        early = {"prepend": True} if prepend else {}
        return [
            (
                HookEntry(f, edit=True, keeps_output=False),
                {**_PLACES[f.__name__], **({} if f == self.before else early)},
            )
            for f in callbacks
        ]

    # -- the output's

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward-pre hook: notes which inputs come in, and at which version."""
        if is_compiling():
            return
        if len(self.versions) > _MOST:
            self.versions.clear()
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # most calls
            if not args[0].is_inference():
                self.versions[id(args[0])] = args[0]._version
        else:
            self.versions.update(versions_of(args, kwargs))

    def first(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook before all others: what they keep of the output are the aliases."""
        if is_compiling():
            return None
        try:
            versions = self.versions or versions_of(args, kwargs)
            new = with_aliases(output, versions, self.leaf)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None  # there is no such leaf: the hook itself says so
        self.aliased = True
        return None if new is output else new

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook: hooks the output's tensors, handing on aliases where they are needed."""
        if _outside is not None and is_compiling():
            return _outside(self._after, module, args, kwargs, output)
        return self._after(module, args, kwargs, output)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        receive = self.begin(module, output)
        if receive is None:
            return None
        if is_compiling():
            new = on_grad(output, receive, None, self.leaf, self.aliased, (args, kwargs))
        elif type(output) is Tensor and not self.leaf:  # most calls: `on_grad` in few steps
            new = self._after_one(module, args, kwargs, output, receive)
        else:
            versions = self.versions or versions_of(args, kwargs)
            new = on_grad(output, receive, versions, self.leaf, self.aliased)
        return None if new is output else new

    def _after_one(
        self, module: nn.Module, args: Any, kwargs: Any, t: Tensor, receive: Receive
    ) -> Tensor:
        """What is returned for an output that is one tensor: itself, or an alias."""
        if not (t.requires_grad and torch.is_grad_enabled()):
            return t
        base = t._base
        if base is not None and _is_own_base(module, args, t, base):
            listen(base, partial(_reshaped, receive, t.shape))
            return t
        versions = self.versions or versions_of(args, kwargs)
        # an alias costs 10 µs, and a stale entry may have the id of a new tensor
        other = len(args) == 1 and not kwargs and type(args[0]) is Tensor and t is not args[0]
        if t.is_leaf or (not other and versions.get(id(t)) == t._version):  # an input, as it was
            t = t if self.aliased and is_alias(t) else alias(t)
        listen(t, partial(receive, 0))
        return t

    # -- the inputs'

    def take(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward-pre hook: the module gets an alias for each of its inputs, which is hooked."""
        if _outside is not None and is_compiling():
            return _outside(self._take, module, args, kwargs)
        return self._take(module, args, kwargs)

    def _take(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        receive = self.begin(module, inputs)
        if receive is None or not torch.is_grad_enabled():
            return None
        numbers = iter(range(len(leaves(inputs))))
        made: dict[int, Tensor] = {}
        del self.aliases[:-_MOST]

        def one(t: Tensor) -> Tensor:
            i = next(numbers)
            if not t.requires_grad:
                return t
            if self.each_place or is_compiling():
                view = alias(t)
            else:
                view = made[id(t)] if id(t) in made else made.setdefault(id(t), alias(t))
            watch = listen(view, partial(receive, i))
            if isinstance(watch, ViewGradient) and view._base is not None:
                watch.mark(view._base)
                self.aliases.append((id(view), ref(t), ref(view._base), watch))
            return view

        new = tmap(one, inputs)
        return None if new is inputs else (tuple(new), new.kwargs)

    def give(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook before all others: sees which inputs the module has written.

        Where it returns one of them, the caller's own tensor is returned, which is the same by
        then.
        """
        if is_compiling():
            return None
        given = leaves(Inputs(args, kwargs))
        bases = {id(t._base) for t in given if t._base is not None}
        written: dict[int, Tensor] = {}
        # by the base: another hook may have made an alias of the alias, and given that
        others = []
        for entry in self.aliases:
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
        self.aliases = others
        new = tmap(lambda t: written.get(id(t), t), output) if written else output
        return None if new is output else new


def _is_own_base(module: nn.Module, args: Any, output: Tensor, base: Tensor) -> bool:
    """Whether `base` is what a Linear made of an input with three or more dimensions, then viewed.

    Nobody else has that tensor, so its gradient is the output's, in another shape; and it keeps its
    hook where the view would lose it to the next in-place operation.
    """
    if type(module) is not nn.Linear or base.numel() != output.numel():
        return False
    # a hook may return the input instead
    return not any(base is x or base is getattr(x, "_base", None) for x in args)


def _reshaped(receive: Receive, shape: torch.Size, grad: Tensor) -> Any:
    new = receive(0, grad.reshape(shape))
    return None if new is None else new.reshape(grad.shape)


def keeps_output(module: nn.Module) -> bool:
    """Whether a hook of `module` may keep what it returns, with its autograd graph."""
    # Private: the dict of a module's forward hooks, read only; PyTorch has no public list of them.
    return any(getattr(hook, "keeps_output", True) for hook in module._forward_hooks.values())


def attach_grad(
    module: nn.Module,
    fn: Callable[[nn.Module, int, Tensor], Any],
    *,
    inputs: bool = False,
    edit: bool = False,
) -> Handle:
    """Calls `fn(module, i, grad)` in each backward, for each leaf `i` of the module's output.

    The bare mechanism under `hook_output(grad=True)`: nothing is stored. Right after in-place
    operations, for dicts and nested tuples, first layers, reused modules and checkpoints. In
    `torch.compile(fullgraph=True)` too, if `fn` only writes into buffers (`buf.copy_(grad)`).

    Args:
        module: any module that is not scripted.
        fn: `grad` is to be read, not written. Not called for leaves without a gradient.
        inputs: gradients of the inputs (positional, then keyword) instead of the output's.
        edit: what `fn` returns (unless None) replaces the gradient. Else it is ignored.

    >>> import torch
    >>> layer, seen = nn.Linear(2, 3), []
    >>> handle = attach_grad(layer, lambda m, i, g: seen.append((i, g.sum().item())))
    >>> layer(torch.ones(1, 2)).sum().backward(); handle.remove(); seen
    [(0, 3.0)]
    """
    check_hookable(module, "attach_grad")
    if not callable(fn):
        raise ArgumentError(
            f"attach_grad: fn must be a function, found {type(fn).__name__}. "
            "Pass f(module, i, grad), or use hook_output(module, grad=True) to store gradients."
        )

    def begin(module: nn.Module, x: Any) -> Receive:
        weak = ref(module)

        def receive(i: int, grad: Tensor) -> Tensor | None:
            m = weak()
            if m is None or on_module() is None:
                return None
            new = fn(m, i, grad)
            return new if edit else None

        return receive

    hooks = GradHooks(begin, inputs)
    on_module = ref(hooks)  # the entries hold it, until they are removed
    return put(module, hooks.entries(keeps_output(module)))
