"""What two ranks recorded reads as one: exactly, also where a layer ran on one of them only."""

import json
import pickle
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import in_ranks
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.moments import history
from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import watch


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


def units(ranks: list[int], window: int, limit: int = 0, n: int = 13) -> ActivationStats:
    """Units that are dead, dormant or saturated by what one rank or the other sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6, bias=False), nn.ReLU(), nn.Linear(6, 3), nn.Tanh())
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, 0], [2, 0], [0, -1]]))
        model[2].weight.mul_(8.0)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    stats = ActivationStats(units=True, include_paramless=True, window=window)
    with pytest.MonkeyPatch.context() as patch, watch(model, opt, stats):
        for name in ("MIN_COLUMNS", "MAX_COLUMNS") if limit else ():
            patch.setattr(history, name, limit)
        for step in range(n):
            model(torch.cat([unlike(rank, step) for rank in ranks])).sum().backward()
            opt.step()
        stats.accumulator.history  # noqa: B018  what waits is written while the limit is set
    return stats


def unlike(rank: int, step: int) -> Tensor:
    """Rank 0 sees positive first inputs, rank 1 negative ones; the second wakes up later."""
    x = torch.full((4, 2), 1.0 - 2 * rank)
    x[:, 1] = 0.01 if step < 5 else 3.0 * (rank == 1)
    return x


UNITS = [(2, 0), (4, 0), (50, 0), (4, 4)]  # window, limit of the history


def watched(stats: Any, n: int, net: nn.Module | None = None) -> Any:
    """What `stats` has seen of `n` steps of a small net."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) if net is None else net
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, opt, stats):
        for _ in range(n):
            net(torch.ones(2, 3)).sum().backward()
            opt.step()
    return stats


