"""Know a model without training it: summaries, comparisons, inner outputs, activation data sets.

One run
    preserve         A block in which a model runs, and which puts it back.
    tree             `Tree`: a model read once: its places, modules, parameters and buffers.
    macs             Multiply-accumulates of the operations that PyTorch runs.
    tracer           `Tracer`: calls, shapes, multiply-accumulates, saved tensors of a run.
    tracing          `trace`: a run with it, on real or fake tensors, inside `preserve_state`.
A model at a glance
    summary_rows     `Row`: what each module owns, in the order of execution, counted once.
    summary_drawing  Rows as text that fits the terminal, and as HTML that folds.
    summary_result   `Summary`: the value, which draws itself by these two.
    summarizing      `summary`: checks, the run, and the `Summary` that is built from it.
    fastai_layout    fastai's layout of a summary, and a Learner's own.
Which layer is first
    first_difference The rule, and the base of all results that name a layer.
    invariance       `check_invariance`: which layer depends on what it must not depend on.
    input_changes    The changes that must not matter: of values, and of the layout.
    axes             Which axes of a tensor hold samples and positions.
    nonfinite        `find_nonfinite`: the function and the line that make the first NaN or Inf.
    comparing_runs   `compare_runs`: where two recorded trainings part.
    run_file         The file that a `Fingerprint` writes.
Two models side by side
    comparing        `compare_models`: runs two models, or reads what was saved of one.
    comparison       `Comparison` and its rows: text and a frame.
    comparison_rows  The rows, from what two sides gave, and which is the first.
    pairing, sides   Which modules belong together; what one of the two models gave.
    differences      How far two tensors are apart, and in which layout.
Inner outputs
    features         `feature_extractor`: inner outputs as an ordinary module.
    collecting       `collect`: what layers give for every sample of a loader.
    activations, accumulators, layer_rows    On disk; as sums; the rows of a batch.
"""

from hookkit.inspection.accumulators import Covariance, Mean, TopK
from hookkit.inspection.activations import Activations
from hookkit.inspection.collecting import activation_stream, collect
from hookkit.inspection.comparing import compare_models
from hookkit.inspection.comparing_runs import RunComparison, RunRow, compare_runs
from hookkit.inspection.comparison import Comparison
from hookkit.inspection.fastai_layout import layer_info, learner_summary, module_summary
from hookkit.inspection.features import FeatureExtractor, feature_extractor
from hookkit.inspection.invariance import Invariance, check_invariance
from hookkit.inspection.nonfinite import NonFinite, NonFiniteCall, find_nonfinite
from hookkit.inspection.summarizing import summary
from hookkit.inspection.summary_result import Summary
from hookkit.inspection.summary_rows import Row

__all__ = [
    "Activations",
    "Comparison",
    "Covariance",
    "FeatureExtractor",
    "Invariance",
    "Mean",
    "NonFinite",
    "NonFiniteCall",
    "Row",
    "RunComparison",
    "RunRow",
    "Summary",
    "TopK",
    "activation_stream",
    "check_invariance",
    "collect",
    "compare_models",
    "compare_runs",
    "feature_extractor",
    "find_nonfinite",
    "layer_info",
    "learner_summary",
    "module_summary",
    "summary",
]
