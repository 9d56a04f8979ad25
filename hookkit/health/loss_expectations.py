"""Losses that need not fall: of players, of policies and energies, of a target that moves.

Builds on `reading`. Where no training is meant to bring the loss down, a loss that does not fall is
no problem. `why_it_need_not_fall` finds out; then `not_learning` is a note, and for all other rules
it is unknown whether the run learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import CHECKER, TAYLOR, Rule
from hookkit.records import Record

if TYPE_CHECKING:
    from hookkit.health.run_view import RunView

ERRORS = frozenset({"mse", "l1", "smoothl1", "huber"})
"""Losses of a regression."""

NEVER_BELOW_ZERO = ERRORS | {
    *("crossentropy", "nll", "bce", "bcewithlogits"),
    *("binarycrossentropy", "binarycrossentropywithlogits"),
}

# A rise of twice what the steps can do: more than their curvature explains (hookkit, measured)
ABOVE_BOUND = 2.0
# Both signs have a tenth of the early losses or more, and the loss stays within ten times their
# size (hookkit, measured).
BOTH_SIGNS, NEAR_ZERO = 0.1, 10
# Steps before which a model was asked, each time on something else: agents, in all trainings here;
# an evaluation asks about the same samples each time (hookkit, measured)
OFTEN_ASKED = 3
# Of a loss: what float32 leaves of no change
ROUNDING = 1e-6
# Standard deviations below 0 that a loss of a difference may begin at (hookkit, measured)
WITHIN_NOISE = 3


def _expected(*, threshold: str, source: str, cause: str, fix: str) -> Rule:
    """The rule `not_learning` with texts about a loss that need not fall.

    `threshold` says when that is so; `not_learning` puts the line of the loss before it.
    """
    return Rule("not_learning", threshold, f"{CHECKER}: 5 %; {source}", cause, fix)


_PLAYERS = _expected(
    threshold="where no matrix moves at every step",
    source="Goodfellow et al. 2014 (arXiv 1406.2661): at a GAN's optimum neither player gains",
    cause="players that learn against each other: such a loss need not fall",
    fix="judge by samples or scores, not by this loss",
)

_OTHERS_WEIGHTS = _expected(
    threshold="where weights outside the model and its optimizer take part in the loss",
    source=_PLAYERS.source.removeprefix(f"{CHECKER}: 5 %; "),
    cause="another model in the loss that is trained too (a discriminator, a critic): such a loss "
    "need not fall",
    fix=_PLAYERS.fix,
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

_OWN_DATA = _expected(
    threshold="where the model is called without gradients between its steps, each time on others, "
    "and the loss is no cross entropy",
    source="exact, by the calls of the model; OpenAI, Spinning Up, part 3",
    cause="an agent that acts, or a model that makes its own targets: what it is to learn changes",
    fix="judge by the reward, or by the loss on data that stay the same",
)

_CHANGING_DATA = _expected(
    threshold="above twice the sum of |gradient| × |update|, which no step can exceed to first "
    "order",
    source=f"{TAYLOR}; 2: hookkit, measured",
    cause="data or targets that change with the run: returns that grow as an agent learns",
    fix="judge by the reward, or by the loss on data that stay the same",
)


def why_it_need_not_fall(run: RunView) -> tuple[str, Rule] | None:
    """Why the loss of this run need not fall, in words and as the rule that reports it; or None.

    Raises:
        Missing: there are no losses.
    """
    values = read.known(run.losses)
    if np.ptp(values) <= ROUNDING * abs(values[0]) > 0:
        return None  # a loss that never changes has no excuse
    params = run.recorded.params
    if trained_in_turns(params):
        return "parts of the model move in turns", _PLAYERS
    if others := run.info.get("others_weights"):
        return f"{others} weights of another model take part in it", _OTHERS_WEIGHTS
    if _has_both_signs(run):
        return "it is above 0 and below it, or begins at 0", _DIFFERENCE
    if params is not None and (name := follower(params)):
        return f"{name}, frozen, follows what is trained", _MOVING_TARGET
    if asks(run) and not _by_class(run):
        return "the model is asked what to do, or what is true, between its steps", _OWN_DATA
    if (rise := _rise_over_bound(run)) > ABOVE_BOUND:
        return f"it rises {rise:.3g} times as far as gradients and steps explain", _CHANGING_DATA
    return None


def follower(params: Record) -> str:
    """The first frozen matrix that changes: of a teacher, or of a target network; else ""."""
    changed = ~read.trainable(params) & read.is_matrix(params) & read.has_changed(params)
    return params.names[changed.argmax()] if changed.any() else ""


def trained_in_turns(params: Record | None) -> bool:
    """Whether some matrices are trained in some steps and others in others: a GAN's two players.

    No matrix moves at (nearly) every step, and two of them never move in the same step, but each
    moves between steps of the other.
    """
    if params is None or len(params) < read.MIN_RECORDS:
        return False
    which = read.matrices(params)
    moves = np.nan_to_num(read.table(params, "update_norm")[which]) > 0
    if (read.has_changed(params)[which] & ~moves.any(axis=1)).any():
        return True  # it moves, but always in steps that were not recorded
    moves = moves[moves.mean(axis=1) > 0.1]
    if len(moves) < 2 or moves.mean(axis=1).max() > 0.95:
        return False
    together = moves.astype(float) @ moves.T.astype(float)
    first, second = np.unravel_index(int(together.argmin()), together.shape)
    a, b = np.flatnonzero(moves[first]), np.flatnonzero(moves[second])
    return bool(together.min() == 0 and a[0] < b[-1] and b[0] < a[-1])


def _has_both_signs(run: RunView) -> bool:
    """Whether the loss is above and below 0 from early on, or begins at 0, and stays near it.

    Or below 0, by no more than its noise.
    """
    values = read.known(run.losses)
    early = values[: max(10, len(values) // 5)]
    both = min((early < 0).mean(), (early > 0).mean()) > BOTH_SIGNS
    at_zero = -WITHIN_NOISE * read.noise(early) < np.median(early) < 0 if len(early) > 1 else False
    near = abs(read.end_level(values)) <= NEAR_ZERO * np.abs(early).max()
    differs = bool((both or at_zero or abs(values[0]) < 1e-6) and near)
    return differs and run.loss_name not in NEVER_BELOW_ZERO


def asks(run: RunView) -> bool:
    """Whether the model is called without gradients between steps, each time on something else."""
    steps, different = run.info.get("asked") or (0, 0)
    return bool(different >= OFTEN_ASKED and different > steps / 2)


def _by_class(run: RunView) -> bool:
    """Whether the loss is a cross entropy, of labels that do not change."""
    return "entropy" in run.loss_name or run.loss_name.startswith(("nll", "bce"))


def _rise_over_bound(run: RunView) -> float:
    """How many times as far the loss rises as the steps can have moved it; 0 if not known.

    0 for cross entropies too: data that change under a classifier do not explain that its loss
    rises.
    """
    if _by_class(run):
        return 0.0
    try:
        return read.rise_over_bound(run.params, run.losses_of(20)) or 0.0
    except read.Missing:
        return 0.0
