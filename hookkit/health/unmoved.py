"""Rules on parameters that stay put: in no optimizer, without a gradient, begun all the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.activations import SAGEMAKER
from hookkit.health.diagnosis import Finding
from hookkit.health.updates import fades
from hookkit.records import Floats, Record, Run

Bools = npt.NDArray[np.bool_]
RECURRENT = frozenset({"RNN", "LSTM", "GRU"})


def zero_init(run: Run) -> Iterator[Finding]:
    """Weights that all begin at 0, so that no unit differs from its neighbours."""
    record = read.params(run)
    which = read.matrices(record)
    norm = read.table(record, "weight_norm")
    zero = [i for i in which if norm[i, 0] == 0]
    stuck = len(which) > 1 and len(zero) == len(which) and _still(record)[which].any()
    fails = loss_expectations.learns(run) is False
    ndim = read.meta(record, "ndim", 2)  # of frozen ones too: they make the units differ
    n_all = sum(
        n >= 2 and t not in read.EMBEDDINGS for n, t in zip(ndim, record.types, strict=True)
    )
    if not zero or not (stuck or (fails and len(zero) >= n_all / 2)):
        return
    yield Finding(
        "zero_init",
        "error",
        read.names(record, zero),
        read.span(record, slice(0, 1)),
        f"{len(zero)} of {len(which)} matrices begin at exactly 0"
        + (" and the loss does not fall" if fails else ", and not all of them ever move"),
        "all matrices, of which some stay there; or at least half of all, with frozen ones, while "
        "the loss does not fall",
        "exact; Goodfellow et al. 2016, Deep Learning, 8.4: initial weights must break symmetry",
        "weights all begin at 0: the units of a layer get the same gradient, or none",
        "initialise at random (zeros only in the last layer of a branch)",
    )


def constant_init(run: Run) -> Iterator[Finding]:
    """Two layers in a row whose weights all begin at one value: the units between are the same."""
    record = read.params(run)
    if "constant" not in record.meta:
        raise read.Missing("not known which weights begin constant")
    constant, norm = record.meta["constant"], read.table(record, "weight_norm")[:, 0]
    pairs = pairwise(i for i in read.matrices(record) if record.types[i] in read.PRE_ACTIVATION)
    hit = {i for pair in pairs if all(constant[j] for j in pair) for i in pair}
    if not any(norm[i] > 0 for i in hit):
        return  # `zero_init`
    yield Finding(
        "constant_init",
        "error" if loss_expectations.learns(run) is False else "warning",
        read.names(record, sorted(hit)),
        read.span(record, slice(0, 1)),
        f"the weights of {len(hit)} layers in a row all begin at one value",
        "two layers in a row or more, exactly constant",
        "exact; Goodfellow et al. 2016, Deep Learning, 8.4: initial weights must break symmetry",
        "the units between such layers compute the same and get the same gradient, so that a whole "
        "layer is worth one unit (but for what random biases change)",
        "initialise weights at random: nn.init.kaiming_normal_, or PyTorch's default",
    )


def unmoved(run: Run) -> Iterator[Finding]:
    """Trainable parameters that are in no optimizer, get no gradient, or stay put."""
    record = read.params(run)
    held = np.array([x is not False for x in read.meta(record, "in_optimizer", True)], bool)
    seen = np.isfinite(record.values["grad_norm"]).any(1)
    still, matrix = _still(record), _matrix(record)
    yield from _unmoved(record, still & ~held, "not_in_optimizer")
    asleep = _never_ran(run, record)
    yield from _unmoved(record, still & held & ~seen & asleep, "no_gradient", "never_ran")
    yield from _unmoved(record, still & held & ~seen & ~asleep, "no_gradient")
    if not fades(record):  # else `vanishing` says why
        stays = still & held & _graded(record) & matrix
        faint = _faint(record) & any(run.info.get("lr", ()))
        yield from _unmoved(record, stays & ~faint, "unmoved")
        yield from _unmoved(record, stays & faint, "vanishing", "faint")
    yield from _stopped(run, record)


def unregistered(run: Run) -> Iterator[Finding]:
    """Weights in plain lists and dicts of the model, of which PyTorch does not know."""
    if run.activations is None:
        raise read.Missing("no activations were recorded")
    names = run.activations.meta.get("unregistered", [])
    if names:
        n = len(names)
        yield Finding(
            "not_in_optimizer",
            "warning",
            tuple(names),
            read.span(run.activations),
            f"{n} weight{'s' * (n != 1)} of the forward {'are' if n != 1 else 'is'} neither in "
            "model.parameters() nor in an optimizer",
            "exact: seen in the autograd graph of one batch",
            "exact; PyTorch's documentation of nn.ModuleList: what a plain list holds is not "
            "registered",
            "layers (or parameters) in a plain list, tuple or dict: they are never trained, moved "
            "to a device or saved",
            "hold them in an nn.ModuleList, nn.ModuleDict or nn.ParameterList",
        )


def zero_gradient(run: Run) -> Iterator[Finding]:
    """Matrices whose gradient is exactly 0 at every step."""
    record = read.params(run)
    held = np.array([x is not False for x in read.meta(record, "in_optimizer", True)], bool)
    seen = np.isfinite(record.values["grad_norm"]).any(1)
    put = _still(record) | _only_decays(run, record)
    zero = put & held & seen & ~_graded(record) & _matrix(record)
    long = np.array([t in RECURRENT for t in record.types], bool)
    shut = _below_zero(run, record)
    yield from _unmoved(record, zero & shut & ~long, "dead", "shut")
    yield from _unmoved(record, zero & long, "vanishing", "recurrent")
    yield from _unmoved(record, zero & ~shut & ~long, "zero_gradient")


def _still(record: Record) -> Bools:
    """Trainable and not empty, and never seen to move."""
    trainable = np.array(read.meta(record, "requires_grad", True), bool)
    update = read.table(record, "update_norm")
    moved = (np.nan_to_num(update) > 0).any(1) | ~np.isfinite(update).any(1)
    moved |= (np.nan_to_num(record.values.get("nonfinite", 0 * update)) > 0).any(1)
    some = np.array(read.meta(record, "numel", 1), float).astype(bool)
    moved |= read.drifts(record)  # in steps between the records (a GAN's other player)
    return np.asarray(trainable & some & ~moved)


def _only_decays(run: Run, record: Record) -> Bools:
    """Trainable, and never larger than at first: decay's doing, where there is no gradient."""
    trainable = np.array(read.meta(record, "requires_grad", True), bool)
    norm = read.table(record, "weight_norm")
    falls = (norm <= (1 + read.SAME) * norm[:, :1]).all(axis=1)
    return np.asarray(trainable & falls & any(run.info.get("weight_decay", ())))


