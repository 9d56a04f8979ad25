"""`watch` around models wrapped for several processes: two gloo ranks on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from processes import in_ranks
from test_watching import net, sgd
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hookkit.recorders import ActivationStats, ParamStats
from hookkit.training import watch

CASES = ("ddp, wrapper given", "ddp, model given", "ddp compiled", "fsdp")


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def run(case: str, rank: int) -> dict[str, list[float]]:
    model = net()
    called = given = model
    if case == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    else:
        called = DistributedDataParallel(model)
        given = called if case != "ddp, model given" else model
    if case == "ddp compiled":
        given = called = torch.compile(called, backend="eager")
    opt, acts, params = sgd(model), ActivationStats(), ParamStats()
    with watch(given, opt, acts, params) as w:
        for step in range(3):
            called(rows(rank, step)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
    assert w.n_steps == 3
    assert n_hooks(model, opt) == 0 or case == "fsdp"  # which has hooks of its own
    alone = f"rank {rank} of 2 alone"
    for shown in (acts.record(), params.record(), w.run_record(), w.diagnose()):
        assert alone in str(shown).splitlines()[0]
    w.gather()
    assert alone not in f"{acts.record()} {params.record()} {w.run_record()} {w.diagnose()}"
    a, p = acts.record(), params.record()
    return {
        "names": [*a.names, *p.names],
        "count": a.value("count", 0).tolist(),
        "mean": a.value("mean", 0).tolist(),
        "update": p.value("update_norm", 0).tolist(),
    }


def work(rank: int, folder: Path) -> None:
    seen: dict[str, Any] = {case: run(case, rank) for case in CASES}
    (folder / f"seen{rank}").write_text(json.dumps(seen))


@pytest.mark.ranks
@pytest.mark.slow
def test_both_ranks_read_the_records_of_the_whole(tmp_path: Path):
    in_ranks(work, tmp_path)

    seen = [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(2)]
    model, acts, params = net(), ActivationStats(), ParamStats()
    opt = sgd(model)
    with watch(model, opt, acts, params):
        for step in range(3):
            model(torch.cat([rows(0, step), rows(1, step)])).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
    for rank in range(2):
        for case in CASES:
            own = seen[rank][case]
            assert own["names"] == [*acts.record().names, *params.record().names], case
            for key, truth in (
                ("count", acts.record().value("count", 0)),
                ("mean", acts.record().value("mean", 0)),
                ("update", params.record().value("update_norm", 0)),
            ):
                np.testing.assert_allclose(own[key], truth, rtol=1e-4, err_msg=f"{case} {key}")
