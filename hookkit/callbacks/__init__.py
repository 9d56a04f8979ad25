"""Callbacks, who calls them, and those that every training needs.

callback    `Callback`: something to do at some of the events of training.
runner      `CallbackRunner`: owns callbacks, and calls them by event.
builtin     Modes and counts, accumulation, clipping, schedules.
recorder    `Recorder`: losses, learning rates and metrics of a run.
logging     `LogTo`, `CSVLogger`: logs that grow while a model trains.
kept_gradients  `KeptGradients`: whether gradients are zeroed between steps.
losses      `LossHistory`: losses by batch and by optimizer step.
loss_facts  `LossFacts`: which of PyTorch's losses it is, and what it is given.
loss_graph  The same and mistakes in it, from the loss's autograd graph.
metrics     Functions averaged over samples, or objects that update and compute.
mixed_precision  `MixedPrecision`: autocast, and a scaled loss for float16.
optimizers  The torch optimizer inside a wrapper; the GradScaler of a step.
progress    `ProgressCallback`: a bar over the batches, and a table with a row for each epoch.
readout     `run_of`: what all callbacks recorded, as one `Run`; the loop as text.
tracker     `SaveModelCallback`, `EarlyStoppingCallback`: the best epoch so far.

Fifteen files: each is one thing to look for.
"""

from hookkit.callbacks.builtin import (
    DEFAULT_CALLBACKS,
    GradientAccumulation,
    GradientClip,
    SchedulerCallback,
    TrainEvalCallback,
)
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.logging import CSVLogger, LogTo
from hookkit.callbacks.mixed_precision import MixedPrecision
from hookkit.callbacks.progress import ProgressCallback
from hookkit.callbacks.recorder import Recorder
from hookkit.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback, TrackerCallback

__all__ = [
    "DEFAULT_CALLBACKS",
    "CSVLogger",
    "Callback",
    "EarlyStoppingCallback",
    "GradientAccumulation",
    "GradientClip",
    "LogTo",
    "MixedPrecision",
    "ProgressCallback",
    "Recorder",
    "SaveModelCallback",
    "SchedulerCallback",
    "TrackerCallback",
    "TrainEvalCallback",
]
