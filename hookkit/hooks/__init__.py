"""Hooks that store: `Hook` for one module, `Hooks` for many, and the functions that make them.

making        `hook_output(s)` and `hook_input(s)`.
collection    `Hooks`: many hooks as one.
hook          `Hook`: what PyTorch calls, what it stores, and how that is read.
block         The options, the `with` block, and why a hook never fired.
parts         The part of a value that is meant; what receives gradients.
grads         Tensor hooks on what a module gives or takes.
snapshot      A stored tensor: detached, copied, moved.
eager         What would pass hooks by is off: compiled code, PyTorch's fused path.
attach        A recorder's function on a module.
functions     `hook_function`: hooks on the calls of torch functions.
global_hooks  Hooks on one tensor, on every module, on a model to print sizes.
saving        `Hooks.save`.
"""

from hookkit.hooks.attach import attach, recomputing
from hookkit.hooks.block import StopForward
from hookkit.hooks.collection import Hooks
from hookkit.hooks.functions import FunctionHooks, hook_function
from hookkit.hooks.global_hooks import GlobalHook, TensorHook, hook_all, hook_tensor, print_sizes
from hookkit.hooks.hook import Hook
from hookkit.hooks.making import hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.nested import Inputs

__all__ = [
    "FunctionHooks",
    "GlobalHook",
    "Hook",
    "Hooks",
    "Inputs",
    "StopForward",
    "TensorHook",
    "attach",
    "hook_all",
    "hook_function",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "hook_tensor",
    "print_sizes",
    "recomputing",
]
