"""Records and runs in one `.npz` file, without pickles, and back."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hookkit.checks import check_path
from hookkit.errors import OptionError
from hookkit.files import write_aside
from hookkit.records.frames import records_of
from hookkit.records.record import Record
from hookkit.records.run import Incident, Run, as_run


def save(source: Any, path: str | Path) -> Path:
    """Writes what was recorded to one compressed `.npz` file, without pickles; the path.

    Of a Run, a Watcher or a Learner also losses, epochs, incidents and facts: `load_run` reads all
    of it, `load` the records. Missing parent folders are made.

    >>> import tempfile
    >>> from hookkit.records import Record
    >>> axis = [np.arange(2)] * 3 + [np.ones(2, np.int64)]
    >>> r = Record("activation", ("fc",), ("Linear",), *axis, {"mean": np.ones((1, 2))})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(save(r, f"{folder}/run.npz"))
    [Record(activation: 1 layer × 2 records, steps 0–1, mean)]
    """
    path = check_path("save", path)
    several = isinstance(source, Iterable)
    run = Run() if several else as_run(source)
    arrays = {name: x for name in _SERIES if (x := getattr(run, name)) is not None}
    heads = []
    for i, r in enumerate(records_of(source) if several else run.records):
        words = {"kind": r.kind, "names": r.names, "types": r.types, "meta": r.meta}
        heads.append({**words, "statistics": list(r.values)})
        for name in _ARRAYS:
            if getattr(r, name) is not None:
                arrays[f"{i}/{name}"] = getattr(r, name)
        for name, table in r.values.items():
            arrays[f"{i}/values/{name}"] = table
    incidents = [vars(incident) for incident in run.incidents]
    facts = {"valid": list(run.valid), "info": run.info, "incidents": incidents}
    head = {"hookkit": 1, "records": heads, **facts}
    text = json.dumps(head, default=_plain)
    with write_aside(path) as file:  # a file, since numpy adds .npz to a name that lacks it
        np.savez_compressed(file, head=np.array(text), **arrays)
    return path


_SERIES = ("losses", "grad_norms")
_ARRAYS = ("steps", "epochs", "iters", "spans", "hist", "edges")


def _plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else str(x)


def load(path: str | Path) -> list[Record]:
    """The records that `save` wrote, equal in every value.

    Raises:
        OptionError: the file is not one of `save`'s, or is damaged.
    """
    return _read(path)[0]


def load_run(path: str | Path) -> Run:
    """The run that `save` wrote, equal in every value: to diagnose, draw, report or compare.

    Raises:
        OptionError: the file is not one of `save`'s, is damaged, or holds several of a kind.
    """
    records, rest = _read(path)
    if len({r.kind for r in records}) < len(records):
        raise OptionError(
            f"one run was to be loaded; {path} holds {len(records)} records, several of a kind. "
            f"Use hookkit.records.load(path), which gives them all."
        )
    return replace(as_run(records) if records else Run(), **rest)


def _read(path: str | Path) -> tuple[list[Record], dict[str, Any]]:
    """The records in a file, and what else there is of the run, by its name in `Run`."""
    path = check_path("load", path)
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            head = json.loads(str(file["head"]))
            records = [_loaded(file, i, each) for i, each in enumerate(head["records"])]
            rest = {name: file[name] for name in _SERIES if name in file}
            rest |= {name: head[name] for name in ("valid", "info") if name in head}
            rest["incidents"] = tuple(_incident(each) for each in head.get("incidents", ()))
            return records, rest
    except _UNREADABLE as why:
        raise OptionError(
            f"{path} was to be loaded; hookkit did not write it, or it is damaged. "
            f"Use save(…, path)."
        ) from why


def _incident(fields: dict[str, Any]) -> Incident:
    past = {name: np.array(row, np.float64) for name, row in fields["history"].items()}
    steps = np.array(fields["steps"], np.int64)
    others = tuple(fields["others"])
    return Incident(**{**fields, "others": others, "steps": steps, "history": past})


_UNREADABLE = (ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def _loaded(file: Any, i: int, head: dict[str, Any]) -> Record:
    arrays: dict[str, Any] = {n: file.get(f"{i}/{n}") for n in _ARRAYS}
    values = {name: file[f"{i}/values/{name}"] for name in head["statistics"]}
    names, types = tuple(head["names"]), tuple(head["types"])
    return Record(head["kind"], names, types, values=values, meta=head["meta"], **arrays)
