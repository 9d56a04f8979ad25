"""Names the layer where a PyTorch model leaks, diverges, overflows, or differs from its reference.

Hooks, statistics and comparisons for any model and any training loop. `help(hookkit.watch)`
describes one name, with an example; this is the map:

Find the layer: the answer is in `.first`, and in one line in `.verdict`
    what sees the future, padding, the batch check_invariance
    where a port leaves its reference        compare_models
    where two trainings part                 Fingerprint, compare_runs
    what made a NaN or an Inf, on which line find_nonfinite; in a training FlightRecorder, replay
    why a training fails                     watch, then w.diagnose()

Record a training
    any loop                                 watch; hookkit.bridges, for libraries
    activations, gradients, parameters       ActivationStats, GradientStats, ParamStats
    to TensorBoard, wandb, a file            LogTo
    numbers, diagnosis, pictures             Run; hookkit.records, hookkit.plotting

Choose modules by name, pattern, class       select

Look inside one pass
    what layers return, and its gradients    hook_output, hook_outputs, Hooks
    what they are given                      hook_inputs
    calls of functions; attention            hook_function, attention_weights
    inner outputs as an ordinary module      feature_extractor
    for a whole data set                     collect

Change what goes through a model
    what layers return, to what              edit_output, edit_outputs, zero, patch_from
    anything else                            hookkit.edits

Know shapes, parameters, compute, memory     summary

Train
    a loop with events                       Learner
    do something at an event, or in a hook   Callback, HookCallback; hookkit.callbacks

hookkit.fastai has fastai's names, hookkit.errors the errors, hookkit.testing small models and data.
"""

# Which files there are, and which may import which: the rows in docs/develop/architecture.md.
# Each name is imported `as` itself, by which type checkers know that it is public. There is no
# `__all__`: `help(hookkit)` would print all of it, and it is to stop after the map.

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType

from ._core import __version__ as __version__
from .callbacks import (
    Callback as Callback,
    CSVLogger as CSVLogger,
    EarlyStoppingCallback as EarlyStoppingCallback,
    GradientAccumulation as GradientAccumulation,
    GradientClip as GradientClip,
    LogTo as LogTo,
    MixedPrecision as MixedPrecision,
    ProgressCallback as ProgressCallback,
    Recorder as Recorder,
    SaveModelCallback as SaveModelCallback,
    SchedulerCallback as SchedulerCallback,
    TrainEvalCallback as TrainEvalCallback,
)
from .callbacks.events import (
    CancelBackwardException as CancelBackwardException,
    CancelBatchException as CancelBatchException,
    CancelEpochException as CancelEpochException,
    CancelFitException as CancelFitException,
    CancelStepException as CancelStepException,
    CancelTrainException as CancelTrainException,
    CancelValidException as CancelValidException,
)
from .callbacks.hook_callback import HookCallback as HookCallback
from .diagnosis import Diagnosis as Diagnosis, Finding as Finding, diagnose as diagnose
from .diagnosis.report_page import report as report
from .edits import (
    Catcher as Catcher,
    GramWrapper as GramWrapper,
    Wrapper as Wrapper,
    add as add,
    edit_attention as edit_attention,
    edit_function as edit_function,
    edit_grad as edit_grad,
    edit_grads as edit_grads,
    edit_input as edit_input,
    edit_inputs as edit_inputs,
    edit_output as edit_output,
    edit_outputs as edit_outputs,
    patch_from as patch_from,
    replace as replace,
    scale as scale,
    swap as swap,
    zero as zero,
)
from .errors import (
    ArgumentError as ArgumentError,
    CompiledWarning as CompiledWarning,
    HookError as HookError,
    HookkitError as HookkitError,
    HookkitWarning as HookkitWarning,
    MissingExtraError as MissingExtraError,
    ModelRunError as ModelRunError,
    NeverFiredWarning as NeverFiredWarning,
    NonFiniteError as NonFiniteError,
    OptionError as OptionError,
    OverwrittenWarning as OverwrittenWarning,
    SelectionError as SelectionError,
)
from .fastai import (
    dummy_eval as dummy_eval,
    flatten_model as flatten_model,
    has_params as has_params,
    in_channels as in_channels,
    model_sizes as model_sizes,
    num_features_model as num_features_model,
    total_params as total_params,
)
from .hooks import (
    FunctionHooks as FunctionHooks,
    Hook as Hook,
    Hooks as Hooks,
    StopForward as StopForward,
    attention_weights as attention_weights,
    hook_all as hook_all,
    hook_attention as hook_attention,
    hook_function as hook_function,
    hook_input as hook_input,
    hook_inputs as hook_inputs,
    hook_output as hook_output,
    hook_outputs as hook_outputs,
    hook_tensor as hook_tensor,
    print_sizes as print_sizes,
)
from .hooks.selection import (
    Selection as Selection,
    leaf_modules as leaf_modules,
    select as select,
    unwrap as unwrap,
)
from .inspection import (
    Activations as Activations,
    Comparison as Comparison,
    Covariance as Covariance,
    FeatureExtractor as FeatureExtractor,
    Invariance as Invariance,
    Mean as Mean,
    NonFinite as NonFinite,
    RunComparison as RunComparison,
    Summary as Summary,
    TopK as TopK,
    activation_stream as activation_stream,
    check_invariance as check_invariance,
    collect as collect,
    compare_models as compare_models,
    compare_runs as compare_runs,
    feature_extractor as feature_extractor,
    find_nonfinite as find_nonfinite,
    layer_info as layer_info,
    module_summary as module_summary,
    summary as summary,
)
from .recorders import (
    ActivationStats as ActivationStats,
    Fingerprint as Fingerprint,
    FlightRecorder as FlightRecorder,
    GradientStats as GradientStats,
    ParamStats as ParamStats,
    Replay as Replay,
    replay as replay,
)
from .records import Record as Record, Run as Run
from .training import Learner as Learner, Watcher as Watcher, watch as watch
from .training.data import DataLoaders as DataLoaders
from .training.live import ShowHealth as ShowHealth

_NAMES = [
    "ActivationStats",
    "Callback",
    "Fingerprint",
    "FlightRecorder",
    "GradientStats",
    "HookCallback",
    "Hooks",
    "Learner",
    "LogTo",
    "ParamStats",
    "Run",
    "attention_weights",
    "check_invariance",
    "collect",
    "compare_models",
    "compare_runs",
    "edit_output",
    "edit_outputs",
    "feature_extractor",
    "find_nonfinite",
    "hook_function",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "patch_from",
    "replay",
    "select",
    "summary",
    "watch",
    "zero",
]

_MODULES = ["bridges", "callbacks", "edits", "errors", "fastai", "plotting", "records", "testing"]


def __dir__() -> list[str]:
    """Return what completion offers: the names of the map, and the modules that have the others."""
    # help() loads each of these, and plotting cannot be loaded without matplotlib
    there = [m for m in _MODULES if m != "plotting" or _find_spec("matplotlib")]
    return sorted([*_NAMES, *there, "__version__"])


def __getattr__(name: str) -> _ModuleType:
    """Return a module that is loaded when it is asked for."""
    if name in _MODULES:
        return _import_module(f"hookkit.{name}")
    raise AttributeError(f"module 'hookkit' has no attribute {name!r}")
