"""What every layer does while the model trains: `ActivationStats`, `GradientStats`, `ParamStats`.

Layers:
layers          `ActivationStats`, `GradientStats`, and the checks of their options.
reading         `LayerStats`: how recorded layers are read, by name, as a tensor, as pictures.
stats_callback  `StatsCallback`: from a layer's hook to the record of a step.
layer_hooks     What recorders' hooks do at a call of a layer: they show tensors to a target.

What the diagnosis reads of a model, once in a fit:
graph           Which activation reads each layer, the order of weights, weights that are hidden,
                the shares that layers drop.

Parameters:
param_stats     `ParamStats`: how large weights, gradients and updates are, for any optimizer.
param_norms     Norms of parameters, of their gradients and of what a step has changed.
parameters      The parameters of a model by name, and those that a step left alone.

The first NaN or Inf:
flight          `FlightRecorder`: which module made it, and what came before.
"""

from hookkit.stats.flight import FlightRecorder
from hookkit.stats.layers import ActivationStats, GradientStats
from hookkit.stats.param_stats import ParamStats
from hookkit.stats.reading import LayerStats, StatsList

__all__ = [
    "ActivationStats",
    "FlightRecorder",
    "GradientStats",
    "LayerStats",
    "ParamStats",
    "StatsList",
]
