"""Hook calls of torch functions, for values that no module returns: attention, a softmax.

A `TorchFunctionMode` sees each call of a torch function in its thread while it is on. A wanted call
runs under a `Hook`, which stores, edits and takes gradients as on a module. The module that made
the call is found on the call stack. Functions are compared by name without underscores, so that all
forms are one function: `F.relu`, `torch.relu_`, `x.relu`; `+` is `add`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import currentframe
from pathlib import Path
from threading import get_ident
from types import FrameType, FunctionType, TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookkit._core.checks import check_choice, check_flag, check_module, kind_of
from hookkit._core.messages import warn
from hookkit._core.modules import unwrap
from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, OptionError
from hookkit.hooks.attach import check_hookable
from hookkit.hooks.calls import call_kind
from hookkit.hooks.collection import Hooks, Modules, named_modules_of
from hookkit.hooks.hook import hook_of
from hookkit.hooks.options import HookOptions, HookScope
from hookkit.hooks.selection import select

Within = nn.Module | Modules | None
Caller = tuple[str, nn.Module | None] | None
# Python functions of torch whose inner calls count: a checkpoint runs the model in `backward`.
_OPEN = frozenset(("backward", "grad", "multi_head_attention_forward"))
# modules of torch whose functions are written in Python and dispatch to modes themselves
_FUNCTIONS = frozenset(
    ("torch.overrides", "torch.nn.functional", "torch.functional", "torch._tensor")
)
_HOME = str(Path(__file__).parents[1]) + os.sep
_MODELS = f"{_HOME}testing{os.sep}"  # models that a user may hook, so their calls count


@lru_cache(1000)
def plain_name(f: Any) -> str:
    """Return the name that all forms of a function share; `/` is `div`.

    >>> [plain_name(f) for f in (torch.relu_, Tensor.__iadd__, Tensor.__rsub__, Tensor.__matmul__)]
    ['relu', 'add', 'sub', 'matmul']
    """
    name: str = getattr(f, "__name__", "").partition(".")[0]  # of an operator: relu.default
    if not name.startswith("__"):
        return name.rstrip("_")
    name = name.strip("_")
    if name[0] in "ir" and hasattr(Tensor, f"__{name[1:]}__"):
        name = name[1:]
    return "div" if name == "truediv" else name


def writes_in_place(name: str) -> bool:
    """Return True if a function of this name works in place: `relu_`, `__iadd__`, `__setitem__`."""
    if not name.startswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name[2] == "i" and hasattr(Tensor, f"__{name[3:]}"))


class FunctionCall:
    """Stands for a call of a torch function, and is given to its hook in place of a module.

    Attributes:
        name: the name of the call: `blocks.3.attn/softmax:0`.
        function: the torch function that was called.
        owner: the module of `within` that called it; None without `within`.
    """

    __slots__ = ("__weakref__", "function", "hook", "name", "owner")

    def __init__(self, name: str, owner: nn.Module | None, scope: HookScope, path: str) -> None:
        self.name, self.function, self.owner = name, None, owner
        self.hook = hook_of(self, scope, name, path)
        self.hook.registered = True  # `run` calls it

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call the function under the hook, as PyTorch calls a module; return its result."""
        self.function, hook, options = function, self.hook, self.hook.options
        this: Any = self
        if options.kind.startswith("pre"):
            new = hook(this, args, kwargs)
            args, kwargs = (args, kwargs) if new is None else new
            return function(*args, **kwargs)
        out = function(*args, **kwargs)
        plain = options.fast and not hook.path
        new = hook(this, args, out) if plain else hook(this, args, kwargs, out)
        return out if new is None else new

    def __repr__(self) -> str:
        return self.name


