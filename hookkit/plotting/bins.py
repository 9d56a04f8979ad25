"""The axis of a histogram: where values lie on it, how wide its bins are there, and its ticks.

A histogram is drawn as a density, the share of values in a bin divided by the bin's width on the
axis, so that the area is the share and what is smooth looks smooth. Shares alone would show how
wide the bins are: signed logarithmic ones (1, 1.5, 2, 3, 4, …) make a comb of any distribution.

Bins that are equally wide have a linear axis, whose unit is a bin. All others have a signed
logarithmic one, whose unit is a decade, with a linear part around 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import MaxNLocator

from hookkit.records import Floats

PART = float(np.log10(np.e))
"""Length of each half of the linear part, in decades: the one for which the axis has no kink."""


def linear_part(edges: Floats) -> float | None:
    """Half of the linear part of the bins' axis, in values; None if all of the axis is linear.

    >>> linear_part(np.array([-4, -2, -1, 0, 1, 2, 4])), linear_part(np.array([0, 5, 10, np.inf]))
    (1.0, None)
    """
    finite = edges[np.isfinite(edges)]
    widths, sizes = np.diff(finite), np.abs(finite[finite != 0])
    if len(widths) < 3 or np.allclose(widths, widths[0], rtol=1e-3):
        return None
    return float(sizes.min())


def axis_places(values: npt.ArrayLike, edges: Floats) -> Floats:
    """Where finite `values` lie on the axis of bins.

    >>> axis_places([-100, 0, 1, 10, 100], np.array([0, 1, 10, 1000])).round(3).tolist()
    [-2.434, 0.0, 0.434, 1.434, 2.434]
    """
    x, least = np.asarray(values, dtype=np.float64), linear_part(edges)
    if least is None:
        finite = np.isfinite(edges)
        return np.asarray(np.interp(x, edges[finite], np.flatnonzero(finite)))
    size = np.abs(x) / least
    part = np.where(size > 1, np.log10(np.maximum(size, 1)) + PART, PART * size)
    return np.asarray(np.sign(x) * part)


def edge_places(edges: Floats) -> Floats:
    """(n + 1,) where the edges lie; a bin without an end is as wide as a 15th of all others.

    As wide as its neighbour, a hair at the edge of a picture could hold most values of a layer.

    >>> edges = np.array([-np.inf, -10, -1, 0, 1, 10, np.inf])
    >>> np.diff(edge_places(edges)).round(3).tolist()
    [0.191, 1.0, 0.434, 0.434, 1.0, 0.191]
    """
    finite = np.flatnonzero(np.isfinite(edges))
    inner = axis_places(edges[finite], edges)
    wide = (inner[-1] - inner[0]) / 15 or 1.0
    before = inner[0] - wide * np.arange(finite[0], 0, -1)
    after = inner[-1] + wide * np.arange(1, len(edges) - finite[-1])
    return np.concatenate([before, inner, after])


def unit(edges: Floats) -> str:
    """What shares are divided by: `"decade"`, or `"bin"` of an axis that is linear."""
    return "bin" if linear_part(edges) is None else "decade"


def scale_words(edges: Floats) -> str:
    """What kind of axis it is, in a few words, for captions.

    >>> scale_words(np.array([-4, -2, -1, 0, 1, 2, 4])), scale_words(np.array([0.0, 0.5, 1]))
    ('signed log axis, linear within ±1', 'bins are 0.5 wide')
    """
    least = linear_part(edges)
    if least is not None:
        return f"signed log axis, linear within ±{least:.2g}"
    widths = np.diff(edges[np.isfinite(edges)])
    return f"bins are {widths[0]:.3g} wide" if len(widths) else "one bin"


def densities(shares: Floats, edges: Floats) -> Floats:
    """`shares` (n_bins, …) of values in each bin, divided by its width on the axis."""
    widths = np.diff(edge_places(edges))
    return np.asarray(shares / widths.reshape(-1, *[1] * (shares.ndim - 1)))


def bin_ticks(edges: Floats, first: int, last: int, most: int = 7) -> tuple[Floats, list[str]]:
    """Places on the axis and labels of round values between the bins `first` and `last`."""
    index = np.flatnonzero(np.isfinite(edges))
    low, high = edges[np.clip([first, last + 1], index[0], index[-1])]
    ticks, ends = _round_values(edges, low, high, most), edge_places(edges)
    places, zero = axis_places(ticks, edges), float(axis_places(0.0, edges))
    apart = 0.6 * (ends[last + 1] - ends[first]) / most  # labels closer than this would touch
    shown = _open_bins(edges, first, last)
    taken = [place for place, _ in shown]
    for place, tick in zip(places, ticks, strict=True):
        if all(abs(place - t) >= apart for t in [*taken, *[zero] * bool(tick)]):
            shown.append((float(place), f"{tick:.4g}"))
    shown.sort()
    return np.array([place for place, _ in shown]), [text.replace("-", "−") for _, text in shown]


def _round_values(edges: Floats, low: float, high: float, most: int) -> Floats:
    """About `most` round values from `low` to `high`, of linear or of logarithmic bins."""
    sizes = np.abs(edges[np.isfinite(edges) & (edges != 0)])
    least = sizes.min() if low <= 0 <= high else min(abs(low), abs(high))
    tops = [int(np.floor(np.log10(end) + 1e-9)) for end in (-low, high) if end > least]
    if tops and linear_part(edges) is not None:
        # Whole decades, the same ones for both signs, from the largest down. Where the two ends are
        # about as large, and only some decades fit, from the smaller, so that both get a label.
        bottom = int(np.ceil(np.log10(least) - 1e-9))
        n_decades = sum(top - bottom + 1 for top in tops)
        every = max(1, -(-n_decades // (most - 1)))
        alike = every > 1 and max(tops) - min(tops) <= 1
        powers = 10.0 ** np.arange(min(tops) if alike else max(tops), bottom - 1, -every)
        ticks = np.unique(np.concatenate(([0.0], powers, -powers)))
        ticks = ticks[(low <= ticks) & (ticks <= high)]
        if len(ticks) > 1:
            return ticks
    ticks = np.asarray(MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high))
    return np.asarray(ticks[(low <= ticks) & (ticks <= high)], dtype=np.float64)


def _open_bins(edges: Floats, first: int, last: int) -> list[tuple[float, str]]:
    """Middle and label of the bins, among those shown, that hold all beyond the range."""
    ends, n = edge_places(edges), len(edges) - 1
    middle = (ends[:-1] + ends[1:]) / 2
    low = [(float(middle[0]), f"< {edges[1]:.4g}")] if first == 0 and np.isinf(edges[0]) else []
    is_open = last == n - 1 and np.isinf(edges[-1])
    return low + ([(float(middle[-1]), f"> {edges[-2]:.4g}")] if is_open else [])
