"""What every layer does while the model trains: `ActivationStats`, `GradientStats`, `ParamStats`.

Layers:
layers          `ActivationStats`, `GradientStats`, and the checks of their options.
stats_callback  `StatsCallback`: from a layer's hook to the record of a step.
layer_hooks     What recorders' hooks do at a call of a layer: they show tensors to a target.
functions       Calls of torch functions, recorded as layers are.
unscaling       Gradients under a GradScaler, divided by the scale of the loss.
graph           What the autograd graph shows of a model: which activation reads each layer.
settings        Settings of layers that are mistakes in themselves: of dropout, of batch norm.
softmaxes       Softmaxes over another dimension than their weights are added up over.
reading         `LayerStats`: how recorded layers are read, by name, as a tensor, as pictures.
stats_list      `StatsList`, `BatchStats`: recorded statistics as lists of dicts, shown as tables.

Parameters:
param_stats     `ParamStats`: how large weights, gradients and updates are, for any optimizer.
param_norms     Norms of parameters, of their gradients and of what a step has changed.
parameters      The parameters of a model: by name, and whether they have moved.

The first NaN or Inf:
flight          `FlightRecorder`: which module made it, and what came before.
flight_memory   Norms of the last batches, and the incident that they show.

More than eight files: three recorders, each with what only it needs.
"""

from hookkit.stats.flight import FlightRecorder
from hookkit.stats.layers import ActivationStats, GradientStats
from hookkit.stats.param_stats import ParamStats
from hookkit.stats.reading import LayerStats
from hookkit.stats.stats_list import StatsList

__all__ = [
    "ActivationStats",
    "FlightRecorder",
    "GradientStats",
    "LayerStats",
    "ParamStats",
    "StatsList",
]
