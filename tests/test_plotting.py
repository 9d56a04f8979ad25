"""Every picture, for every kind of record: small, huge, empty, broken, without histograms."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made
import numpy as np
import pytest

from hookkit.errors import ArgumentError, HookkitError, OptionError, SelectionError
from hookkit.moments.bins import LogBins
from hookkit.records import Record, Run, by_module

mpl = pytest.importorskip("matplotlib")
plt = pytest.importorskip("matplotlib.pyplot")
plotting = pytest.importorskip("hookkit.plotting")
arrays = pytest.importorskip("hookkit.plotting.arrays")
labels = pytest.importorskip("hookkit.plotting.labels")
bins = pytest.importorskip("hookkit.plotting.bins")
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


def nans(run: Run) -> Run:
    """Nothing ever ran."""

    def emptied(r: Record | None) -> Record | None:
        assert r is not None
        values = {k: np.full_like(v, np.nan) for k, v in r.values.items()}
        return replace(r, values=values, hist=None if r.hist is None else r.hist * 0)

    return replace(
        run,
        activations=emptied(run.activations),
        gradients=emptied(run.gradients),
        params=emptied(run.params),
        losses=np.full(run.n_steps, np.nan),
    )


def zeros(run: Run) -> Run:
    r = run.activations
    assert r is not None
    return replace(run, activations=replace(r, values={k: v * 0 for k, v in r.values.items()}))


def big(n: int) -> Run:
    return made.run(made.transformer_names(), n, epoch=max(1, n // 3))


def blown_up(run: Run, value: float, steps: slice = slice(None), *, counted: bool = True) -> Run:
    """Every layer's values are `value` in `steps`, and its histogram is empty there."""

    def tainted(r: Record | None) -> Record | None:
        assert r is not None
        values = {}
        for name, table in r.values.items():
            values[name] = table.copy()
            if name == "nonfinite":
                values[name][:, steps] = 64 * (counted and not np.isfinite(value))
            elif name in ("near_zero", "zero"):  # shares
                values[name][:, steps] = np.clip(value, 0, 1)
            elif name != "count":
                values[name][:, steps] = value
        hist = None if r.hist is None else r.hist.copy()
        if hist is not None:
            hist[:, :, steps] = 0
        return replace(r, values=values, hist=hist)

    activations, gradients = tainted(run.activations), tainted(run.gradients)
    return replace(run, activations=activations, gradients=gradients, params=tainted(run.params))


def without_layers(run: Run) -> Run:
    """Steps were made, and no layer was recorded."""

    def emptied(r: Record | None) -> Record | None:
        assert r is not None
        values = {k: v[:0] for k, v in r.values.items()}
        return replace(
            r,
            names=(),
            types=(),
            values=values,
            hist=None if r.hist is None else r.hist[:0],
            meta={},
        )

    return replace(
        run,
        activations=emptied(run.activations),
        gradients=emptied(run.gradients),
        params=emptied(run.params),
    )


def deep(n: int) -> Run:
    return made.run([(f"{i}", ("Linear", "ReLU")[i % 2]) for i in range(64)], n)


RUNS: dict[str, Callable[[], Run]] = {
    "small": lambda: made.run(n=40, epoch=10),
    "no steps": lambda: made.run(n=0),
    "one step": lambda: made.run(n=1),
    "300 layers": lambda: big(4),
    "2,000 steps": lambda: made.run(n=2000),
    "never ran": lambda: nans(made.run(n=20)),
    "all zero": lambda: zeros(made.run(n=20)),
    "exploding": lambda: made.exploding(made.run(n=40, epoch=10)),
    "dead": lambda: made.dead(made.run(made.resnet_names(), 40)),
    "no layers": lambda: without_layers(made.run(n=20)),
    "deep, broken at the end": lambda: blown_up(deep(6), np.nan, slice(3, None)),
    "deep, broken throughout": lambda: blown_up(deep(4), np.inf),
    "deep, zero at the end": lambda: blown_up(deep(4), 0.0, slice(-1, None)),
    "one broken step": lambda: blown_up(made.run(n=1), np.nan),
    "one layer, broken": lambda: blown_up(made.run([("0", "Linear")], 5), -np.inf),
    "infinite, not counted": lambda: blown_up(made.run(n=9), np.inf, counted=False),
    "largest numbers": lambda: blown_up(made.run(n=9), 1e308),
    "largest at the end": lambda: blown_up(made.run(n=24), 1e308, slice(-1, None)),
    "largest in one layer": lambda: blown_up(made.run([("0", "Linear")], 24), 1e308),
    "smallest numbers": lambda: blown_up(made.run(n=9), 5e-324),
    "negative": lambda: blown_up(made.run(n=9), -3.0),
}


