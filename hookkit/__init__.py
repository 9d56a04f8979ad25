"""See inside any PyTorch model, while it runs and while it trains.

Three ways to use it:

    with hook_outputs(select(model, "blocks.*")) as h: model(x)             # look inside one pass
    with watch(model, opt, ActivationStats(every=10)) as w: train(model)    # … a whole training
    print(summary(model, x))                                                # … the architecture

What there is for which task; `help(hookkit.watch)` describes one, with an example:

Choose modules by name, pattern or class     select, Selection, leaf_modules, unwrap
    … parameters                             select_params, ParamSelection

Look inside one pass
    what layers return, and its gradients    hook_output(s), Hook, Hooks
    what they are given                      hook_input(s)
    calls of functions, FunctionHooks        hook_function
    attention patterns                       attention_weights, hook_attention
    one tensor; all modules; sizes           hook_tensor, hook_all, print_sizes
    inner outputs as an ordinary module      feature_extractor, FeatureExtractor
    for a whole data set                     collect, Activations, Mean, Covariance, TopK,
                                             activation_stream

Change what goes through a model
    outputs, inputs, gradients               edit_output(s), edit_input(s), edit_grad(s)
    what functions return, attention         edit_function, edit_attention
    … to what                                zero, scale, add, replace, patch_from
    leave a layer out; end early             skip_module, StopForward
    other modules in place of its own        swap, Wrapper, Catcher, GramWrapper

Know a model
    layers, shapes, parameters, compute      summary, Summary, module_summary, layer_info
    a single fact                            model_sizes, num_features_model, in_channels,
                                             total_params, has_params, flatten_model, dummy_eval
    where two models begin to differ         compare_models, Comparison

Record a training
    any loop                                 watch, Watcher; hookkit.bridges
    activations, gradients, parameters       ActivationStats, GradientStats, ParamStats
    the first NaN or Inf                     FlightRecorder
    what is wrong, why, what to do           diagnose, Diagnosis, Finding; ShowHealth, while it runs
    numbers, pictures, one page              Record, Run; hookkit.plotting; report

Train
    a loop with events                       Learner, DataLoaders, Recorder
    do something at an event, or in a hook   Callback, HookCallback
    accumulate, clip, schedule, use AMP      GradientAccumulation, GradientClip,
                                             SchedulerCallback, MixedPrecision
    save, stop, log, show                    SaveModelCallback, EarlyStoppingCallback, CSVLogger,
                                             LogTo, ProgressCallback, TrainEvalCallback
    end a batch, an epoch, a fit early       CancelBatchException and others of its kind

Errors are HookkitErrors, warnings HookkitWarnings.
"""

# Which files there are, and which may import which: the rows in docs/develop/architecture.md.

from .attention import attention_weights, edit_attention, hook_attention
from .callbacks import (
    Callback,
    CSVLogger,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    LogTo,
    MixedPrecision,
    ProgressCallback,
    Recorder,
    SaveModelCallback,
    SchedulerCallback,
    TrainEvalCallback,
)
from .collecting import Activations, Covariance, Mean, TopK, activation_stream, collect
from .comparing import Comparison, compare_models
from .data import DataLoaders
from .editing import (
    ParamSelection,
    add,
    edit_function,
    edit_grad,
    edit_grads,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    patch_from,
    replace,
    scale,
    select_params,
    skip_module,
    zero,
)
from .errors import (
    ArgumentError,
    CompiledWarning,
    HookError,
    HookkitError,
    HookkitWarning,
    MissingExtraError,
    ModelRunError,
    NeverFiredWarning,
    NonFiniteError,
    OptionError,
    OverwrittenWarning,
    SelectionError,
)
from .events import (
    CancelBackwardException,
    CancelBatchException,
    CancelEpochException,
    CancelFitException,
    CancelStepException,
    CancelTrainException,
    CancelValidException,
)
from .features import FeatureExtractor, feature_extractor
from .health import Diagnosis, Finding, diagnose
from .hooks import (
    FunctionHooks,
    Hook,
    Hooks,
    StopForward,
    hook_all,
    hook_function,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
    hook_tensor,
    print_sizes,
)
from .learner import Learner
from .live import ShowHealth
from .modelinfo import (
    dummy_eval,
    flatten_model,
    has_params,
    in_channels,
    model_sizes,
    num_features_model,
    total_params,
)
from .pages import report
from .recording import HookCallback
from .records import Record, Run
from .selecting import Selection, leaf_modules, select, unwrap
from .stats import ActivationStats, FlightRecorder, GradientStats, ParamStats
from .summaries import Summary, layer_info, module_summary, summary
from .swapping import Catcher, GramWrapper, Wrapper, swap
from .version import __version__
from .watching import Watcher, watch

__all__ = [
    "ActivationStats",
    "Activations",
    "ArgumentError",
    "CSVLogger",
    "Callback",
    "CancelBackwardException",
    "CancelBatchException",
    "CancelEpochException",
    "CancelFitException",
    "CancelStepException",
    "CancelTrainException",
    "CancelValidException",
    "Catcher",
    "Comparison",
    "CompiledWarning",
    "Covariance",
    "DataLoaders",
    "Diagnosis",
    "EarlyStoppingCallback",
    "FeatureExtractor",
    "Finding",
    "FlightRecorder",
    "FunctionHooks",
    "GradientAccumulation",
    "GradientClip",
    "GradientStats",
    "GramWrapper",
    "Hook",
    "HookCallback",
    "HookError",
    "HookkitError",
    "HookkitWarning",
    "Hooks",
    "Learner",
    "LogTo",
    "Mean",
    "MissingExtraError",
    "MixedPrecision",
    "ModelRunError",
    "NeverFiredWarning",
    "NonFiniteError",
    "OptionError",
    "OverwrittenWarning",
    "ParamSelection",
    "ParamStats",
    "ProgressCallback",
    "Record",
    "Recorder",
    "Run",
    "SaveModelCallback",
    "SchedulerCallback",
    "Selection",
    "SelectionError",
    "ShowHealth",
    "StopForward",
    "Summary",
    "TopK",
    "TrainEvalCallback",
    "Watcher",
    "Wrapper",
    "__version__",
    "activation_stream",
    "add",
    "attention_weights",
    "collect",
    "compare_models",
    "diagnose",
    "dummy_eval",
    "edit_attention",
    "edit_function",
    "edit_grad",
    "edit_grads",
    "edit_input",
    "edit_inputs",
    "edit_output",
    "edit_outputs",
    "feature_extractor",
    "flatten_model",
    "has_params",
    "hook_all",
    "hook_attention",
    "hook_function",
    "hook_input",
    "hook_inputs",
    "hook_output",
    "hook_outputs",
    "hook_tensor",
    "in_channels",
    "layer_info",
    "leaf_modules",
    "model_sizes",
    "module_summary",
    "num_features_model",
    "patch_from",
    "print_sizes",
    "replace",
    "report",
    "scale",
    "select",
    "select_params",
    "skip_module",
    "summary",
    "swap",
    "total_params",
    "unwrap",
    "watch",
    "zero",
]
