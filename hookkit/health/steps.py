"""Rules on the optimizer's steps: learning rate, momentum, weight decay, and their direction.

The size of a step is the ratio of update to weight, `update_ratio`, of each matrix. A learning rate
is judged by the majority of matrices: one that moves fast or slowly may be meant to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import CHECKER, CS231N, TAYLOR, Finding, rule
from hookkit.health.loss_expectations import NEVER_BELOW_ZERO, trained_in_turns
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Ints, Record

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
# Of the bound in `reading`: twice what steps reach that are too large (hookkit, measured)
UPHILL = 0.12


@rule(
    needs=("params",),
    threshold="above 0.1 in most matrices",
    source=f"{CHECKER}: log10 within -4 and -1; {CS231N}: about 1e-3",
    cause="the learning rate is too high",
    fix="divide the learning rate by 10, or warm it up: torch.optim.lr_scheduler.LinearLR(opt)",
)
def lr_too_high(run: RunView) -> Iterator[Finding]:
    """Most matrices are rewritten faster than they can learn.

    What counts as fast depends on the loss: while it falls, large steps are often meant.
    """
    record, which, ratio = _update_ratios(run)
    lines = [line for line in _too_fast(run, record, ratio) if line[0].any()]
    fast = np.any([hit for hit, *_ in lines] or [np.zeros(len(which), bool)], axis=0)
    if fast.mean() <= 0.5:
        return
    seen = " and ".join(f"{size} (in {hit.sum()})" for hit, size, _ in lines)
    what = f"update:weight of {fast.sum()} of {len(which)} matrices is {seen}"
    what += ", while the loss does not fall" * run.fails
    says, severity = (_TOO_HIGH_OR_UPHILL, "error") if run.fails else (lr_too_high, "warning")
    least = ", or ".join(line for *_, line in lines)
    published = [says.source] if f"above {FAST:g} " in least else []
    measured = ["sizes of one step: hookkit, measured"] if "one step" in least else []
    source = "; ".join(published + measured)
    here = says.but(threshold=f"{least}, in most matrices", source=source)
    yield here.found(severity, what, *read.where(record, which[fast]))


def _too_fast(run: RunView, record: Record, ratio: Floats) -> list[tuple[Bools, str, str]]:
    """Each line that matrices may have crossed: which did, how large it was there, and the line."""
    early, whole = _early(record, ratio), read.median(ratio, axis=1)
    peak = np.nanmax(np.where(np.isfinite(ratio), ratio, -1.0), axis=1)
    soon, once = "in the first 20 steps", "in one step"

    def crossed(size: Floats, least: float, when: str) -> tuple[Bools, str, str]:
        hit = size > least
        return hit, f"{read.median(size[hit]):.3g} {when}", f"above {least:g} {when}"

    if run.fails:
        return [crossed(early, FAST, soon), crossed(peak, LEAP, once)]
    # a single matrix, such as a new head on a frozen body, may move that far
    erased = [crossed(peak, ERASES, once)] if len(ratio) > 1 else []
    if not run.learns:
        return [*erased, crossed(whole, FAST, "a step, by the median")]
    leaps = (early > FAST / 2) & (peak > LEAP) & (peak <= ERASES)
    sizes = [f"{read.median(size[leaps]):.3g}" for size in (early, peak)]
    what = f"{sizes[0]} {soon} and {sizes[1]} {once}"
    line = f"above {FAST / 2:g} {soon} and above {LEAP:g} {once}"
    return [*erased, (leaps, what, line)] if len(ratio) > 1 else []


_TOO_HIGH_OR_UPHILL = lr_too_high.but(
    cause="the learning rate is too high (or the steps go uphill: a wrong sign)"
)


@rule(
    needs=("params",),
    threshold="below 1e-4 in most matrices",
    source=f"{CHECKER}: log10 within -4 and -1; {CS231N}: about 1e-3",
    cause="the learning rate is too low",
    fix="multiply the learning rate by 10 (or nothing, if this is fine-tuning and it is meant)",
)
def lr_too_low(run: RunView) -> Iterator[Finding]:
    """Most matrices hardly move; a warning only if the loss does not fall either."""
    record, which, ratio = _update_ratios(run)
    whole = read.median(ratio, axis=1)
    slow = (whole < SLOW) & (not trained_in_turns(record))
    broke = (_early(record, ratio) > LEAPT).mean() > 0.5
    if run.learns or broke or read.gradients_fade(record):
        return
    if run.fails and (share := _share_of_rate(run, record, which)) < ADAM_SHARE:
        what = f"{run.info['optimizer']} moves each weight by {share:.2g} of its learning rate a "
        what += "step, and the loss hardly falls"
        window = slice(-read.MIN_RECORDS, None)
        yield _EPS.found("warning", what, *read.where(record, which, window))
        return
    if slow.mean() <= 0.5:
        return
    most = np.nan_to_num(ratio).max(axis=1)
    never = (most < NEVER_MOVES).mean() > 0.5
    cause = lr_too_low.cause
    cause += ", or most steps are below the precision of the weights" * bool((whole == 0).any())
    cause += ", or gradients are clipped to almost nothing" * _clipped(record)
    what = f"update:weight of {slow.sum()} of {len(which)} matrices is "
    where = read.where(record, which[slow])
    if run.learns is None and never:
        severity = "note" if run.falls_slowly else "warning"
        what += f"at most {read.median(most[most < NEVER_MOVES]):.2g}"
        yield _NEVER_MOVES.but(cause=cause).found(severity, what, *where)
    else:
        severity = "note" if run.learns is None or run.falls_slowly else "warning"
        what += f"{read.median(whole[slow]):.2g}"
        what += "" if run.learns is None else ", and the loss hardly falls"
        yield lr_too_low.but(cause=cause).found(severity, what, *where)


_NEVER_MOVES = lr_too_low.but(
    threshold="below 1e-5 in every record of most matrices: 1 % of the weight in 1000 steps",
    source="hookkit, measured",
)


def _share_of_rate(run: RunView, record: Record, which: Ints) -> float:
    """Adam's late steps as a share of its learning rate, by element; inf for other optimizers."""
    rates = [lr for lr in run.info.get("lr", ()) if lr > 0]
    if run.info.get("optimizer") not in ("Adam", "AdamW", "NAdam") or not rates:
        return float("inf")
    size = np.sqrt(read.meta(record, "numel", np.nan)[which])
    late = read.table(record, "update_norm")[which][:, -read.MIN_RECORDS :]
    return float(read.median(read.median(late, axis=1) / size)) / float(min(rates))


