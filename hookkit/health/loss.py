"""Rules on the loss: what it is given, where it starts, whether it falls, where it ends.

A loss that the steps push up is in `steps`. Longer than other files, since whether a loss starts,
falls and ends well is one subject.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import CHECKER, CS231N, LECUN, SAGEMAKER, Finding, rule
from hookkit.health.jumps import LEAST, jumps
from hookkit.health.loss_expectations import NEVER_BELOW_ZERO
from hookkit.health.reading import end_level, known, start_level
from hookkit.health.run_view import ENOUGH_LOSSES, FALL, RunView

# An RMS of scores that would make a binary cross entropy almost 0, or large (measured)
SCORES_SIZE = 4
# Scores below this mask something out, and do not change the loss
MASK_SIZE = -1e3
# How near its floor a loss must end to have settled there (hookkit, measured)
NEAR_FLOOR = 0.1
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
# Fewer spikes, or a smaller share of the steps, happen in healthy runs (hookkit, measured)
OFTEN, OFTEN_SHARE = 3, 0.01
# SageMaker Debugger, Overfit: validation over training loss
OVERFIT_GAP = 0.1


@rule(
    threshold="rows of non-negative numbers that sum to 1 (or a loss that cannot pass below "
    "ln(e + C - 1) - 1)",
    source="PyTorch, CrossEntropyLoss: the input is expected to contain unnormalised logits",
    cause="a softmax (or sigmoid) before a loss that applies its own",
    fix="return the scores from the model; apply softmax only to show probabilities",
)
def probabilities(run: RunView) -> Iterator[Finding]:
    """Probabilities given to a loss that expects scores.

    Proved by the last layer or the values themselves where they were seen; else by bounds that a
    loss of inputs between 0 and 1 cannot leave.
    """
    name, record = run.loss_name, run.recorded.activations
    nll, binary = name == "nll", name.endswith("withlogits")
    if not nll and not binary and ("crossentropy" not in name or name.startswith("binary")):
        raise read.Missing("loss function unknown")
    says = _BINARY if binary else _NLL if nll else probabilities
    last = record.types[-1] if record is not None and record.names else ""
    ends = ("Softmax", "Sigmoid")
    if (given := run.info.get("loss_input")) in ends:
        what = f"the loss is given what a {given.lower()} gives"
        yield says.found("error", what, (), run.all_steps)
    elif record is not None and last in ends:
        yield says.found("error", f"the last layer is {last}", record.names[-1:], run.all_steps)
    elif says is probabilities and run.info.get("output_is_probabilities"):
        what = "the model's output rows are probabilities"
        yield says.found("error", what, (), run.all_steps)
    elif what := _by_narrow_range(run) if binary else _by_floor(run) if not nll else "":
        yield says.found("warning", what, (), run.all_steps)


_BINARY = probabilities.but(
    threshold="a sigmoid at the end; or a loss between ln(1 + 1/e) and ln(1 + e), which inputs "
    "between 0 and 1 cannot leave, where the last layer gives RMS 4 or more",
    source="PyTorch, BCEWithLogitsLoss: combines a Sigmoid layer and the BCELoss; the bounds are "
    "exact",
)

_NLL = probabilities.but(
    source="PyTorch, NLLLoss: the input is expected to contain log probabilities",
    cause="a softmax before a loss that expects its logarithm",
    fix="use log_softmax, or return the scores and use CrossEntropyLoss",
)


def _by_narrow_range(run: RunView) -> str:
    """With inputs in [0, 1] no batch of a binary cross entropy is below .313, or above 1.313.

    Scores as large as 4 would make it almost 0 where they are right, and large where they are not.
    """
    record, series = run.recorded.activations, run.losses_of(50)
    if record is None or len(record) < read.MIN_RECORDS:
        return ""
    if not set(record.types[-1:]) & set(read.PRE_ACTIVATION):
        return ""
    low, high = np.nanmin(series), np.nanmax(series)
    inside = low >= np.log1p(1 / np.e) and high <= np.log1p(np.e)
    late = read.last_half(record)
    rms, least = (read.median(read.table(record, s)[-1, late]) for s in ("rms", "min"))
    if not inside or not rms > SCORES_SIZE or least < MASK_SIZE:
        return ""
    what = f"the loss stays within {low:.3g} and {high:.3g} while {record.names[-1]} gives values "
    return f"{what}of RMS {rms:.3g}"


def _by_floor(run: RunView) -> str:
    """With inputs in [0, 1] a cross entropy stays in [floor, floor + 1]; learning nears floor."""
    losses, n = run.recorded.losses, int(run.info.get("n_classes") or 0)
    if losses is None or len(losses) < 50 or n < 3 or not len(series := known(losses)):
        return ""
    floor = float(np.log(np.e + n - 1) - 1)
    low, high, end = series.min(), series.max(), end_level(series)
    if low < floor - 1e-4 or high > floor + 1 + 1e-4 or end > floor + NEAR_FLOOR:
        return ""
    before = float(np.median(series[-max(len(series) // 4, 10) :][:10]))
    if before - end > end - floor:
        return ""  # it is falling past the floor, and does not settle there
    return f"the loss stays within {low:.4g} and {high:.4g} and settles on {end:.4g}"


@rule(
    needs=("losses", "n_classes"),
    threshold="more than twice ln C; a warning if the loss does not fall, or if it is over five "
    "times ln C and stays above ln C",
    source=f"{CS231N}: look for correct loss at chance performance; {CHECKER}",
    cause="a head that begins too large, inputs that are not standardised, or wrong labels",
    fix="standardise the inputs, and begin the last layer with small weights",
)
def initial_loss(run: RunView) -> Iterator[Finding]:
    """A first loss far above what guessing would give."""
    chance, first = float(np.log(run.n_classes)), float(known(run.losses)[0])
    excess = (first - chance) / chance
    if excess <= FIRST_LOSS - 1:
        return
    guesses = excess > GUESSES - 1 and end_level(run.losses) > chance
    recovers = run.improved is True and not guesses
    what = f"the first loss is {first:.3g}; guessing among {run.n_classes} classes gives "
    what += f"{chance:.3g}" + ", and the run does not end below that" * guesses
    yield initial_loss.found("note" if recovers else "warning", what, (), (0, 0))


@rule(
    needs=("losses",),
    threshold="above 20, where standardised targets give about 1; a warning if the loss does not "
    "fall, or if the sum of |gradient| × |update| is below 5 % of it and it does not fall steadily",
    source=f"{LECUN} (here of targets); 20: hookkit, measured",
    cause="targets that are not standardised, so that the output takes very many steps to reach "
    "them; or a loss that is summed over the batch",
    fix="scale the targets to mean 0 and standard deviation 1; average the loss",
)
def target_scale(run: RunView) -> Iterator[Finding]:
    """A regression whose first error is huge."""
    name, first = run.loss_name, float(known(run.losses)[0])
    if name not in ("mse", "l1", "smoothl1", "huber"):
        return
    error = max(first, 0.0) ** (0.5 if name == "mse" else 1.0)
    if error <= LARGE_ERROR:
        return
    share = _possible_fall(run)
    far = share is not None and share < OUT_OF_REACH and not run.falls_slowly
    fails = run.fails and not run.falls_slowly
    what = f"the first error is {error:.3g} ({name} {first:.3g})"
    what += f", of which all steps together can take {share:.2g}" if far else ""
    yield target_scale.found("warning" if fails or far else "note", what, (), (0, 0))


def _possible_fall(run: RunView) -> float | None:
    """The most that all steps of a run can take away, as a share of its first loss; None: unknown.

    By the bound that `reading` explains.
    """
    record, start = run.recorded.params, start_level(run.losses)
    if record is None or set(record.spans) != {1}:
        return None
    bound = read.bound(record)
    if not len(bound) or not start > 0 or not np.isfinite(bound).all():
        return None
    return float(bound.mean()) * len(run.losses) / start


@rule(
    needs=("losses",),
    threshold="less than 5 % below its start, or at chance",
    source=f"{CHECKER}: 5 %; cs231n: chance is ln C",
    cause="see the other findings; if there are none: wrong labels, a model that is too small, or "
    "a loss that need not fall (GAN, policy)",
    fix="let it learn one batch by heart: a model and a loss that work can do that",
)
def not_learning(run: RunView) -> Iterator[Finding]:
    """A loss that ends where it began, or higher."""
    series = run.losses_of(50)
    if run.improved is not False:
        return
    start, end = start_level(series), end_level(series)
    steps, what = (0, len(series) - 1), f"the loss began at {start:.3g} and ends at {end:.3g}"
    worse = bool(np.isinf(end)) or end > start + WORSE * abs(start)
    if run.falls_slowly:
        yield _SLOW.found("note", f"{what}: it falls slowly, and steadily", (), steps)
    elif not worse and _noise_may_hide_a_fall(run):
        what += ", and is so noisy that a fall of 5 % may hide in it"
        yield _NOISY.found("note", what, (), steps)
    elif np.isfinite(end) and (why := run.need_not_fall) is not None:
        yield why[1].found("note", f"{what}; {why[0]}", (), steps)
    elif worse:
        yield _DIVERGING.found("error", what, (), steps)
    else:
        cause = _mostly_frozen(run) or not_learning.cause
        yield not_learning.but(cause=cause).found("warning", what, (), steps)


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


def _mostly_frozen(run: RunView) -> str:
    """The cause of not learning, if most matrices are frozen; else ""."""
    if (params := run.recorded.params) is None:
        return ""
    free = read.trainable(params)[read.is_matrix(params)]
    frozen = len(free) - free.sum()
    if 2 * frozen <= len(free):
        return ""
    return (
        f"{frozen} of {len(free)} matrices are frozen (requires_grad is False): what they give may "
        "not be enough to learn from, if it was meant at all"
    )


@rule(
    needs=("losses",),
    threshold="below 0 where the loss cannot be; else ten times below its start, the last quarter "
    "of the run falling twice as far as the first",
    source="exact for a loss whose name is known; the rest: hookkit, measured",
    cause="a wrong sign, or a loss with no lower end (a critic that nothing bounds)",
    fix="check the sign of the loss and what it expects",
)
def below_zero(run: RunView) -> Iterator[Finding]:
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
        yield _IMPOSSIBLE.found("error", what, (), (0, len(series) - 1))
    elif end < -ENDLESS * max(abs(start), 1.0) and faster:
        what = f"the loss falls to {low:.3g}, and faster the longer it falls"
        yield below_zero.found("error", what, (), (0, len(series) - 1))


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
def spikes(run: RunView) -> Iterator[Finding]:
    """Losses that jump out of the last 128 steps, after the warm-up."""
    series = run.losses_of(LEAST)
    values = known(series)
    if not len(at := jumps(values)):
        return
    often = len(at) >= OFTEN and len(at) > OFTEN_SHARE * len(values) and not run.need_not_fall
    what = f"{len(at)} loss spike{'s' * (len(at) != 1)}, the highest {values[at].max():.3g}"
    steps = np.flatnonzero(np.isfinite(series))[at]
    yield spikes.found("warning" if often else "note", what, (), (int(steps[0]), int(steps[-1])))


@rule(
    threshold="validation over training loss by more than 10 %, and rising",
    source=f"{SAGEMAKER}, Overfit: 0.1",
    cause="the model learns the training set by heart",
    fix="stop at the best epoch, or add data, augmentation or regularisation",
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
    yield overfit.found("note", f"{what}{valid[-1]:.3g} now", (), run.all_steps)
