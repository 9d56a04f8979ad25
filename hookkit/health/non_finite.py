"""The rule on NaN and Inf: where the first one arose, and whether any harm came of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.loss_trend import stops_being_a_number
from hookkit.health.rule import Hit, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Record


@rule(
    threshold="any NaN or Inf",
    source="IEEE 754: both spread through every later sum",
    cause="overflow, log or division by 0, or a learning rate that is too high",
    fix="look at this layer's inputs in the steps before; lower the learning rate, add an eps, or "
    "clip gradients",
)
def non_finite(run: RunView) -> Iterator[Hit]:
    """NaN or Inf: the first step, and the first layer in execution order."""
    if run.run.incidents:
        i = run.run.incidents[0]
        what = f"first non-finite {i.kind}{f' in {i.type}' if i.type else ''} at step {i.step}"
        yield Hit("error", (i.name,) if i.name else (), (i.step, i.step), what)
        return
    seen = [r for r in run.run.records if "nonfinite" in r.values]
    losses = run.run.losses
    if not seen and losses is None:
        raise read.Missing("no activations")
    firsts = [f for r in seen if (f := _first_non_finite(r)) is not None]
    broken = None if losses is None else _loss_breaks_at(losses)
    if firsts:
        yield _first_of(run, min(firsts, key=lambda f: f[2]), broken)
    elif broken is not None:
        what = f"the loss stops being a number at step {broken}"
        yield Hit("error", (), (broken, broken), what)


def _first_of(run: RunView, first: tuple[Record, int, int], broken: int | None) -> Hit:
    """The hit for the first non-finite record: a note if nothing came of it."""
    record, row, step = first
    kind = {"activation": "output", "gradient": "gradient", "param": "value"}[record.kind]
    what = f"the {kind} of {record.names[row]} ({record.types[row]}) has NaN or Inf"
    harmless = ""
    if broken is None and record.kind != "activation" and _did_no_harm(run, record):
        harmless = ", and weights, activations and loss stay finite"
    elif step == record.steps[0] and broken is None and run.learns:
        harmless = ", from the first step on, while the loss stays finite and falls"
    of = None if not harmless else _MASK if record.kind == "activation" else _SKIPPED
    severity = "note" if harmless else "error"
    return Hit(severity, (record.names[row],), (step, step), what + harmless, of)


_MASK = non_finite.but(
    cause="a deliberate mask of -inf, most likely", fix="nothing, if it is a mask"
)

_SKIPPED = non_finite.but(
    cause="steps that a GradScaler skips while it looks for its scale, most likely",
    fix="nothing, if they are few",
)


def _did_no_harm(run: RunView, record: Record) -> bool:
    """Whether weights and activations stay finite: a fused optimizer skipped those steps."""
    activations, params = run.run.activations, run.run.params
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
    if stops_being_a_number(losses):
        return int(np.flatnonzero(np.isfinite(losses))[-1]) + 1
    return int(np.isinf(losses).argmax()) if np.isinf(losses).any() else None
