"""Rules on the loss: where it starts, whether it falls, where it ends.

Builds on `loss_trend`. Probabilities given to a loss that expects scores are in `loss_input`, a
loss that the steps push up is in `steps`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.loss_expectations import NEVER_BELOW_ZERO
from hookkit.health.loss_trend import (
    SIGMA,
    end_level,
    known,
    noise_may_hide_a_fall,
    possible_fall,
    start_level,
)
from hookkit.health.rule import CHECKER, CS231N, LECUN, SAGEMAKER, Hit, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats

# Times chance: TheDeepChecker and cs231n compare the first loss with chance; 2 and 5 are
# measured. Several heads, whose losses are added up, begin above chance too.
FIRST_LOSS, GUESSES = 2, 5
# Where standardised targets give an error of about 1 (hookkit, measured)
LARGE_ERROR = 20
# Share of the first loss that all steps can take away (hookkit, measured)
OUT_OF_REACH = 0.05
# A loss that ends this share above its start diverges (hookkit, measured)
WORSE = 0.5
# Times its start: how far below 0 a loss without a lower end falls (hookkit, measured)
ENDLESS = 10
# OLMo-core, SkipStepOptimizer
SPIKE_SIGMAS, SPIKE_WINDOW = 6, 128
# Fewer spikes, or a smaller share of the steps, happen in healthy runs (hookkit, measured)
OFTEN, OFTEN_SHARE = 3, 0.01
# SageMaker Debugger, Overfit: validation over training loss
OVERFIT_GAP = 0.1


@rule(
    needs=("losses", "n_classes"),
    threshold="more than twice ln C; a warning if the loss does not fall, or if it is over five "
    "times ln C and stays above ln C",
    source=f"{CS231N}: look for correct loss at chance performance; {CHECKER}",
    cause="a head that begins too large, inputs that are not standardised, or wrong labels",
    fix="standardise the inputs, and begin the last layer with small weights",
)
def initial_loss(run: RunView) -> Iterator[Hit]:
    """A first loss far above what guessing would give."""
    chance, first = float(np.log(run.n_classes)), float(known(run.losses)[0])
    excess = (first - chance) / chance
    if excess <= FIRST_LOSS - 1:
        return
    guesses = excess > GUESSES - 1 and end_level(run.losses) > chance
    recovers = run.improved is True and not guesses
    what = f"the first loss is {first:.3g}; guessing among {run.n_classes} classes gives "
    what += f"{chance:.3g}" + ", and the run does not end below that" * guesses
    yield Hit("note" if recovers else "warning", (), (0, 0), what)


@rule(
    needs=("losses",),
    threshold="above 20, where standardised targets give about 1; a warning if the loss does not "
    "fall, or if the sum of |gradient| × |update| is below 5 % of it and it does not fall steadily",
    source=f"{LECUN} (here of targets); 20: hookkit, measured",
    cause="targets that are not standardised, so that the output takes very many steps to reach "
    "them; or a loss that is summed over the batch",
    fix="scale the targets to mean 0 and standard deviation 1; average the loss",
)
def target_scale(run: RunView) -> Iterator[Hit]:
    """A regression whose first error is huge."""
    name, first = run.loss_name, float(known(run.losses)[0])
    if name not in ("mse", "l1", "smoothl1", "huber"):
        return
    error = max(first, 0.0) ** (0.5 if name == "mse" else 1.0)
    if error <= LARGE_ERROR:
        return
    share = possible_fall(run.recorded)
    far = share is not None and share < OUT_OF_REACH and not run.falls_slowly
    fails = run.fails and not run.falls_slowly
    what = f"the first error is {error:.3g} ({name} {first:.3g})"
    what += f", of which all steps together can take {share:.2g}" if far else ""
    yield Hit("warning" if fails or far else "note", (), (0, 0), what)


@rule(
    needs=("losses",),
    threshold="less than 5 % below its start, or at chance",
    source=f"{CHECKER}: 5 %; cs231n: chance is ln C",
    cause="see the other findings; if there are none: wrong labels, a model that is too small, or "
    "a loss that need not fall (GAN, policy)",
    fix="let it learn one batch by heart: a model and a loss that work can do that",
)
def not_learning(run: RunView) -> Iterator[Hit]:
    """A loss that ends where it began, or higher."""
    series = run.losses_of(50)
    if run.improved is not False:
        return
    start, end = start_level(series), end_level(series)
    steps, what = (0, len(series) - 1), f"the loss began at {start:.3g} and ends at {end:.3g}"
    worse = bool(np.isinf(end)) or end > start + WORSE * abs(start)
    if run.falls_slowly:
        yield Hit("note", (), steps, f"{what}: it falls slowly, and steadily", of=_SLOW)
    elif not worse and noise_may_hide_a_fall(run.recorded):
        what += ", and is so noisy that a fall of 5 % may hide in it"
        yield Hit("note", (), steps, what, of=_NOISY)
    elif np.isfinite(end) and (why := run.need_not_fall) is not None:
        yield Hit("note", (), steps, f"{what}; {why.evidence}", of=why.texts)
    elif worse:
        yield Hit("error", (), steps, what, of=_DIVERGING)
    else:
        frozen = _mostly_frozen(run)
        yield Hit("warning", (), steps, what, of=not_learning.but(cause=frozen) if frozen else None)


_DIVERGING = not_learning.but(
    name="diverging",
    cause="the steps go too far: a learning rate that is too high, or gradients that are never "
    "zeroed",
    fix="lower the learning rate; check that zero_grad() runs every step",
)

_UNDECIDED = not_learning.but(
    threshold="less than 5 % below its start; a warning if it does not fall by 2 % beyond its "
    "noise, and its noise (two standard errors) leaves no room for 5 %",
    source=f"{CHECKER}: 5 %; the rest: hookkit, measured",
)

_SLOW = _UNDECIDED.but(
    cause="a learning rate that is low, or a run that has only begun",
    fix="train longer, or try a learning rate 3 to 10 times as high",
)

_NOISY = _UNDECIDED.but(
    cause="small batches, or targets that are mostly noise",
    fix="train longer, or judge by an average over more batches",
)


def _mostly_frozen(run: RunView) -> str:
    """The cause of not learning, if most matrices are frozen; else ""."""
    params = run.recorded.params
    if params is None:
        return ""
    ndim = read.meta(params, "ndim", 2)
    trainable = read.meta(params, "requires_grad", True)
    of_matrices = [free for free, n in zip(trainable, ndim, strict=True) if n >= 2]
    frozen = of_matrices.count(False)
    if 2 * frozen <= len(of_matrices):
        return ""
    return (
        f"{frozen} of {len(of_matrices)} matrices are frozen (requires_grad is False): what they "
        "give may not be enough to learn from, if it was meant at all"
    )


@rule(
    needs=("losses",),
    threshold="below 0 where the loss cannot be; else ten times below its start, the last quarter "
    "of the run falling twice as far as the first",
    source="exact for a loss whose name is known; the rest: hookkit, measured",
    cause="a wrong sign, or a loss with no lower end (a critic that nothing bounds)",
    fix="check the sign of the loss and what it expects",
)
def below_zero(run: RunView) -> Iterator[Hit]:
    """A loss that cannot be below 0 and is, or that falls faster and faster without end."""
    series = run.losses_of(50)
    values = known(series)
    low, start, end = float(values.min()), start_level(values), end_level(values)
    quarter = len(values) // 4
    levels = [float(np.median(values[i * quarter :][:10])) for i in range(4)] + [end]
    faster = levels[3] - levels[4] > 2 * max(levels[0] - levels[1], 0)
    impossible = low < -1e-3 and run.loss_name in NEVER_BELOW_ZERO
    if impossible:
        what = f"the loss falls to {low:.3g}, and {run.loss_name} cannot be below 0"
        yield Hit("error", (), (0, len(series) - 1), what, of=_IMPOSSIBLE)
    elif end < -ENDLESS * max(abs(start), 1.0) and faster:
        what = f"the loss falls to {low:.3g}, and faster the longer it falls"
        yield Hit("error", (), (0, len(series) - 1), what)


_IMPOSSIBLE = below_zero.but(
    cause="a wrong sign (a likelihood that should rise is lowered), or probabilities where log "
    "probabilities are expected"
)


@rule(
    needs=("losses",),
    threshold="6 standard deviations (by the median) above the last 128 steps, and by half the "
    "first loss; a warning from 3 spikes that are 1 % of the steps",
    source="6 and 128: OLMo-core, SkipStepOptimizer; the rest: hookkit, measured",
    cause="broken batches, or a learning rate that is almost too high",
    fix="look at the data of those steps; clip gradients",
)
def spikes(run: RunView) -> Iterator[Hit]:
    """Losses that jump out of the last 128 steps, after the warm-up."""
    values = known(run.losses_of(100))
    level = start_level(values)
    at = [t for t in range(SPIKE_WINDOW // 2, len(values)) if _jumps(values, t, level)]
    if not at:
        return
    often = len(at) >= OFTEN and len(at) > OFTEN_SHARE * len(values) and not run.need_not_fall
    what = f"{len(at)} loss spike{'s' * (len(at) != 1)}, the highest {values[at].max():.3g}"
    yield Hit("warning" if often else "note", (), (at[0], at[-1]), what)


def _jumps(series: Floats, t: int, level: float) -> bool:
    """Whether the loss of step `t` stands out of those before, both by difference and by factor."""
    before = series[max(0, t - SPIKE_WINDOW) : t]
    middle = np.median(before)
    sigma = SIGMA * np.median(np.abs(before - middle))  # by medians: other spikes do not count
    if series[t] - middle <= max(SPIKE_SIGMAS * sigma, 0.5 * abs(level)):
        return False
    before = before[before > 0]
    if middle <= 0 or len(before) < SPIKE_WINDOW // 2:
        return True  # no factors
    # A loss near 0 varies by factors (batches without a mistake, and with one), which are no
    # spikes. Their noise is measured from one step to the next, so that a fall is not part of it.
    factor = SIGMA * np.median(np.abs(np.diff(np.log(before)))) / np.sqrt(2)
    return bool(np.log(series[t] / np.median(before[-16:])) > SPIKE_SIGMAS * factor)


@rule(
    threshold="validation over training loss by more than 10 %, and rising",
    source=f"{SAGEMAKER}, Overfit: 0.1",
    cause="the model learns the training set by heart",
    fix="stop at the best epoch, or add data, augmentation or regularisation",
)
def overfit(run: RunView) -> Iterator[Hit]:
    """A validation loss that rises while the training loss falls: a note."""
    rows = [r for r in run.recorded.valid if {"train_loss", "valid_loss"} <= set(r)]
    if len(rows) < 4:
        raise read.Missing("fewer than 4 epochs with validation")
    train = np.array([r["train_loss"] for r in rows], float)
    valid = np.array([r["valid_loss"] for r in rows], float)
    best = int(valid.argmin())
    gap = (valid[-1] - train[-1]) / max(abs(train[-1]), 1e-12)
    if best >= len(rows) - 2 or gap <= OVERFIT_GAP or valid[-1] < 1.1 * valid[best]:
        return
    epoch = rows[best].get("epoch", best)
    what = f"the validation loss was best in epoch {epoch} ({valid[best]:.3g}) and is "
    yield Hit("note", (), run.all_steps, f"{what}{valid[-1]:.3g} now")
