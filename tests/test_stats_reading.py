"""`LayerStats`: how recorded layers are read and shown."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.errors import HookkitWarning, OptionError, SelectionError
from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import watch

THREE = ("mean", "std", "near_zero")


@pytest.fixture(scope="module")
def recorded() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, ActivationStats(with_hist=True, units=True), GradientStats()) as w:
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
            opt.step()
    return w


def test_statistics_are_shown_as_a_table_of_numbers(recorded: Any) -> None:
    stats = recorded.activation_stats.stats
    first, last = (stats[i]["2"] for i in (0, -1))

    title, head, *rows, rest = repr(stats).splitlines()
    assert title == "StatsList(3 records of 2 layers, steps 0–2, first → last)"
    assert head.split() == ["layer", "mean", "std", "near_zero"]
    assert [row.split()[:2] for row in rows] == [["0", "Linear"], ["2", "Linear"]]
    assert f"{first['mean']:.3g} → {last['mean']:.3g}" in rows[1]
    assert rest.startswith("also count rms min max zero nonfinite")

    title, _, *rows, rest = repr(stats[1]).splitlines()
    assert title == "BatchStats(2 layers, step 1, epoch 0)"
    assert rows[0].split() == ["0", "Linear", *(f"{stats[1][0][s]:.3g}" for s in THREE)]


def test_a_slice_is_shown_as_what_it_is(recorded: Any) -> None:
    stats = recorded.activation_stats.stats

    assert repr(stats[1:2]).startswith("StatsList(1 record of 2 layers, step 1, epoch 0)\n")
    assert repr(stats[0][1:]).splitlines()[2].startswith("2 Linear")
    assert repr(ActivationStats().stats) == "StatsList(0 records)"
    assert repr(stats[:0]) == "StatsList(0 records)"


@pytest.mark.parametrize("n_layers", [12, 13, 300])
def test_the_table_of_many_layers_is_bounded(n_layers: int) -> None:
    net = nn.Sequential(*(nn.Identity() for _ in range(n_layers - 1)), nn.Linear(1, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    stats = ActivationStats(include_paramless=True)
    with watch(net, opt, stats):
        net(torch.ones(2, 1)).sum().backward()
        opt.step()

    title, head, *rows, _ = repr(stats.stats).splitlines()

    assert len(rows) == min(13, n_layers)
    assert max(map(len, (title, head, *rows))) <= 100
    assert any(row.startswith("… ") for row in rows) == (n_layers > 12)
    assert rows[-1].startswith(f"{n_layers - 1} Linear")
    assert stats.stats._repr_html_().count("<tr>") == 1 + len(rows)


def test_layers_without_a_value_and_odd_names_are_shown() -> None:
    net = nn.ModuleDict({"<b>" + "n" * 60: nn.Linear(1, 1), "used": nn.Linear(1, 1)})
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    stats = ActivationStats()
    with watch(net, opt, stats, each_forward=True):
        for _ in range(2):
            net["used"](torch.ones(2, 1)).sum().backward()
            opt.step()

    text, html = repr(stats.stats), stats.stats._repr_html_()

    assert "– → –" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_notebooks_show_statistics_as_html_and_terminals_as_text(recorded: Any) -> None:
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    stats = recorded.activation_stats.stats

    assert pretty(stats) == repr(stats)
    assert pretty(stats[1]) == repr(stats[1])
    for shown in (stats, stats[1]):
        assert "<table" in shown._repr_html_()
    assert stats.itemgot(0)._repr_html_() is None
    assert stats[0]._ipython_key_completions_() == ["0", "2"]


def test_what_is_made_of_statistics_shows_its_values(recorded: Any) -> None:
    stats = recorded.activation_stats.stats

    means = stats.itemgot(0).itemgot("mean")

    assert [float(x) for x in repr(means).strip("[]").split(",")] == list(means)
    assert repr(stats[0].itemgot("count")) == "[64.0, 16.0]"


def test_some_layers_of_a_record_keep_their_names(recorded: Any) -> None:
    batch = recorded.activation_stats.stats[1]

    last = batch[1:]

    assert last["2"] is batch["2"]
    assert (last.names, last.step) == (("2",), 1)
    assert batch[[1]].names == ("2",)


def test_gradients_are_not_offered_units_that_they_have_not(recorded: Any) -> None:
    with pytest.raises(OptionError, match=r"GradientStats did not .*with ActivationStats\(units"):
        recorded.gradient_stats.dead_units(0)


def test_a_size_given_for_all_layers_is_kept(recorded: Any) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")

    figure = recorded.activation_stats.color_dim(figsize=(7, 6))

    assert figure.get_size_inches().tolist() == [7, 6]
    plt.close(figure)


def test_one_axes_for_all_layers_is_refused(recorded: Any) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()

    with pytest.raises(OptionError, match="one Axes was given for 2 layers"):
        recorded.activation_stats.color_dim(ax=figure.subplots())


def test_a_layer_that_is_unknown_leaves_no_empty_figure(recorded: Any) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    before = plt.get_fignums()

    with pytest.raises(SelectionError, match='no recorded layer is called "fc"'):
        recorded.activation_stats.color_dim("fc")

    assert plt.get_fignums() == before


class Experts(nn.Module):
    """The second of its two layers never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_units_of_a_layer_that_never_ran_are_warned_about() -> None:
    model, stats = Experts(), ActivationStats(units=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, stats):
        model(torch.randn(4, 8)).sum().backward()
        opt.step()

    assert isinstance(stats.dead_units("used"), list)
    with pytest.warns(HookkitWarning, match='dead units of "idle" cannot .*It did not run'):
        assert stats.dead_units("idle") == []


# --- reading changes nothing


@pytest.mark.parametrize("options", [{}, {"every": 3}, {"with_hist": True, "window": 6}], ids=str)
def test_what_is_recorded_does_not_depend_on_who_reads(options: dict[str, Any]) -> None:
    read, unread = (read_each(n, options) for n in (1, 0))

    for a, b in zip(read, unread, strict=True):
        assert a.record() == b.record()
    ours, others = (stats[0].accumulator for stats in (read, unread))
    for name in ("older", "newer"):  # sums in float32, whose last digits depend on their order
        assert all(
            torch.equal(getattr(x, name), getattr(y, name))
            for x, y in zip(ours.units, others.units, strict=True)
        )


def read_each(n: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Recorders of 70 steps of two batches, which were read `n` times after each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    every = {k: v for k, v in options.items() if k == "every"}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    acts = ActivationStats(units=True, **options)
    stats = acts, GradientStats(**every), ParamStats(**every)
    with watch(model, opt, *stats):
        for i in range(140):
            model(torch.randn(5, 8).exp()).square().mean().backward()
            if i % 2:
                opt.step()
                opt.zero_grad()
            for each in stats * n:
                each.record()
    return stats


@pytest.mark.parametrize("look", [False, True])
def test_a_parameter_that_comes_back_has_not_moved_because_somebody_looked(look: bool) -> None:
    net, stats = nn.Linear(1, 1, bias=False), ParamStats(every=3)
    nn.init.ones_(net.weight)
    with watch(net, torch.optim.SGD(net.parameters(), lr=1.0), stats) as w:
        for step, grad in enumerate((0.0, 1.0, -1.0, 0.0)):  # moves where it is not recorded
            net(torch.ones(1, 1)).sum().backward()
            net.weight.grad = torch.full((1, 1), grad)
            w.opt.step()  # type: ignore[union-attr]
            if look and step == 1:
                stats.record()

    assert stats.record().meta["moved"] == [False]
