"""Rules on steps and gradients: learning rate, weight decay, gradients that vanish or explode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding
from hookkit.records import Floats, Record, Run

CHECKER = "Ben Braiek & Khomh 2022, TheDeepChecker (arXiv 2204.00694)"
AUTOTRAINER = "Zhang et al., AUTOTRAINER, ICSE 2021"
CS231N = "cs231n, Neural Networks Part 3: about 1e-3"


def lr_too_high(run: Run) -> Iterator[Finding]:
    """Most matrices are rewritten faster than they can learn."""
    record, which, ratio = _ratios(run)
    early = _early(record, ratio)
    peak = np.nanmax(np.where(np.isfinite(ratio), ratio, -1.0), axis=1)
    learns = loss_expectations.learns(run)
    lost = (peak > 1) & (len(which) > 1)  # one step larger than the weights: nothing is left
    fast = (early > 0.1) | (peak > 0.5)
    if learns:  # something is learnt: only what cannot be meant is an alarm
        fast = lost | ((early > 0.05) & (peak > 0.5) & (len(which) > 1))  # a lone head may leap
    elif learns is None:
        fast = lost | (read.median(ratio, axis=1) > 0.1)
    if fast.mean() <= 0.5:
        return
    yield Finding(
        "lr_too_high",
        "error" if learns is False else "warning",
        read.names(record, [i for i, f in zip(which, fast, strict=True) if f]),
        read.span(record),
        f"update:weight of {fast.sum()} of {len(which)} matrices is {read.median(early):.2g} early "
        f"and up to {peak.max():.2g}" + (" while the loss does not fall" * (learns is False)),
        "above 1e-1 in most matrices (where the loss falls or is unknown: 1 in one step, which "
        "leaves nothing of the weights)",
        f"{CHECKER}: log10 within -4 and -1; {CS231N}",
        "the learning rate is too high"
        + (" (or the loss is climbed: a wrong sign)" if learns is False else ""),
        "divide the learning rate by 10, or warm it up",
    )


def _early(record: Record, ratio: Floats) -> Floats:
    """Each matrix's median over the first 20 steps, of as many records as they have."""
    first = record.steps < record.steps[0] + 20
    return np.asarray(read.median(ratio[:, first], axis=1), np.float64)


def momentum(run: Run) -> Iterator[Finding]:
    """A momentum so close to 1 that steps go on for hundreds more, while the loss does not fall."""
    if "momentum" not in run.info:
        raise read.Missing("momentum unknown")
    most = max(run.info["momentum"], default=0.0)
    if not 0.99 < most < 1 or loss_expectations.learns(run) is not False:
        return
    yield Finding(
        "momentum",
        "warning",
        (),
        (0, max(run.n_steps - 1, 0)),
        f"momentum {most:g} carries each gradient on for {1 / (1 - most):.0f} steps (the run has "
        f"{run.n_steps}), and the loss does not fall",
        "above 0.99, where the loss does not fall",
        "the geometric series: steps that agree add up to 1 / (1 - momentum) times the learning "
        "rate; Sutskever et al. 2013: up to 0.999, on a schedule that begins at 0.5",
        "a momentum that is too high for this learning rate, or for so short a run",
        "use momentum 0.9, or divide the learning rate by as much as the series adds",
    )


def lr_too_low(run: Run) -> Iterator[Finding]:
    """Most matrices hardly move; an alarm only when the loss does not fall either."""
    record, which, ratio = _ratios(run)
    whole = read.median(ratio, axis=1)
    slow = (whole < 1e-4) & (not read.in_turns(run))
    early = _early(record, ratio)  # what leapt at first is not slow: it broke
    learns = loss_expectations.learns(run)
    if learns or (early > 1e-2).mean() > 0.5 or fades(record):
        return
    if learns is False and (share := _share_of_rate(run, record, which)) < 0.03:
        yield _held_by_eps(run, record, which, share)
        return
    if slow.mean() <= 0.5:
        return
    never = (np.nanmax(np.nan_to_num(ratio), axis=1) < 1e-5).mean() > 0.5
    yield Finding(
        "lr_too_low",
        "note" if (learns is None and not never) or _creeps(run) else "warning",
        read.names(record, [i for i, s in zip(which, slow, strict=True) if s]),
        read.span(record),
        f"update:weight of {slow.sum()} of {len(which)} matrices is {read.median(whole):.2g}"
        + ("" if learns is None else " and the loss hardly falls"),
        "below 1e-4 in most matrices; where the loss says nothing, an alarm if it is below 1e-5 in "
        "every record: 1 % of the weight in 1000 steps",
        f"{CHECKER}: log10 within -4 and -1; {CS231N}",
        "the learning rate is too low"
        + (", or most steps are below the precision of the weights" * bool((whole == 0).any()))
        + (", or gradients are clipped to almost nothing" * _clipped(record)),
        "multiply the learning rate by 10 (nothing, if this is fine-tuning and it is meant)",
    )


def _creeps(run: Run) -> bool:
    return run.losses is not None and bool(np.isfinite(run.losses).any()) and read.creeps(run)


def _share_of_rate(run: Run, record: Record, which: list[int]) -> float:
    """Adam's late steps as a share of its learning rate, by element; inf of other optimizers."""
    rates = [lr for lr in run.info.get("lr", ()) if lr > 0]
    if run.info.get("optimizer") not in ("Adam", "AdamW", "NAdam") or not rates:
        return float("inf")
    size = np.sqrt(np.array(read.meta(record, "numel", np.nan), float)[which])
    step = read.median(read.table(record, "update_norm")[which][:, -read.MIN_RECORDS :], axis=1)
    return float(read.median(step / size)) / float(min(rates))


