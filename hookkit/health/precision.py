"""Rules on the two ends of float16: what overflows, and what becomes 0.

float16 is judged by layer: under autocast the outputs of some are float16 and those of others not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.run_view import RunView
from hookkit.records import Ints, Record

# IEEE 754 binary16: its largest number, and its smallest
LARGEST, SMALLEST = 65504.0, 2.0**-24
# Below this, two bits or fewer of a gradient remain
TWO_BITS = 4 * SMALLEST

_IEEE = "IEEE 754 binary16"
_AMP = "PyTorch, torch.amp: in float16 gradients of small magnitude flush to zero"


@rule(
    needs=("activations",),
    threshold="above 6550, a tenth of float16's largest number 65504",
    source=_IEEE,
    cause="activations that grow towards overflow",
    fix="use torch.autocast(device, dtype=torch.bfloat16), or a norm before this layer",
)
def fp16_range(run: RunView) -> Iterator[Finding]:
    """Values within a factor of ten of float16's largest number, where float16 is in use."""
    record = run.activations
    rows = _half_rows(run, record)
    top = np.fmax(np.abs(read.table(record, "min")), np.abs(read.table(record, "max")))[rows]
    peak = np.where(np.isfinite(top), top, -1.0).max(axis=1)
    hit = peak > LARGEST / 10
    if hit.any():
        what = f"values up to {peak.max():.3g} in float16"
        yield fp16_range.found("warning", what, *read.where(record, rows[hit]))


@rule(
    threshold="below 2.4e-7 in most layers: four times float16's smallest number, two bits or "
    "fewer",
    source=f"{_IEEE}: 2^-24; {_AMP}",
    cause="half precision without loss scaling: smaller gradients become exactly 0",
    fix="scale the loss with torch.amp.GradScaler, or use bfloat16",
)
def fp16_underflow(run: RunView) -> Iterator[Finding]:
    """Gradients in float16 so small that only their last bits remain.

    Reads gradients of outputs, or of parameters that are float16 themselves. Where a scale was
    undone (a GradScaler that `GradientStats` knows) there is nothing to find.
    """
    small = [*_sizes(run, run.recorded.gradients), *_sizes(run, run.recorded.params)]
    if not small:
        record = run.recorded.activations
        if record is not None and len(_half_rows(run, record)) and run.recorded.gradients is None:
            raise read.Missing("no gradients of outputs")
        return
    most = [(name, size) for name, size in small if size < TWO_BITS]
    if len(most) > len(small) / 2:
        what = f"the gradients of {len(most)} of {len(small)} layers in float16 have RMS "
        what += f"{max(size for _, size in most):.2g} or less where they are not 0"
        yield fp16_underflow.found("warning", what, [name for name, _ in most], run.all_steps)


def _sizes(run: RunView, record: Record | None) -> Iterator[tuple[str, float]]:
    """Of each row in float16: its name, and its gradients' RMS where they are not 0.

    In the first half of the run: those of a net that has learnt may be small.
    """
    if record is None or len(record) < read.MIN_RECORDS or record.meta.get("unscaled"):
        return
    rows = _half_rows(run, record)
    if record.kind == "param":
        rows = np.intersect1d(rows, read.matrices(record))
    rms = read.table(record, "grad_rms" if record.kind == "param" else "rms")[rows]
    some = 1 - record.values["zero"][rows] if "zero" in record.values else np.ones_like(rms)
    size = np.where(some > 0, rms / np.sqrt(some), 0.0)
    size[~np.isfinite(rms)] = np.nan
    medians = read.median(size[:, : len(record) // 2], axis=1)
    alive = np.asarray((size > 0).any(axis=1)) & np.isfinite(medians)
    yield from zip(read.where(record, rows[alive])[0], medians[alive].tolist(), strict=True)


def _half_rows(run: RunView, record: Record) -> Ints:
    """Rows in float16, by what was recorded; a record that does not say is the model's dtype."""
    whole = str(run.info.get("dtype", ""))
    dtypes = map(str, read.meta(record, "dtype", whole))
    return np.flatnonzero(["float16" in name and "bfloat16" not in name for name in dtypes])
