"""The rule on NaN and Inf: the first step, the first layer, and the cause."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.diagnosis.finding import Finding
from hookkit.diagnosis.view import ENOUGH, View, table
from hookkit.records import Record

_CLIP = "clip gradients, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"

_ORIGINS = {
    "data": (
        "the data of that step, or what prepares them",
        "check the batch, torch.isfinite(x).all(), and the code that loads and scales it",
    ),
    "function": (
        "a function that is not finite there: log, sqrt or a division at 0, exp of a large number",
        "keep its input away from 0, x.clamp(min=1e-8); FlightRecorder() finds where it begins",
    ),
    "growth": (
        "values that grew until they overflowed: a rate that is too high, or a recurrence",
        f"divide the learning rate by 10, and {_CLIP}",
    ),
    "gradient": (
        "a derivative that is not finite (sqrt or a norm at 0), or an overflow in half precision",
        "run the step under torch.autograd.set_detect_anomaly(True), which names the operation",
    ),
    "param": (
        "a step that was too large, or gradients that were not finite",
        f"divide the learning rate by 10, and {_CLIP}",
    ),
    "loss": (
        "the loss itself: log or a division at 0 in it, or targets that are not finite",
        "use a loss that takes scores, and check the targets: torch.isfinite(y).all()",
    ),
    "unknown": (
        "log or a division at 0, overflow, or weights that a step has spoiled",
        "record ParamStats() and FlightRecorder(), which find where it begins",
    ),
}


def non_finite(run: View) -> Iterator[Finding]:
    """Find NaN or Inf: the first step, and the first layer in it."""
    if run.run.incidents:
        i = run.run.incidents[0]
        what = f"the first non-finite {i.kind}{f' in {i.type}' * bool(i.type)}"
        what += f". {i.note.rstrip('.')}" * bool(i.note)
        why, layers = _ORIGINS.get(i.origin, _ORIGINS["unknown"]), (i.name,) if i.name else ()
        yield Finding("non_finite", "error", what, *why, layers, (i.step,))
        return
    firsts = [(*first, r) for r in run.run.records if (first := _first(run, r)) is not None]
    if firsts:
        yield _of_record(run, *min(firsts, key=lambda first: first[0]))
        return
    lost, of = run.info.get("nan_losses") or (0, 1)
    if run.first_nan_step is not None:
        what, steps = "the loss stops being a number", (run.first_nan_step,)
        yield Finding("non_finite", "error", what, *_ORIGINS["loss"], steps=steps)
    elif lost > 0.05 * of:
        what = f"the loss of {lost} of {of} batches is NaN or Inf"
        yield Finding("non_finite", "warning", what, *_ORIGINS["loss"])


def _first(run: View, record: Record) -> tuple[int, int] | None:
    """Return the first step with a non-finite value, and the row that had it first; or None.

    Rows are in the order in which layers were registered. So the layers before the first bad row
    are asked too, as the graph of the training shows them; in the backward the ones after it.
    """
    bad = np.nan_to_num(table(record, "nonfinite")) > 0
    if not bad.any():
        return None
    column = int(bad.any(axis=0).argmax())
    rows = {record.names[row]: int(row) for row in np.flatnonzero(bad[:, column])}
    owners = [[n.rpartition(".")[0] for n in pair] for pair in run.predecessors.items() if pair[1]]
    is_backward = record.kind == "gradient"
    next_to = {b: a for a, b in owners if a in rows} if is_backward else dict(owners)
    name = [*rows][-1 if is_backward else 0]
    for _ in rows:  # at most once around a loop of shared layers
        name = next_to[name] if next_to.get(name) in rows else name
    return int(record.steps[column]), rows[name]


def _of_record(run: View, step: int, row: int, record: Record) -> Finding:
    """Return the finding of the first non-finite value; a note if it did no harm."""
    kind = {"activation": "output", "gradient": "gradient", "param": "value"}[record.kind]
    what, at = f"the {kind} of {record.labels[row]} has NaN or Inf", ((record.names[row],), (step,))
    origin = _origin(run, step, row, record) if record.kind == "activation" else record.kind
    if run.first_nan_step is None:
        if record.kind != "activation" and _did_no_harm(run, record):
            what += ", and weights and outputs stay finite"
            cause = "steps that a GradScaler skips while it looks for its scale"
            return Finding("non_finite", "note", what, cause, "nothing, if they are few", *at)
        if run.loss_decreasing and step == record.steps[0]:
            what += ", from the first step on, while the loss falls"
            fix = "nothing, if it is one"
            return Finding("non_finite", "note", what, "a mask of -inf", fix, *at)
    return Finding("non_finite", "error", what, *_ORIGINS[origin], *at)


def _origin(run: View, step: int, row: int, record: Record) -> str:
    """Return the key of `_ORIGINS` that explains the first non-finite output."""
    p, before = run.params, record.steps < step
    rms = np.where(np.isfinite(table(record, "rms")), table(record, "rms"), 0)[:, before]
    largest = rms.max(axis=0, initial=0)
    if len(largest) > 1 and largest[-1] > 100 * largest[0] > 0:
        return "growth"
    # if the weights are known to be finite, the layer itself made the NaN
    if before.any() and not (p and np.isfinite(table(p, "weight_norm")[:, p.steps <= step]).all()):
        return "unknown"
    is_first = row in run.input_layers or (row == 0 and not run.predecessors)
    return "data" if is_first else "function"


def _did_no_harm(run: View, record: Record) -> bool:
    """Return whether outputs, weights and some of the last `ENOUGH` gradients are finite."""
    a, p = run.activations, run.params
    bad = np.nan_to_num(table(record, "nonfinite"))[:, -ENOUGH:] > 0
    if (a is None and p is None) or bad.any(axis=0).all() or (a is not None and _first(run, a)):
        return False
    weights = table(p, "weight_norm") if p else np.zeros((1, 1))
    return bool((np.isfinite(weights[:, -1]) | ~np.isfinite(weights).any(axis=1)).all())
