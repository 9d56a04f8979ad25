"""Where values of a run are sent: TensorBoard, an experiment tracker, a CSV or JSON-lines file.

No tracker is imported: a target is known by its methods.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hookkit.checks import check_path, kind_of
from hookkit.errors import ArgumentError, OptionError
from hookkit.files import append_lines, first_line
from hookkit.texts import csv_line

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
        lines = [] if first_line(file) else [_HEADER]
        append_lines(file, lines + [csv_line((step, *pair)) for pair in values.items()])

    return scalars


def _jsonl(file: str) -> Scalars:
    return lambda step, values: append_lines(file, [json.dumps({"step": step, **values})])


_HEADER = "step,name,value"
_FILES = {".csv": _csv, ".jsonl": _jsonl}
_TRACKERS = ("wandb", "mlflow", "trackio")
# TensorBoard's; mlflow's, Comet's and Lightning's; wandb's, trackio's and accelerate's: how each
# is called, and what makes numbers by name into such calls
_METHODS: dict[str, tuple[str, Any, Any]] = {
    "add_scalar": ("add_scalar(name, value, step)", (("", 0.0, 0), {}), _add_each),
    "log_metrics": ("log_metrics(dict, step=)", (({},), {"step": 0}), _dict),
    "log": ("log(dict, step=)", (({},), {"step": 0}), _dict),
}


def as_target(who: str, writer: Any) -> Target:
    """What the user gave as a `Target`.

    Raises:
        ArgumentError: it is no file, and has none of the methods, or they take something else.
        OptionError: a file has another ending, or a `.csv` file other columns.
    """
    if isinstance(writer, (str, os.PathLike)):
        return _file(who, writer)
    for name, (_, call, scalars_by) in _METHODS.items():
        if _takes(method := getattr(writer, name, None), *call):
            return Target(writer, scalars_by(method), in_order=name == "log")
    calls = [call for name, (call, *_) in _METHODS.items() if hasattr(writer, name)]
    raise ArgumentError(
        f"{who}: {kind_of(writer)} was given, which "
        + (f"does not take {' or '.join(calls)}" if calls else f"has no {', '.join(_METHODS)}")
        + ". Give a SummaryWriter, a tracker such as wandb or mlflow, or the path of a .csv or "
        ".jsonl file."
    )


def _takes(method: Any, args: Any, kwargs: Any) -> bool:
    """Whether `method` can be called like this, as its signature says.

    Many things have a `log`: Python's loggers, NumPy, tensors.
    """
    try:
        # not followed: before `wandb.init` wandb.log wraps the method of a run, with its `self`
        inspect.signature(method, follow_wrapped=False).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no callable, without a signature, or another one
        return False
    return True


def _file(who: str, writer: Any) -> Target:
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
            f'{who}("{path}"): a file to log to ends in {" or ".join(_FILES)}. Name it so; {cure}'
        )
    file = os.path.realpath(path)
    if path.suffix.lower() == ".csv" and first_line(file) not in ("", _HEADER):
        raise OptionError(
            f'{who}("{path}"): this file has the columns {first_line(file)}, and {_HEADER} would '
            f"be added to it. Give the path of another file."
        )
    return Target(file, _FILES[path.suffix.lower()](file))
