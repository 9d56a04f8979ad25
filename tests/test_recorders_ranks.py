"""What two ranks recorded reads as one: exactly, also where a layer ran on one of them only."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import in_ranks
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.training import watch


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4 + 3 * rank, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def record(ranks: list[int]) -> ActivationStats:
    """Trains nothing (lr 0), so that one process can see what two saw."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    side = nn.Linear(8, 2)
    both = nn.ModuleDict({"model": model, "side": side})
    opt = torch.optim.SGD(both.parameters(), lr=0.0)
    stats = ActivationStats(with_hist=True, units=True)
    with watch(both, opt, stats):
        for step in range(3):
            x = torch.cat([data(rank, step) for rank in ranks])
            loss = model(x + 1000).pow(2).mean()
            if 1 in ranks:  # this layer runs on one rank only
                loss = loss + side(data(1, step)).pow(2).mean()
            loss.backward()
            opt.step()
    return stats


def watched(stats: Any, n: int, bias: bool = True) -> Any:
    """What `stats` has seen of `n` steps of a small net."""
    net = nn.Sequential(nn.Linear(3, 3, bias), nn.Linear(3, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, opt, stats):
        for _ in range(n):
            net(torch.ones(2, 3)).sum().backward()
            opt.step()
    return stats


def refused(rank: int) -> dict[str, str]:
    """By what is expected of it the error of each record that the ranks cannot merge."""
    cases = {
        r"gradients of different steps: 3 .* and 4": watched(GradientStats(), 3 + rank),
        r"params of different steps: 3 .* and 4": watched(ParamStats(), 3 + rank),
        r"options: 4 \(0\.weight.* and 3": watched(ParamStats(), 3, bias=not rank),
        r"options: .*inf.* and .*no bins": watched(ActivationStats(with_hist=not rank), 3),
        r"different options: .*": watched(ActivationStats(units=bool(rank)), 3),
        r"different kind: activations and gradients": watched(
            GradientStats() if rank else ActivationStats(), 3
        ),
        r"different kind: activations and params": watched(
            ParamStats() if rank else ActivationStats(), 3
        ),
    }
    found = {}
    for case, stats in cases.items():
        try:
            stats._gather()
            found[case] = "none"
        except HookError as e:
            found[case] = str(e)
        assert len(stats.record()) >= 3
    stats = watched(ParamStats(), 3)
    stats._gather()
    assert len(stats.record()) == 3  # and goes on
    return found


def work(rank: int, folder: Path) -> None:
    stats = record([rank])
    seen: dict[str, Any] = {"before": stats.record()}
    stats._gather()
    seen["whole"], seen["errors"] = stats.record(), refused(rank)
    (folder / f"seen{rank}").write_bytes(pickle.dumps(seen))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found in `work`."""
    folder = tmp_path_factory.mktemp("ranks")
    in_ranks(work, folder)
    return [pickle.loads((folder / f"seen{rank}").read_bytes()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_are_merged_exactly_when_gathered(seen: list[dict[str, Any]]) -> None:
    want = record([0, 1]).record()

    for one in seen:
        got = one["whole"]
        assert got.names == want.names
        for name in ("count", "mean", "std", "min", "max", "near_zero", "zero"):
            np.testing.assert_allclose(got.value(name), want.value(name), rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(got.hist, want.hist)
        assert "rank" not in got.meta
        assert got.value("dead").shape == want.value("dead").shape
    assert [one["before"].meta["rank"] for one in seen] == ["rank 0 of 2", "rank 1 of 2"]
    assert seen[0]["before"].value("count", "model.0").tolist() == [16] * 3
    assert np.isnan(seen[0]["before"].value("mean", "side")).all()


@pytest.mark.ranks
def test_what_the_ranks_recorded_differently_is_an_error_on_each(
    seen: list[dict[str, Any]],
) -> None:
    first, second = (one["errors"] for one in seen)

    assert first == second
    for expected, text in first.items():
        assert re.search(expected, text), text
        assert "each still reads its own" in text


def counts(rank: int, folder: Path) -> None:
    """Fails if a step or a reading meets the other ranks."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    stats = ActivationStats(with_hist=True, units=True), GradientStats(), ParamStats()
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    with pytest.MonkeyPatch.context() as patch, watch(net, opt, *stats) as w:
        for name in ("all_reduce", "all_gather", "broadcast", "all_gather_object"):
            patch.setattr(dist, name, lambda *a, **k: pytest.fail("a collective"))
        for _ in range(8):
            net(torch.ones(2, 3)).sum().backward()
            opt.step()
        w.diagnose()


@pytest.mark.slow
@pytest.mark.ranks
def test_neither_a_step_nor_a_reading_meets_the_other_ranks(tmp_path: Path) -> None:
    in_ranks(counts, tmp_path)
