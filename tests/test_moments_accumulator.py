"""`StatsAccumulator`: rows of named tensors, bounded memory, resolution that halves exactly."""

import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from hookkit.moments import buffers, history, units
from hookkit.moments.accumulator import StatsAccumulator
from hookkit.moments.buffers import Options
from hookkit.moments.histograms import log_bins
from hookkit.moments.history import StepHistory
from hookkit.moments.moments import moments, statistics
from hookkit.moments.unit_layouts import layout_of
from hookkit.moments.units import UnitTables, blank_table

pytestmark = pytest.mark.usefixtures("reader")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`@pytest.mark.parametrize("columns", …)` bounds every history."""
    n = getattr(request, "param", 0)
    for name in ("MIN_COLUMNS", "MAX_COLUMNS") if n else ():
        monkeypatch.setattr(history, name, n)


eight_columns = pytest.mark.parametrize("columns", [8], indirect=True)


def filled(n: int, **options: object) -> tuple[StatsAccumulator, list[torch.Tensor]]:
    stats = StatsAccumulator("activation", Options(**options))  # type: ignore[arg-type]
    (row,) = stats.rows(["fc"], ["Linear"])
    data = [randn(50 + i, seed=i) + i for i in range(n)]
    for i, x in enumerate(data):
        stats.see(row, 0, "", x)
        stats.commit(i, i // 10, i)
    return stats, data


@eight_columns
@pytest.mark.parametrize("n", [5, 8, 9, 16, 17, 40, 63])
def test_a_full_history_merges_neighbours_exactly(n: int) -> None:
    stats, data = filled(n)

    record = stats.record()

    assert len(record) <= 8
    assert record.spans.sum() == n
    assert len(set(record.spans[:-1].tolist())) <= 1
    starts = [*record.steps.tolist(), n]
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        x = torch.cat(data[a:b]).double()
        assert record.value("mean", 0)[i] == pytest.approx(x.mean().item(), rel=1e-6)
        assert record.value("std", 0)[i] == pytest.approx(x.std().item(), rel=2e-6)
        assert record.value("count", 0)[i] == len(x)


@eight_columns
def test_histograms_merge_too() -> None:
    stats, data = filled(30, bins=log_bins(), sample=64)

    record = stats.record()

    assert record.hist is not None
    assert record.hist.sum() == sum(min(len(x), 64) for x in data)


def busy(seed: int) -> StatsAccumulator:
    """Steps as trainings have them: small and large, repeated, kept, dropped, looked at, halved."""
    draw = torch.Generator().manual_seed(seed)

    def chance(share: float) -> bool:
        return torch.rand((), generator=draw).item() < share

    stats = StatsAccumulator("activation", Options(bins=log_bins(), sample=64))
    for step in range(40):
        for batch in range(1 + chance(0.2)):
            if batch:
                stats.fold()
            for i in range(2 + step // 10):
                (row,) = stats.rows([f"layer{i}"], ["Linear"])
                for _ in range(1 + chance(0.1)):
                    x = torch.randn(100 * (i + 1), generator=draw)
                    stats.see(row, 0, "", x.half() if chance(0.1) else x * (x > 0))
                if chance(0.02):
                    stats.drop()
        stats.commit(step, 0, step)
        if chance(0.1):
            stats = pickle.loads(pickle.dumps(stats)) if chance(0.5) else stats
            stats.record()
    return stats


@eight_columns
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("slots", "values"), [(5, 1 << 20), (32, 900)])
def test_records_that_wait_are_written_as_those_that_do_not(
    seed: int, slots: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of(stats: StatsAccumulator) -> dict[str, object]:
        record = stats.record()
        return {**record.values, "hist": record.hist, "spans": record.spans}

    monkeypatch.setattr(buffers, "MOST_SLOTS", 1)
    want = all_of(busy(seed))
    monkeypatch.setattr(buffers, "MOST_SLOTS", slots)
    monkeypatch.setattr(buffers, "WAITING_VALUES", values)
    found = all_of(busy(seed))

    assert want.keys() == found.keys()
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


def test_records_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "WAITING_VALUES", 1000)
    stats = StatsAccumulator("activation", Options())
    rows = stats.rows([f"layer{i}" for i in range(30)], ["Linear"] * 30)

    most = 0
    for step in range(50):
        for row in rows:
            stats.see(row, 0, "", randn(99))
        stats.commit(step, 0, step)
        most = max(most, len(stats._state.waiting))

    assert most == 1000 // (30 * 9) - 1
    assert len(stats.record()) == 50


@pytest.mark.slow
def test_memory_stays_bounded_over_ten_thousand_steps() -> None:
    stats = StatsAccumulator("activation", Options(bins=log_bins(), sample=256))
    rows = stats.rows([f"layer{i}" for i in range(40)], ["Linear"] * 40)
    x = randn(8)

    sizes = []
    for step in range(10_000):
        if step % 500 == 0:
            for row in rows:
                stats.see(row, 0, "", x)
            sizes.append(stats.n_bytes)
        stats.commit(step, 0, step)

    assert max(sizes) <= 20e6
    assert stats.record().spans.sum() == 10_000


def test_what_is_kept_for_a_step_merges_into_its_record() -> None:
    stats = StatsAccumulator("activation", Options(bins=log_bins(), window=4))
    (row,) = stats.rows(["fc"], ["Linear"])
    a, b = randn(4, 8, seed=1), randn(4, 8, seed=2)

    stats.see(row, 0, "", a)
    stats.fold()
    stats.see(row, 0, "", torch.full((4, 8), 1e6))
    stats.drop()
    stats.see(row, 0, "", b)
    stats.commit(0, 0, 0)

    record, both = stats.record(), torch.cat([a, b]).double()
    assert record.value("count", 0).tolist() == [64]
    assert record.value("mean", 0)[0] == pytest.approx(both.mean().item(), rel=1e-6)
    assert record.hist is not None
    assert record.hist.sum() == 64


def test_a_row_seen_twice_in_a_batch_merges() -> None:
    stats = StatsAccumulator("activation", Options(bins=log_bins(), sample=16))
    (row,) = stats.rows(["relu"], ["ReLU"])

    stats.see(row, 0, "", randn(100))
    stats.see(row, 0, "", randn(10) + 50)
    stats.commit(0, 0, 0)

    record = stats.record()
    assert record.value("count", 0).tolist() == [110]
    assert record.hist is not None
    assert record.hist.sum() == 26


def test_exact_histograms_count_everything() -> None:
    stats, data = filled(3, bins=log_bins(), exact_hist=True, sample=8)

    hist = stats.record().hist

    assert hist is not None
    assert hist.sum(1)[0].tolist() == [len(x) for x in data]


def test_a_row_that_was_not_seen_is_nan() -> None:
    stats = StatsAccumulator("activation")
    seen, _ = stats.rows(["a", "b"], ["Linear", "Linear"])

    stats.see(seen, 0, "", randn(4))
    stats.commit(0, 0, 0)

    assert np.isnan(stats.record().value("mean", "b")).all()
    assert np.isnan(stats.record().value("count", "b")).all()


def test_rows_may_come_later() -> None:
    stats, _ = filled(3)
    (late,) = stats.rows(["late"], ["ReLU"])

    stats.see(late, 1, "[1]", torch.ones(3))
    stats.commit(3, 0, 3)

    assert stats.record().names == ("fc", "late", "late[1]")
    assert stats.record().value("mean", "late[1]")[-1] == 1


def test_it_continues_after_a_pickle() -> None:
    stats, _ = filled(5, bins=log_bins(), window=4)

    again = pickle.loads(pickle.dumps(stats))
    again.see(0, 0, "", randn(6))
    again.commit(5, 0, 5)

    assert len(again.record()) == 6
    for name, table in stats.record().values.items():
        np.testing.assert_array_equal(again.record().values[name][:, :5], table)


@pytest.mark.parametrize("columns", [4], indirect=True)
def test_the_history_keeps_an_even_resolution() -> None:
    past = StepHistory()

    for step in range(13):
        past = past.with_records([(step, 0, step)], {})

    assert (past.column(0), past.column(3)) == ([0, 4, 8, 12], [4, 4, 4, 1])


def test_it_says_in_which_dtype_each_row_came() -> None:
    stats = StatsAccumulator("activation")
    a, b, _ = stats.rows(["a", "b", "never"], ["Linear"] * 3)

    stats.see(a, 0, "", torch.ones(3, dtype=torch.float16))
    stats.see(b, 1, "[1]", torch.ones(3))
    stats.commit(0, 0, 0)
    record = stats.record()

    assert record.names == ("a", "b", "never", "b[1]")
    assert record.meta["dtype"] == ["torch.float16", "", "", "torch.float32"]
    assert not record.meta["unscaled"]


def test_it_says_when_it_has_undone_a_scale() -> None:
    stats = StatsAccumulator("gradient")
    (row,) = stats.rows(["a"], ["Linear"])
    stats.unscale = torch.tensor(0.5, dtype=torch.float64)

    stats.see(row, 0, "", torch.ones(3, dtype=torch.float16))
    stats.commit(0, 0, 0)
    record = stats.record()

    assert record.value("mean", "a")[0] == 0.5
    assert record.meta["unscaled"]
    assert record.meta["dtype"] == ["torch.float16"]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Linear", (300, 1000)),
        ("Linear", (3, 7001, 8)),
        ("Linear", (12,)),
        ("ReLU", (2, 3, 64, 20)),
        ("Conv2d", (5, 8, 7, 7)),
        ("Conv1d", (4, 6, 9)),
        ("Conv2d", (1, 2, 400, 400)),
    ],
)
def test_units_are_the_same_whole_and_in_parts(kind: str, shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    x[..., : shape[-1] // 4] = -1
    stats = StatsAccumulator("activation", Options(window=4))
    parts, whole = stats.rows(["in parts", "whole"], [kind, kind])

    stats.see(parts, 0, "", x)
    stats.see(whole, 0, "", x.double())  # float64 is taken by torch, all at once
    stats.commit(0, 0, 0)

    record, (tables,) = stats.record(), stats.units
    for a, b in zip(tables.now(parts) or (), tables.now(whole) or (), strict=True):
        assert torch.equal(a, b)
    start, n = tables.places[parts]
    own, other = tables.newer[:, start : start + n], tables.newer[:, start + n :]
    assert torch.equal(own[0] > 0, other[0] > 0)
    torch.testing.assert_close(own[1] / own[2], other[1] / other[2], rtol=0.6, atol=0)
    assert own[2].sum() >= min(x.numel(), 1 << 14)
    assert record.value("dead", 0)[0] == record.value("dead", 1)[0]
    assert record.value("count", 0)[0] == x.numel()


@pytest.mark.parametrize("n", [300, 9000, 1 << 14])
def test_records_that_wait_have_the_moments_of_the_reference(n: int) -> None:
    odd = {2: math.nan, 3: math.inf, 4: -math.inf}
    scales = {5: 1e-20, 6: 0.0, 7: 1e25, 8: 1e30}
    data = [scales.get(i, 1.0) * randn(n) + (1e4 if i == 9 else 0) for i in range(12)]
    for i, value in odd.items():
        data[i][7] = value
    data[10] = torch.full((n,), 0.3)
    data[11][:5] = torch.tensor([0.0, -0.0, 0.05, -0.05, 0.0501])
    stats = StatsAccumulator("activation", Options(bins=log_bins(), sample=64))
    (row,) = stats.rows(["fc"], ["Linear"])

    for i, x in enumerate(data):
        stats.see(row, 0, "", x)
        stats.commit(i, 0, i)

    assert len(stats._state.waiting) == 11  # the first one shows how large they are
    record = stats.record()
    want = statistics(torch.stack([moments(x, 0.05) for x in data]).numpy())
    for name, values in want.items():
        np.testing.assert_allclose(record.value(name, 0), values, rtol=2e-5, err_msg=name)
    assert record.hist is not None
    assert record.hist[0].sum(0)[0] == 64


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 6, 100])
@pytest.mark.parametrize("seed", range(6))
def test_units_of_records_that_wait_are_judged_alike(window: int, seed: int) -> None:
    """Beside float64 values, which are looked at when they come."""
    g, kinds = torch.Generator().manual_seed(seed), ["Linear", "Conv2d", "Tanh", "Conv1d"]
    random = lambda n: int(torch.randint(n, (1,), generator=g))  # noqa: E731
    waits, comes = (StatsAccumulator("activation", Options(window=window)) for _ in range(2))
    for step in range(70):
        for batch in range(1 + (random(5) == 0)):
            for row, kind in enumerate(kinds):
                for _ in range((1, 1, 1, 2, 0)[random(5)]):
                    width = 6 if row or step < 20 or random(9) else 3 + step % 4
                    shape = (2 + random(3), width, *(5 - i for i in range(row % 3)))
                    x = torch.randn(shape, generator=g)
                    x.transpose(0, -1 if row == 0 else 1)[:2] *= random(2) * 1e-3
                    for stats, t in ((waits, x.clone()), (comes, x.double())):
                        (name,) = stats.rows([str(row)], [kind])
                        stats.see(name, 0, "", t)
                        t.fill_(9)
            if batch or random(9) == 0:
                kept = random(2)
                for stats in (waits, comes):
                    (stats.fold if kept else stats.drop)()
        for stats in (waits, comes):
            stats.commit(step, 0, step)
        if random(15) == 0:
            waits.record()

    a, b = waits.record(), comes.record()
    for name in ("dead", "dormant", "saturated", "count"):
        np.testing.assert_allclose(a.value(name), b.value(name), rtol=1e-5, err_msg=name)


def test_an_interrupt_while_units_are_judged_loses_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats, calls = StatsAccumulator("activation", Options(window=8)), itertools.count()
    (row,) = stats.rows(["fc"], ["Linear"])
    real = UnitTables._shares

    def interrupted(*args: Any) -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(UnitTables, "_shares", interrupted)
    n_interrupts = 0
    for step in range(21):
        stats.see(row, 0, "", torch.tensor([[1.0, -1.0, 1.0 if step % 16 == 3 else -1.0]]))
        try:
            stats.commit(step, 0, step)
        except KeyboardInterrupt:
            n_interrupts += 1
            stats.commit(step, 0, step)

    assert n_interrupts == 1
    dead = stats.record().value("dead", 0) * 3
    want = [2 if s in (0, 1, 2, *range(8, 19)) else 1 for s in range(21)]
    assert np.rint(dead).tolist() == want


def test_a_layer_whose_width_changes_keeps_its_memory_bounded() -> None:
    stats = StatsAccumulator("activation", Options(window=4))
    (row,) = stats.rows(["fc"], ["Linear"])

    for step in range(300):
        stats.see(row, 0, "", randn(4, 100 + step % 7).abs())
        stats.commit(step, 0, step)

    (tables,) = stats.units
    assert tables.n_units < 3000
    assert (stats.record().value("dead", 0) == 0).all()


def one_layer(window: int, x: torch.Tensor) -> UnitTables:
    return UnitTables.blank(window, x.device).with_row(0, x.shape[-1], False)


def judge(tables: UnitTables, x: torch.Tensor, step: int) -> UnitTables:
    live = blank_table(tables.n_units, x.device)
    layout_of(x.shape, "Linear").add_array(live.numpy(), x.view(-1).numpy(), 1e3, step)
    return tables.record(live[None], step + 1, 1)[2]


def test_dead_is_exact_where_sizes_are_of_a_part() -> None:
    x = torch.zeros(5000, 256)
    x[:, :200] = randn(5000, 200)
    x[4999, 250] = 1.0  # fires once, at the very end
    x[:, 10:14] *= 0.001
    tables, dead = one_layer(8, x), []

    for step in range(8):
        tables = judge(tables, x if step == 0 else x.clamp(max=0), step)  # never again above zero
        dead.append([i for i, flag in enumerate((tables.now(0) or [torch.ones(0)])[0]) if flag])

    assert dead == 7 * [[*range(200, 250), *range(251, 256)]] + [[*range(256)]]


def test_dormant_is_judged_by_parts_of_a_large_tensor_one_after_another() -> None:
    x = randn(5000, 256)
    x[:, 10:14] *= 0.001
    x[::5] *= 100  # a part alone would mislead about sizes, not about shares
    tables, n = one_layer(90, x), []

    for step in range(40):
        tables = judge(tables, x, step)
        _, _, dormant, _ = tables.now(0) or (0, 0, torch.ones(0), 0)
        assert dormant.nonzero().flatten().tolist() == [*range(10, 14)], step
        n.append(int(tables.newer[2, 0]))

    size = tables.newer[1] / tables.newer[2]
    torch.testing.assert_close(size, x.abs().mean(0), rtol=1e-4, atol=0)
    assert n[0] < 1000
    assert n[39] == 5000  # by then all of it was read, once


def test_it_counts_units_on_after_a_pickle() -> None:
    stats = StatsAccumulator("activation", Options(window=4))
    (row,) = stats.rows(["fc"], ["Linear"])
    stats.see(row, 0, "", randn(4, 8))
    stats.commit(0, 0, 0)

    again = pickle.loads(pickle.dumps(stats))
    again.see(row, 0, "", -randn(4, 8).abs())
    again.commit(1, 0, 1)

    assert len(again.record().value("dead", "fc")) == 2


def reference_shares(data: list[list[torch.Tensor | None]], window: int) -> np.ndarray:
    """(records, rows, 6) by definition, from all values that units (dimension 1) have given."""
    half, found = max(window // 2, 1), []
    for step, layers in enumerate(data):
        first = max(step // half - 1, 0) * half
        for row, x in enumerate(layers):
            past = [r[row] for r in data[first : step + 1] if r[row] is not None]
            if x is None:
                found.append([0.0] * 6)
                continue
            seen = torch.cat([p.transpose(0, 1).flatten(1) for p in past], 1).double()
            size, low = seen.abs().mean(1), (seen <= 0).all(1)
            none = torch.zeros(len(seen))
            full = (seen.abs() > 0.97).double().mean(1) > 0.5 if row == 2 else none
            flags = [low, (seen == 0).all(1), size <= units.TAU * size.mean(), full]
            shares = [flag.double().mean().item() for flag in flags]
            found.append([*shares, 1.0, float(row == 2)])
    return np.array(found).reshape(len(data), -1, 6)


@pytest.mark.parametrize("window", [2, 6, 50])
def test_units_are_judged_by_definition(window: int) -> None:
    kinds, data = ["Linear", "Conv2d", "Tanh"], []
    stats, g = StatsAccumulator("activation", Options(window=window)), torch.Generator()
    rows = stats.rows(kinds, kinds)

    for step in range(40):
        layers: list[torch.Tensor | None] = []
        for row in rows:
            x = torch.randn(5, 8, *(3, 3)[: 2 * (row == 1)], generator=g)
            x[:, :2] = -x[:, :2].abs() if step % 20 > 5 else x[:, :2] * 0.001
            x[:, 2] *= step % 15 < 3
            layers.append(None if (step + row) % 4 == 3 else 3 * x)
            if layers[-1] is not None:
                stats.see(row, 0, "", layers[-1])
        data.append(layers)
        stats.commit(step, 0, step)

    want, got = reference_shares(data, window), stats.history.read(("units", torch.device("cpu")))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert window > 6 or want[..., :4].sum((0, 1)).min() > 0
