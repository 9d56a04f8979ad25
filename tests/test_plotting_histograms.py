"""Pictures of histograms: known distributions have their true shapes on each kind of axis."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import erf
from typing import Any

import made
import numpy as np
import pytest

from hookkit.moments.bins import LogBins, RangeBins
from hookkit.records import Record

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
bins = pytest.importorskip("hookkit.plotting.bins")

SIDE = np.array([2.0**e * f for e in range(-12, 12) for f in np.arange(1, 2, 0.125)] + [2.0**12])
FINE = np.concatenate([[-np.inf], -SIDE[::-1], [0.0], SIDE, [np.inf]])
EDGES = {
    "activations": LogBins().edges,
    "gradients": LogBins(-40, 8, 1).edges,
    "fine": FINE,
    "equal": RangeBins(-6, 6, 48).edges,
    "uneven": np.array([-np.inf, -5, -2, -1, -0.5, 0, 0.1, 0.5, 1, 2, 3, 4, 6, np.inf]),
    "made": made.EDGES,
}
N = 10**9  # values: counts that are exact


@pytest.fixture(autouse=True)
def _off_screen() -> Iterator[None]:
    with plotting.offscreen():
        yield


def normal(x: Any, mean: float = 0, std: float = 1) -> Any:
    return np.vectorize(lambda z: 0.5 * (1 + erf(z)))((x - mean) / (std * 2**0.5))


CUMULATIVE: dict[str, Callable[[Any], Any]] = {
    "normal": normal,
    "lognormal": lambda x: np.where(x > 0, normal(np.log(np.maximum(x, 1e-300))), 0.0),
    "uniform": lambda x: np.clip((x + 1) / 2, 0, 1),
    "bimodal": lambda x: 0.5 * normal(x, -3, 0.3) + 0.5 * normal(x, 2, 0.4),
    "ReLU": lambda x: np.where(x > 0, normal(x), 0.0),  # half of the values are 0
    "tiny": lambda x: normal(x, 0, 1e-6),
    "huge": lambda x: normal(x, 0, 1e4),
}


def record_of(edges: Any, *names: str, n: int = 3) -> Record:
    """A record with a layer of each of these distributions."""
    below = [CUMULATIVE[name](np.clip(edges, -1e30, 1e30)) for name in names]
    hist = np.round(N * np.diff(below, axis=1)).astype(np.int64)[..., None].repeat(n, axis=2)
    r = made.record([(name, "Linear") for name in names], n)
    return replace(r, hist=hist, edges=edges)


def drawn(ax: Any) -> list[tuple[Any, Any]]:
    """Of each line of `plot_density` the edges of its bins, and its height in each."""
    assert {line.get_drawstyle() for line in ax.lines} == {"steps-post"}
    return [(line.get_xdata(), line.get_ydata()[:-1]) for line in ax.lines]


def peaks(y: Any) -> int:
    """How often a curve turns from rising to falling, by more than a rounded count."""
    steps = np.diff(np.pad(y, 1))
    signs = np.sign(steps[np.abs(steps) > 1e-6])
    return int((np.diff(signs) < 0).sum())


@pytest.mark.parametrize("axis", EDGES)
def test_the_area_under_each_line_of_a_density_is_one(axis: str) -> None:
    ax = plotting.plot_density(record_of(EDGES[axis], *CUMULATIVE))

    areas = [np.diff(x) @ y for x, y in drawn(ax)]
    assert areas == pytest.approx([1.0] * len(CUMULATIVE), abs=1e-6)


@pytest.mark.parametrize("axis", ["activations", "gradients", "fine", "made"])
@pytest.mark.parametrize(
    ("name", "n"), [("lognormal", 1), ("normal", 2), ("uniform", 2), ("bimodal", 2)]
)
def test_a_smooth_distribution_has_no_more_peaks_than_it_should(
    axis: str, name: str, n: int
) -> None:
    ((_, y),) = drawn(plotting.plot_density(record_of(EDGES[axis], name)))

    assert peaks(y) == n  # a signed logarithm parts what lies on both sides of 0


@pytest.mark.parametrize(("name", "n"), [("normal", 1), ("lognormal", 1), ("bimodal", 2)])
def test_on_a_linear_axis_a_distribution_has_its_own_shape(name: str, n: int) -> None:
    ((_, y),) = drawn(plotting.plot_density(record_of(RangeBins(-6, 6, 48).edges, name)))

    inside = y[1:-1]  # without the open bins, which hold the tails
    assert peaks(np.append(inside, inside[-1] / 2)) == n


def test_a_lognormal_is_as_high_as_its_formula_says() -> None:
    edges = FINE

    ((x, y),) = drawn(plotting.plot_density(record_of(edges, "lognormal")))

    middle = (x[:-1] + x[1:]) / 2
    z = (middle - bins.axis_places(1.0, edges)) * np.log(10)  # of log(value), standard normal
    wanted = np.log(10) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    assert y == pytest.approx(wanted, abs=2e-3)


def test_the_linear_part_of_an_axis_has_no_kink() -> None:
    edges = LogBins(-4, 4).edges
    x = np.linspace(0.9, 1.1, 201) * 2.0**-4

    slopes = np.diff(bins.axis_places(x, edges)) / np.diff(x)

    assert np.abs(np.diff(slopes)).max() < 0.002 * slopes[0]


def test_a_spike_at_zero_stays_one_bin_and_does_not_lean_over_to_negative_values() -> None:
    ((x, y),) = drawn(plotting.plot_density(record_of(EDGES["activations"], "ReLU")))

    at = y.argmax()
    assert (x[at], x[at + 1]) == pytest.approx((0, bins.PART))
    assert (y[:at] == 0).all()


def test_the_captions_of_a_density_say_its_units_and_its_axis() -> None:
    log = plotting.plot_density(record_of(EDGES["activations"], "normal"))
    linear = plotting.plot_density(record_of(EDGES["equal"], "normal"))

    assert log.get_ylabel() == "share of values per decade"
    assert log.get_xlabel() == "value of activation; signed log axis, linear within ±0.00024"
    assert linear.get_ylabel() == "share of values per bin"
    assert linear.get_xlabel() == "value of activation; bins are 0.25 wide"


def test_values_beyond_the_bins_are_in_open_ones_that_say_so() -> None:
    ax = plotting.plot_density(record_of(EDGES["activations"], "huge"))

    labels = [tick.get_text() for tick in ax.get_xticklabels()]
    assert (labels[0], labels[-1]) == ("< −4096", "> 4096")
    assert ax.get_xticks()[-1] == pytest.approx(np.mean(drawn(ax)[0][0][-2:]))


@pytest.mark.parametrize("axis", ["activations", "equal"])
def test_an_open_bin_is_as_wide_as_can_be_seen(axis: str) -> None:
    heights, shown = tile(plotting.color_dim(record_of(EDGES[axis], "huge"), 0))

    ends = np.asarray(heights)[[0, -1]]
    assert ends / heights.sum() == pytest.approx([1 / 17] * 2, rel=0.01)
    assert 10 ** np.asarray(shown)[[0, -1], 0] @ ends > 0.6


def test_many_layers_are_lines_through_the_middles_of_the_bins() -> None:
    edges = EDGES["activations"]

    ax = plotting.plot_density(record_of(edges, *["lognormal"] * 20))

    places = bins.edge_places(edges)
    assert set(ax.lines[0].get_xdata()) < set((places[:-1] + places[1:]) / 2)
    assert peaks(ax.lines[0].get_ydata()) == 1


def tile(ax: Any) -> tuple[Any, Any]:
    """Of the one layer of a `color_dim`: the heights of its bins, and log10 densities."""
    mesh = ax.collections[0]
    ys = mesh.get_coordinates()[:, 0, 1]
    return np.diff(ys), mesh.get_array()[: len(ys) - 1]


@pytest.mark.parametrize("axis", ["activations", "gradients", "equal"])
def test_colours_of_a_spread_are_densities_in_bins_of_their_true_height(axis: str) -> None:
    ax = plotting.color_dim(record_of(EDGES[axis], "normal"), 0)

    heights, shown = tile(ax)
    top = ax.collections[0].get_clim()[1]
    assert heights.min() == pytest.approx(np.diff(bins.edge_places(EDGES[axis])).min())
    assert np.nanmax(shown) <= top
    shares = 10 ** np.asarray(shown, float)[:, 0] * heights
    assert shares[10 ** shown[:, 0] > 10.0 ** (top - 3.9)].sum() == pytest.approx(1, abs=5e-3)
    if axis == "activations":
        assert peaks(10 ** shown[:, 0]) == 2


def test_a_long_run_counts_neighbouring_records_together_and_says_so() -> None:
    edges = EDGES["activations"]
    record = record_of(edges, "normal", "tiny", n=1000)
    hist = record.hist
    assert hist is not None
    hist[0, :, 3] = hist[1, :, 3]  # one record of four
    record = replace(record, hist=hist)

    ax = plotting.color_dim(record, 0)

    heights, shown = tile(ax)
    assert ax.get_title(loc="left").endswith("; 2 records a column")
    assert shown.shape[1] == 500
    for column in (0, 1):
        assert (10 ** shown[:, column]) @ heights == pytest.approx(1, abs=0.01)
    assert 10 ** shown[:, 1].max() == pytest.approx(0.5 / 2 / bins.PART, rel=1e-3)


def test_the_colour_bar_of_a_spread_says_its_units() -> None:
    figure = plotting.color_dim(record_of(EDGES["activations"], "normal", "tiny"))

    assert figure.axes[-1].get_ylabel() == "share of values per decade"
    assert "signed log axis, linear within ±0.00024" in figure.axes[0].get_ylabel()
