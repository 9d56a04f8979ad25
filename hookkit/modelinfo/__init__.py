"""What a model has and what its layers return, without changing it.

tree          `Tree`: a model read once: its places, modules, parameters and buffers.
untouched     `untouched`: a block in which a model runs, and which puts it back.
macs          Multiply-accumulates of the operations that PyTorch really runs.
fakes         `run_fake`: a run on fake tensors, of which none stays behind.
tracer        What is seen of a run: calls, shapes, multiply-accumulates, saved tensors.
tracing       `trace`: one run of a model, which stays as it was.
first_layer   A made-up input for a model, from what its first layer says.
info          fastai's helpers: `model_sizes`, `num_features_model`, `total_params` and others.

Each file imports only from those above it.
"""

from hookkit.modelinfo.first_layer import dummy_input, in_channels
from hookkit.modelinfo.info import (
    ParameterModule,
    dummy_eval,
    flatten_model,
    has_params,
    model_sizes,
    num_features_model,
    total_params,
)

__all__ = [
    "ParameterModule",
    "dummy_eval",
    "dummy_input",
    "flatten_model",
    "has_params",
    "in_channels",
    "model_sizes",
    "num_features_model",
    "total_params",
]
