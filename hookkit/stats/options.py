"""What the recording callbacks are given, checked at their door."""

from __future__ import annotations

import math
from typing import Any

from hookkit.checks import check_flag, check_number, kind_of, shown
from hookkit.errors import OptionError
from hookkit.moments.buffers import Options
from hookkit.moments.histograms import Bins, edge_bins, range_bins

MOST_BINS = 4096  # of each layer, in each record
MOST_SAMPLED = 2**20


def checked_options(who: str, with_hist: bool, default: Bins, **given: Any) -> Options:
    """Options from what the user gave, each checked.

    Raises:
        OptionError: a value that cannot work.
    """
    what = "the size up to which a value is near zero"
    eps = check_number(who, "eps", given["eps"], 0, below=math.inf, what=what)
    what = "how many values a histogram samples; exact_hist=True counts all"
    sample = check_number(who, "sample", given["sample"], 1, MOST_SAMPLED, whole=True, what=what)
    window = check_number(who, "window", given["window"], 1, whole=True, what="in records")
    exact = check_flag(who, "exact_hist", given["exact_hist"])
    if not with_hist and (given["bins"] is not None or exact):
        raise OptionError(
            f"{who} was given {'bins' if given['bins'] is not None else 'exact_hist=True'}, but no "
            f"histogram is recorded. Add with_hist=True."
        )
    bins = checked_bins(who, given["bins"], default) if with_hist else None
    return Options(eps, bins, sample, exact, window if given["units"] else 0)


def check_scaler(who: str, scaler: Any) -> None:
    """Raises if `scaler` is not None, and nothing of which the scale can be known.

    Raises:
        OptionError: it is a class, a number, or else no GradScaler.
    """
    is_class = isinstance(scaler, type)
    if scaler is None or (not is_class and callable(getattr(scaler, "is_enabled", None))):
        return
    raise OptionError(
        f"{who}(scaler={shown(scaler)}): expected a GradScaler, found {kind_of(scaler)}. Give the "
        f"torch.amp.GradScaler whose scale(loss) is called, or None if the loss is not scaled."
    )


def checked_bins(who: str, bins: Any, default: Bins) -> Bins:
    """The bins a user means: None, a `Bins`, `(low, high)`, `(low, high, n)` or edges.

    Raises:
        OptionError: it is none of these, they do not increase, or are too many.
    """
    if bins is None:
        return default
    ranged = isinstance(bins, tuple) and len(bins) in (2, 3)
    if ranged and len(bins) == 3:
        check_number(who, "bins[2]", bins[2], 1, MOST_BINS, whole=True, what="how many")
    try:
        made = bins if isinstance(bins, Bins) else None
        made = made or (range_bins(*bins) if ranged else edge_bins(bins))
    except (TypeError, ValueError) as e:
        if isinstance(e, OptionError):
            raise
        raise OptionError(
            f"{who}(bins={shown(bins)}): give (low, high), (low, high, n), a list of increasing "
            f"edges, or log_bins(…)."
        ) from None
    if made.n > MOST_BINS + 2:
        raise OptionError(
            f"{who} was given {made.n} bins, to be kept for each layer and record. "
            f"Give {MOST_BINS} or fewer."
        )
    return made
