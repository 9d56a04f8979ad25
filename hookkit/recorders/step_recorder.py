"""`StepRecorder`: the base of the callbacks that make one `Record` of a training, step by step.

Here is decided which optimizer steps are recorded, and here a record is read, kept until more is
recorded, and merged over ranks. `LayerStats` records tensors in hooks, `ParamStats` reads the
parameters around a step; both write to a `StepTable`.
"""

from __future__ import annotations

import math
import time
from typing import Any

from hookkit._core import distributed as ranks
from hookkit._core.checks import check_number
from hookkit._core.messages import warn
from hookkit.callbacks.callback import Callback
from hookkit.errors import HookError, NeverFiredWarning, OptionError
from hookkit.recorders.step_table import StepTable
from hookkit.records import Record, Reportable

clock = time.perf_counter

_MOST_COST = 0.05
"""The share of the time that a recorder with `every="auto"` takes at most."""


class StepRecorder(Reportable, Callback):
    """Base of the recorders: `every`, reading, and merging over ranks.

    A subclass makes a `table`, calls `_begin_fit`, asks `_is_due` before it records a step, calls
    `_end_step` after each, and adds the seconds that recording takes to `_spent`. Its methods are
    `_read`, `_read_ranks` and, if it reads gradients, `_read_gradients`.

    Args:
        every: records every n-th optimizer step, beginning with the first of each fit; None is 1.
            `"auto"` records as often as costs at most 5 % of the time.

    Attributes:
        table: the numbers by step.
    """

    order = -20
    run_valid = False
    table: StepTable

    def __init__(self, every: int | str | None) -> None:
        if every != "auto":
            what = 'how many optimizer steps there are for each that is recorded, or "auto"'
            every = 1 if every is None else every
            every = check_number(type(self).__name__, "every", every, 1, whole=True, what=what)
        self.every: Any = every
        self._begun = False  # whether it was ever in a fit
        self._count_from(0)
        # the last record and that of all ranks, cached as (version, record)
        self._own: tuple[Any, Record] | None = None
        self._whole: tuple[Any, Record] | None = None

    # --- steps

    def _count_from(self, first: int) -> None:
        self._first = first  # the number of the fit's first step
        self._asked, self._due = -1, False  # the last step asked about, and the answer
        # for "auto", by the clock
        self._spent = 0.0  # how long it took to record this step
        self._began = 0.0  # when the last step that is recorded began
        self._wait_until = -math.inf  # when the next one may begin
        # for the warning of an optimizer none of whose steps are recorded
        self._n = 0  # how many steps were recorded
        self._met = set[int]()  # ids of optimizers that made one of them
        self._missed = dict[int, str]()  # class names of those that made another step, by id

    def _begin_fit(self) -> None:
        """Begin to count steps. What was recorded before stays."""
        if self.every == "auto" and ranks.is_distributed():
            raise OptionError(
                f'{type(self).__name__}(every="auto"): each process would choose steps of its own, '
                f"and gather() could not merge them. Give a number, such as every=10."
            )
        self._begun, self._own = True, None  # this fit may have other layers
        self._count_from(self.learn.n_steps)

    def _is_due(self, n_steps: int) -> bool:
        """Return whether step number `n_steps` is recorded: the same for all of its batches."""
        if self._asked != n_steps:
            self._asked = n_steps
            if self.every == "auto":
                self._began = clock()
                self._due = self._began >= self._wait_until
            else:
                self._due = (n_steps - self._first) % self.every == 0
        return self._due

    def _end_step(self, learn: Any, recorded: bool) -> None:
        """Note a step that was made; not needed if every step is recorded.

        Warn once, after 8 records, of an optimizer that made none of their steps.
        """
        every = self.every
        if recorded:
            self._wait_until, self._spent = self._began + self._spent / _MOST_COST, 0.0
        if every == 1 or len(learn.opts) < 2 or self._n > 8:
            return
        steps = {id(opt): type(opt).__name__ for opt in learn.stepped_opts}
        self._n += recorded
        if recorded:
            self._met |= steps.keys()
        else:
            self._missed |= steps
        if self._n == 8 and recorded and (unmet := self._missed.keys() - self._met):
            names = ", ".join(sorted(self._missed[one] for one in unmet))
            first = 2 if every == "auto" else every + 1
            better = next(n for n in range(first, first + 30) if math.gcd(n, 30) == 1)
            who = type(self).__name__
            warn(
                f"{who}(every={every!r}) has recorded 8 steps, and none of {names}, which steps in "
                f"turns with another: its steps always fall between. Use {who}(every={better}).",
            )

    # --- reading

    def record(self) -> Record:
        """Return everything recorded so far, as plain numbers. The host waits for the device here.

        Call it in the thread that trains, or when the training is over.

        The record is of all ranks if they were gathered since the last step. Otherwise it is of
        this process alone, which `meta["rank"]` names; no rank waits for another.

        Warns if it was in no training yet: then the record is empty.
        """
        if not self._begun:
            name = type(self).__name__
            warn(
                f"this {name} was in no training yet, so it has recorded nothing. Write `with "
                f"watch(model, opt, recorder):` around the loop, or Learner(…, cbs=recorder).",
                NeverFiredWarning,
            )
        return self._since(-1)

    def _since(self, step: int) -> Record:
        """Return what was recorded after `step`, and at least the last record; all with -1.

        Everything is returned too if the ranks were gathered since the last step.
        """
        version = self._version()
        for kept in (self._whole, self._own if step < 0 else None):
            if kept is not None and kept[0] == version:
                return kept[1]
        record = self._read(step)
        if ranks.is_distributed():
            record.meta["rank"] = ranks.rank_label()
        if step < 0:
            self._own = version, record
        return record

    def _gather(self) -> None:
        """Merge what all ranks recorded, for `record()`: each of them has to call.

        Raises:
            HookError: on every rank, if they recorded different steps or with other options.
        """
        if ranks.is_distributed():
            self._whole = self._version(), self._read_ranks()

    def _version(self) -> Any:
        """Return a value that is another one as soon as a record would be."""
        return self.table.n_steps

    def _read(self, since: int) -> Record:
        """Return what this process recorded after the step `since`; at least the last column."""
        raise NotImplementedError

    def _read_ranks(self) -> Record:
        """Return what all ranks recorded together, by way of `from_all_ranks`."""
        raise NotImplementedError


def from_all_ranks(kind: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `own` of all ranks, in order; a HookError on each if they do not fit together."""
    every: list[dict[str, Any]] = ranks.gather_object({"kind": kind, **own})
    for i, other in enumerate(every):
        for what in ("kind", "steps", "options"):
            if every[0][what] != other[what]:
                raise HookError(
                    f"ranks 0 and {i} recorded {every[0]['kind']} of different {what}: "
                    f"{_brief(every[0][what])} and {_brief(other[what])}. Give all ranks the same "
                    f"model, the same recorders and equally many steps; each still reads its own."
                )
    return every


def _brief(x: Any) -> str:
    return f"{len(x)} ({x[0]}, …, {x[-1]})" if isinstance(x, list) and x else str(x)
