"""Rules on the optimizer's steps: learning rate, momentum, weight decay, and their direction.

The size of a step is the ratio of update to weight, `update_ratio`, of each matrix. A learning rate
is judged by the majority of matrices: one that moves fast or slowly may be meant to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hookkit.health import reading as read
from hookkit.health.loss_expectations import NEVER_BELOW_ZERO
from hookkit.health.loss_trend import end_level, rise_over_bound, start_level
from hookkit.health.rule import CHECKER, CS231N, TAYLOR, Hit, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Record

# TheDeepChecker: log10 of update:weight should be within -4 and -1; cs231n: about 1e-3
FAST, SLOW = 1e-1, 1e-4
# One step that changes half of the weights (measured), or replaces them
LEAP, ERASES = 0.5, 1.0
# 1 % of the weight in 1000 steps (hookkit, measured)
NEVER_MOVES = 1e-5
# An early update:weight above this is not slow: what broke at first, moves no more (measured)
LEAPT = 1e-2
# Adam's steps are about as large as the learning rate (Kingma & Ba 2015, 2.1); 3e-2: measured
ADAM_SHARE = 3e-2
# From here on each gradient is carried on for more than 100 steps
HIGH_MOMENTUM = 0.99
# Weight decay that takes 1 % a step; or weights below 10 % of their first norm (measured)
DECAY_PER_STEP, SHRUNK = 0.01, 0.1
# Of the bound in `loss_trend`: twice what steps reach that are too large (hookkit, measured)
UPHILL = 0.12


@rule(
    needs=("params",),
    threshold="above 1e-1 in most matrices (where the loss falls or is unknown: 1 in one step, "
    "which replaces the weights)",
    source=f"{CHECKER}: log10 within -4 and -1; {CS231N}: about 1e-3",
    cause="the learning rate is too high",
    fix="divide the learning rate by 10, or warm it up",
)
def lr_too_high(run: RunView) -> Iterator[Hit]:
    """Most matrices are rewritten faster than they can learn.

    What counts as fast depends on the loss: while it falls, large steps are often meant.
    """
    record, which, ratio = _update_ratios(run)
    early = _early(record, ratio)
    peak = np.nanmax(np.where(np.isfinite(ratio), ratio, -1.0), axis=1)
    erased = (peak > ERASES) & (len(which) > 1)
    if run.fails:
        fast = (early > FAST) | (peak > LEAP)
    elif run.learns:  # a single matrix, such as a new head on a frozen body, may move that far
        fast = erased | ((early > FAST / 2) & (peak > LEAP) & (len(which) > 1))
    else:
        fast = erased | (read.median(ratio, axis=1) > FAST)
    if fast.mean() <= 0.5:
        return
    layers = read.names(record, [i for i, f in zip(which, fast, strict=True) if f])
    what = f"update:weight of {fast.sum()} of {len(which)} matrices is {read.median(early):.2g} "
    what += f"early and up to {peak.max():.2g}" + " while the loss does not fall" * run.fails
    hit = Hit("error" if run.fails else "warning", layers, read.span(record), what)
    yield hit._replace(of=_TOO_HIGH_OR_UPHILL) if run.fails else hit


_TOO_HIGH_OR_UPHILL = lr_too_high.but(
    cause="the learning rate is too high (or the steps go uphill: a wrong sign)"
)


@rule(
    needs=("params",),
    threshold="below 1e-4 in most matrices; where the loss proves nothing, a warning if it is "
    "below 1e-5 in every record: 1 % of the weight in 1000 steps",
    source=f"{CHECKER}: log10 within -4 and -1; {CS231N}: about 1e-3",
    cause="the learning rate is too low",
    fix="multiply the learning rate by 10 (or nothing, if this is fine-tuning and it is meant)",
)
def lr_too_low(run: RunView) -> Iterator[Hit]:
    """Most matrices hardly move; a warning only if the loss does not fall either."""
    record, which, ratio = _update_ratios(run)
    whole = read.median(ratio, axis=1)
    slow = (whole < SLOW) & (not read.trained_in_turns(run.recorded))
    broke = (_early(record, ratio) > LEAPT).mean() > 0.5
    if run.learns or broke or read.gradients_fade(record):
        return
    if run.fails and (share := _share_of_rate(run, record, which)) < ADAM_SHARE:
        yield _held_by_eps(run, record, which, share)
        return
    if slow.mean() <= 0.5:
        return
    never = (np.nanmax(np.nan_to_num(ratio), axis=1) < NEVER_MOVES).mean() > 0.5
    unproved = run.learns is None and not never
    what = f"update:weight of {slow.sum()} of {len(which)} matrices is {read.median(whole):.2g}"
    yield Hit(
        "note" if unproved or _falls_slowly(run) else "warning",
        read.names(record, [i for i, s in zip(which, slow, strict=True) if s]),
        read.span(record),
        what + ("" if run.learns is None else " and the loss hardly falls"),
        of=lr_too_low.but(cause=_why_slow(record, whole)),
    )


def _why_slow(record: Record, whole: Floats) -> str:
    rounded = ", or most steps are below the precision of the weights" * bool((whole == 0).any())
    clipped = ", or gradients are clipped to almost nothing" * _clipped(record)
    return f"{lr_too_low.cause}{rounded}{clipped}"


def _falls_slowly(run: RunView) -> bool:
    losses = run.recorded.losses
    return losses is not None and bool(np.isfinite(losses).any()) and run.falls_slowly


def _share_of_rate(run: RunView, record: Record, which: list[int]) -> float:
    """Adam's late steps as a share of its learning rate, by element; inf for other optimizers."""
    rates = [lr for lr in run.info.get("lr", ()) if lr > 0]
    if run.info.get("optimizer") not in ("Adam", "AdamW", "NAdam") or not rates:
        return float("inf")
    size = np.sqrt(np.array(read.meta(record, "numel", np.nan), float)[which])
    late = read.table(record, "update_norm")[which][:, -read.MIN_RECORDS :]
    return float(read.median(read.median(late, axis=1) / size)) / float(min(rates))


