"""`LayerStats`: how recorded layers are read and shown."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.errors import HookkitWarning, OptionError, SelectionError
from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.training import watch


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


def test_statistics_read_as_fastais_and_as_fastai_v1s_tensor(recorded: Any) -> None:
    acts = recorded.activation_stats
    stats, record = acts.stats, acts.record()

    assert repr(acts) == "ActivationStats(2 layers × 3)"
    assert repr(stats) == "StatsList(3 records of 2 layers)"
    assert (len(stats), len(stats[0])) == (3, 2)
    assert {"mean", "std", "near_zero", "hist"} <= set(stats[0][0])
    assert list(stats.itemgot(1).itemgot("mean")) == record.value("mean", 1).tolist()
    assert [list(x) for x in acts.layer_stats(1)] == [list(x) for x in acts.layer_stats("2")]
    assert [len(x) for x in acts.layer_stats(1)] == [3, 3, 3]
    assert stats.tensor().shape == (2, 2, 3)
    assert stats.tensor()[1][1][2].item() == pytest.approx(stats[2][1]["std"])

    nothing = ActivationStats()
    assert len(nothing.stats) == 0
    assert nothing.tensor().shape == nothing.stats.tensor().shape == (2, 0, 0)


def test_a_histogram_is_bins_by_records(recorded: Any) -> None:
    stats = recorded.activation_stats

    hist = stats.hist("0")

    assert hist.shape == (len(stats.record().edges) - 1, 3)
    assert hist.expm1().sum(0).tolist() == pytest.approx([64] * 3, rel=1e-4)
    assert stats.hist(np.int64(-2)).equal(hist)


def test_what_was_not_recorded_raises_with_the_option_that_records_it(recorded: Any) -> None:
    pytest.importorskip("matplotlib")
    grads = recorded.gradient_stats

    for read in (grads.hist, grads.color_dim):
        with pytest.raises(OptionError, match="with_hist=True"):
            read(0)
    with pytest.raises(OptionError, match="units=True"):
        ActivationStats().dead_units(0)
    with pytest.raises(OptionError, match=r"GradientStats did not .*with ActivationStats\(units"):
        grads.dead_units(0)


@pytest.mark.parametrize("layer", [None, slice(0, 1), True, 2, "fc"])
@pytest.mark.parametrize("read", ["hist", "layer_stats", "plot_layer_stats", "dead_units"])
def test_a_layer_that_is_none_gets_the_names_that_there_are(
    recorded: Any, read: str, layer: Any
) -> None:
    if read == "plot_layer_stats":
        pytest.importorskip("matplotlib")
    with pytest.raises(SelectionError, match='"0", "2"'):
        getattr(recorded.activation_stats, read)(layer)


def test_pictures_are_drawn_in_the_size_and_on_the_axes_that_are_given(recorded: Any) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    stats, ax = recorded.activation_stats, plt.figure().subplots()

    assert stats.color_dim(0, ax=ax) is ax
    assert stats.color_dim(0).get_figure().get_size_inches().tolist() == [10, 5]
    assert stats.color_dim(figsize=(7, 6)).get_size_inches().tolist() == [7, 6]
    assert stats.plot_layer_stats("0") is not None
    with pytest.raises(OptionError, match="one Axes was given for 2 layers"):
        stats.color_dim(ax=ax)
    plt.close("all")
    with pytest.raises(SelectionError, match='no recorded layer is called "fc"'):
        stats.color_dim("fc")
    assert plt.get_fignums() == []  # no empty figure is left


def test_units_of_a_layer_that_never_ran_are_warned_about() -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "idle": nn.Linear(8, 4)})
    stats = ActivationStats(units=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, stats):
        model["used"](torch.randn(4, 8)).sum().backward()
        opt.step()

    with pytest.warns(HookkitWarning, match='dead units of "idle" cannot .*it did not run'):
        assert stats.dead_units("idle") == []


# --- reading changes nothing


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"every": 3}, {"with_hist": True}], ids=str)
def test_what_is_recorded_does_not_depend_on_who_reads(options: dict[str, Any]) -> None:
    read, unread = (read_each(n, options) for n in (1, 0))

    for a, b in zip(read, unread, strict=True):
        assert a.record() == b.record()


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


def test_a_parameter_that_moves_between_records_has_moved_though_somebody_looked_before() -> None:
    net, stats = nn.Linear(1, 1), ParamStats(every=10)
    opt = torch.optim.SGD([net.weight], lr=1.0)
    for p in net.parameters():
        nn.init.ones_(p)
    with watch(net, opt, stats):
        for step in range(4):
            loss = net(torch.ones(1, 1)).sum()
            if step:
                loss.backward()
            opt.step()
            if not step:
                assert stats.record().meta["moved"] == [False, False]
        assert stats.record().meta["moved"] == [True, False]
        copied = copy.deepcopy(stats)

    assert stats.record().meta["moved"] == copied.record().meta["moved"] == [True, False]


def test_a_layer_of_a_record_is_found_by_its_name(recorded: Any) -> None:
    stats, name = recorded.activation_stats.stats, recorded.activation_stats.names[1]

    assert stats[-1][name] is stats[-1][1]
    with pytest.raises(SelectionError, match=r"no layer 'fc'\. There are .*stats\[-1\]\[0"):
        stats[0]["fc"]
    with pytest.raises(SelectionError, match=r"There are none\. Write stats\[record\]"):
        stats[name]
    with pytest.raises(IndexError, match="and 99 is none of them"):
        stats[99]


def test_statistics_of_a_run_that_never_began_say_so() -> None:
    with pytest.raises(IndexError, match=r"Nothing was recorded: .*learn\.fit or inside `with wat"):
        watch(nn.Linear(2, 1), None, ActivationStats()).activation_stats.stats[0]
