"""Send the numbers of a Record or Run, by step, to a tracker or a file.

No tracker is imported: a target is recognised by its methods.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hookkit._core.checks import check_path, is_number, kind_of
from hookkit._core.files import append_lines
from hookkit._core.globs import compile_glob
from hookkit._core.messages import nearest_text
from hookkit.errors import ArgumentError, OptionError

_USUAL = ("mean", "std", "rms", "near_zero", "nonfinite", "dead")
_USUAL_OF_PARAMS = ("weight_norm", "grad_norm", "update_ratio")
_PLAIN = str.maketrans({"[": "-", "]": None, "'": None})  # mlflow refuses brackets


def send(
    writer: Any, run: Any, sent: dict[str, int], statistics: Any = None, layers: Any = None
) -> None:
    """Send the scalars of a Record or Run that `sent` says are new to `writer`.

    Args:
        writer, statistics, layers: as in `Reportable.log_to`.
        run: a Record or a Run.
        sent: name of a series → the last step that was sent; updated in place.
    """
    write = writer_of("log_to", writer)
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for name, steps, values in _series(run, statistics, layers):
        for i in np.flatnonzero(np.isfinite(values) & (steps > sent.get(name, -1))):
            rows[int(steps[i])][name] = float(values[i])
    # wandb drops values of a step before its last one, so a late value is sent with the last step
    least = max(sent.values(), default=0) if hasattr(writer, "log") else 0
    for step in sorted(rows):
        write(max(step, least), rows[step])
        sent.update(dict.fromkeys(rows[step], step))


def _series(run: Any, statistics: Any, layers: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, steps and values of every series to log."""
    for name, values in (("loss", "losses"), ("grad_norm", "grad_norms")):
        if (series := getattr(run, values, None)) is not None:
            yield name, np.arange(len(series)), series
    info, epochs = getattr(run, "info", {}), getattr(run, "valid", ())
    if np.size(rates := info.get("lr", [])) and run.n_steps:
        yield "lr", np.array([run.n_steps - 1]), np.atleast_1d(rates)[-1:]
        groups = [] if run.params is None else list(run.params.meta.get("group", ()))
        if (last := np.size(rates) - 1) in groups:
            yield "lr", run.params.steps, run.params.values["lr"][groups.index(last)]
    for row in epochs[:-1] if info.get("within_epoch") else epochs:
        for name, value in row.items():
            if name not in ("epoch", "step") and "step" in row and is_number(value):
                yield f"epoch/{name}", np.array([row["step"]]), np.array([float(value)])

    chosen = _chosen("layers", layers, run, [n for record in run.records for n in record.names])
    known = [name for record in run.records for name in record.values]
    scalars = _chosen("statistics", statistics, run, known)
    for record in run.records:
        names = [name.translate(_PLAIN) or "model" for name in record.names]
        times = Counter(names)
        usual = _USUAL_OF_PARAMS if record.kind == "param" else _USUAL
        for i, (own, name) in enumerate(zip(record.names, names, strict=True)):
            if chosen is None or any(_matches(own, pattern) for pattern in chosen):
                name = name if times[name] == 1 else own or "(model)"
                for scalar in usual if scalars is None else scalars:
                    if scalar in record.values:
                        yield (
                            f"{record.kind}/{scalar}/{name}",
                            record.steps,
                            record.values[scalar][i],
                        )


def _chosen(what: str, names: Any, run: Any, known: list[str]) -> list[str] | None:
    """Return the user's names as a list, or None for all; check that each was recorded."""
    if names is None:
        return None
    chosen, empty = name_list(names), not all(len(record) for record in run.records)
    for name in chosen if known and not empty else ():
        if not any(_matches(each, name) for each in known):
            near = nearest_text(name, dict.fromkeys(known))
            raise OptionError(f"log_to({what}=…) names {name!r}, which was not recorded. {near}")
    return chosen


def name_list(names: Any) -> list[str]:
    """Return one name, several or None as a list."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        names = [] if names is None else [names]
    return [str(name) for name in names]


def _matches(name: str, pattern: str) -> bool:
    """Return whether `pattern` is `name`, a module that contains it, or a glob that matches it."""
    inside = name == pattern or name.startswith(f"{pattern}.")
    return inside or compile_glob(pattern).fullmatch(name) is not None


# method → a call that it must accept: of TensorBoard; mlflow, Comet, Lightning; wandb, accelerate
_METHODS: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "add_scalar": (("name", 0.0, 0), {}),
    "log_metrics": (({},), {"step": 0}),
    "log": (({},), {"step": 0}),
}


def writer_of(who: str, target: Any) -> Callable[[int, dict[str, float]], None]:
    """Return a function `write(step, {name: value})` for the target that a user gave to `who`.

    Raises:
        ArgumentError: `target` is neither a path nor an object with one of these methods.
        OptionError: a path does not end in `.jsonl`.
    """
    if isinstance(target, (str, os.PathLike)):
        path = check_path(who, target, "target")
        if path.suffix.lower() != ".jsonl":
            raise OptionError(
                f'{who}("{path}"): a file to log to ends in .jsonl, with a JSON object for each '
                f"step, as pandas.read_json(path, lines=True) reads it. Name it so; or give the "
                f"tracker itself (import wandb; {who}(wandb)), or for TensorBoard a "
                f'torch.utils.tensorboard.SummaryWriter: pip install "hookkit[tensorboard]".'
            )
        return lambda step, row: append_lines(path, [json.dumps({"step": step, **row})])
    method = next(
        (m for m, call in _METHODS.items() if _takes(getattr(target, m, None), *call)), ""
    )
    if not method:
        raise ArgumentError(
            f"{who}: {kind_of(target)} was given, which has none of add_scalar(name, value, step), "
            f"log_metrics(dict, step=), log(dict, step=). Give a SummaryWriter, a tracker such as "
            f"wandb or mlflow, or the path of a .jsonl file."
        )
    if method != "add_scalar":
        return lambda step, row: getattr(target, method)(dict(row), step=step)

    def write(step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            target.add_scalar(name, value, step)

    return write


def _takes(method: Any, args: tuple[Any, ...], kwargs: dict[str, int]) -> bool:
    """Return whether the signature of `method` fits: loggers and tensors also have a `log`."""
    try:
        # before `wandb.init`, `wandb.log` wraps an unbound method: its signature would have `self`
        inspect.signature(method, follow_wrapped=False).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no callable, without a signature, or another one
        return False
    return True
