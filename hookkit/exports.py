"""Records for other tools: DataFrame, CSV, `.npz` and back, TensorBoard, and two runs side by side.

pandas and TensorBoard are optional: the one is imported where a frame is asked for, the other is
whatever writer object the user brings. CSV and `.npz` need neither.
"""

from __future__ import annotations

import csv
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hookkit.errors import ArgumentError, OptionError, missing_extra, nearest
from hookkit.records import Record, Run

COLUMNS = ("step", "epoch", "layer", "kind", "statistic", "value")

_SCALARS = ("mean", "std", "rms", "near_zero", "nonfinite", "dead")
_PARAM_SCALARS = ("weight_norm", "grad_norm", "update_ratio")


def records_of(source: Any) -> list[Record]:
    """The records in a `Record`, a `Run`, a recording callback, a Watcher or Learner, or a list.

    Raises:
        ArgumentError: there is no record in it.
    """
    if isinstance(source, Record):
        return [source]
    if isinstance(source, Run):
        return list(source.records)
    for reading in ("record", "run", "run_record"):
        if callable(read := getattr(source, reading, None)):
            return records_of(read())
    if isinstance(source, Iterable) and not isinstance(source, (str, Mapping, np.ndarray, Tensor)):
        return [record for item in source for record in records_of(item)]
    raise ArgumentError(
        f"a record was expected, {type(source).__name__} was given. Give a Record, a Run, a "
        "callback such as learn.activation_stats, a Learner or a Watcher."
    )


