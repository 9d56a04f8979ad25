"""The ready-made callbacks: what every run needs, and a few that people expect.

builtin    The smaller of them: modes, accumulation, clipping, schedules.
callback   `Callback`: something to do at some of the events of training.
runner     `Driver`: whatever owns callbacks and tells them what happens.
recorder   `Recorder`: losses, learning rates and metrics of a run, read from the device only
           when asked.
outputs    What a classifier's scores look like: how many classes, and whether they are
           probabilities.
metrics    Metrics: functions averaged over samples, or objects that update and compute; read
           late.
progress   `ProgressCallback`: a bar over the batches, and a table with a row for each epoch.
keywords   Keyword arguments that a class does not take: an error with the names that it does.
runs       From a Learner to a `Run`: what its recorders hold, gathered as plain values.
"""

from hookkit.callbacks.builtin import (
    DEFAULT_CALLBACKS,
    GradientAccumulation,
    GradientClip,
    SchedulerCallback,
    TrainEvalCallback,
)
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.progress import ProgressCallback
from hookkit.callbacks.recorder import Recorder

__all__ = [
    "DEFAULT_CALLBACKS",
    "Callback",
    "GradientAccumulation",
    "GradientClip",
    "ProgressCallback",
    "Recorder",
    "SchedulerCallback",
    "TrainEvalCallback",
]
