"""What every layer does while the model trains: `ActivationStats`, `GradientStats`, `ParamStats`.

Recorders:
step_recorder   `StepRecorder`, the base: which steps are recorded, reading, merging over ranks.
layer_stats     `ActivationStats`, `GradientStats`, and the checks of their options.
stats_list      `StatsList`: a record as nested lists, as fastai's.
param_stats     `ParamStats`: how large weights, gradients and updates are, for any optimizer.
flight          `FlightRecorder`: which module made the first NaN or Inf, and what came before.
incident        The batch of an incident: kept, written to a file, and run again by `replay`.
fingerprint     `Fingerprint`: hashes of what each step computes, in a file, for `compare_runs`.

What they are made of:
layer_hooks     What recorders' hooks do at a call of a layer: they show tensors to a target.
running_stats   `RunningStats`: from tensors in hooks over batches and steps to a `Record`.
step_table      `StepTable`: numbers by step in bounded memory; halved when it is full.
parameters      The parameters of a model by name, those that a step used, norms of tensors.

The numbers of a tensor, exact, in one read, merged without loss:
moments         Nine numbers: by numpy on a CPU, by tensor operations elsewhere; merging.
triton_rows     The same on CUDA in one launch.
bins            Histograms of a bounded sample.
unit_stats      Dead units, judged over a window of records; which dimension counts units.
graph_op        The operation by which a compiled graph shows a tensor to a recorder.

What the diagnosis reads while a model trains:
probes          `TrainingProbes`, which a loop holds.
loss_graph      What a loss was computed from.
kept_gradients  Gradients that were left from the step before.
layer_graph     Which activation reads each layer, the order of weights, weights that are hidden.
"""

from hookkit.recorders.fingerprint import Fingerprint
from hookkit.recorders.flight import FlightRecorder
from hookkit.recorders.incident import Replay, replay
from hookkit.recorders.layer_stats import ActivationStats, GradientStats, LayerStats
from hookkit.recorders.param_stats import ParamStats
from hookkit.recorders.stats_list import StatsList

__all__ = [
    "ActivationStats",
    "Fingerprint",
    "FlightRecorder",
    "GradientStats",
    "LayerStats",
    "ParamStats",
    "Replay",
    "StatsList",
    "replay",
]
