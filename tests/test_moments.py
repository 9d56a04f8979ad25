"""Moments are exact: against a two-pass float64 reference, for every dtype, layout and oddity."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hookkit.moments.cpu import cpu_row
from hookkit.moments.moments import (
    EMPTY,
    FIELDS,
    array_of,
    empty_rows,
    flat,
    merge,
    merge_row,
    moments,
    plain,
    statistics,
    working_dtype,
)

pytestmark = pytest.mark.usefixtures("reader")

EPS = 0.05
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reference(t: Tensor) -> dict[str, float]:
    """Slow and obvious: two passes in float64 over the finite values."""
    x = (t.abs() if t.is_complex() else t).double().flatten().tolist()
    near = torch.tensor(EPS, dtype=working_dtype(t)).item()
    finite = [v for v in x if math.isfinite(v)]
    n = len(finite)
    mean = math.fsum(finite) / n if n else 0.0
    return {
        "n": n,
        "mean": mean,
        "m2": math.fsum((v - mean) ** 2 for v in finite),
        "min": min(finite, default=math.inf),
        "max": max(finite, default=-math.inf),
        "near": sum(abs(v) <= near for v in finite),
        "zero": sum(v == 0 for v in finite),
        "bad": len(x) - n,
    }


def fast(t: Tensor) -> dict[str, float]:
    x = plain(t)
    assert x is not None
    values, times = flat(x)
    array = array_of(values)
    row = cpu_row(values if array is None else array, EPS)
    scale = {"n", "m2", "near", "zero", "bad"}
    named = dict(zip(FIELDS[1:], row, strict=True))
    return {k: v * times if k in scale else v for k, v in named.items()}


def slow(t: Tensor) -> dict[str, float]:
    x = plain(t)
    assert x is not None
    return dict(zip(FIELDS[1:], moments(x, EPS).tolist()[1:], strict=True))


def check(got: dict[str, float], want: dict[str, float]) -> None:
    for name in ("n", "min", "max", "near", "zero", "bad"):
        assert got[name] == want[name], name
    spread = math.sqrt(want["m2"] / max(want["n"], 1))
    size = spread + 1e-7 * abs(want["mean"])
    assert abs(got["mean"] - want["mean"]) <= 1e-5 * size + 1e-300
    assert got["m2"] == pytest.approx(want["m2"], rel=2e-5, abs=1e-300)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


CASES: dict[str, Tensor] = {
    **{f"{d}": randn(3, 1000).to(d) for d in FLOATS},
    **{f"relu {d}": randn(3, 1000).relu().to(d) for d in FLOATS},
    "chunks": randn(300_001),
    "small numbers": randn(20_000) * 1e-12,
    "mean/std 1e2": randn(50_000) + 1e2,
    "mean/std 1e4": randn(50_000) + 1e4,
    "mean/std 1e5 in float64": randn(50_000).double() + 1e5,
    "mean/std -1e4, small": randn(999) - 1e4,
    "a step between chunks": torch.cat([randn(140_000), randn(140_000) + 300]),
    "complex": torch.complex(randn(500), randn(500) + 1),
    "int64": torch.randint(-5, 5, (1000,), generator=torch.Generator().manual_seed(0)),
    "large int64": torch.arange(1000) + 10_000_000,
    "uint8": torch.arange(200, dtype=torch.uint8),
    "bool": randn(1000) > 0,
    "channels last": randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "transposed": randn(30, 40).t(),
    "with gaps": randn(30, 40)[:, ::3],
    "expanded": randn(30, 1, 4).expand(30, 5, 4),
    "all one value expanded": torch.full((1, 1), 0.5).expand(20, 20),
    "constant": torch.full((5000,), 7.25),
    "constant and tiny": torch.full((5000,), -2.9e-23),
    "all at eps": torch.full((5000,), EPS),
    "some at eps, NaN": torch.tensor([math.nan, EPS, -EPS, 1.0]).repeat(9),
    "some at eps, Inf, in float64": torch.tensor([math.inf, EPS, -EPS, 1.0]).double(),
    "scalar": torch.tensor(3.5),
    "one": torch.tensor([0.0]),
    "empty": torch.empty(0, 4),
    "NaN": torch.tensor([1.0, math.nan, 3.0]),
    "Inf": torch.tensor([1.0, math.inf, -math.inf, 3.0, 0.0]),
    "NaN in a large one": torch.where(randn(150_000) > 2, math.nan, randn(150_000)),
    "nothing finite": torch.full((4,), math.nan),
    "squares overflow": torch.tensor([1e25, -2e25, 3e30]),
    "fp16 at its limit": torch.full((1000,), 60000.0).half(),
    "negative zero": torch.tensor([-0.0, 1.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fast_way_equals_the_reference(name: str) -> None:
    check(fast(CASES[name]), reference(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_the_way_without_branches_equals_the_reference(name: str) -> None:
    check(slow(CASES[name]), reference(CASES[name]))


@pytest.mark.parametrize(("eps", "near"), [(-0.0, 2), (1e-50, 2), (1e300, 5)])
def test_any_size_can_be_the_limit_of_near_zero(eps: float, near: int) -> None:
    x = np.array([0.0, -0.0, 1e-30, 2.0, -3.0], np.float32)

    with np.errstate(all="raise"):
        assert cpu_row(x, eps)[5] == near


def test_what_is_denormal_is_zero_where_pytorch_flushes_it() -> None:
    x = torch.tensor([1e-41, -1e-41, 0.0, 1.0, 1.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        for some in (x, x[:3]):
            row = dict(zip(FIELDS[1:], cpu_row(some.numpy(), 1e-42), strict=True))
            want = slow(some)
            assert (row["near"], row["zero"]) == (want["zero"], want["zero"]) == (3, 3)
    finally:
        torch.set_flush_denormal(False)
    assert cpu_row(x.numpy(), 1e-42)[5:7] == (1, 1)


def test_a_naive_formula_fails_the_reference() -> None:
    """A test of the test: E[x²] − E[x]² in float32 is far off at mean/std 1e4."""
    x = CASES["mean/std 1e4"]
    wrong = {**reference(x), "m2": float((x.square().mean() - x.mean().square()) * len(x))}

    with pytest.raises(AssertionError):
        check(wrong, reference(x))


@pytest.mark.parametrize("cut", [1, 500, 2999])
def test_merging_parts_equals_the_whole(cut: int) -> None:
    x = (randn(3000) + 1e4).double()

    both = merge(moments(x[:cut], EPS), moments(x[cut:], EPS))

    torch.testing.assert_close(both[1:], moments(x, EPS)[1:], rtol=1e-9, atol=1e-9)
    assert merge_row(
        moments(x[:cut], EPS).tolist()[1:], moments(x[cut:], EPS).tolist()[1:]
    ) == pytest.approx(tuple(both.tolist()[1:]), rel=1e-12)


def test_an_empty_row_changes_nothing() -> None:
    row = moments(randn(100), EPS)

    assert torch.equal(merge(row, empty_rows(1)[0]), row)
    assert torch.equal(merge(empty_rows(1)[0], row), row)


def test_statistics_are_torchs() -> None:
    x = randn(1000).double()

    s = {name: float(v) for name, v in statistics(moments(x, EPS).numpy()).items()}

    assert s["mean"] == pytest.approx(x.mean().item())
    assert s["std"] == pytest.approx(x.std().item())
    assert s["rms"] == pytest.approx(x.square().mean().sqrt().item())
    assert s["near_zero"] == pytest.approx((x.abs() <= EPS).double().mean().item())
    assert (s["count"], s["nonfinite"], s["zero"]) == (1000, 0, 0)


def test_a_layer_that_did_not_run_is_nan_throughout() -> None:
    values = statistics(np.array(EMPTY))

    assert all(np.isnan(v) for v in values.values())


def test_an_empty_output_counts_nothing_and_has_no_moments() -> None:
    s = statistics(moments(torch.empty(0), EPS).numpy())

    assert s["count"] == 0
    assert np.isnan(s["mean"])


def test_one_value_has_no_spread() -> None:
    assert statistics(moments(torch.tensor([2.0]), EPS).numpy())["std"] == 0


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*[qQ]uantiz", "ignore:The PyTorch API of nested"
)
def test_odd_tensors_become_plain() -> None:
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)

    assert plain(sparse).tolist() == [2, 3]  # type: ignore[union-attr]
    assert plain(sparse.to_sparse_csr()).tolist() == [2, 3]  # type: ignore[union-attr]
    assert plain(nested).numel() == 5  # type: ignore[union-attr]
    assert plain(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)).tolist() == (  # type: ignore[union-attr]
        pytest.approx([1, 1, 1])
    )
    assert plain(torch.nn.Parameter(torch.ones(2))).requires_grad is False  # type: ignore[union-attr]


def test_tensors_without_values_are_passed_over() -> None:
    inside = []

    torch.func.vmap(lambda x: (inside.append(plain(x)), x)[1])(torch.ones(2, 3))

    assert plain(torch.empty(3, device="meta")) is None
    assert inside == [None]


def test_flat_copies_only_where_there_are_gaps() -> None:
    x = randn(2, 3, 4, 4)
    same = [x, x.to(memory_format=torch.channels_last), x.permute(3, 0, 2, 1), x[1]]

    for t in same:
        values, times = flat(t)
        assert values.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        assert (len(values), times) == (t.numel(), 1)
    assert len(flat(x[..., ::2])[0]) == x.numel() // 2


def test_nothing_is_written_into_the_tensor() -> None:
    for t in CASES.values():
        before, version = t.clone(), t._version

        fast(t)

        assert t._version == version
        assert torch.equal(before.nan_to_num(), t.nan_to_num())


def test_a_lazy_clone_is_read_without_making_it_a_copy() -> None:
    x = randn(3, 50_000)
    clone = torch._lazy_clone(x)

    check(fast(clone), reference(x))

    assert torch._C._is_cow_tensor(clone)


@pytest.mark.parametrize(
    "name", ["Inf", "squares overflow", "small numbers", "mean/std 1e4", "NaN"]
)
def test_numpys_error_state_is_the_users_own(name: str) -> None:
    tiny = torch.full((100,), 1e-30)
    with np.errstate(all="raise"):
        before = np.geterr()
        check(fast(CASES[name]), reference(CASES[name]))
        assert fast(tiny)["max"] == tiny[0].item()
        assert np.geterr() == before
