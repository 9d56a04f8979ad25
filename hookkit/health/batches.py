"""Rules on the batches: that come back in one order, that are only a few, whose samples are alike.

The losses of shuffled batches do not repeat. Where the same batches come in the same order, so do
their losses, around a level that falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.layer_order import ends, given_data, given_ids
from hookkit.health.reading import end_level, known, start_level
from hookkit.health.run_view import RunView
from hookkit.records import Floats

# A correlation with the losses a period before; fresh batches reach 0.5 (hookkit, measured)
REPEATS = 0.85
# As many batches, or fewer, are no data set
FEW = 4
# Samples that are too few for batch norm, and values, of all their places (measured)
SMALL, PLACES = 2, 128
# Losses, or steps, that it takes, and how often each batch must have come
ENOUGH, TIMES = 40, 4
# Most batches are as bad as at first, and others learnt (hookkit, measured). Where only some are
# bad, these are hard ones (a wrong label), in whatever order.
AS_BAD, LEARNT = 0.5, 0.5
# What is left of the loss where the order of the batches is to blame; healthy trainings in a fixed
# order keep 0.48 (hookkit, measured)
MUCH = 0.6
# How far losses wander, over their noise from step to step: 1 for batches in any order, 1.3 at most
# in healthy trainings in a fixed order; of sorted data 1.6 and more (hookkit, measured)
WANDERS = 1.5
# Of a layer's mean square, the share that differs between samples: alike (hookkit, measured), and
# equal but for the last digits of float32
ALIKE, EQUAL = 1e-3, 1e-12


class Period(NamedTuple):
    """How losses repeat.

    Args:
        steps: from a batch to the same one.
        alike: the correlation with the losses a period before.
        profile: (steps,) the loss of each batch, at the end of the run.
    """

    steps: int
    alike: float
    profile: Floats


@rule(
    needs=("losses",),
    threshold="correlation above 0.85 with the losses of a period before, while most batches are "
    "as bad as at first (half of the first loss) and others learnt (half of the worst)",
    source="Bottou 2012, Stochastic Gradient Descent Tricks: shuffle the examples; 0.85 and the "
    "halves: hookkit, measured",
    cause="data sorted by class or target, which come in the same order in every epoch: the model "
    "learns one part and forgets the others",
    fix="shuffle the training data: DataLoader(dataset, shuffle=True)",
)
def unshuffled(run: RunView) -> Iterator[Finding]:
    """Losses that repeat with a long period and swing between learnt and not."""
    losses = known(run.losses_of(ENOUGH))
    if run.need_not_fall:
        return
    period = period_of(losses)
    if period is not None and period.steps <= FEW:
        period = None  # a few batches; or what changes slowly is like itself soon after
    if period is not None and _only_some_are_learnt(period, start_level(run.losses)):
        yield unshuffled.found("warning", _in_words(period), (), run.all_steps)
    elif _is_badly_learnt(run, losses):
        what = f"the same {run.info['batches_period']} batches come in the same order again and "
        what += (
            f"again, and the loss goes from {start_level(losses):.3g} to {end_level(losses):.3g}"
        )
        yield _NEVER_SHUFFLED.found("warning", what, (), run.all_steps)
    elif period is not None:
        yield _SAME_ORDER.found("note", _in_words(period), (), run.all_steps)


def _only_some_are_learnt(period: Period, start: float) -> bool:
    """Whether most batches are as bad as at first, and others are not."""
    worst, best, usual = (f(period.profile) for f in (np.max, np.min, np.median))
    return bool(usual > AS_BAD * start and best < LEARNT * worst)


def _in_words(period: Period) -> str:
    what = f"the losses repeat every {period.steps} steps (correlation {period.alike:.2f}), "
    return f"{what}between {period.profile.min():.3g} and {period.profile.max():.3g}"


def _is_badly_learnt(run: RunView, losses: Floats) -> bool:
    """Whether the same batches come in the same order, neighbours alike, and little is learnt."""
    period = run.info.get("batches_period", 0)
    if not FEW < period <= len(losses) / TIMES:
        return False
    much = end_level(losses) > MUCH * start_level(losses) > 0
    return bool(much and _wanders(losses[len(losses) // 5 :], period))


def _wanders(late: Floats, period: int) -> bool:
    """Whether losses differ far more from the mean of a period than from step to step."""
    means = np.convolve(late, np.full(period, 1 / period), "valid")
    around = np.abs(late[period // 2 :][: len(means)] - means)
    return bool(around.mean() > WANDERS * np.abs(np.diff(late)).mean() / np.sqrt(2))


_NEVER_SHUFFLED = unshuffled.but(
    threshold="5 batches or more that come in the same order, 4 times or more, with 0.6 of the "
    "first loss left, and losses that wander 1.5 times as far as they change in a step",
    source="Bottou 2012, Stochastic Gradient Descent Tricks: shuffle the examples; von Neumann "
    "1941, on successive differences; 0.6 and 1.5: hookkit, measured",
    cause="data that come in the same order in every epoch, perhaps sorted by class or target: the "
    "model learns one part and forgets the others",
)

_SAME_ORDER = unshuffled.but(
    threshold="correlation above 0.85 with the losses of a period before",
    cause="batches that come in the same order in every epoch",
)


@rule(
    threshold="2 to 4 different batches, in 40 steps or more",
    source="exact, by what the model is given; 4: hookkit, measured",
    cause="the same few batches again and again: all of a small data set, unshuffled, or a subset "
    "that was meant for debugging",
    fix="if there are more data, go through the whole loader, shuffled: for x, y in loader",
)
def repeated_data(run: RunView) -> Iterator[Finding]:
    """A few batches that come back: a note, since a small data set has no more, or only one."""
    n, different = run.info.get("batches") or (0, 0)
    if n >= ENOUGH and 1 < different <= FEW:
        what = f"the first {n} steps see {different} different batches"
        yield repeated_data.found("note", what, (), (0, n - 1))


def period_of(losses: Floats) -> Period | None:
    """The period of losses around their running median, without the first fifth; None if none."""
    late = losses[len(losses) // 5 :]
    if len(late) < ENOUGH:
        return None
    around = late - _running_median(late, max(3, len(late) // 10) | 1)
    reach = 6 * read.SIGMA * float(np.median(np.abs(around)))
    around = np.clip(around, -reach, reach)  # one spike repeats with nothing
    alike = _correlations(around, len(late) // TIMES)
    if not (best := alike.max()) > REPEATS:
        return None
    n = 2 + int(np.argmax(alike > max(REPEATS, 0.97 * best)))
    return Period(n, float(alike[n - 2]), late[-n * (TIMES - 1) :].reshape(-1, n).mean(axis=0))


def _correlations(a: Floats, most: int) -> Floats:
    """(most − 1,) of the values with those 2, 3, … `most` before them.

    By the Wiener-Khinchin theorem, in n log n: one at a time they would be n²/4 products.
    """
    n, squares = np.arange(2, most + 1), np.append(0.0, np.cumsum(a * a))
    products = np.fft.irfft(np.abs(np.fft.rfft(a, 2 * len(a))) ** 2)[n]
    sizes = np.sqrt(squares[len(a) - n] * (squares[-1] - squares[n]))
    some = sizes > 1e-9 * squares[-1]  # else there is nothing but rounding errors
    return np.asarray(np.divide(products, sizes, out=np.zeros(len(n)), where=some))


def _running_median(values: Floats, n: int) -> Floats:
    """(len(values),) medians of `n` neighbours, of fewer different ones at the ends.

    Of a wide window each is taken at every twentieth of it, and the line between them: all of them
    would be n²/10 values to sort.
    """
    ends = np.median(values[:n]), np.median(values[-n:])
    wide = np.concatenate([np.full(n // 2, ends[0]), values, np.full(n // 2, ends[1])])
    places = np.arange(len(values))
    at = np.union1d(places[:: max(1, n // 20)], places[-1:])
    medians = np.median(np.lib.stride_tricks.sliding_window_view(wide, n)[at], axis=1)
    return np.asarray(np.interp(places, at, medians))


@rule(
    needs=("activations",),
    threshold="no difference between samples, in every look",
    source="exact, by what the layers give that are given the data",
    cause="inputs that are the same for every sample: a batch made of one sample, an index that "
    "never changes, or data that were multiplied by 0",
    fix="look at one batch before the model: x.std(0) must not be 0",
)
def constant_input(run: RunView) -> Iterator[Finding]:
    """Data that do not differ from sample to sample."""
    record = run.activations
    data, ids = given_data(run, record), given_ids(run, record)
    shares = [read.meta(record, f"{when}_variation", np.nan) for when in ("first", "last")]
    most = np.max(shares, axis=0)  # NaN where one of them is
    own = read.meta(record, "given_variation", np.nan)  # a bias may hide that data differ
    most[data] = np.fmax(most, own)[data]
    sources, out = most[[*data, *ids]], most[ends(run, record)]
    if not sources.size or not np.isfinite(sources).all():
        raise read.Missing("nothing known of differences between samples")
    what = "what is given to the model is the same for every sample of a batch"
    same = [i for i in data if most[i] < EQUAL]
    if (sources < EQUAL).all():
        yield constant_input.found("error", what, *read.where(record, [*data, *ids]))
    elif same:  # embeddings of places are the same for all samples
        yield constant_input.found("warning", what, *read.where(record, same))
    elif (sources < ALIKE).all() and (out < ALIKE).all():
        what = f"only {sources.max():.2g} of the mean square of what the first layers give differs "
        what += f"between samples, and {out.max():.2g} of what the last ones give"
        yield _ALMOST.found("warning", what, *read.where(record, [*data, *ids]))


_ALMOST = constant_input.but(
    threshold="below 0.001 of the mean square differs between samples, in every look, of what goes "
    "in and of what comes out",
    source="hookkit, measured",
    cause="inputs that are almost the same for every sample: one noise for the whole batch, or "
    "data of a mean that hides all differences",
    fix="look at one batch before the model: x.std(0) beside x.mean(0); standardise the data, or "
    "draw noise for each sample",
)


@rule(
    needs=("activations",),
    threshold="2 samples or fewer, and 128 values or fewer in a mean",
    source="Wu & He 2018, Group Normalization (arXiv 1803.08494): batch norm's error grows rapidly "
    "as the batch shrinks; 2: their smallest batch; 128: hookkit, measured",
    cause="batches that are too small for batch norm: its means are noise, and not those of "
    "evaluation",
    fix="use larger batches, or nn.GroupNorm or nn.LayerNorm, which need none",
)
def small_batch(run: RunView) -> Iterator[Finding]:
    """Batch norm over one or two samples; a note where these are images of many places."""
    meta = run.activations.meta
    n, values = meta.get("norm_samples"), meta.get("norm_values", 0)
    if n is not None and n <= SMALL:
        what = f"batch norm takes its mean over {n} sample{'s' * (n > 1)} at a time"
        what += f", {values} values" * bool(values)
        severity = "warning" if values <= PLACES else "note"
        yield small_batch.found(severity, what, (), run.all_steps)
