"""A checkpoint of several processes: written once, whole, and for any number of them."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import in_ranks
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from hookkit import ActivationStats, GradientStats, Learner, LogTo, ParamStats, ranks
from hookkit.callbacks import Callback
from hookkit.data import DataLoaders
from hookkit.learner import checkpoints
from hookkit.records import Run

accelerate = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def learner(folder: Path, seed: int = 0, *, norm: bool = True) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
    between = nn.BatchNorm1d(8) if norm else nn.Identity()  # FSDP2: means are each rank's own
    net = nn.Sequential(nn.Linear(5, 8), between, nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))
    dls = DataLoaders(DataLoader(data, 4, shuffle=True), DataLoader(data, 8))
    stats = ActivationStats(with_hist=True, units=True, window=6, on_valid=True)
    cbs = [stats, GradientStats(), ParamStats()]
    learn = Learner(dls, net, nn.CrossEntropyLoss(), torch.optim.AdamW, 0.01, cbs=cbs, path=folder)
    learn.logger = lambda row: None
    torch.manual_seed(seed + ranks.rank())
    return learn


def save_and_stop(epoch: int, name: str) -> Callback:
    def save(cb: Callback) -> None:
        if cb.epoch == epoch:
            cb.learn.save(name)
            raise KeyboardInterrupt

    return Callback(after_epoch=save)


def weights(learn: Any) -> list[torch.Tensor]:
    return [t.clone() for t in learn.model.state_dict().values()]


def assert_close(a: Run, b: Run) -> None:
    """The same, but for the last digits: what ranks recorded is added up in another order."""
    assert a.losses is not None
    assert b.losses is not None
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-12)
    assert len(a.valid) == len(b.valid)
    for x, y in zip(a.records, b.records, strict=True):
        assert (x.names, x.steps.tolist(), x.epochs.tolist()) == (
            y.names,
            y.steps.tolist(),
            y.epochs.tolist(),
        )
        for name, table in x.values.items():
            np.testing.assert_allclose(table, y.values[name], 1e-6, 1e-12, err_msg=name)
        for name in ("first_variation", "given_rms", "given_max", "given_variation"):
            np.testing.assert_allclose(x.meta.get(name, 0), y.meta.get(name, 0), err_msg=name)
        if x.hist is not None:
            np.testing.assert_array_equal(x.hist, y.hist)


def resumes(rank: int, folder: Path) -> None:
    whole, first, later = (learner(folder, seed) for seed in (0, 0, 7))
    written: list[Path] = []
    save = checkpoints.save_state
    checkpoints.save_state = lambda *given: written.append(save(*given)) or written[-1]  # type: ignore[func-returns-value]
    torch.manual_seed(rank)
    with whole.distrib_ctx(cpu=True):
        whole.fit(4)
    torch.manual_seed(rank)
    with first.distrib_ctx(cpu=True), pytest.raises(KeyboardInterrupt):
        first.fit(4, cbs=save_and_stop(1, "two"))

    with later.distrib_ctx(cpu=True):
        later.fit(4, resume="two")
        before = weights(later)
        assert later.load(later.save("end")) is later
        assert all(map(torch.equal, weights(later), before))

    assert len(written) == 2 * (rank == 0)
    assert all(map(torch.equal, weights(whole), weights(later)))
    assert_close(whole.run_record(), later.run_record())
    valid = [learn.activation_stats.record(valid=True) for learn in (whole, later)]
    assert_close(
        Run(activations=valid[0], losses=np.ones(1)), Run(activations=valid[1], losses=np.ones(1))
    )
    if rank == 0:
        whole.run_record().save(folder / "whole.npz")


def from_one(rank: int, folder: Path) -> None:
    learn = learner(folder)
    with learn.distrib_ctx(cpu=True):
        learn.fit(4, resume="one")
    run = learn.run_record()
    assert run.activations is not None
    assert run.activations.steps.tolist() == list(range(30))


def from_two(rank: int, folder: Path) -> None:
    learn = learner(folder)
    with learn.distrib_ctx(cpu=True):
        learn.fit(4, resume="two")
    found, before = learn.run_record().activations, Run.load(folder / "whole.npz").activations
    assert found is not None
    assert before is not None
    assert found.steps.tolist() == list(range(10 + 2 * 3))
    first, wanted = found.value("mean")[:, :10], before.value("mean")[:, :10]
    np.testing.assert_allclose(first, wanted, 1e-12)


def test_a_run_of_two_ranks_goes_on_there_in_four_and_alone(tmp_path: Path) -> None:
    in_ranks(resumes, tmp_path)
    shutil.copytree(tmp_path / "models", tmp_path / "four" / "models")
    shutil.copy(tmp_path / "whole.npz", tmp_path / "four")
    in_ranks(from_two, tmp_path / "four", n=4)

    state = torch.load(tmp_path / "models" / "two.pth", weights_only=True)
    assert [name for name in state["model"] if "module" in name] == []
    assert sorted(os.listdir(tmp_path / "models")) == ["end.pth", "two.pth"]
    alone = learner(tmp_path)
    assert alone.load("two").opt.state
    alone.fit(4, resume="two")
    run, whole = alone.run_record(), Run.load(tmp_path / "whole.npz")
    assert run.activations is not None
    assert whole.activations is not None
    n = 10  # two epochs of ten batches for two ranks
    assert run.activations.steps.tolist() == list(range(n + 20))
    for name in ("mean", "std", "max", "count", "dead", "dormant"):
        found, wanted = run.activations.value(name)[:, :n], whole.activations.value(name)[:, :n]
        np.testing.assert_allclose(found, wanted, 1e-6, 1e-12, err_msg=name)


def test_a_run_of_one_process_goes_on_in_two(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(4, cbs=save_and_stop(1, "one"))

    in_ranks(from_one, tmp_path)


def sharded(rank: int, folder: Path) -> None:
    plugin = {"fsdp_plugin": accelerate.utils.FullyShardedDataParallelPlugin(fsdp_version=2)}
    whole, first, later = (learner(folder, seed, norm=False) for seed in (0, 0, 7))
    torch.manual_seed(rank)
    with whole.distrib_ctx(cpu=True, **plugin):
        whole.load("plain")
        whole.fit(3)
    torch.manual_seed(rank)
    with first.distrib_ctx(cpu=True, **plugin):
        first.load("plain")
        with pytest.raises(KeyboardInterrupt):
            first.fit(3, cbs=save_and_stop(1, "sharded"))

    with later.distrib_ctx(cpu=True, **plugin):
        later.fit(3, resume="sharded")
        assert all(hasattr(s["exp_avg"], "device_mesh") for s in later.opts[0].state.values())

    assert all(map(torch.equal, weights(whole), weights(later)))
    assert_close(whole.run_record(), later.run_record())


def test_sharded_weights_are_written_whole(tmp_path: Path) -> None:
    learn = learner(tmp_path, norm=False)
    learn.fit(1)
    learn.save("plain")

    in_ranks(sharded, tmp_path)

    alone = learner(tmp_path, norm=False).load("sharded")
    assert not hasattr(alone.model[0].weight, "device_mesh")
    shapes = [s["exp_avg"].shape for s in alone.opt.state.values()]
    assert shapes == [p.shape for p in alone.model.parameters()]


def killed(rank: int, folder: Path) -> None:
    learn = learner(folder)

    def end(cb: Callback) -> None:
        if cb.epoch < 2:
            cb.learn.save("run")
        elif rank:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(rank)
    with learn.distrib_ctx(cpu=True):
        learn.fit(4, cbs=[LogTo(folder / "log.jsonl", every=7), Callback(after_epoch=end)])


def goes_on(rank: int, folder: Path) -> None:
    whole, later = learner(folder), learner(folder.parent, 7)
    torch.manual_seed(rank)
    with whole.distrib_ctx(cpu=True):
        whole.fit(4)

    with later.distrib_ctx(cpu=True):
        later.fit(4, cbs=LogTo(folder.parent / "log.jsonl", every=7), resume="run")

    assert all(map(torch.equal, weights(whole), weights(later)))
    assert_close(whole.run_record(), later.run_record())


def test_a_fit_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    ends = ProcessExitedException, ProcessRaisedException
    with pytest.raises(ends, match=r"SIGKILL|HookError"):
        in_ranks(killed, tmp_path)
    (again := tmp_path / "again").mkdir()

    in_ranks(goes_on, again)

    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(20))
