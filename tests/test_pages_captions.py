"""Captions are true of their pictures, and say of many layers what no axis can."""

from dataclasses import replace
from types import SimpleNamespace

import made
import numpy as np
import pytest

from hookkit.records import Run

captions = pytest.importorskip("hookkit.pages.captions")


def test_numbers_in_the_heat_maps_are_spoken_of_only_where_a_finding_names_layers() -> None:
    run = made.run(n=20)

    whole = SimpleNamespace(layers=())
    of_a_layer = SimpleNamespace(layers=("act",))

    assert "Numbers" not in captions.of_run(run, [])
    assert "Numbers" not in captions.of_run(run, [whole])
    assert "Numbers in the picture" in captions.of_run(run, [whole, of_a_layer])


@pytest.mark.parametrize(
    ("losses", "valid", "expected"),
    [
        (np.ones(3), (), "Training loss"),
        (np.ones(3), ({"valid_loss": 1.0},), "Training and validation loss"),
        (None, ({"valid_loss": 1.0},), "Validation loss"),
        (np.full(3, np.nan), ({"valid_loss": 1.0},), "Validation loss"),
        (np.ones(3), ({"train_loss": 1.0},), "Training loss"),
    ],
)
def test_the_losses_that_are_there_are_named(losses: object, valid: tuple, expected: str) -> None:
    assert captions.of_loss(Run(losses=losses, valid=valid)).startswith(f"{expected} by step")


def test_a_parameter_that_begins_at_0_is_not_named_as_the_one_that_moves_farthest() -> None:
    record = made.params(made.small_names(), 9)
    for row, values in {0: (50.0, np.arange(9.0)), 1: (0.5, np.ones(9))}.items():
        record = made.with_values(record, "update_ratio", row, values[0])
        record = made.with_values(record, "weight_norm", row, values[1])

    text = captions.in_words(record)

    n = len(record.names)
    assert f"update:weight of {n - 1} of {n} rows (others begin at 0 or have" in text
    assert f"largest 0.5 in {record.labels[1]}" in text


def test_of_many_layers_the_largest_and_the_smallest_are_named() -> None:
    record = made.record([(f"{i}", "Linear") for i in range(20)], 9)
    table = np.ones_like(record.values["std"])
    table[7], table[3] = 25.0, 0.5
    table[3, -2:] = np.nan  # did not run

    text = captions.of_lines(replace(record, values={**record.values, "std": table}))

    assert text.endswith("is largest in 7 Linear (25) and smallest in 3 Linear (0.5).")


def test_of_few_layers_which_have_names_in_the_picture_none_is() -> None:
    assert "largest" not in captions.of_lines(made.record(made.small_names(), 9))


def test_vectors_which_are_not_drawn_are_not_named_among_updates() -> None:
    record = made.params(made.transformer_names(), 9)
    vector = record.meta["ndim"].index(1)

    text = captions.of_updates(made.with_values(record, "update_ratio", vector, 100.0))

    assert "largest in" in text
    assert record.names[vector] not in text


def test_the_gradient_norm_is_spoken_of_where_it_is_drawn() -> None:
    with_norms = Run(losses=np.ones(3), grad_norms=np.ones(3))

    assert "gradient norm" not in captions.of_loss(Run(losses=np.ones(3)))
    assert "gradient norm" in captions.of_loss(with_norms)
    assert "No loss was recorded" in captions.of_loss(Run(grad_norms=np.ones(3)))
    assert captions.of_loss(Run(valid=({"epoch": 0, "step": 9},))) == ""


def test_the_caption_of_dead_units_names_what_is_drawn() -> None:
    ran = np.zeros((2, 9))
    plain = made.record([("0", "Linear"), ("1", "ReLU")], 9)
    dead = replace(plain, values={**plain.values, "dead": ran})
    both = replace(plain, values={**plain.values, "dead": ran, "dormant": ran})
    linear = made.record([("0", "Linear")], 9)
    linear = replace(linear, values={**linear.values, "dead": ran[:1]})

    assert captions.of_dead(dead) == "The share of units that are dead, a line a layer."
    assert captions.of_dead(both) == "The share of units that are dead or dormant, a line a layer."
    assert captions.of_dead(linear) == "The share of values near zero, a line a layer."
    assert captions.of_dead(plain).endswith("For dead units: ActivationStats(units=True).")


def test_the_colours_of_updates_are_explained_where_they_are_drawn() -> None:
    assert "pale is 0.001 of a weight" in captions.of_run(made.run(n=20), [])
    assert "pale" not in captions.of_run(replace(made.run(n=20), params=None), [])
