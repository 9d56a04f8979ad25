"""Hooks that store: `Hook` for one module, `Hooks` for many, and the functions that make them.

For users:
making        `hook_output(s)` and `hook_input(s)`, which make hooks that store.
collection    `Hooks`: many hooks as one; all of them are registered, or none.
hook          `Hook`: one module, one function, and what it stored.
functions     `hook_function`: hooks on the calls of torch functions.
function_calls  The mode that sees them, and in which module each is made.
function_call   `FunctionCall`, which runs one as a module runs its hooks.
torch_functions  Which torch functions are seen, and which of them are the same.
global_hooks  Hooks on one tensor, on every module of the process, on a whole model to print sizes.

One hook, from the module's side:
entries       `HookEntry`, the one thing that hookkit registers on a module; `attach` registers it.
capture       `Capture`, the entry of a `Hook`: the options, the calls, the fast path.
calls         What a hook does at a call of its module: after it, before it, in the backward.
block         Registering, removing, the `with` block; at its end, why hooks never fired.
compiling     What torch.compile does to hooks, and how what they store is right all the same.

What is stored:
snapshot      The options, and a stored tensor: detached, copied, moved, safe to read later.
references    Objects that hold tensors and are no container: stored as they are, and watched.
reading       What each hook stored, as this process has it, or gathered over ranks.

Gradients, each file built on the ones below it:
backward      A function called with all gradients of a call, of inputs and outputs together.
gradients     The forward hooks that set tensor hooks on outputs or inputs.
taps          The gradient of one use of a tensor, where the tensor has several.
views         The gradient of a view, also if its memory is written in place later.

More than eight files: each answers one question that a reader comes with, and any two of them in
one file would make it longer than 300 lines or mix two questions.
"""

from hookkit.hooks.block import StopForward
from hookkit.hooks.collection import Hooks
from hookkit.hooks.entries import attach, recomputing
from hookkit.hooks.functions import FunctionHooks, hook_function
from hookkit.hooks.global_hooks import GlobalHook, TensorHook, hook_all, hook_tensor, print_sizes
from hookkit.hooks.gradients import attach_grad
from hookkit.hooks.hook import Hook
from hookkit.hooks.making import hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.hooks.taps import on_grad
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
    "attach_grad",
    "hook_all",
    "hook_function",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "hook_tensor",
    "on_grad",
    "print_sizes",
    "recomputing",
]
