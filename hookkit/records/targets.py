"""Where values of a run are sent: TensorBoard, an experiment tracker, a CSV or JSON-lines file.

Builds on `files`. No tracker is imported: a target is known by its methods.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookkit.checks import check_path, kind_of
from hookkit.errors import ArgumentError, OptionError
from hookkit.files import append_lines
from hookkit.texts import csv_line


class Target:
    """Takes numbers by step: what all targets have in common; by itself it keeps nothing.

    With `in_order` it refuses a step that is before the last one.
    """

    in_order = False

    def __init__(self, given: Any) -> None:
        self.given = given

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by name."""

    def histogram(self, tag: str, step: int, **counts: Any) -> None:
        """Takes a histogram, if it can: `counts` are the arguments of `add_histogram_raw`."""


class TensorBoard(Target):
    """A SummaryWriter of torch or tensorboardX."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One `add_scalar` for each."""
        for tag, value in values.items():
            self.given.add_scalar(tag, value, step)

    def histogram(self, tag: str, step: int, **counts: Any) -> None:
        """`add_histogram_raw`, which takes bins as they were recorded."""
        if callable(add := getattr(self.given, "add_histogram_raw", None)):
            add(tag, **counts, global_step=step)


class Metrics(Target):
    """What has `log_metrics(dict, step=)`: the mlflow module, Lightning's loggers, Comet."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One call for all of a step."""
        self.given.log_metrics(dict(values), step=step)


class Log(Target):
    """What has `log(dict, step=)`: wandb, trackio, an Accelerator. Steps must not decrease."""

    in_order = True

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One call for all of a step."""
        self.given.log(dict(values), step=step)


class CSVFile(Target):
    """A `.csv` file with the columns step, name, value, to which lines are added."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A line for each; a heading before the first."""
        path = Path(self.given)
        new = not path.exists() or not path.stat().st_size
        lines = (csv_line([step, name, value]) for name, value in values.items())
        append_lines(path, [*["step,name,value"] * new, *lines])


class JSONLines(Target):
    """A `.jsonl` file, to which a line is added for each step: `{"step": 9, "loss": 0.5}`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line."""
        append_lines(self.given, [json.dumps({"step": step, **values})])


_FILES = {".csv": CSVFile, ".jsonl": JSONLines}
_METHODS = {"add_scalar": TensorBoard, "log_metrics": Metrics, "log": Log}


def as_target(who: str, given: Any) -> Target:
    """What the user gave as a `Target`; an ArgumentError, or an OptionError for another ending."""
    if isinstance(given, (str, os.PathLike)):
        path = check_path(who, given, "target")
        if path.suffix.lower() not in _FILES:
            raise OptionError(
                f'{who}("{path}"): a file to log to ends in {" or ".join(_FILES)}. Name it so; or '
                f"for TensorBoard give torch.utils.tensorboard.SummaryWriter(log_dir), which needs "
                f'tensorboard: pip install "hookkit[tensorboard]".'
            )
        return _FILES[path.suffix.lower()](os.path.realpath(path))
    for name, kind in _METHODS.items():
        if callable(getattr(given, name, None)):
            return kind(given)
    raise ArgumentError(
        f"{who}: {kind_of(given)} was given, which has no {', '.join(_METHODS)}. Give a "
        f"SummaryWriter, a tracker such as wandb or mlflow, or the path of a .csv or .jsonl file."
    )
