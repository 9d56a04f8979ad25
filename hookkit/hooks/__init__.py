"""Hooks that remember: `Hook` for one module, `Hooks` for many, and the functions that make them.

making       `hook_output(s)` and `hook_input(s)`, which make hooks that store.
collection   `Hooks`: many hooks as one, registered all or none.
hook         `Hook`: one module, one function, and what it stored.
plain        The fast path: hooks that store nothing but a snapshot of the last output.
snapshot     What is stored of what a module returned: detached, copied, moved, and read back
             safely.
references   Objects that hold tensors and are no container: stored as references, and watched for
             changes.
entries      `HookEntry`: the one thing that hookkit puts on a module, its switch and its handle.
backward     A function called in each backward pass with the gradients of inputs and outputs.
old_grads    Goes: the dispatchers that `gradients` had.
gradients    Gradients of what modules return and take, by tensor hooks that are set while the
             forward runs.
taps         How a hook gets the gradient of one use of a tensor, and the run stays as it is.
views        The gradient of one tensor, also where its memory is written in place later.
compiling    What torch.compile does to hooks, and how a capture is right all the same.
compiled_functions
             Which modules the functions run that torch.compile has compiled.
observing    What happens at a call of a hooked module: the dispatchers of `Hook`, one for each
             of its kinds.
block        What is said when a block ends: stops, hooks that never fired and why, hints for
             errors.
global_hooks  Hooks that are not on chosen modules: on one tensor, on every module there is, on a
             whole model.
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
