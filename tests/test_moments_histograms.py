"""Histograms: bits as logarithmic bins, everything counted once, samples that see all channels."""

import math

import numpy as np
import pytest
import torch

from hookkit.errors import OptionError
from hookkit.moments.histograms import (
    ABSENT,
    Bins,
    coprime_stride,
    edge_bins,
    log_bins,
    range_bins,
    sample_error,
)

pytestmark = pytest.mark.usefixtures("reader")


def randn(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


ALL_BINS = [
    log_bins(),
    log_bins(-40, 8, 1),
    log_bins(-3, 3, 8),
    range_bins(-1, 1, 7),
    edge_bins([0, 1]),
]


@pytest.mark.parametrize("bins", ALL_BINS, ids=["log", "wide", "fine", "range", "edges"])
def test_counts_equal_a_search_in_the_edges(bins: Bins) -> None:
    x = torch.cat([randn(5000), randn(500) * 1e4, randn(500) * 1e-5, torch.zeros(10)])

    counts = bins.count(x.unsqueeze(0))[0]

    size, sign = x.double().abs().numpy(), np.where(x.numpy() < 0, -1, 1)
    if bins.octaves:  # negative bins are open at the other end
        half = bins.n // 2
        place = np.searchsorted(bins.edges[half:], size, side="right") - 1
        want = np.bincount(np.where(sign > 0, half + place, half - 1 - place), minlength=bins.n)
    else:
        place = np.searchsorted(bins.edges, x.double().numpy(), side="right") - 1
        want = np.bincount(place, minlength=bins.n)
    assert counts[: bins.n].tolist() == want.tolist()
    assert counts[bins.n].item() == 10


def test_values_that_no_bin_holds_are_counted_apart() -> None:
    bins = log_bins()
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0, -0.0, 1e30, -1e30, 1e-30]])

    counts = bins.count(x)[0]

    assert counts[bins.n :].tolist() == [1, 1, 2, 0]
    assert counts[: bins.n].sum() == 5
    assert (counts[0], counts[bins.n - 1]) == (1, 1)
    assert counts[bins.n // 2] == 2  # −0.0 and 1e−30 lie in the bin that begins at 0


NANS = [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001]


@pytest.mark.parametrize("bins", ALL_BINS[:1] + ALL_BINS[3:4], ids=["log", "range"])
def test_every_nan_is_counted_whatever_made_it(bins: Bins) -> None:
    """0x7FFFFFFF is what arithmetic on CUDA gives, 0xFFC00000 what that on x86 does."""
    x = torch.from_numpy(np.array([[*NANS, ABSENT]], np.uint32).view(np.float32))

    counts = bins.count(x)[0]

    assert counts[bins.n :].tolist() == [0, len(NANS), 0, 1]
    assert counts[: bins.n].sum() == 0


def test_edges_are_round_and_increase() -> None:
    edges = log_bins().edges

    assert (np.diff(edges[1:-1]) > 0).all()
    assert {1.0, 1.5, 2.0, 3.0, 4.0, -1.5, 0.0} <= set(edges.tolist())


@pytest.mark.parametrize("n", [4097, 8 * 128 * 256, 64 * 64 * 28 * 28, 2**20, 999_983])
def test_a_stride_shares_no_factor_with_the_size(n: int) -> None:
    stride = coprime_stride(n, 4096)

    assert math.gcd(stride, n) == 1
    assert stride * 4095 < n


def test_a_strided_sample_sees_every_channel() -> None:
    x = torch.arange(256).expand(8, 128, 256).reshape(-1)

    sample = x[:: coprime_stride(len(x), 4096)][:4096]

    assert len(sample.unique()) == 256
    assert len(x[:: len(x) // 4096].unique()) == 4  # what the obvious stride sees


def test_the_error_bound_holds_on_a_sample() -> None:
    x = randn(200_000)

    sample = np.sort(x[:: coprime_stride(len(x), 4096)][:4096].numpy())

    share = np.searchsorted(np.sort(x.numpy()), sample) / len(x)
    assert np.abs(share - np.arange(4096) / 4096).max() < sample_error(4096)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: log_bins(3, 2), "exponents"),
        (lambda: log_bins(0, 2, 3), "bins per octave"),
        (lambda: range_bins(1, 0), "low < high"),
        (lambda: range_bins(0, math.inf), "finite"),
        (lambda: edge_bins([1, 1]), "increasing"),
    ],
)
def test_bins_that_cannot_work_are_refused(make: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()  # type: ignore[operator]
