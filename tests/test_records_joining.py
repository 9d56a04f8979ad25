"""Runs that follow each other are one run: `run + later`, and `watch(…, resume=run)`."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_recording_zoo import trained as trained_on
from torch import nn
from zoo import ZOO, Entry

from hookkit import ActivationStats, Callback, GradientStats, LogTo, ParamStats, watch
from hookkit.errors import ArgumentError, OptionError
from hookkit.records import Incident, Record, Run, as_run
from hookkit.testing import mlp, synth_learner
from hookkit.watching import Watcher


def record(steps: Any, names: Any = ("fc",), **options: Any) -> Record:
    n = len(steps)
    axis = [np.array(steps), np.zeros(n, np.int64), np.arange(n), np.ones(n, np.int64)]
    values = {"mean": np.arange(float(len(names) * n)).reshape(len(names), n)}
    return Record("activation", names, ("Linear",) * len(names), *axis, values, **options)


def trained(w: Watcher, epochs: int, lr: float = 0.05) -> Watcher:
    """A plain loop of three batches an epoch, the same ones in each."""
    opt = w.opt
    assert opt is not None
    with w:
        for _ in range(epochs):
            for i in range(3):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
                loss = w.model(x).square().mean()
                w.loss(loss)
                loss.backward()
                opt.step()
                opt.zero_grad()
            w.epoch(score=float(i))
    return w


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), 0.05)


def watched(net: nn.Module, **options: Any) -> Watcher:
    torch.manual_seed(0)
    opt = torch.optim.SGD(net.parameters(), 0.05)
    return watch(net, opt, ActivationStats(with_hist=True, sample=8), ParamStats(), **options)


@pytest.fixture
def nets() -> list[nn.Module]:
    torch.manual_seed(0)
    net = mlp(4, 8, 1)
    return [net, copy.deepcopy(net)]


def assert_same(a: Run, b: Run) -> None:
    for slot in ("losses", "grad_norms", "valid", "incidents"):
        assert repr(getattr(a, slot)) == repr(getattr(b, slot)), slot
    for x, y in zip(a.records, b.records, strict=True):
        for name in ("names", "types", "steps", "epochs", "iters", "spans"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name), name)
        for name, table in x.values.items():
            np.testing.assert_array_equal(table, y.values[name], name)


@pytest.mark.parametrize("saved", [False, True])
def test_a_resumed_watch_is_one_run_with_what_came_before(
    saved: bool, nets: list[nn.Module], tmp_path: Path
) -> None:
    whole = trained(watched(nets[0]), 5)
    first = trained(watched(nets[1]), 2)
    run = first.save(tmp_path / "run.npz") if saved else first.run_record()

    later = trained(watched(nets[1], resume=run), 3)

    found, wanted = later.run_record(), whole.run_record()
    assert_same(found, wanted)
    assert [row["epoch"] for row in found.valid] == [0, 1, 2, 3, 4]
    assert later.n_steps == found.n_steps == 15
    np.testing.assert_array_equal(later.losses, whole.losses)
    assert repr(later).startswith("Watcher(Sequential: 15 steps in 5 epochs;")
    assert later.activation_stats.record().steps[0] == 6


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_resumed_watch_is_read_within_its_first_batch(
    epochs: int, nets: list[nn.Module], tmp_path: Path
) -> None:
    before = trained(watched(nets[0]), epochs)
    runs = []
    look = Callback(before_batch=lambda cb: runs.append(w.run_record()))
    w = watch(nets[0], None, look, resume=before.save(tmp_path / "run.npz"))

    with w:
        w.model(torch.ones(2, 4)).mean().backward()
        before.opt.step()

    assert runs[0].info["lr"] == [0.05]
    assert runs[0].n_steps == 3 * epochs
    assert [row["epoch"] for row in runs[0].valid] == list(range(epochs + 1))
    np.testing.assert_array_equal(runs[0].losses, before.losses)


def test_a_fact_of_the_users_is_no_count_of_batches(nets: list[nn.Module]) -> None:
    w = watched(nets[0])
    w.info["n_batches"] = 500

    later = trained(watched(nets[0], resume=trained(w, 1).run_record()), 1).run_record()

    assert later.info["n_batches"] == 500
    assert later.params is not None
    assert later.params.iters.tolist() == list(range(6))


def test_a_resumed_watch_is_saved_copied_and_resumed_again(
    nets: list[nn.Module], tmp_path: Path
) -> None:
    w = trained(watched(nets[0]), 1)
    for _ in range(2):
        w = trained(watched(nets[0], resume=w.save(tmp_path / "run.npz")), 1)

    assert w.run_record().n_steps == w.n_steps == 9
    assert copy.copy(w).run_record() == w.run_record() == Run.load(w.save(tmp_path / "all.npz"))
    assert w.run_record().diagnose() is not None
    trained(w, 1)
    assert np.isfinite(w.run_record().losses).sum() == 12  # type: ignore[arg-type]


def test_a_resumed_watch_logs_what_is_new(nets: list[nn.Module], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = trained(watched(nets[0]), 1)
    first.log_to(path)

    later = trained(watched(nets[0], resume=first.run_record()), 1)
    later.log_to(path)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(6))
    assert [row["step"] for row in rows if "epoch/score" in row] == [2, 5]


@pytest.mark.parametrize("every", [1, 4])
def test_a_resumed_watch_cuts_a_file_that_it_logs_to_and_sends_the_rest(
    every: int, nets: list[nn.Module], tmp_path: Path
) -> None:
    path, save = tmp_path / "log.csv", Callback(after_epoch=lambda cb: cb.epoch or save_run())
    w = watch(nets[0], sgd(nets[0]), ParamStats(), log := LogTo(path, every=every), save)

    def save_run() -> None:
        w.save(tmp_path / "run.npz")

    trained(w, 2)  # and on, for another epoch
    resumed = watch(
        nets[0], sgd(nets[0]), ParamStats(), LogTo(path, every=every), resume=tmp_path / "run.npz"
    )
    trained(resumed, 1)
    with resumed:
        pass
    resumed.log_to(path)

    rows = [line.split(",")[:2] for line in path.read_text().splitlines()[1:]]
    for name in ("loss", "param/weight_norm/0.weight"):
        assert [int(step) for step, tag in rows if tag == name] == list(range(6))
    assert len({tuple(row) for row in rows}) == len(rows)
    assert log.target is path
    assert "LogTo" not in resumed.report(tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", ["logged", "LogTo"])
def test_a_fact_of_the_users_by_any_name_is_no_state_of_a_log(
    name: str, nets: list[nn.Module], tmp_path: Path
) -> None:
    w = watched(nets[0])
    w.info[name] = "by hand"
    run = trained(w, 1).run_record()

    later = watch(nets[0], sgd(nets[0]), LogTo(tmp_path / "log.csv"), resume=run)

    assert trained(later, 1).run_record().n_steps == 6


def test_resume_takes_a_run_alone() -> None:
    with pytest.raises(ArgumentError, match="int was given, and it holds no records"):
        watch(nn.Linear(2, 2), resume=3)
    with pytest.raises(FileNotFoundError, match=r"there_is_none\.npz"):
        watch(nn.Linear(2, 2), resume="there_is_none.npz")


def test_runs_that_both_begin_at_0_are_counted_on() -> None:
    incident = Incident("loss", "", "", 1, 0, 1, (), np.array([0]))
    a = Run(activations=record([0, 2]), losses=np.array([3.0, 2.0, 1.0]), valid=[{"epoch": 0}])
    b = replace(a, incidents=(incident,), valid=[{"epoch": 0, "step": 2, "x": 7}])

    both = a + b

    assert both.activations is not None
    assert both.activations.steps.tolist() == [0, 2, 3, 5]
    assert both.activations.epochs.tolist() == [0, 0, 1, 1]
    assert both.losses is not None
    assert both.losses.tolist() == [3.0, 2.0, 1.0] * 2
    assert both.valid == [{"epoch": 0}, {"epoch": 1, "step": 5, "x": 7}]
    assert (both.incidents[0].step, both.incidents[0].epoch) == (4, 1)
    assert both.incidents[0].steps.tolist() == [3]
    assert both.n_epochs == 2
    assert Run() + a == a + Run() == a


def test_rows_and_statistics_of_both_are_there() -> None:
    a, b = record([0, 1], ("fc", "gone")), record([2], ("new", "fc"))
    b.values["std"] = np.ones((2, 1))
    a.meta.update(dtype=["half", "float"], moved=[True, False], eps=0.05, feeds={"fc": "x"})
    b.meta.update(dtype=["bfloat", "double"], moved=[False, False], feeds={"new": "y"})

    both = (Run(activations=a) + Run(activations=b)).activations

    assert both is not None
    assert both.names == ("fc", "gone", "new")
    np.testing.assert_array_equal(both.value("mean", "fc"), [0, 1, 1])
    np.testing.assert_array_equal(both.value("mean", "gone"), [2, 3, np.nan])
    np.testing.assert_array_equal(both.value("std", "new"), [np.nan, np.nan, 1])
    assert both.meta["dtype"] == ["double", "float", "bfloat"]
    assert both.meta["moved"] == [True, False, False]
    assert both.meta["feeds"] == {"fc": "x", "new": "y"}
    assert both.meta["eps"] == 0.05


def test_histograms_follow_each_other() -> None:
    bins = {"hist": np.ones((1, 3, 2), np.int64), "edges": np.arange(4.0)}
    a, b = record([0, 1], **bins), record([2, 3])

    both = (Run(activations=a) + Run(activations=b)).activations

    assert both is not None
    assert both.hist is not None
    assert both.hist[0].tolist() == [[1, 1, 0, 0]] * 3
    other = record([2, 3], **{**bins, "edges": np.arange(4.0) * 2})
    with pytest.raises(OptionError, match=r"another edges of bins \(3 bins from 0 to 3 and 3 bins"):
        Run(activations=a) + Run(activations=other)


def test_other_options_are_an_error() -> None:
    a, b = (Run(activations=record([0], meta={"eps": eps})) for eps in (0.05, 0.1))

    with pytest.raises(OptionError, match=r"activations were recorded with another eps \(0.05 and"):
        a + b
    with pytest.raises(ArgumentError, match="int was given, and it holds no records"):
        a + 3


def test_a_learner_can_be_added() -> None:
    learn = synth_learner(n_trn=4, cbs=ActivationStats(modules=""))
    with learn.no_logging():
        learn.fit(1)

    both = learn.run_record() + learn

    assert both.n_steps == 8
    assert [row["epoch"] for row in both.valid] == [0, 1]


@pytest.mark.parametrize("entry", ZOO[::4], ids=repr)
def test_the_record_of_any_model_joins(entry: Entry) -> None:
    stats = [ActivationStats(units=True, with_hist=True), GradientStats(), ParamStats()]
    trained_on(entry, stats)
    run = as_run([each.record() for each in stats])

    both = run + run

    assert both.n_steps == 2 * run.n_steps
    for once, twice in zip(run.records, both.records, strict=True):
        assert twice.names == once.names
        for name, table in once.values.items():
            np.testing.assert_array_equal(twice.values[name], np.hstack([table, table]))
    assert repr(both.diagnose())


@pytest.mark.parametrize("marked", ["top", "bottom", "never"])
@pytest.mark.parametrize("n_batches", [2, 4, 6])
def test_a_watch_goes_on_within_an_epoch(
    n_batches: int, marked: str, nets: list[nn.Module], tmp_path: Path
) -> None:
    def train(w: Watcher, first: int = 0, last: int = 9) -> Watcher:
        assert w.opt is not None
        with w:
            for i in range(first, last):
                if marked == "top" and i % 3 == 0:
                    w.epoch()
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
                loss = w.model(x).square().mean()
                w.loss(loss)
                loss.backward()
                w.opt.step()
                w.opt.zero_grad()
                if marked == "bottom" and i % 3 == 2:
                    w.epoch(score=float(i))
                if i == n_batches - 1:
                    w.save(tmp_path / f"{first}.npz")
        return w

    whole = train(watched(nets[0]))
    train(watched(nets[1]), 0, n_batches)
    resumed = watched(nets[1], resume=tmp_path / "0.npz")

    found, wanted = train(resumed, n_batches).run_record(), whole.run_record()

    assert_same(found, wanted)
    assert repr(resumed).split(";")[0] == repr(whole).split(";")[0]
    assert "within_epoch" not in found.info


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("at", [4, 5, 6])
def test_batches_go_on_from_the_step_where_a_later_run_begins(
    every: int, at: int, nets: list[nn.Module]
) -> None:
    def run(first: int, end: int) -> Run:
        opt = sgd(nets[0])
        w = watch(nets[0], opt, ActivationStats(every=every), ParamStats(every=every))
        w.loop.number_from(first, 0)  # as a library's resumed training
        with w:
            for _ in range(first, end):
                for _ in range(2):  # gradient accumulation
                    nets[0](torch.ones(2, 4)).mean().backward()
                opt.step()
        return w.run_record()

    joined = run(0, 11) + run(at, 13)

    for record in joined.records:
        assert record.iters.tolist() == [2 * step + 1 for step in record.steps.tolist()]
    assert joined.info["train_iter"] == 26
