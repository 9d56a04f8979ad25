"""A StepTable: exact merging, bounded memory, whole after copies."""

import copy
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hookkit.recorders import step_table
from hookkit.recorders.moments import array_row
from hookkit.recorders.running_stats import RunningStats
from hookkit.recorders.step_table import MOMENTS, StepTable, sums


def filled(values: Any) -> StepTable:
    """A table of one row: the moments and the sum of each element of `values`."""
    table = StepTable(moments=MOMENTS, total=sums(1))
    for step, x in enumerate(values):
        numbers = {"moments": np.array([array_row(x, 0.05)]), "total": np.array([[x.sum()]])}
        table.later((step, step // 10, step), lambda numbers=numbers: numbers)
    return table


@pytest.mark.parametrize("most", [2, 3, 5, 64, 1000])
@pytest.mark.parametrize("n", [0, 1, 2, 9, 64, 65, 257])
def test_columns_are_the_merged_steps_whatever_the_room(
    n: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).normal(3, 1, (n, 6))
    monkeypatch.setattr(step_table, "LIMIT", most * (32 + 80))

    table = filled(values)

    steps, epochs, _, spans = table.places().T
    assert len(table) == len(steps) <= most
    assert spans.sum() == n
    assert set(spans[:-1]) <= {table.stride}
    assert steps.tolist() == (np.cumsum(spans) - spans).tolist()
    assert epochs.tolist() == (steps // 10).tolist()
    parts = [values[i : i + k] for i, k in zip(steps, spans, strict=True)]
    want = [array_row(part.ravel(), 0.05) for part in parts]
    rows = table.read("moments", rows=1)[:, 0]
    np.testing.assert_allclose(rows[:, 1:], np.array(want).reshape(-1, 9)[:, 1:], rtol=1e-9)
    assert rows[:, 0].tolist() == spans.tolist()  # calls
    np.testing.assert_allclose(table.read("total", rows=1).ravel(), [part.sum() for part in parts])


def test_memory_is_bounded_for_two_small_layers_and_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_table, "LIMIT", 2**18)
    stats, x = RunningStats("activation"), torch.ones(2)
    rows = [stats.row(f"fc{i}", "Linear") for i in range(2)]

    def train(n: int) -> None:
        for _ in range(n):
            for row in rows:
                stats.update(row, 0, "", x)
            stats.end_step(stats.table.n_steps, 0, stats.table.n_steps)

    train(2000)
    tracemalloc.start()
    try:
        train(10_000)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept <= 1.2 * 2**18  # arrays of 256 KiB, whatever the number of columns
    assert most <= 2.5 * 2**18
    assert len(stats.table) > 2**18 / (2 * 72 + 32) / 2


def test_rows_that_come_late_leave_memory_bounded_and_the_past_blank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_table, "LIMIT", 64 * (32 + 8))
    table = StepTable(total=sums(1))
    for step in range(60):
        table.later((step, 0, step), lambda: {"total": np.ones((1, 1))})
    for step in range(60, 64):
        table.later((step, 0, step), lambda: {"total": np.ones((30, 1))})

    total = table.read("total", 31)

    assert total.shape[1:] == (31, 1)
    assert len(total) <= 64 * 40 // (32 + 240)
    assert total[..., 0].sum(0).tolist() == [64] + [4] * 29 + [0]
    assert len(table._places) * (32 + 240) <= 64 * 40


def test_while_it_trains_only_steps_are_read_that_others_have_followed() -> None:
    table, read = StepTable(total=sums(1)), dict[int, int]()

    def numbers(step: int) -> Any:
        read[step] = table.n_steps - 1 - step
        return {"total": np.ones((1, 1))}

    for step in range(100):
        table.later((step, 0, step), partial(numbers, step))

    assert len(read) > 80
    assert min(read.values()) >= 8  # the host would wait for the device in a newer one
    assert max(read.values()) < 16


def test_what_is_read_is_a_copy_and_copies_go_on_by_themselves() -> None:
    table = filled(np.ones((9, 3)))
    again = copy.deepcopy(table)

    table.read("total")[:] = 7
    table.later((9, 0, 9), lambda: {name: field.blanks(1) for name, field in table.fields.items()})

    assert again.read("total").ravel().tolist() == [3.0] * 9
    assert table.read("total", first=8).ravel().tolist() == [3.0, 0.0]
    assert [table.since(step) for step in (-1, 0, 8, 9, 20)] == [0, 1, 9, 9, 9]
    assert StepTable(total=sums(1)).since(3) == 0
    assert (len(table), len(again)) == (10, 9)
