"""The heat-maps of a run: levels and changes, and parameters that begin at 0."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import made
import numpy as np
import pytest
import torch
from torch import nn

from hookkit.errors import ArgumentError
from hookkit.records import Record, Run
from hookkit.stats import ParamStats
from hookkit.watching import watch

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
arrays = pytest.importorskip("hookkit.plotting.arrays")


@pytest.fixture(autouse=True)
def _off_screen() -> Iterator[None]:
    with plotting.offscreen():
        yield


def cells(source: Any, panel: int = 0, **options: Any) -> tuple[Any, tuple[float, float], str]:
    """Of one panel of `plot_run` the cells as they are drawn, the limits of colours, the title."""
    ax = plotting.plot_run(source, findings=[], **options).axes[panel]
    mesh = ax.collections[0]
    table = mesh.get_array().filled(np.nan)
    return table, mesh.get_clim(), ax.get_title(loc="left")


def said(source: Any) -> list[str]:
    legends = plotting.plot_run(source, findings=[]).legends
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def of_rms(rms: Any, kind: str = "Linear") -> Record:
    rms = np.asarray(rms, float)
    record = made.record([(f"l{i}", kind) for i in range(len(rms))], rms.shape[1], hist=False)
    return replace(record, values={**record.values, "rms": rms})


def test_a_row_is_drawn_relative_to_its_own_beginning() -> None:
    growth = np.concatenate([np.ones(10), np.logspace(0, 2, 90)])
    levels = np.array([1e-3, 1.0, 50.0])[:, None]

    table, limits, title = cells(of_rms(levels * growth), relative=True)

    assert table == pytest.approx(np.tile(np.log10(growth), (3, 1)).clip(*limits))
    assert limits == pytest.approx((-limits[1], limits[1]))
    assert limits[1] == pytest.approx(2, abs=0.1)
    when = "RMS of activations, change of each layer since steps 0–9"
    assert title == f"{when}, when it was 0.001 to 50"


def test_without_it_a_row_is_drawn_by_its_level() -> None:
    record = of_rms([[0.01] * 20, [1.0] * 20])

    table, _, title = cells(record, relative=False)

    assert table[:, 0] == pytest.approx([-2, 0])
    assert title == "RMS of activations"


def test_small_changes_have_pale_colours() -> None:
    _, limits, _ = cells(of_rms(1 + 0.1 * np.sin(np.arange(100.0))[None]), relative=True)

    assert limits == (-1, 1)


@pytest.mark.parametrize(
    ("kind", "relative"),
    [("LayerNorm", True), ("LlamaRMSNorm", True), ("BatchNorm2d", False), ("Linear", False)],
)
def test_changes_are_the_default_where_a_norm_sets_the_levels(kind: str, relative: bool) -> None:
    run = made.run([("a", "Linear"), ("b", kind), ("c", "Linear")], n=30)

    titles = [cells(run, panel)[2] for panel in range(3)]

    assert ["change of each layer" in title for title in titles] == [relative, relative, False]
    assert titles[2] == "Update : weight of parameters"


def test_a_row_that_begins_at_zero_is_relative_to_its_first_values() -> None:
    rms = np.ones((3, 100))
    rms[0, :40], rms[0, 90:] = 0.0, 100.0
    rms[1, :20] = np.nan
    rms[2] = 0.0

    change, starts = arrays.since_start(rms)

    assert np.isneginf(change[0, :40]).all()
    assert change[0, 40:90] == pytest.approx(np.zeros(50))
    assert change[0, 90:] == pytest.approx(np.full(10, 2.0))
    assert np.isnan(change[1, :20]).all()
    assert change[1, 20:] == pytest.approx(np.zeros(80))
    assert np.isneginf(change[2]).all()
    assert starts[:2] == pytest.approx([0, 0])
    assert np.isnan(starts[2])


def test_of_merged_cells_the_largest_change_is_kept_up_or_down() -> None:
    rms = np.ones((2, 2000))
    rms[0, 777], rms[1, 888], rms[1, 889] = 10.0, 0.01, 1.5

    table, _, title = cells(of_rms(rms), relative=True)

    assert title.endswith("each cell the largest change of 3 records")
    assert table[0].max() == pytest.approx(1)
    assert table[1].min() == pytest.approx(-1)  # the end of the colours
    assert table[1].max() == 0


def test_nan_and_zero_survive_the_merging_of_changes() -> None:
    table = np.array([[0.1, np.inf, -3.0, -np.inf, -np.inf, -np.inf, np.nan, -0.5, np.nan]])

    pooled, _, _ = arrays.pool(table, np.arange(10.0), 3, signed=True)

    assert pooled.tolist() == [[np.inf, -np.inf, -0.5]]


@pytest.mark.parametrize("relative", ["yes", 2])
def test_what_is_no_flag_is_refused(relative: Any) -> None:
    with pytest.raises(ArgumentError, match=r"plot_run\(relative=.*give True or False"):
        plotting.plot_run(made.run(n=9), relative=relative)


def trained(steps: int, lr: float = 0.01) -> Record:
    """Adam on a layer whose bias begins at 0, and on one that is 0 and frozen by its gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, bias=False))
    nn.init.zeros_(net[0].bias)
    stats = ParamStats()
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    x = torch.randn(64, 4)
    with watch(net, opt, stats):
        for _ in range(steps):
            (net(x) - 100).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return stats.record()


