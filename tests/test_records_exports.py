"""The ways out of records, without loss: frames, CSV, npz, TensorBoard, trackers, files."""

import functools
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hookkit.errors import ArgumentError, MissingExtraError, OptionError
from hookkit.records import Incident, Record, Run


def record(scale: float = 1.0, n: int = 3, kind: str = "activation") -> Record:
    sides = np.array([0.25, 0.5, 1, 2, 4])
    edges = np.concatenate([[-np.inf], -sides[::-1], [0.0], sides, [np.inf]])
    hist = np.zeros((2, len(edges) - 1, n), np.int64)
    hist[:, 3:6] = 4
    hist[1, -1] = 1
    statistics = ("mean", "std", "rms", "min", "max")
    rng = np.random.default_rng(0)
    values = {s: rng.random((2, n)) * scale for s in statistics}
    values["mean"][1, 0] = math.nan
    steps = np.arange(n) * 10
    places = steps, steps * 0, steps, np.ones(n, np.int64)
    names, types = ("body.conv", "fc"), ("Conv2d", "Linear")
    return Record(kind, names, types, *places, values, hist, edges, {"eps": 0.05})


def test_a_frame_is_tidy() -> None:
    pytest.importorskip("pandas")

    frame = Run(record(), params=record(kind="param")).to_df()

    assert list(frame.columns) == ["step", "epoch", "layer", "kind", "statistic", "value"]
    assert len(frame) == 2 * 5 * 2 * 3
    one = frame.query("layer == 'fc' and statistic == 'std' and step == 20 and kind == 'param'")
    assert one["value"].item() == record().value("std", "fc")[2]


def test_missing_pandas_is_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(MissingExtraError, match=r"hookkit\[pandas\]"):
        record().to_df()


def test_csv_is_the_frame(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")

    path = replace(record(), names=("größe", "層")).to_csv(tmp_path / "new" / "run.csv")

    again = pd.read_csv(path, encoding="utf-8")
    assert again["value"].isna().sum() == 1
    assert again["layer"].unique().tolist() == ["größe", "層"]
    assert again["value"][4] == pytest.approx(record().value("mean", 1)[1], rel=1e-12)


def test_a_saved_run_comes_back_whole(tmp_path: Path) -> None:
    past = {"fc": np.array([1.0, math.nan])}
    incident = Incident("activation", "fc", "Linear", 12, 1, 12, ("head",), np.arange(2), past)
    rows = [{"epoch": 0, "step": 9, "valid_loss": math.nan}, {"epoch": 1, "accuracy": 0.5}]
    facts = {"model": "Net", "lr": [0.1], "loss_func": None, "dtype": torch.float32}
    run = Run(
        record(), record(2.0, kind="gradient"), record(kind="param"), np.array([2.0, math.nan]),
        valid=rows, grad_norms=np.ones(2), incidents=(incident,), info=facts,
    )  # fmt: skip

    again = Run.load(run.save(tmp_path / "run.npz"))

    assert again == replace(run, info={**run.info, "dtype": "torch.float32"})
    assert again.incidents[0].steps.dtype == np.int64
    losses = Run(losses=np.arange(3.0))
    assert Run.load(losses.save(tmp_path / "new" / "folder" / "losses.npz")) == losses


class Writer:
    def __init__(self) -> None:
        self.scalars: list[Any] = []

    def add_scalar(self, *args: Any) -> None:
        self.scalars.append(args)


def test_tensorboard_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        record().log_to(writer)

    assert sum(f.stat().st_size for f in tmp_path.iterdir()) > 1000


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (object(), r"has none of add_scalar\(name, value, step\)"),
        (math, r"log\(dict, step=\)\. Give a SummaryWriter"),
        (SimpleNamespace(add_scalar=0, log=3), "has none of"),
        ("runs.csv", r'ends in \.jsonl.*pip install "hookkit\[tensorboard\]"'),
        ("wandb", r"import wandb; log_to\(wandb\)"),
    ],
)
def test_what_is_no_writer_and_no_file_is_refused(target: Any, message: str) -> None:
    with pytest.raises((ArgumentError, OptionError), match=message):
        record().log_to(target)


