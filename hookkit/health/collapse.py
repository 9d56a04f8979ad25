"""The rule on representations that collapse: the same for every sample, or almost nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.batches import ALIKE, EQUAL
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.layer_order import ends, given_data
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Ints, Record

# What differs between samples is a collapse if it was larger by so much at first (measured)
FELL = 30
# What is left of a layer's output; healthy trainings keep 0.4 and more (hookkit, measured)
FADED = 0.1
# A first RMS above this began too large, and comes down (hookkit, measured)
BEGAN_LARGE = 3


@rule(
    needs=("activations",),
    threshold="below 0.001 of a layer's mean square differs between samples, and 30 times as much "
    "at first",
    source="Jing et al. 2022 (arXiv 2110.09348), on complete collapse; 0.001 and 30: hookkit, "
    "measured",
    cause="a model that gives the same for every sample: a loss that this satisfies (no negatives, "
    "no stop-gradient, a KL term that outweighs the rest, a discriminator that has won), or steps "
    "that are too large",
    fix="check what keeps samples apart in this loss (negatives, detach() of the target branch, a "
    "smaller weight of the KL term), and lower the learning rate",
)
def representation_collapse(run: RunView) -> Iterator[Finding]:
    """Layers whose outputs have become the same for all samples, or almost nothing."""
    record = run.activations
    inner = read.are(record.types, read.PRE_ACTIVATION)
    inner[given_data(run, record)] = False
    severity = "error" if run.fails else "warning"
    hit, what = _alike(run, record, inner)
    if len(hit):
        yield representation_collapse.found(severity, what, *read.where(record, hit))
        return
    inner[ends(run, record)] = False
    before_norm = ["Norm" in kind for kind in (*record.types[1:], "")]
    inner &= ~np.array(before_norm)  # a norm makes up for it
    rms = read.table(record, "rms")
    first, last = read.median(rms[:, :3], axis=1), read.median(rms[:, -10:], axis=1)
    faded = np.flatnonzero(inner & (last < FADED * first) & (first < BEGAN_LARGE))
    if len(faded):
        least = faded[np.argmin(last[faded] / first[faded])]
        what = f"what {record.names[least]} gives has faded from RMS {first[least]:.3g} to "
        what += f"{last[least]:.2g}, {read.percent(last[least] / first[least])} of it"
        yield _FADED.found(severity, what, *read.where(record, faded))


_FADED = representation_collapse.but(
    threshold="below 10 % of its first RMS, in a layer before the last that no norm follows",
    source="Bowman et al. 2016 (arXiv 1511.06349), on posterior collapse; 10 %: hookkit, measured",
    cause="a layer whose output the loss pushes to 0, so that what follows learns nothing from it: "
    "a KL term (or another penalty) that outweighs the rest",
    fix="lower the weight of the KL term or penalty, or raise it slowly from 0 (KL annealing)",
)


def _alike(run: RunView, record: Record, inner: Bools) -> tuple[Ints, str]:
    """Which layers have become the same for all samples while the data differ, and in words."""
    first, last = (read.meta(record, f"{when}_variation", np.nan) for when in ("first", "last"))
    data = given_data(run, record)
    if not len(data) or not (last[data] > ALIKE).any():
        return np.zeros(0, np.int64), ""
    least = np.full(len(last), ALIKE)
    least[ends(run, record)] = EQUAL  # the output may be a large mean and a small difference
    hit = np.flatnonzero(inner & (last < least) & (first > FELL * last))
    if not len(hit):
        return hit, ""
    what = f"only {last[hit].min():.2g} of the mean square of {len(hit)} layers differs between "
    return hit, f"{what}samples in the end, {first[hit].max():.2g} did at first"
