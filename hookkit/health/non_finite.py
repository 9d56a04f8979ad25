"""The rule on NaN and Inf: where they begin, and whether data, a function or a step made them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, Rule, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Incident, Record

# The share of batches without a loss that is too large to be odd ones (hookkit, chosen)
OFTEN = 0.05
# Sizes that grew so many times were on their way to overflow (hookkit, measured)
HUGE = 100


@rule(
    threshold="any NaN or Inf",
    source="IEEE 754: both spread through every later sum",
    cause="overflow, log or division by 0, or a learning rate that is too high",
    fix="record FlightRecorder(), which finds where it begins; lower the learning rate, add an "
    "eps, or clip gradients",
)
def non_finite(run: RunView) -> Iterator[Finding]:
    """NaN or Inf: the first step, and the first layer in execution order."""
    if run.recorded.incidents:
        i = run.recorded.incidents[0]
        what = f"the first non-finite {i.kind}{f' in {i.type}' if i.type else ''}"
        what += f" was at step {i.step}" + f". {i.note.rstrip('.')}" * bool(i.note)
        says = _of_incident(i)
        yield says.found("error", what, filter(None, [i.name]), (i.step, i.step))
        return
    seen = [r for r in run.recorded.records if "nonfinite" in r.values]
    losses = run.recorded.losses
    if not seen and losses is None and not run.info.get("nan_losses"):
        raise read.Missing("no activations")
    firsts = [f for r in seen if (f := _first_non_finite(r)) is not None]
    broken = None if losses is None else _loss_breaks_at(losses)
    if firsts:
        yield _first_of(run, min(firsts, key=lambda f: f[2]), broken)
    elif broken is not None:
        what = f"the loss stops being a number at step {broken}"
        says = non_finite
        layers = run.recorded.activations
        if layers is not None and _outlives(layers, broken):
            what += ", and what the layers give stays finite"
            says = _OVERFLOW if _grew(layers, broken) else _IN_LOSS
        yield says.found("error", what, (), (broken, broken))
    else:
        n, of = run.info.get("nan_losses") or (0, 1)
        if n > OFTEN * of:
            what = f"the loss of {n} of {of} batches is NaN or Inf"
            yield _OFTEN.found("error" if 2 * n > of else "warning", what, (), run.all_steps)


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
    says = _MASK if record.kind == "activation" else _SKIPPED
    severity = "note" if harmless else "error"
    if not harmless:
        says, why = _origin(run, record, row, step)
        what += why
    return says.found(severity, what + harmless, [record.names[row]], (step, step))


def _origin(run: RunView, record: Record, row: int, step: int) -> tuple[Rule, str]:
    """Where the first non-finite values come from: the rule that says so, and what shows it."""
    if record.kind == "gradient" and run.recorded.activations is not None:
        return _BACKWARD, ", while what the layers give is still finite"
    if record.kind != "activation" or not _weights_are_finite(run, record, step):
        return non_finite, ""
    if _grew(record, step):
        return _OVERFLOW, ", after what the layers give grew more than 100-fold"
    if row == 0:
        return _DATA, ", the first layer that was recorded, while its weights are finite"
    return _FUNCTION, ", while all before it and its own weights are finite"


def _weights_are_finite(run: RunView, record: Record, step: int) -> bool:
    """Whether no step before `step`, where an activation is not finite, can have spoiled weights.

    `step` is the first of all, or parameters were recorded in the step before: those that were
    not finite then would be what began.
    """
    before, params = record.steps[record.steps < step], run.recorded.params
    if not len(before) or params is None:
        return not len(before)
    seen = params.steps[params.steps < step]
    return bool(len(seen) and seen[-1] >= before[-1])


def _grew(record: Record, step: int) -> bool:
    """Whether the largest RMS of all layers grew, up to this step, as `_is_huge` says."""
    rms = record.values.get("rms", np.zeros((1, len(record))))[:, record.steps <= step]
    return _is_huge(np.where(np.isfinite(rms), rms, 0.0).max(axis=0, initial=0.0))


def _is_huge(sizes: Floats) -> bool:
    """Whether the last of the sizes is more than a hundred times the first."""
    sizes = read.known(sizes)
    return bool(len(sizes) > 1 and sizes[-1] > HUGE * sizes[0] > 0)


def _outlives(record: Record, step: int) -> bool:
    return bool(len(record) and "nonfinite" in record.values and record.steps[-1] >= step)


def _of_incident(i: Incident) -> Rule:
    """What an incident of `FlightRecorder` shows of its cause; its notes are its own words."""
    if i.kind == "loss":
        return _IN_LOSS
    if i.kind == "gradient":
        return _BACKWARD
    if "model's input was not finite" in i.note:
        return _DATA
    if "spoiled" in i.note:
        return _SPOILED
    if i.kind != "activation" or not i.note:
        return non_finite
    return _OVERFLOW if _is_huge(i.history.get(i.name, np.zeros(0))) else _FUNCTION


_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"

_DATA = non_finite.but(
    cause="the data, or a function that prepares them, rather than the learning rate",
    fix="check the batch of that step, torch.isfinite(x).all(), and the code that loads it and "
    "scales it (a division by a standard deviation of 0, say)",
)

_SPOILED = non_finite.but(
    cause="a step that made the weights NaN or Inf: a learning rate that is too high, or gradients "
    "that were not finite",
    fix=f"divide the learning rate by 10, and clip gradients before each step: {_CLIP}",
)

_FUNCTION = non_finite.but(
    cause="a function that is not finite there: log, sqrt or a division at 0, or exp of something "
    "large",
    fix="look at what runs in this layer and just before it, and keep it away from 0: "
    "x.clamp(min=1e-8), or an eps",
)

_OVERFLOW = non_finite.but(
    cause="values that grew until they overflowed: a learning rate that is too high, or a "
    "recurrence",
    fix=f"divide the learning rate by 10, and clip gradients before each step: {_CLIP}",
)

_IN_LOSS = non_finite.but(
    cause="the loss itself: log or a division at 0 in it, or targets that are not finite",
    fix="use a loss that takes scores (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss), and check the "
    "targets: torch.isfinite(y).all()",
)

_OFTEN = _IN_LOSS.but(
    threshold="5 % of the batches",
    source="hookkit, chosen: a scaler or a caller that leaves such batches out learns from fewer",
)

_BACKWARD = non_finite.but(
    cause="a derivative that is not finite: sqrt or a norm at 0, a division; or an overflow in "
    "half precision",
    fix="run such a step under torch.autograd.set_detect_anomaly(True), which names the operation; "
    "in float16 use torch.amp.GradScaler",
)

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
