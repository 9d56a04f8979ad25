"""`ShowHealth`: a run at a glance while it trains, and its findings as they become clear.

Builds on `readout`, which reads what the recorders have, on `health`, which judges it, and on
`screens`. Everything happens between two steps, as a batch begins: then no batch is half recorded,
and all losses of the steps before are known.

Its cost has a bound by construction: it measures how long each of its jobs takes (to read, judge
and write; in a notebook to draw the picture), and does it only when it fits into the job's share of
the time so far, with room for once more at the end. So all of them together take less than 2 %.
"""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.readout import is_recorder, run_of
from hookkit.callbacks.recorder import Recorder
from hookkit.checks import check_number
from hookkit.errors import HookkitWarning, OptionError
from hookkit.health import Diagnosis, Finding, diagnose
from hookkit.live.glance import glance
from hookkit.live.screens import Lines, screen
from hookkit.records import Run
from hookkit.texts import format_time

_MOST = 0.02  # of the time
_LOOKS = 0.25  # of that in a notebook, where pictures have the rest
_PICTURE_S = 0.3  # what the first picture is taken to cost; 0.2 to 0.4 in a notebook, measured


class ShowHealth(Callback):
    """Redraws the run every few seconds while it trains, and prints findings as they become clear.

    In a notebook one output shows how far the run is, its picture (`plot_run`, if matplotlib is
    installed; from the 40th second on, or at the end of 20) and its findings. In a terminal it is a
    block of a few lines at the bottom, below everything that is printed and below progress bars;
    in files and pipes only findings are printed. What is shown last stays.

    A finding is clear if the same rule reports it, as a warning or an error, in two looks in a row
    or at the end of the training. It is printed once, as one line; notes are not. If it is there
    no longer, the block says so.

    It shows what the recorders among the callbacks have, and adds none: without ActivationStats
    or ParamStats a Learner's losses are all that is judged. `watch(…, show=True)` adds recorders.
    Of several processes the first one shows what it has recorded itself.

    Args:
        every_s: seconds between two looks, at least. There are fewer where they would take more
            than 2 % of the time, that at the end included (in a notebook, looks 0.5 % and pictures
            1.5 %). Beyond it can be a first look that takes longer, the one at the end, which
            shows the verdict, and the import of matplotlib, if nothing else has imported it.

    Raises:
        OptionError: `every_s` is not above 0; as a watched loop begins: there is no recorder.

    Attributes:
        findings: rule → the finding that was printed.

    A look waits for the device. What is recorded does not depend on it. If it fails, a warning says
    why, nothing more is shown, and the training goes on.

    >>> from hookkit.stats import ActivationStats, ParamStats
    >>> from hookkit.testing import synth_learner
    >>> learn = synth_learner(cbs=[ActivationStats, ParamStats])
    >>> with learn.no_logging(): learn.fit(2, cbs=ShowHealth(every_s=2.0))
    >>> learn.show_health
    ShowHealth(every_s=2, healthy)
    """

    order = -40  # before recorders begin to record the batch
    run_valid = False
    _screen: Lines | None = None
    _now: tuple[Run, Diagnosis] | None = None

    def __init__(self, every_s: float = 5.0) -> None:
        what = "how many seconds there are between two looks, at least"
        self.every_s = check_number("ShowHealth", "every_s", every_s, above=0, what=what)
        self.findings: dict[str, Finding] = {}
        self._clear_fit()

    def _clear_fit(self) -> None:
        self._next: dict[str, float] = {}  # when a job is done again, by the clock
        self._share: dict[str, float] = {}  # of the time, for each job
        self._cost = {"_look": 0.0, "_draw": _PICTURE_S}  # of the last time, in seconds
        self._spent = {"_look": 0.0, "_draw": 0.0}
        self._before: set[str] = set()  # rules of the last look
        self._began, self._n_steps = time.perf_counter(), 0

    def before_fit(self) -> None:
        """Finds out where to show it."""
        learn = self.learn
        if not learn.fitting:
            return
        if not any(is_recorder(type(cb)) or isinstance(cb, Recorder) for cb in learn.cbs):
            raise OptionError(_NO_RECORDER)
        self._clear_fit()
        self._n_steps = learn.n_steps
        if ranks.rank() == 0:
            try:
                self._open()
            except Exception as error:
                self._give_up(error)

    def _open(self) -> None:
        self._screen = screen()
        self._share = {"_look": _MOST}
        if self._screen.draws:
            self._share = {"_look": _MOST * _LOOKS, "_draw": _MOST * (1 - _LOOKS)}
        self._next = {job: max(self._fits(job), self._began + self.every_s) for job in self._share}

    def before_batch(self) -> None:
        """Does the job that is due the longest, if a step was made since the last batch."""
        n, self._n_steps = self._n_steps, self.learn.n_steps
        if n == self._n_steps or not self._next:
            return
        job = min(self._next, key=self._next.__getitem__)
        if time.perf_counter() >= self._next[job]:
            self._do(job)

    def after_fit(self) -> None:
        """Shows how the training has ended."""
        if not self.learn.fitting:
            return
        for job in [*self._next]:  # a picture that is there already must not be an old one
            if job == "_look" or self._spent[job] or time.perf_counter() >= self._fits(job, 1):
                self._do(job, last=True)

    def cleanup_fit(self) -> None:
        """What was shown last stays."""
        shown, self._screen, self._now = self._screen, None, None
        self._next = {}
        if shown is not None:
            shown.close()

    # --- jobs

    def _do(self, job: str, last: bool = False) -> None:
        """Does a job, measures it, and sets when it is done again."""
        if self._screen is None:
            return
        began = time.perf_counter()
        try:
            getattr(self, job)(self._screen, last)
        except Exception as error:
            self._give_up(error)
            return
        now = time.perf_counter()
        self._cost[job] = now - began
        self._spent[job] += now - began
        self._next[job] = max(now + self.every_s, self._fits(job))

    def _fits(self, job: str, n: int = 2) -> float:
        """From when on `n` more of a job fit into its share: one now, and the one at the end."""
        spent = self._spent[job] + n * self._cost[job]
        return self._began + spent / self._share[job]

    def _look(self, screen: Lines, last: bool) -> None:
        run = run_of(self.learn, quiet=True)  # sync: by the clock, not by batch
        found = diagnose(run)
        for new in self._judge(found, last):
            line = f"{new.severity}: {new.rule}: {new.evidence}"
            screen.print_line(f"step {self.learn.n_steps:,}: {line}")
        clear = [f for f in found if f.severity != "note" and f.rule in self.findings]
        shown = replace(found, findings=tuple(clear))
        self._now = run, shown
        verdict = self._verdict(found if last else shown, last)
        screen.show([*glance(self._head(), run), verdict], shown)

    def _verdict(self, found: Diagnosis, last: bool) -> str:
        """The headline, and which findings that were printed are not there any more."""
        when = "now" if self.findings else "so far"
        healthy = "healthy" if last else f"no findings {when}"
        bad = {f.rule for f in found if f.severity != "note"}
        gone = [rule for rule in self.findings if rule not in bad]
        before = f"; before: {', '.join(gone)}" if gone else ""
        return found.headline.replace(": healthy", f": {healthy}") + before

    def _judge(self, found: Diagnosis, last: bool) -> list[Finding]:
        """The findings that have become clear now, one for each rule."""
        bad: dict[str, Finding] = {}
        for f in found:
            if f.severity != "note":
                bad.setdefault(f.rule, f)
        before, self._before = self._before, set(bad)
        new = [f for rule, f in bad.items() if last or rule in before]
        new = [f for f in new if f.rule not in self.findings]
        self.findings |= {f.rule: f for f in new}
        return new

    def _draw(self, screen: Lines, last: bool) -> None:
        if self._now is not None:
            screen.draw(*self._now)

    def _head(self) -> str:
        """How far the run is."""
        learn = self.learn
        epoch = f"epoch {learn.epoch + 1}/{learn.n_epoch} · " if learn.n_epoch else ""
        elapsed = format_time(time.perf_counter() - self._began)
        return f"{epoch}step {learn.n_steps:,} · {elapsed}"

    def _give_up(self, error: Exception) -> None:
        self.cleanup_fit()
        with suppress(ValueError):  # warnings are printed to stderr, which may be what is closed
            warnings.warn(
                f"ShowHealth shows nothing more: {type(error).__name__}: {error}. The training "
                f"goes on and is recorded; run_record() and diagnose() read it.",
                HookkitWarning,
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_screen": None, "_now": None, "_next": {}}

    def __repr__(self) -> str:
        rules = ", ".join(self.findings) or "healthy"
        return f"ShowHealth(every_s={self.every_s:g}, {rules})"


_NO_RECORDER = (
    "ShowHealth() shows what recorders have, and there is none among the callbacks. Add some: "
    "watch(model, opt, ActivationStats(every=10), ParamStats(every=10), ShowHealth()); or use "
    "watch(model, opt, show=True), which adds these."
)
