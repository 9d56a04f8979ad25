"""A run as a tidy pandas DataFrame. pandas is optional: it is imported when a frame is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit._core.messages import missing_extra
from hookkit.records.run import Run

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("step", "epoch", "layer", "kind", "statistic", "value")


def pandas() -> Any:
    """Return pandas; raise a MissingExtraError without it."""
    try:
        import pandas as pd
    except ImportError:
        raise missing_extra("pandas", "pandas", "make a DataFrame") from None
    return pd


def to_df(run: Run) -> DataFrame:
    """Return a DataFrame of the columns `COLUMNS` with a row for each value of the run's records.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pd = pandas()
    frames = []
    for r in run.records:
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
