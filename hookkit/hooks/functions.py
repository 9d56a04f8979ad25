"""Hooks on the calls of torch functions: `hook_function`, and `FunctionHooks`, which it returns.

How calls are seen, and run as calls of modules, is in `function_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hookkit.checks import check_flag
from hookkit.errors import HookError, OptionError
from hookkit.hooks.block import Block
from hookkit.hooks.capture import Capture
from hookkit.hooks.collection import Hooks
from hookkit.hooks.function_call import FunctionCall
from hookkit.hooks.function_calls import FunctionCalls, Within, modules_within
from hookkit.hooks.snapshot import Kind, Options
from hookkit.interrupts import uninterrupted

KINDS: dict[tuple[bool, bool], Kind] = {
    (False, False): "forward",
    (True, False): "pre",
    (False, True): "grad",
    (True, True): "pre_grad",
}
"""What is hooked, by `inputs` and `grad`."""


class FunctionHooks(Hooks):
    """Hooks on the calls of torch functions: a `Hook` for each call, in the order of the calls.

    Made by `hook_function` and `edit_function`; `Hooks` in all that reads. It is on inside its
    `with` only; entering it again begins with no calls.
    """

    _calls: FunctionCalls | None = None  # of a copy: it has none
    _on = False
    _captures: list[Capture]

    def __init__(
        self, functions: Iterable[Any], within: Within, options: Options, numbered: bool = True
    ) -> None:
        self._block, self._captures = Block(options), []
        named = modules_within(options.who, within)
        self._calls = FunctionCalls(functions, named, self._block, None, numbered)

    def _begin(self, call: FunctionCall) -> None:
        """Puts a hook on a new call."""
        capture = Capture(call, self._block, call.name)
        call.put(capture.placed(first=False))
        self._captures.append(capture)
        self._hooks = None

    @property
    def removed(self) -> bool:
        """Whether it is off, as it is outside of its `with`."""
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
        self._calls.begin = self._begin
        self._on = True
        self._calls.turn_on()

    def _remove(self) -> None:
        self._on = False
        if self._calls is not None:
            self._calls.turn_off()
            self._calls.begin = None  # each would hold the other, and what is stored
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
        return f"{self._block.options.who}: {wanted} was never called in this thread {where}.{seen}"

    def __repr__(self) -> str:
        return f"Function{super().__repr__()}"


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
    method of a tensor (`F.softmax`, `torch.softmax`, `x.softmax`), in place (`relu_`), as an
    operator (`@` is `matmul`, `+` and `+=` are `add`), by an alias (`torch.concat` is `torch.cat`),
    and as an operation of an exported program (`torch.ops.aten.relu`). A call that a torch function
    written in Python makes counts too, as that of `F.scaled_dot_product_attention` in
    `nn.MultiheadAttention`; one that C++ makes does not.

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

    >>> from torch import nn
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
