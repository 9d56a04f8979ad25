"""A run as scalars by step, sent to TensorBoard, an experiment tracker, a file of JSON lines.

No tracker is imported: a target is known by its methods. `send` keeps for each series the last step
that a target was sent, so that a log which grows has everything once.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.checks import check_path, is_number, kind_of
from hookkit.errors import ArgumentError, OptionError, nearest
from hookkit.files import append_lines

if TYPE_CHECKING:
    from hookkit.records.record import Record

_USUAL = ("mean", "std", "rms", "near_zero", "nonfinite", "dead")
_USUAL_OF_PARAMS = ("weight_norm", "grad_norm", "update_ratio")
_PLAIN = str.maketrans({"[": "-", "]": None, "'": None})  # mlflow refuses brackets


def send(
    writer: Any, run: Any, sent: dict[str, int], statistics: Any = None, layers: Any = None
) -> None:
    """Send what a Record or Run has after the steps in `sent`, by step; bring `sent` up to date.

    Args:
        writer, statistics, layers: as `Tables.log_to` takes them.
        run: a Record or a Run.
        sent: the last step that was sent of each series, by its name.
    """
    scalars = scalars_to("log_to", writer)
    layers = _recorded("layers", layers, run, lambda record: record.names)
    statistics = _recorded("statistics", statistics, run, lambda record: record.values)
    rows: dict[int, dict[str, Any]] = defaultdict(dict)
    for tag, steps, values in _series(run, statistics, layers):
        for i in np.flatnonzero(np.isfinite(values) & (steps > sent.get(tag, -1))):
            rows[int(steps[i])][tag] = float(values[i])
    # wandb drops a step before its last one: a value that comes late is sent with that one
    least = max(sent.values(), default=0) if hasattr(writer, "log") else 0
    for step in sorted(rows):
        scalars(max(step, least), rows[step])
        sent.update(dict.fromkeys(rows[step], step))


def _recorded(what: str, chosen: Any, run: Any, names_of: Any) -> list[str] | None:
    """Return `chosen` as a list; an OptionError if one of them was recorded nowhere."""
    if chosen is None:
        return None
    names = listed(chosen)
    known = list(dict.fromkeys(name for record in run.records for name in names_of(record)))
    for name in names if all(len(record) for record in run.records) else ():
        if known and not any(_matches(each, name) for each in known):
            raise OptionError(
                f"log_to({what}=…) names {name!r}, which was not recorded. "
                f"Use some of: {', '.join((nearest(name, known) or known)[:12])}."
            )
    return names


def listed(names: Any) -> list[str]:
    """Return one name, several or None as a list."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        names = [] if names is None else [names]
    return [str(name) for name in names]


def _matches(name: str, pattern: str) -> bool:
    """Return whether `pattern` is `name`, or a module around it, or a glob of it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _series(run: Any, statistics: Any, layers: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, steps and values of every series of numbers in a Record or a Run."""
    for name, values in (("loss", "losses"), ("grad_norm", "grad_norms")):
        if (series := getattr(run, values, None)) is not None:
            yield name, np.arange(len(series)), series
    facts, epochs = getattr(run, "info", {}), getattr(run, "valid", ())
    yield from _rates(run, facts.get("lr", []))
    for row in epochs[:-1] if facts.get("within_epoch") else epochs:
        for name, value in row.items():
            if name not in ("epoch", "step") and "step" in row and is_number(value):
                yield f"epoch/{name}", np.array([row["step"]]), np.array([float(value)])
    for record in run.records:
        usual = _USUAL_OF_PARAMS if record.kind == "param" else _USUAL
        for row, tag in _tags(record, layers):
            for name in usual if statistics is None else statistics:
                if name in record.values:
                    yield f"{record.kind}/{name}/{tag}", record.steps, record.values[name][row]


def _rates(run: Any, rates: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the rate of the first optimizer's last group: of the last step, and as recorded."""
    if np.size(rates) and run.n_steps:
        yield "lr", np.array([run.n_steps - 1]), np.atleast_1d(rates)[-1:]
    params, last = getattr(run, "params", None), np.size(rates) - 1
    if params is not None and last in (groups := list(params.meta.get("group", ()))):
        yield "lr", params.steps, params.values["lr"][groups.index(last)]


def _tags(record: Record, layers: list[str] | None) -> Iterator[tuple[int, str]]:
    """Yield the row of each layer that is logged, and its name without brackets, if it is unique.

    `lstm[1]` becomes `lstm-1`; if a layer is really called that, both keep their own names.
    """
    tags = [name.translate(_PLAIN) or "model" for name in record.names]
    times = Counter(tags)
    for row, (tag, name) in enumerate(zip(tags, record.names, strict=True)):
        if layers is None or any(_matches(name, pattern) for pattern in layers):
            yield row, tag if times[tag] == 1 else name or "(model)"


# TensorBoard's method; mlflow's, Comet's and Lightning's; wandb's, trackio's and accelerate's
_METHODS: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "add_scalar": (("name", 0.0, 0), {}),
    "log_metrics": (({},), {"step": 0}),
    "log": (({},), {"step": 0}),
}


def scalars_to(who: str, writer: Any) -> Callable[[int, dict[str, Any]], object]:
    """Return a function that sends a step's numbers, by name, to what the user gave.

    Raises:
        ArgumentError: it is no file, and none of its methods can be called so.
        OptionError: a file has another ending.
    """
    if isinstance(writer, (str, os.PathLike)):
        return _lines_to(who, writer)
    known = [name for name, call in _METHODS.items() if _takes(getattr(writer, name, None), *call)]
    if not known:
        raise ArgumentError(
            f"{who}: {kind_of(writer)} was given, which has none of add_scalar(name, value, step), "
            f"log_metrics(dict, step=), log(dict, step=). Give a SummaryWriter, a tracker such as "
            f"wandb or mlflow, or the path of a .jsonl file."
        )

    def scalars(step: int, values: dict[str, Any]) -> None:
        if known[0] != "add_scalar":
            getattr(writer, known[0])(dict(values), step=step)
            return
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)

    return scalars


def _takes(method: Any, args: tuple[Any, ...], kwargs: dict[str, int]) -> bool:
    """Return whether a method takes these, by its signature: loggers and tensors have a `log`."""
    try:
        # not followed: before `wandb.init` wandb.log wraps the method of a run, with its `self`
        inspect.signature(method, follow_wrapped=False).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no callable, without a signature, or another one
        return False
    return True


def _lines_to(who: str, writer: Any) -> Callable[[int, dict[str, Any]], object]:
    path = check_path(who, writer, "target")
    if path.suffix.lower() != ".jsonl":
        tracker = path.name if path.name in ("wandb", "mlflow", "trackio") else "wandb"
        raise OptionError(
            f'{who}("{path}"): a file to log to ends in .jsonl, with a JSON object for each step, '
            f"as pandas.read_json(path, lines=True) reads it. Name it so; or give the tracker "
            f"itself (import {tracker}; {who}({tracker})), or for TensorBoard a "
            f'torch.utils.tensorboard.SummaryWriter: pip install "hookkit[tensorboard]".'
        )
    return lambda step, values: append_lines(path, [json.dumps({"step": step, **values})])
