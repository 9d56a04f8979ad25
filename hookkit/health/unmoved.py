"""Rules on parameters that do not move, and on initial weights that are all equal.

A parameter that never moves is in no optimizer, gets no gradient, gets one of exactly 0, or gets
one and is not moved by it. Each of these has a cause of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import SAGEMAKER, SYMMETRY, Finding, Rule, rule
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Record

# SageMaker Debugger, VanishingGradient
FAINT_GRADIENT = 1e-7

# Batches without a step, as a step's accumulated ones or what a GradScaler skips at first are
BATCHES = 3
# Gradients for each step that were zeroed without one: attacks on an image make up to 20
WASTED = 32

_EXACT = f"exact; {SAGEMAKER}, UnchangedTensor"
_NO_CHANGE = "exactly no change over all records"


@rule(
    needs=("params",),
    threshold=_NO_CHANGE,
    source=_EXACT,
    cause="a learning rate of 0 for its group, or steps below the precision of its dtype",
    fix='print(opt.param_groups) and check its "lr"; keep weights in float32, and compute in half '
    "precision under torch.autocast",
)
def unmoved(run: RunView) -> Iterator[Finding]:
    """Trainable parameters that are in no optimizer, get no gradient, or never move."""
    record = run.params
    still, held = _never_moves(record), _in_optimizer(record)
    grads = read.table(record, "grad_norm")
    cut = still & held & ~np.isfinite(grads).any(axis=1)
    what = "can be trained, but no optimizer that steps has it, and it never moves"
    yield from _report(record, still & ~held, _NOT_IN_OPTIMIZER, what)
    what = "can be trained, but no gradient ever reaches it"
    some = cut & read.is_matrix(record)  # a bias that the loss has no use for does no harm
    all_cut = some.any() and cut[read.matrices(record)].all()
    severity = "error" if all_cut else "warning" if some.any() else "note"
    yield from _report(record, cut, _NO_GRADIENT, what, severity)
    pushed = still & held & (np.nan_to_num(grads) > 0).any(axis=1)
    # a bias before a batch norm gets nothing but rounding errors
    faint = read.median(read.table(record, "grad_rms"), axis=1) < FAINT_GRADIENT
    yield from _report(record, pushed & ~faint, unmoved, "gets a gradient, but never moves")


@rule(
    threshold="3 training batches or more, no step, and weights that stay as they were",
    source="exact, by the optimizers that the model's parameters are in, and by the weights",
    cause="optimizer.step() is never called, or what steps is not what watch was given",
    fix="call optimizer.step() after loss.backward()",
)
def no_step(run: RunView) -> Iterator[Finding]:
    """Batches, and no step of an optimizer: nothing that is recorded by steps is there."""
    n, (lost, of) = run.info.get("train_iter", 0), run.info.get("nan_losses") or (0, 1)
    # a GradScaler leaves out the steps of losses that are not finite
    if run.info.get("no_step") and n >= BATCHES and 2 * lost <= of:
        what = f"the model has seen {n} training batches, and no optimizer has stepped"
        yield _NO_STEP.found("error", what, (), (0, 0))

    wasted, steps = run.info.get("wasted_gradients") or (0, 1)
    if wasted >= WASTED * steps:
        what = f"before {steps} of the first steps the gradients of {wasted} batches were zeroed, "
        what += "and no step had used them"
        severity = "error" if run.fails else "warning"
        yield _FEW_STEPS.found(severity, what, (), (0, steps))


_NO_STEP = no_step.but(name="unmoved")


@rule(
    threshold="any step of a new model that has batch norms, or that was in training mode before",
    source="exact, by the model's mode in each forward; PyTorch, nn.Module.eval",
    cause="model.train() was forgotten, after a validation perhaps: dropout and batch norm work as "
    "in validation",
    fix="call model.train() at the beginning of each epoch",
)
def eval_mode(run: RunView) -> Iterator[Finding]:
    """Steps after forwards in eval mode; a note where all are, without batch norms to train."""
    (n, of), params = run.info.get("eval_steps") or (0, 0), run.recorded.params
    if n:
        normed = params is not None and any("BatchNorm" in kind for kind in params.types)
        severity = "warning" if n < of or (normed and not run.trained_before) else "note"
        yield eval_mode.found(
            severity, f"{n} of {of} steps were made in eval mode", (), run.all_steps
        )


_FEW_STEPS = _NO_STEP.but(
    threshold="32 for each step, where players waste one, and attacks on images 20",
    source="by what autograd adds new gradients to; 32: hookkit, chosen",
    cause="optimizer.step() stands outside the loop over batches, where only the last one counts",
    fix="call optimizer.step() after each loss.backward(); or, to accumulate gradients, "
    "optimizer.zero_grad() only after each step",
)

_NOT_IN_OPTIMIZER = Rule(
    "not_in_optimizer",
    threshold=_NO_CHANGE,
    source=_EXACT,
    cause="the optimizer was made without it (a layer added later, or a submodule forgotten), or "
    "its own is never stepped",
    fix="give an optimizer all of model.parameters() and step it, or freeze it with "
    "requires_grad_(False)",
)

_NO_GRADIENT = Rule(
    "no_gradient",
    threshold="no gradient in any record",
    source=_EXACT,
    cause="the loss does not depend on it: a detach(), a no_grad block, a layer or expert that is "
    "never called",
    fix="find the detach(), .data or torch.no_grad() between it and the loss; delete it, or freeze "
    "it, requires_grad_(False), if it is not needed",
)


def _report(
    record: Record, which: Bools, says: Rule, what: str, severity: str = "warning"
) -> Iterator[Finding]:
    """One finding for all parameters in `which`, if there are any."""
    if n := int(which.sum()):
        subject = "one parameter" if n == 1 else f"each of {n} parameters"
        yield says.found(severity, f"{subject} {what}", *read.where(record, np.flatnonzero(which)))


@rule(
    threshold="any weight in a batch's autograd graph that model.parameters() does not list",
    source="exact; PyTorch's documentation of nn.ModuleList: what a plain list holds is not "
    "registered",
    cause="layers (or parameters) in a plain list, tuple or dict: they are never trained, moved "
    "to a device or saved",
    fix="hold them in an nn.ModuleList, nn.ModuleDict or nn.ParameterList",
)
def unregistered(run: RunView) -> Iterator[Finding]:
    """Weights in plain lists and dicts of the model, of which PyTorch does not know."""
    record = run.recorded.activations
    if record is None:
        raise read.Missing("no activations were recorded")
    if len(record) and (names := record.meta.get("unregistered", [])):
        are = "weight of the forward is" if len(names) == 1 else "weights of the forward are"
        what = f"{len(names)} {are} neither in model.parameters() nor in an optimizer"
        says = unregistered.but(name="not_in_optimizer")
        yield says.found("warning", what, names, read.span(record))


@rule(
    needs=("params",),
    threshold="a gradient of exactly 0 in all records",
    source=_EXACT,
    cause="its inputs are always 0, or all behind it is: dead units, zeros as initial weights",
    fix="look at its inputs, and initialise what is behind it at random: "
    "torch.nn.init.kaiming_normal_(layer.weight)",
)
def zero_gradient(run: RunView) -> Iterator[Finding]:
    """Matrices whose gradient is exactly 0 at every step."""
    record = run.params
    still = _never_moves(record) | _only_decays(run, record)
    zero = still & _in_optimizer(record) & read.has_no_gradient(record) & read.is_matrix(record)
    what = "learns nothing: its gradient is exactly 0 at every step"
    yield from _report(record, zero, zero_gradient, what, "error")


@rule(
    needs=("params",),
    threshold="all matrices begin at 0, and some never move or the loss does not fall",
    source=SYMMETRY,
    cause="weights all begin at 0: the units of a layer get the same gradient, or none",
    fix="initialise at random, torch.nn.init.kaiming_normal_(layer.weight); zeros are for the last "
    "layer of a branch only",
)
def zero_init(run: RunView) -> Iterator[Finding]:
    """Weights that all begin at 0, so that no unit differs from its neighbours."""
    record = run.params
    which = read.matrices(record)
    zero = which[read.table(record, "weight_norm")[which, 0] == 0]
    stuck = run.fails or _never_moves(record)[which].any()  # else frozen ones may differ
    if len(which) > 1 and len(zero) == len(which) and stuck:
        what = f"all {len(zero)} matrices begin at exactly 0"
        yield zero_init.found("error", what, *read.where(record, zero, read.FIRST))


@rule(
    needs=("params",),
    threshold="two layers in a row or more, exactly constant",
    source=SYMMETRY,
    cause="the units between such layers compute the same and get the same gradient, so that a "
    "whole layer is worth one unit (but for what random biases change)",
    fix="initialise weights at random: torch.nn.init.kaiming_normal_(layer.weight), or PyTorch's "
    "default, layer.reset_parameters()",
)
def constant_init(run: RunView) -> Iterator[Finding]:
    """Two layers in a row whose weights all begin at one value: the units between are the same."""
    record = run.params
    if "constant" not in record.meta:
        raise read.Missing("not known which weights begin constant")
    constant, norm = record.meta["constant"], read.table(record, "weight_norm")[:, 0]
    pairs = pairwise(i for i in read.matrices(record) if record.types[i] in read.PRE_ACTIVATION)
    hit = sorted({i for pair in pairs if all(constant[j] for j in pair) for i in pair})
    if any(norm[i] > 0 for i in hit):  # else `zero_init`
        what = f"the weights of {len(hit)} layers in a row all begin at one value"
        severity = "error" if run.fails else "warning"
        yield constant_init.found(severity, what, *read.where(record, hit, read.FIRST))


# What is known of each parameter: (n_params,) bool.


def _never_moves(record: Record) -> Bools:
    """Trainable, not empty, and never seen to move."""
    update = read.table(record, "update_norm")
    moved = (np.nan_to_num(update) > 0).any(1) | ~np.isfinite(update).any(1)
    moved |= (np.nan_to_num(record.values.get("nonfinite", 0 * update)) > 0).any(1)
    moved |= read.has_changed(record)  # in steps between the records (a GAN's other player)
    return np.asarray(read.trainable(record) & (read.meta(record, "numel", 1) != 0) & ~moved)


def _only_decays(run: RunView, record: Record) -> Bools:
    """Trainable, under weight decay, and never larger than at first."""
    norm = read.table(record, "weight_norm")
    falls = (norm <= (1 + read.SAME_NORM) * norm[:, :1]).all(axis=1)
    return np.asarray(read.trainable(record) & falls & any(run.info.get("weight_decay", ())))


def _in_optimizer(record: Record) -> Bools:
    return np.asarray(read.meta(record, "in_optimizer", True) != 0)  # where None, it is not known
