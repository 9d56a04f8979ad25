"""Records as a tidy table: a DataFrame, a CSV file, and two runs side by side.

Builds on `values`. pandas is optional: it is imported when a frame is made.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.checks import check_path
from hookkit.errors import OptionError, missing_extra
from hookkit.files import atomic_write
from hookkit.records.values import records_of
from hookkit.texts import harmless

if TYPE_CHECKING:
    from pandas import DataFrame

    from hookkit.records.record import Record

COLUMNS = ("step", "epoch", "layer", "kind", "statistic", "value")


def to_df(source: Any) -> DataFrame:
    """A tidy pandas DataFrame: step, epoch, layer, kind, statistic, value; one value per row.

    Args:
        source: a Record, a Run, a recording callback, a Learner, a Watcher, or a list of these.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pd = pandas()
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


def pandas() -> Any:
    """pandas, imported late: it is optional. Without it a MissingExtraError."""
    try:
        import pandas as pd
    except ImportError:
        raise missing_extra("pandas", "pandas", "make a DataFrame") from None
    return pd


def to_csv(source: Any, path: str | Path) -> Path:
    """Writes the tidy table as CSV (numbers to full precision, nothing for NaN); the path.

    Missing parent folders are made. A name that a spreadsheet would take for a formula gets a
    quote before it (`'=x`), and control characters in names are escaped.
    """
    path = check_path("to_csv", path)
    records = records_of(source)  # before the file is opened: an error here must leave no file
    with atomic_write(path, text=True) as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for record in records:
            for *place, value in record.rows():
                safe = (_cell(x) if isinstance(x, str) else x for x in place)
                writer.writerow([*safe, "" if np.isnan(value) else repr(value)])
    return path


def _cell(text: str) -> str:
    """`text` on one line, which no spreadsheet takes for a formula."""
    text = harmless(text, len(text))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def compare(a: Any, b: Any, statistic: str = "rms") -> Any:
    """Two runs side by side: per layer of both, the median of `statistic` in each and their ratio.

    Args:
        a: a Record or what has one; of several kinds, those that recorded the statistic.
        b: the other, likewise.
        statistic: any that both recorded, such as `"update_ratio"`.

    Returns:
        A pandas DataFrame with the columns kind, layer, type, a, b, ratio: the largest change
        first, and last those that did not run in one of them (NaN); medians over the steps that
        both cover.

    Raises:
        OptionError: they have no layer with that statistic in common.
        MissingExtraError: pandas is not installed.
    """
    of_a, of_b = records_of(a), records_of(b)
    pairs = [(x, y) for x in of_a for y in of_b if x.kind == y.kind and {*x.names} & {*y.names}]
    rows = []
    for x, y in pairs:
        if statistic in x.values and statistic in y.values:
            rows += _compared(x, y, statistic)
    if not rows:
        both = dict.fromkeys(f'"{name}"' for x, y in pairs for name in x.values if name in y.values)
        raise OptionError(
            f'compare(statistic="{statistic}"): the two runs have no layer with it in common. '
            f"Use what both recorded: {', '.join(both) or 'no layer of the same kind and name'}."
        )
    ratios = np.array([row["ratio"] for row in rows])
    with np.errstate(all="ignore"):
        change = np.where(ratios <= 0, np.inf, np.abs(np.log(ratios)))
    return pandas().DataFrame([rows[i] for i in np.argsort(-change, kind="stable")])  # NaN last


def _compared(x: Record, y: Record, statistic: str) -> list[dict[str, Any]]:
    last = min(x.steps[-1], y.steps[-1]) if len(x) and len(y) else -1
    found = []
    for name, kind in zip(x.names, x.types, strict=True):
        if name in y.names:
            u, v = (_median(r.value(statistic, name)[r.steps <= last]) for r in (x, y))
            ratio = v / u if u else (1.0 if u == v else np.inf)
            place = {"kind": x.kind, "layer": name, "type": kind}
            found.append({**place, "a": u, "b": v, "ratio": ratio})
    return found


def _median(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
