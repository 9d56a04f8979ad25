"""A tally: rows of named tensors, memory that stays bounded, resolution that halves exactly."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from hookkit.moments import waiting
from hookkit.moments.accumulator import Tally
from hookkit.moments.banks import Options
from hookkit.moments.histograms import log_bins
from hookkit.moments.history import Axis
from hookkit.moments.moments import moments, statistics
from hookkit.moments.unitarrays import UnitsByArrays
from hookkit.moments.units import Units

pytestmark = pytest.mark.usefixtures("reader")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(n: int, limit: int = 8, **options: object) -> tuple[Tally, list[torch.Tensor]]:
    tally = Tally("activation", Options(**options))  # type: ignore[arg-type]
    (row,) = tally.rows(["fc"], ["Linear"])
    data = [randn(50 + i, seed=i) + i for i in range(n)]
    for i, x in enumerate(data):
        tally.see(row, 0, "", x)
        tally.commit(i, i // 10, i)
        tally.axis.limit = limit
    return tally, data


@pytest.mark.parametrize("n", [5, 8, 9, 16, 17, 40, 63])
def test_a_full_ring_merges_neighbours_exactly(n: int) -> None:
    tally, data = filled(n)

    record = tally.record()

    assert len(record) <= 8
    assert record.spans.sum() == n
    assert len(set(record.spans[:-1].tolist())) <= 1
    starts = [*record.steps.tolist(), n]
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        x = torch.cat(data[a:b]).double()
        assert record.value("mean", 0)[i] == pytest.approx(x.mean().item(), rel=1e-6)
        assert record.value("std", 0)[i] == pytest.approx(x.std().item(), rel=2e-6)
        assert record.value("count", 0)[i] == len(x)


def test_histograms_merge_too() -> None:
    tally, data = filled(30, bins=log_bins(), sample=64)

    record = tally.record()

    assert record.hist is not None
    assert record.hist.sum() == sum(min(len(x), 64) for x in data)


def busy(seed: int) -> Tally:
    """Steps as trainings have them: small and large, repeated, kept, dropped, looked at, halved."""
    draw = torch.Generator().manual_seed(seed)

    def chance(share: float) -> bool:
        return torch.rand((), generator=draw).item() < share

    tally = Tally("activation", Options(bins=log_bins(), sample=64))
    tally.axis.limit = 8
    for step in range(40):
        for batch in range(1 + chance(0.2)):
            if batch:
                tally.fold()
            for i in range(2 + step // 10):
                (row,) = tally.rows([f"layer{i}"], ["Linear"])
                for _ in range(1 + chance(0.1)):
                    x = torch.randn(100 * (i + 1), generator=draw)
                    tally.see(row, 0, "", x.half() if chance(0.1) else x * (x > 0))
                if chance(0.02):
                    tally.drop()
        tally.commit(step, 0, step)
        tally.axis.limit = 8
        if chance(0.1):
            tally = pickle.loads(pickle.dumps(tally)) if chance(0.5) else tally
            tally.record()
    return tally


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("small", "late", "values"), [(400, 5, 1 << 20), (1 << 14, 32, 900)])
def test_what_waits_is_recorded_as_what_does_not(
    seed: int, small: int, late: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of(tally: Tally) -> dict[str, object]:
        record = tally.record()
        return {**record.values, "hist": record.hist, "spans": record.spans}

    monkeypatch.setattr(waiting, "SMALL", -1)
    monkeypatch.setattr(waiting, "MOST_LATE", 1)
    want = all_of(busy(seed))
    monkeypatch.setattr(waiting, "SMALL", small)
    monkeypatch.setattr(waiting, "MOST_LATE", late)
    monkeypatch.setattr(waiting, "LATE_VALUES", values)
    found = all_of(busy(seed))

    assert want.keys() == found.keys()
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LATE_VALUES", 1000)
    tally = Tally("activation", Options())
    rows = tally.rows([f"layer{i}" for i in range(30)], ["Linear"] * 30)

    for step in range(50):
        for row in rows:
            tally.see(row, 0, "", randn(99))
            (bank,) = tally.banks.values()
            assert bank.n_unread <= 1000
            assert bank.n_late <= 2000
        tally.commit(step, 0, step)

    assert len(tally.record()) == 50


def test_memory_stays_bounded_over_ten_thousand_steps() -> None:
    tally = Tally("activation", Options(bins=log_bins(), sample=256))
    rows = tally.rows([f"layer{i}" for i in range(40)], ["Linear"] * 40)
    x = randn(8)

    sizes = []
    for step in range(10_000):
        if step % 500 == 0:
            for row in rows:
                tally.see(row, 0, "", x)
            sizes.append(tally.n_bytes)
        tally.commit(step, 0, step)

    assert max(sizes) <= 20e6
    assert tally.record().spans.sum() == 10_000


def test_what_is_kept_for_a_step_merges_into_its_record() -> None:
    tally = Tally("activation", Options(bins=log_bins(), window=4))
    (row,) = tally.rows(["fc"], ["Linear"])
    a, b = randn(4, 8, seed=1), randn(4, 8, seed=2)

    tally.see(row, 0, "", a)
    tally.fold()
    tally.see(row, 0, "", torch.full((4, 8), 1e6))
    tally.drop()
    tally.see(row, 0, "", b)
    tally.commit(0, 0, 0)

    record, both = tally.record(), torch.cat([a, b]).double()
    assert record.value("count", 0).tolist() == [64]
    assert record.value("mean", 0)[0] == pytest.approx(both.mean().item(), rel=1e-6)
    assert record.hist is not None
    assert record.hist.sum() == 64


def test_a_row_seen_twice_in_a_batch_merges() -> None:
    tally = Tally("activation", Options(bins=log_bins(), sample=16))
    (row,) = tally.rows(["relu"], ["ReLU"])

    tally.see(row, 0, "", randn(100))
    tally.see(row, 0, "", randn(10) + 50)
    tally.commit(0, 0, 0)

    record = tally.record()
    assert record.value("count", 0).tolist() == [110]
    assert record.hist is not None
    assert record.hist.sum() == 26


def test_exact_histograms_count_everything() -> None:
    tally, data = filled(3, bins=log_bins(), exact_hist=True, sample=8)

    hist = tally.record().hist

    assert hist is not None
    assert hist.sum(1)[0].tolist() == [len(x) for x in data]


def test_a_row_that_was_not_seen_is_nan() -> None:
    tally = Tally("activation")
    seen, _ = tally.rows(["a", "b"], ["Linear", "Linear"])

    tally.see(seen, 0, "", randn(4))
    tally.commit(0, 0, 0)

    assert np.isnan(tally.record().value("mean", "b")).all()
    assert np.isnan(tally.record().value("count", "b")).all()


def test_rows_may_come_later() -> None:
    tally, _ = filled(3)
    (late,) = tally.rows(["late"], ["ReLU"])

    tally.see(late, 1, "[1]", torch.ones(3))
    tally.commit(3, 0, 3)

    assert tally.record().names == ("fc", "late", "late[1]")
    assert tally.record().value("mean", "late[1]")[-1] == 1


def test_it_continues_after_a_pickle() -> None:
    tally, _ = filled(5, bins=log_bins(), window=4)

    again = pickle.loads(pickle.dumps(tally))
    again.see(0, 0, "", randn(6))
    again.commit(5, 0, 5)

    assert len(again.record()) == 6
    for name, table in tally.record().values.items():
        np.testing.assert_array_equal(again.record().values[name][:, :5], table)


def test_the_axis_keeps_an_even_resolution() -> None:
    axis = Axis(limit=4)

    for step in range(13):
        while axis.full:
            axis.halve()
        axis.add(step, 0, step)

    assert (axis.steps, axis.spans) == ([0, 4, 8, 12], [4, 4, 4, 1])


def test_it_says_in_which_dtype_each_row_came() -> None:
    tally = Tally("activation")
    a, b, _ = tally.rows(["a", "b", "never"], ["Linear"] * 3)

    tally.see(a, 0, "", torch.ones(3, dtype=torch.float16))
    tally.see(b, 1, "[1]", torch.ones(3))
    tally.commit(0, 0, 0)
    record = tally.record()

    assert record.names == ("a", "b", "never", "b[1]")
    assert record.meta["dtype"] == ["torch.float16", "", "", "torch.float32"]
    assert not record.meta["unscaled"]


def test_it_says_when_it_has_undone_a_scale() -> None:
    tally = Tally("gradient")
    (row,) = tally.rows(["a"], ["Linear"])
    tally.unscale = torch.tensor(0.5, dtype=torch.float64)

    tally.see(row, 0, "", torch.ones(3, dtype=torch.float16))
    tally.commit(0, 0, 0)
    record = tally.record()

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
    tally = Tally("activation", Options(window=4))
    parts, whole = tally.rows(["in parts", "whole"], [kind, kind])

    tally.see(parts, 0, "", x)
    tally.see(whole, 0, "", x.double())  # float64 is taken by torch, all at once
    tally.commit(0, 0, 0)

    record, units = tally.record(), next(iter(tally.banks.values())).units
    assert units is not None
    for a, b in zip(units.now(parts), units.now(whole), strict=True):  # type: ignore[arg-type]
        assert torch.equal(a, b)
    start, n = units.places[parts]
    mine, other = units.newer[:, start : start + n], units.newer[:, start + n :]
    assert torch.equal(mine[0] > 0, other[0] > 0)
    torch.testing.assert_close(mine[1] / mine[2], other[1] / other[2], rtol=0.6, atol=0)
    assert mine[2].sum() >= min(x.numel(), 1 << 14)
    assert record.value("dead", 0)[0] == record.value("dead", 1)[0]
    assert record.value("count", 0)[0] == x.numel()


@pytest.mark.parametrize("n", [300, 9000, 1 << 14])
def test_small_tensors_of_many_records_are_read_at_once_and_rightly(n: int) -> None:
    odd = {2: math.nan, 3: math.inf, 4: -math.inf}
    scales = {5: 1e-20, 6: 0.0, 7: 1e25, 8: 1e30}
    data = [scales.get(i, 1.0) * randn(n) + (1e4 if i == 9 else 0) for i in range(12)]
    for i, value in odd.items():
        data[i][7] = value
    data[10] = torch.full((n,), 0.3)
    data[11][:5] = torch.tensor([0.0, -0.0, 0.05, -0.05, 0.0501])
    tally = Tally("activation", Options(bins=log_bins(), sample=64))
    (row,) = tally.rows(["fc"], ["Linear"])

    for i, x in enumerate(data):
        tally.see(row, 0, "", x)
        tally.commit(i, 0, i)

    (bank,) = tally.banks.values()
    assert len(bank.late) == 12
    record = tally.record()
    want = statistics(torch.stack([moments(x, 0.05) for x in data]).numpy())
    for name, values in want.items():
        np.testing.assert_allclose(record.value(name, 0), values, rtol=2e-5, err_msg=name)
    assert record.hist is not None
    assert record.hist[0].sum(0)[0] == 64


def take(units: UnitsByArrays, x: torch.Tensor, kind: str) -> None:
    plan = units.plan(0, x.shape, kind) or units.planned(0, x.shape, kind)
    units.take_array(0, x.view(-1).numpy(), plan, 1e3)


@pytest.mark.parametrize("window", [2, 6, 100])
@pytest.mark.parametrize("seed", range(6))
def test_units_of_small_tensors_wait_and_are_judged_alike(window: int, seed: int) -> None:
    """Beside float64 values, which are looked at when they come."""
    g, kinds = torch.Generator().manual_seed(seed), ["Linear", "Conv2d", "Tanh", "Conv1d"]
    random = lambda n: int(torch.randint(n, (1,), generator=g))  # noqa: E731
    waits, comes = (Tally("activation", Options(window=window)) for _ in range(2))
    for step in range(70):
        for batch in range(1 + (random(5) == 0)):
            for row, kind in enumerate(kinds):
                for _ in range((1, 1, 1, 2, 0)[random(5)]):
                    width = 6 if row or step < 20 or random(9) else 3 + step % 4
                    shape = (2 + random(3), width, *(5 - i for i in range(row % 3)))
                    x = torch.randn(shape, generator=g)
                    x.transpose(0, -1 if row == 0 else 1)[:2] *= random(2) * 1e-3
                    for tally, t in ((waits, x.clone()), (comes, x.double())):
                        (name,) = tally.rows([str(row)], [kind])
                        tally.see(name, 0, "", t)
                        t.fill_(9)
            if batch or random(9) == 0:
                kept = random(2)
                for tally in (waits, comes):
                    (tally.fold if kept else tally.drop)()
        for tally in (waits, comes):
            tally.commit(step, 0, step)
        if random(15) == 0:
            waits.record()

    a, b = waits.record(), comes.record()
    for name in ("dead", "dormant", "saturated", "count"):
        np.testing.assert_allclose(a.value(name), b.value(name), rtol=1e-5, err_msg=name)


def test_an_interrupt_while_units_are_judged_loses_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally, calls = Tally("activation", Options(window=8)), itertools.count()
    (row,) = tally.rows(["fc"], ["Linear"])
    real = UnitsByArrays._judged

    def interrupted(self: UnitsByArrays, tables: object) -> object:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(self, tables)

    monkeypatch.setattr(UnitsByArrays, "_judged", interrupted)
    n_interrupts = 0
    for step in range(21):
        tally.see(row, 0, "", torch.tensor([[1.0, -1.0, 1.0 if step % 16 == 3 else -1.0]]))
        try:
            tally.commit(step, 0, step)
        except KeyboardInterrupt:
            n_interrupts += 1

    assert n_interrupts == 1
    dead = tally.record().value("dead", 0) * 3
    want = [2 if s in (0, 1, 2, *range(8, 19)) else 1 for s in range(21)]
    assert np.rint(dead).tolist() == want


def test_a_layer_whose_width_changes_keeps_its_memory_bounded() -> None:
    tally = Tally("activation", Options(window=4))
    (row,) = tally.rows(["fc"], ["Linear"])

    for step in range(300):
        tally.see(row, 0, "", randn(4, 100 + step % 7).abs())
        tally.commit(step, 0, step)

    (bank,) = tally.banks.values()
    tally.record()
    assert bank.units is not None
    assert bank.units.live.shape[1] < 3000
    assert (tally.record().value("dead", 0) == 0).all()


def test_dead_is_exact_where_sizes_are_of_a_part() -> None:
    x = torch.zeros(5000, 256)
    x[:, :200] = randn(5000, 200)
    x[4999, 250] = 1.0  # fires once, at the very end
    x[:, 10:14] *= 0.001
    units, dead = UnitsByArrays(window=8), []

    for step in range(8):
        now = x if step == 0 else x.clamp(max=0)  # never again above zero
        take(units, now, "Linear")
        units.commit(step, 1, 64)
        dead.append([i for i, flag in enumerate((units.now(0) or [torch.ones(0)])[0]) if flag])

    assert dead == 7 * [[*range(200, 250), *range(251, 256)]] + [[*range(256)]]


def test_dormant_is_judged_by_parts_of_a_large_tensor_in_turn() -> None:
    x = randn(5000, 256)
    x[:, 10:14] *= 0.001
    x[::5] *= 100  # a part alone would mislead about sizes, not about shares
    units, n = UnitsByArrays(window=90), []

    for step in range(40):
        take(units, x, "Linear")
        units.commit(step, 1, 64)
        _, dormant, _ = units.now(0) or (0, torch.ones(0), 0)
        assert dormant.nonzero().flatten().tolist() == [*range(10, 14)], step
        n.append(int(units.newer[2, 0]))

    size = units.newer[1] / units.newer[2]
    torch.testing.assert_close(size, x.abs().mean(0), rtol=1e-4, atol=0)
    assert n[0] < 1000
    assert n[39] == 5000  # by then all of it was read, once


def test_it_counts_units_on_after_a_pickle() -> None:
    tally = Tally("activation", Options(window=4))
    (row,) = tally.rows(["fc"], ["Linear"])
    tally.see(row, 0, "", randn(4, 8))
    tally.commit(0, 0, 0)

    again = pickle.loads(pickle.dumps(tally))
    again.see(row, 0, "", -randn(4, 8).abs())
    again.commit(1, 0, 1)

    assert len(again.record().value("dead", "fc")) == 2


def test_an_interrupt_while_what_waits_is_read_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tally, data = filled(20, limit=64, bins=log_bins(), sample=64)
    (bank,) = tally.banks.values()
    assert len(bank.late) == 20
    real, calls = waiting.cpu_row, itertools.count()

    def interrupted(*args: object) -> object:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(waiting, "cpu_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tally.record()
    record = tally.record()

    assert record.value("count", 0).tolist() == [len(x) for x in data]
    np.testing.assert_allclose(
        record.value("mean", 0), [x.double().mean().item() for x in data], rtol=1e-5
    )


def test_units_by_arrays_judge_as_units_do() -> None:
    kinds, cpu = ["Linear", "Conv2d", "Tanh"], torch.device("cpu")
    slow, fast = Units(6, cpu), UnitsByArrays(6)
    g = torch.Generator().manual_seed(0)
    for step in range(20):
        for row, kind in enumerate(kinds):
            if (step + row) % 4 == 3:
                continue  # did not run
            width = 12 if row == 0 and step > 12 else 8  # a layer that was exchanged
            x = torch.randn(5, width, 3, 3, generator=g) if row == 1 else torch.randn(5, width)
            x[:, :2] = -x[:, :2].abs() if step > 5 else x[:, :2] * 0.001
            x[0, 0] = math.nan if step == 9 else x[0, 0]
            for units in (slow, fast):
                units.take(row, 3 * x, kind)
        for units in (slow, fast):
            if step == 4:
                units.drop()
            if step == 6:
                units.fold(1)
                units.take(0, torch.ones(2, 8), "Linear")
            units.commit(step, 3, 64)

    torch.testing.assert_close(fast.read(20, 3), slow.read(20, 3))
    assert slow.read(20, 3)[..., :4].sum() > 1
    for a, b in zip(fast.now(0) or (), slow.now(0) or (), strict=True):
        assert torch.equal(a, b)
    again = pickle.loads(pickle.dumps(fast))
    again.commit(20, 3, 64)
    assert again.read(21, 3)[:20].equal(fast.read(20, 3))
