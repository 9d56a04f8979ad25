"""Rules on float16: values near its end, gradients that fall below its smallest number.

Judged by layer: under autocast the outputs of some are float16 and those of others are not. What
has left the range is for other rules: an overflow is Inf (`non_finite`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding
from hookkit.records import Ints, Record, Run

LARGEST, SMALLEST, NORMAL = 65504.0, 2.0**-24, 2.0**-14
IEEE = "IEEE 754 binary16"
AMP = "PyTorch, torch.amp: in float16 gradients of small magnitude flush to zero"


def fp16_range(run: Run) -> Iterator[Finding]:
    """Values within a factor of ten of float16's largest number, where float16 is in use."""
    record = read.activations(run)
    rows = _half_rows(run, record)
    top = np.fmax(np.abs(read.table(record, "min")), np.abs(read.table(record, "max")))[rows]
    peak = np.where(np.isfinite(top), top, -1.0).max(axis=1)
    hit = peak > LARGEST / 10
    if hit.any():
        yield Finding(
            "fp16_range",
            "warning",
            read.names(record, rows[hit]),
            read.span(record),
            f"values up to {peak.max():.3g} in float16",
            "above 6550, a tenth of float16's largest number 65504",
            IEEE,
            "activations that grow towards overflow",
            "use bfloat16, or a norm before this layer",
        )


def fp16_underflow(run: Run) -> Iterator[Finding]:
    """Gradients in float16 so small that only its last bits are left of them.

    Reads gradients of outputs, or of parameters that are float16 themselves. Where a scale was
    undone (a GradScaler that `GradientStats` knows) there is nothing to find.
    """
    if (nothing := _all_zero(run)) is not None:
        yield nothing
        return
    small = [*chain.from_iterable(_small(run, record) for record in (run.gradients, run.params))]
    if not small:
        record = run.activations
        if record is not None and len(_half_rows(run, record)) and run.gradients is None:
            raise read.Missing("no gradients of outputs")
        return
    early = [(name, size) for name, size, _ in small if size < 4 * SMALLEST]
    late = [(name, size) for name, _, size in small if size < 4 * SMALLEST]
    hit = max(early, late, key=len)
    if not hit or len(hit) <= len(small) / 2:
        return
    yield Finding(
        "fp16_underflow",
        "warning" if hit is early or loss_expectations.learns(run) is False else "note",
        tuple(name for name, _ in hit),
        (0, max(run.n_steps - 1, 0)),
        f"the gradients of {len(hit)} of {len(small)} layers in float16 have RMS "
        f"{max(size for _, size in hit):.2g} or less where they are not 0",
        "below 2.4e-7 in most layers: four times float16's smallest number, two bits or fewer",
        f"{IEEE}: 2^-24; {AMP}",
        "half precision without loss scaling: smaller gradients become exactly 0",
        "scale the loss with torch.amp.GradScaler, or use bfloat16",
    )


def _small(run: Run, record: Record | None) -> Iterator[tuple[str, float, float]]:
    """Name, and RMS of what is not 0 early and late, of rows in float16."""
    if record is None or len(record) < read.MIN_RECORDS or record.meta.get("unscaled"):
        return
    rows = _half_rows(run, record)
    if record.kind == "param":
        rows = np.array([i for i in rows if i in read.matrices(record)], np.int64)
    rms = read.table(record, "grad_rms" if record.kind == "param" else "rms")[rows]
    some = 1 - record.values["zero"][rows] if "zero" in record.values else np.ones_like(rms)
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.where(some > 0, rms / np.sqrt(some), 0.0)
    size[~np.isfinite(rms)] = np.nan
    alive = np.asarray((size > 0).any(axis=1))
    halves = size[:, : len(record) // 2], size[:, read.last_half(record)]
    sizes = np.stack([read.median(half, axis=1) for half in halves])
    for row, (early, late), lives in zip(rows, sizes.T, alive, strict=True):
        if lives and np.isfinite(early + late):
            yield record.names[row], float(early), float(late)


def _all_zero(run: Run) -> Finding | None:
    """Gradients that are exactly 0 in every float16 layer, the last one too, or almost so."""
    return _zero_outputs(run) or _zero_weights(run)


def _zero_outputs(run: Run) -> Finding | None:
    record = run.gradients
    if record is None or len(record) < read.MIN_RECORDS or record.meta.get("unscaled"):
        return None
    broken = np.nan_to_num(record.values.get("nonfinite", np.zeros(1))).any()
    if broken or loss_expectations.learns(run) is not False:
        return None
    rows = _half_rows(run, record)
    rms = read.table(record, "rms")[rows]
    rows, rms = rows[np.isfinite(rms).any(axis=1)], rms[np.isfinite(rms).any(axis=1)]
    if len(rows) < 2 or np.nan_to_num(rms).any():
        return None
    return _nothing_left(record, rows, f"all {len(rows)} layers in float16 are exactly 0, also of")


def _zero_weights(run: Run) -> Finding | None:
    """Matrices' gradients that are all exactly 0 or subnormal, where the last layer is float16."""
    record, seen = run.params, run.activations
    if record is None or seen is None or len(record) < read.MIN_RECORDS:
        return None
    if record.meta.get("unscaled") or len(seen.names) - 1 not in _half_rows(run, seen):
        return None
    sizes = read.median(read.table(record, "grad_rms"), axis=1)
    which = np.array([i for i in read.matrices(record) if np.isfinite(sizes[i])], np.int64)
    tiny, none = sizes[which] < NORMAL, sizes[which] == 0
    if (
        len(which) < 2
        or not tiny.all()
        or not none.any()
        or loss_expectations.learns(run) is not False
    ):
        return None
    few = f"all {len(which)} matrices are exactly 0, or below 6.1e-5 (RMS), also of"
    return _nothing_left(record, which, few)


def _nothing_left(record: Record, rows: Ints, whose: str) -> Finding:
    return Finding(
        "fp16_underflow",
        "error",
        read.names(record, rows),
        read.span(record),
        f"the gradients of {whose} the last",
        "exactly 0 in every record, or some so and all below 6.1e-5, the smallest normal number",
        f"{IEEE}: 2^-24 and 2^-14; {AMP}",
        "half precision without loss scaling: all gradients are below float16's smallest number",
        "scale the loss with torch.amp.GradScaler, or use bfloat16",
    )


def _half_rows(run: Run, record: Record) -> Ints:
    """Rows in float16, by what was recorded; a record that does not say is the model's dtype."""
    whole = str(run.info.get("dtype", run.info.get("amp_dtype", "")))
    dtypes = [str(found) for found in read.meta(record, "dtype", whole)]
    half = ["float16" in name and "bfloat16" not in name for name in dtypes]
    return np.flatnonzero(np.array(half, bool))
