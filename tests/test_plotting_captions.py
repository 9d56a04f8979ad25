"""What captions claim is true of the picture above them."""

from collections.abc import Iterator
from dataclasses import replace

import made
import numpy as np
import pytest

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
labels = pytest.importorskip("hookkit.plotting.labels")


@pytest.fixture(autouse=True)
def _off_screen() -> Iterator[None]:
    with plotting.offscreen():
        yield


def test_a_matrix_that_moved_is_not_said_to_have_never_moved() -> None:
    record = made.params(made.small_names(), 20)
    record = made.with_values(record, "weight_norm", (0, slice(0, 2)), 0.0)
    record = made.with_values(record, "update_ratio", (0, 0), 0.0)  # no gradient at first
    record = made.with_values(record, "update_ratio", (0, slice(1, None)), 0.5)
    record = made.with_values(record, "update_ratio", (0, 1), np.inf)

    ax = plotting.plot_updates(record)

    assert [text.get_text() for text in ax.texts] == []


@pytest.mark.parametrize("n", [2, 12])
def test_few_lines_are_told_apart_without_colours(n: int) -> None:
    record = made.record([(f"{i}", "Linear") for i in range(n)], 400)

    left, right = plotting.plot_stats(record).axes[:2]

    for ax in (left, right):
        smooth = [line for line in ax.lines if line.get_marker() in "os^DvPX<>ph*"]
        assert len({line.get_marker() for line in smooth}) == n
        assert len({step for line in smooth for step in line.get_markevery()}) == 6 * n
    assert [h.get_marker() for h in right.get_legend().legend_handles] == list("os^DvPX<>ph*")[:n]


def test_updates_below_the_axis_are_counted() -> None:
    record = made.params(made.small_names(), 20)
    tiny = made.with_values(record, "update_ratio", 0, 1e-20)

    heads = [plotting.plot_updates(r).get_title(loc="left") for r in (record, tiny)]

    assert [head.endswith("; 1 below this range") for head in heads] == [False, True]


def test_a_smoothed_line_of_a_layer_is_said_to_be_one() -> None:
    short, long = (made.run(n=n) for n in (90, 900))

    heads = [plotting.plot_layer_stats(r, 0).get_suptitle() for r in (short, long)]

    assert heads[0] == "fc1 Linear: activations"
    assert heads[1] == "fc1 Linear: activations; dark: smoothed over 9 records"


def test_one_layer_with_nan_says_what_vermilion_is() -> None:
    record = made.with_values(made.record(made.small_names(), 9), "nonfinite", (0, 3), 1.0)

    heads = [plotting.color_dim(record, layer).get_title(loc="left") for layer in (0, 1)]

    assert ["NaN or Inf in vermilion" in head for head in heads] == [True, False]


def test_a_step_that_stands_for_several_records_says_so() -> None:
    record = made.record(made.small_names(), 9, every=4)
    merged = replace(record, spans=np.full(9, 4))

    densities = [plotting.plot_density(r).get_title(loc="left") for r in (record, merged)]
    depths = [plotting.plot_depth(r).axes[0].get_xlabel() for r in (record, merged)]

    assert densities[0].endswith("at step 32")
    assert densities[1].endswith("at step 32, 4 records together")
    assert [label.endswith("each step over 4 records") for label in depths] == [False, True]


def test_layers_that_are_always_0_are_named_where_a_logarithmic_axis_cannot_show_them() -> None:
    record = made.record(made.small_names(), 20)
    zero = made.with_values(record, "std", 1, 0.0)

    said = [[t.get_text() for t in plotting.plot_stats(r).axes[1].texts] for r in (record, zero)]

    assert said == [[], ["always 0: act ReLU"]]


def test_a_window_of_one_record_is_said_in_words() -> None:
    records = [made.dead(made.run(n=n)).activations for n in (40, 1)]
    watched = [replace(r, meta={**r.meta, "window": 50}) for r in records if r is not None]

    heads = [plotting.plot_dead(r).get_title(loc="left") for r in watched]

    assert "dead for the next 25 to 40 records (solid)" in heads[0]
    assert "dead for the next 1 record (solid)" in heads[1]


def test_weights_of_layers_with_long_names_have_names_that_differ() -> None:
    names = [f"vision_language_projector_{which}.weight" for which in "ab"]

    shown = [labels.label(name, "Linear") for name in names]

    assert len(set(shown)) == 2
