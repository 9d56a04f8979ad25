"""What calls of torch functions give, shown to a recorder in the forwards that it records.

Each call runs as the call of a module (`hooks.function_calls`), so what shows its result is what
shows a layer's. The function mode is on in recorded forwards only; code that torch.compile has made
runs eagerly in these, since it would call no function that can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hookkit.attention import attention_logits
from hookkit.errors import OptionError
from hookkit.hooks import Hooks
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.entries import HookEntry, Placed, in_thread
from hookkit.hooks.function_call import FunctionCall
from hookkit.hooks.function_calls import FunctionCalls, modules_within
from hookkit.hooks.snapshot import Options
from hookkit.hooks.torch_functions import same_functions
from hookkit.interrupts import uninterrupted
from hookkit.nested import Inputs
from hookkit.recording import RecordSwitch
from hookkit.stats.layer_hooks import Function, output_entries

_FORBIDDEN = -1e4
"""A logit below is one that a mask forbids: masks add -inf, or the least number of a dtype."""

_CLASSES = {name.lower(): name for name in dir(nn) if name[0].isupper()}


def type_of(name: str) -> str:
    """The class of modules that do what the torch function called `name` does, or that name.

    >>> type_of("leaky_relu"), type_of("scaled_dot_product_attention")
    ('LeakyReLU', 'scaled_dot_product_attention')
    """
    return _CLASSES.get(name.replace("_", "").lower(), name)


def allowed_logits(call: nn.Module, inputs: Inputs, output: Any) -> Tensor:
    """The logits of fused attention, 0 where a mask forbids a key."""
    logits = attention_logits(*inputs, **inputs.kwargs)
    return logits.masked_fill(logits < _FORBIDDEN, 0)


def checked_functions(who: str, functions: Any, is_forward: bool) -> list[Any]:
    """The torch functions that a recorder was given, one or several."""
    if not isinstance(functions, Iterable) or isinstance(functions, str):
        functions = [functions]
    found: list[Any] = list(functions)
    for f in found:
        same_functions(who, f)
    if found and not is_forward:
        raise OptionError(
            f"{who}: functions= records what functions give, and is_forward=False gradients. Use "
            f"two recorders, or hook_function(f, grad=True)."
        )
    return found


class RecordedFunctions(FunctionCalls):
    """The calls of torch functions in a model, a row for each: `blocks.0.mlp/relu:0`.

    The number is that of the call in one forward of the module.

    Args:
        functions: the torch functions.
        model: whose calls count.
        switch: of the recorder.
        rows: gives the row of a name and type.
        function: the user's `hook(module, inputs, output)`, or None.
    """

    def __init__(
        self,
        functions: Iterable[Any],
        model: nn.Module,
        switch: RecordSwitch,
        rows: Callable[[list[str], list[str]], list[int]],
        function: Function | None,
    ) -> None:
        within = modules_within(switch.options.who, model)
        super().__init__(functions, within, switch, self._show)
        self.rows, self.function, self.switch = rows, function, switch
        self.hooks: Hooks | None = None

    def _show(self, call: FunctionCall) -> None:
        """Puts what shows the result on a new call."""
        name = call.name.rpartition("/")[2].partition(":")[0]
        (row,) = self.rows([call.name], [type_of(name)])
        fused = name == scaled_dot_product_attention.__name__
        function = allowed_logits if fused and self.function is None else self.function
        entries = output_entries(self.switch, row, "", function)
        for entry, _ in entries:
            entry.switch = self.switch
        call.put(entries)

    def hook_modules(self) -> None:
        """Puts hooks on the modules, which number the calls of each forward from 0."""
        o = Options(self.switch.options.who, "recorder", keep="none", entries=self._entries)
        self.hooks = Hooks.of_named(self.within or (), o)
        self.hooks.switch.on = False

    def _entries(self, name: str, module: nn.Module, leaf: str) -> list[Placed]:
        def begin(*_: Any) -> None:
            if in_thread(self.switch.thread):
                self.counts.pop(name, None)

        return [(HookEntry(begin), {"pre": True})]

    def stop(self) -> None:
        """Undoes all of it; can be repeated."""
        self.turn_off()
        if self.hooks is not None:
            self.hooks.remove()

    @uninterrupted
    def turn_on(self) -> None:
        """Sees calls from now on."""
        enter_eager(self)
        if self.hooks is not None:
            self.hooks.switch.on = True
        super().turn_on()

    @uninterrupted
    def turn_off(self) -> None:
        """Undoes `turn_on`; can be repeated."""
        super().turn_off()
        if self.hooks is not None:
            self.hooks.switch.on = False
        leave_eager(self)
