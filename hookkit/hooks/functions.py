"""Hooks on the calls of torch functions: `hook_function`, and `FunctionHooks`, which it returns.

A `TorchFunctionMode` sees each call of a torch function in its thread while it is on. It runs one
that is wanted as the call of a module, `FunctionCall`, and on a module all hooks fit: storing,
gradients, edits and recorders are those of modules, unchanged. Which module made the call is known
from two hooks on each module of `within`, which note when its forward begins and ends.
Which functions a mode sees, and which of them are the same, is in `torch_functions`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from hookkit.checks import check_flag
from hookkit.errors import HookError, HookkitWarning, OptionError
from hookkit.hooks.block import Block
from hookkit.hooks.capture import Capture
from hookkit.hooks.collection import Hooks, Modules, Named, named_modules_of
from hookkit.hooks.entries import HookEntry, Placed, check_hookable, graph_task, in_thread
from hookkit.hooks.snapshot import Kind, Options
from hookkit.hooks.torch_functions import opened, overridden, same_functions, take_off
from hookkit.interrupts import uninterrupted
from hookkit.modules import unwrap
from hookkit.selecting import select

Within = nn.Module | Modules | None
Numbers = Literal["block", "forward", "none"]

KINDS: dict[tuple[bool, bool], Kind] = {
    (False, False): "forward",
    (True, False): "pre",
    (False, True): "grad",
    (True, True): "pre_grad",
}
"""What is hooked, by `inputs` and `grad`."""

_FUSED = (
    "inside the block PyTorch does not use its fused kernels for nn.TransformerEncoderLayer and "
    "nn.MultiheadAttention in eval mode, since a function mode switches them off. What the model "
    "gives can differ in the last digits, and at padded positions, which the fused kernels set to "
    "0. torch.backends.mha.set_fastpath_enabled(False) gives the same numbers everywhere."
)


class FunctionCall(nn.Module):
    """The call of a torch function, as a module: `name` is its name, `function` what was called."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.function: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.name


