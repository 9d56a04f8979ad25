"""The picture of losses: the smooth line, its window, and spikes, as the diagnosis finds them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import made
import numpy as np
import pytest

from hookkit.health import diagnose
from hookkit.health.jumps import jumps
from hookkit.records import Run

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
arrays = pytest.importorskip("hookkit.plotting.arrays")


@pytest.fixture(autouse=True)
def _off_screen() -> Iterator[None]:
    with plotting.offscreen():
        yield


def lines(losses: Any, **options: Any) -> dict[str, Any]:
    """The lines of the picture of these losses, by their legends."""
    ax = plotting.plot_loss(Run(losses=losses), **options).axes[0]
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    return {x.get_label(): x.get_xydata() for x in ax.lines if x.get_label() in shown}


def falling(n: int) -> Any:
    return 0.3 + 2 * np.exp(-np.arange(n) / (n / 20))


@pytest.mark.parametrize("n", [30, 199, 2000, 9001])
def test_the_smooth_line_of_a_falling_loss_begins_where_the_loss_does(n: int) -> None:
    drawn = lines(falling(n))[f"running median of {arrays.median_width(n)} values"]

    assert tuple(drawn[0]) == (0, falling(n)[0])
    inside = drawn[drawn[:, 0] < n - arrays.median_width(n)]
    assert inside[:, 1] == pytest.approx(falling(n)[inside[:, 0].astype(int)])
    assert drawn[-1, 0] == n - 1


@pytest.mark.parametrize(("n", "width"), [(30, 5), (400, 11), (2000, 51), (100_000, 1001)])
def test_the_legend_says_the_window(n: int, width: int) -> None:
    assert f"running median of {width} values" in lines(falling(n))


def test_one_spike_leaves_the_smooth_line_where_it_is() -> None:
    level = 0.5 + 0.01 * np.sin(np.arange(300))
    spiky = level.copy()
    spiky[150] = 2.33

    smooth = lines(spiky)["running median of 7 values"][:, 1]

    assert np.abs(smooth - lines(level)["running median of 7 values"][:, 1]).max() < 0.01


def test_the_smooth_line_does_not_end_in_the_noise_of_the_last_step() -> None:
    losses = 1 + 0.01 * np.sin(np.arange(400))
    losses[-1] = 1.4

    assert lines(losses)["running median of 11 values"][-1, 1] < 1.02


def test_triangles_and_the_rule_agree_on_what_a_spike_is() -> None:
    rng = np.random.default_rng(0)
    losses = 2 + 0.05 * rng.normal(size=600)
    losses[[5, 200, 430]] = 9.0
    losses[300:320] = np.nan

    marked = lines(losses)["2 far above the steps before"][:, 0]

    (found,) = [f for f in diagnose(Run(losses=losses)) if f.rule == "spikes"]
    assert marked.tolist() == [200, 430]
    assert found.steps == (200, 430)
    assert found.evidence.startswith("2 loss spikes")


def test_leaving_out_the_start_changes_neither_the_line_nor_the_spikes() -> None:
    losses = falling(600)
    losses[400] = 9.0

    whole, part = lines(losses), lines(losses, skip_start=350)

    name, above = "running median of 15 values", "1 far above the steps before"
    assert np.array_equal(part[name], whole[name][350:])
    assert part[above].tolist() == whole[above].tolist() == [[400, 9]]


def test_jumps_are_found_by_six_sigma_and_never_in_the_first_values() -> None:
    rng = np.random.default_rng(0)
    values = 1 + 0.1 * rng.normal(size=500)
    values[[5, 300]] = 10.0

    assert jumps(values).tolist() == [300]
    assert jumps(values[:99]).tolist() == []


def test_a_running_mean_of_a_falling_series_does_not_begin_below_it() -> None:
    values = np.linspace(2, 1, 100)
    values[40] = np.nan

    mean = arrays.smoothed(values, 9)

    assert mean[0] == 2
    assert mean[:36] == pytest.approx(values[:36])
    assert np.isnan(mean[40])


@pytest.mark.parametrize("decades", [3, 8, 26, 60])
@pytest.mark.parametrize("usual", [1e-12, 1.0, 1e13])
def test_numbers_at_a_signed_log_axis_do_not_touch(usual: float, decades: int) -> None:
    losses = np.linspace(0.5, 1, 90) * usual
    losses[[0, 50]] = -usual * 10.0**decades, usual * 10.0**decades

    figure = plotting.plot_loss(Run(losses=losses))
    figure.draw_without_rendering()

    ax = figure.axes[0]
    low, high = ax.get_ylim()
    labels = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    ends = [text.get_window_extent() for at, text in labels if low <= at <= high]
    assert ax.get_yscale() == "symlog"
    assert len(ends) >= 3
    assert min(upper.y0 - lower.y1 for lower, upper in pairwise(ends)) > 0


def test_values_of_merged_records_are_not_called_steps() -> None:
    norms = np.where(np.arange(400) % 8 == 0, 1.0, np.nan)

    axes = plotting.plot_loss(Run(losses=falling(400), grad_norms=norms)).axes

    said = [ax.get_legend().get_texts()[0].get_text() for ax in axes[:2]]
    assert said == ["training loss, each step", "gradient norm, each value"]


@pytest.mark.parametrize("n", [60, 400])
def test_legends_lie_on_no_data_and_on_no_number_of_an_epoch(n: int) -> None:
    run = replace(made.run(n=n, epoch=20), losses=falling(n), grad_norms=falling(n))
    figure = plotting.plot_loss(run)
    figure.draw_without_rendering()

    for ax in figure.axes[:2]:
        legend = ax.get_legend().get_window_extent()
        assert legend.y0 >= ax.get_window_extent().y1
        for top in ax.child_axes:
            assert legend.y0 >= top.xaxis.get_tightbbox().y1


def test_where_no_loss_was_recorded_the_gradient_norm_has_the_room() -> None:
    figure = plotting.plot_loss(Run(grad_norms=falling(400)))
    figure.draw_without_rendering()

    loss, norm = (ax.get_window_extent().height for ax in figure.axes[:2])

    assert norm > 2 * loss


@pytest.mark.parametrize("valid", [(), ({"valid_loss": np.nan, "step": 9},)], ids=["", "valid"])
def test_without_a_finite_loss_there_is_no_scale_and_no_line_in_the_legend(valid: Any) -> None:
    (ax,) = plotting.plot_loss(Run(losses=np.full(10, np.nan), valid=valid)).axes

    assert not ax.yaxis.get_visible()
    assert "no finite loss" in [text.get_text() for text in ax.texts]
    legend = ax.get_legend()
    said = [text.get_text() for text in legend.get_texts()] if legend else []
    assert said == ["validation loss: NaN or Inf"] * len(valid)
