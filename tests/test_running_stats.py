"""RunningStats merge calls, batches and steps exactly, in bounded memory, on any device."""

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.recorders import ActivationStats, GradientStats
from hookkit.recorders.bins import LogBins
from hookkit.recorders.running_stats import Options, RunningStats
from hookkit.recorders.unit_stats import WINDOW, channel_dim
from hookkit.training import watch

ALL = Options(bins=LogBins(), units=True)


@pytest.fixture(params=["numpy", "on a device"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU's tensors are read as there, or as those of a device without Triton."""
    if request.param != "numpy":
        monkeypatch.setattr(RunningStats, "_on_host", lambda self, x, *a: on_device(self, x, *a))
    return str(request.param)


def on_device(stats: RunningStats, x: Any, *a: Any) -> Any:
    return stats._on_device(torch.from_numpy(np.ascontiguousarray(x)), *a)


def outputs(n: int = 40) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    steps = [[torch.randn(8, 6, generator=g) + i for i in range(2)] for _ in range(n)]
    steps[5][0][0, 0] = math.nan
    return steps


def filled(stats: RunningStats, steps: list[list[torch.Tensor]], first: int = 0) -> RunningStats:
    for step, tensors in enumerate(steps, first):
        for i, t in enumerate(tensors):
            stats.update(stats.row(f"fc{i}", "ReLU"), 0, "", t)
        stats.end_step(step, step // 10, step)
    return stats


@pytest.mark.usefixtures("engine")
def test_each_record_is_that_of_its_tensors() -> None:
    steps = outputs()

    record = filled(RunningStats("activation", ALL), steps).record()

    for i in range(2):
        x = torch.stack([tensors[i] for tensors in steps]).double().flatten(1)
        y = x.nan_to_num(0.0)
        n = x.isfinite().sum(1).double()
        mean = y.sum(1) / n
        std = ((x - mean[:, None]).square().nansum(1) / (n - 1)).sqrt()
        np.testing.assert_allclose(record.value("mean", i), mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(record.value("std", i), std, rtol=1e-5)
        np.testing.assert_array_equal(record.value("nonfinite", i), 48 - n)
        assert record.hist is not None
        np.testing.assert_array_equal(record.hist[i].sum(0), n)
    assert record.steps.tolist() == list(range(40))
    assert record.epochs.tolist() == [step // 10 for step in range(40)]


@pytest.mark.usefixtures("engine")
def test_calls_and_batches_of_a_step_merge_and_others_leave_nothing() -> None:
    stats, whole = RunningStats("activation", ALL), RunningStats("activation", ALL)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    row = stats.row("fc", "ReLU")

    stats.update(row, 0, "", 100 * x)
    stats.discard_batch()  # a cancelled batch
    stats.update(row, 0, "", x[:4])
    stats.end_batch()
    stats.update(row, 0, "", x[4:8])
    stats.update(row, 0, "", x[8:])
    stats.end_step(0, 0, 0)
    stats.update(row, 0, "", 100 * x)
    stats.end_batch()
    stats.discard_step()  # a skipped step
    filled(whole, [[x]])

    got, want = stats.record(), whole.record()
    assert got.value("count").tolist() == [[60]]
    for name in ("mean", "std", "min", "max", "zero", "dead"):
        np.testing.assert_allclose(got.value(name), want.value(name), rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(got.hist, want.hist)


def test_rows_may_come_later_and_further_tensors_of_a_layer_have_their_own() -> None:
    stats = RunningStats("activation")
    for step in range(4):
        row = stats.row("lstm", "LSTM")
        stats.update(row, 0, "[0]", torch.ones(2))
        if step == 2:
            stats.update(row, 1, "[1][0]", torch.zeros(3))
        stats.end_step(step, 0, step)

    record = stats.record()
    assert record.names == ("lstm", "lstm[1][0]")
    assert record.meta["dtype"] == ["torch.float32"] * 2
    assert record.value("count")[0].tolist() == [2] * 4
    np.testing.assert_array_equal(record.value("count")[1], [np.nan, np.nan, 3, np.nan])


def test_it_continues_after_a_pickle() -> None:
    steps = outputs()
    stats = filled(RunningStats("activation", ALL), steps[:25])

    again = filled(pickle.loads(pickle.dumps(stats)), steps[25:], 25)

    assert again.record() == filled(stats, steps[25:], 25).record()


# units


@pytest.mark.usefixtures("engine")
def test_a_unit_is_dead_if_it_was_never_above_0_over_the_window() -> None:
    stats = RunningStats("activation", ALL)
    row = stats.row("act", "ReLU")
    g = torch.Generator().manual_seed(0)
    seen = []
    for step in range(3 * WINDOW):
        x = torch.randn(3, 7, generator=g).relu() * (torch.rand(7, generator=g) > 0.97)
        seen.append(x.amax(0))
        stats.update(row, 0, "", x)
        stats.end_step(step, 0, step)

    dead, half = stats.record().value("dead", 0), WINDOW // 2
    for step in range(3 * WINDOW):
        first = max(step // half - 1, 0) * half
        tops = torch.stack(seen[first : step + 1]).amax(0)
        assert dead[step] == pytest.approx((tops <= 0).double().mean().item()), step


@pytest.mark.parametrize("shape", [(3000, 40), (64, 40, 5, 5), (40,), (2, 40, 9000)])
@pytest.mark.usefixtures("engine")
def test_dead_units_of_large_tensors_are_exact(shape: tuple[int, ...]) -> None:
    kind = "Linear" if shape[-1] == 40 else f"Conv{len(shape) - 2}d"
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    dim = channel_dim(kind, x)
    alive = torch.zeros(40, dtype=torch.bool)
    alive[::3] = True
    x = torch.where(alive.view([-1 if d == dim else 1 for d in range(x.ndim)]), x.abs(), -x.abs())
    stats = RunningStats("activation", ALL)
    stats.consumers = {"fc": "ReLU"}
    stats.update(stats.row("fc", kind), 0, "", x)
    stats.end_step(0, 0, 0)

    assert stats.dead("fc").tolist() == (~alive).tolist()


def test_channels_are_those_of_the_layer_before_as_the_graph_shows() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    conv, fc = torch.nn.Conv1d(3, 5, 1), torch.nn.Linear(8, 8)
    norm = torch.nn.BatchNorm1d(5)

    assert channel_dim("ReLU", norm(conv(x)).relu()) == 1
    assert channel_dim("ReLU", torch.nn.functional.dropout(conv(x), 0.5).relu()) == 1
    assert channel_dim("ReLU", fc(x).relu()) == 2
    assert channel_dim("ReLU", (fc(x) + x).relu()) == 2
    assert channel_dim("ReLU", x.detach()) is None  # channels or positions
    assert channel_dim("ReLU", x.detach()[0]) == 1
    assert channel_dim("ReLU", conv(x).permute(0, 2, 1).relu()) is None
    assert channel_dim("ReLU", torch.ones(2, 3, 4, 4)) == 1
    assert channel_dim("Conv2d", torch.ones(3, 4, 4)) == 0  # without a batch


def trained_frozen(layer: torch.nn.Module, x: torch.Tensor, **options: Any) -> Any:
    """Dead units of a ReLU behind `layer`, of which the first half gives nothing above 0."""
    with torch.no_grad():
        half = len(layer.bias) // 2  # type: ignore[arg-type]
        layer.bias[:half], layer.bias[half:] = -1e6, 1e6  # type: ignore[index]
    net = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.PReLU(1))
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.0)
    with watch(net, opt, ActivationStats(units=True, include_paramless=True, **options)) as w:
        for _ in range(3):
            net(x).mean().backward()
            opt.step()
    return w.activation_stats.record().value("dead", "1").tolist()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Conv1d(3, 8, 3), (4, 3, 20)),
        (torch.nn.Linear(5, 8), (4, 3, 7, 5)),
        (torch.nn.Linear(5, 8), (4, 7, 5)),
        (torch.nn.Conv2d(3, 8, 3), (3, 10, 10)),
        (torch.nn.Conv1d(3, 8, 3), (3, 10)),
        (torch.nn.Conv2d(3, 8, 3), (4, 3, 10, 10)),
    ],
    ids=str,
)
def test_units_of_a_relu_are_those_of_the_layer_before_frozen_or_not(
    layer: torch.nn.Module, shape: tuple[int, ...], frozen: bool
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    assert trained_frozen(layer.requires_grad_(not frozen), x) == [0.5] * 3


def test_the_size_of_what_a_layer_is_given_is_that_of_all_its_calls_in_the_first_step():
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    calls = torch.zeros(4, 2), torch.tensor([[3.0, 4.0]] * 4), torch.full((4, 2), 100.0)

    with watch(net, opt, ActivationStats(modules=net), GradientStats()) as w:
        for xs in (calls[:2], calls[2:]):
            for x in xs:
                net(x).sum().backward()
            opt.step()

    run = w.run_record()
    assert run.activations.meta["input_rms"] == pytest.approx([2.5])
    assert "input_rms" not in run.gradients.meta