def _held_by_eps(run: RunView, record: Record, which: list[int], share: float) -> Hit:
    what = f"{run.info['optimizer']} moves each weight by {share:.2g} of its learning rate a step, "
    what += "and the loss hardly falls"
    steps = read.span(record, slice(-read.MIN_RECORDS, None))
    return Hit("warning", read.names(record, which), steps, what, of=_EPS)


_EPS = lr_too_low.but(
    threshold="below 3e-2 in the last records",
    source="Kingma & Ba 2015, Adam, 2.1: its steps are about as large as the learning rate; "
    "3e-2: hookkit, measured",
    cause="an eps that is large against the gradients (eps itself, gradients clipped to almost "
    "nothing, or a loss that is scaled down)",
    fix="use Adam's default eps of 1e-8, or scale the loss up",
)


def _clipped(record: Record) -> bool:
    """Whether the norm of all gradients is the same at every step, and small."""
    norms = np.sqrt(np.nansum(np.asarray(record.values.get("grad_norm", [])) ** 2, axis=0))
    norms = norms[np.isfinite(norms) & (norms > 0)] if norms.ndim else norms.reshape(0)
    return bool(len(norms) and np.ptp(norms) < 1e-3 * norms[0] and norms[0] < 1e-2)


def _early(record: Record, ratio: Floats) -> Floats:
    """Each matrix's median over the first 20 steps, of as many records as they have."""
    first = record.steps < record.steps[0] + 20
    return np.asarray(read.median(ratio[:, first], axis=1), np.float64)


def _update_ratios(run: RunView) -> tuple[Record, list[int], Floats]:
    """update:weight of the matrices that did not begin at 0 and that a gradient moves."""
    record = run.params
    if run.info.get("optimizer") == "LBFGS":
        raise read.Missing("LBFGS searches its own step")
    ratio = read.table(record, "update_ratio")
    norm = read.table(record, "weight_norm")
    ratio = np.where(norm > 0, ratio, np.nan)  # from exactly 0 any step is infinite
    by_decay = read.has_no_gradient(record)
    moving = (np.nanmax(np.nan_to_num(ratio), axis=1) > 0) & ~by_decay
    which = [i for i in read.matrices(record) if moving[i] and norm[i, 0] != 0]
    if not which:
        raise read.Missing("no matrix that began away from 0 moves")
    return record, which, ratio[which]