class FunctionHooks(Hooks, TorchFunctionMode):
    """Holds a `Hook` for each call of a torch function, in the order of the calls.

    `hook_function` and `edit_function` make it. It is read as `Hooks` are. It is on inside its
    `with` only, and entering it again begins with no calls.

    Attributes:
        numbered: whether each call has its own hook, named with the number of the call in its
            module. If not, all calls in one module share a hook.
    """

    path = ""  # of the part of the inputs or the output that hooks see
    quiet = False  # True: do not warn if the function was never called

    def __init__(self, f: Any, within: Within, options: HookOptions, numbered: bool = True) -> None:
        TorchFunctionMode.__init__(self)
        _check_is_torchs(options.who, f)
        self.within: dict[int, str] | None = None
        positions = False
        if within is not None:
            self.within, positions = _names_of(within, options.who)
        self.scope = HookScope(options, only_in_with=True, names_are_positions=positions)
        self.numbered, self.wanted = numbered, {plain_name(f)}
        self._clear()

    def _clear(self) -> None:
        """Discard all calls; from now on count the calls of this thread."""
        self.hooks, self.calls, self.thread = [], dict[str, FunctionCall](), get_ident()
        self.counts, self.heads = Counter[str](), dict[str, int]()
        # module that ran inside one of `within` → what `_caller` returned while it ran
        self.inside = WeakKeyDictionary[nn.Module, set[Caller]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` for PyTorch, under a hook if it is wanted. The mode is off meanwhile."""
        kwargs, name = kwargs or {}, plain_name(func)
        if name in self.wanted and self.scope.on and not _called_by_hookkit():
            return self._run_hooked(func, name, args, kwargs)
        if name in _OPEN and isinstance(func, FunctionType):
            with self._seeing_inside():
                return _undispatched(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _run_hooked(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call `func` under its hook, or without one if the call does not count."""
        caller = self._caller()
        if caller is None:
            return func(*args, **kwargs)
        if self.options.edit and (
            writes_in_place(func.__name__) or kwargs.get("inplace") or kwargs.get("out") is not None
        ):
            raise HookError(
                f"{self.options.who}: {func.__name__} writes its result into a tensor that it is "
                "given (in place, or out=), where an edit has no effect. Edit what is computed "
                "from it, or the layer around it."
            )
        if name == "scaled_dot_product_attention":
            self._check_heads(caller[0], args[0] if args else kwargs["query"])
        return self._function_call(name, *caller).run(func, args, kwargs)

    @contextmanager
    def _seeing_inside(self) -> Iterator[None]:
        """Turn this mode on again for the calls that a function makes inside itself."""
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def _caller(self) -> Caller:
        """Return name and module of the innermost running module of `within`; None skips the call.

        Calls that a checkpoint runs again count only for edits.
        """
        again = call_kind() == "recomputed"
        if again and not self.options.edit:
            return None
        if self.within is None:
            return "", None
        inside, caller = [], None
        for module in running_modules():
            if id(module) in self.within:
                caller = self.within[id(module)], module
                break
            inside.append(module)
        if again and caller is None:
            return self._caller_before(inside)
        if self.options.edit and not again:
            for module in inside:
                self.inside.setdefault(module, set()).add(caller)
        return caller

    def _caller_before(self, inside: list[nn.Module]) -> Caller:
        """Return the caller that made, in the forward, the call that a checkpoint repeats now.

        A checkpoint inside a module of `within` runs only the modules `inside` it again, so that
        module is not on the stack. A module of `inside` that had one caller in the forward tells.
        """
        seen = [self.inside[module] for module in inside if module in self.inside]
        for callers in seen:
            if len(callers) == 1:
                return next(iter(callers))
        if inside and not seen:
            return None  # the forward ran outside the block, without the edit
        raise HookError(
            f"{self.options.who}: a checkpoint runs a function again, or a module that is shared, "
            "and which module that is for is not known. Checkpoint a module around it, or leave "
            "out within=."
        )

    def _function_call(self, name: str, caller: str, owner: nn.Module | None) -> FunctionCall:
        """Return the `FunctionCall` of this name; make it at the first call."""
        full = f"{caller}/{name}" if caller else name
        if self.numbered:
            n = self.counts[full]
            self.counts[full] += 1
            full = f"{full}:{n}"
        if full not in self.calls:
            call = self.calls[full] = FunctionCall(full, owner, self.scope, self.path)
            self.hooks.append(call.hook)
        return self.calls[full]

    def _check_heads(self, caller: str, query: Tensor) -> None:
        """Warn once if attention is called with another number of heads than before."""
        heads = query.shape[-3] if query.dim() > 2 else 1
        if self.heads.setdefault(caller, heads) == heads or self.scope.warned:
            return
        self.scope.warned = True
        warn(
            f"{self.options.who}: attention in {caller or 'the model'} was called with "
            f"{self.heads[caller]} heads, and now with {heads}: grouped queries are packed (as "
            "transformers does in generate), so a head's number means another one here. Use the "
            "input of the output projection instead: edit_input(…o_proj, …).",
        )

    @property
    def removed(self) -> bool:
        """Return True while it is off, as it is outside of its `with`."""
        return not (self.scope.depth and self.scope.on)

    def register(self) -> None:
        """Turn the hooks on again after `remove()`, inside of their `with`."""
        self.scope.register(())  # raises outside of the `with`
        self._turn(True)

    def remove(self) -> None:
        """Turn the hooks off until `register()` or the next `with`; stored values stay."""
        self._turn(False)

    def _turn(self, on: bool) -> None:
        self.scope.on = on
        for h in self.hooks:
            h.registered = on

    def __enter__(self) -> Self:
        if self.scope.depth and self.thread != get_ident():
            raise HookError(
                f"{self.options.who}: these hooks are on in another thread, whose calls alone they "
                "see. Make hooks for each thread."
            )
        if not self.scope.depth:
            self._clear()
        self.scope.enter(())
        if self.scope.depth == 1:
            try:
                TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
            except BaseException:
                self.scope.exit((), None)
                raise
        self._turn(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        if self.scope.depth > 1:
            return self.scope.exit(self.hooks, e)
        self.inside.clear()
        try:
            TorchFunctionMode.__exit__(self, kind, e, tb)  # type: ignore[no-untyped-call]
        finally:
            self.scope.on = False
            ended = self.scope.exit(self.hooks, e)
        if e is None and not self.hooks and not self.quiet:
            warn(self.never_called(), NeverFiredWarning)
        return ended

    def never_called(self) -> str:
        """Return the warning that no call was seen."""
        where = "inside the block" if self.within is None else "within these modules"
        return (
            f"{self.options.who}: {', '.join(self.wanted)} was never called in this thread"
            f" {where}. Run the model inside the block, or hook a function that it calls."
        )

    def __reduce__(self) -> Any:
        raise HookError(f"{self.options.who}: hooks on functions cannot be copied. Make new ones.")

    def __repr__(self) -> str:
        return f"Function{super().__repr__()}"


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose forward, or hooks, run now in this thread, the innermost first."""
    frame = currentframe()
    while frame is not None:
        # Private: `Module._call_impl` runs hooks and forward (since 1.7): its frame has the
        # module. Under another name no call would count within a module.
        if frame.f_code.co_qualname == "Module._call_impl":
            yield frame.f_locals["self"]
        frame = frame.f_back


def call_outer(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` as the model called it, so that outer blocks see the call."""
    return func(*args, **kwargs)


@lru_cache(16)
def _undispatched(func: FunctionType) -> FunctionType:
    """Return a copy of `func`, a Python function of torch, that does not dispatch to modes."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    home = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    again = FunctionType(func.__code__, home, func.__name__, func.__defaults__, func.__closure__)
    again.__kwdefaults__ = func.__kwdefaults__
    return again


def _called_by_hookkit() -> bool:
    """Return True if hookkit itself makes this call, not the model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _FUNCTIONS:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return file.startswith(_HOME) and file != __file__ and not file.startswith(_MODELS)


def _check_is_torchs(who: str, f: Any) -> None:
    """Raise if the module of `f` shows that it is no function of torch."""
    home = (getattr(f, "__module__", None) or "torch").partition(".")[0]
    if callable(f) and not isinstance(f, (nn.Module, type)) and plain_name(f) and home == "torch":
        return
    what = f"{home}.{f.__name__}" if hasattr(f, "__name__") else kind_of(f)
    raise ArgumentError(
        f"{who}: f must be a function of torch, such as F.softmax, torch.Tensor.add or "
        f"torch.matmul; found {what}, of which PyTorch reports no calls. Modules are hooked with "
        "hook_output."
    )


def modules_inside(model: nn.Module, who: str) -> dict[str, nn.Module]:
    """Return the modules of `model` that run Python hooks by name, with the model itself as ""."""
    found = {"": unwrap(check_module(who, model)), **select(model)}
    return {name: m for name, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}


def _names_of(within: Any, who: str) -> tuple[dict[int, str], bool]:
    """Return id → name of the modules in `within`, and whether the names are positions.

    A single module stands for itself and all modules inside it.
    """
    if isinstance(within, nn.Module):
        within = modules_inside(within, who)
    names, positions = dict[int, str](), False
    for i, (name, m, path) in enumerate(named_modules_of(within, who)):
        check_hookable(m, who)
        positions |= name is None
        if path:
            raise OptionError(
                f'{who}: within takes modules, and "{name}" selects a part of an output. '
                f"Leave out {path}."
            )
        names.setdefault(id(m), str(i) if name is None else name)
    return names, positions


def hook_function(
    f: Callable[..., Any],
    within: Within = None,
    detach: bool = True,
    cpu: bool = False,
    grad: bool = False,
    gather: bool = False,
    *,
    inputs: bool = False,
    hook: Callable[..., Any] | None = None,
    keep: str = "all",
    clone: bool = True,
) -> FunctionHooks:
    """Store the result of each call of the torch function `f`, inside a `with`.

    Use it for values that no module returns: `F.scaled_dot_product_attention`, a residual `+`,
    `x.softmax(-1)`. Each call has a `Hook` of its own, named by the module that made it, the
    function, and the number of the call: `h["blocks.3.attn/scaled_dot_product_attention:0"]`.
    `h.names` lists all.

    The same function counts however it is reached: from `torch`, `torch.nn.functional` or as a
    method of a tensor (`F.softmax`, `torch.softmax`, `x.softmax`), in place (`relu_`), as an
    operator (`@` is `matmul`, `+` and `+=` are `add`), and as an operation of an exported program.
    Calls that a torch function makes inside itself do not count (but those in
    `nn.MultiheadAttention` do), nor do aliases under another name (`torch.concat`, and `%` for
    `torch.remainder`).

    Compiled models run eagerly in the block, other threads are not seen, and PyTorch's fused
    `nn.TransformerEncoderLayer` is off. With nested blocks, the innermost is nearest to the caller,
    so it sees the result of an edit around it. Calls that a checkpoint repeats are not stored.

    Args:
        f: a function of torch, a method of `torch.Tensor`, or an operator of `torch.ops`.
        within: count only calls made while one of these modules runs, and name them by the
            innermost: one module (all modules in it), or several, as `select` gives them. None
            counts every call in the block, without a module's name.
        detach, cpu, grad, gather, clone: as for `hook_output`.
        inputs: store the inputs of the function, as `Inputs`, or the gradients of the inputs.
        hook: `hook(call, inputs, output)`, or of one argument; its result is stored in place of the
            output (with `inputs=True`: `hook(call, inputs)`); `call.function` is the function.
        keep: `"all"` calls; the `"last"` call of each module, in one hook without a number
            (`h["blocks.3.attn/softmax"]`), so that a long loop fills no memory; or `"none"`, for a
            `hook` that is only called, and for `n_calls`.

    Returns:
        `FunctionHooks`, to be entered; one that never is warns. The calls of the last `with` stay
        readable after it.

    Raises:
        ArgumentError: `f` is no function of torch; or `within` holds no modules.
        OptionError: `keep` is none of the three, or `hook` is given for gradients.

    >>> import torch.nn.functional as F
    >>> net = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> with hook_function(F.scaled_dot_product_attention, within=select(net, "self_attn")) as h:
    ...     y = net(torch.randn(1, 5, 8))
    >>> h.names, h[0].stored.shape
    (('self_attn/scaled_dot_product_attention:0',), torch.Size([1, 2, 5, 4]))
    """
    who = "hook_function"
    kind = function_kind(who, inputs, grad)
    if hook is not None and kind.endswith("grad"):
        raise OptionError(
            "hook_function: hook= is for values, not for gradients. Leave out grad=True, or read "
            "the gradients from .stored."
        )
    check_choice(who, "keep", keep, ("last", "all", "none"))
    each = "none" if keep == "none" else "last"
    options = HookOptions(who, kind, hook, detach, cpu, gather, keep=each, clone=clone)
    return FunctionHooks(f, within, options, numbered=keep == "all")


def function_kind(who: str, inputs: Any, grad: Any) -> str:
    """Return the kind of hook that `inputs` and `grad` ask for."""
    inputs, grad = check_flag(who, "inputs", inputs), check_flag(who, "grad", grad)
    return ("pre_grad" if inputs else "grad") if grad else ("pre" if inputs else "forward")
