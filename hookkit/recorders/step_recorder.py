"""`StepRecorder`: the base of the callbacks that make one `Record` of a training, step by step.

It decides which optimizer steps are recorded, reads the record, caches it until more is recorded,
and merges it over ranks. `LayerStats` records tensors in hooks, `ParamStats` reads the parameters
before and after a step; both write to a `StepTable`.
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

_MAX_COST_FRAC = 0.05
"""The largest fraction of the time that a recorder with `every="auto"` may take."""


class StepRecorder(Reportable, Callback):
    """Base of the recorders: chooses steps by `every`, reads records, and merges them over ranks.

    A subclass makes a `table`, calls `_begin_fit`, asks `_is_due` before it records a step, calls
    `_end_step` after each step, and adds the seconds that recording takes to `_spent`. It defines
    `_read`, `_read_ranks` and, if it reads gradients, `_read_gradients`.

    Args:
        every: records every n-th optimizer step, beginning with the first of each fit; None is 1.
            `"auto"` records as often as possible in at most 5 % of the time.

    Attributes:
        table: the recorded numbers, a column for each step.
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
        self._begun = False  # whether a fit has ever begun
        self._count_from(0)
        # this process's record, and the merged record of all ranks, each as (version, record)
        self._cached: tuple[Any, Record] | None = None
        self._gathered: tuple[Any, Record] | None = None

    # --- steps

    def _count_from(self, first: int) -> None:
        """Reset what is counted in a fit, whose first step is number `first`."""
        self._first = first
        self._asked_step, self._due = -1, False  # `_is_due`: the last step asked about, the answer
        # for every="auto", in seconds
        self._spent = 0.0  # how long recording this step has taken
        self._began = 0.0  # when the last step asked about began
        self._wait_until = -math.inf  # when the next recorded step may begin
        # for the warning in `_end_step`
        self._n_recorded = 0  # how many steps were recorded
        self._recorded_opts = set[int]()  # ids of the optimizers that made these steps
        self._missed_opts = dict[int, str]()  # optimizers of the other steps: id → class name

    def _begin_fit(self) -> None:
        """Count steps from the current one. Earlier records stay."""
        if self.every == "auto" and ranks.is_distributed():
            raise OptionError(
                f'{type(self).__name__}(every="auto"): each process would choose steps of its own, '
                f"and gather() could not merge them. Give a number, such as every=10."
            )
        self._begun, self._cached = True, None  # the new fit may have other layers
        self._count_from(self.learn.n_steps)

    def _is_due(self, n_steps: int) -> bool:
        """Return whether to record step number `n_steps`: the same answer for all its batches."""
        if self._asked_step != n_steps:
            self._asked_step = n_steps
            if self.every == "auto":
                self._began = clock()
                self._due = self._began >= self._wait_until
            else:
                self._due = (n_steps - self._first) % self.every == 0
        return self._due

    def _end_step(self, learn: Any, recorded: bool) -> None:
        """Count a step that was made, and set when `every="auto"` may record again.

        After 8 recorded steps, warn once if some optimizer made none of them. With two optimizers
        that step in turns, an even `every` records the steps of one of them only.
        """
        every = self.every
        if recorded:
            self._wait_until, self._spent = self._began + self._spent / _MAX_COST_FRAC, 0.0
        if every == 1 or len(learn.opts) < 2 or self._n_recorded > 8:
            return
        steps = {id(opt): type(opt).__name__ for opt in learn.stepped_opts}
        self._n_recorded += recorded
        if recorded:
            self._recorded_opts |= steps.keys()
        else:
            self._missed_opts |= steps
        unmet = self._missed_opts.keys() - self._recorded_opts
        if self._n_recorded == 8 and recorded and unmet:
            names = ", ".join(sorted(self._missed_opts[one] for one in unmet))
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

        If the ranks were gathered since the last step, the record is of all ranks. Otherwise it is
        of this process alone, and `meta["rank"]` names the process; no rank waits for another.

        If no training has begun, warn, and return an empty record.
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
        """Return what was recorded after `step`, and at least the last record.

        With -1, or if the ranks were gathered since the last step, return everything.
        """
        version = self._version()
        for kept in (self._gathered, self._cached if step < 0 else None):
            if kept is not None and kept[0] == version:
                return kept[1]
        record = self._read(step)
        if ranks.is_distributed():
            record.meta["rank"] = ranks.rank_label()
        if step < 0:
            self._cached = version, record
        return record

    def _gather(self) -> None:
        """Merge what all ranks recorded, for `record()`. Collective: every rank has to call.

        Raises:
            HookError: on every rank, if they recorded different steps or with other options.
        """
        if ranks.is_distributed():
            self._gathered = self._version(), self._read_ranks()

    def _version(self) -> Any:
        """Return a value that changes whenever the record changes: the key of the cache."""
        return self.table.n_steps

    def _read(self, since: int) -> Record:
        """Return what this process recorded after step `since`, and at least the last column."""
        raise NotImplementedError

    def _read_ranks(self) -> Record:
        """Return the merged record of all ranks; implementations call `from_all_ranks`."""
        raise NotImplementedError


def from_all_ranks(kind: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every rank's `own`, in order; raise a HookError on all ranks if they do not fit."""
    every: list[dict[str, Any]] = ranks.gather_object({"kind": kind, **own})
    for i, other in enumerate(every):
        for what in ("kind", "steps", "options"):
            if every[0][what] != other[what]:
                raise HookError(
                    f"ranks 0 and {i} recorded {every[0]['kind']} of different {what}: "
                    f"{_shortened(every[0][what])} and {_shortened(other[what])}. Give all ranks "
                    f"the same model, recorders and number of steps; each still reads its own."
                )
    return every


def _shortened(x: Any) -> str:
    """Return `x` as text; a list as its length, first and last item."""
    return f"{len(x)} ({x[0]}, …, {x[-1]})" if isinstance(x, list) and x else str(x)
