"""The ways out of records, without loss: frames, CSV, npz, TensorBoard, trackers, files."""

import csv
import functools
import gc
import json
import logging
import math
import random
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.errors import ArgumentError, MissingExtraError, OptionError
from hookkit.records import Incident, Record, Run
from hookkit.stats import ActivationStats, ParamStats
from hookkit.watching import watch


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
        self.histograms: list[dict[str, Any]] = []

    def add_scalar(self, *args: Any) -> None:
        self.scalars.append(args)

    def add_histogram_raw(self, tag: str, **values: Any) -> None:
        self.histograms.append({"tag": tag, **values})


def test_a_writer_gets_scalars_and_the_recorded_bins() -> None:
    writer = Writer()

    record().log_to(writer)

    tag, value, step = writer.scalars[0]
    assert (tag, step) == ("activation/mean/body.conv", 0)
    assert value == record().value("mean", 0)[0]
    assert len(writer.scalars) == 3 * 2 * 3 - 1  # mean, std, rms; one is NaN
    open_ended = writer.histograms[-1]
    assert open_ended["num"] == sum(open_ended["bucket_counts"]) == 13
    assert len(open_ended["bucket_limits"]) == len(open_ended["bucket_counts"])
    assert (np.diff(open_ended["bucket_limits"]) > 0).all()
    assert np.isfinite(open_ended["bucket_limits"]).all()


def steps_sent(writer: Writer) -> set[int]:
    found = {step for _, _, step in writer.scalars}
    writer.scalars, writer.histograms = [], []
    return found


def trained(w: Any, n: int) -> None:
    with w:
        for _ in range(n):
            w.model(torch.ones(4, 2)).sum().backward()
            w.opt.step()


def watched() -> Any:
    model = nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    return watch(model, opt, ActivationStats(with_hist=True), ParamStats())


def test_a_writer_gets_what_is_new() -> None:
    w, writer, other = watched(), Writer(), Writer()

    trained(w, 3)
    w.log_to(writer)
    assert len(writer.histograms) == 3
    assert steps_sent(writer) == {0, 1, 2}
    w.log_to(writer)
    assert not writer.histograms
    assert steps_sent(writer) == set()
    trained(w, 2)
    w.log_to(writer)
    w.log_to(other)

    assert len(writer.histograms) == 2
    assert steps_sent(writer) == {3, 4}
    assert steps_sent(other) == {0, 1, 2, 3, 4}


def test_another_statistic_or_another_recorder_is_new() -> None:
    w, writer = watched(), Writer()
    trained(w, 2)
    w.log_to(writer, statistics="mean")
    assert steps_sent(writer) == {0, 1}

    w.log_to(writer, statistics=["mean", "max"])
    assert {tag for tag, _, _ in writer.scalars} == {"activation/max/model"}
    assert steps_sent(writer) == {0, 1}
    w.activation_stats.log_to(writer)
    assert steps_sent(writer) == {0, 1}
    w.activation_stats.log_to(writer)
    assert steps_sent(writer) == set()

    for _ in range(2):  # a run is a value: it is sent whole each time
        w.run_record().log_to(writer)
        assert steps_sent(writer) == {0, 1}


def test_neither_source_nor_writer_is_kept_alive() -> None:
    w, writer = watched(), Writer()
    trained(w, 1)
    w.log_to(writer)
    gone = weakref.ref(w), weakref.ref(writer)

    del w, writer
    gc.collect()

    assert [held() for held in gone] == [None, None]


class Slotted:
    """A writer that cannot be held weakly."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def add_scalar(self, *args: Any) -> None:
        self.n += 1


class AlwaysEqual(Slotted):
    """One that can, and is equal to any other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Writer, Slotted, AlwaysEqual])
def test_a_second_writer_gets_everything_also_at_the_address_of_the_first(kind: Any) -> None:
    w, got = watched(), set[int]()
    trained(w, 2)

    for _ in range(20):  # each is freed before the next is made, and may get its address
        writer = kind()
        w.log_to(writer)
        got.add(len(writer.scalars) if kind is Writer else writer.n)
        del writer
        gc.collect()

    assert len(got) == 1
    assert 0 not in got


