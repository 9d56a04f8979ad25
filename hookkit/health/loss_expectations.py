"""Losses that need not fall: of players, of policies and energies, of a target that moves.

Builds on `loss_trend`. Where no training is meant to bring the loss down, a loss
that does not fall is no problem. `why_it_need_not_fall` finds out; then `not_learning` is a note,
and for all other rules it is unknown whether the run learns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hookkit.health import reading as read
from hookkit.health.loss_trend import end_level, known, losses, rise_over_bound
from hookkit.health.rule import CHECKER, TAYLOR, Rule
from hookkit.records import Floats, Record, Run

NEVER_BELOW_ZERO = frozenset(
    {"crossentropy", "nll", "mse", "l1", "smoothl1", "huber", "bce", "bcewithlogits"}
    | {"binarycrossentropy", "binarycrossentropywithlogits"}
)

# A step sees twice as much at the end as at first: losses of different data (measured)
GROWN_BATCH = 2.0
# A rise of twice what the steps can do: more than their curvature explains (hookkit, measured)
ABOVE_BOUND = 2.0


# Both signs have a tenth of the early losses or more, and the loss stays within ten times their
# size (hookkit, measured).
BOTH_SIGNS, NEAR_ZERO = 0.1, 10
# Share of steps in which the layers see what they saw a period before (hookkit, measured)
ALIKE = 0.95


class ExpectedNonDecrease(NamedTuple):
    """Why a loss need not fall: what was seen, and the texts of a finding about it."""

    evidence: str
    texts: Rule


def _expected(*, threshold: str, source: str, cause: str, fix: str) -> Rule:
    """The rule `not_learning` with texts about a loss that need not fall."""
    threshold = f"less than 5 % below its start, {threshold}"
    return Rule("not_learning", threshold, f"{CHECKER}: 5 %; {source}", cause, fix)


_PLAYERS = _expected(
    threshold="where no matrix moves at every step, or steps differ in turns",
    source="Goodfellow et al. 2014 (arXiv 1406.2661): at a GAN's optimum neither player gains",
    cause="players that learn against each other: such a loss need not fall",
    fix="judge by samples or scores, not by this loss",
)

_DIFFERENCE = _expected(
    threshold="where a loss has both signs in the first fifth of the run, or begins at 0, and "
    "stays within ten times that",
    source='OpenAI, Spinning Up, part 3, of policy gradients: "The loss function means nothing"; '
    "Hugging Face, open-r1 issue 239: GRPO's starts at 0 and then increases",
    cause="a loss that is a difference, of advantages, energies or a critic's scores: 0 is not its "
    "floor",
    fix="judge by the reward, or by samples, not by this loss",
)

_MOVING_TARGET = _expected(
    threshold="where frozen matrices change",
    source="Grill et al. 2020 (BYOL, arXiv 2006.07733): no loss is known of which such a training "
    "is a gradient descent",
    cause="a target that moves with the model (a teacher, a target network): such a loss need not "
    "fall",
    fix="judge by the reward, or by a probe, not by this loss",
)

_CHANGING_DATA = _expected(
    threshold="above twice the sum of |gradient| × |update|, which no step can exceed to first "
    "order",
    source=f"{TAYLOR}; 2: hookkit, measured",
    cause="data or targets that change with the run: returns that grow as an agent learns",
    fix="judge by the reward, or by the loss on data that stay the same",
)

_GROWING_DATA = _expected(
    threshold="where a step of the last third sees more than twice as much as one of the first",
    source="the definition: the losses of different data cannot be compared",
    cause="data that grow with the run: episodes that last longer as the agent learns, longer "
    "sequences",
    fix="judge by the reward, or by the loss on data that stay the same",
)


def loss_name(run: Run) -> str:
    """The loss function's name as one word in small letters: `"crossentropy"`; "" if unknown."""
    name = str(run.info.get("loss", run.info.get("loss_func", ""))).replace("_", "").lower()
    return name.removesuffix("loss")


