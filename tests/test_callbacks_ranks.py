"""Callbacks that save, stop and log, in a Learner over two processes."""

import csv
import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookkit import (
    ActivationStats,
    CSVLogger,
    EarlyStoppingCallback,
    Learner,
    LogTo,
    ProgressCallback,
    SaveModelCallback,
)
from hookkit._core import distributed as ranks

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate")


def learner(folder: Path, *cbs: Any, **kwargs: Any) -> Learner:
    torch.manual_seed(0)
    x = torch.randn(26, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    loaders = DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
    return Learner(loaders, net, nn.MSELoss(), cbs=list(cbs), path=folder, **kwargs)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def saves_stops_and_logs(r: int, folder: Path) -> None:
    save, stop = SaveModelCallback("valid_loss"), EarlyStoppingCallback(patience=2)
    log = LogTo(folder / "run.jsonl", every=2)
    learn = learner(folder, ActivationStats(), save, stop, log, CSVLogger(), lr=0.3)
    if find_spec("tqdm"):
        sys.stderr = Terminal()
        learn.add_cb(ProgressCallback())

    with learn.distrib_ctx(cpu=True), learn.no_logging():
        learn.fit(8)
        weights = torch.cat([p.detach().flatten() for p in learn.model.parameters()])
        valid = learn.validate()[0]

    if isinstance(sys.stderr, Terminal):
        assert ("epoch 1/8 train" in sys.stderr.getvalue()) == (r == 0)
    epochs = learn.recorder.values
    assert ranks.gather_object(len(epochs)) == [len(epochs)] * 2
    assert valid == pytest.approx(min(values[1] for values in epochs))
    first, other = ranks.gather_object(weights)
    assert torch.equal(first, other)
    rows = [*csv.DictReader((folder / "history.csv").read_text().splitlines())]
    assert [float(row["valid_loss"]) for row in rows] == [values[1] for values in epochs]
    sent = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in sent if "loss" in row] == list(range(learn.n_steps))


@pytest.mark.ranks
def test_two_ranks_save_stop_and_log_as_one(tmp_path: Path) -> None:
    in_ranks(saves_stops_and_logs, tmp_path)
