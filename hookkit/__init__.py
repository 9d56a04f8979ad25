"""See inside any PyTorch model, while it runs and while it trains.

Three doors:

    with hook_outputs(select(model, "blocks.*")) as h: model(x)             # look inside one pass
    with watch(model, opt, ActivationStats(every=10)) as w: train(model)    # … a whole training
    print(summary(model, x))                                                # … the architecture

The house has two stems that meet once. Model stem: `selecting → hooks → modelinfo → summaries`.
Training stem: `events → callbacks`. They join in `recording`, which feeds `stats → health →
pages`. On top stand the two drivers of the same callbacks. A room imports only from rows above
its own; `tests/test_layers.py` holds this. A room with several files is a folder whose docstring
names them.

    errors · interrupts                          what goes wrong; Ctrl-C
    checks                                       one check for each kind of argument
    events · files · nested · texts · modules    events; whole files; structures; widths; names
    selecting · ranks · data                     which modules; which process; which batches
    hooks · moments · records · callbacks        capture; statistics; what was recorded; Callback
    editing · swapping · features · modelinfo    change; wrap; extract; count
    recording                                    HookCallback: where hooks meet a loop
    summaries · stats                            a model at a glance; its layers over time
    health · plotting                            diagnosis; pictures
    pages                                        report: one page of a run
    learner · watching                           our loop; anybody's
    bridges · testing · demo                     other loops; small nets; a real run
"""

from .callbacks import (
    Callback,
    GradientAccumulation,
    GradientClip,
    ProgressCallback,
    Recorder,
    SchedulerCallback,
    TrainEvalCallback,
)
from .data import DataLoaders
from .editing import (
    add,
    edit_grad,
    edit_grads,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    patch_from,
    replace,
    scale,
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
    Hook,
    Hooks,
    StopForward,
    hook_all,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
    hook_tensor,
    print_sizes,
)
from .learner import Learner
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
    "ArgumentError",
    "Callback",
    "CancelBackwardException",
    "CancelBatchException",
    "CancelEpochException",
    "CancelFitException",
    "CancelStepException",
    "CancelTrainException",
    "CancelValidException",
    "Catcher",
    "CompiledWarning",
    "DataLoaders",
    "Diagnosis",
    "FeatureExtractor",
    "Finding",
    "FlightRecorder",
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
    "MissingExtraError",
    "ModelRunError",
    "NeverFiredWarning",
    "NonFiniteError",
    "OptionError",
    "OverwrittenWarning",
    "ParamStats",
    "ProgressCallback",
    "Record",
    "Recorder",
    "Run",
    "SchedulerCallback",
    "Selection",
    "SelectionError",
    "StopForward",
    "Summary",
    "TrainEvalCallback",
    "Watcher",
    "Wrapper",
    "__version__",
    "add",
    "diagnose",
    "dummy_eval",
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
    "summary",
    "swap",
    "total_params",
    "unwrap",
    "watch",
    "zero",
]
