"""Change what a layer gives, takes, or gets as gradient, for the time of a `with`.

changing   Ready-made edits: `zero`, `scale`, `add`, `replace`, `patch_from`, for all of a value
           or a part.
rewriting  One edit on one module: calls the user's function, checks what it gives, puts it in
           place.
"""

from hookkit.editing.edits import (
    Edits,
    add,
    edit_grad,
    edit_grads,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    patch_from,
    replace,
    scale,
    zero,
)

__all__ = [
    "Edits",
    "add",
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
