"""What the recording callbacks are given, checked at their door."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from hookkit.errors import OptionError
from hookkit.moments.banks import Options
from hookkit.moments.histograms import Bins, edge_bins, range_bins

MOST_BINS = 4096  # of each layer, in each record
MOST_SAMPLED = 2**20


def checked_options(who: str, with_hist: bool, default: Bins, **given: Any) -> Options:
    """Options from what the user gave, each checked.

    Raises:
        OptionError: a value that cannot work.
    """
    eps, exact = given["eps"], given["exact_hist"]
    if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 <= float(eps) < math.inf:
        raise OptionError(
            f"{who}(eps={eps!r}) was asked for: it is the size up to which a value is near zero. "
            f"Give a number, 0 or more."
        )
    _check_whole(who, "sample", given["sample"], MOST_SAMPLED, "values; exact_hist=True counts all")
    _check_whole(who, "window", given["window"], math.inf, "records")
    if not isinstance(exact, int):  # bool is one
        raise OptionError(f"{who}(exact_hist={exact!r}) was asked for. Give True or False.")
    if not with_hist and (given["bins"] is not None or exact):
        raise OptionError(
            f"{who} was given {'bins' if given['bins'] is not None else 'exact_hist=True'}, but no "
            f"histogram is recorded. Add with_hist=True."
        )
    bins = checked_bins(who, given["bins"], default) if with_hist else None
    window = int(given["window"]) if given["units"] else 0
    return Options(float(eps), bins, int(given["sample"]), bool(exact), window)


def check_scaler(who: str, scaler: Any) -> None:
    """Raises if `scaler` is not None, and nothing of which the scale can be known.

    Raises:
        OptionError: it is a class, a number, or else no GradScaler.
    """
    is_class = isinstance(scaler, type)
    if scaler is None or (not is_class and callable(getattr(scaler, "is_enabled", None))):
        return
    raise OptionError(
        f"{who}(scaler={scaler.__name__ if is_class else repr(scaler)}) was asked for, which is "
        f"{'a class' if is_class else 'no GradScaler'}. Give the torch.amp.GradScaler whose "
        f"scale(loss) is called, or None if the loss is not scaled."
    )


def _check_whole(who: str, name: str, value: Any, most: float, what: str) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not 1 <= int(value) <= most:
        limit = "or more" if most == math.inf else f"to {most}"
        raise OptionError(
            f"{who}({name}={value!r}) was asked for. Give a whole number, 1 {limit}: of {what}."
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
        _check_whole(who, f"bins=({bins[0]}, {bins[1]}, n), n", bins[2], MOST_BINS, "bins")
    try:
        made = bins if isinstance(bins, Bins) else None
        made = made or (range_bins(*bins) if ranged else edge_bins(bins))
    except (TypeError, ValueError) as e:
        if isinstance(e, OptionError):
            raise
        raise OptionError(
            f"{who}(bins={bins!r}) was asked for. Give (low, high), (low, high, n), "
            f"a list of edges, or log_bins(…)."
        ) from None
    if made.n > MOST_BINS + 2:
        raise OptionError(
            f"{who} was given {made.n} bins, to be kept for each layer and record. "
            f"Give {MOST_BINS} or fewer."
        )
    return made
