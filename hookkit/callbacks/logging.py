"""Logs that grow while a model trains: `LogTo` a tracker or a file, `CSVLogger` a row per epoch.

Builds on `readout`, which reads what was recorded, and on `records.loggers`, which sends it. Of
several processes the first one writes.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, ClassVar

from hookkit import ranks
from hookkit.callbacks.callback import Callback
from hookkit.callbacks.readout import run_of
from hookkit.checks import check_flag, check_number, check_path
from hookkit.errors import HookkitWarning, OptionError
from hookkit.files import append_lines, atomic_write
from hookkit.records.loggers import send, sent_to
from hookkit.records.targets import as_target
from hookkit.texts import csv_line


class LogTo(Callback):
    """Sends losses and statistics to TensorBoard, a tracker or a file while a model trains.

    In a Learner or a watched loop, whatever its recorders have: the loss of each step, what is
    known of each epoch, and about five scalars for each layer, as `log_to` names them. Histograms
    go to TensorBoard, wandb and trackio. Nothing is sent twice, also by a later `log_to` to the
    same target.

    A training that is resumed, by `fit(resume=…)` or `watch(resume=…)`, makes the steps after its
    checkpoint again. Of a file the rows that came after the checkpoint are cut off, before the next
    ones are written. Other targets get those steps a second time: TensorBoard shows the later
    value, wandb keeps the first, mlflow both.

    Args:
        target: a SummaryWriter, a tracker, or the path of a `.csv` or `.jsonl` file, as `log_to`'s
            `writer`.
        every: how many optimizer steps there are between two writings. Each of them waits for the
            device once; the last follows the end of the training, however it ends.

    Raises:
        ArgumentError: `target` is none of these.
        OptionError: `every` is no whole number from 1; a file has another ending.

    If the target fails, a warning says why, nothing more is sent in this training, and it goes on.
    A copy or a pickle has no target, and sends nothing.

    >>> import json, tempfile
    >>> from hookkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(n_trn=3, cbs=LogTo(f"{folder}/run.jsonl"))
    ...     with learn.no_logging(): learn.fit(1)
    ...     text = Path(folder, "run.jsonl").read_text()
    >>> [list(json.loads(row)) for row in text.splitlines()][1:]
    [['step', 'loss'], ['step', 'loss', 'lr', 'epoch/train_loss', 'epoch/valid_loss']]
    """

    order = -40  # before recorders begin to record the batch
    run_valid = False
    _alive = False

    def __init__(self, target: Any, every: int = 50) -> None:
        as_target("LogTo", target)
        what = "how many optimizer steps there are between two writings"
        self.every = check_number("LogTo", "every", every, 1, whole=True, what=what)
        self.target, self._at = target, 0
        self._resumed: dict[str, Any] = {}  # a state that the next writing begins with

    def before_fit(self) -> None:
        """Begins to count steps; goes on from the run that a watched loop resumes."""
        if not self.learn.fitting:
            return
        self._at = self.learn.n_steps
        self._alive = self.target is not None and ranks.rank() == 0
        earlier = vars(self.learn).get("earlier")
        known = None if earlier is None else earlier.info.get("LogTo")
        if isinstance(known, dict) and not self.learn.n_own_steps:
            own = (name for name, cb in self.learn._named().items() if cb is self)
            self.load_state_dict(known.get(next(own, ""), {}))

    def before_batch(self) -> None:
        """Sends what is new, every so many steps: now no batch is half recorded."""
        if self._alive and self.learn.n_steps - self._at >= self.every:
            self._send()

    def cleanup_fit(self) -> None:
        """Sends the rest."""
        if self._alive:
            self._send()
        self._alive = False

    def _send(self) -> None:
        self._at = self.learn.n_steps
        try:
            target = as_target("LogTo", self.target)
            sent = sent_to(target, self.learn)
            if self._resumed:
                target.cut_to(self._resumed["end"])
                sent.clear()
                sent.update(self._resumed["sent"])
                self._resumed = {}
            send(target, run_of(self.learn, quiet=True), sent)  # sync
        except Exception as error:
            self._alive = False
            is_file = isinstance(self.target, (str, os.PathLike))
            name = Path(self.target).name if is_file else type(self.target).__name__
            warnings.warn(
                f"LogTo sends nothing more to {name} "
                f"in this training: {type(error).__name__}: {error}. It goes on and is recorded; "
                f"log_to(…) sends the rest when the target works again.",
                HookkitWarning,
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What was sent, and where a file ended: a training that is resumed goes on from there."""
        if self._resumed or self.target is None or ranks.rank():
            return self._resumed
        target = as_target("LogTo", self.target)
        sent = dict(sent_to(target, self.learn))
        return {"sent": sent, "end": target.end(), "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave: what a file got later is cut off as more is written."""
        self._resumed, self._at = state, state.get("at", self._at)

    def __getstate__(self) -> dict[str, Any]:
        # a writer has threads and connections, which no copy could share
        return {**super().__getstate__(), "target": None, "_alive": False}


class CSVLogger(Callback):
    """Writes the log into a CSV file: a row as each epoch ends, under the names of its columns.

    A process that is killed leaves whole rows. If a row cannot be written, a warning says so and
    the training goes on.

    Args:
        fname: of the file, in `learn.path`.
        append: whether to add to what the file has; otherwise each fit begins a new file. A fit
            that is resumed goes on with the rows up to its checkpoint.

    Raises:
        ArgumentError: `fname` is no name of a file.
        OptionError: as a fit begins: the file to append to, or that of the fit that is resumed, has
            other columns; there is no Recorder.
        OSError: as a fit begins: the file cannot be written.

    >>> import tempfile
    >>> from hookkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=CSVLogger())
    ...     with learn.no_logging(): learn.fit(2)
    ...     print(Path(folder, "history.csv").read_text().splitlines()[0])
    epoch,train_loss,valid_loss,time
    """

    order = 60
    _saved: ClassVar[tuple[str, ...]] = ("_text",)
    _text = ""  # what the file has, or will have when the first epoch begins

    def __init__(self, fname: str | Path = "history.csv", append: bool = False) -> None:
        self.fname = check_path("CSVLogger", fname, "fname")
        self.append = check_flag("CSVLogger", "append", append)
        self._path: Path | None = None
        self._names, self._begun = "", False

    def before_fit(self) -> None:
        """Finds what the file begins with: the names of the columns, unless it has rows."""
        learn = self.learn
        if not learn.fitting or ranks.rank():
            return
        recorder: Any = learn._cb_named("recorder")
        if recorder is None:
            raise OptionError(
                "CSVLogger: there is no Recorder among the callbacks, whose log it would write. "
                "Make the Learner with default_cbs=True, or add a Recorder."
            )
        path, self._names = learn.path / self.fname, csv_line(recorder.metric_names)
        self._text = f"{self._names}\n"
        if self.append and path.exists() and path.stat().st_size:
            self._text = path.read_text(encoding="utf-8").rstrip("\n") + "\n"
            self._check_columns()
        self._path, self._begun = path, False

    def _check_columns(self) -> None:
        found = self._text.partition("\n")[0]
        if found != self._names:
            raise OptionError(
                f"CSVLogger: {self.fname} has the columns {found}, this fit has {self._names}. Use "
                f"the same metrics; or give another fname, or append=False to begin a new file."
            )

    def before_epoch(self) -> None:
        """Begins the file, in the first epoch: a fit that cannot be resumed leaves it."""
        if self._path is None or self._begun:
            return
        with atomic_write(self._path, text=True) as file:
            file.write(self._text)
        self._begun = True

    def after_epoch(self) -> None:
        """Writes the epoch's row."""
        if self._path is None or not self.learn.fitting:
            return
        self.before_epoch()  # resumed from a checkpoint of before this row
        row = csv_line(self.learn.recorder.log)
        try:
            append_lines(self._path, [row])
            self._text += f"{row}\n"
        except OSError as error:
            self._path = None
            warnings.warn(
                f"CSVLogger writes nothing more to {self.fname} in this training: "
                f"{type(error).__name__}: {error}. It goes on; learn.recorder.rows() has the log.",
                HookkitWarning,
                stacklevel=2,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the rows up to the checkpoint; those after it are written again."""
        super().load_state_dict(state)
        if self._path is not None:
            self._check_columns()

    def cleanup_fit(self) -> None:
        """The file is complete."""
        self._path = None
