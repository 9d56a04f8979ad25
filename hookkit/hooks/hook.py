"""`Hook`: PyTorch calls it at each call of one module, and it stores what the module returned.

The class reads from top to bottom: made, registered, called, stored, read, removed. Hooks that were
made together share a `HookScope`, which has their options and their `with` block. The module holds
the hook; the hook holds the module weakly. Copies and pickles of a hook, also those that are made
with its module, are on no module and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit._core import distributed as ranks
from hookkit._core.checks import OfLast
from hookkit._core.messages import warn
from hookkit._core.pytree import Inputs, describe, is_path, tree_leaves, tree_map, tree_set
from hookkit.errors import (
    CompiledWarning,
    HookError,
    NeverFiredWarning,
    OptionError,
    OverwrittenWarning,
)
from hookkit.hooks.attach import add_hook_note, check_hookable, module_repr
from hookkit.hooks.calls import call_kind, graph_task, is_compiling, is_tracing
from hookkit.hooks.eager import has_compiled
from hookkit.hooks.grads import Receive, listen_inputs, listen_output
from hookkit.hooks.options import NO_BACKWARD, HookOptions, HookScope, StopForward, hook_kind
from hookkit.hooks.values import (
    Values,
    check_grad,
    check_same,
    new_inputs,
    out_of_inference,
    part_at,
    snapshot,
    to_store,
    version_of,
    wait_for,
)

NOT_WANTED = "`calls=` chose none of the calls that it got"
"""The reason that an edit gives if the calls it was made for never happened."""

_MISSING = object()  # in place of an argument that PyTorch did not pass
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Hook:
    """Calls one function at each forward (or backward) of one module, and stores its result.

    Args:
        m: the module. Held weakly; the module holds the hook.
        hook_func: `f(module, input, output)`, or `f(module, input)` with `pre=True`, or
            `f(module, grad_input, grad_output)` with `is_forward=False`. A function of one
            argument, or whose arguments Python cannot read, gets only the last of these:
            `torch.mean`, `lambda o: o.std()`. Its result is stored. `input` is an `Inputs`: a tuple
            of the positional inputs, keyword inputs by name. None stores the output (pre: inputs).
        is_forward: False registers PyTorch's full backward hook.
        detach: `hook_func` sees detached tensors, and stored tensors are snapshots. Without it
            the tensors themselves are stored, in their graph; reading one that was written in place
            since warns. An `edit` always sees the live tensors.
        cpu: stored tensors are moved to the CPU; from CUDA without waiting, until they are read.
        gather: reading `stored` joins the ranks' batches; every rank has to read it.
        pre: run before the forward instead of after it.
        edit: the result of `hook_func` (unless None) replaces the output (pre: the inputs, as one
            value, a tuple or `Inputs`; backward: `grad_input`). Another structure is an error.
        keep: `"last"` call, `"all"` calls, in `.calls`, or `"none"`: nothing is stored.
        clone: False stores the detached tensor without a copy.
        stop: in a `with` block, the forward ends, and the block with it, when this has fired.
        prepend: run before the hooks that the module has, instead of after them.
        name: the module's name, for messages.
        path: a part of the output, such as `[0]`: the hook sees only this part.

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

    # --- made

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
        path: str = "",
    ) -> None:
        kind = hook_kind("Hook", is_forward, pre)
        more: Any = {"keep": keep, "clone": clone, "stop": stop, "prepend": prepend}
        options = HookOptions("Hook", kind, hook_func, detach, cpu, gather, edit=edit, **more)
        check_hookable(m, "Hook")
        if not isinstance(path, str) or not is_path(path):
            raise OptionError(
                f"Hook: path={path!r} is no path into what a module gives. Write it as [0], .name "
                "or ['key'], or one after the other."
            )
        self._init(m, HookScope(options), name, path)
        self.register()

    def _init(self, m: nn.Module | None, scope: HookScope, name: str | None, path: str) -> None:
        """Set all attributes; `hook_of` calls this without `__init__`, with checked options."""
        self._module: Callable[[], nn.Module | None] = (lambda: None) if m is None else ref(m)
        self.scope, self.name, self.path = scope, name, path
        self.handle: RemovableHandle | None = None
        self.registered = False  # a compiled graph can ask this, unlike the handle
        self.n_calls = 0
        self.last: Any = None  # the value that the last call stored
        self.all: list[Any] | None = None  # the values of all calls, with keep="all"
        self.version = -1  # of the tensors in `last`, if they are not copies
        self.silent_reason = ""  # why nothing was stored, as far as it is known
        # The call whose gradients are in `last`: (number of the `with` block, number of the call in
        # it, number of the backward pass in which a checkpoint ran the call again or -1).
        self.grads_of: tuple[int, ...] = ()

    def _clear(self) -> None:
        """Clear the stored values and the counts."""
        self.n_calls, self.last, self.all, self.version, self.silent_reason = 0, None, None, -1, ""
        self.grads_of = ()

    @property
    def options(self) -> HookOptions:
        """Return the options that it was made with."""
        return self.scope.options

    @property
    def observes(self) -> bool:
        """Return True if the model computes the same without it."""
        return not self.options.edit

    # --- registered

    def register(self) -> None:
        """Register this hook on its module; do nothing if it is registered.

        Raises:
            HookError: the module is gone.
        """
        self.scope.register((self,))

    def _register(self) -> None:
        if self.registered:
            return
        m, options = self._module(), self.scope.options
        if m is None:
            raise HookError(f"{options.who}: the module of this hook is gone. Make a new hook.")
        kind, first = options.kind, options.prepend
        if kind == "forward" or kind == "grad":
            kwargs = not options.fast or self.path != ""
            self.handle = m.register_forward_hook(self, prepend=first, with_kwargs=kwargs)
        elif kind == "backward":
            self.handle = m.register_full_backward_hook(self, prepend=first)
        else:
            self.handle = m.register_forward_pre_hook(self, prepend=first, with_kwargs=True)
        self.registered = True

    def __enter__(self) -> Self:
        self.scope.enter((self,))
        return self

    # --- called by PyTorch

    def __call__(
        self, module: nn.Module, args: Any, x: Any = _MISSING, output: Any = _MISSING
    ) -> Any:
        """Store the output (or input, gradient) of this call; return its replacement, or None.

        PyTorch passes `(module, args, output)`, with keyword inputs `(module, args, kwargs,
        output)`, before the forward `(module, args, kwargs)`, and in the backward `(module,
        grad_input, grad_output)`.
        """
        scope = self.scope
        # PyTorch still calls a hook that was removed while this call was running
        if not self.registered or not scope.on:
            return None
        options = scope.options
        # fast path: store a snapshot of one tensor
        if options.fast and type(x) is Tensor and not is_compiling() and graph_task() == -1:
            self.n_calls += 1
            if options.detach:
                self.last = snapshot(x)
            else:
                self.last, self.version = x, version_of(x)
            return None
        kind = options.kind
        if kind == "backward":
            return self._backward(module, args, x)
        if kind == "forward" and options.fast and not self.path:  # without keyword inputs
            return self._forward(module, args, {}, x)
        # PyTorch notes in a second step that a hook takes keyword inputs, so a call in another
        # thread can come without them while the hook is being registered or removed.
        if (x if kind.startswith("pre") else output) is _MISSING:
            return None
        if kind.endswith("grad"):
            return self._listen(module, args, x, output)
        return self._forward(module, args, x, output)

    def hook_fn(self, m: nn.Module, i: Any, o: Any) -> Any:
        """Call `hook_func(m, i, o)` as PyTorch does, and store its result.

        >>> import torch
        >>> m, x = nn.Linear(2, 3), torch.zeros(4, 2)
        >>> h = Hook(m, lambda m, i, o: o.shape)
        >>> h.remove(); h.hook_fn(m, (x,), m(x)); h.stored
        torch.Size([4, 3])
        """
        args, kwargs = i if isinstance(i, tuple) else (i,), getattr(i, "kwargs", {})
        if self.options.kind in ("forward", "pre"):
            return self._forward(m, args, kwargs, o)
        return self._backward(m, i, i if self.options.kind == "pre_grad" else o)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Store the output (pre: the inputs), or the function's result, and count the call.

        Returns:
            The replacement of the output (pre: the inputs), if the hook edits; otherwise None.
        """
        options, pre, call = self.options, self.options.kind == "pre", call_kind()
        # A checkpoint has to repeat the edits of its forward. If this hook has counted no call, the
        # forward ran outside the block, without edits.
        if call == "recomputed" and not (options.edit and self.n_calls):
            self.silent_reason = self.silent_reason or (
                "seen only while a checkpoint recomputed it; run the forward in the block too"
            )
            return None
        if call == "exported" and not options.edit:
            return None
        value = Inputs(args, kwargs) if pre else output
        part = self._part(value)
        if options.func is None:
            self._store(part)
            return None
        seen = (part,) if pre or options.takes_last else (Inputs(args, kwargs), part)
        if options.detach and not options.edit:
            seen = tuple([tree_map(Tensor.detach, x) for x in seen])
        new = self._call(module, *seen)
        if call != "recomputed":
            self._store(new)
        if not options.edit or new is None:
            return None
        if self.path or not pre:
            check_same(self, part, new)
            new = tree_set(value, self.path, new)
        return new_inputs(self, value, new) if pre else new

    def _backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        """Store the gradients of PyTorch's full backward hook; return the replacement, or None."""
        options = self.options
        if options.detach and not options.edit:
            grad_input = tree_map(Tensor.detach, grad_input)
            grad_output = tree_map(Tensor.detach, grad_output)
        new = grad_output
        if options.func is not None:
            new = self._call(module, grad_input, grad_output)
        self._store(new)
        if not options.edit:
            return None
        return (new,) if isinstance(new, Tensor) else new  # PyTorch would index a bare tensor

    def _listen(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Set tensor hooks, in the forward, that receive the gradients of outputs (or inputs).

        Returns:
            The output (or inputs) with views in the place of some tensors, or None.
        """
        options, pre = self.options, self.options.kind == "pre_grad"
        value = Inputs(args, kwargs) if pre else output
        part = self._part(value)
        if not self._count_for_grads(tree_leaves(part)):
            return None
        receive = self._grad_editor(module) if options.edit else self._grad_receiver(part)
        if not pre:
            new = listen_output(module, args, kwargs, part, receive, options.edit)
            return None if new is None else tree_set(output, self.path, new)
        new = tree_set(value, self.path, listen_inputs(module, value, part, receive))
        return tuple(new), new.kwargs

    def _part(self, x: Any) -> Any:
        """Return the part of `x` at the hook's `path`."""
        return part_at(x, self.path, self.options.who, lambda: self.label) if self.path else x

    def _call(self, module: nn.Module, *seen: Any) -> Any:
        """Call the user's function; a ready-made edit also gets the hook."""
        func: Any = self.options.func
        try:
            if self.options.wants_hook:
                return func(module, *seen, hook=self)
            return func(module, *seen)
        except Exception as e:
            add_hook_note(e, func, self.label)
            raise

    # --- stored

    def _store(self, x: Any) -> None:
        """Store `x` and count the call; end the forward if it was the last wanted one."""
        scope, options = self.scope, self.options
        if options.keep != "none":
            self.last = to_store(x, scope)
            if not options.detach or not options.clone:
                self.version = version_of(self.last)
        if is_compiling():
            self.silent_reason = "it ran in a compiled graph, which counts no calls"
            if options.keep == "all":
                raise HookError(f'{options.who}: compiled code lists no calls. Use keep="last".')
            return
        self.n_calls += 1
        if options.keep == "all":
            self.all = self.all or []
            self.all.append(self.last)
        if scope.waiting is not None:
            scope.waiting.discard(id(self))
            if not scope.waiting:  # one pass only: later ones are complete
                scope.waiting = None
                raise StopForward(scope)
        elif options.stop and not scope.depth and not scope.warned:
            scope.warned = True
            warn(
                f"{options.who}: stop=True ends a forward inside of a `with` only, so this one "
                "runs to its end. Write `with h:` around the model.",
                NeverFiredWarning,
            )

    def _count_for_grads(self, tensors: list[Tensor]) -> bool:
        """Count a call of `tensors` (outputs or inputs); return True if one will get a gradient."""
        options, call = self.options, call_kind()
        if call == "exported":
            return False
        if call != "compiled" and is_tracing():
            self.silent_reason = (
                self.silent_reason or "torch.jit.trace ran it, where no gradient is hooked"
            )
            return False
        if call == "first" and not options.edit:
            self.n_calls += 1
            if options.keep == "all":
                self.all = self.all or []
                self.all.append((None,) * len(tensors))
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            self.silent_reason = self.silent_reason or _no_gradient(tensors, options.kind)
            return False
        if call == "recomputed" and options.keep == "all" and self.n_calls > 1:
            self.silent_reason = (
                'a checkpoint with use_reentrant=True ran its calls again; use keep="last"'
            )
            self.last = None  # it would be an earlier call's
            return False
        self.silent_reason = "no gradient arrived inside the block" if options.edit else ""
        return True

    # The autograd graph keeps the two functions below alive. They hold the hook weakly, because
    # Python's garbage collector finds no reference cycle that goes through the graph.

    def _grad_receiver(self, part: Any) -> Receive:
        """Return the function that stores the gradients of `part`, of this call.

        `last` keeps those of the latest call; a new backward pass starts a new tuple.
        """
        hook, n = ref(self), len(tree_leaves(part))
        # A checkpoint that runs several calls again gives all of them the same number. Their
        # gradients arrive from the last call to the first, so the first to arrive is stored.
        again = -1 if is_compiling() else graph_task()
        source = (self.scope.n_entered, self.n_calls, again)
        task, grads = -1, list[Tensor | None]()

        def receive(i: int, grad: Tensor) -> None:
            nonlocal task, grads
            h = hook()
            if h is None or not h.registered or not h.scope.on:
                return
            if not grads or task != graph_task():
                task, grads = graph_task(), [None] * n
            try:
                grads[i] = to_store(grad, h.scope)
            except RuntimeError as e:
                if "Batching rule" not in str(e):
                    raise
                raise HookError(
                    f"{h.options.who} on {h.label}: several backward passes run as one (with "
                    "is_grads_batched=True, or vectorize=True of a Jacobian), and PyTorch cannot "
                    "take their gradients apart. Run them one by one, or without the hook."
                ) from e
            latest = h.grads_of
            # Equal numbers: another call of the same recomputation, unless it is the same object.
            if source > latest or (source == latest and (again < 0 or source is latest)):
                h.last, h.grads_of = tuple(grads), source
            if h.all is not None and source[0] == h.scope.n_entered:
                h.all[source[1] - 1] = tuple(grads)

        return receive

    def _grad_editor(self, module: nn.Module) -> Receive:
        """Return the function that replaces each gradient by the result of the user's function."""
        hook, owner = ref(self), ref(module)

        def receive(i: int, grad: Tensor) -> Any:
            h, m = hook(), owner()
            if h is None or m is None or not h.registered or not h.scope.on:
                return None
            new: Any = h._call(m, grad)
            if not torch.compiler.is_compiling():
                h.n_calls += 1
            if new is not None:
                check_grad(h, grad, new)
            return new

        return receive

    # --- read

    @property
    def stored(self) -> Any:
        """Return the value that the last call stored; None before the first.

        Waits for a copy from CUDA, warns of a live tensor that was written in place since, and with
        `gather` joins the ranks (all of them have to read it, equally often).
        """
        value = self._stored_here()
        if self.options.gather:
            value = ranks.gather([value], [f"what is stored of {self.label}"])[0]
        return value

    def _stored_here(self) -> Any:
        """Return the value that this rank stored in the last call."""
        wait_for(self.scope.pending)
        if self.last is None:
            self._warn_if_compiled()
        elif self.version != -1 and version_of(self.last) != self.version:
            self.version = -1
            warn(
                f"{self.options.who}: what is stored of {self.label} was overwritten in place "
                "after it was stored (a layer with inplace=True, or an operation such as `+=`), so "
                "this is not what the layer gave. Store a copy: Hook(m, torch.clone, "
                "detach=False).",
                OverwrittenWarning,
            )
        self.last = out_of_inference(self.last)
        return self.last

    @property
    def calls(self) -> Values:
        """Return the value of each call, in the order of the forward calls; needs `keep="all"`."""
        options = self.options
        if options.keep != "all":
            raise OptionError(
                f'{options.who}: .calls of {self.label} needs keep="all", and it has '
                f'keep="{options.keep}". Make the hook with keep="all".'
            )
        wait_for(self.scope.pending)
        values = out_of_inference(self.all or [])
        if options.gather:
            names = [f"what is stored of {self.label} in call {i}" for i in range(len(values))]
            values = ranks.gather(values, names)
        return Values(values)

    def _warn_if_compiled(self) -> None:
        """Warn once that a registered hook has seen no call, if compiled code may be the reason."""
        scope = self.scope
        if scope.depth or scope.warned or not self.registered or self.n_calls or self.silent_reason:
            return
        if not has_compiled() or self.module is None:
            return
        scope.warned = True
        warn(
            f"{self.options.who}: the hook on {self.label} has seen no call. If it is part of a "
            "compiled model that had run before: torch.compile ignores hooks that are added after "
            "the first call, of this model or of another of its class. Add the hook before that "
            "call, use it in a `with` block, or call torch.compiler.reset().",
            CompiledWarning,
        )

    @property
    def fired(self) -> bool:
        """Return True if it has stored something, or seen a call that stores nothing."""
        if self.last is not None:
            return True
        if self.options.kind.endswith("grad") and not self.options.edit:
            return False  # it counts forward calls
        return self.n_calls > 0 and self.silent_reason != NOT_WANTED

    def _reason_in_words(self) -> str:
        """Return why this hook has stored nothing, as far as that is known."""
        module = self.module
        if module is None:
            return "the module is gone"
        if isinstance(module, _CONTAINERS):
            return f"a {type(module).__name__} is never called itself; hook the modules inside it"
        if self.silent_reason:
            return self.silent_reason
        if self.n_calls:
            return NO_BACKWARD
        if type(module).__name__ == "NonDynamicallyQuantizableLinear":
            return "MultiheadAttention uses its weights without calling it; hook the attention"
        return "not called, or it raised an error (module.forward(x) runs no hooks, module(x) does)"

    @property
    def module(self) -> nn.Module | None:
        """Return the hooked module, or None if it is gone."""
        return self._module()

    @property
    def label(self) -> str:
        """Return the module's name, where it is known, and its class, for messages."""
        module = self._module()
        if self.name is None:
            return "a module that is gone" if module is None else module_repr(module)
        return f"'{self.name}'" + (f" ({type(module).__name__})" if module is not None else "")

    def __repr__(self) -> str:
        seen = "1 call" if self.n_calls == 1 else f"{self.n_calls} calls"
        held = f", stored {text}" if (text := self._stored_in_words()) else ""
        return f"Hook({self.label}, {seen}{held}{', removed' if self.removed else ''})"

    def _stored_in_words(self) -> str:
        """Return a description of the stored value; "" for gradients, which arrive later."""
        grads = self.options.kind.endswith("grad")
        return "" if self.last is None or grads else describe(self.last)

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report misspelt names

        def __getattr__(self, name: str) -> Any:
            """Raise for an unknown name; often an attribute of the stored tensor is meant."""
            found = f".{name}" if hasattr(vars(self).get("last"), name) else ""
            cure = f"its value is in .stored. Write .stored{found}."
            raise AttributeError(f"a Hook has no {name!r}: {cure}", name=name, obj=self)

    # --- read: fastai's names

    @property
    def hook(self) -> Self:
        """Return this hook; fastai's Hook keeps the handle here, which has `remove()` too."""
        return self

    @property
    def hook_func(self) -> Callable[..., Any] | None:
        """Return the function that the hook was made with; None if it stores the output."""
        func = self.options.func
        return func.f if isinstance(func, OfLast) else func

    @property
    def detach(self) -> bool:
        """Return True if stored tensors are detached."""
        return self.options.detach

    @property
    def cpu(self) -> bool:
        """Return True if stored tensors are moved to the CPU."""
        return self.options.cpu

    @property
    def gather(self) -> bool:
        """Return True if reading `stored` joins the ranks."""
        return self.options.gather

    # --- removed

    @property
    def removed(self) -> bool:
        """Return True while it is not registered."""
        return not self.registered

    def remove(self) -> None:
        """Remove this hook from its module; stored values stay. Can be repeated."""
        try:
            if self.options.edit:
                self._warn_if_compiled()
        finally:
            self.scope.unregister((self,))

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        return self.scope.exit((self,), e)

    def __reduce__(self) -> Any:
        return _inert, ()


def hook_of(m: Any, scope: HookScope, name: str | None = None, path: str = "") -> Hook:
    """Return a `Hook` with the options of `scope`, which is not registered yet.

    Args:
        m: a module, or an object that stands for one, such as a `FunctionCall`.
    """
    hook = Hook.__new__(Hook)
    hook._init(m, scope, name, path)
    return hook


def _inert() -> Hook:
    """Return a hook on no module, which stands for a copy or a pickle of a hook."""
    return hook_of(None, HookScope(HookOptions()))


def _no_gradient(tensors: list[Tensor], kind: str) -> str:
    """Return why there will be no gradient of a call that returned, or took, `tensors`."""
    if not tensors:
        return "hookkit finds no tensor there; hook a layer inside it, or one that gives tensors"
    if torch.is_grad_enabled():
        what = "inputs" if kind == "pre_grad" else "outputs"
        return f"none of its {what} requires a gradient (its parameters and inputs are frozen)"
    return (
        "it ran with gradients switched off (no_grad, inference_mode, or a checkpoint with "
        "use_reentrant=True)"
    )
