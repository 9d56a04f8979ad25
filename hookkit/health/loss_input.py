"""The rule on what the loss is given: probabilities, where it expects scores.

Proved by the last layer or the values themselves where they were seen; else by bounds that a loss
of inputs between 0 and 1 cannot leave.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.loss_trend import end_level, known
from hookkit.health.rule import Hit, rule
from hookkit.health.run_view import RunView

# An RMS of scores that would make a binary cross entropy almost 0, or large (measured)
SCORES_SIZE = 4
# Scores below this mask something out, and do not change the loss
MASK_SIZE = -1e3
# How near its floor a loss must end to have settled there (hookkit, measured)
NEAR_FLOOR = 0.1

_ENDS = ("Softmax", "Sigmoid")


@rule(
    threshold="rows of non-negative numbers that sum to 1 (or a loss that cannot pass below "
    "ln(e + C - 1) - 1)",
    source="PyTorch, CrossEntropyLoss: the input is expected to contain unnormalised logits",
    cause="a softmax (or sigmoid) before a loss that applies its own",
    fix="return the scores from the model; apply softmax only to show probabilities",
)
def probabilities(run: RunView) -> Iterator[Hit]:
    """Probabilities given to a loss that expects scores."""
    name = run.loss_name
    nll, binary = name == "nll", name.endswith("withlogits")
    if not nll and not binary and ("crossentropy" not in name or name.startswith("binary")):
        raise read.Missing("loss function unknown")
    hit = _by_last_layer(run)
    if hit is None and binary:
        hit = _by_narrow_range(run)
    elif hit is None and not nll:
        hit = _by_output(run) or _by_floor(run)
    if hit is not None:
        yield hit._replace(of=_BINARY if binary else _NLL if nll else None)


_BINARY = probabilities.but(
    threshold="a sigmoid at the end; or a loss between ln(1 + 1/e) and ln(1 + e), which inputs "
    "between 0 and 1 cannot leave, where the last layer gives RMS 4 or more",
    source="PyTorch, BCEWithLogitsLoss: combines a Sigmoid layer and the BCELoss; the bounds are "
    "exact",
)

_NLL = probabilities.but(
    source="PyTorch, NLLLoss: the input is expected to contain log probabilities",
    cause="a softmax before a loss that expects its logarithm",
    fix="use log_softmax, or return the scores and use CrossEntropyLoss",
)


def _by_output(run: RunView) -> Hit | None:
    if run.info.get("output_is_probabilities"):
        return Hit("error", (), run.all_steps, "the model's output rows are probabilities")
    return None


def _by_last_layer(run: RunView) -> Hit | None:
    if (given := run.info.get("loss_input")) in _ENDS:
        return Hit("error", (), run.all_steps, f"the loss is given what a {given.lower()} gives")
    record = run.recorded.activations
    if record is None or not record.names or record.types[-1] not in _ENDS:
        return None
    what = f"the last layer is {record.types[-1]}"
    return Hit("error", (record.names[-1],), run.all_steps, what)


def _by_narrow_range(run: RunView) -> Hit | None:
    """With inputs in [0, 1] no batch of a binary cross entropy is below .313, or above 1.313.

    Scores as large as 4 would make it almost 0 where they are right, and large where they are not.
    """
    record, series = run.recorded.activations, run.losses_of(50)
    low, high = float(np.nanmin(series)), float(np.nanmax(series))
    if record is None or len(record) < read.MIN_RECORDS:
        return None
    if record.types[-1] not in read.PRE_ACTIVATION:
        return None
    inside = low >= np.log1p(1 / np.e) and high <= np.log1p(np.e)
    rms, least = (read.median(record.value(s, -1)[read.last_half(record)]) for s in ("rms", "min"))
    if not inside or not rms > SCORES_SIZE or least < MASK_SIZE:
        return None
    what = f"the loss stays within {low:.3g} and {high:.3g} while {record.names[-1]} gives values "
    return Hit("warning", (), run.all_steps, f"{what}of RMS {rms:.3g}")


def _by_floor(run: RunView) -> Hit | None:
    """With inputs in [0, 1] a cross entropy stays in [floor, floor + 1]; learning nears floor."""
    losses = run.recorded.losses
    if losses is None or not run.info.get("n_classes") or len(losses) < 50:
        return None
    series = known(losses)
    n = int(run.info["n_classes"])
    floor = float(np.log(np.e + n - 1) - 1)
    low, high, end = series.min(), series.max(), end_level(series)
    if n < 3 or low < floor - 1e-4 or high > floor + 1 + 1e-4 or end > floor + NEAR_FLOOR:
        return None
    before = float(np.median(series[-max(len(series) // 4, 10) :][:10]))
    if before - end > end - floor:
        return None  # it is falling past the floor, and does not settle there
    what = f"the loss stays within {low:.4g} and {high:.4g} and settles on {end:.4g}"
    return Hit("warning", (), run.all_steps, what)