class FunctionCalls(TorchFunctionMode):
    """The mode that runs each wanted call as the call of a `FunctionCall`.

    Args:
        functions: the torch functions that are wanted.
        within: modules, by name, in whose forward a call counts; None counts every call.
        block: calls count in its thread, while it is on.
        begin: called with each new `FunctionCall` before it runs, to put hooks on it.
        numbers: the number at the end of a call's name counts the calls of the function in the
            innermost module of `within`: all in the block, or those of one forward; "none" has no
            number, so that all calls of the function in a module are calls of one `FunctionCall`.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        within: list[Named] | None,
        block: Block,
        begin: Callable[[FunctionCall], None],
        numbers: Numbers = "block",
    ) -> None:
        super().__init__()
        self.names: dict[Any, str] = {}
        for f in functions:
            self.names.update(same_functions(block.options.who, f))
        self.within, self.block, self.begin, self.numbers = within, block, begin, numbers
        self.hooks: Hooks | None = None
        self.on = False
        self.reset()

    def reset(self) -> None:
        """Forgets all calls."""
        self.inside: list[str] = []  # the modules of `within` whose forward runs
        self.counts: dict[str, dict[str, int]] = {}
        self.calls: dict[str, FunctionCall] = {}
        self.others: dict[Any, Callable[..., Any] | None] = {}  # unwanted functions, see `opened`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by PyTorch in the place of `func`; the mode is off meanwhile."""
        kwargs = kwargs or {}
        if func is multi_head_attention_forward:
            self._warn_if_fused(args, kwargs)
        name = self.names.get(func)
        if name is None:
            return self._other(func, types, args, kwargs)
        if not self._counts():
            return func(*args, **kwargs)
        call = self._call(name)
        call.__dict__["function"] = func  # Module.__setattr__ costs 1 µs
        if self.block.options.edit and not self.block.options.kind.endswith("grad"):
            _check_editable(self.block.options, call, func, kwargs)
        return call(*args, **kwargs)

    def _counts(self) -> bool:
        if not (self.on and self.block.on) or not (self.inside or self.within is None):
            return False
        if graph_task() != -1 and not self.block.options.edit:  # a checkpoint runs it again
            return False
        return in_thread(self.block.thread)

    def _call(self, name: str) -> FunctionCall:
        """What runs this call: a new one, unless its name was there before."""
        module = self.inside[-1] if self.inside else ""
        full = f"{module}/{name}" if module else name
        if self.numbers != "none":
            counts = self.counts.setdefault(module, {})
            n = counts[name] = counts.get(name, -1) + 1
            full = f"{full}:{n}"
        call = self.calls.get(full)
        if call is None:
            call = FunctionCall(full)
            self.begin(call)
            self.calls[full] = call
        return call

    def _other(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs an unwanted function; if it calls a wanted one itself, with the mode on."""
        try:
            inner = self.others[func]
        except KeyError:
            inner = self.others[func] = opened(func, self.names)
        if inner is None or overridden(types):
            return func(*args, **kwargs)
        with self:
            return inner(*args, **kwargs)

    # -- which modules run

    def start(self) -> None:
        """Sees calls from now on, and which module of `within` makes them."""
        self.hook_modules()
        self.turn_on()

    def stop(self) -> None:
        """Undoes `start`; can be repeated, as where it was called while a call is under way."""
        self.turn_off()
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None

    def hook_modules(self) -> None:
        """Puts hooks on the modules of `within`, which work while this is on."""
        if self.within is not None:
            o = Options(self.block.options.who, "recorder", keep="none", entries=self.entries)
            self.hooks = Hooks.of_named(self.within, o)
            self.hooks.switch.on = False

    def turn_on(self) -> None:
        """Sees calls from now on."""
        take_off(self, self.on)  # of a forward that was interrupted
        self.inside.clear()
        self.on = True
        if self.hooks is not None:
            self.hooks.switch.on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def turn_off(self) -> None:
        """Undoes `turn_on`; can be repeated."""
        take_off(self, self.on)
        self.on = False
        self.inside.clear()
        if self.hooks is not None:
            self.hooks.switch.on = False

    def entries(self, name: str, module: nn.Module, leaf: str) -> list[Placed]:
        """What notes that the forward of a module begins, and that it ends, by an error too."""

        def enter(*_: Any) -> None:
            if in_thread(self.block.thread):
                self.inside.append(name)
                if self.numbers == "forward":
                    self.counts.pop(name, None)

        def leave(*_: Any) -> None:
            if in_thread(self.block.thread) and name in self.inside:
                while self.inside.pop() != name:
                    pass  # it was left by an exception that runs no hooks

        return [(HookEntry(enter), {"pre": True}), (HookEntry(leave), {"always_call": True})]

    def _warn_if_fused(self, args: Any, kwargs: Any) -> None:
        """Warns once if PyTorch would have run this attention by a fused kernel."""
        training = kwargs.get("training", args[13] if len(args) > 13 else True)
        same = len(args) > 2 and args[0] is args[1] is args[2]
        on = torch.backends.mha.get_fastpath_enabled()
        learns = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in args)
        if training or not same or not on or learns or "fused" in self.block.warned:
            return
        self.block.warned += ("fused",)
        warnings.warn(f"{self.block.options.who}: {_FUSED}", HookkitWarning, stacklevel=2)


def _check_editable(o: Options, call: FunctionCall, func: Any, kwargs: Any) -> None:
    """Raises if the caller may not use what the function returns, but what it has written."""
    name = func.__name__
    if kwargs.get("out") is None and (name.endswith("__") or not name.endswith("_")):
        return
    raise HookError(
        f"{o.who}: {call.name} is a call of {name}, which writes its result in place, where an "
        f"edit has no effect. Edit what is computed from it, or its inputs with inputs=True."
    )


class FunctionHooks(Hooks):
    """Hooks on the calls of torch functions: a `Hook` for each call, in the order of the calls.

    Made by `hook_function` and `edit_function`; `Hooks` in all that reads. It is on inside its
    `with` only; entering it again begins with no calls.
    """

    _calls: FunctionCalls | None = None  # of a copy: it has none
    _on = False

    def __init__(
        self, functions: Iterable[Any], within: Within, options: Options, numbers: Numbers = "block"
    ) -> None:
        self._block, self._captures = Block(options), []
        named = modules_within(options.who, within)
        self._calls = FunctionCalls(functions, named, self._block, self._begin, numbers)

    def _begin(self, call: FunctionCall) -> None:
        """Puts a hook on a new call."""
        capture = Capture(call, self._block, call.name)
        capture.register()
        self._captures, self._hooks = [*self._captures, capture], None

    @property
    def removed(self) -> bool:
        """Whether it is off: outside of its `with`."""
        return not self._on

    @uninterrupted
    def _register(self) -> None:
        if self._calls is None:
            who = self._block.options.who
            raise HookError(f"{who}: a copy of function hooks cannot be entered. Make new ones.")
        if self._on:
            return
        self._captures, self._hooks, self._next = [], None, None
        self._calls.reset()
        self._on = True
        self._calls.start()

    def _remove(self) -> None:
        self._on = False
        if self._calls is not None:
            self._calls.stop()
            super()._remove()

    def _missed(self, waiting: Any) -> str:
        if self._captures or self._calls is None:
            return super()._missed(waiting)
        return f"{self.never_called()} Run the model inside the block, or hook one that it calls."

    def never_called(self) -> str:
        """In words: that no call was seen, and which other functions were called."""
        assert self._calls is not None
        names = {getattr(f, "__name__", "__get__") for f in self._calls.others}
        others = sorted(names - {"__get__", "__set__"})
        seen = f" Called were {', '.join(others[:12])}{', …' * bool(others[12:])}." * bool(others)
        wanted = " or ".join(dict.fromkeys(self._calls.names.values()))
        where = "inside the block" if self._calls.within is None else "within these modules"
        return f"{self._block.options.who}: {wanted} was never called {where}.{seen}"

    def __repr__(self) -> str:
        return f"Function{super().__repr__()}"


def modules_within(who: str, within: Within) -> list[Named] | None:
    """The modules of `within`, each checked: of one module all that are in it."""
    if within is None:
        return None
    if isinstance(within, nn.Module):  # scripted modules run no Python hooks
        found = {"": unwrap(within), **select(within)}
        within = {n: m for n, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}
    named: list[Named] = []
    for i, (name, m, leaf) in enumerate(named_modules_of(within, who)):
        check_hookable(m, who)
        if leaf:
            raise OptionError(
                f'{who}: within takes modules, and "{name}" selects a part of an output. Leave out '
                f"{leaf}."
            )
        named.append((str(i) if name is None else name, m, ""))
    return named


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
    clone: bool | None = None,
    dtype: torch.dtype | None = None,
    retain_grad: bool = False,
) -> FunctionHooks:
    """Stores what each call of the torch function `f` returns, for the time of a `with`.

    For what no module computes: `F.scaled_dot_product_attention`, a residual `+`, `x.softmax(-1)`.
    Each call has a `Hook` of its own, named by the module that made it, the function, and the
    number of the call: `h["blocks.3.attn/scaled_dot_product_attention:0"]`. `h.names` lists all.

    The same function counts however it is reached: from `torch`, `torch.nn.functional` or as a
    method of a tensor (`F.softmax`, `torch.softmax`, `x.softmax`), in place (`relu_`), and as an
    operator (`@` is `matmul`, `+` and `+=` are `add`). A call that a torch function written in
    Python makes counts too, as that of `F.scaled_dot_product_attention` in `nn.MultiheadAttention`;
    one that C++ makes does not.

    Compiled models run eagerly in the block, other threads are not seen, and PyTorch's fused
    `nn.TransformerEncoderLayer` is off; where it would have run, a warning says so once. Of blocks
    inside each other the innermost is nearest to the caller: it sees what an edit around it gave.
    Calls that a checkpoint repeats are not stored.

    Args:
        f: a function of torch, a method of `torch.Tensor`, or an operator of `torch.ops`.
        within: counts calls made while one of these modules runs, and names them by the innermost:
            one module (all modules in it), or several, as `select` gives them. None counts every
            call in the block, without a module's name.
        detach, cpu, grad, gather, clone, dtype, retain_grad: as for `hook_output`.
        inputs: stores what the function was called with, as `Inputs`, or the gradients of that.
        hook: `hook(call, inputs, output)`, or of one argument, gives what to store in place of the
            output (with `inputs=True`: `hook(call, inputs)`); `call.function` is the function.

    Returns:
        `FunctionHooks`, to be entered. The calls of the last `with` stay readable after it.

    Raises:
        ArgumentError: PyTorch reports no calls of `f`, as of every function that is not its own;
            or `within` holds no modules.

    >>> import torch.nn.functional as F
    >>> from hookkit.selecting import select
    >>> net = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> with hook_function(F.scaled_dot_product_attention, within=select(net, "self_attn")) as h:
    ...     y = net(torch.randn(1, 5, 8))
    >>> h.names, h[0].stored.shape
    (('self_attn/scaled_dot_product_attention:0',), torch.Size([1, 2, 5, 4]))
    """
    who = "hook_function"
    inputs = check_flag(who, "inputs", inputs)
    kind = KINDS[inputs, check_flag(who, "grad", grad)]
    if hook is not None and kind.endswith("grad"):
        raise OptionError(
            "hook_function: hook= is for values, not for gradients. Leave out grad=True, or read "
            "the gradients from .stored."
        )
    how = (detach, cpu, gather)
    o = Options(who, kind, hook, *how, clone=clone, dtype=dtype, retain_grad=retain_grad)
    return FunctionHooks([f], within, o)
