"""Where a loss, or a norm, jumps out of what came before: what a spike is, for rules and pictures.

Builds on `reading`.
"""

from __future__ import annotations

import numpy as np

from hookkit.health.reading import SIGMA, start_level
from hookkit.records import Floats, Ints

# OLMo-core, SkipStepOptimizer
SIGMAS, WINDOW = 6, 128
# Of the first value: a spike is higher by this much at least (hookkit, measured)
OF_START = 0.5
# In fewer values than this nothing is called a spike (hookkit, measured)
LEAST = 100


def jumps(values: Floats) -> Ints:
    """Which of the finite `values` jump out of the 128 before; none in the first 64.

    By 6 standard deviations, taken from medians, and by half of where the values begin.

    >>> values = 2 + 0.01 * np.sin(np.arange(300.0))
    >>> values[200] = 9
    >>> jumps(values).tolist()
    [200]
    """
    if len(values) < LEAST:
        return np.zeros(0, np.int64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        level, first = start_level(values), WINDOW // 2
        # Only what is so far above the least value can be as far above the median: few are.
        before = np.lib.stride_tricks.sliding_window_view(
            np.concatenate([np.full(WINDOW, np.inf), values[:-1]]), WINDOW
        )
        high = values - before.min(axis=1) > OF_START * abs(level)
        high[:first] = False
        return np.array(
            [t for t in np.flatnonzero(high).tolist() if _jumps(values, t, level)], np.int64
        )


def usual(values: Floats, t: int, level: float) -> tuple[float, float]:
    """The median of the 128 values before `t`, and how far above it a jump must be.

    `level` is where the values begin.
    """
    before = values[max(0, t - WINDOW) : t]
    middle = float(np.median(before))
    sigma = SIGMA * np.median(np.abs(before - middle))  # by medians: other spikes do not count
    return middle, max(float(SIGMAS * sigma), OF_START * abs(level))


def _jumps(values: Floats, t: int, level: float) -> bool:
    """Whether value `t` stands out of those before, both by difference and by factor."""
    middle, least = usual(values, t, level)
    if values[t] - middle <= least:
        return False
    if middle == 0:
        return False  # most are 0 (of a perceptron's loss, say), and any other is a jump
    before = values[max(0, t - WINDOW) : t]
    before = before[before > 0]
    if len(before) < WINDOW // 2:
        return True  # no factors
    # A loss near 0 varies by factors (batches without a mistake, and with one), which are no
    # spikes. Their noise is measured from one step to the next, so that a fall is not part of it.
    factor = SIGMA * np.median(np.abs(np.diff(np.log(before)))) / np.sqrt(2)
    return bool(np.log(values[t] / np.median(before[-16:])) > SIGMAS * factor)