_EPS = lr_too_low.but(
    threshold="below 3e-2 in the last records",
    source="Kingma & Ba 2015, Adam, 2.1: its steps are about as large as the learning rate; "
    "3e-2: hookkit, measured",
    cause="an eps that is large against the gradients (eps itself, gradients clipped to almost "
    "nothing, or a loss that is scaled down)",
    fix="use Adam's default, torch.optim.Adam(model.parameters(), eps=1e-8), or scale the loss up",
)


def _clipped(record: Record) -> bool:
    """Whether the norm of all gradients is the same at every step, and small."""
    norms = np.sqrt(np.nansum(read.table(record, "grad_norm") ** 2, axis=0))
    norms = norms[np.isfinite(norms) & (norms > 0)]
    return bool(len(norms) and np.ptp(norms) < 1e-3 * norms[0] and norms[0] < 1e-2)


def _early(record: Record, ratio: Floats) -> Floats:
    """Each matrix's median over the first 20 steps, of as many records as they have."""
    first = record.steps < record.steps[0] + 20
    return np.asarray(read.median(ratio[:, first], axis=1), np.float64)


def _update_ratios(run: RunView) -> tuple[Record, Ints, Floats]:
    """update:weight of the matrices that did not begin at 0 and that a gradient moves."""
    record = run.params
    if run.info.get("optimizer") == "LBFGS":
        raise read.Missing("LBFGS searches its own step")
    ratio = read.table(record, "update_ratio")
    norm = read.table(record, "weight_norm")
    ratio = np.where(norm > 0, ratio, np.nan)  # from exactly 0 any step is infinite
    by_decay = read.has_no_gradient(record)
    moving = (np.nan_to_num(ratio).max(axis=1) > 0) & ~by_decay & (norm[:, 0] != 0)
    which = read.matrices(record)
    which = which[moving[which]]
    if not len(which):
        raise read.Missing("no matrix that began away from 0 moves")
    return record, which, ratio[which]


