"""Records and runs in one `.npz` file, without pickles, and back.

The file holds arrays, and one JSON text of all that is no array. What is read are the fields of
Records and of a Run; `run` makes the values of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hookkit.checks import check_path
from hookkit.errors import OptionError
from hookkit.files import atomic_write, check_zip
from hookkit.records.values import read_source

_SERIES = ("losses", "grad_norms")
_ARRAYS = ("steps", "epochs", "iters", "spans", "hist", "edges")


def save(source: Any, path: str | Path) -> Path:
    """Writes a Record, a Run, or what has one, to a file that `opened` reads; the path."""
    path, run = check_path("save", path), read_source(source)
    arrays = {name: x for name in _SERIES if (x := getattr(run, name, None)) is not None}
    for i, record in enumerate(run.records):
        arrays |= {f"{i}/{n}": x for n in _ARRAYS if (x := getattr(record, n)) is not None}
        arrays |= {f"{i}/values/{name}": table for name, table in record.values.items()}
    head = {
        "hookkit": 1,
        "records": [_head(record) for record in run.records],
        "valid": list(getattr(run, "valid", ())),
        "info": getattr(run, "info", {}),
        "incidents": [vars(incident) for incident in getattr(run, "incidents", ())],
    }
    text = json.dumps(head, default=_plain)
    with atomic_write(path) as file:  # a file, since numpy adds .npz to a name that lacks it
        np.savez_compressed(file, head=np.array(text), **arrays)
    return path


def _head(record: Any) -> dict[str, Any]:
    words = {"kind": record.kind, "names": record.names, "types": record.types}
    return {**words, "meta": record.meta, "statistics": list(record.values)}


def _plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else str(x)


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """What `save` wrote: for each record the fields of a Record, and those of the Run.

    Raises an OptionError if the file is not one of `save`'s, or is damaged: also if its fields turn
    out to be while they are used within the `with`.
    """
    with check_path("load", path).open("rb") as raw:
        try:
            check_zip(raw)
            with np.load(raw, allow_pickle=False) as file:
                head = json.loads(str(file["head"]))
                records = [_record_fields(file, i, each) for i, each in enumerate(head["records"])]
                run = {name: _numbers(file[name], 1) for name in _SERIES if name in file}
                run |= {"valid": [dict(row) for row in head["valid"]], "info": dict(head["info"])}
                run["incidents"] = [_incident_fields(each) for each in head.get("incidents", ())]
                yield records, run
        except Exception as why:  # a damaged file may raise anything
            raise OptionError(
                f"cannot load {path}: hookkit did not write it, or it is damaged. "
                f"Give a file that save(…, path) wrote."
            ) from why


def _numbers(x: Any, ndim: int | None = None) -> Any:
    if x.dtype.kind not in "iufb" or ndim not in (None, x.ndim):
        raise ValueError(f"{x.ndim} dimensions of {x.dtype} are no numbers of a run")
    return x


def _record_fields(file: Any, i: int, head: dict[str, Any]) -> dict[str, Any]:
    there = [name for name in _ARRAYS if f"{i}/{name}" in file]
    fields: dict[str, Any] = {name: _numbers(file[f"{i}/{name}"]) for name in there}
    values = {name: file[f"{i}/values/{name}"] for name in head["statistics"]}
    fields["values"] = {name: _numbers(table) for name, table in values.items()}
    names, types = tuple(head["names"]), tuple(head["types"])
    return {**fields, "kind": head["kind"], "names": names, "types": types, "meta": head["meta"]}


def _incident_fields(fields: dict[str, Any]) -> dict[str, Any]:
    history = {name: np.array(row, np.float64) for name, row in fields["history"].items()}
    steps, others = np.array(fields["steps"], np.int64), tuple(fields["others"])
    return {**fields, "others": others, "steps": steps, "history": history}
