"""Where values of a run are sent: TensorBoard, an experiment tracker, a CSV or JSON-lines file.

No tracker is imported: a target is known by its methods.
"""

from __future__ import annotations

import csv
import io
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookkit.checks import check_path, kind_of
from hookkit.errors import ArgumentError, OptionError
from hookkit.files import append_lines

Scalars = Callable[[int, dict[str, Any]], object]  # takes the numbers of one step, by name


@dataclass(frozen=True)
class Target:
    """Takes numbers by step.

    Args:
        writer: what the user gave; of a file its whole path.
        scalars: takes a step, and its numbers by name.
        in_order: whether it refuses a step that is before the last one.
    """

    writer: Any
    scalars: Scalars
    in_order: bool = False

    @property
    def key(self) -> Any:
        """What the same writer has again, without keeping it alive."""
        if isinstance(self.writer, str):
            return self.writer
        try:
            key = weakref.ref(self.writer)
            hash(key)
        except TypeError:  # it cannot be held weakly, or has no hash
            return id(self.writer)
        return key

    @property
    def histogram(self) -> Any:
        """TensorBoard's method that takes counts and edges; None elsewhere."""
        add = getattr(self.writer, "add_histogram_raw", None)
        return add if callable(add) else None


def _add_each(add_scalar: Any) -> Scalars:
    def scalars(step: int, values: dict[str, Any]) -> None:
        for tag, value in values.items():
            add_scalar(tag, value, step)

    return scalars


def _dict(log: Any) -> Scalars:
    return lambda step, values: log(dict(values), step=step)


def _csv(file: str) -> Scalars:
    def scalars(step: int, values: dict[str, Any]) -> None:
        path, text = Path(file), io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        if not path.exists() or not path.stat().st_size:
            rows.writerow(("step", "name", "value"))
        rows.writerows((step, name, value) for name, value in values.items())
        append_lines(path, text.getvalue().splitlines())

    return scalars


def _jsonl(file: str) -> Scalars:
    return lambda step, values: append_lines(file, [json.dumps({"step": step, **values})])


_FILES = {".csv": _csv, ".jsonl": _jsonl}
_TRACKERS = ("wandb", "mlflow", "trackio")
# TensorBoard's; mlflow's, Comet's and Lightning's; wandb's, trackio's and accelerate's
_METHODS = {"add_scalar": _add_each, "log_metrics": _dict, "log": _dict}


def as_target(who: str, writer: Any) -> Target:
    """What the user gave as a `Target`.

    Raises:
        ArgumentError: it is no file, and has none of the methods.
        OptionError: a file has another ending.
    """
    if isinstance(writer, (str, os.PathLike)):
        path = check_path(who, writer, "target")
        if path.suffix.lower() not in _FILES:
            name = path.name.lower()
            cure = (
                "or for TensorBoard give torch.utils.tensorboard.SummaryWriter(log_dir), which "
                'needs tensorboard: pip install "hookkit[tensorboard]".'
            )
            if name in _TRACKERS:
                cure = f"or give the tracker itself: import {name}; {who}({name})."
            raise OptionError(
                f'{who}("{path}"): a file to log to ends in {" or ".join(_FILES)}. Name it so; '
                f"{cure}"
            )
        file = os.path.realpath(path)
        return Target(file, _FILES[path.suffix.lower()](file))
    for name, scalars_by in _METHODS.items():
        if callable(method := getattr(writer, name, None)):
            return Target(writer, scalars_by(method), in_order=name == "log")
    raise ArgumentError(
        f"{who}: {kind_of(writer)} was given, which has no {', '.join(_METHODS)}. Give a "
        f"SummaryWriter, a tracker such as wandb or mlflow, or the path of a .csv or .jsonl file."
    )
