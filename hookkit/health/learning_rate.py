"""Rules on the learning rate: steps that are too large, or too small, for the weights they move.

The size of a step is the ratio of update to weight, `update_ratio`, of each matrix. A learning rate
is judged by the majority of the matrices that share it: one that moves fast or slowly may be meant
to. How large steps are is in `step_sizes`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import CHECKER, CS231N, Finding, rule
from hookkit.health.layer_order import gradients_fade
from hookkit.health.loss_expectations import asks, trained_in_turns
from hookkit.health.reading import Bools
from hookkit.health.run_view import ENOUGH_LOSSES, RunView
from hookkit.health.step_sizes import (
    BLOWN_UP,
    LEAP,
    UNUSUAL_GAIN,
    blown_up,
    by_rate,
    early_of,
    growth,
    largest,
    last_gain,
    late_share,
    mean_step,
    n_steps,
    rate_gone,
    share_of_rate,
    update_ratios,
)
from hookkit.records import Floats, Ints, Record

# TheDeepChecker: log10 of update:weight should be within -4 and -1; cs231n: about 1e-3
FAST, SLOW, USUAL = 1e-1, 1e-4, 1e-3
# Halfway between SLOW and USUAL on a logarithmic axis: too slow where the loss does not fall
TOO_SLOW = 3e-4
# One step that replaces the weights
ERASES = 1.0
# The same of optimizers whose first steps are no larger than later ones, where the loss falls and
# much of it is left: healthy trainings reach 0.14 (hookkit, measured)
FAR_STEP = 0.3
# The largest gradient over the first, and over 95 % of them: in healthy trainings 6.6 at most
LEAPS, USUAL_SHARE = 25, 0.95
# The same of the loss: below it, a gradient that leaps in a recurrence did no harm (measured)
FELT = 2
# Weights that doubled are further from where they began than 0 is
DOUBLED = 2.0
# What all steps of a run move of a weight together, and one in the mean: less cannot have taught it
# much, where 0.3 of the loss is left. Healthy trainings with so much left reach 0.42; cut to 60
# steps, no more of 330 are alarmed than without these lines (measured)
SHORT_PATH, SHORT_STEP = 0.2, 1e-3
# Half of the run or more without a rate to speak of (hookkit, measured)
HALF_OF_RUN = 0.5
# 1 % of the weight in 1000 steps (hookkit, measured)
NEVER_MOVES = 1e-5
# An early update:weight above this is not slow: what broke at first, moves no more (measured)
LEAPT = 1e-2
# The size of steps over what they are while gradients agree; of noise 0.23 is left. In the later
# half of healthy trainings with small steps it is 0.40 at most (hookkit, measured).
AGREE = 0.6
# The smallest usual momentum: below it, what noise leaves is a larger share
USUAL_MOMENTUM = 0.8
# Above this, of the loss and of the weights' steps, agreeing steps are none too small (measured)
AGREEING_SLOW = 1.5e-3
# Adam's steps are about as large as the learning rate (Kingma & Ba 2015, 2.1); 3e-2: measured
ADAM_SHARE = 3e-2


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
    record, which, ratio = update_ratios(run)
    groups = by_rate(record, which)
    # one matrix is no majority, where others have rates of their own
    large = [own for own in groups if own.sum() > 1] or groups
    found = [f for own in large for f in _fast_group(run, record, which[own], ratio[own])]
    yield from found or _leaps(run, record)


def _leaps(run: RunView, record: Record) -> Iterator[Finding]:
    """Gradients that are far larger for some steps than at first, and than in all others.

    A step went so far that those after it had to lead back; or a recurrence amplified a batch.
    """
    norms, losses = read.known(run.grad_norms[0]), run.recorded.losses
    if len(norms) < ENOUGH_LOSSES or not norms[0] > 0:
        return
    if losses is not None and read.stops_being_a_number(losses):
        return  # what is not finite may have come first: `non_finite` says
    if (times := _leap(norms)) > LEAPS:
        recurs = read.are(record.types, read.RECURRENT).any()
        what = f"the gradient norm leaps to {times:.3g} times its first value and its 95th "
        what += "percentile, whichever is larger"
        harmless = recurs and losses is not None and _leap(read.known(losses)) < FELT
        severity = "note" if run.excused or harmless else "warning"
        yield (_AMPLIFIES if recurs else _LEAPS).found(severity, what, (), run.all_steps)


def _leap(values: Floats) -> float:
    """The largest value over the first and the 95th percentile; inf if these are not above 0."""
    usual = max(values[0], float(np.quantile(values, USUAL_SHARE)))
    return float(values.max() / usual) if usual > 0 else np.inf


def _fast_group(run: RunView, record: Record, which: Ints, ratio: Floats) -> Iterator[Finding]:
    """The finding for matrices of one learning rate."""
    lines = [line for line in _too_fast(run, record, which, ratio) if line[0].any()]
    fast = np.any([hit for hit, *_ in lines] or [np.zeros(len(which), bool)], axis=0)
    if fast.mean() <= 0.5:
        return
    seen = " and ".join(f"{size} (in {hit.sum()})" for hit, size, _ in lines)
    what = f"update:weight of {fast.sum()} of {len(which)} matrices is {seen}"
    what += ", while the loss does not fall" * run.fails
    says, severity = (_TOO_HIGH_OR_UPHILL, "error") if run.fails else (lr_too_high, "warning")
    least = ", or ".join(line for *_, line in lines)
    source = says.source if f"above {FAST:g} " in least else "hookkit, measured"
    here = says.but(threshold=f"{least}, in most matrices", source=source)
    yield here.found(severity, what, *read.where(record, which[fast]))


def _too_fast(
    run: RunView, record: Record, which: Ints, ratio: Floats
) -> list[tuple[Bools, str, str]]:
    """Each line that matrices may have crossed: which did, how large it was there, and the line."""
    early, whole = early_of(record, ratio), read.median(ratio, axis=1)
    peak = largest(ratio)
    soon, once = "in the first 20 steps", "in one step"

    def crossed(size: Floats, least: float, when: str) -> tuple[Bools, str, str]:
        hit = size > least
        return hit, f"{read.median(size[hit]):.3g} {when}", f"above {least:g} {when}"

    if run.fails:
        grew = growth(record, which)
        size = f"{read.median(grew[grew > DOUBLED]):.3g}-fold"
        line = f"above {DOUBLED:g} times the first weights in the end"
        leads_nowhere = grew > DOUBLED, f"so large that the weights grew {size}", line
        return [crossed(early, FAST, soon), crossed(peak, LEAP, once), leads_nowhere]
    if not run.learns:
        erased = [crossed(peak, ERASES, once)] if len(ratio) > 1 else []
        return [*erased, crossed(whole, FAST, "a step, by the median")]
    # While the loss falls, large steps may be meant; those that are not blow the weights up. A
    # single matrix, such as a new head on a frozen body, may move that far.
    grew = growth(record, which)
    leaps = blown_up(record, which, ratio) & (last_gain(record, which) > UNUSUAL_GAIN)
    sizes = [f"{read.median(size[leaps]):.3g}" for size in (peak, grew)]
    what = f"{sizes[0]} {once}, and the weights grew {sizes[1]}-fold"
    line = f"above {LEAP:g} {once}, with weights that grow {BLOWN_UP:g}-fold or more, to a "
    line += f"gain above {UNUSUAL_GAIN:g}"
    lines = [(leaps, what, line)]
    if run.info.get("optimizer") in _EVEN and run.has_much_left:
        lines += [crossed(peak, FAR_STEP, once)]
    return lines if len(ratio) > 1 else []


# RMSprop's and Adagrad's first steps are up to ten times as large as what follows
_EVEN = frozenset({"Adam", "AdamW", "NAdam", "SGD"})


_LEAPS = lr_too_high.but(
    threshold="above 25 times what it is at first, and in 95 % of the steps",
    source="Pascanu et al. 2013 (arXiv 1211.5063), on cliffs; 25 and 95 %: hookkit, measured",
    cause="the learning rate is too high: a step went so far that gradients exploded",
)

_AMPLIFIES = _LEAPS.but(
    name="exploding",
    threshold=f"{_LEAPS.threshold}; a note where the loss does not leap to twice that",
    cause="a recurrence that amplifies, at a learning rate that is too high for it",
    fix="clip gradients before each step, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), "
    "or divide the learning rate by 10",
)

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
    """Most matrices hardly move; a warning only if the loss hardly falls either."""
    record, which, ratio = update_ratios(run, read.judged_matrices(run.params))
    broke = (early_of(record, ratio) > LEAPT).mean() > 0.5
    if broke or gradients_fade(run):
        return
    whole, mean = read.median(ratio, axis=1), mean_step(record, ratio)
    where, share = read.where(record, which), share_of_rate(run, record, which)
    if (gone := rate_gone(run, record, which)) > HALF_OF_RUN:
        what = f"in {gone:.0%} of the records the learning rate is below a thousandth of its "
        severity = "warning" if run.learns is not False else "error"
        yield _RATE_GONE.found(severity, f"{what}largest", *where)
    elif _still_agrees(run, record, which, whole):
        share = read.median(late_share(run, record, which))
        what = f"in the later half steps are {share:.2g} times what agreeing gradients make, and "
        what += f"update:weight is {read.median(whole):.2g}"
        yield _AGREES.found("warning", what, *where)
    elif run.learns and _held_back(run, whole, share):
        yield _HELD_BACK.found("warning", by_share(run, share), *where)
    elif (short := _short(record, mean)).mean() > 0.5 and _should_move(run):
        what = f"all steps together move {short.sum()} of {len(which)} matrices by "
        what += f"{read.percent(read.median(mean[short]) * n_steps(record))} of their weight"
        says = _NO_PATH.but(cause=_cause(whole))
        yield says.found("warning", what, *read.where(record, which[short]))
    elif not run.learns:
        slow = (whole < (TOO_SLOW if run.fails else SLOW)) & (not trained_in_turns(record))
        if slow.mean() > 0.5:
            yield _slow_steps(run, record, which[slow], ratio[slow])


def _held_back(run: RunView, whole: Floats, share: float) -> bool:
    """Whether Adam's steps are far smaller than its rate, and than usual."""
    return share < ADAM_SHARE and (whole < USUAL).mean() > 0.5 and run.has_learnt_little