def refused(rank: int) -> dict[str, str]:
    """By case the error of a record that the ranks cannot merge; "none" if it was read."""
    shared = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    cases = {
        "steps": watched(ActivationStats(), 3 + rank),
        "gradients' steps": watched(GradientStats(), 3 + rank),
        "parameters' steps": watched(ParamStats(), 3 + rank),
        "parameters": watched(ParamStats(), 3, other if rank else shared),
        "hist": watched(ActivationStats(with_hist=not rank), 3),
        "units": watched(ActivationStats(units=bool(rank)), 3),
        "window": watched(ActivationStats(units=True, window=4 + rank), 3),
        "kinds": watched(GradientStats() if rank else ActivationStats(), 3),
        "classes": watched(ParamStats() if rank else ActivationStats(), 3),
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
    seen |= {"whole": stats.record(), "local": stats.record(local=True)}
    seen["errors"] = refused(rank)
    for window, limit in UNITS:
        stats = units([rank], window, limit)
        stats._gather()
        whole = stats.record()
        lists = [stats.dead_units(i) for i in range(4)], [stats.dormant_units(i) for i in range(4)]
        again = pickle.loads(pickle.dumps(stats)).record()
        seen[f"units {window} {limit}"] = whole, lists, again
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
        assert one["before"] == one["local"]
    assert [one["local"].meta["rank"] for one in seen] == ["rank 0 of 2", "rank 1 of 2"]
    assert seen[0]["local"].value("count", "model.0").tolist() == [16] * 3
    assert np.isnan(seen[0]["local"].value("mean", "side")).all()


@pytest.mark.ranks
@pytest.mark.parametrize(("window", "limit"), UNITS)
def test_units_are_judged_by_what_all_ranks_have_seen(
    seen: list[dict[str, Any]], window: int, limit: int
) -> None:
    one = units([0, 1], window, limit)

    for rank in seen:
        record, (dead, dormant), again = rank[f"units {window} {limit}"]
        for name in ("dead", "dormant", "saturated", "never_positive"):
            for got in (record, again):
                assert np.array_equal(np.isnan(got.value(name)), np.isnan(one.record().value(name)))
                if not limit:  # a column of several records is judged as one
                    np.testing.assert_allclose(
                        got.value(name), one.record().value(name), err_msg=name
                    )
        np.testing.assert_allclose(record.value("dead")[:, -1], one.record().value("dead")[:, -1])
        assert dead == [one.dead_units(i) for i in range(4)]
        assert dormant == [one.dormant_units(i) for i in range(4)]


@pytest.mark.ranks
def test_what_the_ranks_recorded_differently_is_an_error_on_each(
    seen: list[dict[str, Any]],
) -> None:
    first, second = (one["errors"] for one in seen)

    assert first == second
    for case, text in first.items():
        assert re.search(f"recorded different steps or layouts.*{EXPECTED[case]}", text), case
        assert "each still reads its own" in text


EXPECTED = {
    "steps": r"rank 0: activations of 3 steps from 0 on.*rank 1: activations of 4 steps",
    "gradients' steps": r"rank 0: gradients of 3 steps.*rank 1: gradients of 4 steps",
    "parameters' steps": r"rank 0: params of 3 steps.*rank 1: params of 4 steps",
    "parameters": r"4 parameters: 0\.weight, 0\.bias, 1\.weight, ….*3 parameters: 0\.weight, 1\.w",
    "hist": r"100 bins.*no histogram",
    "units": r"no units.*units over 50 records",
    "window": r"units over 4 records.*units over 5 records",
    "kinds": r"rank 0: activations.*rank 1: gradients",
    "classes": r"rank 0: activations.*rank 1: params",
}


class Counted:
    """Counts the collectives of this process, and the bytes that each gives it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n, self.n_bytes = 0, Counter[str]()
        # those that send objects call these too, by the names of their module
        for module in (dist, dist.distributed_c10d):
            for name in ("all_reduce", "all_gather", "broadcast"):
                patch.setattr(module, name, partial(self.call, name, getattr(module, name)))

    def call(self, name: str, f: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        self.n += 1
        self.n_bytes[name] += sum(x.nbytes for x in (t if isinstance(t, list) else [t]))
        return f(t, *args, **kwargs)


def counts(rank: int, folder: Path) -> None:
    """Writes how many collectives, and how many bytes, a merge takes after some steps and more."""
    found = []
    for n in (8, 128):
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        stats = ActivationStats(with_hist=True, units=True), GradientStats(), ParamStats()
        opt = torch.optim.SGD(net.parameters(), lr=0.0)
        with pytest.MonkeyPatch.context() as patch, watch(net, opt, *stats) as w:
            for name in ("MIN_COLUMNS", "MAX_COLUMNS"):
                patch.setattr(history, name, 8)
            seen = Counted(patch)
            for _ in range(n):
                net(torch.ones(2, 3)).sum().backward()
                opt.step()
            w.diagnose()
            assert seen.n == 0  # neither a step nor a reading meets the other ranks
            w.gather()
            found.append((seen.n, seen.n_bytes))
            w.diagnose()
            assert seen.n == found[-1][0]
            assert seen.n_bytes["all_reduce"] == as_the_page_says(w)
    (folder / f"counts{rank}").write_text(json.dumps(found))


def as_the_page_says(w: Any) -> int:
    """What docs/how-to/processes.md says that the reductions of a merge are, in bytes."""
    act, gradient, params = w.activation_stats.record(), w.gradient_stats.record(), w.param_stats
    s, n_bins, n_units = len(act), act.hist.shape[1], 3 + 3
    n_bytes = 8 + 16 + 8 * len(params.names)  # how many losses; layouts, and what has moved
    for record, each in ((act, 8 * s * 4 * n_units + 80 * len(act.names)), (gradient, 0)):
        n, bins = len(record.names), n_bins + 3 if record is act else 0
        n_bytes += 16 + 16 + 8 * n * (2 * s + 1) + 8 * s * n * (6 + bins) + each + 8 * n * s
    return n_bytes


@pytest.mark.slow
@pytest.mark.ranks
def test_what_a_merge_sends_grows_with_neither_ranks_nor_steps(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    found = []
    for n in (2, 4):
        folder = tmp_path_factory.mktemp("counts")
        in_ranks(counts, folder, n)
        found += [json.loads((folder / f"counts{rank}").read_text()) for rank in range(n)]

    assert all(one == found[0] for one in found)
    few, many = found[0]
    assert few == many
    # of each record of tensors: layouts compared, names compared, and three reductions; of
    # parameters: layouts, and which of them moved; how many losses there are
    assert few[0] == 2 * (2 + 3) + 2 + 1
    assert few[1].keys() == {"all_reduce"}
