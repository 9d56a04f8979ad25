"""Edits: change the values that go through a model, for the time of a `with`.

Outputs, inputs, gradients      edit_output(s), edit_input(s), edit_grad(s)
What functions return           edit_function; of attention, edit_attention
Ready-made edits                zero, scale, add, replace, patch_from
Other modules in its place      swap, Wrapper, Catcher, GramWrapper

edit      The functions that edit: hooks that replace the values they see.
changes   Ready-made edits, for all of a value or a part of it.
swapping  Modules replaced by others.
"""

from hookkit.edits.changes import add, patch_from, replace, scale, zero
from hookkit.edits.edit import (
    edit_attention,
    edit_function,
    edit_grad,
    edit_grads,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
)
from hookkit.edits.swapping import Catcher, GramWrapper, Wrapper, swap

__all__ = [
    "Catcher",
    "GramWrapper",
    "Wrapper",
    "add",
    "edit_attention",
    "edit_function",
    "edit_grad",
    "edit_grads",
    "edit_input",
    "edit_inputs",
    "edit_output",
    "edit_outputs",
    "patch_from",
    "replace",
    "scale",
    "swap",
    "zero",
]
