"""Rules on layers that act otherwise in training: dropout and batch norm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding
from hookkit.records import Run

DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")
BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


def dropout(run: Run) -> Iterator[Finding]:
    """Dropout that leaves less than a tenth, while the loss does not fall."""
    record = read.activations(run)
    rows = [i for i in read.rows(record, DROPOUTS) if i]
    if not rows or loss_expectations.learns(run) is not False:
        return
    left = 1 - read.table(record, "zero")
    with np.errstate(all="ignore"):  # what was 0 before it does not count as dropped
        kept = np.array([float(read.median(left[i] / left[i - 1])) for i in rows])
    hit = [i for i, k in zip(rows, kept, strict=True) if k < 0.1]
    if hit:
        yield Finding(
            "dropout",
            "error",
            read.names(record, hit),
            read.span(record),
            f"dropout leaves {np.nanmin(kept):.1%} of what it is given, and the loss does not fall",
            "less than 10 % left",
            "Srivastava et al. 2014, Dropout: 50 % to 80 % of hidden units are kept; "
            "10 %: hookkit, measured",
            "a dropout rate that is too high (p is the share that is dropped, not kept)",
            "lower p to 0.5 or less",
        )


def small_batch(run: Run) -> Iterator[Finding]:
    """Batch norm whose mean and variance come from four values or fewer."""
    record, params = read.activations(run), read.params(run)
    facts = (read.meta(params, key, 0) for key in ("numel", "requires_grad"))
    # a frozen one most likely runs with the statistics it was given
    features = {name: n * bool(free) for name, n, free in zip(params.names, *facts, strict=True)}
    few = []
    for i in read.rows(record, BATCH_NORMS):
        n = features.get(f"{record.names[i]}.weight", 0)
        if n and 0 < (share := float(read.median(read.table(record, "count")[i])) / n) <= 4:
            few.append((i, share))
    if few:
        yield Finding(
            "small_batch",
            "warning",
            read.names(record, [i for i, _ in few]),
            read.span(record),
            f"batch norm takes each mean and variance from {min(n for _, n in few):.0f} values",
            "4 or fewer",
            "Wu & He 2018, Group Normalization (arXiv 1803.08494): batch norm's error grows "
            "rapidly as the batch shrinks; 4: hookkit, measured",
            "batches of 1 or 2: such statistics are noise, and not those used in evaluation",
            "use larger batches, or GroupNorm or LayerNorm",
        )
