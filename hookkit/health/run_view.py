"""A run as rules see it: what they need of it, or `Missing`; and whether it learns, computed once.

A loss counts as fallen if it ends 5 % or more below its start. Two more questions make that honest:
did it only come down from a wild start to chance; and does it fall by less, but steadily.

Builds on `reading` and `loss_expectations`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import CHANCE_UNKNOWN, Rule
from hookkit.health.loss_expectations import why_it_need_not_fall
from hookkit.records import Floats, Ints, Record, Run

# In fewer steps than this, a loss that does not fall proves nothing
ENOUGH_LOSSES = 50
# Ben Braiek & Khomh 2022 (TheDeepChecker): a loss that falls by less than 5 % does not fall
FALL = 0.05
# A steady fall of 2 % is one, too (hookkit, measured)
SLOW_FALL = 0.02
# Above this share of its start a loss has much left (hookkit, measured)
MUCH_LEFT = 0.3
# A loss that begins below this share of chance belongs to a model that had learnt before (measured)
LEARNT_BEFORE = 0.5


class RunView:
    """What rules read of a run. Each property raises `Missing` where the run does not hold it.

    Args:
        run: in `.recorded`, for what a rule can do without. Its facts are in `.info`, where
            `n_classes` is absent if the loss has no classes.
    """

    def __init__(self, run: Run) -> None:
        self.recorded = run
        self.info: dict[str, Any] = dict(run.info)
        self.all_steps = (0, max(run.n_steps - 1, 0))
        # A binary cross entropy judges each column by itself: chance is ln 2, however many there
        # are; and a likelihood of counts or of numbers has columns, but no classes.
        binary = self.loss_name.startswith(("binary", "bce")) and self.info.get("n_classes") != 2
        if binary or self.loss_name in ("poissonnll", "gaussiannll"):
            self.info.pop("n_classes", None)

    @property
    def activations(self) -> Record:
        """The record of activations, long enough to judge."""
        return read.enough(self.recorded.activations, "activations")

    @property
    def params(self) -> Record:
        """The record of parameters, long enough to judge."""
        return read.enough(self.recorded.params, "parameters")

    @property
    def losses(self) -> Floats:
        """(n_steps,) losses, NaN where unknown, of which at least one is known."""
        losses = self.recorded.losses
        if losses is None or not np.isfinite(losses).any():
            raise read.Missing("no losses")
        return np.asarray(losses, np.float64)

    def losses_of(self, at_least: int) -> Floats:
        """(n_steps,) losses of at least so many steps."""
        if len(self.losses) < at_least:
            raise read.Missing(f"fewer than {at_least} steps of loss")
        return self.losses

    @cached_property
    def grad_norms(self) -> tuple[Floats, Ints]:
        """Norms of the whole gradient, and the steps they are of."""
        norms = self.recorded.grad_norms
        if self.recorded.params is None and norms is not None:
            return np.asarray(norms, np.float64), np.arange(len(norms))
        record = self.params
        moved = np.nan_to_num(read.table(record, "update_norm")).max(axis=1) > 0
        norms = read.table(record, "grad_norm")[
            moved
        ]  # without what no optimizer has: never zeroed
        known = np.isfinite(norms).any(axis=0)
        whole = np.where(known, np.sqrt(np.nansum(norms**2, axis=0)), np.nan)
        return np.asarray(whole), record.steps

    @property
    def n_classes(self) -> int:
        """The number of classes, 2 or more."""
        n = self.info.get("n_classes")
        if not n or int(n) < 2:
            by_class = self.loss_name in ("nll", "crossentropy")
            raise read.Missing(CHANCE_UNKNOWN if by_class else "number of classes unknown")
        return int(n)

    @property
    def chance(self) -> float:
        """The loss of guessing, as far as it is known; else 0."""
        n = self.info.get("n_classes")
        return float(self.info.get("chance") or (np.log(n) if n else 0.0))

    @property
    def loss_name(self) -> str:
        """The loss function's name as one word in small letters (`"crossentropy"`), or ""."""
        name = str(self.info.get("loss", self.info.get("loss_func", "")))
        return name.replace("_", "").lower().removesuffix("loss")

    @property
    def fails(self) -> bool:
        """Whether the loss should fall, and does not."""
        return self.learns is False

    @property
    def excused(self) -> bool:
        """Whether the loss does not fall, and need not: it proves nothing of the rest."""
        return self.improved is False and self.learns is None

    @cached_property
    def learns(self) -> bool | None:
        """`improved`, but None where the loss need not fall and ends as a number."""
        if self.improved is False:
            ends = np.isfinite(read.end_level(self.losses))
            return None if ends and self.need_not_fall else False
        return self.improved

    @cached_property
    def need_not_fall(self) -> tuple[str, Rule] | None:
        """Why the loss need not fall, in words and as the rule that reports it; or None."""
        return why_it_need_not_fall(self)

    @cached_property
    def improved(self) -> bool | None:
        """Whether the loss fell by 5 % or more; None if it is unknown.

        In fewer than `ENOUGH_LOSSES` steps only a loss that rises proves something: one that stays
        may have had no time.
        """
        try:
            series = self.losses_of(read.MIN_RECORDS)
        except read.Missing:
            return None
        start, end = read.start_level(series), read.end_level(series)
        fell, _ = self.falls(start, end)
        if len(series) < ENOUGH_LOSSES and not fell:
            return None if end <= 1.5 * abs(start) else False
        return fell

    def falls(self, start: float, end: float) -> tuple[bool, str]:
        """Whether a loss ends well below its start, and not merely where guessing would be.

        And the line that it has crossed if it does not, in words.

        Coming down from a wild first loss to chance (ln of the number of classes) is no progress. A
        loss that begins far below chance is a model that had learnt before, and need not fall; so
        with a squared error far below the variance of what the model gives. Below 0 and maximised,
        the loss is a likelihood, which should rise.
        """
        if self.info.get("maximize") and start < 0:
            line = start + FALL * abs(start)
            return end > line, f"below {line:.3g}, 5 % above its start, of a loss that is maximised"
        line, n = start - FALL * abs(start), self.info.get("n_classes")
        missed = f"above {line:.3g}, 5 % below its start"
        if n and n > 1:
            chance = float(np.log(n))
            at_chance = f"chance is ln {n} = {chance:.3g}"
            if start > chance and abs(end - chance) < FALL * chance:
                return False, f"within 5 % of chance ({at_chance})"
            if start > chance and end > 10 * chance:
                return False, f"above {10 * chance:.3g}, ten times chance ({at_chance})"
        if end < line:
            return True, ""
        chance = self.chance or self._chance_of_shares(start)
        if end < (1 - FALL) * chance and end < 1.5 * start:
            return True, ""  # below what guessing gives, as the first steps were already
        return False, missed

    def _chance_of_shares(self, start: float) -> float:
        """The same as `chance` where targets are shares of classes, and the loss begins near it."""
        chance = float(self.info.get("chance_of_shares", 0.0))
        return chance if start > 0.5 * chance else 0.0

    @cached_property
    def has_learnt_little(self) -> bool:
        """Whether a loss falls by less than half, and not because the model had learnt before."""
        start, end = read.start_level(self.losses), read.end_level(self.losses)
        return len(self.losses) >= ENOUGH_LOSSES and end > 0.5 * start > 0 and not self.begins_good

    @property
    def begins_good(self) -> bool:
        """Whether the loss begins far below chance: the model had learnt before."""
        return read.start_level(self.losses) < LEARNT_BEFORE * self.chance

    @property
    def has_much_left(self) -> bool:
        """Whether 0.3 of the loss is left."""
        return read.end_level(self.losses) > MUCH_LEFT * read.start_level(self.losses) > 0

    @property
    def could_fall_further(self) -> bool:
        """Whether the loss is to fall, and 0.3 of it is left, of a model that had not learnt."""
        if self.learns is None or self.need_not_fall or len(self.losses) < ENOUGH_LOSSES:
            return False
        return self.has_much_left and not self.begins_good

    @cached_property
    def trained_before(self) -> bool:
        """Whether norms begin with biases that differ: the model is fine-tuned. False: unknown.

        With weights, where they have no biases: DCGAN begins those of norms at random.
        """
        params = self.recorded.params
        if params is None:
            return False
        norms = np.array(["Norm" in kind for kind in params.types])
        biases = norms & np.array([name.endswith("bias") for name in params.names])
        which = biases if biases.any() else norms
        return not read.meta(params, "constant", True)[which].all()

    @cached_property
    def falls_slowly(self) -> bool:
        """Whether the loss falls by less than 5 %, but steadily and by far more than its noise.

        By 2 % or more (below chance, where that is known), and from the second quarter of the run
        to the last by four standard errors: so that a first drop alone is no slow fall.
        """
        if self.recorded.losses is None:
            return False
        values, end = read.known(self.recorded.losses), read.end_level(self.recorded.losses)
        if len(values) < ENOUGH_LOSSES or np.isinf(end):
            return False
        n = len(values) // 4
        second, last = values[n : 2 * n].mean(), values[3 * n : 4 * n].mean()
        chance = float(np.log(self.info.get("n_classes") or np.inf))
        fall = min(read.start_level(values), chance) - end
        lasts = second - last > 4 * read.noise(values) * np.sqrt(2 / n)
        return bool(lasts and fall > SLOW_FALL * abs(end))
