"""Everything that changes what goes through a model, for the time of a `with`.

Outputs, inputs, gradients      edit_output(s), edit_input(s), edit_grad(s)
What functions return           edit_function; of attention, edit_attention
… to what                       zero, scale, add, replace, patch_from
Parameters                      select_params, ParamSelection
A layer left out                skip_module
Other modules in its place      swap, Wrapper, Catcher, GramWrapper
"""

from hookkit.attention import edit_attention
from hookkit.editing import (
    ParamSelection,
    add,
    edit_function,
    edit_grad,
    edit_grads,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    patch_from,
    replace,
    scale,
    select_params,
    skip_module,
    zero,
)
from hookkit.swapping import Catcher, GramWrapper, Wrapper, swap

__all__ = [
    "Catcher",
    "GramWrapper",
    "ParamSelection",
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
    "select_params",
    "skip_module",
    "swap",
    "zero",
]