def _should_move(run: RunView) -> bool:
    """Whether much of the loss is left, an agent's too, of a model that was not trained before."""
    if run.recorded.losses is None or len(run.losses) < ENOUGH_LOSSES or run.trained_before:
        return False
    return run.could_fall_further or bool(asks(run) and run.need_not_fall and run.has_much_left)


def _short(record: Record, mean: Floats) -> Bools:
    """Which matrices hardly move in the mean step, and in all steps together."""
    return (mean < SHORT_STEP) & (mean * n_steps(record) < SHORT_PATH)


def _cause(whole: Floats) -> str:
    rounded = ", or most steps are below the precision of the weights"
    return lr_too_low.cause + rounded * bool((whole == 0).any())


def _slow_steps(run: RunView, record: Record, slow: Ints, ratio: Floats) -> Finding:
    """The finding for matrices that hardly move, of a loss that hardly falls or proves nothing."""
    whole, mean = read.median(ratio, axis=1), mean_step(record, ratio)
    cause = _cause(whole)
    what, where = f"update:weight of {len(slow)} matrices is ", read.where(record, slow)
    if run.fails:
        what += f"{read.median(whole):.2g}, and the loss hardly falls"
        severity = "note" if run.falls_slowly else "warning"
        return _HARDLY_FALLS.but(cause=cause).found(severity, what, *where)
    if (mean < NEVER_MOVES).mean() > 0.5:
        what += f"{read.median(mean[mean < NEVER_MOVES]):.2g} in the mean step"
        return _NEVER_MOVES.but(cause=cause).found("warning", what, *where)
    what += f"{read.median(whole):.2g}"
    return lr_too_low.but(cause=cause).found("note", what, *where)


