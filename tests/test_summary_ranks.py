"""Models wrapped for several processes: DDP is seen whole by one rank alone, FSDP is refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import in_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hookkit.errors import ArgumentError
from hookkit.inspection import Summary, summary


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def facts(s: Summary) -> str:
    names = [(r.name, r.type, r.n_params) for r in s]
    return repr((s.run, s.n_params, s.n_trainable, s.macs, names))


def work(rank: int, folder: Path) -> None:
    """Both ranks wrap a model; only rank 0 looks, so any collective would hang and time out."""
    ddp, sharded = DistributedDataParallel(net()), net()
    fully_shard(sharded[0])
    fully_shard(sharded)
    if rank == 0:
        x = torch.ones(2, 4)
        (folder / "seen").write_text(facts(summary(ddp, x)))
        for model in (sharded, nn.Sequential(sharded)):
            with pytest.raises(ArgumentError, match=r"is sharded by FSDP \(FSDP.*before fully_sh"):
                summary(model, x)
        assert summary(sharded).n_params == 58
        waits = nn.SyncBatchNorm(4)
        with pytest.raises(ArgumentError, match=r"SyncBatchNorm in training mode.*model.eval"):
            summary(waits, x)
        assert summary(waits.eval(), x).run == "real"
    dist.barrier()
    sharded(torch.ones(2, 4)).sum().backward()  # still works on all ranks


@pytest.mark.ranks
def test_ddp_is_taken_off_and_fsdp_refused_by_one_rank_alone(tmp_path: Path) -> None:
    in_ranks(work, tmp_path)

    plain = summary(net(), torch.ones(2, 4))
    names = [(r.name, r.type, r.n_params) for r in plain]
    expected = ("real", 58, 58, plain.macs, names)
    assert (tmp_path / "seen").read_text() == repr(expected)
