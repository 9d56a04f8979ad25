"""See inside any PyTorch model, while it runs and while it trains.

Three ways to use it:

    with hook_outputs(select(model, "blocks.*")) as h: model(x)             # look inside one pass
    with watch(model, opt, ActivationStats(every=10)) as w: train(model)    # … a whole training
    print(summary(model, x))                                                # … the architecture

A file or folder imports only from the rows above its own, and `tests/test_layers.py` checks it. A
folder's docstring says what is in its files. There are three groups: the model (`selecting`,
`hooks`, `modelinfo`, `summaries`); what was recorded (`records`, `health`, `plotting`, `pages`),
which are values and know nothing of hooks and loops; and training (`callbacks`, `recording`,
`stats`), with its two drivers `learner` and `watching`. Hooks meet a training loop in `recording`
alone.

     0  errors · interrupts · version           errors and warnings; Ctrl-C; the version
     1  checks · events · files                 of arguments; names of events; whole files
        nested · modules · texts                structures of tensors; submodules; text widths
        devices                                 what differs between devices
     2  selecting · ranks · data                which modules; which process; which batches
        autograd_graph · markup                 the graph behind a tensor; HTML
     3  hooks · records                         capture; what was recorded, as values
     4  moments · editing · swapping            statistics; change outputs; replace modules
        modelinfo · health                      sizes, shapes, compute; diagnosis of a run
        attention                               attention weights, also of fused attention
     5  features · summaries · plotting         extract; a model at a glance; pictures
     6  pages · callbacks                       report: one page of a run; Callback
        comparing · collecting                  two models, layer by layer; activation data sets
     7  recording · live                        HookCallback, where hooks meet a loop; ShowHealth
     8  stats                                   ActivationStats and other recorders
     9  learner · watching                      hookkit's training loop; yours
    10  bridges · testing · demo                other libraries' loops; small models; a real run
"""

from .attention import attention_weights
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
from .collecting import Activations, Covariance, Mean, TopK, collect
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
    run_from,
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
    "add",
    "attention_weights",
    "collect",
    "compare_models",
    "diagnose",
    "dummy_eval",
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
    "run_from",
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