def test_a_tracker_that_wraps_its_method_is_taken() -> None:
    def log(self: Any, data: Any, step: Any = None) -> None: ...

    @functools.wraps(log)  # as wandb.log is before wandb.init, and Accelerator.log
    def wrapper(*args: Any, **kwargs: Any) -> None:
        got.append(kwargs)

    got: list[Any] = []
    record().log_to(SimpleNamespace(log=wrapper))

    assert [each["step"] for each in got] == [0, 10, 20]


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({}, 3 * 2 * 3 - 1),  # mean, std, rms; one is NaN
        ({"statistics": "std"}, 6),
        ({"statistics": ["std", "max"]}, 12),
        ({"statistics": []}, 0),
        ({"layers": "fc"}, 8),
        ({"layers": ["body"], "statistics": "std"}, 3),
        ({"layers": "**.*o*", "statistics": "std"}, 3),
    ],
)
def test_only_the_named_statistics_and_layers_are_logged(options: Any, n: int) -> None:
    writer = Writer()

    record().log_to(writer, **options)

    assert len(writer.scalars) == n


@pytest.mark.parametrize(
    "options", [{"statistics": "men"}, {"statistics": ["mean", "men"]}, {"layers": "con"}]
)
def test_what_was_not_recorded_is_not_logged_in_silence(options: Any) -> None:
    writer = Writer()

    with pytest.raises(OptionError, match=r"which was not recorded\. (Nearest|There are)"):
        record().log_to(writer, **options)
    assert not writer.scalars


def test_a_tracker_gets_one_dict_for_each_step() -> None:
    got: list[Any] = []
    wandb = SimpleNamespace(log=lambda data, step=None, commit=None: got.append((step, data)))
    mlflow = SimpleNamespace(log_metrics=lambda metrics, step=None: got.append((step, metrics)))

    for tracker in (wandb, mlflow):
        record().log_to(tracker)

    assert [step for step, _ in got] == [0, 10, 20] * 2
    assert got[0] == got[3]
    assert got[1][1]["activation/mean/body.conv"] == record().value("mean", 0)[1]


def test_a_run_sends_its_losses_epochs_and_rate() -> None:
    writer = Writer()
    epochs = [{"epoch": 0, "step": 1, "valid_loss": 0.5, "note": "words"}, {"epoch": 1, "acc": 1.0}]
    losses = np.array([2.0, np.nan, 1.0])

    Run(losses=losses, valid=epochs, info={"lr": [0.1, 0.2]}).log_to(writer)

    assert writer.scalars == [
        ("loss", 2.0, 0),
        ("epoch/valid_loss", 0.5, 1),
        ("loss", 1.0, 2),
        ("lr", 0.2, 2),
    ]


@pytest.mark.parametrize(
    ("names", "tags"),
    [
        (("lstm[1][0]", "out['x']"), {"lstm-1-0", "out-x"}),  # mlflow refuses brackets
        (("lstm[1]", "lstm-1"), {"lstm[1]", "lstm-1"}),
    ],
)
def test_names_have_no_brackets_unless_two_became_one(names: Any, tags: set[str]) -> None:
    writer = Writer()

    replace(record(), names=names).log_to(writer, statistics="std")

    assert {tag for tag, *_ in writer.scalars} == {f"activation/std/{tag}" for tag in tags}


def test_a_file_of_json_lines_grows(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"

    for run in (record(), record(2.0)):
        run.log_to(str(path), statistics="mean", layers="fc")

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    means = [row["activation/mean/fc"] for row in rows]
    assert [row["step"] for row in rows] == [10, 20] * 2  # the first is NaN
    assert means == [*record().value("mean", 1)[1:], *record(2.0).value("mean", 1)[1:]]


NO_RECORDS = '{"records": [], "valid": [], "info": {}}'
FOREIGN: dict[str, Any] = {
    "a table": lambda path: path.write_text("step,epoch\n1,2\n"),
    "no head": lambda path: np.savez(path, x=np.ones(2)),
    "other records": lambda path: np.savez(path, head=np.array('{"records": [{"kind": "x"}]}')),
    "words": lambda path: np.savez(path, head=np.array(NO_RECORDS), losses=np.array(["a"])),
    "deep": lambda path: np.savez(path, head=np.array("[" * 100_000)),
    "objects": lambda path: np.savez(path, head=np.array([{}], object)),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_program_or_a_damaged_one_is_refused(what: str, tmp_path: Path) -> None:
    FOREIGN[what](tmp_path / "run.npz")

    (path,) = tmp_path.iterdir()
    with pytest.raises(OptionError, match="did not write it, or it is damaged"):
        Run.load(path)


def test_a_file_is_loaded_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    run = Run(activations=record(), losses=np.ones(2), info={"model": "Net"})
    whole = run.save(path := tmp_path / "run.npz").read_bytes()
    dice = random.Random(0)
    torn = [whole[:n] for n in range(0, len(whole), 50)]
    for _ in range(150):
        at = dice.randrange(len(whole))
        torn.append(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
    refused = 0

    for content in torn:
        path.write_bytes(content)
        try:
            assert Run.load(path) == run
        except OptionError:
            refused += 1

    assert refused > len(torn) // 2
