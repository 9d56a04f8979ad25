"""Models wrapped for several processes: seen whole, by one rank alone."""

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_end import leave
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hookkit.summaries import Summary, summary


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def told(s: Summary) -> str:
    names = [(r.name, r.type, r.n_params) for r in s]
    return repr((s.run, s.wrappers, s.n_params, s.n_trainable, s.macs, names))


def work(rank: int, folder: str) -> None:
    """Both ranks wrap a model; only rank 0 looks, so any collective would hang and time out."""
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=wait, rank=rank, world_size=2)
    ddp, sharded = DistributedDataParallel(net()), net()
    fully_shard(sharded[0])
    fully_shard(sharded)
    if rank == 0:
        x = torch.ones(2, 4)
        seen = [told(summary(model, x)) for model in (ddp, sharded)]
        Path(folder, "seen").write_text("\n".join(seen))
        assert type(sharded[0]).__name__ == "FSDPLinear"
    dist.barrier()
    sharded(torch.ones(2, 4)).sum().backward()  # still works on all ranks
    leave(rank, folder)


@pytest.mark.ranks
def test_ddp_and_fsdp_are_taken_off_and_named_by_one_rank_alone(tmp_path: Path) -> None:
    mp.spawn(work, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]

    plain = summary(net(), torch.ones(2, 4))
    names = [(r.name, r.type, r.n_params) for r in plain]
    for line, wrapper in zip(
        (tmp_path / "seen").read_text().splitlines(),
        ("DistributedDataParallel", "FSDP"),
        strict=True,
    ):
        assert line == repr(("fake", (wrapper,), 58, 58, plain.macs, names))
