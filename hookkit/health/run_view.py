"""A run as rules see it: what they need of it, or `Missing`; and whether it learns, computed once.

Builds on `reading`, `loss_trend` and `loss_expectations`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from hookkit.health import loss_expectations, loss_trend
from hookkit.health import reading as read
from hookkit.health.loss_expectations import ExpectedNonDecrease
from hookkit.records import Floats, Record, Run


class RunView:
    """What rules read of a run. Each property raises `Missing` where the run does not hold it.

    Args:
        run: in `.recorded`, for what a rule can do without; there `info["n_classes"]` is absent if
            the loss has no classes.
    """

    def __init__(self, run: Run) -> None:
        self.recorded = _without_columns(run)
        self.info: dict[str, Any] = self.recorded.info
        self.all_steps = (0, max(run.n_steps - 1, 0))

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
        """(n_steps,) losses, of which at least one is known."""
        return loss_trend.losses(self.recorded)

    def losses_of(self, at_least: int) -> Floats:
        """(n_steps,) losses of at least so many steps."""
        return loss_trend.losses(self.recorded, at_least)

    @property
    def n_classes(self) -> int:
        """The number of classes, 2 or more."""
        n = self.info.get("n_classes")
        if not n or int(n) < 2:
            raise read.Missing("number of classes unknown")
        return int(n)

    @cached_property
    def loss_name(self) -> str:
        """The loss function's name as one word in small letters; "" if unknown."""
        return loss_expectations.loss_name(self.recorded)

    @cached_property
    def improved(self) -> bool | None:
        """Whether the loss fell by 5 % or more; None if it is unknown."""
        return loss_trend.improved(self.recorded)

    @cached_property
    def need_not_fall(self) -> ExpectedNonDecrease | None:
        """Why the loss need not fall, or None."""
        return loss_expectations.why_it_need_not_fall(self.recorded)

    @cached_property
    def learns(self) -> bool | None:
        """`improved`, but None where the loss need not fall and ends as a number."""
        if self.improved is False:
            ends = np.isfinite(loss_trend.end_level(self.losses))
            return None if ends and self.need_not_fall else False
        return self.improved

    @property
    def fails(self) -> bool:
        """Whether the loss should fall, and does not."""
        return self.learns is False

    @cached_property
    def falls_slowly(self) -> bool:
        """Whether the loss falls by less than 5 %, but steadily."""
        return loss_trend.falls_slowly(self.recorded)


def _without_columns(run: Run) -> Run:
    """The run without a number of classes where its loss has none, and columns were counted.

    A binary cross entropy judges each column by itself: chance is ln 2, however many there are.
    """
    name, n = loss_expectations.loss_name(run), run.info.get("n_classes")
    binary = name.startswith(("binary", "bce")) and n != 2
    if n is None or not (binary or name in ("poissonnll", "gaussiannll")):
        return run
    return replace(run, info={k: v for k, v in run.info.items() if k != "n_classes"})
