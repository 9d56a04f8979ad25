"""What every layer does while the model trains: `ActivationStats`, `GradientStats`, `ParamStats`.

gathering   `StatsCallback`: what the recording callbacks share, from the hook's flag to the
            step's record.
looking     The hooks of the recording callbacks: what they look at, and whether they do.
graph       What the autograd graph tells of a model: who reads each layer, and which weights it
            has hidden.
options     What the recording callbacks are given, checked at their door.
showing     Recorded numbers as a small table: text for a terminal, HTML for a notebook.
layerstats  How recorded layers are read: as fastai's statistics, as v1's tensor, as pictures.
parameters  The parameters of a model by name: walked once, and again when the model has changed.
params      `ParamStats`: how large weights, gradients and updates are, for any optimizer.
bits        Whether parameters have moved, by their bits: the last digits of a norm cannot tell.
norms       Norms of parameters, their gradients and their updates, all parameters at once.
flight      `FlightRecorder`: which module made the first NaN or Inf, when, and what came
            before.
incidents   How the flight recorder's memory is told: which module was the first, and what came
            before.
norm_history  Norms of what layers gave in the last batches, and of gradients: one number each, on
            the device.
"""

from hookkit.stats.flight import FlightRecorder
from hookkit.stats.stats import (
    ActivationStats,
    GradientStats,
    LayerStats,
    ParamStats,
    StatsList,
)

__all__ = [
    "ActivationStats",
    "FlightRecorder",
    "GradientStats",
    "LayerStats",
    "ParamStats",
    "StatsList",
]