def _held_by_eps(run: Run, record: Record, which: list[int], share: float) -> Finding:
    optimizer = run.info["optimizer"]
    return Finding(
        "lr_too_low",
        "warning",
        read.names(record, which),
        read.span(record, slice(-read.MIN_RECORDS, None)),
        f"{optimizer} moves each weight by {share:.2g} of its learning rate a step, and the loss "
        "hardly falls",
        "below 3e-2 in the last records",
        "Kingma & Ba 2015, Adam, 2.1: its steps are about as large as the learning rate; "
        "3e-2: hookkit, measured",
        "an eps that is large against the gradients (eps itself, gradients clipped to almost "
        "nothing, or a loss that is scaled down)",
        "use Adam's default eps of 1e-8, or scale the loss up",
    )


def _clipped(record: Record) -> bool:
    """Whether the norm of all gradients is the same at every step, and small."""
    norms = np.sqrt(np.nansum(np.asarray(record.values.get("grad_norm", [])) ** 2, axis=0))
    norms = norms[np.isfinite(norms) & (norms > 0)] if norms.ndim else norms.reshape(0)
    return bool(len(norms) and np.ptp(norms) < 1e-3 * norms[0] and norms[0] < 1e-2)


def _ratios(run: Run) -> tuple[Record, list[int], Floats]:
    """update:weight of matrices that have weights, from the first record on, and do move."""
    record = read.params(run)
    if run.info.get("optimizer") == "LBFGS":
        raise read.Missing("LBFGS searches its own step")
    ratio = read.table(record, "update_ratio")
    norm = read.table(record, "weight_norm")
    ratio = np.where(norm > 0, ratio, np.nan)  # from exactly 0 any step is infinite
    moving = (np.nanmax(np.nan_to_num(ratio), axis=1) > 0) & ~_without_gradient(record)
    which = [i for i in read.matrices(record) if moving[i] and norm[i, 0] != 0]
    if not which:
        raise read.Missing("no matrix that began away from 0 moves")
    return record, which, ratio[which]


def _without_gradient(record: Record) -> npt.NDArray[np.bool_]:
    """Whether each gradient is known, and exactly 0 at every record: what moves it is decay."""
    grads = read.table(record, "grad_norm")
    return np.asarray(np.isfinite(grads).any(axis=1) & (np.nan_to_num(grads) == 0).all(axis=1))


def fades(record: Record) -> bool:
    """Whether the first matrix' gradients vanish against the last one's: then none can move."""
    which = read.matrices(record)
    if len(which) < 3 or "grad_rms" not in record.values:
        return False
    size = read.median(record.values["grad_rms"][which], axis=1)
    return bool(size[0] < 1e-4 and size[0] < 1e-3 * size[-1])


def vanishing(run: Run) -> Iterator[Finding]:
    """Gradients that fade towards the input."""
    yield from _depth(run, vanish=True)


def exploding(run: Run) -> Iterator[Finding]:
    """Gradients that grow towards the input."""
    yield from _depth(run, vanish=False)


def _depth(run: Run, *, vanish: bool) -> Iterator[Finding]:
    record = read.params(run)
    began = read.table(record, "weight_norm")[:, 0]  # at 0 it holds gradients back, by design
    which = [i for i in read.matrices(record) if began[i] != 0]
    grads = read.table(record, "grad_rms")[which][:, : max(read.MIN_RECORDS, len(record) // 3)]
    size = read.median(grads, axis=1)
    known = np.isfinite(size) & (size > 0)
    which, size = [i for i, k in zip(which, known, strict=True) if k], size[known]
    if len(which) < 3:
        raise read.Missing("fewer than 3 matrices with gradients")
    order = float(np.corrcoef(np.arange(len(size)), np.log(size))[0, 1]) if np.ptp(size) else 0.0
    ratio = float(size[0] / size[-1])
    first, last = record.names[which[0]], record.names[which[-1]]
    # not the first matrix alone: one channel before a norm has no gradient either
    shared = float(np.median(size[: max(1, len(size) // 2)]) / size[-1]) < 1e-3**0.5
    hit = ratio < 1e-3 and size[0] < 1e-4 and order > 0.6 and shared
    if hit and read.input_size(record, first.rpartition(".")[0]) < read.FAINT_INPUT:
        return  # the errors arrive, and what they are multiplied by is small: `input_scale`
    if not vanish:
        hit = ratio > 70 and order < -0.6 and loss_expectations.learns(run) is not True
    excused = read.improved(run) is False and loss_expectations.learns(run) is None
    several = vanish and excused  # actor and critic, both players: no depth of one net
    severity = {
        True: "warning",
        False: "error",
        None: "note" if several or not vanish else "warning",
    }
    if not hit:
        return
    yield Finding(
        "vanishing" if vanish else "exploding",
        severity[loss_expectations.learns(run)],
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
        "warning" if loss_expectations.learns(run) else "error",
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
    alone = _without_gradient(record)  # the loss does not hold them at all: `zero_gradient`
    which = [i for i in read.matrices(record) if not alone[i]]
    norm = read.table(record, "weight_norm")[which]
    with np.errstate(all="ignore"):
        left = read.median(norm[:, -5:], axis=1) / norm[:, 0]
    hit = left < 0.1
    if not which or hit.mean() <= 0.5 or loss_expectations.learns(run):
        return None, ()
    layers = read.names(record, [i for i, h in zip(which, hit, strict=True) if h])
    kept = float(read.median(left[hit]))
    return f"{hit.sum()} of {len(which)} matrices shrank to {kept:.1%} of their first norm", layers
