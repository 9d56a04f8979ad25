"""See inside any PyTorch model, while it runs and while it trains.

Three ways to use it:

    with hook_outputs(select(model, "blocks.*")) as h: model(x)             # look inside one pass
    with watch(model, opt, ActivationStats(every=10)) as w: train(model)    # … a whole training
    print(summary(model, x))                                                # … the architecture

What there is for which task; `help(hookkit.watch)` describes one, with an example:

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

Know a model
    layers, shapes, parameters, compute      summary
    where two models begin to differ         compare_models
    what depends on what it must not         check_invariance

Record a training
    any loop                                 watch; hookkit.bridges, for libraries
    activations, gradients, parameters       ActivationStats, GradientStats, ParamStats
    the first NaN or Inf                     FlightRecorder, find_nonfinite
    its batch once more                      replay
    where two trainings part                 Fingerprint, compare_runs
    to TensorBoard, wandb, a file            LogTo
    numbers, diagnosis, pictures             Run; hookkit.records, hookkit.plotting

Train
    a loop with events                       Learner
    do something at an event, or in a hook   Callback, HookCallback; hookkit.callbacks

hookkit.fastai has fastai's names, hookkit.errors the errors, hookkit.testing small models and data.
"""

# Which files there are, and which may import which: the rows in docs/develop/architecture.md.
# Names that are imported `as` themselves stay importable from here; their homes are in the modules.

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from .callbacks import (
    Callback,
    CSVLogger as CSVLogger,
    EarlyStoppingCallback as EarlyStoppingCallback,
    GradientAccumulation as GradientAccumulation,
    GradientClip as GradientClip,
    LogTo,
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
from .callbacks.hook_callback import HookCallback
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
    edit_output,
    edit_outputs,
    patch_from,
    replace as replace,
    scale as scale,
    swap as swap,
    zero,
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
    Hooks,
    StopForward as StopForward,
    attention_weights,
    hook_all as hook_all,
    hook_attention as hook_attention,
    hook_function,
    hook_input as hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
    hook_tensor as hook_tensor,
    print_sizes as print_sizes,
)
from .hooks.selection import (
    Selection as Selection,
    leaf_modules as leaf_modules,
    select,
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
    check_invariance,
    collect,
    compare_models,
    compare_runs,
    feature_extractor,
    find_nonfinite,
    layer_info as layer_info,
    module_summary as module_summary,
    summary,
)
from .recorders import (
    ActivationStats,
    Fingerprint,
    FlightRecorder,
    GradientStats,
    ParamStats,
    Replay as Replay,
    replay,
)
from .records import Record as Record, Run
from .training import Learner, Watcher as Watcher, watch
from .training.data import DataLoaders as DataLoaders
from .training.live import ShowHealth as ShowHealth

__version__ = version("hookkit")

__all__ = [
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
    """What completion offers: the names above, and the modules that have the others."""
    return sorted([*__all__, *_MODULES, "__version__"])


def __getattr__(name: str) -> ModuleType:
    """A module that is loaded when it is asked for."""
    if name in _MODULES:
        return import_module(f"hookkit.{name}")
    raise AttributeError(f"module 'hookkit' has no attribute {name!r}")