# Pictures that may have more points, or larger numbers, than Agg draws; of others the layout and
# every artist are as good a proof, in half the time.
PAINTED = {"small", "300 layers", "2,000 steps", "largest numbers", "smallest numbers"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("state", RUNS)
def test_every_picture_of_every_run_draws_without_a_warning(name: str, state: str) -> None:
    if state == "no layers" and name in ("color_dim one layer", "plot_layer_stats"):
        with pytest.raises(SelectionError, match="nothing has been recorded yet"):
            PICTURES[name](RUNS[state]())
        return
    picture = PICTURES[name](RUNS[state]())

    if state in PAINTED:
        assert plotting.png(picture, dpi=30).startswith(b"\x89PNG")
    else:
        picture.figure.draw_without_rendering()


@pytest.mark.parametrize("name", [n for n in PICTURES if not n.startswith("color")])
def test_a_given_figure_or_axes_is_drawn_on_and_returned(name: str) -> None:
    figure = Figure()
    given = figure.subplots() if name in ON_AXES else figure

    drawn = PICTURES[name](made.run(n=40), **{"ax" if name in ON_AXES else "fig": given})

    assert drawn is given
    assert figure.axes


def test_a_given_figure_is_laid_out_so_that_no_name_is_cut_off() -> None:
    layers = [("encoder.layers.11.self_attn", "Linear"), ("decoder.layers.11.out_proj", "Linear")]
    bare, tight, used = Figure(), Figure(layout="tight"), Figure()
    used.subplots()

    for figure in (bare, tight, used):
        plotting.plot_run(made.run(layers, n=9), fig=figure)

    plotting.png(bare)
    labels = [label.get_window_extent() for label in bare.axes[0].get_yticklabels()]
    assert min(label.x0 for label in labels) >= 0
    assert type(tight.get_layout_engine()).__name__ == "TightLayoutEngine"
    assert used.get_layout_engine() is None


def test_color_dim_honours_ax_for_one_layer_and_fig_for_all() -> None:
    run, figure = made.run(n=20), Figure()
    ax = Figure().subplots()

    assert plotting.color_dim(run, "act", ax=ax) is ax
    assert plotting.color_dim(run, fig=figure) is figure


def test_color_dim_of_all_layers_on_one_axes_is_refused() -> None:
    with pytest.raises(OptionError, match=r"one Axes was given for 3 layers\. Name a layer"):
        plotting.color_dim(made.run(n=20), ax=Figure().subplots())


@pytest.mark.parametrize("picture", [plotting.color_dim, plotting.plot_density])
def test_without_histograms_the_error_says_how_to_record_them(picture: Any) -> None:
    with pytest.raises(
        OptionError, match=r"no histogram of .* was recorded\. Record with `with_hist=True`"
    ):
        picture(made.run(n=20, hist=False))


def test_an_unknown_layer_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(SelectionError, match='no recorded layer is called "fc3"'):
        plotting.plot_layer_stats(made.run(n=20), "fc3")


ODD = ("größe_слой", "日本語", "fire🔥", "a$b$", "<b>", "two\nlines", "_hidden", "n" * 120, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_layers_of_any_name_are_drawn_without_a_warning(name: str) -> None:
    picture = PICTURES[name](made.run([(odd, "Linear") for odd in ODD], n=6))

    assert plotting.png(picture, dpi=30).startswith(b"\x89PNG")


def test_names_of_layers_are_no_formulas_and_on_one_line() -> None:
    ax = plotting.plot_dead(made.record([(odd, "Linear") for odd in ODD], 6))

    names = [text.get_text() for text in ax.get_legend().get_texts()]
    shown = ["größe_слой", "日本語", "fire🔥", r"a\$b\$", "<b>", "two lines"]
    assert names[:6] == [f"{name} Linear" for name in shown]


def test_what_holds_no_record_is_refused() -> None:
    with pytest.raises(ArgumentError, match="int was given, and it holds no records"):
        plotting.plot_run(3)


def test_a_missing_kind_names_its_recorder() -> None:
    with pytest.raises(OptionError, match=r"kind param is needed; .*Train with ParamStats\(\)"):
        plotting.plot_updates(made.record(made.small_names(), 5))


@pytest.mark.parametrize(("n_layers", "n_pages"), [(5, 1), (13, 1), (24, 1), (25, 2), (148, 7)])
def test_the_pages_of_color_dim_drop_no_layer(n_layers: int, n_pages: int) -> None:
    record = made.record([(f"block.{i}", "Linear") for i in range(n_layers)], 3)

    pages = [plotting.color_dim(record, page=page + 1) for page in range(n_pages)]

    names = [name.split(" ")[0] for page in pages for name in names_of_tiles(page)]
    assert names == list(record.names)
    with pytest.raises(OptionError, match=rf"page={n_pages + 1}.*of {n_layers} layers"):
        plotting.color_dim(record, page=n_pages + 1)


def test_a_page_of_one_layer_is_refused() -> None:
    with pytest.raises(OptionError, match="page=2 of one layer: leave out `layer`, or `page`"):
        plotting.color_dim(made.run(n=20), 0, page=2)


def names_of_tiles(figure: Any) -> list[str]:
    """Of a page of `color_dim`; a page of one layer has its name in the title."""
    ax = figure.axes[0]
    return [t.get_text() for t in ax.texts] or [ax.get_title(loc="left").partition(": ")[2]]


def test_a_page_of_color_dim_says_which_layers_it_shows() -> None:
    record = made.record([(f"block.{i}", "Linear") for i in range(148)], 3)

    title = plotting.color_dim(record, page=2).axes[0].get_title(loc="left")

    assert title.startswith("Spread of activations, layers 25–48 of 148, in order")


def test_plot_run_has_a_panel_and_a_bar_for_each_record_and_steps_in_optimizer_steps() -> None:
    figure = plotting.plot_run(made.run(n=30, every=10))

    panels = figure.axes[:3]
    assert len([ax for ax in figure.axes if ax.get_ylabel().startswith("log10")]) == 3
    assert panels[-1].get_xlabel() == "optimizer step"
    assert panels[0].get_xlim() == (0, 300)
    assert [t.get_text() for t in panels[0].get_yticklabels()] == [
        "fc1 Linear",
        "act ReLU",
        "fc2 Linear",
    ]
    assert panels[0].yaxis_inverted()  # the input on top


def test_plot_run_marks_findings_by_number_and_says_what_they_are() -> None:
    finding = SimpleNamespace(rule="dead", severity="error", layers=("act",), steps=(10, 19))

    figure = plotting.plot_run(made.run(n=30), findings=[finding])

    assert "1" in [text.get_text() for text in figure.axes[0].texts]
    assert figure.legends[0].get_texts()[0].get_text() == "1  error: dead · act ReLU"


def numbers(figure: Any) -> list[tuple[str, float, float]]:
    figure.canvas.draw()
    boxes = [(t.get_text(), t.get_window_extent()) for t in figure.axes[0].texts]
    return [(text, (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2) for text, box in boxes]


def test_what_colours_mean_and_what_was_found_stand_apart() -> None:
    layers = tuple(name for name, _ in made.resnet_names())
    finding = SimpleNamespace(rule="dead", severity="error", layers=layers, steps=(10, 19))
    run = made.dead(made.run(made.resnet_names(), 40))
    broken = made.with_values(run.gradients, "nonfinite", (slice(3), slice(9)), 1.0)

    figure = plotting.plot_run(replace(run, gradients=broken), findings=[finding])

    figure.draw_without_rendering()
    words, colours = (legend.get_window_extent() for legend in figure.legends)
    panels = [ax.get_tightbbox() for ax in figure.axes]
    assert words.y1 <= min(panel.y0 for panel in panels)
    assert colours.y0 >= max(panel.y1 for panel in panels)
    assert min(words.x0, colours.x0) >= 0
    assert max(words.x1, colours.x1) <= figure.bbox.x1


def test_numbers_of_findings_stand_side_by_side_inside_their_panel() -> None:
    both = [
        SimpleNamespace(rule=r, severity="error", layers=("act",), steps=(10, 19)) for r in "ab"
    ]

    figure = plotting.plot_run(made.run(n=30), findings=both)

    (one, x1, y1), (two, x2, y2) = numbers(figure)
    assert (one, two) == ("1", "2")
    assert x2 - x1 > 12
    assert y1 == pytest.approx(y2, abs=2)
    assert x1 > figure.axes[0].get_window_extent().x0


def test_in_a_deep_net_one_box_holds_layers_that_lie_close_together() -> None:
    layers = made.transformer_names()
    each = tuple(name for name, _ in layers if name.endswith("mlp.act"))
    ends = ("transformer.wte", "lm_head")
    found = [
        SimpleNamespace(rule="dead", severity="error", layers=x, steps=()) for x in (each, ends)
    ]

    figure = plotting.plot_run(made.run(layers, n=30), findings=found)

    assert [text for text, _, _ in numbers(figure)] == ["1", "2", "2"]


def test_a_finding_of_many_layers_names_the_first_and_counts_the_rest() -> None:
    each = tuple(name for name, _ in made.transformer_names())
    found = SimpleNamespace(rule="dead", severity="error", layers=each, steps=())

    figure = plotting.plot_run(made.run(made.transformer_names(), n=5), findings=[found])

    text = figure.legends[0].get_texts()[0].get_text()
    assert text.startswith("1  error: dead · transformer.wte Embedding, transformer.wpe Embedding")
    assert text.endswith(" and 289 more")


@pytest.mark.parametrize("kind", ["activation", "gradient", "param"])
def test_grey_and_black_say_what_they_mean_of_each_kind(kind: str) -> None:
    layers = made.small_names()
    record = made.params(layers, 9) if kind == "param" else made.record(layers, 9, kind)
    shown = "update_ratio" if kind == "param" else "rms"
    record = made.with_values(made.with_values(record, shown, 0, np.nan), shown, 1, 0.0)

    figure = plotting.plot_run(record, findings=[])

    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert (
        said
        == {
            "activation": ["did not run", "all zero"],
            "gradient": ["no gradient", "all zero"],
            "param": ["not recorded", "did not move"],
        }[kind]
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", [300, 1500])
def test_one_broken_layer_of_many_is_seen_on_a_screen(n: int) -> None:
    record = made.record([(f"fc{i}", "Linear") for i in range(n)], 5, hist=False)
    broken = made.with_values(record, "nonfinite", (137, 2), 1.0)

    pictures = [plotting.png(plotting.plot_run(r, findings=[])) for r in (record, broken)]

    whole, marked = (plt.imread(BytesIO(picture))[:, :850] for picture in pictures)
    alarm = np.array(mpl.colors.to_rgb("#d55e00"))
    seen = [np.abs(image[..., :3] - alarm).max(axis=-1) < 0.02 for image in (whole, marked)]
    assert not seen[0].any()
    assert seen[1].any()


def test_further_outputs_of_a_module_stand_next_to_its_first() -> None:
    names = ("lstm", "head", "lstm[1][0]", "lstm[1][1]")
    record = made.record([(name, "Linear") for name in names], 8)
    record = replace(record, meta={**record.meta, "dtype": list(names)})

    shown = by_module(record)

    assert shown.names == ("lstm", "lstm[1][0]", "lstm[1][1]", "head")
    assert shown.meta["dtype"] == list(shown.names)
    for name in names:
        assert np.array_equal(shown.value("mean", name), record.value("mean", name))
        assert np.array_equal(shown.hist[shown.layer(name)], record.hist[record.layer(name)])
    ticks = plotting.plot_depth(record).axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == list(shown.labels)
    assert "lstm[1][0]" in plotting.color_dim(record, 2).get_title(loc="left")  # as recorded
    assert "lstm[1][0]" in plotting.plot_layer_stats(record, 2).get_suptitle()


def test_the_last_layer_has_a_name() -> None:
    names, types = zip(*made.transformer_names(), strict=True)

    assert labels.layer_ticks(names, types, 16)[-1] == (len(names) - 1, "lm_head Linear")


def test_plot_run_diagnoses_when_no_findings_are_given() -> None:
    figure = plotting.plot_run(made.exploding(made.run(n=300)))

    shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert any("non_finite" in text for text in shown)
    assert "NaN or Inf" in shown


def test_a_spike_survives_the_merging_of_columns() -> None:
    table = np.zeros((2, 2000))
    table[1, 777] = 9.0
    table[0, :3] = np.nan

    pooled, edges, merged = arrays.pool(table, np.arange(2001.0), 800)

    assert merged == 3
    assert pooled.shape == (2, 667)
    assert len(edges) == 668
    assert pooled[1].max() == 9.0
    assert np.isnan(pooled[0, 0])


def test_plot_updates_leaves_vectors_out_and_names_matrices_that_never_moved() -> None:
    record = made.with_values(made.params(made.small_names(), 50), "update_ratio", 0, 0.0)

    ax = plotting.plot_updates(record)

    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["fc2.weight Linear"]
    assert [text.get_text() for text in ax.texts] == ["never moved: fc1.weight Linear"]
    assert -3.0 in [line.get_ydata()[0] for line in ax.lines]


def test_plot_updates_shows_the_dashed_line_whatever_the_values() -> None:
    record = made.params(made.small_names(), 300)
    table = np.full_like(record.value("update_ratio"), 0.3)

    ax = plotting.plot_updates(replace(record, values={**record.values, "update_ratio": table}))

    low, high = ax.get_ylim()
    assert low < -3 < np.log10(0.3) < high


def test_plot_updates_shows_the_fastest_matrix_whole() -> None:
    record = made.params(made.small_names(), 300)
    table = record.value("update_ratio").copy()
    table[0, 0] = 100.0  # one value in 1,200

    ax = plotting.plot_updates(replace(record, values={**record.values, "update_ratio": table}))

    assert ax.get_ylim()[1] > 2


def test_plot_updates_of_a_run_that_moved_nothing_has_its_steps() -> None:
    record = made.params(made.small_names(), 50)
    still = {**record.values, "update_ratio": np.zeros_like(record.value("update_ratio"))}

    ax = plotting.plot_updates(replace(record, values=still))

    low, high = ax.get_xlim()
    assert low < 0 < 49 < high
    assert "no finite value" in [text.get_text() for text in ax.texts]


def drawn(line: Any) -> int:
    """How many values of a line are seen: as part of a stroke, or as a marker."""
    fine = np.isfinite(line.get_ydata())
    beside = (fine[1:] & fine[:-1]).sum()
    every = line.get_markevery()
    marked = fine.sum() if every is None else len(every)
    return int(beside + (marked if line.get_marker() not in ("None", "") else 0))


@pytest.mark.parametrize("n", [10, 40])
def test_a_layer_that_runs_every_other_step_is_seen(n: int) -> None:
    run = made.run(n=n)
    assert run.activations is not None
    record = run.activations
    for name in record.values:
        record = made.with_values(record, name, (0, slice(None, None, 2)), np.nan)

    for figure in (plotting.plot_stats(record), plotting.plot_layer_stats(record, 0)):
        assert all(drawn(ax.lines[0]) >= n // 2 for ax in figure.axes[:2])


@pytest.mark.parametrize(("layers", "behind"), [(3, True), (20, False)])
def test_lines_of_a_long_run_are_smoothed_and_few_are_seen_as_they_are_too(
    layers: int, behind: bool
) -> None:
    record = made.record([(f"fc{i}", "Linear") for i in range(layers)], 900)

    ax = plotting.plot_stats(record).axes[0]

    raw, smooth = record.value("mean", 0), arrays.smoothed(record.value("mean", 0), 9)
    assert np.array_equal(ax.lines[0].get_ydata(), raw if behind else smooth)
    assert np.array_equal(ax.lines[layers if behind else 0].get_ydata(), smooth)
    assert ax.get_title(loc="left").endswith("smoothed over 9 records")


def test_a_recorder_without_a_step_is_not_reported_as_missing() -> None:
    figure = plotting.plot_depth(made.run(n=0))

    assert [ax.texts[0].get_text() for ax in figure.axes] == ["nothing was recorded"] * 2


@pytest.mark.parametrize("ground", [0.0, 1.0])
def test_grey_words_are_legible_on_white_and_on_black(ground: float) -> None:
    rgb = np.array(mpl.colors.to_rgb(figures.FAINT))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    light, dark = sorted([float(linear @ [0.2126, 0.7152, 0.0722]), ground], reverse=True)

    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_in_a_dark_style_everything_is_seen() -> None:
    finding = SimpleNamespace(rule="dead", severity="error", layers=("act",), steps=(10, 19))

    with plt.style.context("dark_background"):
        updates = plotting.plot_updates(made.params(made.small_names(), 50))
        whole = plotting.plot_run(made.run(n=30), findings=[finding])
        picture = plotting.png(updates, dpi=30)

    colours = [np.mean(mpl.colors.to_rgb(line.get_color())) for line in updates.lines]
    assert min(colours) > 0.25
    assert whole.axes[0].texts[0].get_color() == figures.BLACK  # its circle is white
    pixels = plt.imread(BytesIO(picture))
    assert pixels[0, 0, :3].max() == 0


def test_plot_dead_falls_back_to_near_zero_and_says_so() -> None:
    healthy, dead = made.run(n=20), made.dead(made.run(n=20))

    assert "Values near zero" in plotting.plot_dead(healthy).get_title(loc="left")
    assert "dead" in plotting.plot_dead(dead).get_title(loc="left")
    assert plotting.plot_dead(dead).get_ylim() == (-2, 102)


def test_the_depth_profile_draws_chosen_steps() -> None:
    figure = plotting.plot_depth(made.run(n=300), [0, 150])

    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()][1:] == ["0", "150"]
    assert figure.axes[0].get_yscale() == "log"


def test_a_depth_profile_of_a_deep_net_that_diverged_marks_every_layer() -> None:
    figure = plotting.plot_depth(blown_up(deep(24), np.nan, slice(12, None)))

    forward = figure.axes[0]
    crosses = [line for line in forward.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [len(line.get_xdata()) for line in crosses] == [64]
    assert "NaN or Inf" in forward.get_xlabel()


@pytest.mark.parametrize("values", [(1e300,), (1e-300,), (1e-310,), (1e-300, 1.0, 1e300)])
def test_values_at_the_ends_of_what_a_float_holds_are_drawn(values: tuple[float, ...]) -> None:
    run = made.run(n=30)
    assert run.activations is not None
    shape = run.activations.value("std").shape
    odd = {k: np.resize(values, shape) for k in run.activations.values}

    figure = plotting.plot_stats(replace(run.activations, values=odd))

    figure.canvas.draw()
    low, high = figure.axes[1].get_ylim()
    assert 0 < low < high < np.inf


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e308, -np.inf, np.inf, 5e-324])
@pytest.mark.parametrize("name", ["plot_stats", "plot_loss"])
def test_a_few_values_at_the_ends_among_usual_ones_are_drawn(name: str, value: float) -> None:
    run, few = made.run(n=40), np.arange(40) % 7 == 3
    assert run.activations is not None
    values = {k: np.where(few, value, table) for k, table in run.activations.values.items()}
    odd = replace(run.activations, values=values)

    picture = PICTURES[name](replace(run, activations=odd, losses=np.where(few, value, run.losses)))

    assert plotting.png(picture, dpi=30).startswith(b"\x89PNG")


def test_spikes_and_epochs_are_marked_in_the_gradient_norm_too() -> None:
    run = made.run(n=200, epoch=50)
    norms = np.ones(200) + 0.01 * np.sin(np.arange(200))
    norms[150] = 9.0

    loss, norm = plotting.plot_loss(replace(run, grad_norms=norms)).axes

    said = [text.get_text() for text in norm.get_legend().get_texts()]
    assert said[1:] == ["running median of 5 values", "1 far above the steps before"]
    dotted = [
        [x.get_xdata()[0] for x in ax.lines if x.get_linestyle() == ":"] for ax in (loss, norm)
    ]
    assert dotted[0] == dotted[1] == [0, 50, 100, 150]


@pytest.mark.parametrize(("first", "scale"), [(1e6, "symlog"), (3.0, "linear")])
def test_one_huge_loss_does_not_flatten_losses_below_zero(first: float, scale: str) -> None:
    losses = np.linspace(1, -1, 50)
    losses[0] = first

    ax = plotting.plot_loss(Run(losses=losses)).axes[0]

    assert ax.get_yscale() == scale
    if scale == "symlog":
        labels = [label.get_text() for label in ax.get_yticklabels()]
        assert labels[:2] == ["−1", "0"]
        assert labels[-1] == "1e+06"


def test_validation_alone_is_drawn_by_its_epochs() -> None:
    rows = [{"epoch": 0, "valid_loss": 1.0}, {"epoch": 1, "valid_loss": 0.5}]

    assert points_of(plotting.plot_loss(Run(valid=rows)).axes[0]) == [(0, 1), (1, 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["seaborn-v0_8", "ggplot", "classic"])
def test_other_styles_draw_without_a_warning_or_a_grid_on_heat_maps(style: str) -> None:
    run = made.run(n=9)

    with plt.style.context(style):
        for draw in (plotting.plot_run, plotting.plot_updates, plotting.color_dim):
            picture = draw(run)
            assert plotting.png(picture, dpi=30).startswith(b"\x89PNG")
            if draw is not plotting.plot_updates:
                lines = picture.axes[0].get_xgridlines()
                assert not any(line.get_visible() for line in lines)


@pytest.mark.parametrize("step", [-1, 300, 500])
def test_density_of_a_step_that_was_not_recorded_is_refused(step: int) -> None:
    with pytest.raises(OptionError, match=f"step {step} was not recorded: .* steps 0 to 299"):
        plotting.plot_density(made.run(n=30, every=10), step)


@pytest.mark.parametrize("step", [999, -1, 2.5, "last", True])
def test_a_depth_profile_of_a_step_that_was_not_recorded_is_refused(step: Any) -> None:
    with pytest.raises(OptionError, match=r"step .* was not recorded: .*the steps 0 to .*Use one"):
        plotting.plot_depth(made.run(n=30), steps=[0, step])


@pytest.mark.parametrize("steps", [[], 7, "0", ()])
def test_a_depth_profile_of_no_list_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(OptionError, match=r"steps=.*: give a list of .*\[0, 100\], or None"):
        plotting.plot_depth(made.run(n=30), steps=steps)


def test_density_takes_the_nearest_record_and_says_which() -> None:
    ax = plotting.plot_density(made.run(n=30, every=10), 104)

    assert ax.get_title(loc="left").endswith("at step 100")


def test_density_shows_the_last_step_with_values_after_a_run_diverged() -> None:
    run = made.run(n=30)
    assert run.activations is not None
    assert run.activations.hist is not None
    hist = run.activations.hist.copy()
    hist[:, :, 20:] = 0
    hist[0, :, 25] = 7  # of one layer alone: it says little

    ax = plotting.plot_density(replace(run.activations, hist=hist))

    assert ax.get_title(loc="left").endswith("at step 19")


def test_no_colour_of_updates_is_taken_for_nan() -> None:
    from matplotlib.colors import rgb_to_hsv, to_rgb

    figure = plotting.plot_run(made.run(n=30), findings=[])
    shades = figure.axes[2].collections[0].cmap(np.linspace(0, 1, 64))[:, :3]

    hue, strength, light = rgb_to_hsv(shades).T
    vivid = (strength > 0.25) & (light > 0.3)
    assert np.abs(hue[vivid] - rgb_to_hsv(to_rgb("#d55e00"))[0]).min() > 0.1
    assert shades.sum(axis=1).min() > 0.6  # black has a meaning of its own


@pytest.mark.parametrize("skip", [-1, 30, 1.5, True])
def test_leaving_out_all_of_the_losses_is_refused(skip: Any) -> None:
    with pytest.raises(
        OptionError, match=r"skip_start=.*steps to leave out .*Give a whole number from 0 to 29"
    ):
        plotting.plot_loss(made.run(n=30), skip)


def test_loss_shows_validation_at_the_ends_of_epochs() -> None:
    figure = plotting.plot_loss(made.run(n=300, epoch=100))

    valid = next(x for x in figure.axes[0].lines if x.get_label() == "validation loss")
    assert list(valid.get_xdata()) == [99, 199, 299]


def points_of(ax: Any) -> list[tuple[float, float]]:
    line = next(x for x in ax.lines if x.get_label() == "validation loss")
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_validation_after_a_second_fit_is_drawn_in_the_second_fit() -> None:
    run = made.run(n=40, epoch=10)
    again = np.arange(40) // 10 % 2  # epochs 0, 1 and again 0, 1
    assert run.activations is not None
    record = replace(run.activations, epochs=again, iters=np.arange(40) % 20)
    rows = [{"epoch": int(e), "valid_loss": float(i)} for i, e in enumerate((0, 1, 0, 1))]

    ax = plotting.plot_loss(replace(run, activations=record, valid=rows)).axes[0]

    assert points_of(ax) == [(9, 0), (19, 1), (29, 2), (39, 3)]


def test_validation_is_drawn_at_the_step_of_its_row() -> None:
    rows = [{"epoch": 0, "step": 3, "valid_loss": 1.0}, {"epoch": 1, "valid_loss": np.float32(2)}]

    ax = plotting.plot_loss(Run(losses=np.ones(40), valid=rows)).axes[0]

    assert points_of(ax) == [(3, 1), (39, 2)]


def test_a_validation_loss_far_above_the_training_loss_does_not_flatten_it() -> None:
    rows = [{"epoch": 0, "valid_loss": 5e5}]

    assert (
        plotting.plot_loss(Run(losses=np.full(40, 2.3), valid=rows)).axes[0].get_yscale() == "log"
    )


def test_a_validation_loss_of_nan_is_marked() -> None:
    rows = [{"epoch": i, "valid_loss": loss} for i, loss in enumerate((1.0, np.nan, np.inf))]

    ax = plotting.plot_loss(Run(losses=np.ones(30), valid=rows)).axes[0]

    assert points_of(ax) == [(9, 1)]
    (marked,) = [line for line in ax.lines if line.get_label() == "validation loss: NaN or Inf"]
    assert list(marked.get_xdata()) == [19, 29]


def test_another_fit_begins_an_epoch_of_its_own() -> None:
    record = replace(made.record(made.small_names(), 20), iters=np.arange(20) % 10)

    assert arrays.epoch_starts(record) == [(0, 0), (10, 0)]


def test_losses_known_every_tenth_step_only_are_not_called_nan() -> None:
    losses = np.where(np.arange(300) % 10 == 0, 1.0, np.nan)

    assert not arrays.broken_series(losses).any()
    losses[200:] = np.nan
    assert arrays.broken_series(losses)[200:].all()


def test_the_global_gradient_norm_comes_from_the_parameters_where_it_was_not_recorded() -> None:
    run = replace(made.run(n=10), grad_norms=None)

    steps, norms = arrays.gradient_norms(run)

    assert list(steps) == list(range(10))
    assert norms == pytest.approx(np.full(10, 0.1 * 2))  # four parameters of norm 0.1


def test_small_values_have_their_power_in_each_number_and_not_above_the_epochs() -> None:
    record = made.record(made.small_names(), 300, "gradient")
    small = made.with_values(record, "mean", slice(None), 1e-5 * record.value("mean"))

    figure = plotting.plot_stats(small)

    figure.draw_without_rendering()
    assert figure.axes[0].yaxis.get_offset_text().get_text() == ""
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert any(text.endswith("e−09") for text in labels)


def test_no_global_state_of_matplotlib_changes() -> None:
    before = dict(mpl.rcParams)

    for picture in PICTURES.values():
        picture(made.run(n=40))

    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []


def test_in_a_notebook_a_new_picture_is_a_figure_of_pyplot_and_saving_closes_it(
    tmp_path: Any,
) -> None:
    figures._offscreen.set(False)  # until the fixture ends
    ax = plotting.plot_dead(made.run(n=20))
    assert plt.get_fignums() == [ax.figure.number]

    path = plotting.save(ax, tmp_path / "dead.png")

    assert path.read_bytes().startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_outside_of_a_notebook_showing_a_figure_leaves_it_open() -> None:
    figures._offscreen.set(False)  # until the fixture ends
    figure = plotting.plot_stats(made.run(n=20))

    with pytest.raises(NotImplementedError):  # IPython goes on with its own formats
        figure._ipython_display_()

    assert plt.get_fignums() == [figure.number]
    plt.close(figure)


WRONG: dict[str, Callable[[Run], Any]] = {
    "no histograms": lambda r: plotting.plot_density(replace(r.activations, hist=None)),
    "no such step": lambda r: plotting.plot_density(r, 99),
    "no such steps": lambda r: plotting.plot_depth(r, [99]),
    "no such layer": lambda r: plotting.color_dim(r, "fc9"),
    "no such layer either": lambda r: plotting.plot_layer_stats(r, "fc9"),
    "no finding": lambda r: plotting.plot_run(r, findings=[3]),
    "no step left": lambda r: plotting.plot_loss(r, 99),
    "no such record": lambda r: plotting.plot_updates(r.activations),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_picture_leaves_no_empty_figure(what: str) -> None:
    figures._offscreen.set(False)  # until the fixture ends

    with pytest.raises(HookkitError):
        WRONG[what](made.run(n=20))

    assert plt.get_fignums() == []


@pytest.mark.parametrize("part", ["mlp", "input_layernorm", "attention.output.q_proj.lora_A"])
@pytest.mark.parametrize("width", [12, 20, 24, 28])
def test_short_names_of_alike_layers_differ(part: str, width: int) -> None:
    names = [f"base_model.model.decoder.layers.{i}.{part}" for i in range(12)]

    short = [labels.shorten(name, width) for name in names]

    assert len(set(short)) == 12
    assert max(map(len, short)) <= width
    assert all(
        name.endswith(text.rpartition("…")[2]) for name, text in zip(names, short, strict=True)
    )


@pytest.mark.parametrize("most", [4, 8, 16])
@pytest.mark.parametrize("names", [made.small_names, made.resnet_names, made.transformer_names])
def test_labels_of_layers_are_few_short_and_apart(names: Any, most: int) -> None:
    layers = names()

    ticks = labels.layer_ticks(*zip(*layers, strict=True), most)

    places = [i for i, _ in ticks]
    assert 1 < len(ticks) <= max(most, 3) + 1
    assert all(len(text) <= 34 for _, text in ticks)
    assert len(layers) <= most or min(np.diff(places)) >= len(layers) / most


def test_blocks_of_a_deep_net_are_labelled_at_regular_numbers_and_their_prefix_once() -> None:
    names, types = zip(*made.transformer_names(), strict=True)

    ticks = labels.layer_ticks(names, types, 20)

    blocks = [f"…h.{i}" for i in range(2, 23, 2)]
    expected = ["transformer.wte Embedding", *blocks, "lm_head Linear"]
    assert [text for _, text in ticks] == expected
    assert [names[row].split(".")[2] for row, _ in ticks[1:-1]] == [b[3:] for b in blocks]


def test_layers_of_odd_numbers_are_labelled_at_regular_numbers_too() -> None:
    names = [f"{i}" for i in range(1, 150, 2)]

    ticks = labels.layer_ticks(names, ["ReLU"] * 75, 16)

    assert [text for _, text in ticks][:4] == ["1 ReLU", "11 ReLU", "21 ReLU", "31 ReLU"]
    assert len(ticks) == 15


@pytest.mark.parametrize("most", [16, 20, 24])
def test_stages_of_few_blocks_are_labelled_by_block(most: int) -> None:
    names, types = zip(*made.resnet_names(), strict=True)

    ticks = [text for _, text in labels.layer_ticks(names, types, most)]

    assert len(ticks) >= 8
    assert {"layer2.0", "layer3.0", "layer4.0"} <= {*ticks}


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (np.linspace(0, 10, 41), ["0", "2", "4", "6", "8", "10"]),
        (made.EDGES, ["< −1e+04", "−1", "−0.0001", "0", "0.0001", "1", "> 1e+04"]),
    ],
)
def test_bins_are_labelled_with_their_true_values(edges: Any, expected: list[str]) -> None:
    places, labels = bins.bin_ticks(edges, 0, len(edges) - 2)

    assert labels == expected
    assert (np.diff(places) > 0).all()


@pytest.mark.parametrize("ends", [(-9.0, 40.0), (-2000.0, 0.6), (-0.3, 0.3)])
def test_negative_and_positive_values_are_labelled_at_the_same_sizes(
    ends: tuple[float, float],
) -> None:
    edges = LogBins().edges
    first, last = np.searchsorted(edges, ends)

    _, labels = bins.bin_ticks(edges, int(first), int(last), 7)

    negative, positive = (
        {x.strip("−") for x in labels if (x[0] == "−") == s} for s in (True, False)
    )
    assert "0" in labels
    assert negative
    assert len(positive) > 1
    assert negative <= positive or positive - {"0"} <= negative


def test_both_ends_of_a_spread_have_a_label() -> None:
    edges = LogBins().edges
    first, last = np.searchsorted(edges, (-6, 12))

    _, labels = bins.bin_ticks(edges, int(first), int(last), 5)

    assert labels == ["−1", "0", "1"]


def test_where_every_decade_has_a_label_the_largest_has_too() -> None:
    edges = LogBins().edges
    first, last = np.searchsorted(edges, (-4, 0.16))

    _, labels = bins.bin_ticks(edges, int(first), int(last), 9)

    assert labels == ["−1", "−0.1", "−0.01", "−0.001", "0", "0.001", "0.01", "0.1"]


@pytest.mark.parametrize("ends", [(0.2, 0.4), (0.5, 0.8), (-3e-3, -2e-3), (300.0, 700.0)])
def test_values_close_together_have_labels_too(ends: tuple[float, float]) -> None:
    edges = LogBins().edges
    first, last = np.searchsorted(edges, ends)

    places, labels = bins.bin_ticks(edges, int(first) - 1, int(last), 7)

    assert len(labels) >= 2
    values = [float(label.replace("−", "-")) for label in labels]
    assert places == pytest.approx(bins.axis_places(values, edges))


def test_bins_that_hold_all_beyond_the_range_say_so() -> None:
    edges = np.concatenate(([-np.inf], np.linspace(0, 10, 41), [np.inf]))

    places, labels = bins.bin_ticks(edges, 0, 41)

    assert (labels[0], labels[-1]) == ("< 0", "> 10")
    assert (places[0], places[-1]) == pytest.approx((1 - 40 / 15 / 2, 41 + 40 / 15 / 2))
    assert "0" not in labels  # it would be written over its neighbour
    assert bins.bin_ticks(edges, 1, 40)[1][0] == "0"


def test_a_small_axes_has_few_labels_and_its_names_inside() -> None:
    panels = Figure(figsize=(9, 6)).subplots(2, 2)

    for draw, ax in zip((plotting.plot_density, plotting.plot_updates), panels[0], strict=True):
        draw(made.run(n=20), ax=ax)

    full = plotting.plot_density(made.run(n=20))
    assert len(panels[0, 0].get_xticks()) < 7 < len(full.get_xticks())
    for ax in panels[0]:
        room, names = ax.get_window_extent(), ax.get_legend().get_window_extent()
        assert room.x0 <= names.x0 <= names.x1 <= room.x1


def test_labels_of_small_values_keep_clear_of_zero() -> None:
    edges = LogBins(-40, 8, 1).edges

    places, labels = bins.bin_ticks(edges, 0, len(edges) - 2, 13)

    assert "0" in labels
    assert min(np.diff(places)) > 0.5 * np.ptp(bins.edge_places(edges)) / 13


PLAIN_NET = [(str(i), kind) for i, kind in enumerate(["Conv2d", "ReLU", "Linear"])]


@pytest.mark.parametrize("name", [n for n in PICTURES if n != "plot_loss"])
def test_every_label_of_a_layer_has_its_type(name: str) -> None:
    picture = PICTURES[name](made.run(PLAIN_NET, n=30))

    figure = picture if isinstance(picture, Figure) else picture.figure
    shown = "\n".join(texts(figure))
    assert ("0.weight Conv2d" if name == "plot_updates" else "0 Conv2d") in shown


def test_a_colour_bar_of_many_layers_has_their_types() -> None:
    layers = [(str(i), "Linear") for i in range(14)]

    figure = plotting.plot_stats(made.record(layers, 9))

    labels = [t.get_text() for t in figure.axes[-1].get_yticklabels()]
    assert labels[:2] == ["0 Linear", "1 Linear"]


def test_a_long_name_leaves_room_for_its_type() -> None:
    name, kind = "model.decoder.layers.11.self_attn.q_proj", "ColumnParallelLinearWithLora"

    shown = labels.label(name, kind, 34)

    assert len(shown) <= 34
    assert shown.startswith("…")
    assert "ora" in shown


def test_nothing_is_smoothed_to_nothing() -> None:
    assert len(arrays.smoothed(np.zeros(0), 5)) == 0


def test_smoothing_does_not_lag_and_steps_over_nan() -> None:
    ramp = np.arange(100.0)
    ramp[50] = np.nan

    smooth = arrays.smoothed(ramp, 5)

    assert smooth[20] == pytest.approx(20.0)
    assert np.isnan(smooth[50])
    assert smooth[51] == pytest.approx(np.nanmean(ramp[49:54]))


NAMES = ("_conv_stem", "$p_a$", "open$x^{$", "_fc")
"""Names that matplotlib would leave out of a legend, or read as formulas."""


def named(names: tuple[str, ...]) -> Run:
    run = made.run([f"l{i}" for i in range(len(names))], n=20)

    def renamed(r: Record | None) -> Record | None:
        return None if r is None else replace(r, names=names[: len(r.names)])

    renaming = {"activations": renamed(run.activations), "gradients": renamed(run.gradients)}
    return replace(run, **renaming, params=None)


def texts(figure: Any) -> set[str]:
    return {t.get_text().replace("\\$", "$") for t in figure.findobj(mpl.text.Text)}


def test_names_stand_in_a_picture_as_they_are() -> None:
    figure = plotting.plot_stats(named(NAMES))

    assert plotting.png(figure)
    (legend,) = [ax.get_legend() for ax in figure.axes if ax.get_legend()]
    shown = [t.get_text().replace("\\$", "$") for t in legend.get_texts()]
    assert shown == [f"{name} {i}" for i, name in enumerate(NAMES)]


@pytest.mark.parametrize("name", ["plot_run", "color_dim", "plot_depth", "plot_layer_stats"])
def test_a_dollar_in_a_layers_name_is_no_formula(name: str) -> None:
    picture = PICTURES[name](named(("$p_a^{$", *NAMES[1:])))

    assert plotting.png(picture)
    assert any("$p_a^{$" in text for text in texts(picture))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", ["plot_run", "plot_stats", "plot_loss", "color_dim one layer"])
def test_few_steps_are_counted_in_whole_numbers(name: str, n: int) -> None:
    picture = PICTURES[name](made.run(n=n))

    ax = picture.figure.axes[0]
    picture.figure.draw_without_rendering()
    assert all(float(tick).is_integer() for tick in ax.xaxis.get_major_locator()())


def test_a_picture_is_saved_as_what_its_name_says(tmp_path: Path) -> None:
    ax = plotting.plot_updates(made.run(n=20))

    for name in ("run.pdf", "run.gif", "run.txt", "run"):
        with pytest.raises(OptionError, match=r'writes PNG files only\. Name it "run\.png"'):
            plotting.save(ax, tmp_path / name)
    assert not list(tmp_path.iterdir())

    assert plotting.save(ax, tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", PICTURES)
def test_what_cannot_be_drawn_on_is_refused(name: str) -> None:
    given = {"ax" if name in ON_AXES else "fig": "here"}

    with pytest.raises(ArgumentError, match=r"='here': expected an? .*, found a str\. Give"):
        PICTURES[name](made.run(n=20), **given)


def test_what_is_no_picture_is_not_saved() -> None:
    with pytest.raises(ArgumentError, match="expected a picture, found NoneType"):
        plotting.png(None)


@pytest.mark.parametrize("findings", ["dead", 3, [None]])
def test_what_is_no_finding_is_refused(findings: Any) -> None:
    with pytest.raises(ArgumentError, match=r"is no finding\. Give diagnose\(run\)"):
        plotting.plot_run(made.run(n=20), findings=findings)
