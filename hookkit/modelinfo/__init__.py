"""What a model has and what comes out of its layers, without a Learner and without a trace left.

dummies    The input of a model, read off its first layer: how many channels, how many
           dimensions.
sandbox    Copies of a model to run in its place, and a world that is put back afterwards.
hooked     The hooks of a model, put on its copy: the user's run, hookkit's captures do not.
random_draws  Random states, kept where a run would move them.
purge_fake  Fake tensors that a forward put outside of the model are taken out again.
fake_kernels  Where fake tensors know less than real ones: types, indices, the workspace of an LSTM.
tracing    One run of a model, seen by module: calls in order, shapes, multiply-accumulates,
           bytes kept.
saved_tensors  What autograd keeps for the backward pass: memory by storage, and which parameters it
           reaches.
flops      Multiply-accumulates of the operations that PyTorch really runs, below `torch.nn`.
"""

from hookkit.modelinfo.info import (
    ParameterModule,
    Partly,
    dummy_eval,
    dummy_input,
    flatten_model,
    has_params,
    in_channels,
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
