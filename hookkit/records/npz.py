"""Write and read a run as one `.npz` file without pickles: arrays, and a JSON text for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hookkit._core.checks import check_path
from hookkit._core.files import atomic_write, check_zip
from hookkit.errors import OptionError
from hookkit.records.run import SLOTS, Incident, Record, Run

_SERIES = ("losses", "grad_norms")
_ARRAYS = ("steps", "epochs", "iters", "spans", "hist", "edges")


def save(run: Run, path: str | Path) -> Path:
    """Write a run atomically to a file that `load` reads; return its path."""
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
    with atomic_write(path) as file:  # an open file, because numpy would add .npz to a name
        np.savez_compressed(file, head=np.array(text), **arrays)
    return path


def load(path: str | Path) -> Run:
    """Return the run that `save` wrote.

    Raises:
        OptionError: `save` did not write the file, or it is damaged.
    """
    with check_path("load", path).open("rb") as raw:
        try:
            check_zip(raw)
            with np.load(raw, allow_pickle=False) as file:
                head = json.loads(str(file["head"]))
                arrays = {name: file[name] for name in file.files if name != "head"}
            if any(x.dtype.kind not in "iufb" for x in arrays.values()):
                raise ValueError("an array that is no array of numbers")
            fields: dict[str, Any] = {name: arrays[name] for name in _SERIES if name in arrays}
            for i, each in enumerate(head["records"]):
                axes = {n: arrays[f"{i}/{n}"] for n in _ARRAYS if f"{i}/{n}" in arrays}
                values = {n: arrays[f"{i}/values/{n}"] for n in each["statistics"]}
                kind, names, types = each["kind"], tuple(each["names"]), tuple(each["types"])
                fields[SLOTS[kind]] = Record(
                    kind, names, types, values=values, meta=each["meta"], **axes
                )
            incidents = []
            for each in head.get("incidents", ()):
                past = {name: np.array(rms, np.float64) for name, rms in each["history"].items()}
                each |= {"history": past, "steps": np.array(each["steps"], np.int64)}
                incidents.append(Incident(**{**each, "others": tuple(each["others"])}))
            rows, info = [dict(row) for row in head["valid"]], dict(head["info"])
            return Run(**fields, valid=rows, incidents=tuple(incidents), info=info)
        except Exception as why:  # a damaged file may raise anything
            raise OptionError(
                f"cannot load {path}: hookkit did not write it, or it is damaged. "
                f"Give a file that save(…, path) wrote."
            ) from why
