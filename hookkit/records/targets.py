"""Where values of a run are sent: TensorBoard, an experiment tracker, a CSV or JSON-lines file.

Builds on `files`. No tracker is imported: a target is known by its methods.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookkit.checks import check_path, kind_of
from hookkit.errors import ArgumentError, OptionError
from hookkit.files import append_lines
from hookkit.texts import csv_line

Scalars = Callable[[int, dict[str, Any]], object]  # takes the numbers of one step, by name


@dataclass(frozen=True)
class Target:
    """Takes numbers by step; by itself it keeps nothing.

    Args:
        given: what the user gave; of a file its whole path.
        scalars: takes a step, and its numbers by name.
        in_order: whether it refuses a step that is before the last one.
        bars: makes a histogram that is sent among the numbers of its step, of (counts, edges).
    """

    given: Any
    scalars: Scalars = lambda step, values: None
    in_order: bool = False
    bars: Any = None

    @property
    def takes_histograms(self) -> bool:
        """Whether histograms are to be given; also to a target that only notes what was sent."""
        adds = callable(getattr(self.given, "add_histogram_raw", None))
        return adds or self.bars is not None or self.given is None

    def histogram(self, tag: str, step: int, **counts: Any) -> None:
        """Sends a histogram to TensorBoard, with the bins that it was recorded in."""
        if callable(add := getattr(self.given, "add_histogram_raw", None)):
            add(tag, **counts, global_step=step)


def _add_each(add_scalar: Any) -> Scalars:
    def scalars(step: int, values: dict[str, Any]) -> None:
        for tag, value in values.items():
            add_scalar(tag, value, step)

    return scalars


def _csv(file: str) -> Scalars:
    def scalars(step: int, values: dict[str, Any]) -> None:
        path = Path(file)
        new = not path.exists() or not path.stat().st_size
        lines = (csv_line([step, name, value]) for name, value in values.items())
        append_lines(path, [*["step,name,value"] * new, *lines])

    return scalars


def _jsonl(file: str) -> Scalars:
    return lambda step, values: append_lines(file, [json.dumps({"step": step, **values})])


def _dict(log: Any) -> Scalars:
    return lambda step, values: log(dict(values), step=step)


def _bars_of(log: Any) -> Any:
    """`Histogram(np_histogram=…)` of the library of a method: wandb's, trackio's; None without."""
    library = sys.modules.get(str(getattr(log, "__module__", None)).partition(".")[0])
    made = getattr(library, "Histogram", None)
    takes = callable(made) and "np_histogram" in inspect.signature(made).parameters
    return made if takes else None


_FILES = {".csv": _csv, ".jsonl": _jsonl}
# TensorBoard's; mlflow's, Comet's and Lightning's; wandb's, trackio's and accelerate's
_METHODS = {"add_scalar": _add_each, "log_metrics": _dict, "log": _dict}


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
        file = os.path.realpath(path)
        return Target(file, _FILES[path.suffix.lower()](file))
    for name, scalars_by in _METHODS.items():
        if callable(method := getattr(given, name, None)):
            bars = _bars_of(method) if name == "log" else None
            return Target(given, scalars_by(method), in_order=name == "log", bars=bars)
    raise ArgumentError(
        f"{who}: {kind_of(given)} was given, which has no {', '.join(_METHODS)}. Give a "
        f"SummaryWriter, a tracker such as wandb or mlflow, or the path of a .csv or .jsonl file."
    )
