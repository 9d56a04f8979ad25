"""Every picture, for every kind of record: small, deep, long, empty, broken."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import numpy as np
import pytest

from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.records import Record, Run

mpl = pytest.importorskip("matplotlib")
plt = pytest.importorskip("matplotlib.pyplot")
plotting = pytest.importorskip("hookkit.plotting")
figures = pytest.importorskip("hookkit.plotting.figures")
Figure = pytest.importorskip("matplotlib.figure").Figure

PICTURES: dict[str, Callable[..., Any]] = {
    "plot_run": plotting.plot_run,
    "color_dim": plotting.color_dim,
    "color_dim one layer": lambda r, **k: plotting.color_dim(r, 0, **k),
    "plot_stats": plotting.plot_stats,
    "plot_depth": plotting.plot_depth,
    "plot_updates": plotting.plot_updates,
    "plot_dead": plotting.plot_dead,
    "plot_density": plotting.plot_density,
    "plot_loss": plotting.plot_loss,
    "plot_layer_stats": lambda r, **k: plotting.plot_layer_stats(r, 0, **k),
}
ON_AXES = {"color_dim one layer", "plot_updates", "plot_dead", "plot_density"}


@pytest.fixture(autouse=True)
def _no_figure_left() -> Iterator[None]:
    plt.close("all")
    with plotting.offscreen():
        yield
    assert plt.get_fignums() == []


def blown_up(run: Run, value: float, steps: slice = slice(None)) -> Run:
    """Every layer's values are `value` in `steps`, and its histogram is empty there."""

    def tainted(r: Record) -> Record:
        values = {name: table.copy() for name, table in r.values.items()}
        for name in {*values} - {"count", "near_zero", "zero"}:
            values[name][:, steps] = value
        values["nonfinite"][:, steps] = 64 * (not np.isfinite(value))
        hist = None if r.hist is None else r.hist.copy()
        if hist is not None:
            hist[:, :, steps] = 0
        return replace(r, values=values, hist=hist)

    slots = ("activations", "gradients", "params")
    return replace(run, **{slot: tainted(getattr(run, slot)) for slot in slots})


