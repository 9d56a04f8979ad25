"""The picture of dead units: where it draws them, and in which layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import made
import numpy as np
import pytest
import torch
from torch import nn

from hookkit.records import Record
from hookkit.stats import ActivationStats
from hookkit.watching import watch

pytest.importorskip("matplotlib")
plotting = pytest.importorskip("hookkit.plotting")
arrays = pytest.importorskip("hookkit.plotting.arrays")


@pytest.fixture(autouse=True)
def _off_screen() -> Iterator[None]:
    with plotting.offscreen():
        yield


def trained(model: nn.Sequential, n: int, die_at: int | None, **options: Any) -> Record:
    """The record of a run in which half of the first layer's units are shut from `die_at` on."""
    opt, stats = torch.optim.SGD(model.parameters(), lr=0.0), ActivationStats(units=True, **options)
    torch.manual_seed(0)
    with watch(model, opt, stats):
        for step in range(n):
            if step == die_at:
                with torch.no_grad():
                    model[0].bias[:8] = -100
            model(torch.randn(16, 4)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return stats.record()


def net(kind: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), kind(), nn.Linear(16, 6), nn.Softmax(-1))


def solid(ax: Any) -> list[Any]:
    return [x for x in ax.lines if x.get_linestyle() == "-" and len(x.get_xdata()) > 1]


def named(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("paramless", [True, False])
@pytest.mark.parametrize("die_at", [40, 53, 60, 75])
def test_units_are_drawn_when_they_die(die_at: int, paramless: bool) -> None:
    record = trained(net(), 160, die_at, include_paramless=paramless, window=20)

    (line,) = solid(plotting.plot_dead(record))

    x, y = line.get_data()
    assert y[x < die_at].max() == 0
    assert y[x >= die_at].min() == 50
    assert np.diff(x).max() <= 20  # the last window's end
    assert x[np.argmax(y)] - die_at < 10  # half a window
    assert (x[0], x[-1]) == (0, 159)
    assert "dead for the next 10 to 20 records (solid)" in line.axes.get_title(loc="left")


def test_each_relu_is_drawn_once_and_layers_that_cannot_die_are_not() -> None:
    whole, few = (trained(net(), 60, 20, include_paramless=p) for p in (True, False))

    assert named(plotting.plot_dead(whole)) == ["1 ReLU"]
    assert named(plotting.plot_dead(few)) == ["0 Linear"]


def test_activations_that_cannot_die_may_be_dormant() -> None:
    ax = plotting.plot_dead(trained(net(nn.Tanh), 60, 20, include_paramless=True))

    assert ax.get_title(loc="left") == "Units that are dormant (dashed, rings)"
    assert named(ax) == ["1 Tanh"]


def test_without_a_relu_values_near_zero_are_drawn_and_the_title_says_why() -> None:
    ax = plotting.plot_dead(trained(net(nn.Tanh), 60, 20))

    head = ax.get_title(loc="left")
    assert head.startswith("Values near zero (|x| ≤ 0.05); no layer is known to end in a ReLU")


def test_a_layer_has_one_colour_for_its_dead_and_its_dormant_units() -> None:
    run = made.dead(made.run(made.resnet_names(), 40))

    ax = plotting.plot_dead(run)

    both = [x for x in ax.lines if x.get_linestyle() in ("-", "--") and len(x.get_xdata()) > 1]
    n = len(both) // 2
    assert n == 13
    assert [str(x.get_color()) for x in both[:n]] == [str(x.get_color()) for x in both[n:]]


def test_of_layers_with_equal_shares_the_key_says_which_line_is_seen() -> None:
    run = made.run([(f"{i}", "ReLU") for i in range(3)], 40)
    table = np.broadcast_to(np.array([[0.5], [0.25], [0.5]]), (3, 40))
    assert run.activations is not None
    values = {**run.activations.values, "dead": table, "dormant": table}

    ax = plotting.plot_dead(replace(run.activations, values=values, meta={"window": 10}))

    assert named(ax) == ["0 ReLU = 2 ReLU", "1 ReLU", "2 ReLU"]
    assert {x.get_marker() for x in ax.lines if x.get_linestyle() == "--"} == {"o"}


def test_what_was_judged_over_nan_is_not_drawn() -> None:
    record = trained(net(), 160, 40, include_paramless=True, window=20)
    broken = made.with_values(record, "nonfinite", (slice(None), slice(100, None)), 1.0)
    broken = made.with_values(broken, "dead", (slice(None), slice(100, None)), 0.0)

    (line,) = solid(plotting.plot_dead(broken))

    x, y = line.get_data()
    assert x[-1] == 99
    assert y[-1] == 50


@pytest.mark.parametrize("span", [1, 4, 16])
def test_windows_of_merged_records_begin_where_they_were_judged_from(span: int) -> None:
    n = 320 // span
    record = made.record(made.small_names(), n, every=span)
    record = replace(record, spans=np.full(n, span), meta={"window": 20})

    begin, end = arrays.judged_windows(record, [0, 1, 2])

    first, last = record.steps[begin], record.steps[end] + span - 1
    assert (np.diff(begin) > 0).all()
    assert last[-1] == 319
    assert (last - first).max() < 20 + 2 * span


def test_a_run_shorter_than_a_window_shows_what_is_dead_throughout() -> None:
    record = trained(net(), 15, 0, include_paramless=True)

    (line,) = solid(plotting.plot_dead(record))

    assert line.get_xydata().tolist() == [[0, 50], [14, 50]]