def test_what_a_writer_refused_is_sent_again() -> None:
    w, writer = watched(), Writer()
    trained(w, 2)
    writer.add_scalar = lambda *args: (_ for _ in ()).throw(OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        w.log_to(writer)

    del writer.add_scalar
    w.log_to(writer)

    assert steps_sent(writer) == {0, 1}


def test_tensorboard_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        record().log_to(writer)

    assert sum(f.stat().st_size for f in tmp_path.iterdir()) > 1000


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (object(), r"has no add_scalar, log_metrics, log\. Give a Summ"),
        (
            logging.getLogger("x"),
            r"Logger was given, which does not take log\(dict, step=\)\. Give",
        ),
        (math, r"does not take log\(dict, step=\)"),
        (np, r"does not take log\(dict, step=\)"),
        (torch.ones(2), r"does not take log\(dict, step=\)"),
        (SimpleNamespace(add_scalar=0, log=3), r"not take add_scalar\(name, value, step\) or log"),
        ("runs", r'ends in \.csv or \.jsonl.*pip install "hookkit\[tensorboard\]"'),
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


def test_a_csv_file_with_other_columns_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("epoch,train_loss\n")

    with pytest.raises(OptionError, match=r"has the columns epoch,train_loss, and step,name,value"):
        record().log_to(path)
    assert path.read_text() == "epoch,train_loss\n"


@pytest.mark.parametrize("statistics", ["men", ["mean", "men"], 3])
def test_a_statistic_that_was_not_recorded_is_not_logged_in_silence(statistics: Any) -> None:
    writer = Writer()

    with pytest.raises(OptionError, match=r"which was not recorded\. Use some of: mean"):
        record().log_to(writer, statistics=statistics)
    assert not writer.scalars


@pytest.mark.parametrize(
    ("statistics", "n"), [("std", 6), (["std", "max"], 12), ([], 0), (None, 3 * 2 * 3 - 1)]
)
def test_only_the_named_statistics_are_logged_and_a_writer_may_take_no_histograms(
    statistics: Any, n: int
) -> None:
    got: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *args: got.append(args))

    record().log_to(writer, statistics=statistics)

    assert len(got) == n


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


def test_a_value_that_comes_late_is_not_before_what_a_tracker_has() -> None:
    got: list[Any] = []
    w, tracker = watched(), SimpleNamespace(log=lambda data, step: got.append((step, data)))
    trained(w, 3)
    w.log_to(tracker)
    del got[:]

    w.note(accuracy=0.5)
    w.log_to(tracker)
    trained(w, 1)
    w.note(accuracy=0.75)
    w.log_to(tracker)

    assert got[0] == (2, {"epoch/accuracy": 0.5})
    assert [step for step, _ in got] == [2, 3]
    assert got[1][1]["epoch/accuracy"] == 0.75


def test_names_have_no_brackets_which_mlflow_refuses() -> None:
    writer = Writer()

    replace(record(), names=("lstm[1][0]", "out['x']")).log_to(writer, statistics="std")

    tags = {tag for tag, *_ in writer.scalars}
    assert tags == {"activation/std/lstm-1-0", "activation/std/out-x"}


def test_two_layers_whose_names_become_the_same_keep_their_own() -> None:
    writer = Writer()

    replace(record(), names=("lstm[1]", "lstm-1")).log_to(writer, statistics="std")

    tags = [tag for tag, *_ in writer.scalars]
    assert set(tags) == {"activation/std/lstm[1]", "activation/std/lstm-1"}
    assert len(tags) == 6


@pytest.mark.parametrize("name", ["logs/run.csv", "logs/run.jsonl"])
def test_a_file_of_csv_or_json_lines_grows(tmp_path: Path, name: str) -> None:
    w, path = watched(), tmp_path / name
    for _ in range(2):
        trained(w, 2)
        w.log_to(str(path))
        w.log_to(path)  # the same file

    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["name"] == "activation/mean/model"]
        means = [float(row["value"]) for row in rows]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        means = [row["activation/mean/model"] for row in rows]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]
    assert means == w.activation_stats.record().value("mean", 0).tolist()


NO_RECORDS = '{"records": [], "valid": [], "info": {}}'
FOREIGN: dict[str, Any] = {
    "a table": lambda path: path.write_text("step,epoch\n1,2\n"),
    "no head": lambda path: np.savez(path, x=np.ones(2)),
    "another head": lambda path: np.savez(path, head=np.array("title")),
    "other records": lambda path: np.savez(path, head=np.array('{"records": [{"kind": "x"}]}')),
    "other facts": lambda path: np.savez(path, head=np.array('{"records": [], "valid": 3}')),
    "words": lambda path: np.savez(path, head=np.array(NO_RECORDS), losses=np.array(["a"])),
    "deep": lambda path: np.savez(path, head=np.array("[" * 100_000)),
    "objects": lambda path: np.savez(path, head=np.array([{}], object)),
    "one array": lambda path: np.save(path.with_suffix(".npy"), np.ones(3)),
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
