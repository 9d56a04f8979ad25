"""Change what a layer gives, takes, or gets as gradient, for the time of a `with`.

making    `edit_output(s)`, `edit_input(s)`, `edit_grad(s)`, `edit_function`: hooks that replace.
edit      `Edit`: what such a hook calls, for the user's function.
changes   Ready-made edits: `zero`, `scale`, `add`, `replace`, `patch_from`, for all of a value or
          a part of it.
"""

from hookkit.editing.changes import add, patch_from, replace, scale, zero
from hookkit.editing.making import (
    edit_function,
    edit_grad,
    edit_grads,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
)

__all__ = [
    "add",
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
    "zero",
]
