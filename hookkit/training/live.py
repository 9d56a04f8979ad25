"""`ShowHealth`: shows findings while a run trains; in a notebook, with a picture of the run."""

from __future__ import annotations

import sys
import time
from operator import methodcaller
from typing import Any

from hookkit._core import distributed as ranks
from hookkit._core.checks import check_number
from hookkit._core.html import Output, in_notebook
from hookkit._core.messages import warn
from hookkit.callbacks.callback import Callback
from hookkit.diagnosis import Finding, diagnose
from hookkit.diagnosis.report_page import picture


class ShowHealth(Callback):
    """Prints the findings of a run while it trains, each once.

    Warnings and errors are printed to stderr; notes are not. If there are none, the verdict is
    printed at the end. In a notebook, one output shows the picture of the run (`plot_run`) and all
    findings, and is redrawn.

    It reads the recorders among the callbacks, and adds none: without ActivationStats or ParamStats
    only the losses are judged. `watch(…, show=True)` adds recorders. If there are several
    processes, only rank 0 shows findings, from its own records.

    Each diagnosis waits for the device. It runs between two batches, and only if all so far have
    taken less than 2 % of the time; the last one, at the end, always runs. If one fails, a warning
    says why, nothing more is shown, and the training goes on. It does not change the records.

    Args:
        every_s: the least number of seconds between two diagnoses.

    Raises:
        OptionError: `every_s` is not above 0.

    Attributes:
        findings: rule → the finding that was printed.

    >>> from hookkit.recorders import ActivationStats, ParamStats
    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=[ActivationStats, ParamStats])
    >>> with learn.no_logging(): learn.fit(2, cbs=ShowHealth(every_s=2.0))
    >>> learn.show_health
    ShowHealth(every_s=2, no findings)
    """

    order = -40  # before recorders begin to record the batch
    run_valid = False
    _only_train_loop = True
    _output: Output | None = None
    _next = float("inf")  # the time of the next diagnosis

    def __init__(self, every_s: float = 5.0) -> None:
        what = "how many seconds there are between two looks, at least"
        self.every_s = check_number("ShowHealth", "every_s", every_s, above=0, what=what)
        self.findings: dict[str, Finding] = {}

    def before_fit(self) -> None:
        """Schedule the first diagnosis, on rank 0 only."""
        if ranks.rank() == 0:
            self._output = Output() if in_notebook() else None
            self._next = time.perf_counter() + self.every_s

    def before_batch(self) -> None:
        """Diagnose the run if it is time."""
        if time.perf_counter() >= self._next:
            self._diagnose()

    def after_fit(self) -> None:
        """Diagnose the run once more, and print the verdict if there was no finding."""
        if self._next < float("inf"):
            self._diagnose(last=True)

    def cleanup_fit(self) -> None:
        """Stop; the last output stays."""
        self._next = float("inf")

    def _diagnose(self, last: bool = False) -> None:
        began = time.perf_counter()
        try:
            self._show(self.learn.run_record(), last)  # sync: by the clock, not by batch
        except Exception as error:
            self._next = float("inf")
            warn(f"ShowHealth shows nothing more: {error!r}. diagnose() reads what is recorded.")
            return
        now = time.perf_counter()
        self._next = now + max(self.every_s, 50 * (now - began))  # at most 2 % of the time

    def _show(self, run: Any, last: bool) -> None:
        found = diagnose(run)
        alarms = {f.rule: f for f in reversed(found) if f.severity != "note"}
        new = [f for rule, f in alarms.items() if rule not in self.findings]
        self.findings |= {f.rule: f for f in new}
        if self._output is not None:
            image = picture(methodcaller("plot_run", run, findings=found), "The run so far")
            self._output.show(image + found._repr_html_(), str(found))
            return
        for text in [str(f) for f in new[::-1]] + [found.verdict] * (last and not self.findings):
            tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)  # prints above its bars
            say = tqdm.write if tqdm else print
            say(f"step {self.learn.n_steps:,}: {text}", file=sys.stderr)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_output": None}

    def __repr__(self) -> str:
        return f"ShowHealth(every_s={self.every_s:g}, {', '.join(self.findings) or 'no findings'})"
