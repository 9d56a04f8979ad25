"""`LogTo` and `CSVLogger`: logs that grow while a model trains."""

import copy
import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import quiet
from torch import nn

from hookkit import (
    ActivationStats,
    Callback,
    CSVLogger,
    HookkitWarning,
    LogTo,
    OptionError,
    ParamStats,
    watch,
)
from hookkit.recorders.step_table import StepTable


class Tracker:
    """What wandb, trackio and an Accelerator have in common."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        if self.fails_at is not None and (step or 0) >= self.fails_at:
            raise ConnectionError("the network is gone")
        assert step is not None
        assert not self.got or step >= self.got[-1][0]
        self.got.append((step, data))

    def steps(self, name: str) -> list[int]:
        return [step for step, data in self.got if name in data]


# --- LogTo


def test_a_tracker_gets_everything_once_and_in_order_every_so_many_steps() -> None:
    tracker, during = Tracker(), list[int]()
    note = Callback(before_batch=lambda cb: during.append(len(tracker.steps("loss"))))
    note.run_valid = False
    stats = [ActivationStats(include_paramless=True), ParamStats(every=2)]
    learn = quiet(n_trn=5, n_val=2, cbs=[LogTo(tracker, every=2), *stats, note])

    learn.fit(2)
    learn.fit(1)

    assert during[:5] == [0, 0, 2, 2, 4]
    assert tracker.steps("loss") == list(range(15))
    assert tracker.steps("epoch/valid_loss") == [4, 9, 14]
    assert tracker.steps("param/weight_norm/a") == list(range(0, 15, 2))
    sent = {(step, name) for step, data in tracker.got for name in data}
    assert len(sent) == sum(len(data) for _, data in tracker.got)
    losses = {step: data["loss"] for step, data in tracker.got if "loss" in data}
    assert list(losses.values()) == learn.run_record().losses.tolist()


def test_a_writing_reads_what_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read, tracker = list[int](), Tracker()

    def counted(self: Any, *args: Any) -> Any:
        read.append(len(table := whole(self, *args)))
        return table

    whole = StepTable.read
    monkeypatch.setattr(StepTable, "read", counted)
    stats = [ActivationStats(include_paramless=True), ParamStats()]
    learn = quiet(n_trn=100, cbs=[LogTo(tracker, every=10), *stats])

    learn.fit(2)

    assert max(read) <= 10
    assert len(read) >= 2 * 20
    assert tracker.steps("loss") == tracker.steps("grad_norm") == list(range(200))
    assert tracker.steps("activation/mean/model") == list(range(200))


def test_of_two_recorders_of_a_kind_a_log_has_the_later_one() -> None:
    tracker = Tracker()
    learn = quiet(n_trn=9, cbs=[ActivationStats(every=4), LogTo(tracker, every=2)])
    learn.add_cb(ActivationStats(modules="", every=3))

    learn.fit(1)

    assert tracker.steps("activation/mean/model") == [0, 3, 6]


def test_a_watched_loop_is_logged_too_and_what_comes_late_is_not_before_the_rest() -> None:
    tracker, model = Tracker(), nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    with watch(model, opt, ActivationStats(), LogTo(tracker, every=2)) as w:
        for _ in range(2):
            for _ in range(3):
                opt.zero_grad()
                loss = model(torch.ones(4, 2)).pow(2).mean()
                w.loss(loss)
                loss.backward()
                opt.step()
            w.epoch(valid_loss=1.0)
    with w:
        w.note(accuracy=0.5)

    assert tracker.steps("loss") == tracker.steps("activation/mean/model") == list(range(6))
    for name in ("epoch/valid_loss", "epoch/train_loss"):  # nothing of an epoch before its end
        assert tracker.steps(name) == [2, 5]
    assert tracker.got[-1] == (5, {"epoch/accuracy": 0.5})


@pytest.mark.parametrize("with_params", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_rate_of_a_step_is_the_one_it_was_made_with(with_params: bool, in_place: bool) -> None:
    during, after, model = Tracker(), Tracker(), nn.Linear(2, 1)
    rates = [torch.tensor(1.0) if in_place else 1.0, torch.tensor(9.0) if in_place else 9.0]
    groups = [{"params": [p], "lr": r} for p, r in zip(model.parameters(), rates, strict=True)]
    opt = torch.optim.SGD(groups, lr=1.0)
    half = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    recorders = [ParamStats()] if with_params else []
    with watch(model, opt, *recorders, LogTo(during, every=2)) as w:
        for _ in range(5):
            model(torch.ones(4, 2)).sum().backward()
            opt.step()
            half.step()
            w.loss(1.0)
    w.log_to(after)

    rate = dict(enumerate([9.0, 4.5, 2.25, 1.125, 0.5625]))
    sent = {step: values["lr"] for step, values in during.got if "lr" in values}
    assert sent == (rate if with_params else {i: rate[i] for i in (1, 3, 4)})
    sent = {step: values["lr"] for step, values in after.got if "lr" in values}
    assert sent == (rate if with_params else {4: rate[4]})
    assert w.run_record().info["lr"] == [1 / 16, 9 / 16]


def test_a_training_that_breaks_is_logged_up_to_there_and_by_no_copy() -> None:
    def fail(cb: Any) -> None:
        if cb.train_iter == 4:
            raise ValueError("broken")

    tracker = Tracker()
    learn = quiet(n_trn=6, cbs=LogTo(tracker))
    with pytest.raises(ValueError, match="broken"):
        learn.fit(1, cbs=Callback(after_pred=fail))
    assert tracker.steps("loss") == [0, 1, 2, 3]
    n = len(tracker.got)

    cb = learn.cbs[-1]
    for other in (copy.deepcopy(learn).cbs[-1], pickle.loads(pickle.dumps(cb))):
        assert other.target is None
    copy.deepcopy(learn).fit(1)
    assert len(tracker.got) == n


def test_a_dead_target_warns_once_and_the_training_goes_on() -> None:
    tracker = Tracker(fails_at=4)
    learn = quiet(n_trn=10, cbs=LogTo(tracker, every=2))

    nothing_more = r"LogTo sends nothing more to Tracker.*network"
    with pytest.warns(HookkitWarning, match=nothing_more) as all_:
        learn.fit(2)
    assert len(all_) == 1
    assert learn.n_steps == 20
    tracker.fails_at = None
    learn.fit(1)

    assert tracker.steps("loss") == list(range(30))


# --- CSVLogger


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize(("append", "n"), [(False, 2), (True, 4)])
def test_each_epoch_is_a_row_of_a_new_file_or_appended(
    append: bool, n: int, tmp_path: Path
) -> None:
    learn = quiet(cbs=CSVLogger("logs/log.csv", append=append), path=tmp_path)

    learn.fit(2)
    learn.fit(2)
    learn.validate()

    found = rows(tmp_path / "logs" / "log.csv")
    assert list(found[0]) == learn.recorder.metric_names
    assert [row["epoch"] for row in found] == ["0", "1"] * (n // 2)
    values = [v[1] for v in learn.recorder.values]
    assert [float(row["valid_loss"]) for row in found] == values[-n:]


def test_a_file_with_other_columns_is_not_appended_to(tmp_path: Path) -> None:
    def learner(metrics: Any) -> Any:
        return quiet(cbs=CSVLogger(append=True), path=tmp_path, metrics=metrics)

    path = tmp_path / "history.csv"
    path.touch()
    learner(None).fit(1)
    before = path.read_text()

    with pytest.raises(OptionError, match="has the columns epoch,train_loss,valid_loss,time, and"):
        learner(nn.L1Loss()).fit(1)
    assert path.read_text() == before
    assert before.startswith("epoch,train_loss")
