"""What callbacks are found as on a Learner or Watcher, for editors and type checkers."""

from hookkit.callbacks import (
    CSVLogger,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    MixedPrecision,
    ProgressCallback,
    Recorder,
    SaveModelCallback,
    TrainEvalCallback,
)
from hookkit.live import ShowHealth
from hookkit.stats.flight import FlightRecorder
from hookkit.stats.layers import ActivationStats, GradientStats
from hookkit.stats.param_stats import ParamStats


class Named:
    """Annotations alone: each is there while a callback of its class is, and an error otherwise.

    A callback of your own has the name of its class too (`learn.my_stats`); a type checker, which
    cannot know it, finds it by `learn.cbs`.
    """

    activation_stats: ActivationStats
    gradient_stats: GradientStats
    param_stats: ParamStats
    flight_recorder: FlightRecorder
    show_health: ShowHealth
    recorder: Recorder
    train_eval: TrainEvalCallback
    progress: ProgressCallback
    gradient_accumulation: GradientAccumulation
    gradient_clip: GradientClip
    mixed_precision: MixedPrecision
    save_model: SaveModelCallback
    early_stopping: EarlyStoppingCallback
    csv_logger: CSVLogger
