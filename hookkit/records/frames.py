"""Records as a tidy pandas DataFrame. pandas is optional: it is imported when a frame is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.checks import check_path
from hookkit.errors import missing_extra
from hookkit.files import atomic_write
from hookkit.records.values import read_source

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("step", "epoch", "layer", "kind", "statistic", "value")


def pandas() -> Any:
    """pandas; a MissingExtraError without it."""
    try:
        import pandas as pd
    except ImportError:
        raise missing_extra("pandas", "pandas", "make a DataFrame") from None
    return pd


def to_df(source: Any) -> DataFrame:
    """A tidy DataFrame with the columns `COLUMNS`, one value a row, of what holds records.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pd = pandas()
    frames = []
    for r in read_source(source).records:
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
    """Writes the tidy table as CSV by pandas, whole or not at all; the path.

    Missing parent folders are made.
    """
    path = check_path("to_csv", path)
    table = to_df(source)  # before the file is opened: an error here must leave no file
    with atomic_write(path, text=True) as file:
        table.to_csv(file, index=False, lineterminator="\n")
    return path