_HELD_BACK = lr_too_low.but(
    threshold="below 3e-2 of the learning rate in the first 20 steps, where Adam's first step is "
    "as large as that, and update:weight below 1e-3",
    source=f"Kingma & Ba 2015, 2.1; {CS231N}: about 1e-3; 3e-2: hookkit, measured",
    cause="an eps that is far larger than the gradients",
    fix="use Adam's own eps=1e-8",
)

_AGREES = lr_too_low.but(
    threshold="above 0.6 in the later half, where gradients that do not agree leave 0.23 (momentum "
    "0.9), with update:weight below 1.5e-3 and 0.3 of the loss left",
    source="Kingma & Ba 2015, 2.1, on the signal-to-noise ratio; the geometric series; 0.6, "
    "1.5e-3, 0.3: hookkit, measured",
    cause="the learning rate is too low: after half of the run all steps still go the same way",
)

_RATE_GONE = lr_too_low.but(
    threshold="below a thousandth of its largest, in half of the records or more",
    source="hookkit, measured; schedules of the usual kinds end there, and stay above it before",
    cause="a schedule that ends long before the run does: stepped at every batch and made for "
    "epochs, or with too few steps",
    fix="call scheduler.step() once an epoch, or make the scheduler for the number of steps of the "
    "run: T_max=n_epochs * len(loader)",
)

_NO_PATH = lr_too_low.but(
    threshold="below 20 % of the weight in all steps together, and 1e-3 in the mean of them, in "
    "most matrices of a new model, with 0.3 of the loss left",
    source="the triangle inequality: weights end no further away; the rest: hookkit, measured",
)

_HARDLY_FALLS = lr_too_low.but(
    threshold="below 3e-4 in most matrices, while the loss does not fall",
    source=f"{lr_too_low.source}; 3e-4 is halfway on a logarithmic axis",
)

_NEVER_MOVES = lr_too_low.but(
    threshold="below 1e-5 in the mean step of most matrices: 1 % of the weight in 1000 steps",
    source="hookkit, measured",
)


def _still_agrees(run: RunView, record: Record, which: Ints, whole: Floats) -> bool:
    """Whether small steps go the same way for half of the run, and much of the loss is left."""
    if not run.could_fall_further or read.median(whole) > AGREEING_SLOW:
        return False
    if min(run.info.get("momentum", ()), default=0.0) < USUAL_MOMENTUM:
        return False
    share = float(read.median(late_share(run, record, which)))
    return AGREE < share < np.inf


def by_share(run: RunView, share: float) -> str:
    """In words, how far Adam moves."""
    return f"{run.info['optimizer']} moves each weight by {share:.2g} of its learning rate"
