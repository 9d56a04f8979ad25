"""Rules on the loss and the gradient norm over the steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import loss_bound, loss_expectations
from hookkit.health import reading as read
from hookkit.health.activations import SAGEMAKER
from hookkit.health.diagnosis import Finding
from hookkit.health.updates import CHECKER
from hookkit.records import Floats, Run


def _classes(run: Run) -> int:
    n = run.info.get("n_classes")
    if not n or int(n) < 2:
        raise read.Missing("number of classes unknown")
    return int(n)


def initial_loss(run: Run) -> Iterator[Finding]:
    """A first loss far above what guessing would give."""
    series, n_classes = read.losses(run), _classes(run)
    chance = float(np.log(n_classes))
    first = float(series[np.isfinite(series)][0])
    excess = (first - chance) / chance
    if excess <= 1:
        return
    guesses = excess > 4 and read.end_level(series) > chance  # several heads begin above it too
    recovers = read.improved(run) is True and not guesses
    yield Finding(
        "initial_loss",
        "note" if recovers else "warning",
        (),
        (0, 0),
        f"the first loss is {first:.3g}; guessing among {n_classes} classes gives {chance:.3g}"
        + (", and the run does not end below that" if guesses else ""),
        "more than twice ln C; an alarm where the loss does not fall, or from five times ln C, "
        "where it stays above ln C",
        f"cs231n, Neural Networks Part 3: look for correct loss at chance performance; {CHECKER}",
        "a head that begins too large, inputs that are not standardised, or wrong labels",
        "standardise the inputs and begin the last layer with small weights",
    )


def target_scale(run: Run) -> Iterator[Finding]:
    """A regression whose first error is huge: targets nobody standardised, or a summed loss."""
    name, series = loss_expectations.loss_name(run), read.losses(run)
    if name not in ("mse", "l1", "smoothl1", "huber"):
        return
    first = float(series[np.isfinite(series)][0])
    error = max(first, 0.0) ** (0.5 if name == "mse" else 1.0)
    if error <= 20:
        return
    share = loss_bound.at_most(run)
    far = share is not None and share < 0.05 and not read.creeps(run)
    fails = loss_expectations.learns(run) is False and not read.creeps(run)
    yield Finding(
        "target_scale",
        "warning" if fails or far else "note",
        (),
        (0, 0),
        f"the first error is {error:.3g} ({name} {first:.3g})"
        + (f", of which all steps together can take {share:.2g}" if far else ""),
        "above 20, where standardised targets give about 1; an alarm if the loss does not fall, or "
        "if the sum of |gradient| × |update| is below 5 % of it and it does not fall steadily",
        "LeCun et al. 1998, Efficient BackProp, of inputs: mean 0 and variance 1; "
        "20: hookkit, measured",
        "targets that are not standardised, so that the output takes very many steps to reach "
        "them; or a loss that is summed over the batch",
        "scale the targets to mean 0 and standard deviation 1; average the loss",
    )


def not_learning(run: Run) -> Iterator[Finding]:
    """A loss that ends where it began, or higher."""
    series = read.losses(run, 50)
    if read.improved(run) is not False:
        return
    start, end = read.start_level(series), read.end_level(series)
    worse = bool(np.isinf(end)) or end > start + 0.5 * abs(start)
    if read.creeps(run) or (not worse and read.hides_a_fall(run)):
        yield _undecided(series, start, end, read.creeps(run))
        return
    why = loss_expectations.excuse(run) if np.isfinite(end) else None
    if why is not None:
        what = f"the loss began at {start:.3g} and ends at {end:.3g}; {why.evidence}"
        line = f"less than 5 % below its start, {why.threshold}"
        source = f"{CHECKER}: 5 %; {why.source}"
        steps = 0, len(series) - 1
        yield Finding("not_learning", "note", (), steps, what, line, source, why.cause, why.fix)
        return
    yield Finding(
        "diverging" if worse else "not_learning",
        "error" if worse else "warning",
        (),
        (0, len(series) - 1),
        f"the loss began at {start:.3g} and ends at {end:.3g}",
        "less than 5 % below its start, or at chance",
        f"{CHECKER}: 5 %; cs231n: chance is ln C",
        "the steps go too far: learning rate too high, or gradients that are never zeroed"
        if worse
        else _frozen(run)
        or "see the other findings; without any: wrong labels, a model that is too small, or a "
        "loss that need not fall (GAN, policy)",
        "lower the learning rate; check that zero_grad() runs every step"
        if worse
        else "try to learn one batch by heart: a sound model and loss can",
    )


def _undecided(series: Floats, start: float, end: float, slow: bool) -> Finding:
    levels = f"the loss began at {start:.3g} and ends at {end:.3g}"
    return Finding(
        "not_learning",
        "note",
        (),
        (0, len(series) - 1),
        f"{levels}: it falls slowly, and steadily"
        if slow
        else f"{levels}, and is so noisy that a fall of 5 % may hide in it",
        "less than 5 % below its start; an alarm if it does not fall by 2 % beyond its noise, and "
        "its noise (two standard errors) leaves no room for 5 %",
        f"{CHECKER}: 5 %; the rest: hookkit, measured",
        "a learning rate that is low, or a run that has only begun"
        if slow
        else "small batches, or targets that are mostly noise",
        "train longer, or try a learning rate 3 to 10 times as high"
        if slow
        else "train longer, or judge by an average over more batches",
    )


def _frozen(run: Run) -> str:
    """The cause, where most matrices are frozen."""
    if run.params is None:
        return ""
    free = [
        trainable
        for trainable, n in zip(
            read.meta(run.params, "requires_grad", True),
            read.meta(run.params, "ndim", 2),
            strict=True,
        )
        if n >= 2
    ]
    frozen = free.count(False)
    if 2 * frozen <= len(free):
        return ""
    return (
        f"{frozen} of {len(free)} matrices are frozen (requires_grad is False): what they give "
        "may not be enough to learn from, if it was meant at all"
    )


def below_zero(run: Run) -> Iterator[Finding]:
    """A loss that cannot be below 0 and is, or that falls faster and faster without end."""
    series = read.losses(run, 50)
    known = series[np.isfinite(series)]
    low, start, end = float(known.min()), read.start_level(known), read.end_level(known)
    quarter = len(known) // 4
    falls = [float(np.median(known[i * quarter :][:10])) for i in range(4)] + [end]
    faster = falls[3] - falls[4] > 2 * max(falls[0] - falls[1], 0)
    name = loss_expectations.loss_name(run)
    never = low < -1e-3 and name in loss_expectations.NEVER_BELOW_ZERO
    if not never and not (end < -10 * max(abs(start), 1.0) and faster):
        return
    yield Finding(
        "below_zero",
        "error",
        (),
        (0, len(series) - 1),
        f"the loss falls to {low:.3g}"
        + (f", and {name} cannot be below 0" if never else ", and faster the longer it falls"),
        "below 0 where the loss cannot be; else ten times below its start, the last quarter of "
        "the run falling twice as far as the first",
        "exact for a loss whose name is known; the rest: hookkit, measured",
        "a wrong sign (a likelihood to be raised is lowered), or probabilities where log "
        "probabilities are expected"
        if never
        else "a wrong sign, or a loss with no lower end (a critic that nothing bounds)",
        "check the sign of the loss and what it expects",
    )


def spikes(run: Run) -> Iterator[Finding]:
    """Losses that jump out of the last 128 steps, after the warm-up."""
    series = read.losses(run, 100)
    known = series[np.isfinite(series)]
    level = read.start_level(known)
    at = [t for t in range(64, len(known)) if _jumps(known, t, level)]
    if not at:
        return
    often = len(at) >= 3 and len(at) > 0.01 * len(known) and not loss_expectations.excuse(run)
    yield Finding(
        "spikes",
        "warning" if often else "note",
        (),
        (at[0], at[-1]),
        f"{len(at)} loss spike{'s' * (len(at) != 1)}, the highest {known[at].max():.3g}",
        "6 standard deviations (by the median) above the last 128 steps, and by half the first "
        "loss; an alarm from 3 and 1 % of the steps",
        "6 and 128: OLMo-core, SkipStepOptimizer; the rest: hookkit, measured",
        "broken batches, or a learning rate at the edge",
        "look at the data of those steps; clip gradients",
    )


def _jumps(series: Floats, t: int, level: float) -> bool:
    before = series[max(0, t - 128) : t]
    middle = np.median(before)
    sigma = 1.4826 * np.median(np.abs(before - middle))  # so that spikes do not hide each other
    if series[t] - middle <= max(6 * sigma, 0.5 * abs(level)):
        return False
    before = before[before > 0]
    if middle <= 0 or len(before) < 64:
        return True  # no factors
    # the noise of a loss near 0 is one of factors: batches without a mistake, and with one
    # (from one to the next, so that a fall is no noise)
    factor = 1.4826 * np.median(np.abs(np.diff(np.log(before)))) / np.sqrt(2)
    return bool(np.log(series[t] / np.median(before[-16:])) > 6 * factor)


def overfit(run: Run) -> Iterator[Finding]:
    """A validation loss that rises while the training loss falls: a note."""
    rows = [r for r in run.valid if {"train_loss", "valid_loss"} <= set(r)]
    if len(rows) < 4:
        raise read.Missing("fewer than 4 epochs with validation")
    train = np.array([r["train_loss"] for r in rows], float)
    valid = np.array([r["valid_loss"] for r in rows], float)
    best = int(valid.argmin())
    gap = (valid[-1] - train[-1]) / max(abs(train[-1]), 1e-12)
    if best >= len(rows) - 2 or gap <= 0.1 or valid[-1] < 1.1 * valid[best]:
        return
    yield Finding(
        "overfit",
        "note",
        (),
        (0, max(run.n_steps - 1, 0)),
        f"the validation loss was best in epoch {rows[best].get('epoch', best)} "
        f"({valid[best]:.3g}) and is {valid[-1]:.3g} now",
        "validation over training loss by more than 10 %, and rising",
        f"{SAGEMAKER}, Overfit: 0.1",
        "the model learns the training set by heart",
        "stop at the best epoch, or add data, augmentation or regularisation",
    )
