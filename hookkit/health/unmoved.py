"""Rules on parameters that do not move, and on initial weights that are all equal.

A parameter that never moves is in no optimizer, gets no gradient, gets one of exactly 0, or gets
one and is not moved by it. Each of these has a cause of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import SAGEMAKER, SYMMETRY, Finding, Rule, rule
from hookkit.health.layer_order import gradients_fade
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Record

# SageMaker Debugger, VanishingGradient
FAINT_GRADIENT = 1e-7
# Where training stopped by itself, gradients have fallen below a tenth (hookkit, measured)
STILL_GRADED = 0.1

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
    grads, asleep = read.table(record, "grad_norm"), _never_ran(run, record)
    cut = still & held & ~np.isfinite(grads).any(axis=1)
    what = "can be trained, but no optimizer that steps has it, and it never moves"
    yield from _report(record, still & ~held, _NOT_IN_OPTIMIZER, what)
    what = "can be trained, but no gradient ever reaches it"
    asleep_too = f"{what}, for its layer never runs in training"
    yield from _report(record, cut & asleep, _NEVER_RAN, asleep_too)
    all_cut = len(read.matrices(record)) and (cut & ~asleep)[read.matrices(record)].all()
    severity = "error" if all_cut else "warning"
    constant = _beside_a_trained_matrix(record, np.isfinite(grads).any(axis=1))
    yield from _report(record, cut & ~asleep & ~constant, _NO_GRADIENT, what, severity)
    yield from _report(record, cut & ~asleep & constant, _NO_USE, what, "note")
    if not gradients_fade(run):  # else `vanishing` reports why
        pushed = still & held & (np.nan_to_num(grads) > 0).any(axis=1)
        size = read.median(read.table(record, "grad_rms"), axis=1)
        # a bias before a batch norm gets nothing but rounding errors
        faint = (size < FAINT_GRADIENT) & any(run.info.get("lr", ()))
        yield from _report(record, pushed & ~faint, unmoved, "gets a gradient, but never moves")
        what = f"gets a gradient of RMS {size[pushed & faint].max(initial=0):.2g}, and never moves"
        yield from _report(record, pushed & faint & read.is_matrix(record), _FAINT, what)
    yield from _stops_midway(run, record)


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
    cause="the loss does not depend on it: a detach(), a no_grad block, an unused branch",
    fix="find the detach(), .data or torch.no_grad() between it and the loss, or freeze it: "
    "requires_grad_(False)",
)

_NO_USE = _NO_GRADIENT.but(
    cause="the loss has no use for a constant, though for the weight beside it: it is made of "
    "derivatives, or of differences",
    fix="leave the bias out, bias=False, or let it be: it does no harm",
)

_NEVER_RAN = _NO_GRADIENT.but(
    cause="an expert that no token is sent to, or a layer that forward() does not call",
    fix="balance the load of the experts; call the layer, or delete it",
)

_FAINT = Rule(
    "vanishing",
    threshold=f"{_NO_CHANGE}, a median RMS below 1e-7",
    source=f"{_EXACT}, VanishingGradient: 1e-7",
    cause="the gradient vanishes before it gets there: gates or units that are shut, or a long way "
    "through small slopes; or a loss that is scaled down",
    fix="look at the biases of gates, and at the size of what the layers give: "
    'run.activations.values["rms"]',
)


def _beside_a_trained_matrix(record: Record, graded: Any) -> Bools:
    """(parameters,) biases of layers whose weight gets a gradient."""
    trained = {n for n, g in zip(record.names, graded, strict=True) if g}
    of_layer = (n.rpartition(".")[0::2] for n in record.names)
    return np.array([name == "bias" and f"{m}.weight" in trained for m, name in of_layer], bool)


def _report(
    record: Record, which: Bools, says: Rule, what: str, severity: str = "warning"
) -> Iterator[Finding]:
    """One finding for all parameters in `which`, if there are any."""
    if n := int(which.sum()):
        subject = "one parameter" if n == 1 else f"each of {n} parameters"
        yield says.found(severity, f"{subject} {what}", *read.where(record, np.flatnonzero(which)))


def _stops_midway(run: RunView, record: Record) -> Iterator[Finding]:
    """No matrix moves from some step on, though gradients go on and nothing was learnt."""
    which = read.matrices(record)
    update = np.nan_to_num(read.table(record, "update_norm")[which], nan=1.0)
    moves = np.flatnonzero((update > 0).any(axis=0))
    grads = np.nan_to_num(read.table(record, "grad_norm")[which])
    if not len(moves) or moves[-1] >= len(record) // 2 or run.learns is True:
        return
    rest = slice(int(moves[-1]) + 1, None)
    before = np.median(grads[:, : rest.start].sum(axis=0))
    if np.median(grads[:, rest].sum(axis=0)) > STILL_GRADED * before:  # else it has converged
        what = f"no matrix moves after step {int(record.steps[moves[-1]])}, though gradients go on"
        severity = "error" if run.fails else "warning"
        yield _MIDWAY.found(severity, what, *read.where(record, (), rest))


_MIDWAY = unmoved.but(
    threshold="exactly no change for half of the records or more",
    cause="a schedule that takes the learning rate to 0 too soon (stepped every batch, where it "
    "counts epochs)",
    fix="print scheduler.get_last_lr() at each step, and check the schedule's unit and length",
)


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
    recurrent = read.are(record.types, ("RNN", "LSTM", "GRU"))
    shut = _never_above_zero(run, record)
    what = "learns nothing: its gradient is exactly 0 at every step"
    dead = f"{what}, and what its layer gives is never above 0"
    yield from _report(record, zero & shut & ~recurrent, _DEAD, dead, "error")
    yield from _report(record, zero & recurrent, _RECURRENT_ZERO, what, "error")
    yield from _report(record, zero & ~shut & ~recurrent, zero_gradient, what, "error")


_DEAD = zero_gradient.but(
    name="dead",
    cause="a ReLU behind it lets nothing through: biases (or weights) that began so, or a learning "
    "rate that is too high",
    fix="begin with biases of 0, torch.nn.init.zeros_(layer.bias), lower the learning rate, or use "
    "nn.LeakyReLU or nn.GELU",
)

_RECURRENT_ZERO = zero_gradient.but(
    name="vanishing",
    cause="its inputs are 0 but for early time steps, and the gradient vanishes before it gets "
    "there",
    fix="use nn.LSTM or nn.GRU, a shorter sequence, or attention",
)


@rule(
    needs=("params",),
    threshold="all matrices begin at 0, and some never move",
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
    stuck = len(which) > 1 and len(zero) == len(which) and _never_moves(record)[which].any()
    # frozen ones count too: they make the units differ
    n_all = (read.is_matrix(record) & ~read.are(record.types, read.EMBEDDINGS)).sum()
    where = read.where(record, zero, read.FIRST)
    if stuck:
        what = f"{len(zero)} of {len(which)} matrices begin at exactly 0, and not all ever move"
        yield zero_init.found("error", what, *where)
    elif len(zero) and run.fails and len(zero) >= n_all / 2:
        what = f"{len(zero)} of {n_all} matrices begin at exactly 0, and the loss does not fall"
        yield _HALF_ZERO.found("error", what, *where)


_HALF_ZERO = zero_init.but(
    threshold="half of all matrices or more (frozen ones count), while the loss does not fall",
    source=f"{SYMMETRY}; half: hookkit, measured",
)


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


def _never_ran(run: RunView, record: Record) -> Bools:
    """Whether the layer of each parameter was recorded, and never ran in training."""
    seen = run.recorded.activations
    if seen is None or "rms" not in seen.values:
        return np.zeros(len(record.names), bool)
    runs = np.isfinite(seen.values["rms"])
    ran = {name: row.any() for name, row in zip(seen.names, runs, strict=True)}
    return np.array([not ran.get(owner, True) for owner in _owners(record)], bool)


def _never_above_zero(run: RunView, record: Record) -> Bools:
    """Whether all that the layer of each parameter gives is 0 or less, where no ReLU was seen."""
    seen = run.recorded.activations
    if seen is None or "max" not in seen.values or len(read.rows(seen, read.RELU_LIKE)):
        return np.zeros(len(record.names), bool)
    tops = np.nan_to_num(seen.values["max"], nan=-1.0).max(axis=1) <= 0
    by_relu = [c is None or c in read.RELU_LIKE for c in read.meta(seen, "feeds", None)]
    shut = {n for n, low, may in zip(seen.names, tops, by_relu, strict=True) if low and may}
    return np.array([owner in shut for owner in _owners(record)], bool)


def _owners(record: Record) -> list[str]:
    """The module's name of each parameter."""
    return [name.rpartition(".")[0] for name in record.names]