def test_a_bias_that_begins_at_zero_has_no_value_until_it_has_grown() -> None:
    record = trained(300)
    row = record.layer("0.bias")
    ratio = record.value("update_ratio", row)
    assert np.isinf(ratio[0])
    assert ratio[1] > 0.1  # what was drawn as an alarm

    table, young = arrays.update_ratios(record)

    grown = int(np.flatnonzero(ratio <= 0.01)[0])
    assert 50 < grown < 200
    assert young[row].tolist() == [t < grown for t in range(300)]
    assert np.isnan(table[row, :grown]).all()
    assert table[row, grown:].tolist() == ratio[grown:].tolist()
    others = np.arange(len(record.names)) != row
    assert not young[others].any()
    assert np.array_equal(table[others], record.value("update_ratio")[others])


def test_grey_says_that_a_bias_has_no_value_yet() -> None:
    assert said(trained(30)) == [
        "no value yet: begins at 0, until a step changes it by 1 % or less"
    ]


def test_a_parameter_that_stays_at_zero_did_not_move() -> None:
    record = made.params(made.small_names(), 20)
    for name, value in (("weight_norm", 0.0), ("update_ratio", 0.0)):
        record = made.with_values(record, name, 0, value)

    assert not arrays.update_ratios(record)[1].any()
    assert said(record) == ["did not move"]


def test_a_parameter_that_grows_too_fast_later_is_seen() -> None:
    record = made.params(made.small_names(), 50)
    ratio = record.value("update_ratio")[0].copy()
    ratio[:5], ratio[30] = [np.inf, 1, 0.5, 0.05, 0.009], 5.0
    record = made.with_values(record, "weight_norm", (0, 0), 0.0)
    record = made.with_values(record, "update_ratio", 0, ratio)

    table, young = arrays.update_ratios(record)

    assert young[0].tolist() == [True] * 4 + [False] * 46
    assert table[0, 30] == 5


def test_lines_of_updates_leave_out_what_has_no_value_yet() -> None:
    record = made.params(made.small_names(), 50)
    start = np.r_[np.inf, 1 / np.arange(1.0, 9)]
    record = made.with_values(record, "weight_norm", (0, 0), 0.0)
    record = made.with_values(record, "update_ratio", (0, slice(0, 9)), start)

    ax = plotting.plot_updates(record)

    assert np.isnan(ax.lines[0].get_ydata()[:9]).all()
    assert ax.get_ylim()[1] < -1.5
    assert ax.get_title(loc="left").endswith("those that begin at 0: once below −2")


def test_a_run_without_parameters_of_known_norm_is_drawn_as_before() -> None:
    record = made.params(made.small_names(), 20)
    bare = replace(record, values={"update_ratio": record.value("update_ratio")})

    table, _, _ = cells(Run(params=bare))

    assert table == pytest.approx(np.log10(record.value("update_ratio")).clip(-5, -1))


def test_what_is_not_finite_is_marked_in_the_panel_that_shows_it() -> None:
    run = made.run(n=20)
    gradients = made.with_values(run.gradients, "nonfinite", np.s_[:, 10:], 1.0)
    activations = made.with_values(run.activations, "nonfinite", np.s_[:, 11:], 1.0)
    found = SimpleNamespace(severity="error", rule="non_finite", layers=["fc2"], steps=(10, 10))

    of_run = replace(run, activations=activations, gradients=gradients)
    axes = plotting.plot_run(of_run, findings=[found]).axes

    assert [sum(text.get_text() == "1" for text in ax.texts) for ax in axes[:3]] == [0, 1, 0]
