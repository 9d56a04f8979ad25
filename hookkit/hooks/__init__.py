"""Hooks that store: `Hook` for one module, `Hooks` for many, and the functions that make them.

making       `hook_output(s)` and `hook_input(s)`, which make hooks that store.
collection   `Hooks`: many hooks as one, registered all or none.
hook         `Hook`: one module, one function, and what it stored, as the user sees it.
capture      `Capture`: the same as the module holds it; the fast path.
calls        What a hook does at a call of its module: after it, before it, in the backward.
reading      Reading what hooks have stored, here or over ranks.
block        The `with` block, and what is reported at its end: hooks that never fired, and why.
snapshot     What is stored of what a module returned: detached, copied, moved, read back safely.
references   Objects that hold tensors and are no container: stored as they are, and watched.
entries      `HookEntry`: the one thing that hookkit puts on a module, its switch and its handle.
gradients    Gradients of outputs and inputs, by tensor hooks that are set while the forward runs.
backward     A function called in each backward pass with the gradients of inputs and outputs.
taps         How a hook gets the gradient of one use of a tensor, without a change to the run.
views        The gradient of one tensor, also where its memory is written in place later.
compiling    What torch.compile does to hooks, and how capture works with it.
compiled_functions
             Which modules the functions run that torch.compile has compiled.
global_hooks  Hooks that are not on chosen modules: on one tensor, on every module there is.

More than eight files: gradients need four (`gradients`, `backward`, `taps`, `views`), and each of
the others is looked for by itself.
"""

from hookkit.hooks.block import StopForward
from hookkit.hooks.collection import Hooks
from hookkit.hooks.entries import attach, recomputing
from hookkit.hooks.global_hooks import GlobalHook, TensorHook, hook_all, hook_tensor, print_sizes
from hookkit.hooks.gradients import attach_grad
from hookkit.hooks.hook import Hook
from hookkit.hooks.making import hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.hooks.taps import on_grad
from hookkit.nested import Inputs

__all__ = [
    "GlobalHook",
    "Hook",
    "Hooks",
    "Inputs",
    "StopForward",
    "TensorHook",
    "attach",
    "attach_grad",
    "hook_all",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "hook_tensor",
    "on_grad",
    "print_sizes",
    "recomputing",
]
