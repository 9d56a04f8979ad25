"""What a model has and what its layers return, without changing it.

tree          `Tree`: a model read once: its places, modules, parameters and buffers.
untouched     `untouched`: a block in which a model runs, and which puts it back.
macs          Multiply-accumulates of the operations that PyTorch really runs.
tracer        What is seen of a run: calls, shapes, multiply-accumulates, saved tensors.
fakes         `run_fake`: a run on fake tensors, of which none stays behind.
tracing       `trace`: one run of a model, which stays as it was.

Each file imports only from those above it.
"""
