"""Until the pictures do without it: whether a loss stops being a number."""

from __future__ import annotations

import numpy as np

from hookkit.records import Floats


def stops_being_a_number(series: Floats) -> bool:
    """Whether a loss that was known ends in NaN for longer than its gaps of unknown steps."""
    at = np.flatnonzero(np.isfinite(series))
    if not len(at):
        return False
    gap = int(np.diff(at, prepend=-1).max()) - 1
    return len(series) - 1 - int(at[-1]) > 2 * gap + 2


SIGMA = 1.4826


def start_level(series: Floats) -> float:
    """The median of the first losses."""
    values = series[np.isfinite(series)]
    return float(np.median(values[: max(5, len(values) // 20)]))
