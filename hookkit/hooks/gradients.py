"""Gradients of what modules return and take, by tensor hooks that are set while the forward runs.

PyTorch's module backward hooks fail, stay silent or are wrong on in-place operations, dicts,
nested tuples and partial graphs; a hook on the tensor itself is right on all of them, as long as
the tensor is only what the module returned. Where it is more than that (an input passed through,
a leaf, a view, one of several outputs), the hook needs a tensor of its own: the *tap*, a copy that
is handed on in its place (copy-on-write on the CPU; a view would lose its hook to the next
in-place operation). Closures in the graph hold nothing strongly, so graphs are freed as ever.

The price of a tap: an in-place operation on one of the two is not seen by the other, as it would
be without the hook. Where the other is still in use, that is told (`parting`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from hookkit.errors import ArgumentError
from hookkit.hooks.capturing import is_transformed, lazy_clone
from hookkit.hooks.dispatching import Attached, Dispatcher, brief, check_hookable, is_compiling
from hookkit.hooks.parting import watch
from hookkit.nested import Inputs, leaves, pick, put, tmap

Receive = Callable[[int, Tensor], Any]


def on_grad(
    output: Any,
    receive: Receive,
    versions: dict[int, int] | None = None,
    watched: Callable[[Tensor, Tensor], None] | None = None,
) -> Any:
    """Has `receive(i, grad)` called in each backward pass for leaf `i` of `output`.

    Args:
        output: what the module returned. Leaves that need no gradient are passed over.
        receive: gets the leaf's number in `leaves(output)` and its gradient, to be read, not
            written. What it returns, unless None, replaces the gradient. The graph holds it.
        versions: `{id: version}` of the module's inputs before it ran (see `versions_of`).
        watched: called with a leaf and its tap, where something else has the leaf's memory too.

    Returns:
        What the forward has to hand on: `output` itself, or, where a leaf needed a tap, the same
        structure with that leaf replaced.
    """
    if not torch.is_grad_enabled():
        return output  # a tap made here would have no gradient to be hooked for
    found = leaves(output)
    numbers = iter(range(len(found)))
    # One output may go into another inside the module (an LSTMCell's c into its h).
    several = sum(t.requires_grad for t in found) > 1
    memories = Counter(map(_memory, found)) if several and not is_compiling() else Counter()

    def one(t: Tensor) -> Tensor:
        i = next(numbers)
        if not t.requires_grad:
            return t
        shared = memories[_memory(t)] > 1 or (not is_compiling() and _needs_tap(t, versions))
        handed = tap(t) if several or shared or is_compiling() else t
        listen(handed, partial(receive, i))
        if shared and watched is not None:
            watched(t, handed)
        return handed

    return tmap(one, output)


def listen(t: Tensor, f: Callable[[Tensor], Any]) -> None:
    """Has `f(grad)` called in each backward pass; the graph holds it."""
    t.register_hook(f)  # type: ignore[no-untyped-call]


def versions_of(*inputs: Any) -> dict[int, int]:
    """`{id: version}` of the tensors in `inputs`: tells a returned input from a changed one."""
    return {id(t): t._version for x in inputs for t in leaves(x) if not t.is_inference()}


def _needs_tap(t: Tensor, versions: dict[int, int] | None) -> bool:
    if t.is_leaf or t._is_view():
        return True
    return versions is not None and versions.get(id(t)) == t._version


def _memory(t: Tensor) -> int:
    """The same number for tensors that autograd knows to share their memory."""
    return 0 if is_compiling() else id(t if t._base is None else t._base)


def tap(t: Tensor) -> Tensor:
    """A tensor of its own with the values and the gradient of `t`; not a view of it.

    A lazy clone where that can be (see `snapshot`): not of what the user made, nor of quantized
    tensors, which torch 2.13 cannot read then.
    """
    root = t if is_compiling() or t._base is None else t._base
    plain = t.is_cpu and not t.is_quantized and not (root.is_leaf and root.requires_grad)
    if plain and not is_compiling() and not is_transformed(t):  # vmap has no lazy clone
        try:
            return lazy_clone(t)
        except RuntimeError:
            pass
    return t.clone()


class GradState:
    """What the two dispatchers of one gradient hook share.

    `begin(module, x)` is called at each forward with the output (or inputs) and gives the function
    that receives its gradients, or None to leave this call alone. `leaf` is the path of the part
    of the output that is meant, `label` the module in words.
    """

    __slots__ = ("__weakref__", "begin", "label", "leaf", "taps", "told", "versions")

    def __init__(
        self,
        begin: Callable[[nn.Module, Any], Receive | None],
        leaf: str = "",
        label: Callable[[nn.Module], str] = brief,
    ) -> None:
        self.begin, self.leaf, self.label, self.told = begin, leaf, label, False
        # Never emptied per call, for modules that call themselves: a stale entry costs one tap.
        self.versions: dict[int, int] = {}
        self.taps: dict[int, tuple[Any, Any, int]] = {}


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
        if _outside is not None and is_compiling():
            return _outside(self.run, module, *seen)
        return self.run(module, *seen)

    def run(self, module: nn.Module, *seen: Any) -> Any:
        raise NotImplementedError


class _Before(Dispatcher):
    """Forward-pre hook: notes which inputs come in, and at which version."""

    __slots__ = ()

    is_pre = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if (state := self.target) is not None and not is_compiling():
            if len(state.versions) > _MOST:
                state.versions.clear()
            state.versions.update(versions_of(args, kwargs))


class _After(_Sets):
    """Forward hook: hooks the output's tensors, handing on taps where they are needed."""

    __slots__ = ()

    def run(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        state = self.target
        receive = None if state is None else state.begin(module, output)
        if receive is None:
            return None
        part = pick(output, state.leaf)
        tapped = on_grad(part, receive, state.versions, partial(_watched, state, module))
        return None if tapped is part else put(output, state.leaf, tapped)


def _watched(state: GradState, module: nn.Module, original: Tensor, tapped: Tensor) -> None:
    """Has it told, once for each hook, if a tap parts from its original."""
    weak_state, weak = ref(state), ref(module)  # the graph will hold them

    def told() -> str:
        s, m = weak_state(), weak()
        if s is None or m is None or s.told:
            return ""
        s.told = True
        return s.label(m)

    watch(original, tapped, told)


class _BeforeInputs(_Sets):
    """Forward-pre hook: the module gets taps of its inputs, and their gradients are received.

    One tensor passed twice stays one tensor (attention asks `query is key`).
    """

    __slots__ = ()

    is_pre = True

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        state, inputs = self.target, Inputs(args, kwargs)
        receive = None if state is None else state.begin(module, inputs)
        if receive is None or not torch.is_grad_enabled():
            return None
        memo: dict[int, Tensor] = {}
        numbers = iter(range(len(leaves(inputs))))

        def one(t: Tensor) -> Tensor:
            i = next(numbers)
            if not t.requires_grad:
                return t
            tapped = memo[id(t)] if id(t) in memo else memo.setdefault(id(t), tap(t))
            listen(tapped, partial(receive, i))
            if not is_compiling():
                state.taps[id(tapped)] = ref(t), ref(tapped), tapped._version
            return tapped

        new = tmap(one, inputs)
        return None if new is inputs else (tuple(new), new.kwargs)


class _AfterInputs(Dispatcher):
    """Forward hook: what the module wrote into a tap is written into the tensor it stands for."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        state = self.target
        if state is None or is_compiling():
            return None
        written: dict[int, Tensor] = {}
        for t in leaves(Inputs(args, kwargs)):
            original, tapped, version = state.taps.pop(id(t), (None, None, 0))
            if tapped is None or tapped() is not t or (o := original()) is None:
                continue
            if t._version != version:
                written[id(t)] = o.copy_(t)
            elif any(y is t or y._base is t for y in leaves(output)):
                _watched(state, module, o, t)
        if len(state.taps) > _MOST:
            state.taps.clear()
        new = tmap(lambda t: written.get(id(t), t), output) if written else output
        return None if new is output else new


def grad_dispatchers(state: GradState, inputs: bool) -> tuple[Dispatcher, Dispatcher]:
    """The forward-pre and the forward hook that together receive gradients for `state`."""
    _prepare()
    if inputs:
        return _BeforeInputs(state), _AfterInputs(state)
    return _Before(state), _After(state)


def attach_grad(
    module: nn.Module,
    fn: Callable[[nn.Module, int, Tensor], Any],
    *,
    inputs: bool = False,
    edit: bool = False,
) -> Attached:
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
            new = None if m is None else fn(m, i, grad)
            return new if edit else None

        return receive

    return Attached(module, *grad_dispatchers(GradState(begin), inputs)).put_on()