def to_df(source: Any) -> Any:
    """A tidy pandas DataFrame: step, epoch, layer, kind, statistic, value; one value per row.

    Args:
        source: a Record, a Run, a recording callback, a Learner, a Watcher, or a list of these.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise missing_extra("pandas", "pandas", "make a DataFrame") from None
    frames = []
    for r in records_of(source):
        for statistic, table in r.values.items():
            rows, n = table.shape
            columns = {
                "step": np.tile(r.steps, rows),
                "epoch": np.tile(r.epochs, rows),
                "layer": np.repeat(np.array(r.names, dtype=object), n),
                "kind": r.kind,
                "statistic": statistic,
                "value": table.ravel(),
            }
            frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))


def to_csv(source: Any, path: str | Path) -> Path:
    """Writes the tidy table as CSV (numbers to full precision, nothing for NaN); the path.

    Missing parent folders are made.
    """
    path, records = Path(path), records_of(source)  # first: a mistake must not leave a file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:  # whatever the system's is
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for record in records:
            for *place, value in record.rows():
                writer.writerow([*place, "" if np.isnan(value) else repr(value)])
    return path


def save(source: Any, path: str | Path) -> Path:
    """Writes records to one compressed `.npz` file, without pickles; the path.

    Missing parent folders are made.

    >>> import tempfile
    >>> from hookkit.records import Record
    >>> axis = [np.arange(2)] * 3 + [np.ones(2, np.int64)]
    >>> r = Record("activation", ("fc",), ("Linear",), *axis, {"mean": np.ones((1, 2))})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     load(save(r, f"{folder}/run.npz"))
    [Record(activation: 1 layer × 2 records, steps 0–1, mean)]
    """
    path = Path(path)
    arrays: dict[str, Any] = {}
    heads = []
    for i, r in enumerate(records_of(source)):
        head = {"kind": r.kind, "names": r.names, "types": r.types, "meta": r.meta}
        heads.append({**head, "statistics": list(r.values)})
        for name in _ARRAYS:
            if getattr(r, name) is not None:
                arrays[f"{i}/{name}"] = getattr(r, name)
        for name, table in r.values.items():
            arrays[f"{i}/values/{name}"] = table
    text = json.dumps({"hookkit": 1, "records": heads}, default=_plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:  # a file, since numpy adds .npz to a name that lacks it
        np.savez_compressed(file, head=np.array(text), **arrays)
    return path


_ARRAYS = ("steps", "epochs", "iters", "spans", "hist", "edges")


def _plain(x: Any) -> Any:
    return x.tolist() if isinstance(x, (np.ndarray, np.generic)) else str(x)


def load(path: str | Path) -> list[Record]:
    """The records that `save` wrote, equal in every value.

    Raises:
        OptionError: the file is not one of `save`'s, or is damaged.
    """
    try:
        with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            heads = json.loads(str(file["head"]))["records"]
            return [_loaded(file, i, head) for i, head in enumerate(heads)]
    except _UNREADABLE as why:
        raise OptionError(
            f"{path} was to be loaded; hookkit did not write it, or it is damaged. "
            f"Use save(…, path)."
        ) from why


_UNREADABLE = (ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def _loaded(file: Any, i: int, head: dict[str, Any]) -> Record:
    arrays: dict[str, Any] = {n: file.get(f"{i}/{n}") for n in _ARRAYS}
    values = {name: file[f"{i}/values/{name}"] for name in head["statistics"]}
    names, types = tuple(head["names"]), tuple(head["types"])
    return Record(head["kind"], names, types, values=values, meta=head["meta"], **arrays)


def compare(a: Any, b: Any, statistic: str = "rms") -> list[dict[str, Any]]:
    """Two runs side by side: per layer of both, the median of `statistic` in each and their ratio.

    Args:
        a: a Record or what has one; of several kinds, those that recorded the statistic.
        b: likewise.
        statistic: any that both recorded, such as `"update_ratio"`.

    Returns:
        A list of `{"kind", "layer", "a", "b", "ratio"}`, the largest change first, and last those
        that did not run in one of them (NaN); medians over the steps that both cover.

    Raises:
        OptionError: they have no layer with that statistic in common.
    """
    rows, mine, others = [], records_of(a), records_of(b)
    for x in mine:
        for y in others:
            if x.kind == y.kind and statistic in x.values and statistic in y.values:
                rows += _compared(x, y, statistic)
    if not rows:
        raise OptionError(
            f'"{statistic}" of two runs was to be compared; they have no layer with it in common. '
            f"Both recorded {_common(mine, others)}."
        )
    return sorted(rows, key=lambda row: (np.isnan(row["ratio"]), -abs(_log(row["ratio"]))))


def _common(a: list[Record], b: list[Record]) -> str:
    """The statistics that both have of layers that both have, in words."""
    pairs = [(x, y) for x in a for y in b if x.kind == y.kind and {*x.names} & {*y.names}]
    found = [f'"{name}"' for x, y in pairs for name in x.values if name in y.values]
    return ", ".join(dict.fromkeys(found)) or "no layer of the same kind and name"


def _compared(x: Record, y: Record, statistic: str) -> list[dict[str, Any]]:
    last = min(x.steps[-1], y.steps[-1]) if len(x) and len(y) else -1
    found = []
    for name in x.names:
        if name in y.names:
            u, v = (_median(r.value(statistic, name)[r.steps <= last]) for r in (x, y))
            ratio = v / u if u else (1.0 if u == v else np.inf)
            found.append({"kind": x.kind, "layer": name, "a": u, "b": v, "ratio": ratio})
    return found


def _median(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _log(ratio: float) -> float:
    return float(np.log(ratio)) if ratio > 0 and np.isfinite(ratio) else 1e9


def log_to(writer: Any, source: Any, *, statistics: Iterable[str] | None = None) -> None:
    """Sends records to a TensorBoard `SummaryWriter`: a few scalars per layer, and the histograms.

    Histograms go with the bins they were recorded in (`add_histogram_raw`), not from the values:
    a kilobyte each, where `add_histogram` of a layer's output costs a pass over all of it.

    Args:
        writer: torch's or tensorboardX's SummaryWriter; it is neither flushed nor closed.
        source: a Record, a Run, a recording callback, a Learner, a Watcher, or a list of these.
        statistics: which scalars, a list of names (or one name); None takes about five per kind,
            [] none.

    Raises:
        ArgumentError: `writer` cannot take scalars, or not the histograms that are there.
        OptionError: one of `statistics` was recorded nowhere.
    """
    records = records_of(source)
    needed = ["add_scalar", *["add_histogram_raw"] * any(r.hist is not None for r in records)]
    if missing := [name for name in needed if not callable(getattr(writer, name, None))]:
        raise ArgumentError(
            f"log_to needs a SummaryWriter, {type(writer).__name__} was given, which has no "
            f"{missing[0]}. Make one: torch.utils.tensorboard.SummaryWriter(log_dir)."
        )
    wanted = None if statistics is None else _checked(statistics, records)
    for record in records:
        usual = _PARAM_SCALARS if record.kind == "param" else _SCALARS
        for statistic in usual if wanted is None else wanted:
            _log_scalars(writer, record, statistic)
        if record.hist is not None:
            for row in range(len(record.names)):
                _log_hist(writer, record, row)


def _checked(statistics: Any, records: list[Record]) -> list[str]:
    """The names in `statistics`, each recorded somewhere in `records`."""
    one = isinstance(statistics, str) or not isinstance(statistics, Iterable)
    wanted = [statistics] if one else list(statistics)
    known = list(dict.fromkeys(name for record in records for name in record.values))
    for name in wanted:
        if records and name not in known:
            near = nearest(str(name), known) or known
            raise OptionError(
                f"log_to(statistics=…) names {name!r}, which was not recorded. "
                f"Use some of: {', '.join(near)}."
            )
    return wanted


def _tag(record: Record, row: int) -> str:
    return record.names[row].replace(".", "/") or "model"


def _log_scalars(writer: Any, record: Record, statistic: str) -> None:
    for row, values in enumerate(record.values.get(statistic, ())):
        for step, value in zip(record.steps, values, strict=True):
            if np.isfinite(value):
                tag = f"{record.kind}/{statistic}/{_tag(record, row)}"
                writer.add_scalar(tag, float(value), int(step))


def _log_hist(writer: Any, record: Record, row: int) -> None:
    assert record.hist is not None
    assert record.edges is not None
    for i, step in enumerate(record.steps):
        counts = record.hist[row, :, i]
        total = int(counts.sum())
        if not total:
            continue
        stats = {name: float(record.values[name][row, i]) for name in ("min", "max", "mean", "rms")}
        used = np.flatnonzero(counts)
        first, last = int(used[0]), int(used[-1]) + 1
        limits = record.edges[first + 1 : last + 1].copy()
        if np.isinf(limits[-1]):  # an open bin ends at the greatest value
            limits[-1] = max(stats["max"], np.nextafter(record.edges[last - 1], np.inf))
        writer.add_histogram_raw(
            f"{record.kind}/{_tag(record, row)}",
            min=stats["min"],
            max=stats["max"],
            num=total,
            sum=stats["mean"] * total,
            sum_squares=stats["rms"] ** 2 * total,
            bucket_limits=limits.tolist(),
            bucket_counts=counts[first:last].tolist(),
            global_step=int(step),
        )