@rule(
    threshold="above 0.99, where the loss does not fall",
    source="the geometric series: steps that agree add up to 1 / (1 - momentum) times the learning "
    "rate; Sutskever et al. 2013: up to 0.999, on a schedule that begins at 0.5",
    cause="a momentum that is too high for this learning rate, or for so short a run",
    fix="use momentum 0.9, or divide the learning rate by as much as the series adds",
)
def momentum(run: RunView) -> Iterator[Hit]:
    """A momentum so close to 1 that steps go on for hundreds more, while the loss does not fall."""
    if "momentum" not in run.info:
        raise read.Missing("momentum unknown")
    most = max(run.info["momentum"], default=0.0)
    if HIGH_MOMENTUM < most < 1 and run.fails:
        what = f"momentum {most:g} carries each gradient on for {1 / (1 - most):.0f} steps (the "
        what += f"run has {run.recorded.n_steps}), and the loss does not fall"
        yield Hit("warning", (), run.all_steps, what)


@rule(
    threshold="1 % of the weight a step; or most matrices below 10 % of their first norm while the "
    "loss does not fall",
    source="hookkit, measured; usual settings decay 0.05 % a step or less",
    cause="weight decay outweighs the gradient",
    fix="divide weight decay by 10 or more",
)
def weight_decay(run: RunView) -> Iterator[Hit]:
    """Weights that decay faster than the gradient can hold them."""
    params = run.recorded.params
    if params is None and "weight_decay" not in run.info:
        raise read.Missing("no parameters")
    layers: tuple[str, ...] = ()
    evidence = _decay_by_settings(run)
    if evidence is None and params is not None and len(params) >= read.MIN_RECORDS:
        evidence, layers = _shrunk(run, params)
    if evidence is not None:
        yield Hit("warning" if run.learns else "error", layers, run.all_steps, evidence)


def _decay_by_settings(run: RunView) -> str | None:
    """What the optimizer's settings take from each weight, each step."""
    pairs = zip(run.info.get("lr", ()), run.info.get("weight_decay", ()), strict=False)
    share = max((lr * decay for lr, decay in pairs), default=0.0)
    takes = f"learning rate × weight decay takes {share:.1%} a step"
    return takes if share > DECAY_PER_STEP else None


def _shrunk(run: RunView, record: Record) -> tuple[str | None, tuple[str, ...]]:
    """Evidence and names of matrices that shrank to nothing although a gradient reaches them."""
    no_gradient = read.has_no_gradient(record)  # `zero_gradient` reports these
    which = [i for i in read.matrices(record) if not no_gradient[i]]
    norm = read.table(record, "weight_norm")[which]
    with np.errstate(all="ignore"):
        share: npt.NDArray[np.float64] = read.median(norm[:, -5:], axis=1) / norm[:, 0]
    hit = share < SHRUNK
    if not which or hit.mean() <= 0.5 or run.learns:
        return None, ()
    layers = read.names(record, [i for i, h in zip(which, hit, strict=True) if h])
    rest = float(read.median(share[hit]))
    return f"{hit.sum()} of {len(which)} matrices shrank to {rest:.1%} of their first norm", layers


@rule(
    threshold="over 12 % of the sum of |gradient| × |update|, twice what steps reach that are too "
    "large and go to and fro",
    source=f"{TAYLOR}; 12 %: hookkit, measured",
    cause="the steps go uphill: maximize=True, or a wrong sign",
    fix="minimise: remove maximize=True, or turn the sign of what backward() is called on",
)
def ascent(run: RunView) -> Iterator[Hit]:
    """A loss that the steps push up, as far as their size and the gradients' explains.

    What they can do, and how much of it steps that go to and fro use, is in `loss_trend`.
    """
    maximized = bool(run.info.get("maximize")) and run.loss_name in NEVER_BELOW_ZERO
    record = None if maximized else run.params
    series = run.losses_of(20)
    if run.improved or run.need_not_fall:
        return
    if record is not None:
        share = rise_over_bound(record, series)
        what = (
            f"the loss rises steadily, by {share or 0:.0%} of all that steps and gradients can do"
        )
    else:
        share = 1.0 if end_level(series) > start_level(series) else None
        what = "the loss rises, and the optimizer was made with maximize=True"
    if share is not None and UPHILL < share < 2:
        yield Hit("error", (), run.all_steps, what)
