"""Losses that need not fall: of players, of policies and energies, of a target that moves.

A loss that does not fall is no illness where no training is meant to bring it down. `excuse` tells
by what it is known; `curves.not_learning` then is a note, and to all rules the loss is unknown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hookkit.health import loss_bound
from hookkit.health import reading as read
from hookkit.records import Floats, Record, Run

NEVER_BELOW_ZERO = frozenset(
    {"crossentropy", "nll", "mse", "l1", "smoothl1", "huber", "bce", "bcewithlogits"}
    | {"binarycrossentropy", "binarycrossentropywithlogits"}
)


class Excuse(NamedTuple):
    """Why a loss need not fall: the last five fields of a `Finding`, its evidence first."""

    evidence: str
    threshold: str
    source: str
    cause: str
    fix: str


def without_columns(run: Run) -> Run:
    """The run without a number of classes where its loss has none, and columns were counted.

    A binary cross entropy judges each column by itself: chance is ln 2, however many there are.
    """
    name, n = loss_name(run), run.info.get("n_classes")
    binary = name.startswith(("binary", "bce")) and n != 2
    if n is None or not (binary or name in ("poissonnll", "gaussiannll")):
        return run
    return replace(run, info={k: v for k, v in run.info.items() if k != "n_classes"})


def with_excuse(run: Run) -> Run:
    """The run with its excuse noted, since all rules ask for it: looking takes a while."""
    try:
        return replace(run, info={**run.info, "excuse": excuse(run)})
    except read.Missing:
        return run  # no losses, so nobody will ask


def excuse(run: Run) -> Excuse | None:
    """Why the loss of this run need not fall, or None."""
    if "excuse" in run.info:
        found: Excuse | None = run.info["excuse"]
        return found
    if read.in_turns(run):
        return _players("parts of the model move in turns")
    seen = [r for r in (run.activations, run.gradients) if r is not None and run.params is None]
    if cycle := max(map(_cycle, seen), default=0):
        return _players(f"every {cycle} steps the batch takes the same turns through the layers")
    if _has_both_signs(run):
        return _DIFFERENCE
    if run.params is not None and (names := _followers(run.params)):
        return Excuse(f"{names[0]}, frozen, follows what is trained", *_MOVING)
    if (rise := _beyond_reach(run)) > 2:
        return Excuse(f"it rises {rise:.3g} times as far as gradients and steps explain", *_OTHER)
    if (growth := max(map(_growth, filter(None, (run.activations, run.gradients))), default=0)) > 2:
        return Excuse(f"a step saw {growth:.2g} times as much at the end as at first", *_LONGER)
    return None


def learns(run: Run) -> bool | None:
    """`reading.improved`, and None also where the loss need not fall."""
    fell = read.improved(run)
    if fell is False and np.isfinite(read.end_level(read.losses(run))) and excuse(run):
        return None
    return fell


def loss_name(run: Run) -> str:
    """The loss function's name as one word in small letters: `"crossentropy"`; "" if unknown."""
    name = str(run.info.get("loss", run.info.get("loss_func", ""))).replace("_", "").lower()
    return name.removesuffix("loss")


def _players(evidence: str) -> Excuse:
    return Excuse(
        evidence,
        "where no matrix moves at every step, or steps differ in turns",
        "Goodfellow et al. 2014 (arXiv 1406.2661): at a GAN's optimum neither player gains",
        "players that learn against each other: such a loss need not fall",
        "judge by samples or scores, not by this loss",
    )


def _cycle(record: Record) -> int:
    """After how many steps the same layers see the same share of the batch again; 0 if at each.

    A discriminator sees real and made samples in one step, in the next made ones alone; and what
    is detached there gets gradients in every other step.
    """
    if "count" not in record.values or set(np.diff(record.steps)) | set(record.spans) != {1}:
        return 0
    counts = np.nan_to_num(record.values["count"])
    with np.errstate(all="ignore"):
        shares = np.nan_to_num(counts / counts.max(axis=0))  # a last batch is short in all layers
    longest = min(6, shares.shape[1] // 5)
    for n in range(1, longest + 1):
        if _alike(shares[:, n:], shares[:, :-n]).mean() > 0.95:
            return n if n > 1 else 0
    return 0


def _beyond_reach(run: Run) -> float:
    """How many times as far the loss rises as the steps can have made it; 0 if it is not known.

    Of a cross entropy as well: data that change under a classifier are no excuse.
    """
    if "entropy" in loss_name(run) or loss_name(run).startswith(("nll", "bce")):
        return 0.0
    try:
        return loss_bound.climbed(read.params(run), read.losses(run, 20)) or 0.0
    except read.Missing:
        return 0.0


def _growth(record: Record) -> float:
    """How many times as much a step shows to the layers in the last third as in the first."""
    if "count" not in record.values or len(record) < 6:
        return 0.0
    counts = record.values["count"] / record.spans
    counts = counts[(np.nan_to_num(counts) > 0).all(axis=1)]
    third = len(record) // 3
    grew = counts[:, -third:].mean(axis=1) / counts[:, :third].mean(axis=1)
    return float(grew.min()) if len(counts) else 0.0


def _alike(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isclose(a, b, atol=1e-9).all(axis=0))


def _has_both_signs(run: Run) -> bool:
    """Whether the loss is above and below 0 from early on, or begins at 0, and stays near."""
    known = read.losses(run)
    known = known[np.isfinite(known)]
    early = known[: max(10, len(known) // 5)]
    both = min((early < 0).mean(), (early > 0).mean()) > 0.1
    near = abs(read.end_level(known)) <= 10 * np.abs(early).max()
    return bool((both or abs(known[0]) < 1e-6) and near) and loss_name(run) not in NEVER_BELOW_ZERO


_DIFFERENCE = Excuse(
    "it is above 0 and below it, or begins at 0",
    "where a loss has both signs in the first fifth of the run, or begins at 0, and stays within "
    "ten times that",
    'OpenAI, Spinning Up, part 3, of policy gradients: "The loss function means nothing"; '
    "Hugging Face, open-r1 issue 239: GRPO's starts at 0 and then increases",
    "a loss that is a difference, of advantages, energies or a critic's scores: 0 is not its floor",
    "judge by the reward, or by samples, not by this loss",
)


def _followers(record: Record) -> tuple[str, ...]:
    """Matrices that nobody trains and that drift all the same: a teacher, a target network."""
    frozen = np.array([x is False for x in read.meta(record, "requires_grad", True)], bool)
    matrix = np.array(read.meta(record, "ndim", 2)) >= 2
    return read.names(record, np.flatnonzero(frozen & matrix & read.drifts(record)))


_MOVING = (
    "where frozen matrices change",
    "Grill et al. 2020 (BYOL, arXiv 2006.07733): no loss is known of which such a training is a "
    "gradient descent",
    "a target that moves with the model (a teacher, a target network): such a loss need not fall",
    "judge by the reward, or by a probe, not by this loss",
)

_OTHER = (
    "above twice the sum of |gradient| × |update|, which no step can exceed to first order",
    "first-order Taylor expansion and the Cauchy-Schwarz inequality; 2: hookkit, measured",
    "data or targets that change with the run: returns that grow as an agent learns",
    "judge by the reward, or by the loss on data that stay the same",
)

_LONGER = (
    "where a step of the last third sees more than twice as much as one of the first",
    "the definition: the losses of different data cannot be compared",
    "data that grow with the run: episodes that last longer as the agent learns, longer sequences",
    "judge by the reward, or by the loss on data that stay the same",
)
