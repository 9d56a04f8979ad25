"""Rules on the loss: where it starts, whether it falls, where it ends.

What it is given is in `loss_input`, a loss that is maximised in `steps`, unscaled targets in
`inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import CHECKER, CS231N, SAGEMAKER, Finding, rule
from hookkit.health.jumps import LEAST, jumps, usual
from hookkit.health.layer_order import ends
from hookkit.health.loss_expectations import NEVER_BELOW_ZERO
from hookkit.health.reading import end_level, known, smoothed, start_level
from hookkit.health.run_view import ENOUGH_LOSSES, FALL, RunView

# Times chance: TheDeepChecker and cs231n compare the first loss with chance; 2 and 5 are measured
FIRST_LOSS, SEVERAL = 2, 5
# A loss that ends below this share of chance was soon mended: a note (hookkit, measured)
LEARNT_WELL = 0.5
# How far outputs differ between samples, and as a share of their mean square: the same for all.
# The larger one of both is 0.21 in healthy trainings (hookkit, measured)
SAME = 0.1
# A loss that ends this share above its start diverges (hookkit, measured)
WORSE = 0.5
# Times its start: how far below 0 a loss without a lower end falls (hookkit, measured)
ENDLESS = 10
# So many spikes at one place of a period of so many steps or more are no chance (hookkit, measured)
OFTEN, LEAST_PERIOD = 4, 5
# SageMaker Debugger, Overfit: validation over training loss
OVERFIT_GAP = 0.1


@rule(
    needs=("losses",),
    threshold="above 2 times ln C",
    source=f"{CS231N}: look for correct loss at chance performance; {CHECKER}",
    cause="a head that begins too large, inputs that are not standardised, or wrong labels",
    fix="standardise the inputs, and begin the last layer with small weights: "
    "torch.nn.init.normal_(head.weight, std=0.01)",
)
def initial_loss(run: RunView) -> Iterator[Finding]:
    """A first loss far above what guessing would give."""
    # several heads, whose losses are added up, begin above the chance of one
    one = "chance" in run.info and run.info.get("n_classes")
    chance, first = run.chance or float(np.log(run.n_classes)), float(known(run.losses)[0])
    times = FIRST_LOSS if one else SEVERAL
    if first > times * chance:
        what = f"the first loss is {first:.3g}, where guessing gives "
        here = initial_loss.but(threshold=f"above {times * chance:.3g}, {times} times ln C")
        severity = "note" if end_level(run.losses) < LEARNT_WELL * chance else "warning"
        yield here.found(severity, f"{what}{chance:.3g}", (), (0, 0))


@rule(
    needs=("losses",),
    threshold="less than 5 % below its start",
    source=f"{CHECKER}: 5 %; cs231n: chance is ln C",
    cause="what the other findings say; if there are none: wrong labels, a model that is too small "
    "or mostly frozen, or a loss that need not fall (GAN, policy)",
    fix="call loss.backward() and opt.step() on one batch again and again: a model and a loss that "
    "work bring its loss near 0",
)
def not_learning(run: RunView) -> Iterator[Finding]:
    """A loss that ends where it began, or higher."""
    series = run.losses_of(50)
    if run.improved is not False:
        yield from _same_for_all(run)
        return
    start, end = start_level(series), end_level(series)
    steps, what = (0, len(series) - 1), f"the loss began at {start:.3g} and ends at {end:.3g}"
    ends, worst = np.isfinite(end), start + WORSE * abs(start)
    worse, line = not ends or end > worst, run.falls(start, end)[1]
    if run.falls_slowly:
        here = _SLOW.but(threshold=f"{line}; and 2 % or more below it, beyond its noise")
        yield here.found("note", f"{what}: it falls slowly, and steadily", (), steps)
    elif not worse and _noise_may_hide_a_fall(run):
        what += ", and is so noisy that a fall of 5 % may hide in it"
        here = _NOISY.but(threshold=f"{line}; and noise (two standard errors) with room for 5 %")
        yield here.found("note", what, (), steps)
    elif ends and (why := run.need_not_fall) is not None:
        here = why[1].but(threshold=f"{line}, {why[1].threshold}")
        yield here.found("note", f"{what}; {why[0]}", (), steps)
    elif not ends:
        what = f"the loss began at {start:.3g} and is not finite at the end"
        yield _NO_NUMBER.found("error", what, (), steps)
    elif worse:
        here = _DIVERGING.but(threshold=f"above {worst:.3g}, its start and half of that")
        yield here.found("error", what, (), steps)
    else:
        yield not_learning.but(threshold=line).found("warning", what, (), steps)


def _same_for_all(run: RunView) -> Iterator[Finding]:
    """A loss that has fallen to what can be had without a look at the inputs, and falls no more."""
    record, quarter = run.recorded.activations, len(known(run.losses)) // 4
    if record is None or run.need_not_fall or not run.has_much_left:
        return
    third, last = (known(run.losses)[i * quarter :][:quarter] for i in (2, 3))
    rows, shares = ends(run, record), read.meta(record, "last_variation", np.nan).astype(float)
    share = float(np.max(shares[rows], initial=0.0))  # NaN where one is not known
    spread = read.median(read.table(record, "rms")[rows, -10:], axis=1) * np.sqrt(shares[rows])
    lasts = np.median(last) > (1 - FALL) * np.median(third)
    if len(rows) and lasts and share < SAME and (size := float(spread.max())) < SAME:
        what = f"the outputs differ by {size:.2g} between samples, {read.percent(share)} of their "
        what += f"mean square, and the loss stays at {end_level(run.losses):.3g}"
        yield _SAME_OUTPUT.found("warning", what, *read.where(record, rows))


_SAME_OUTPUT = not_learning.but(
    threshold="below 0.1, and below 10 % of the mean square, with 0.3 of the loss left",
    source="hookkit, measured",
    cause="what was learnt is the same for all samples: targets that do not belong to the inputs, "
    "or inputs that are lost on the way",
    fix="print some inputs beside their targets, as the model and the loss are given them",
)

_DIVERGING = not_learning.but(
    threshold="above its start and half of that",
    source="hookkit, measured",
    cause="the steps go too far, or uphill: a learning rate that is too high, gradients that are "
    "never zeroed, or a wrong sign",
    fix="divide the learning rate by 10, check that optimizer.zero_grad() runs in every step, and "
    "the sign of what loss.backward() is called on",
)

_NO_NUMBER = _DIVERGING.but(
    threshold="any NaN or Inf that stays to the end",
    cause="NaN or Inf: the finding non_finite says where it began, and what to do",
)

_SLOW = not_learning.but(
    source=f"{CHECKER}: 5 %; 2 %: hookkit, measured",
    cause="a learning rate that is low, or a run that has only begun",
    fix="train longer, or try a learning rate 3 to 10 times as high",
)

_NOISY = not_learning.but(
    source=f"{CHECKER}: 5 %; two standard errors: hookkit, measured",
    cause="small batches, or targets that are mostly noise",
    fix="train longer, or judge by an average over more batches (a larger batch_size)",
)


def _noise_may_hide_a_fall(run: RunView) -> bool:
    """Whether a fall of 5 % cannot be excluded at two standard errors, for the noise of the loss.

    By the slope over the run; where chance is known, by how far below it the run ends.
    """
    values = known(run.losses)
    start, end, n = start_level(values), end_level(run.losses), len(values)
    if n < ENOUGH_LOSSES or start <= 0 or not np.isfinite(end):
        return False
    noise = read.noise(values)
    if classes := run.info.get("n_classes"):
        from_level = min(start, float(np.log(classes)))
        error = 1.25 * noise / np.sqrt(max(5, n // 10))  # standard error of a median
        return bool(from_level - end + 2 * error > FALL * from_level)
    time = np.arange(n) - (n - 1) / 2
    fall = -float(time @ values / (time @ time)) * n
    error = noise * np.sqrt(12 / n)  # standard error of a fitted slope, over the run
    return bool(fall + 2 * error > FALL * start)


@rule(
    needs=("losses",),
    threshold="ten times its start below 0",
    source="hookkit, measured",
    cause="a wrong sign, or a loss with no lower end (a critic that nothing bounds)",
    fix="check the sign of what loss.backward() is called on; bound a critic (weight clipping, a "
    "gradient penalty)",
)
def below_zero(run: RunView) -> Iterator[Finding]:
    """A loss that cannot be below 0 and is, or that falls faster and faster without end."""
    series = run.losses_of(50)
    values = known(series)
    low, start = float(values.min()), start_level(values)
    values = values[: max(int(smoothed(values).argmin()) + 5, 50)]  # it may blow up behind that
    end = end_level(values)
    quarter = len(values) // 4
    levels = [float(np.median(values[i * quarter :][:10])) for i in range(4)] + [end]
    faster = levels[3] - levels[4] > 2 * max(levels[0] - levels[1], 0)
    impossible = low < -1e-3 and run.loss_name in NEVER_BELOW_ZERO
    if impossible:
        what = f"the loss falls to {low:.3g}, and {run.loss_name} cannot be below 0"
        yield _IMPOSSIBLE.found("error", what, (), (0, len(series) - 1))
    elif end < (line := -ENDLESS * max(abs(start), 1.0)) and faster:
        what = f"the loss began at {start:.3g}, falls to {end:.3g}, faster and faster"
        here = below_zero.but(
            threshold=f"below {line:.3g}, ten times its start (or 1) below 0, and a last quarter "
            "that falls twice as far as the first"
        )
        yield here.found("error", what, (), (0, len(series) - 1))


_IMPOSSIBLE = below_zero.but(
    threshold="below 0, for a loss that cannot be",
    source="exact, by the definition of the loss",
    cause="a wrong sign, or probabilities where log probabilities are expected",
)


@rule(
    needs=("losses",),
    threshold="6 standard deviations (by the median) above the last 128 steps, and half the first "
    "loss",
    source="6 and 128: OLMo-core, SkipStepOptimizer; the rest: hookkit, measured",
    cause="broken batches, or a learning rate that is almost too high",
    fix="look at the data of those steps, and clip gradients: "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
def spikes(run: RunView) -> Iterator[Finding]:
    """Losses that jump out of the last 128 steps, after the warm-up."""
    series = run.losses_of(LEAST)
    values = known(series)
    if not len(at := jumps(values)):
        return
    period = int(np.gcd.reduce(np.diff(at))) if len(at) >= OFTEN else 0
    top = int(at[values[at].argmax()])
    middle, least = usual(values, top, start_level(values))
    what = f"{len(at)} loss spike{'s' * (len(at) != 1)}, the highest {values[top]:.3g}"
    what += f", {values[top] - middle:.3g} above the median of the steps before"
    line = f"{least:.3g} above the last 128 steps: the larger of 6 standard deviations (by the "
    line += "median) and half the first loss"
    steps, here = np.flatnonzero(np.isfinite(series))[at], spikes.but(threshold=line)
    where = (int(steps[0]), int(steps[-1]))
    if period >= LEAST_PERIOD and not run.need_not_fall:
        what += f", and their distances are multiples of {period} steps"
        line += f"; {OFTEN} spikes or more, in a period of {LEAST_PERIOD} steps or more"
        yield _PERIODIC.but(threshold=line).found("warning", what, (), where)
    else:
        yield here.found("note", what, (), where)


_PERIODIC = spikes.but(
    cause="a batch that comes again in each epoch: wrong labels, inputs of another scale, or a "
    "last batch of few samples",
    fix="look at the data of those steps; DataLoader(..., shuffle=True, drop_last=True) mixes them "
    "and leaves a short batch out",
)


@rule(
    threshold="validation loss above training loss by 10 %, and by 10 % above its best",
    source=f"{SAGEMAKER}, Overfit: 0.1",
    cause="the model learns the training set by heart",
    fix="stop at the best epoch, or add data, augmentation or regularisation (nn.Dropout, "
    "weight_decay)",
)
def overfit(run: RunView) -> Iterator[Finding]:
    """A validation loss that rises while the training loss falls: a note."""
    rows = [r for r in run.recorded.valid if {"train_loss", "valid_loss"} <= set(r)]
    if len(rows) < 4:
        raise read.Missing("fewer than 4 epochs with validation")
    train = np.array([r["train_loss"] for r in rows], float)
    valid = np.array([r["valid_loss"] for r in rows], float)
    best = int(np.where(np.isnan(valid), np.inf, valid).argmin())
    gap = (valid[-1] - train[-1]) / max(abs(train[-1]), 1e-12)
    rose = gap > OVERFIT_GAP and valid[-1] >= 1.1 * valid[best]  # False if either is NaN
    if not rose or best >= len(rows) - 2:
        return
    epoch = rows[best].get("epoch", best)
    what = f"the validation loss was best in epoch {epoch} ({valid[best]:.3g}) and is "
    what += f"{valid[-1]:.3g} now, the training loss {train[-1]:.3g}"
    yield overfit.found("note", what, (), run.all_steps)