def _graded(record: Record) -> Bools:
    return np.asarray(np.nan_to_num(read.table(record, "grad_norm")).max(axis=1) > 0)


def _faint(record: Record) -> Bools:
    """Whether the gradient of each parameter is below 1e-7, a median of its RMS."""
    return np.asarray(read.median(read.table(record, "grad_rms"), axis=1) < 1e-7)


def _matrix(record: Record) -> Bools:
    return np.array(read.meta(record, "ndim", 2)) >= 2


def _never_ran(run: Run, record: Record) -> Bools:
    """Whether the layer of each parameter was recorded, and never ran in training."""
    seen = run.activations
    if seen is None or "rms" not in seen.values:
        return np.zeros(len(record.names), bool)
    ran = dict(zip(seen.names, _any_finite(seen.values["rms"]), strict=True))
    owners = [name.rpartition(".")[0] for name in record.names]
    return np.array([not ran.get(owner, True) for owner in owners], bool)


def _below_zero(run: Run, record: Record) -> Bools:
    """Whether all that the layer of each parameter gives is 0 or less, where no ReLU was seen."""
    seen, none = run.activations, np.zeros(len(record.names), bool)
    if seen is None or "max" not in seen.values or read.rows(seen, read.RELU_LIKE):
        return none
    tops = np.nan_to_num(seen.values["max"], nan=-1.0).max(axis=1) <= 0
    readers = read.meta(seen, "feeds", None)
    by_relu = [reader is None or reader in read.RELU_LIKE for reader in readers]
    shut = {n for n, low, may in zip(seen.names, tops, by_relu, strict=True) if low and may}
    return np.array([name.rpartition(".")[0] in shut for name in record.names], bool)


