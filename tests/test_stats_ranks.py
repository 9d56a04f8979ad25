"""What two ranks recorded reads as one: exactly, also where a layer ran on one of them only."""

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_end import leave
from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.stats import ActivationStats
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


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=wait, rank=rank, world_size=2)
    stats = record([rank])
    seen: dict[str, Any] = {"whole": stats.record(), "local": stats.record(local=True)}
    if rank == 0:
        stats.tally.commit(9, 0, 9)
    try:
        stats.tally._cache = None
        stats.record()
    except HookError as e:
        seen["error"] = str(e)
    Path(folder, f"seen{rank}").write_bytes(pickle.dumps(seen))
    leave(rank, folder)


@pytest.mark.ranks
def test_ranks_are_merged_exactly_when_read(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]

    seen = [pickle.loads((tmp_path / f"seen{rank}").read_bytes()) for rank in (0, 1)]

    want = record([0, 1]).record()
    for one in seen:
        got = one["whole"]
        assert got.names == want.names
        for name in ("count", "mean", "std", "min", "max", "near_zero", "zero"):
            np.testing.assert_allclose(got.value(name), want.value(name), rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(got.hist, want.hist)
        assert "recorded different steps" in one["error"]
    assert seen[0]["local"].value("count", "model.0").tolist() == [16] * 3
    assert np.isnan(seen[0]["local"].value("mean", "side")).all()
