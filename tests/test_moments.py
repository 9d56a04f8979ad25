"""Rows of nine numbers: each against a float64 formula, and each reader against the reference."""

import math

import numpy as np
import pytest
import torch

from hookkit.recorders.bins import SAMPLE, LogBins, RangeBins, count, sample_of
from hookkit.recorders.moments import (
    CHUNK,
    EMPTY,
    FIELDS,
    SmallArrays,
    array_row,
    merge,
    moments,
    plain,
    statistics as statistics_of,
)
from hookkit.recorders.step_table import MOMENTS


def truth(x: torch.Tensor, eps: float) -> list[float]:
    """The row of `x` by definition, in float64."""
    x = x.double().flatten()
    y = x[x.isfinite()]
    n = len(y)
    least, most = (float(y.min()), float(y.max())) if n else (math.inf, -math.inf)
    mean = float(y.mean()) if n else 0.0
    m2 = float((y - y.mean()).square().sum()) if n else 0.0
    near, zero = int((x.abs() <= eps).sum()), int((x == 0).sum())
    return [1, n, mean, m2, least, most, near, zero, len(x) - n]


CASES = {
    "far from 0": torch.randn(5000) + 1e4,
    "several chunks": torch.randn(2 * CHUNK + 77).relu(),
    "one value": torch.tensor([3.0]),
    "none": torch.zeros(0),
    "not finite": torch.tensor([1.0, math.nan, math.inf, -2.0]),
    "none finite": torch.full((3,), math.nan),
    "huge": torch.tensor([1e30, -1e30, 1e25]),
    "tiny": torch.tensor([1e-40, 1e-30, 0.0]),
    "gradients that vanish": torch.randn(5000) * 1e-24,
    "small and far from 0": torch.randn(5000) * 1e-20 + 1e-14,
    "zeros": torch.zeros(5),
    "many equal values": torch.full((CHUNK,), 0.1) * (torch.arange(CHUNK) % 3 > 0),
    "bytes": (torch.arange(CHUNK) % 2 * 255).float(),
    "float64": torch.randn(CHUNK + 9, dtype=torch.float64) * 1e-3 + 5,
    "beyond float32": torch.tensor([1e200, -1e180, 1.0], dtype=torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_numpy_and_tensor_operations_give_the_row_of_the_definition(name: str) -> None:
    x = CASES[name]
    with np.errstate(all="ignore"):
        want = truth(x, 0.05)

    for row in (array_row(x.numpy(), 0.05), moments(x, 0.05).tolist()):
        assert row[3] == pytest.approx(want[3], rel=2e-6 if len(x) > 9 else 1e-5)
        assert [*row[:2], *row[4:]] == [*want[:2], *want[4:]]
        size = float(x.double().abs().nan_to_num(0, 0, 0).amax()) if len(x) else 0.0
        assert row[2] == pytest.approx(want[2], rel=1e-6, abs=1e-7 * size)


def test_small_arrays_that_are_read_together_have_the_rows_of_each() -> None:
    arrays, bins = SmallArrays(0.05, LogBins()), LogBins()
    cases = [x[:900] for x in CASES.values() if x.dtype is torch.float32 and len(x)]

    numbers = [arrays.add(x.numpy()) for x in cases[:8]]
    read = [arrays.read(number) for number in numbers if number is not None]

    assert len(read) == 8
    for x, (row, counts) in zip(cases, read, strict=False):
        with np.errstate(all="ignore"):
            want = truth(x, 0.05)
        assert row == pytest.approx(want, rel=1e-9, abs=1e-12 * float(x.abs().nan_to_num().amax()))
        np.testing.assert_array_equal(counts, count(x.numpy(), bins))
    assert arrays.add(cases[0].numpy()) is None  # they were read


def test_parts_merge_to_the_whole() -> None:
    x = torch.randn(1000, dtype=torch.float64) + 1e6
    parts = [array_row(part.numpy(), 0.05) for part in x.split(130)]

    row = EMPTY
    for part in parts:
        row = merge(row, part)

    assert dict(zip(FIELDS, row, strict=True))["m2"] == pytest.approx(truth(x, 0.05)[3], rel=1e-9)
    assert merge(row, EMPTY) == row
    arrays = MOMENTS.merge(*(np.array(p) for p in parts[:2]))
    tensors = merge(*(torch.tensor(p, dtype=torch.float64) for p in parts[:2]))
    for one in (arrays, tensors):
        assert [float(value) for value in one] == pytest.approx(list(merge(*parts[:2])))
    assert MOMENTS.merge(np.array(EMPTY), np.array(EMPTY)).tolist() == list(EMPTY)


def test_statistics_of_a_layer_that_did_not_run_are_nan() -> None:
    values = statistics_of(np.array([EMPTY, [1, 0, 0, 0, math.inf, -math.inf, 0, 0, 2]]))

    assert all(np.isnan(table[0]) for table in values.values())
    assert (values["count"][1], values["nonfinite"][1]) == (2, 2)
    assert np.isnan(values["mean"][1])


def test_magnitudes_negated_views_and_subclasses_are_read_and_sparse_ones_are_not() -> None:
    z = torch.complex(torch.tensor([3.0]), torch.tensor([4.0]))

    assert plain(torch.ones(3).to_sparse()) is None
    assert plain(z).tolist() == [5.0]
    assert plain(z.conj().imag).numpy().tolist() == [-4.0]
    assert type(plain(torch.nn.Parameter(torch.ones(2)))) is torch.Tensor


# histograms


@pytest.mark.parametrize("bins", [LogBins(), RangeBins(-1, 2, 6)])
def test_bins_count_what_numpy_counts(bins: LogBins | RangeBins) -> None:
    x = torch.cat([torch.randn(3000) * 10.0**e for e in range(-6, 6)])
    x = torch.cat([x, x.new_tensor([0.0, -0.0, math.nan, math.inf, -math.inf])])
    edges = np.where(np.isinf(bins.edges), np.sign(bins.edges) * 1e300, bins.edges)
    on_edges = torch.from_numpy(edges[1:-1]).float()
    x = torch.cat([x, on_edges, -on_edges, x.new_tensor([1e-45, -1e-45, 3.4e38, -3.4e38])])
    inside = x[x.isfinite()].double().numpy()
    want = np.histogram(inside, edges)[0]

    got = count(x.numpy(), bins)

    assert got.sum() == len(inside)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(bins.places_in_tensor(x), bins.places(x.numpy()))


def test_a_sample_of_any_size_goes_from_end_to_end_and_through_all_channels() -> None:
    sizes = [*range(1, 70_000), *range(70_000, 1_000_000, 210), 12_345_678, 2**31]
    for n in sizes:
        for offset in (0, 7):
            places = range(n)[sample_of(n, offset)]

            assert len(places) >= min(n, SAMPLE)
            assert math.gcd(places.step, n) == 1
            assert places[0] < places.step
            assert places[-1] >= n - places.step
    assert max(len(range(n)[sample_of(n, 0)]) for n in sizes) == 60_060  # 4 * 30030: few strides


def test_samples_of_many_records_take_every_value() -> None:
    n = 16_384

    taken = {i for record in range(3) for i in range(n)[sample_of(n, record)]}

    assert len(taken) == n
