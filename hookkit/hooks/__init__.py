"""Choose modules and store what goes in and out of them: `Hook` for one, `Hooks` for many.

selection     `select`: modules by name, pattern, class or role (`roles`).
capture       The functions that make hooks: `hook_output(s)`, `hook_input(s)` and others.
hook          `Hook`: made, registered, called, stored, read, removed.
collection    `Hooks`: many hooks as one; saved in a file.
options       `HookOptions`, how hooks capture, and `HookScope`, how long they are on.
calls         Which calls of a module count.
values        Take a part of a value, copy it to store it, check a replacement.
grads         Tensor hooks on the outputs or inputs of a module.
functions     `hook_function`: hooks on the calls of torch functions.
attention     `hook_attention`: attention patterns, which fused attention never computes.
attach        A recorder's function on a module.
eager         Disables compiled code and PyTorch's fused path, which skip hooks.
"""

from hookkit._core.pytree import Inputs
from hookkit.hooks.attach import attach
from hookkit.hooks.attention import attention_weights, hook_attention
from hookkit.hooks.calls import recomputing
from hookkit.hooks.capture import (
    GlobalHook,
    TensorHook,
    hook_all,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
    hook_tensor,
    print_sizes,
)
from hookkit.hooks.collection import Hooks
from hookkit.hooks.functions import FunctionHooks, hook_function
from hookkit.hooks.hook import Hook
from hookkit.hooks.options import StopForward
from hookkit.hooks.roles import ROLES

__all__ = [
    "ROLES",
    "FunctionHooks",
    "GlobalHook",
    "Hook",
    "Hooks",
    "Inputs",
    "StopForward",
    "TensorHook",
    "attach",
    "attention_weights",
    "hook_all",
    "hook_attention",
    "hook_function",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "hook_tensor",
    "print_sizes",
    "recomputing",
]
