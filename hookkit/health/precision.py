"""Rules on float16: values near its end, gradients that fall below its smallest number.

Judged by layer: under autocast the outputs of some are float16 and those of others are not. An
overflow is Inf, which `non_finite` reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hookkit.health import reading as read
from hookkit.health.rule import Hit, rule
from hookkit.health.run_view import RunView
from hookkit.records import Ints, Record

LARGEST, SMALLEST, NORMAL = 65504.0, 2.0**-24, 2.0**-14
"""IEEE 754 binary16: its largest number, its smallest, and its smallest with all bits."""

TWO_BITS = 4 * SMALLEST
"""Below this, two bits or fewer of a gradient remain."""

_IEEE = "IEEE 754 binary16"
_AMP = "PyTorch, torch.amp: in float16 gradients of small magnitude flush to zero"


@rule(
    needs=("activations",),
    threshold="above 6550, a tenth of float16's largest number 65504",
    source=_IEEE,
    cause="activations that grow towards overflow",
    fix="use bfloat16, or a norm before this layer",
)
def fp16_range(run: RunView) -> Iterator[Hit]:
    """Values within a factor of ten of float16's largest number, where float16 is in use."""
    record = run.activations
    rows = _half_rows(run, record)
    top = np.fmax(np.abs(read.table(record, "min")), np.abs(read.table(record, "max")))[rows]
    peak = np.where(np.isfinite(top), top, -1.0).max(axis=1)
    hit = peak > LARGEST / 10
    if hit.any():
        what = f"values up to {peak.max():.3g} in float16"
        yield Hit("warning", read.names(record, rows[hit]), read.span(record), what)


@rule(
    threshold="below 2.4e-7 in most layers: four times float16's smallest number, two bits or "
    "fewer",
    source=f"{_IEEE}: 2^-24; {_AMP}",
    cause="half precision without loss scaling: smaller gradients become exactly 0",
    fix="scale the loss with torch.amp.GradScaler, or use bfloat16",
)
def fp16_underflow(run: RunView) -> Iterator[Hit]:
    """Gradients in float16 so small that only its last bits are left of them.

    Reads gradients of outputs, or of parameters that are float16 themselves. Where a scale was
    undone (a GradScaler that `GradientStats` knows) there is nothing to find.
    """
    if (hit := _zero_outputs(run) or _zero_weights(run)) is not None:
        yield hit
        return
    small = [*_sizes(run, run.run.gradients), *_sizes(run, run.run.params)]
    if not small:
        record = run.run.activations
        if record is not None and len(_half_rows(run, record)) and run.run.gradients is None:
            raise read.Missing("no gradients of outputs")
        return
    early = [(x.name, x.early) for x in small if x.early < TWO_BITS]
    late = [(x.name, x.late) for x in small if x.late < TWO_BITS]
    most = max(early, late, key=len)
    if len(most) > len(small) / 2:
        what = f"the gradients of {len(most)} of {len(small)} layers in float16 have RMS "
        what += f"{max(size for _, size in most):.2g} or less where they are not 0"
        severity = "warning" if most is early or run.fails else "note"
        yield Hit(severity, tuple(name for name, _ in most), run.all_steps, what)


class _Size(NamedTuple):
    """The RMS of a row's gradients that are not 0, in the first and in the later half."""

    name: str
    early: float
    late: float


def _sizes(run: RunView, record: Record | None) -> Iterator[_Size]:
    """The sizes of gradients in float16 that are not 0 throughout."""
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
            yield _Size(record.names[row], float(early), float(late))


def _zero_outputs(run: RunView) -> Hit | None:
    """Gradients of outputs that are exactly 0 in every float16 layer, also in the last."""
    record = run.run.gradients
    if record is None or len(record) < read.MIN_RECORDS or record.meta.get("unscaled"):
        return None
    broken = np.nan_to_num(record.values.get("nonfinite", np.zeros(1))).any()
    if broken or not run.fails:
        return None
    rows = _half_rows(run, record)
    rms = read.table(record, "rms")[rows]
    known = np.isfinite(rms).any(axis=1)
    if known.sum() < 2 or np.nan_to_num(rms[known]).any():
        return None
    what = f"all {known.sum()} layers in float16 are exactly 0, also of"
    return _nothing_left(record, rows[known], what)


def _zero_weights(run: RunView) -> Hit | None:
    """Matrices' gradients that are all exactly 0 or subnormal, where the last layer is float16."""
    record, seen = run.run.params, run.run.activations
    if record is None or seen is None or len(record) < read.MIN_RECORDS:
        return None
    if record.meta.get("unscaled") or len(seen.names) - 1 not in _half_rows(run, seen):
        return None
    sizes = read.median(read.table(record, "grad_rms"), axis=1)
    which = np.array([i for i in read.matrices(record) if np.isfinite(sizes[i])], np.int64)
    tiny, zero = sizes[which] < NORMAL, sizes[which] == 0
    if len(which) < 2 or not tiny.all() or not zero.any() or not run.fails:
        return None
    what = f"all {len(which)} matrices are exactly 0, or below 6.1e-5 (RMS), also of"
    return _nothing_left(record, which, what)


def _nothing_left(record: Record, rows: Ints, whose: str) -> Hit:
    what = f"the gradients of {whose} the last"
    return Hit("error", read.names(record, rows), read.span(record), what, of=_ALL_BELOW)


_ALL_BELOW = fp16_underflow.but(
    threshold="exactly 0 in every record, or some so and all below 6.1e-5, the smallest normal "
    "number",
    source=f"{_IEEE}: 2^-24 and 2^-14; {_AMP}",
    cause="half precision without loss scaling: all gradients are below float16's smallest number",
)


def _half_rows(run: RunView, record: Record) -> Ints:
    """Rows in float16, by what was recorded; a record that does not say is the model's dtype."""
    whole = str(run.info.get("dtype", run.info.get("amp_dtype", "")))
    dtypes = [str(found) for found in read.meta(record, "dtype", whole)]
    half = ["float16" in name and "bfloat16" not in name for name in dtypes]
    return np.flatnonzero(np.array(half, bool))