def why_it_need_not_fall(run: Run) -> ExpectedNonDecrease | None:
    """Why the loss of this run need not fall, or None.

    Raises:
        Missing: there are no losses.
    """
    because = ExpectedNonDecrease
    if read.trained_in_turns(run):
        return because("parts of the model move in turns", _PLAYERS)
    seen = [r for r in (run.activations, run.gradients) if r is not None]
    if run.params is None and (period := max(map(_period, seen), default=0)):
        what = f"every {period} steps the batch takes the same turns through the layers"
        return because(what, _PLAYERS)
    if _has_both_signs(run):
        return because("it is above 0 and below it, or begins at 0", _DIFFERENCE)
    if run.params is not None and (names := _moving_targets(run.params)):
        return because(f"{names[0]}, frozen, follows what is trained", _MOVING_TARGET)
    if (rise := _rise_over_bound(run)) > ABOVE_BOUND:
        what = f"it rises {rise:.3g} times as far as gradients and steps explain"
        return because(what, _CHANGING_DATA)
    if (growth := max(map(_batch_growth, seen), default=0)) > GROWN_BATCH:
        what = f"a step saw {growth:.2g} times as much at the end as at first"
        return because(what, _GROWING_DATA)
    return None


def _period(record: Record) -> int:
    """After how many steps the layers see the same shares of the batch again; 0 if at each step.

    A discriminator sees real and generated samples in one step and only generated ones in the next;
    and what is detached there gets gradients in every other step. So a GAN is seen without
    parameters.
    """
    if "count" not in record.values or set(np.diff(record.steps)) | set(record.spans) != {1}:
        return 0
    counts = np.nan_to_num(record.values["count"])
    with np.errstate(all="ignore"):
        shares = np.nan_to_num(counts / counts.max(axis=0))  # a last batch is short in all layers
    longest = min(6, shares.shape[1] // 5)
    for n in range(1, longest + 1):
        if _alike(shares[:, n:], shares[:, :-n]).mean() > ALIKE:
            return n if n > 1 else 0
    return 0


def _alike(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isclose(a, b, atol=1e-9).all(axis=0))


def _has_both_signs(run: Run) -> bool:
    """Whether the loss is above and below 0 from early on, or begins at 0, and stays near it."""
    series = losses(run)
    values = known(series)
    early = values[: max(10, len(values) // 5)]
    both = min((early < 0).mean(), (early > 0).mean()) > BOTH_SIGNS
    near = abs(end_level(values)) <= NEAR_ZERO * np.abs(early).max()
    differs = bool((both or abs(values[0]) < 1e-6) and near)
    return differs and loss_name(run) not in NEVER_BELOW_ZERO


def _moving_targets(record: Record) -> tuple[str, ...]:
    """Frozen matrices that change nevertheless: of a teacher, or of a target network."""
    frozen = np.array([x is False for x in read.meta(record, "requires_grad", True)], bool)
    matrix = np.array(read.meta(record, "ndim", 2)) >= 2
    return read.names(record, np.flatnonzero(frozen & matrix & read.has_changed(record)))


def _rise_over_bound(run: Run) -> float:
    """How many times as far the loss rises as the steps can have moved it; 0 if not known.

    0 for cross entropies too: data that change under a classifier do not explain that its loss
    rises.
    """
    if "entropy" in loss_name(run) or loss_name(run).startswith(("nll", "bce")):
        return 0.0
    try:
        record = read.enough(run.params, "parameters")
        return rise_over_bound(record, losses(run, 20)) or 0.0
    except read.Missing:
        return 0.0


def _batch_growth(record: Record) -> float:
    """How many times as much a step shows to the layers in the last third as in the first."""
    if "count" not in record.values or len(record) < 6:
        return 0.0
    counts = record.values["count"] / record.spans
    counts = counts[(np.nan_to_num(counts) > 0).all(axis=1)]
    third = len(record) // 3
    grew = counts[:, -third:].mean(axis=1) / counts[:, :third].mean(axis=1)
    return float(grew.min()) if len(counts) else 0.0
