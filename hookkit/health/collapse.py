"""The rule on representations that collapse: layers that give the same for every sample."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.batches import ALIKE, EQUAL
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.layer_order import ends, given_data
from hookkit.health.run_view import RunView

# What differs between samples is a collapse if it was larger by so much at first (measured)
FELL = 30


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
    """Layers whose outputs have become the same for all samples, while the data differ."""
    record = run.activations
    first, last = (read.meta(record, f"{when}_variation", np.nan) for when in ("first", "last"))
    data = given_data(run, record)
    if not np.isfinite(last).any():
        raise read.Missing("nothing known of differences between samples")
    if not len(data) or not (last[data] > ALIKE).any():
        return
    inner = read.are(record.types, read.PRE_ACTIVATION)
    inner[data] = False
    least = np.full(len(last), ALIKE)
    least[ends(run, record)] = EQUAL  # the output may be a large mean and a small difference
    hit = np.flatnonzero(inner & (last < least) & (first > FELL * last))
    if len(hit):
        what = (
            f"only {last[hit].min():.2g} of the mean square of {len(hit)} layers differs between "
        )
        what += f"samples in the end, {first[hit].max():.2g} did at first"
        severity = "error" if run.fails else "warning"
        yield representation_collapse.found(severity, what, *read.where(record, hit))
