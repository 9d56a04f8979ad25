"""A run in one `.npz` file, without pickles, and back.

The file holds the arrays, and one JSON text with everything else. Reading gives the fields of the
values; `Run.load` makes the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.checks import check_path
from hookkit.errors import OptionError
from hookkit.files import atomic_write, check_zip

if TYPE_CHECKING:
    from hookkit.records.run import Run

_SERIES = ("losses", "grad_norms")
_ARRAYS = ("steps", "epochs", "iters", "spans", "hist", "edges")


def save(run: Run, path: str | Path) -> Path:
    """Write a run to a file that `opened` reads, whole or not at all; return its path."""
    path = check_path("save", path)
    arrays = {name: getattr(run, name) for name in _SERIES}
    for i, record in enumerate(run.records):
        arrays |= {f"{i}/{name}": getattr(record, name) for name in _ARRAYS}
        arrays |= {f"{i}/values/{name}": table for name, table in record.values.items()}
    records = [
        {**{key: getattr(r, key) for key in ("kind", "names", "types", "meta")},
         "statistics": list(r.values)}
        for r in run.records
    ]  # fmt: skip
    head = {
        "hookkit": 1,
        "records": records,
        "valid": list(run.valid),
        "info": run.info,
        "incidents": [vars(incident) for incident in run.incidents],
    }
    text = json.dumps(head, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    arrays = {name: x for name, x in arrays.items() if x is not None}
    with atomic_write(path) as file:  # a file, since numpy adds .npz to a name that lacks it
        np.savez_compressed(file, head=np.array(text), **arrays)
    return path


@contextmanager
def opened(path: str | Path) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Give the fields of each Record and those of the Run that `save` wrote.

    Raises:
        OptionError: `save` did not write the file, or it is damaged; also if the values that the
            `with` makes of the fields refuse them.
    """
    with check_path("load", path).open("rb") as raw:
        try:
            check_zip(raw)
            with np.load(raw, allow_pickle=False) as file:
                head = json.loads(str(file["head"]))
                arrays = {name: file[name] for name in file.files if name != "head"}
            if any(x.dtype.kind not in "iufb" for x in arrays.values()):
                raise ValueError("an array that is no array of numbers")
            records = []
            for i, each in enumerate(head["records"]):
                fields = {n: arrays[f"{i}/{n}"] for n in _ARRAYS if f"{i}/{n}" in arrays}
                fields["values"] = {n: arrays[f"{i}/values/{n}"] for n in each["statistics"]}
                fields |= {"names": tuple(each["names"]), "types": tuple(each["types"])}
                records.append({**fields, "kind": each["kind"], "meta": each["meta"]})
            run = {name: arrays[name] for name in _SERIES if name in arrays}
            run |= {"valid": [dict(row) for row in head["valid"]], "info": dict(head["info"])}
            run["incidents"] = [_incident_fields(each) for each in head.get("incidents", ())]
            yield records, run
        except Exception as why:  # a damaged file may raise anything
            raise OptionError(
                f"cannot load {path}: hookkit did not write it, or it is damaged. "
                f"Give a file that save(…, path) wrote."
            ) from why


def _incident_fields(fields: dict[str, Any]) -> dict[str, Any]:
    history = {name: np.array(row, np.float64) for name, row in fields["history"].items()}
    steps, others = np.array(fields["steps"], np.int64), tuple(fields["others"])
    return {**fields, "others": others, "steps": steps, "history": history}
