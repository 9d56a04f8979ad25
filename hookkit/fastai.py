"""fastai's names of its hooks, for `from hookkit.fastai import *` in the place of

    from fastai.callback.hook import *

It brings no `Learner` and no other name that fastai's own notebooks have from elsewhere.
"""

from hookkit.hooks import Hook, Hooks, hook_output, hook_outputs
from hookkit.modelinfo import (
    dummy_eval,
    flatten_model,
    has_params,
    in_channels,
    model_sizes,
    num_features_model,
    total_params,
)
from hookkit.recording import HookCallback
from hookkit.stats import ActivationStats
from hookkit.summaries import layer_info, module_summary

__all__ = [
    "ActivationStats",
    "Hook",
    "HookCallback",
    "Hooks",
    "dummy_eval",
    "flatten_model",
    "has_params",
    "hook_output",
    "hook_outputs",
    "in_channels",
    "layer_info",
    "model_sizes",
    "module_summary",
    "num_features_model",
    "total_params",
]
