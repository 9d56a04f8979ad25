"""Records are plain values: built by hand, pickled, read by index or name."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hookkit.errors import ArgumentError, SelectionError
from hookkit.records import Incident, Record, Run, as_run


def record(n: int = 3, names: tuple[str, ...] = ("conv1", "fc")) -> Record:
    steps = np.arange(n) * 2
    values = {"mean": np.arange(len(names) * n, dtype=np.float64).reshape(len(names), n)}
    types = ("Conv2d", "Linear")[: len(names)]
    return Record("activation", names, types, steps, steps * 0, steps, np.ones(n, np.int64), values)


def test_a_value_is_a_row_or_the_table_and_a_layer_an_index_or_a_name() -> None:
    assert len(record(4)) == 4
    assert record().value("mean").shape == (2, 3)
    for layer in (1, -1, "fc"):
        assert record().layer(layer) == 1
        assert record().value("mean", layer).tolist() == [3, 4, 5]
    assert repr(record()) == "Record(activation: 2 layers × 3 records, steps 0–4, mean)"


def test_a_layer_or_statistic_that_was_not_recorded_gets_its_cure() -> None:
    with pytest.raises(SelectionError, match=r"nothing has been recorded yet. Train first"):
        record(names=()).layer("fc")
    with pytest.raises(SelectionError, match='no recorded layer is called "fd"'):
        record().layer("fd")
    with pytest.raises(SelectionError, match="Use an index from -2 to 1"):
        record().layer(2)
    for statistic, cure in {"dead": "units=True", "lr": "ParamStats", "x": "one of these"}.items():
        with pytest.raises(SelectionError, match=f'was not recorded; "mean" were.*{cure}'):
            record().value(statistic)


SHAPE = r".* has the shape .*\. Give it the shape"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"types": ("Linear",)}, f"types{SHAPE}"),
        ({"epochs": np.zeros(2, np.int64)}, f"epochs{SHAPE}"),
        ({"values": {"mean": np.zeros((3, 3))}}, f"values{SHAPE}"),
        ({"hist": np.zeros((2, 4, 3), np.int64), "edges": np.zeros(4)}, f"hist{SHAPE}"),
        ({"kind": "activations"}, "Use 'activation', 'gradient', 'param'"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(record(), **changes)


def test_records_and_runs_are_equal_if_every_value_is() -> None:
    values = {"mean": np.array([[np.nan, 1.0, 2.0], [0.0, 0.0, 0.0]])}
    one = replace(record(), values=values)
    run = Run(one, losses=np.array([np.nan]), incidents=(Incident("loss", "", steps=np.ones(2)),))

    assert one == pickle.loads(pickle.dumps(one))
    assert run == pickle.loads(pickle.dumps(run))
    assert one != record()
    assert run != replace(run, losses=np.zeros(1))
    assert run != replace(run, incidents=(Incident("loss", "", steps=np.zeros(2)),))
    assert run != one
    assert one in [record(), one]


def test_records_are_a_run_if_there_is_one_of_a_kind() -> None:
    both = [record(), replace(record(), kind="param")]

    assert as_run(both) == Run(both[0], params=both[1])
    for odd in ([record(), record()], [], [1], "run.npz"):
        with pytest.raises(ArgumentError, match=r"holds no records.*is read by Run\.load"):
            as_run(odd)


def test_steps_are_those_of_the_losses_or_the_records() -> None:
    assert Run().n_steps == 0
    assert Run(record()).n_steps == 5
    assert Run(record(), losses=np.ones(9)).n_steps == 9
    assert Run(grad_norms=np.ones(7)).n_steps == 7
    assert repr(Run(record(), losses=np.ones(7))) == "Run(7 steps; 2 activations)"


def test_arrays_cannot_be_written_to_and_those_they_were_made_of_can() -> None:
    means = np.ones((1, 2))
    axes: Any = [np.arange(2)] * 3
    made = Record("activation", ("fc",), ("Linear",), *axes, np.ones(2, np.int64), {"mean": means})
    run = Run(made, losses=np.ones(2), incidents=(Incident("loss", "", history={"a": means}),))

    handed = [made.steps, made.value("mean"), made.value("mean", "fc"), run.losses]
    for array in (*handed, run.incidents[0].steps, run.incidents[0].history["a"]):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7
    means[:] = 2
    copy = made.value("mean").copy()
    copy[:] = 3
    assert (made.value("mean") == 2).all()
