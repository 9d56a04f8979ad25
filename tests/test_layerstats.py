"""Reading what layers did: short where it is shown, and nothing asked for is passed over."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.errors import HookkitWarning, OptionError, SelectionError
from hookkit.stats import ActivationStats, GradientStats
from hookkit.watching import watch


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


def test_statistics_are_shown_in_one_line(recorded: Any) -> None:
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    stats = recorded.activation_stats.stats

    assert repr(stats).startswith("StatsList(3 records, each 2 layers × count mean std rms ")
    assert repr(stats[1]).startswith("BatchStats(step 1, epoch 0: 2 layers × count mean std rms ")
    assert pretty(stats) == repr(stats)
    assert pretty(stats[1]) == repr(stats[1])
    assert repr(ActivationStats().stats) == "StatsList(0 records)"


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


def test_a_size_asked_for_all_layers_is_kept(recorded: Any) -> None:
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


def test_units_of_a_layer_that_never_ran_are_told_to_be_unknown() -> None:
    model, stats = Experts(), ActivationStats(units=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, stats):
        model(torch.randn(4, 8)).sum().backward()
        opt.step()

    assert isinstance(stats.dead_units("used"), list)
    with pytest.warns(HookkitWarning, match=r'units of "idle" were asked for; .*it did not run'):
        assert stats.dead_units("idle") == []