@rule(
    threshold="above 0.99, where the loss does not fall",
    source="the geometric series: steps that agree add up to 1 / (1 - momentum) times the learning "
    "rate; Sutskever et al. 2013: up to 0.999, on a schedule that begins at 0.5",
    cause="a momentum that is too high for this learning rate, or for so short a run",
    fix="use momentum=0.9 (as in torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)), or "
    "divide the learning rate by as much as the series adds",
)
def momentum(run: RunView) -> Iterator[Finding]:
    """A momentum so close to 1 that steps go on for hundreds more, while the loss does not fall."""
    if "momentum" not in run.info:
        raise read.Missing("momentum unknown")
    most = max(run.info["momentum"], default=0.0)
    if HIGH_MOMENTUM < most < 1 and run.fails:
        what = f"momentum {most:g} carries each gradient on for {1 / (1 - most):.0f} steps (the "
        what += f"run has {run.recorded.n_steps}), and the loss does not fall"
        yield momentum.found("warning", what, (), run.all_steps)


@rule(
    threshold="over 1 % of the weight a step",
    source="hookkit, measured; usual settings decay 0.05 % a step or less",
    cause="weight decay outweighs the gradient",
    fix="divide the optimizer's weight_decay by 10 or more",
)
def weight_decay(run: RunView) -> Iterator[Finding]:
    """Weights that decay faster than the gradient can hold them."""
    params = run.recorded.params
    if params is None and "weight_decay" not in run.info:
        raise read.Missing("no parameters")
    pairs = zip(run.info.get("lr", ()), run.info.get("weight_decay", ()), strict=False)
    share = max((lr * decay for lr, decay in pairs), default=0.0)
    if share > DECAY_PER_STEP:
        what = f"learning rate × weight decay takes {read.percent(share)} of each weight a step"
        severity = "warning" if run.learns else "error"
        yield weight_decay.found(severity, what, (), run.all_steps)
    elif params is not None and len(params) >= read.MIN_RECORDS:
        which = read.matrices(params)
        which = which[~read.has_no_gradient(params)[which]]  # `zero_gradient` reports those
        norm = read.table(params, "weight_norm")[which]
        left = read.median(norm[:, -5:], axis=1) / norm[:, 0]
        hit = left < SHRUNK
        if len(which) and hit.mean() > 0.5 and not run.learns:
            what = f"{hit.sum()} of {len(which)} matrices shrank to "
            what += f"{read.percent(read.median(left[hit]))} of their first norm"
            layers, _ = read.where(params, which[hit])
            yield _SHRANK.found("error", what, layers, run.all_steps)


_SHRANK = weight_decay.but(
    threshold="most matrices below 10 % of their first norm, and no loss that falls",
    source="hookkit, measured",
)


@rule(
    threshold="over 12 % of the sum of |gradient| × |update|, twice what steps reach that are too "
    "large and go to and fro",
    source=f"{TAYLOR}; 12 %: hookkit, measured",
    cause="the steps go uphill: maximize=True, or a wrong sign",
    fix="minimise: remove maximize=True, or turn the sign of what loss.backward() is called on",
)
def ascent(run: RunView) -> Iterator[Finding]:
    """A loss that the steps push up, as far as their size and the gradients' explains.

    What they can do, and how much of it steps that go to and fro use, is in `reading`.
    """
    maximized = bool(run.info.get("maximize")) and run.loss_name in NEVER_BELOW_ZERO
    record = None if maximized else run.params
    series = run.losses_of(20)
    if run.improved or run.need_not_fall:
        return
    start, end = read.start_level(series), read.end_level(series)
    if record is None and end > start:
        what = f"the loss rises from {start:.3g} to {end:.3g}, and the optimizer was made with "
        yield _MAXIMIZED.found("error", f"{what}maximize=True", (), run.all_steps)
    share = None if record is None else read.rise_over_bound(record, series)
    if share is not None and UPHILL < share < 2:
        what = f"the loss rises steadily, by {share:.0%} of all that steps and gradients can do"
        yield ascent.found("error", what, (), run.all_steps)


_MAXIMIZED = ascent.but(
    threshold="any rise, under maximize=True and with a loss that is to fall",
    source="PyTorch's documentation of optimizers: maximize turns the direction of the steps",
    cause="the optimizer maximises the loss",
    fix="make the optimizer without maximize=True",
)
