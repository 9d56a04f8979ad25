"""Statistics of rows, as of all rows at once, however they come and merge."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit import Covariance, Mean, TopK, collect

G = torch.Generator().manual_seed(0)
ROWS = torch.randn(50, 3, 4, generator=G) * 0.01 + 1000  # where naive sums of squares fail
IDS = torch.randperm(50, generator=G)
SIZES = [7, 0, 1, 20, 22]


def fed(blank: Any, rows: Tensor = ROWS, ids: Tensor = IDS) -> tuple[Any, Any]:
    """One that has seen all parts, and one that was merged of two, with an empty one."""
    one, parts = copy.deepcopy(blank), [copy.deepcopy(blank) for _ in range(3)]
    for i, (r, n) in enumerate(zip(rows.split(SIZES), ids.split(SIZES), strict=True)):
        one.update(r, n)
        parts[i // 3].update(r, n)
    empty = copy.deepcopy(blank)
    for part in parts:
        empty.merge(part)
    return one, empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_the_mean_is_that_of_all_rows(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)

    for found in fed(Mean(), rows):
        torch.testing.assert_close(found.mean, rows.double().mean(0), rtol=1e-14, atol=0)
        assert (found.n, repr(found)) == (50, "Mean(50 rows)")


COMPLEX = torch.complex(torch.randn(50, 3, generator=G), torch.randn(50, 3, generator=G) + 9)
TABLES = {
    "far from zero": ROWS,
    "complex": COMPLEX,
    "a first batch far from the others": torch.cat([torch.zeros(7, 3, 4), ROWS[7:]]),
    "scalars": ROWS[:, 0, 0],
    "a view that is not contiguous": ROWS.transpose(1, 2),  # as a batch_first LSTM gives them
}


@pytest.mark.parametrize("name", TABLES)
def test_the_covariance_is_torchs(name: str) -> None:
    rows = TABLES[name]
    wide = rows.to(torch.complex128 if rows.is_complex() else torch.float64)
    wanted = torch.cov(wide.flatten(1).T if wide.ndim > 1 else wide)
    atol = 1e-9 * float(wanted.abs().max())

    for found in fed(Covariance(), rows):
        torch.testing.assert_close(found.cov, wanted.view_as(found.cov), rtol=1e-9, atol=atol)
        torch.testing.assert_close(found.mean, wide.mean(0), rtol=1e-14, atol=1e-12)


def test_without_two_rows_there_is_no_covariance() -> None:
    one, none = Covariance(), Covariance()
    one.update(ROWS[:1], IDS[:1])

    assert one.cov is none.cov is None
    assert (none.mean, repr(none)) == (None, "Covariance(0 rows)")


@pytest.mark.parametrize("k", [1, 5, 80])
@pytest.mark.parametrize("tokens", [False, True])
def test_the_greatest_values_of_each_unit_and_their_rows(k: int, tokens: bool) -> None:
    ids = torch.stack([IDS // 5, IDS % 5], 1) if tokens else IDS
    rows = torch.rand(600, generator=G).argsort().view(50, 3, 4).float()  # no two are equal
    values, at = rows.topk(min(k, 50), dim=0)

    for found in fed(TopK(k), rows, ids):
        assert torch.equal(found.values, values)
        assert torch.equal(found.ids, ids[at])
        assert repr(found) == f"TopK({k})"


@pytest.mark.parametrize("blank", [Mean(), Covariance(), TopK(2)])
def test_rows_of_two_sizes_are_not_broadcast(blank: Any) -> None:
    other = copy.deepcopy(blank)
    blank.update(ROWS[:5, 0], IDS[:5])
    other.update(ROWS[:5, 0, :1], IDS[:5])

    with pytest.raises(RuntimeError):
        blank.merge(other)
    with pytest.raises(RuntimeError):
        blank.update(ROWS[:5, 0, :1], IDS[:5])


class Rows:
    """An accumulator of one's own, which holds on to what it is given."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.ids: list[int] = []

    def update(self, rows: Tensor, ids: Tensor) -> None:
        self.rows.append(rows)
        self.ids += ids.tolist()

    def merge(self, other: Any) -> None:
        self.rows += other.rows


def test_layers_are_accumulated_without_a_file(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
    x, blank = torch.randn(11, 4, generator=G), Mean()

    means = collect(model, x.split(4), ["0", "1"], accumulate=blank)
    rows = collect(model, x.split(4), "0", accumulate=Rows(), max_rows=6)["0"]

    torch.testing.assert_close(means["0"].mean, model[0](x).double().mean(0).detach())
    torch.testing.assert_close(means["1"].mean, model(x).double().mean(0).detach())
    assert blank.n == 0
    assert rows.ids == [0, 1, 2, 3, 4, 5]
    # the ReLU writes into the output of the layer before it
    torch.testing.assert_close(torch.cat(rows.rows), model[0](x[:6]).detach())
    assert list(tmp_path.iterdir()) == []
