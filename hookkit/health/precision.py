"""Rules on what floating-point numbers cannot hold: NaN and Inf, and the two ends of float16.

float16 is judged by layer: under autocast the outputs of some are float16 and those of others not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Ints, Record

# IEEE 754 binary16: its largest number, its smallest, and its smallest with all bits
LARGEST, SMALLEST, NORMAL = 65504.0, 2.0**-24, 2.0**-14
# Below this, two bits or fewer of a gradient remain
TWO_BITS = 4 * SMALLEST

_IEEE = "IEEE 754 binary16"
_AMP = "PyTorch, torch.amp: in float16 gradients of small magnitude flush to zero"


@rule(
    threshold="any NaN or Inf",
    source="IEEE 754: both spread through every later sum",
    cause="overflow, log or division by 0, or a learning rate that is too high",
    fix="look at this layer's inputs in the steps before; lower the learning rate, add an eps, or "
    "clip gradients",
)
def non_finite(run: RunView) -> Iterator[Finding]:
    """NaN or Inf: the first step, and the first layer in execution order."""
    if run.recorded.incidents:
        i = run.recorded.incidents[0]
        what = f"first non-finite {i.kind}{f' in {i.type}' if i.type else ''} at step {i.step}"
        yield non_finite.found("error", what, filter(None, [i.name]), (i.step, i.step))
        return
    seen = [r for r in run.recorded.records if "nonfinite" in r.values]
    losses = run.recorded.losses
    if not seen and losses is None:
        raise read.Missing("no activations")
    firsts = [f for r in seen if (f := _first_non_finite(r)) is not None]
    broken = None if losses is None else _loss_breaks_at(losses)
    if firsts:
        yield _first_of(run, min(firsts, key=lambda f: f[2]), broken)
    elif broken is not None:
        what = f"the loss stops being a number at step {broken}"
        yield non_finite.found("error", what, (), (broken, broken))


def _first_of(run: RunView, first: tuple[Record, int, int], broken: int | None) -> Finding:
    """The finding for the first non-finite record: a note if nothing came of it."""
    record, row, step = first
    kind = {"activation": "output", "gradient": "gradient", "param": "value"}[record.kind]
    what = f"the {kind} of {record.names[row]} ({record.types[row]}) has NaN or Inf"
    harmless = ""
    if broken is None and record.kind != "activation" and _did_no_harm(run, record):
        harmless = ", and weights, activations and loss stay finite"
    elif step == record.steps[0] and broken is None and run.learns:
        harmless = ", from the first step on, while the loss stays finite and falls"
    says = non_finite if not harmless else _MASK if record.kind == "activation" else _SKIPPED
    severity = "note" if harmless else "error"
    return says.found(severity, what + harmless, [record.names[row]], (step, step))


_MASK = non_finite.but(
    cause="a deliberate mask of -inf, most likely", fix="nothing, if it is a mask"
)

_SKIPPED = non_finite.but(
    cause="steps that a GradScaler skips while it looks for its scale, most likely",
    fix="nothing, if they are few",
)


def _did_no_harm(run: RunView, record: Record) -> bool:
    """Whether weights and activations stay finite: a fused optimizer skipped those steps."""
    activations, params = run.recorded.activations, run.recorded.params
    own = np.nan_to_num(record.values["nonfinite"][:, -read.MIN_RECORDS :]) > 0
    if (activations is None and params is None) or own.any(axis=0).all():
        return False
    if activations is not None and _first_non_finite(activations) is not None:
        return False
    weights = None if params is None else params.values.get("weight_norm")
    if weights is None:
        return True
    ever, at_last = np.isfinite(weights).any(axis=1), np.isfinite(weights[:, -1])
    return bool((at_last | ~ever).all())


def _first_non_finite(record: Record) -> tuple[Record, int, int] | None:
    """The earliest record with a non-finite value: the row where it began, and the step."""
    if "nonfinite" not in record.values:
        return None
    bad = np.nan_to_num(record.values["nonfinite"]) > 0
    if not bad.any():
        return None
    at = int(bad.any(0).argmax())
    which = np.flatnonzero(bad[:, at])
    row = which[-1] if record.kind == "gradient" else which[0]  # backward runs from the end
    return record, int(row), int(record.steps[at])


def _loss_breaks_at(losses: Floats) -> int | None:
    """The step from which on a loss that was known is no number."""
    if not np.isfinite(losses).any():
        return None
    if read.stops_being_a_number(losses):
        return int(np.flatnonzero(np.isfinite(losses))[-1]) + 1
    return int(np.isinf(losses).argmax()) if np.isinf(losses).any() else None


@rule(
    needs=("activations",),
    threshold="above 6550, a tenth of float16's largest number 65504",
    source=_IEEE,
    cause="activations that grow towards overflow",
    fix="use bfloat16, or a norm before this layer",
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
    if nothing_left := [*_zero_outputs(run), *_zero_weights(run)]:
        yield nothing_left[0]
        return
    small = [*_sizes(run, run.recorded.gradients), *_sizes(run, run.recorded.params)]
    if not small:
        record = run.recorded.activations
        if record is not None and len(_half_rows(run, record)) and run.recorded.gradients is None:
            raise read.Missing("no gradients of outputs")
        return
    # names and sizes of the layers with too small gradients, in the first and in the later half
    halves = [[(name, x[half]) for name, x in small if x[half] < TWO_BITS] for half in (0, 1)]
    most = max(halves, key=len)
    if len(most) > len(small) / 2:
        what = f"the gradients of {len(most)} of {len(small)} layers in float16 have RMS "
        what += f"{max(size for _, size in most):.2g} or less where they are not 0"
        severity = "warning" if most is halves[0] or run.fails else "note"
        yield fp16_underflow.found(severity, what, [name for name, _ in most], run.all_steps)


def _sizes(run: RunView, record: Record | None) -> Iterator[tuple[str, Floats]]:
    """Of each row in float16: its name, and its gradients' RMS where they are not 0, by half."""
    if record is None or len(record) < read.MIN_RECORDS or record.meta.get("unscaled"):
        return
    rows = _half_rows(run, record)
    if record.kind == "param":
        rows = np.intersect1d(rows, read.matrices(record))
    rms = read.table(record, "grad_rms" if record.kind == "param" else "rms")[rows]
    some = 1 - record.values["zero"][rows] if "zero" in record.values else np.ones_like(rms)
    size = np.where(some > 0, rms / np.sqrt(some), 0.0)
    size[~np.isfinite(rms)] = np.nan
    halves = size[:, : len(record) // 2], size[:, read.last_half(record)]
    medians = np.stack([read.median(half, axis=1) for half in halves], axis=1)
    alive = np.asarray((size > 0).any(axis=1)) & np.isfinite(medians).all(axis=1)
    yield from zip(read.where(record, rows[alive])[0], medians[alive], strict=True)


def _zero_outputs(run: RunView) -> Iterator[Finding]:
    """Gradients of outputs that are exactly 0 in every float16 layer, also in the last."""
    record = run.recorded.gradients
    if record is None or len(record) < read.MIN_RECORDS or record.meta.get("unscaled"):
        return
    broken = np.nan_to_num(record.values.get("nonfinite", np.zeros(1))).any()
    if broken or not run.fails:
        return
    rows = _half_rows(run, record)
    rms = read.table(record, "rms")[rows]
    known = np.isfinite(rms).any(axis=1)
    if known.sum() >= 2 and not np.nan_to_num(rms[known]).any():
        what = f"the gradients of all {known.sum()} layers in float16 are exactly 0, also of the "
        yield _ALL_BELOW.found("error", f"{what}last", *read.where(record, rows[known]))


def _zero_weights(run: RunView) -> Iterator[Finding]:
    """Matrices' gradients that are all exactly 0 or subnormal, where the last layer is float16."""
    record, seen = run.recorded.params, run.recorded.activations
    if record is None or seen is None or len(record) < read.MIN_RECORDS:
        return
    if record.meta.get("unscaled") or len(seen.names) - 1 not in _half_rows(run, seen):
        return
    sizes, which = read.median(read.table(record, "grad_rms"), axis=1), read.matrices(record)
    which = which[np.isfinite(sizes[which])]
    tiny, zero = sizes[which] < NORMAL, sizes[which] == 0
    if len(which) >= 2 and tiny.all() and zero.any() and run.fails:
        what = f"the gradients of all {len(which)} matrices are exactly 0, or below 6.1e-5 (RMS), "
        yield _ALL_BELOW.found("error", f"{what}also of the last", *read.where(record, which))


_ALL_BELOW = fp16_underflow.but(
    threshold="exactly 0 in every record, or some so and all below 6.1e-5, the smallest normal "
    "number",
    source=f"{_IEEE}: 2^-24 and 2^-14; {_AMP}",
    cause="half precision without loss scaling: all gradients are below float16's smallest number",
)


def _half_rows(run: RunView, record: Record) -> Ints:
    """Rows in float16, by what was recorded; a record that does not say is the model's dtype."""
    whole = str(run.info.get("dtype", run.info.get("amp_dtype", "")))
    dtypes = map(str, read.meta(record, "dtype", whole))
    return np.flatnonzero(["float16" in name and "bfloat16" not in name for name in dtypes])