def _any_finite(values: Floats) -> list[bool]:
    return [bool(np.isfinite(row).any()) for row in values]


def _stopped(run: Run, record: Record) -> Iterator[Finding]:
    """All matrices stand still from some step on, with gradients, and nothing was learnt."""
    which = read.matrices(record)
    update = np.nan_to_num(read.table(record, "update_norm")[which], nan=1.0)
    moves = np.flatnonzero((update > 0).any(axis=0))
    grads = np.nan_to_num(read.table(record, "grad_norm")[which])
    if not len(moves) or moves[-1] >= len(record) // 2 or loss_expectations.learns(run) is True:
        return
    rest = slice(int(moves[-1]) + 1, None)
    before = np.median(grads[:, : rest.start].sum(axis=0))
    if np.median(grads[:, rest].sum(axis=0)) > 0.1 * before:  # else it has arrived
        yield Finding(
            "unmoved",
            "error" if loss_expectations.learns(run) is False else "warning",
            (),
            read.span(record, rest),
            f"no matrix moves after step {int(record.steps[moves[-1]])}, though gradients go on",
            "exactly no change for half of the records or more",
            f"exact; {SAGEMAKER}, UnchangedTensor",
            "a schedule that takes the learning rate to 0 too soon (stepped every batch, "
            "where it counts epochs)",
            "print the learning rate of each step; check the schedule's unit and length",
        )


_CUT = "trainable, but no gradient ever reaches it"
_ZERO = "its gradient is exactly 0 at every step"
_STILL = {
    "not_in_optimizer": (
        "trainable, but in no optimizer that steps: never moves",
        "the optimizer was made without it (a layer added later, or a sub-module left out), or "
        "its own is never stepped",
        "give an optimizer all of model.parameters() and step it, or freeze it with "
        "requires_grad_(False)",
    ),
    "no_gradient": (
        _CUT,
        "the loss does not depend on it: a detach(), a no_grad block, an unused branch",
        "find where the graph is cut, or freeze it with requires_grad_(False)",
    ),
    "never_ran": (
        f"{_CUT}, for its layer never runs in training",
        "an expert that no token is sent to, or a layer that forward() does not call",
        "balance the load of the experts; call the layer, or delete it",
    ),
    "zero_gradient": (
        _ZERO,
        "its inputs are always 0, or all behind it is: dead units, zeros as initial weights",
        "look at its inputs; initialise at random (zeros only in the last layer of a branch)",
    ),
    "shut": (
        f"{_ZERO}, and what its layer gives is never above 0",
        "a ReLU behind it lets nothing through: biases (or weights) that began so, or a learning "
        "rate that is too high",
        "check the initial biases, lower the learning rate, or use LeakyReLU or GELU",
    ),
    "recurrent": (
        _ZERO,
        "its inputs are 0 but for early time steps, and the gradient vanishes before it gets there",
        "use an LSTM or GRU, a shorter sequence, or attention",
    ),
    "faint": (
        "its gradient is below 1e-7, and it never moves",
        "the gradient vanishes before it gets there: gates or units that are shut, or a long way "
        "through small slopes; or a loss that is scaled down",
        "look at the biases of gates and at the size of what the layers give",
    ),
    "unmoved": (
        "gets a gradient but never moves",
        "a learning rate of 0 for its group, or steps below the precision of its dtype",
        "check the learning rate of its group; keep a float32 copy of half-precision weights",
    ),
}


def _unmoved(record: Record, which: Bools, rule: str, why: str = "") -> Iterator[Finding]:
    hit = np.flatnonzero(which)
    if not len(hit):
        return
    what, cause, fix = _STILL[why or rule]
    n = f"{len(hit)} parameter{'s' * (len(hit) != 1)}"
    yield Finding(
        rule,
        "error" if rule in ("zero_gradient", "vanishing", "dead") and why != "faint" else "warning",
        read.names(record, hit),
        read.span(record),
        f"{n}: {what}",
        "a gradient of exactly 0 in all records"
        if what.startswith(_ZERO)
        else "exactly no change over all records" + ", a median RMS below 1e-7" * (why == "faint"),
        f"exact; {SAGEMAKER}, UnchangedTensor" + ", VanishingGradient: 1e-7" * (why == "faint"),
        cause,
        fix,
    )
