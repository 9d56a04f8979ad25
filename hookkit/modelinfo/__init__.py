"""What a model has and what its layers return, without changing it.

tree          `Tree`: a model read once: its places, modules, parameters and buffers.
first_layer   A made-up input for a model, from what its first layer says.
flops         Multiply-accumulates of the operations that PyTorch really runs, below `torch.nn`.
hook_copies   The hooks that are on a model, for the copy of it that runs.
sandbox       Copies of models and inputs; what a run could change is restored.
fake_tensors  Copies without values, and taking them out of caches.
fake_kernels  How an operation runs without values, and what it cannot see.
progress      A line on stderr that says how far a long run is.
tracer        What is seen of a run: calls, shapes, multiply-accumulates, saved tensors.
tracing       `trace`: one run of a model, on fake tensors or for real.
info          fastai's helpers: `model_sizes`, `num_features_model`, `total_params` and others.

Each file imports only from those above it. There are eleven, since a run that changes nothing
has four parts (copies, hooks, fake tensors, what is seen), each with its own pitfalls.
"""

from hookkit.modelinfo.first_layer import dummy_input, in_channels
from hookkit.modelinfo.info import (
    ParameterModule,
    Partly,
    dummy_eval,
    flatten_model,
    has_params,
    model_sizes,
    num_features_model,
    total_params,
)

__all__ = [
    "ParameterModule",
    "Partly",
    "dummy_eval",
    "dummy_input",
    "flatten_model",
    "has_params",
    "in_channels",
    "model_sizes",
    "num_features_model",
    "total_params",
]