RUNS: dict[str, Callable[[], Run]] = {
    "no steps": lambda: made.run(n=0),
    "292 layers": lambda: made.run([(f"h.{i}.fc", "Linear") for i in range(292)], 4, epoch=2),
    "exploding": lambda: made.exploding(made.run(n=40, epoch=10)),
    "broken throughout": lambda: blown_up(made.run(n=4), np.inf),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("state", RUNS)
def test_every_picture_of_every_run_draws_without_a_warning(name: str, state: str) -> None:
    PICTURES[name](RUNS[state]()).figure.draw_without_rendering()


# --- figures and files


@pytest.mark.parametrize("name", PICTURES)
def test_a_given_figure_or_axes_is_drawn_on_and_returned(name: str) -> None:
    fig = Figure()
    own = {"ax": fig.subplots()} if name in ON_AXES else {"fig": fig.subfigures(1, 2)[0]}

    assert PICTURES[name](made.run(n=10), **own) is next(iter(own.values()))


@pytest.fixture
def _as_in_a_notebook() -> Iterator[None]:
    token = figures._offscreen.set(False)
    yield
    figures._offscreen.reset(token)


@pytest.mark.usefixtures("_as_in_a_notebook")
def test_in_a_notebook_a_picture_is_a_figure_of_pyplot_and_saving_closes_it(tmp_path: Path) -> None:
    picture = plotting.plot_stats(made.run(n=10))
    assert plt.get_fignums() == [picture.number]

    plotting.save(picture, tmp_path / "new" / "stats.png")
    assert plt.get_fignums() == []
    assert (tmp_path / "new" / "stats.png").read_bytes().startswith(b"\x89PNG")


def test_no_global_state_of_matplotlib_changes() -> None:
    before = dict(mpl.rcParams)
    for draw in PICTURES.values():
        draw(made.run(n=10))

    assert dict(mpl.rcParams) == before


def test_only_pictures_are_saved_and_only_as_png(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r'writes PNG files only. Name it "run.png"'):
        plotting.save(Figure(), tmp_path / "run.pdf")
    with pytest.raises(ArgumentError, match=r"expected a picture, found int"):
        plotting.png(3)


# --- what is refused


REFUSED: dict[str, tuple[Callable[[Run], Any], str]] = {
    "no bins": (lambda run: plotting.color_dim(run), "with_hist=True"),
    "layer": (lambda run: plotting.plot_layer_stats(run, "fc11"), "fc1"),
    "kind": (lambda run: plotting.plot_updates(run.activations), r"Train with ParamStats\(\)"),
    "axes": (lambda run: plotting.color_dim(run, ax=Figure().subplots()), "layer, or give fig="),
    "start": (lambda run: plotting.plot_loss(run, 30), r"steps to leave out.* from 0 to 29"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drawn_is_refused_with_its_cure(what: str) -> None:
    draw, cure = REFUSED[what]

    with pytest.raises((OptionError, SelectionError), match=cure):
        draw(made.run(n=30, hist="bins" not in what))


@pytest.mark.usefixtures("_as_in_a_notebook")
@pytest.mark.parametrize("step", [-1, 300, "last", 2.5])
def test_a_step_that_was_not_recorded_is_refused_and_leaves_no_empty_figure(step: Any) -> None:
    run = made.run(n=30, every=10)

    for draw in (plotting.plot_density, lambda run, step: plotting.plot_depth(run, [0, step])):
        with pytest.raises(OptionError, match=r"step that was recorded.* from 0 to 299"):
            draw(run, step)
    assert plt.get_fignums() == []


# --- names, steps, epochs


def test_names_of_layers_are_no_formulas_and_on_one_line_and_end_as_they_do() -> None:
    record = made.record([("cost in $ or $US\nline", "Linear")], 5)

    assert figures.label(record, 0) == r"cost in \$ or \$US line Linear"
    assert plotting.png(plotting.plot_stats(record), dpi=30)
    assert figures.label(record, 0, 14) == "…S line Linear"  # the end of a long one


def dotted(ax: Any) -> list[float]:
    return [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":"]


def test_epochs_are_marked_where_they_begin_in_another_fit_too() -> None:
    run = made.run(n=20, epoch=10)
    assert dotted(plotting.plot_updates(run)) == [10]

    two = replace(run.params, epochs=np.zeros(20, np.int64), iters=np.arange(20) % 5)
    assert dotted(plotting.plot_updates(two)) == [5, 10, 15]


def test_what_is_broken_has_a_bar_on_top_where_it_is_broken() -> None:
    ax = plotting.plot_updates(blown_up(made.run(n=40), np.nan, slice(30, None)))

    (bar,) = ax.collections
    box = bar.get_paths()[0].get_extents()
    assert (box.x0, box.x1) == (30, 40)
    assert "NaN or Inf" in [text.get_text() for text in ax.texts]


# --- plot_run


def cells(fig: Any, panel: int = 0) -> Any:
    return fig.axes[panel].collections[0].get_array()


def test_plot_run_has_a_panel_and_a_bar_for_each_record_that_is_there() -> None:
    fig = plotting.plot_run(made.run(n=20), findings=[])

    heads = [ax.get_title(loc="left") for ax in fig.axes[:3]]
    assert heads == ["RMS of activations", "RMS of gradients", "Update : weight of matrices"]
    assert len(fig.axes) == 6
    assert fig.axes[2].get_xlabel() == "optimizer step"
    matrices = [text.get_text() for text in fig.axes[2].get_yticklabels()]
    assert matrices == ["fc1.weight Linear", "fc2.weight Linear"]  # vectors are left out
    assert len(plotting.plot_run(made.run(n=20).gradients, findings=[]).axes) == 2


class Found(SimpleNamespace):
    def __str__(self) -> str:
        return f"✗ error  {self.rule}: it costs $ or $.\n    Cause: x. Fix: y."


def test_findings_are_listed_and_their_layers_marked() -> None:
    found = [Found(rule=r, layers=n) for r, n in [("nan", ("fc2",)), ("dead", ("act", "fc1"))]]

    fig = plotting.plot_run(made.run(n=20), findings=found)
    fig.draw_without_rendering()

    assert fig.get_supxlabel().splitlines() == [
        r"1  ✗ error  nan: it costs \$ or \$.",
        r"2  ✗ error  dead: it costs \$ or \$.",
    ]
    marks = {t.get_text(): list(line.get_ydata()) for t, line in zip(
        fig.axes[0].texts, [x for x in fig.axes[0].lines if x.get_marker() == "_"], strict=True
    )}  # fmt: skip
    assert marks == {"1": [2], "2": [0, 1]}
    assert not fig.axes[2].texts


@pytest.mark.parametrize(
    ("value", "word"),
    [(np.nan, "no value"), (0.0, "all zero, or did not move"), (np.inf, "NaN or Inf")],
)
def test_special_colours_are_explained_where_they_are_seen(value: float, word: str) -> None:
    run = made.run(n=20)
    assert not plotting.plot_run(run, findings=[]).legends

    r = made.with_values(run.activations, "rms", (1, slice(5, 9)), value)
    r = made.with_values(r, "nonfinite", (1, slice(5, 9)), float(np.isinf(value)))
    fig = plotting.plot_run(r, findings=[])

    assert [t.get_text() for t in fig.legends[0].get_texts()] == [word]
    assert (cells(fig)[1, 5:9] == cells(fig)[1, 5]).all() or np.isnan(value)


def test_a_spike_survives_the_merging_of_columns() -> None:
    r = made.with_values(made.run(n=2000).activations, "rms", (1, 1234), 1e30)

    fig = plotting.plot_run(r, findings=[])

    assert cells(fig).shape == (3, 667)
    assert cells(fig)[1].argmax() == 1234 // 3
    assert cells(fig).max() <= fig.axes[0].collections[0].get_clim()[1]  # no NaN is drawn
    assert fig.axes[0].get_title(loc="left").endswith("each cell the largest of 3 records")


# --- lines


def curves(ax: Any) -> dict[str, Any]:
    """label → line of each layer."""
    return {x.get_label(): x for x in ax.lines if not x.get_label().startswith("_")}


def test_layers_without_values_are_counted_and_one_that_ran_sometimes_is_seen() -> None:
    r = made.with_values(made.run(n=40).activations, "mean", 0, np.nan)
    r = made.with_values(r, "mean", (1, slice(None, None, 2)), np.nan)

    ax = plotting.plot_stats(r).axes[0]

    assert [*curves(ax)] == ["act ReLU", "fc2 Linear"]
    assert ax.get_title(loc="left").endswith("; 1 of 3 have no value to show")
    assert list(curves(ax)["act ReLU"].get_xdata()) == list(range(1, 40, 2))


def test_of_a_long_run_lines_are_means_of_neighbours_and_columns_their_sums_and_say_so() -> None:
    r = made.run(n=400).activations
    mean = np.tile([0.0, 2.0], (3, 200))

    ax = plotting.plot_stats(replace(r, values={**r.values, "mean": mean})).axes[0]
    spread_ax = plotting.color_dim(made.run(n=2000), 0)

    assert ax.get_title(loc="left") == "Mean of activations; means of 4 records"
    np.testing.assert_allclose(curves(ax)["act ReLU"].get_ydata()[4:-4], 1)
    assert spread_ax.get_title(loc="left").endswith("; 3 records a column")
    assert spread_ax.collections[0].get_array().shape[1] == 667


def units(dead: Any, window: int = 10, **fields: Any) -> Record:
    """A record of a ReLU whose share of dead units is known."""
    r = made.record([("act", "ReLU")], np.shape(dead)[-1])
    values = {**r.values, "dead": np.atleast_2d(np.asarray(dead, float))}
    return replace(r, values=values, meta={"window": window}, **fields)


NAN_FROM_12 = "nonfinite", (0, slice(12, None)), 9


@pytest.mark.parametrize(
    ("record", "drawn"),
    [
        (units(np.linspace(0, 1, 23)), [4, 9, 14, 19, 22]),
        (units(np.full(6, 0.25), 50), [5]),  # shorter than a window
        (units(np.full(6, 0.5), 8, spans=np.full(6, 2)), [1, 3, 5]),  # merged records
        (made.with_values(units(np.full(20, 0.5)), *NAN_FROM_12), [4, 9]),  # judged over NaN
    ],
)
def test_dead_units_are_drawn_where_a_half_window_ends(record: Record, drawn: list[int]) -> None:
    ax = plotting.plot_dead(record)

    line = curves(ax)["act ReLU"]
    assert list(line.get_xdata()) == drawn
    np.testing.assert_allclose(line.get_ydata(), 100 * record.values["dead"][0, drawn])
    window = record.meta["window"]
    assert ax.get_title(loc="left") == f"Units that are dead over the last {window} records"


def test_without_units_values_near_zero_are_drawn_and_the_title_says_so() -> None:
    ax = plotting.plot_dead(made.run(n=20))

    assert ax.get_title(loc="left") == "Values near zero (|x| ≤ 0.05)"
    assert 40 < curves(ax)["act ReLU"].get_ydata().mean() < 60


def test_the_depth_profile_draws_chosen_steps_and_leaves_out_what_has_no_size() -> None:
    r = made.with_values(made.run(n=30, every=10).activations, "rms", (1, 20), 0.0)

    fig = plotting.plot_depth(r, [0, 201])

    first, last = curves(fig.axes[0]).values()
    assert (first.get_label(), last.get_label()) == ("0", "200")
    assert (list(first.get_xdata()), list(last.get_xdata())) == ([0, 1, 2], [0, 2])
    assert fig.axes[0].get_yscale() == "log"
    assert "Backward: nothing was recorded" in [t.get_text() for t in fig.axes[1].texts]
    by_default = [*curves(plotting.plot_depth(made.run(n=1500)).axes[1])]
    assert by_default == ["0", "1", "10", "100", "1000", "1499"]


# --- the loss


def test_the_smooth_line_begins_where_a_falling_loss_does_and_no_spike_moves_it() -> None:
    losses = 2.0 * np.exp(-np.arange(400) / 100)
    spiked = np.where(np.arange(400) == 200, 50.0, losses)

    line = curves(plotting.plot_loss(Run(losses=spiked)).axes[0])["running median of 15 values"]

    np.testing.assert_allclose(line.get_ydata()[:-5], losses[:-5], rtol=0.02)


def test_validation_is_drawn_at_the_step_of_its_row_else_in_equal_parts_and_nan_is_marked() -> None:
    rows = [{"step": 7, "valid_loss": 1.0}, {"valid_loss": 0.5}, {"valid_loss": np.nan, "step": 25}]

    points = curves(plotting.plot_loss(Run(losses=np.ones(30), valid=rows)).axes[0])

    assert list(points["validation loss"].get_xdata()[:2]) == [7, 19]
    assert list(points["validation: NaN or Inf"].get_xdata()) == [25]


@pytest.mark.parametrize(
    ("known", "bars"), [(slice(None, None, 10), []), (slice(0, 60), [60]), (slice(0, 0), [])]
)
def test_losses_that_are_not_known_are_not_called_nan(known: slice, bars: list[int]) -> None:
    losses = np.full(100, np.nan)
    losses[known] = 1.0

    ax = plotting.plot_loss(Run(losses=losses)).axes[0]

    assert [bar.get_paths()[0].get_extents().x0 for bar in ax.collections] == bars


def test_a_loss_that_falls_far_has_a_log_scale_and_one_huge_value_flattens_no_others() -> None:
    def scale(fig: Any) -> str:
        return fig.axes[0].get_yscale()  # type: ignore[no-any-return]

    losses = np.append(1e6, np.linspace(1, -1, 50))
    large_mean = made.with_values(made.run(n=40).activations, "mean", (0, 5), -1e6)

    assert scale(plotting.plot_loss(Run(losses=10.0 ** -np.arange(0, 4, 0.1)))) == "log"
    assert scale(plotting.plot_loss(Run(losses=losses))) == "symlog"
    assert scale(plotting.plot_loss(Run(losses=losses[1:]))) == "linear"
    assert scale(plotting.plot_stats(large_mean)) == "symlog"
    assert scale(plotting.plot_stats(made.run(n=40))) == "linear"


def test_the_start_can_be_left_out_and_where_no_loss_is_known_the_picture_says_so() -> None:
    fig = plotting.plot_loss(made.run(n=100, epoch=10), 50)

    lines = [line for ax in fig.axes for line in curves(ax).values()]
    assert len(lines) == 5
    assert min(line.get_xdata()[0] for line in lines) >= 50
    without = plotting.plot_loss(made.run(n=10).activations)
    assert [t.get_text() for t in without.axes[0].texts] == ["no training loss recorded"]


# --- how values are spread


def counted(edges: Any, counts: Any) -> Record:
    """A record whose histogram is `counts` (n_bins,) in each of two steps."""
    r = made.record([("fc", "Linear")], 2, hist=False)
    hist = np.tile(np.asarray(counts, np.int64)[None, :, None], (1, 1, 2))
    return replace(r, hist=hist, edges=np.asarray(edges, float))


def test_the_area_under_each_line_of_a_density_is_one() -> None:
    ax = plotting.plot_density(made.run(n=20))

    for line in curves(ax).values():
        x, y = line.get_data()
        assert (y * np.gradient(x)).sum() == pytest.approx(1, abs=0.02)


def test_colours_of_a_spread_are_shares_grey_and_vermilion() -> None:
    r = counted([-2, -1, 0, 1, 2], [0, 25, 75, 0])
    hist = r.hist.copy()
    hist[:, :, 1] = 0
    r = made.with_values(replace(r, hist=hist), "nonfinite", (0, 1), 100)

    ax = plotting.color_dim(r, "fc")

    table = ax.collections[0].get_array()
    np.testing.assert_allclose(table[:, 0], [-4, np.log10(0.25), np.log10(0.75), -4])
    assert np.ma.getmaskarray(table)[:-1, 1].all()
    assert table[-1, 1] > 0
    assert ax.get_title(loc="left").endswith("; NaN or Inf in vermilion")
