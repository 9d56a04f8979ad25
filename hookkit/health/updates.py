"""Rules on parameters: learning rate, what never moves, gradients that miss, vanish or explode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.findings import Finding
from hookkit.health.signals import SAGEMAKER
from hookkit.records import Floats, Record, Run

CHECKER = "Ben Braiek & Khomh 2022, TheDeepChecker (arXiv 2204.00694)"
AUTOTRAINER = "Zhang et al., AUTOTRAINER, ICSE 2021"
CS231N = "cs231n, Neural Networks Part 3: about 1e-3"


def lr_too_high(run: Run) -> Iterator[Finding]:
    """Most matrices are rewritten faster than they can learn."""
    record, which, ratio = _ratios(run)
    early = read.median(ratio[:, :20], axis=1)
    peak = np.nanmax(np.where(np.isfinite(ratio), ratio, -1.0), axis=1)
    learns = read.improved(run)
    fast = (early > 0.1) | (peak > 0.5)
    if learns:  # something is learnt: only what cannot be meant is an alarm
        fast = (early > 0.05) & (peak > 0.5)
    elif learns is None:
        fast = read.median(ratio, axis=1) > 0.1
    if fast.mean() <= 0.5:
        return
    yield Finding(
        "lr_too_high",
        "sick" if learns is False else "warn",
        read.names(record, [i for i, f in zip(which, fast, strict=True) if f]),
        read.span(record),
        f"update:weight of {fast.sum()} of {len(which)} matrices is {read.median(early):.2g} early "
        f"and up to {peak.max():.2g}" + (" while the loss does not fall" * (learns is False)),
        "above 1e-1 in most matrices (where the loss falls: 5e-1 in one step)",
        f"{CHECKER}: log10 within -4 and -1; {CS231N}",
        "the learning rate is too high",
        "divide the learning rate by 10, or warm it up",
    )


def lr_too_low(run: Run) -> Iterator[Finding]:
    """Most matrices hardly move; an alarm only when the loss does not fall either."""
    record, which, ratio = _ratios(run)
    whole = read.median(ratio, axis=1)
    slow = (whole < 1e-4) & (whole > 0)
    early = read.median(ratio[:, :20], axis=1)  # what leapt at first is not slow: it broke
    learns = read.improved(run)
    if slow.mean() <= 0.5 or learns or (early > 1e-2).mean() > 0.5 or _fades(record):
        return
    yield Finding(
        "lr_too_low",
        "info" if learns is None else "warn",
        read.names(record, [i for i, s in zip(which, slow, strict=True) if s]),
        read.span(record),
        f"update:weight of {slow.sum()} of {len(which)} matrices is {read.median(whole):.2g}"
        + ("" if learns is None else " and the loss does not fall"),
        "below 1e-4 in most matrices",
        f"{CHECKER}: log10 within -4 and -1; {CS231N}",
        "the learning rate is too low",
        "multiply the learning rate by 10 (nothing, if this is fine-tuning and it is meant)",
    )


def _ratios(run: Run) -> tuple[Record, list[int], Floats]:
    """update:weight of matrices that have weights, from the first record on, and do move."""
    record = read.params(run)
    ratio = read.table(record, "update_ratio")
    norm = read.table(record, "weight_norm")
    ratio = np.where(norm > 0, ratio, np.nan)  # from exactly 0 any step is infinite
    moving = np.nanmax(np.nan_to_num(ratio), axis=1) > 0
    which = [i for i in read.matrices(record) if moving[i] and norm[i, 0] != 0]
    if not which:
        raise read.Missing("no matrix that began away from 0 moves")
    return record, which, ratio[which]


def _fades(record: Record) -> bool:
    """Whether the first matrix' gradients vanish against the last one's: then none can move."""
    which = read.matrices(record)
    if len(which) < 3 or "grad_rms" not in record.values:
        return False
    size = read.median(record.values["grad_rms"][which], axis=1)
    return bool(size[0] < 1e-4 and size[0] < 1e-3 * size[-1])


def zero_init(run: Run) -> Iterator[Finding]:
    """Weights that all begin at 0, so that no unit differs from its neighbours."""
    record = read.params(run)
    which = read.matrices(record)
    norm = read.table(record, "weight_norm")
    zero = [i for i in which if norm[i, 0] == 0]
    if not zero or len(zero) < len(which) / 2 or read.improved(run) is not False:
        return
    yield Finding(
        "zero_init",
        "warn",
        read.names(record, zero),
        read.span(record, slice(0, 1)),
        f"{len(zero)} of {len(which)} matrices begin at exactly 0 and the loss does not fall",
        "at least half of the matrices",
        "exact; Goodfellow et al. 2016, Deep Learning, 8.4: initial weights must break symmetry",
        "weights all begin at 0: the units of a layer get the same gradient, or none",
        "initialise at random (zeros only in the last layer of a branch)",
    )


def unmoved(run: Run) -> Iterator[Finding]:
    """Trainable parameters that are in no optimizer, get no gradient, or stay put."""
    record = read.params(run)
    trainable = np.array(read.meta(record, "requires_grad", True), bool)
    held = np.array([x is not False for x in read.meta(record, "in_optimizer", True)], bool)
    update = read.table(record, "update_norm")
    moved = (np.nan_to_num(update) > 0).any(1) | ~np.isfinite(update).any(1)
    moved |= (np.nan_to_num(record.values.get("nonfinite", 0 * update)) > 0).any(1)
    grads = np.nan_to_num(read.table(record, "grad_norm"))
    graded = np.nanmax(grads, axis=1) > 0
    seen = np.isfinite(record.values["grad_norm"]).any(1)
    matrix = np.array(read.meta(record, "ndim", 2)) >= 2
    learnt = trainable & np.array(read.meta(record, "numel", 1), float).astype(bool)
    still = learnt & ~moved
    yield from _unmoved(record, still & ~held, "not_in_optimizer")
    yield from _unmoved(record, still & held & ~seen, "no_gradient")
    zero = still & held & seen & ~graded
    yield from _unmoved(record, zero & matrix, "zero_gradient")
    if not _fades(record):  # else `vanishing` says why
        yield from _unmoved(record, still & held & graded & matrix, "unmoved")


_STILL = {
    "not_in_optimizer": (
        "trainable, but in no optimizer group: never moves",
        "the optimizer was made without it (a layer added later, or a sub-module left out)",
        "give the optimizer all of model.parameters(), or freeze it with requires_grad_(False)",
    ),
    "no_gradient": (
        "trainable, but no gradient ever reaches it",
        "the loss does not depend on it: a detach(), a no_grad block, an unused branch",
        "find where the graph is cut, or freeze it with requires_grad_(False)",
    ),
    "zero_gradient": (
        "its gradient is exactly 0 at every step",
        "its inputs are always 0, or all behind it is: dead units, zeros as initial weights",
        "look at its inputs; initialise at random (zeros only in the last layer of a branch)",
    ),
    "unmoved": (
        "gets a gradient but never moves",
        "a learning rate of 0 for its group, or steps below the precision of its dtype",
        "check the learning rate of its group; keep a float32 copy of half-precision weights",
    ),
}


def _unmoved(record: Record, which: Floats, rule: str) -> Iterator[Finding]:
    hit = np.flatnonzero(which)
    if not len(hit):
        return
    what, cause, fix = _STILL[rule]
    n = f"{len(hit)} parameter{'s' * (len(hit) != 1)}"
    yield Finding(
        rule,
        "sick" if rule == "zero_gradient" else "warn",
        read.names(record, hit),
        read.span(record),
        f"{n}: {what}",
        "exactly no change over all records",
        f"exact; {SAGEMAKER}, UnchangedTensor",
        cause,
        fix,
    )


def vanishing(run: Run) -> Iterator[Finding]:
    """Gradients that fade towards the input."""
    yield from _depth(run, vanish=True)


def exploding(run: Run) -> Iterator[Finding]:
    """Gradients that grow towards the input."""
    yield from _depth(run, vanish=False)


def _depth(run: Run, *, vanish: bool) -> Iterator[Finding]:
    record = read.params(run)
    which = read.matrices(record)
    grads = read.table(record, "grad_rms")[which][:, : max(read.MIN_RECORDS, len(record) // 3)]
    size = read.median(grads, axis=1)
    known = np.isfinite(size) & (size > 0)
    which, size = [i for i, k in zip(which, known, strict=True) if k], size[known]
    if len(which) < 3:
        raise read.Missing("fewer than 3 matrices with gradients")
    order = float(np.corrcoef(np.arange(len(size)), np.log(size))[0, 1]) if np.ptp(size) else 0.0
    ratio = float(size[0] / size[-1])
    first, last = record.names[which[0]], record.names[which[-1]]
    hit = ratio < 1e-3 and size[0] < 1e-4 and order > 0.6
    if not vanish:
        hit = ratio > 70 and order < -0.6 and read.improved(run) is not True
    severity = {True: "warn", False: "sick", None: "warn" if vanish else "info"}
    if not hit:
        return
    yield Finding(
        "vanishing" if vanish else "exploding",
        severity[read.improved(run)],
        (first, last),
        read.span(record, slice(0, grads.shape[1])),
        f"gradient RMS is {size[0]:.2g} in {first} and {size[-1]:.2g} in {last}: "
        f"first over last {ratio:.2g}",
        "first over last below 1e-3 with the first below 1e-4" if vanish else "above 70",
        AUTOTRAINER,
        "many saturating layers, small weights, or depth without skip connections"
        if vanish
        else "weights too large for the depth, or a recurrence that amplifies",
        "use ReLU-like units with He initialisation, norm layers, or skip connections"
        if vanish
        else "use smaller initial weights, norm layers, or clip gradients",
    )


def weight_decay(run: Run) -> Iterator[Finding]:
    """Weights that are decayed away faster than the loss can hold them."""
    if run.params is None and "weight_decay" not in run.info:
        raise read.Missing("no parameters")
    evidence = _decay_set(run)
    layers: tuple[str, ...] = ()
    if evidence is None and run.params is not None and len(run.params) >= read.MIN_RECORDS:
        evidence, layers = _shrunk(run, run.params)
    if evidence is None:
        return
    yield Finding(
        "weight_decay",
        "warn" if read.improved(run) else "sick",
        layers,
        (0, max(run.n_steps - 1, 0)),
        evidence,
        "1 % of the weight a step; or most matrices below 10 % of their first norm while the loss "
        "does not fall",
        "hookkit, measured; usual settings decay 0.05 % a step or less",
        "weight decay outweighs the gradient",
        "divide weight decay by 10 or more",
    )


def _decay_set(run: Run) -> str | None:
    """What the optimizer's settings take from each weight, each step."""
    pairs = zip(run.info.get("lr", ()), run.info.get("weight_decay", ()), strict=False)
    share = max((lr * decay for lr, decay in pairs), default=0.0)
    return f"learning rate × weight decay takes {share:.1%} a step" if share > 0.01 else None


def _shrunk(run: Run, record: Record) -> tuple[str | None, tuple[str, ...]]:
    which = read.matrices(record)
    norm = read.table(record, "weight_norm")[which]
    with np.errstate(all="ignore"):
        left = read.median(norm[:, -5:], axis=1) / norm[:, 0]
    hit = left < 0.1
    if not which or hit.mean() <= 0.5 or read.improved(run):
        return None, ()
    layers = read.names(record, [i for i, h in zip(which, hit, strict=True) if h])
    kept = float(read.median(left[hit]))
    return f"{hit.sum()} of {len(which)} matrices shrank to {kept:.1%} of their first norm", layers
