"""A training that was killed goes on from its checkpoint as if nothing had happened."""

import json
import os
import pickle
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_recording_zoo import trained
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from zoo import ZOO, Entry

from hookkit import ActivationStats, FlightRecorder, GradientStats, Learner, ParamStats
from hookkit.callbacks import (
    Callback,
    CSVLogger,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    LogTo,
    MixedPrecision,
    SaveModelCallback,
    SchedulerCallback,
)
from hookkit.data import DataLoaders
from hookkit.errors import HookkitWarning, OptionError
from hookkit.learner.saving import load_state, save_state


def accuracy(pred: Tensor, y: Tensor) -> Tensor:
    return (pred.argmax(1) == y).float().mean()


def recorders() -> list[Callback]:
    options: Any = {"with_hist": True, "units": True, "window": 6, "on_valid": True}
    stats = ActivationStats(every=3, **options)
    norms = [GradientStats(of="both"), ParamStats(every=2), FlightRecorder("report")]
    return [stats, *norms, GradientClip(1.0)]


def learner(folder: Path, seed: int = 0, *, own_generator: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
    generator = torch.Generator().manual_seed(3) if own_generator else None
    train = DataLoader(data, 8, shuffle=True, generator=generator)
    net = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
    )
    dls = DataLoaders(train, DataLoader(data, 16))
    given = {"opt_func": torch.optim.AdamW, "lr": 0.01, "metrics": accuracy, "cbs": recorders()}
    learn = Learner(dls, net, nn.CrossEntropyLoss(), **{**given, **options}, path=folder)
    learn.logger = lambda row: None
    torch.manual_seed(seed)
    return learn


def killed(epoch: int, event: str = "after_epoch", order: float = 0) -> Callback:
    """Saves a checkpoint at an event of an epoch, and ends the process, as it were."""

    def save(cb: Callback) -> None:
        if cb.epoch == epoch and not cb.eval_pass:
            cb.learn.save("checkpoint")
            raise KeyboardInterrupt

    made = Callback(**{event: save})
    made.order = order
    return made


def assert_same(a: Any, b: Any) -> None:
    for (name, x), y in zip(
        a.model.state_dict().items(), b.model.state_dict().values(), strict=True
    ):
        assert x.equal(y), name
    assert a.run_record() == b.run_record()
    for name in ("losses", "values", "lrs", "iters"):
        assert getattr(a.recorder, name) == getattr(b.recorder, name), name
    assert (a.n_steps, a.train_iter, a.pct_train) == (b.n_steps, b.train_iter, b.pct_train)


@pytest.mark.parametrize("order", [-100, 0, 99])
@pytest.mark.parametrize("how", ["fit", "fit_one_cycle"])
def test_a_resumed_run_is_the_one_that_was_never_interrupted(
    how: str, order: float, tmp_path: Path
) -> None:
    whole, first, later = (learner(tmp_path, seed) for seed in (0, 0, 7))
    torch.manual_seed(0)
    getattr(whole, how)(5)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        getattr(first, how)(5, cbs=killed(2, order=order))

    torch.manual_seed(7)
    getattr(later, how)(5, resume="checkpoint")

    assert_same(whole, later)
    valid = [learn.activation_stats.record(valid=True) for learn in (whole, later)]
    assert valid[0] == valid[1]
    assert [row["epoch"] for row in later.recorder.rows()] == [0, 1, 2, 3, 4]
    assert whole.gradient_clip.norms.read().tolist() == later.gradient_clip.norms.read().tolist()


@pytest.mark.parametrize("own_generator", [False, True])
def test_the_order_of_the_data_and_all_random_numbers_go_on(
    own_generator: bool, tmp_path: Path
) -> None:
    def noise(cb: Callback) -> None:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    runs = []
    for resume in (None, "checkpoint"):
        drawn: list[Any] = []
        learn = learner(tmp_path, own_generator=own_generator, cbs=Callback(before_batch=noise))
        random.seed(resume is None)
        np.random.seed(resume is None)
        torch.manual_seed(resume is None)
        if resume is None:
            learn.add_cbs(Callback(after_epoch=lambda cb: cb.epoch or cb.learn.save("checkpoint")))
        learn.fit(2, resume=resume)
        runs.append((learn, drawn))

    (whole, all_drawn), (later, drawn) = runs
    assert_same(whole, later)
    assert drawn == all_drawn[-len(drawn) :] != all_drawn


def plateau(opt: Any, n: int) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(opt, patience=0, threshold=1.0)


CALLBACKS = {
    "plateau": lambda: SchedulerCallback(plateau, by_epoch=True),
    "accumulation": lambda: GradientAccumulation(2),
    "fp16": lambda: MixedPrecision("fp16", growth_interval=4),
    "early stop": lambda: EarlyStoppingCallback("accuracy", patience=2),
    "best model": lambda: SaveModelCallback("train_loss", comp=np.greater),
}


@pytest.mark.parametrize("cb", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_go_on_where_they_were(cb: Any, tmp_path: Path) -> None:
    whole, first, later = (learner(tmp_path) for _ in range(3))
    whole.fit(4, cbs=cb())
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        first.fit(4, cbs=[cb(), killed(1)])

    later.fit(4, cbs=cb(), resume="checkpoint")

    assert_same(whole, later)
    assert repr(list(whole._past)) == repr(list(later._past))


def logged(path: Path) -> list[tuple[Any, str, float]]:
    """The rows of a log: step, name, value."""
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        rows = [line.split(",") for line in lines[1:]]
        return [(int(step), name, float(value)) for step, name, value in rows]
    found = [json.loads(line) for line in lines]
    return [(row["step"], name, x) for row in found for name, x in row.items() if name != "step"]


def once(path: Path) -> dict[tuple[Any, str], float]:
    """Value by step and name, each of which is there once."""
    rows = logged(path)
    found = {(step, name): value for step, name, value in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_resumed_run_logs_what_one_that_was_never_interrupted_does(
    name: str, every: int, tmp_path: Path
) -> None:
    path, one = tmp_path / name, tmp_path / f"one_{name}"
    whole, first, later = (learner(tmp_path) for _ in range(3))
    whole.fit(3, cbs=LogTo(one, every=every))
    save = Callback(after_epoch=lambda cb: cb.epoch == 1 and cb.learn.save("two"))
    torch.manual_seed(0)
    first.fit(3, cbs=[LogTo(path, every=every), save])  # what is logged after the checkpoint

    later.fit(3, cbs=LogTo(path, every=every), resume="two")

    assert once(path) == once(one)


def test_what_was_logged_before_the_last_save_is_not_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first, later = learner(tmp_path), learner(tmp_path)
    first.add_cb(LogTo(path))
    first.fit(2)
    first.save("two")
    later.add_cb(LogTo(path))

    later.fit(3, resume="two")

    assert [step for step, name in once(path) if name == "loss"] == list(range(15))


def test_rows_of_another_training_in_the_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    learner(tmp_path).fit(3, cbs=LogTo(path))
    before = path.read_text()
    with pytest.raises(KeyboardInterrupt):
        learner(tmp_path).fit(3, cbs=[LogTo(path, every=1), killed(1)])

    learner(tmp_path).fit(3, cbs=LogTo(path), resume="checkpoint")
    after = path.read_text()
    path.write_text(before)  # another file by that name
    learner(tmp_path).fit(3, cbs=LogTo(path), resume="checkpoint")

    assert after.startswith(before)
    assert [step for step, name, _ in logged(path) if name == "loss"] == [*range(15), *range(9, 15)]
    path.write_text(after)
    assert [step for step, name, _ in logged(path) if name == "loss"] == [*range(15)] * 2


def test_a_resume_that_fails_leaves_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    save = Callback(after_epoch=lambda cb: cb.epoch or cb.learn.save("one"))
    learner(tmp_path).fit(2, cbs=[LogTo(path, every=1), save])
    before = path.read_text()

    with pytest.raises(OptionError, match="this Learner's SGD"):
        learner(tmp_path, opt_func=torch.optim.SGD).fit(3, cbs=LogTo(path), resume="one")

    assert path.read_text() == before


def test_a_log_that_cannot_be_read_spoils_no_checkpoint(tmp_path: Path) -> None:
    (path := tmp_path / "log.jsonl").mkdir()
    learn = learner(tmp_path)
    with pytest.warns(
        HookkitWarning, match=r"LogTo sends nothing more to log\.jsonl in this.*: IsADir"
    ):
        learn.fit(2, cbs=[LogTo(path, every=1), killed_quietly()])

    path.rmdir()
    learner(tmp_path).fit(3, cbs=LogTo(path), resume="checkpoint")

    assert [step for step, name in once(path) if name == "loss"] == list(range(15))


def killed_quietly() -> Callback:
    return Callback(after_epoch=lambda cb: cb.learn.save("checkpoint") and None)


def test_a_long_history_halves_as_it_would_have(tmp_path: Path) -> None:
    whole, first, later = (learner(tmp_path, cbs=[ActivationStats(), ParamStats()]) for _ in "abc")
    for learn in (whole, first, later):
        for stats, past in ((learn.activation_stats.accumulator, "history"),):
            state = stats._state
            limited = type(state.history)(limit=8)
            stats._state = state._replace(**{past: limited})
        learn.param_stats.history = type(limited)(limit=8)
    whole.fit(5)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        first.fit(5, cbs=killed(2))

    later.fit(5, resume="checkpoint")

    assert len(later.activation_stats.record()) == 7
    assert_same(whole, later)


def test_a_fit_that_was_saved_after_its_end_can_be_made_longer(tmp_path: Path) -> None:
    whole, first, later = (learner(tmp_path) for _ in range(3))
    whole.fit(4)
    torch.manual_seed(0)
    first.fit(2)
    path = first.save("done")

    later.fit(4, resume=path)

    assert later.recorder.values == whole.recorder.values
    assert later.pct_train == whole.pct_train == 1
    later.fit(4, resume=later.save("done"))
    assert later.n_steps == whole.n_steps == 20


def cosine() -> Callback:
    return SchedulerCallback(torch.optim.lr_scheduler.CosineAnnealingLR)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda learn: learn.fit(4, cbs=cosine(), resume="end"), "T_max=10, this one 20"),
        (
            lambda learn: learn.fit_one_cycle(2, resume="end"),
            "class='CosineAnnealingLR', this one 'One",
        ),
        (
            lambda learn: learn.fit(2, 5.0, cbs=cosine(), resume="end"),
            r"base_lrs=\[0.01\], this one",
        ),
    ],
)
def test_another_schedule_is_not_taken_up(call: Any, said: str, tmp_path: Path) -> None:
    learner(tmp_path).fit(2, cbs=[cosine(), SaveAtEnd()])
    learn = learner(tmp_path)
    before = weights(learn)

    with pytest.raises(OptionError, match=f"schedule has {said}.*Resume with"):
        call(learn)

    assert all(map(torch.equal, weights(learn), before))
    assert learn.n_steps == 0


def halves(model: nn.Module) -> list[list[nn.Parameter]]:
    return [list(model[:2].parameters()), list(model[4].parameters())]  # type: ignore[index]


class Unfreeze(Callback):
    def before_epoch(self) -> None:
        if self.learn.epoch == 1:
            self.learn.unfreeze()


def test_what_a_callback_has_unfrozen_is_trained_on(tmp_path: Path) -> None:
    whole, first, later = (learner(tmp_path, splitter=halves, cbs=ParamStats) for _ in range(3))
    for learn in (whole, first, later):
        learn.freeze()
    whole.fit(4, cbs=Unfreeze())
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        first.fit(4, cbs=[Unfreeze(), killed(2)])

    later.fit(4, cbs=Unfreeze(), resume="checkpoint")

    assert_same(whole, later)
    assert (later.frozen_idx, later.model[0].weight.requires_grad) == (0, True)


def test_the_order_of_the_data_goes_on_where_workers_stay(tmp_path: Path) -> None:
    whole, first, later = (learner(tmp_path, own_generator=False, cbs=None) for _ in range(3))
    for learn in (whole, first, later):
        data = learn.dls.train_ds
        train = DataLoader(data, 8, shuffle=True, num_workers=1, persistent_workers=True)
        learn.dls = DataLoaders(train, learn.dls.valid)
    torch.manual_seed(0)
    whole.fit(3)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        first.fit(3, cbs=killed(0))

    later.fit(3, resume="checkpoint")

    assert_same(whole, later)


@pytest.mark.parametrize("order", [0, 99])
@pytest.mark.parametrize("append", [False, True])
def test_a_file_of_the_log_goes_on_from_the_checkpoint(
    append: bool, order: float, tmp_path: Path
) -> None:
    path, logs = tmp_path / "history.csv", []
    for resumed in (False, True):
        learner(tmp_path, cbs=None).fit(1, cbs=[CSVLogger(), Untimed()])
        learn, cbs = learner(tmp_path, cbs=None), [CSVLogger(append=append), Untimed()]
        if resumed:
            save = Callback(after_epoch=lambda cb: cb.epoch == 1 and cb.learn.save("early"))
            save.order = order
            learn.fit(3, cbs=[*cbs, save])  # killed with a row more than the checkpoint has
            learn = learner(tmp_path, cbs=None)
            cbs = [CSVLogger(append=append), Untimed()]
        torch.manual_seed(0)
        learn.fit(4, cbs=cbs, resume="early" if resumed else None)
        logs.append(path.read_text())

    assert logs[0] == logs[1]
    assert len(logs[1].splitlines()) == 5 + append


class Untimed(Callback):
    order = 55

    def after_epoch(self) -> None:
        self.learn.recorder.log[-1] = "00:00"


def test_a_resume_that_fails_leaves_the_file_of_the_log(tmp_path: Path) -> None:
    learner(tmp_path).fit(2, cbs=[CSVLogger(), SaveAtEnd()])
    path = tmp_path / "history.csv"
    before = path.read_text()

    with pytest.raises(OptionError, match=r"has the columns epoch,.*,accuracy,time, this fit has"):
        learner(tmp_path, metrics=None).fit(3, cbs=CSVLogger(), resume="end")
    with pytest.raises(OptionError, match="this Learner's SGD"):
        learner(tmp_path, opt_func=torch.optim.SGD).fit(3, cbs=CSVLogger(), resume="end")

    assert path.read_text() == before


def test_a_metric_more_is_a_column_more(tmp_path: Path) -> None:
    learner(tmp_path, metrics=None).fit(1, cbs=SaveAtEnd())
    learn = learner(tmp_path)

    learn.fit(2, resume="end")

    assert learn.recorder.metric_names[3] == "accuracy"
    assert ["accuracy" in row for row in learn.recorder.rows()] == [False, True]


def test_in_the_same_learner_the_record_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    whole, again = learner(tmp_path), learner(tmp_path)
    whole.fit(3)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        again.fit(3, cbs=killed(1))
    again.fit(1)

    again.fit(3, resume="checkpoint")

    assert_same(whole, again)


@pytest.mark.parametrize("entry", ZOO, ids=repr)
def test_what_was_recorded_of_any_model_is_stored_whole(entry: Entry, tmp_path: Path) -> None:
    cbs, again = recorders()[:3], recorders()[:3]
    trained(entry, cbs)

    save_state(
        tmp_path / "x.pth", {"model": {}, "callbacks": {cb.name: cb.state_dict() for cb in cbs}}
    )
    state = load_state(tmp_path / "x.pth")["callbacks"]

    for cb, other in zip(cbs, again, strict=True):
        other.load_state_dict(state[cb.name])
        assert other.record() == cb.record()
        assert other.state_dict().keys() == state[cb.name].keys()


def test_the_file_loads_with_torch_alone(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.fit(1)

    state = torch.load(learn.save("net"), weights_only=True)

    learner(tmp_path).model.load_state_dict(state["model"])
    assert state["fit"]["epoch"] == 1


def test_load_leaves_what_was_recorded(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.fit(1)
    path = learn.save("first")
    learn.fit(1)
    recorded, weights = learn.run_record(), torch.load(path)["model"]

    learn.load(path)

    assert learn.run_record() == recorded
    assert all(p.equal(weights[name]) for name, p in learn.model.state_dict().items())


# --- callbacks of the user's


class Best(Callback):
    """Keeps the best loss, and something that a file may not hold."""

    def __init__(self, kept: Any = 1.5) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def test_a_callback_says_what_a_checkpoint_has_of_it(tmp_path: Path) -> None:
    learner(tmp_path, cbs=[Best(np.float32(0.5))]).fit(1, cbs=SaveAtEnd())
    later = learner(tmp_path, cbs=[Best()])

    later.fit(1, resume="end")

    assert later.best.kept == 0.5
    assert Callback().state_dict() == {}


class SaveAtEnd(Callback):
    def after_fit(self) -> None:
        self.learn.save("end")


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    learn = learner(tmp_path, cbs=[Best()])
    path = learn.save("best")
    before, learn.best.kept = path.read_bytes(), Path("a")

    with pytest.raises(OptionError, match=r"save\('best'\): pathlib.*cannot be loaded again"):
        learn.save("best")

    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["best.pth"]


def test_the_users_own_safe_globals_stay(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([np.ndarray]):
        learner(tmp_path).load(learner(tmp_path).save("net"))

        assert np.ndarray in torch.serialization.get_safe_globals()


def test_a_recorder_that_is_missing_is_warned_of(tmp_path: Path) -> None:
    learner(tmp_path).fit(1, cbs=SaveAtEnd())
    later = learner(tmp_path, cbs=recorders()[1:])

    with pytest.warns(HookkitWarning, match="has the state of activation_stats, and this Learner"):
        later.fit(2, resume="end")

    assert later.n_steps == 10


# --- what does not fit


def weights(learn: Any) -> list[Tensor]:
    return [t.clone() for t in learn.model.state_dict().values()]


def one_group_each(model: nn.Module) -> list[list[nn.Parameter]]:
    return [[p] for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"splitter": one_group_each}, r"groups of \[6\] parameters, and this Learner's AdamW has"),
        ({"opt_func": torch.optim.SGD}, "the state of AdamW with groups.*this Learner's SGD has"),
        ({"cbs": ActivationStats(eps=0.1)}, "was made with eps=0.1.*checkpoint's with eps=0.05"),
    ],
    ids=["groups", "optimizer", "recorder"],
)
def test_nothing_is_changed_by_a_file_that_does_not_fit(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = learner(tmp_path)
    path.fit(1, cbs=SaveAtEnd())
    learn = learner(tmp_path, **options)
    before, drawn = weights(learn), torch.get_rng_state()

    with pytest.raises(OptionError, match=said):
        learn.fit(2, resume="end")

    assert all(map(torch.equal, weights(learn), before))
    assert torch.get_rng_state().equal(drawn)
    if "cbs" not in options:
        with pytest.raises(OptionError, match=said):
            learn.load("end")
        assert all(map(torch.equal, weights(learn), before))
        assert learn.opt is not None or learn.load("end", with_opt=False) is learn


def test_the_weights_of_another_model_change_nothing(tmp_path: Path) -> None:
    other = Learner(None, nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 9)), path=tmp_path)
    path = other.save("other", with_opt=False)
    learn = learner(tmp_path)
    before = weights(learn)

    for strict in (True, False):
        with pytest.raises(OptionError, match=f"{path} does not fit this Learner.*size mismatch"):
            learn.load("other", strict=strict)

    assert all(map(torch.equal, weights(learn), before))
    with pytest.raises(OptionError, match="has no opt, fit, callbacks, random, loaders: it was"):
        learn.fit(1, resume="other")


def test_a_resume_begins_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        learner(tmp_path).fit(3, cbs=killed(1, "after_validate"))
    learn = learner(tmp_path)

    with pytest.raises(OptionError, match=r"saved within epoch 1.*fit\(3, start_epoch=1\)"):
        learn.fit(3, resume="checkpoint")
    with pytest.raises(OptionError, match=r"start_epoch=1, resume=…\).*Leave out start_epoch"):
        learn.fit(3, start_epoch=1, resume="checkpoint")

    learn.load("checkpoint").fit(3, start_epoch=1)
    with pytest.raises(OptionError, match=r"fit\(2, resume=…\): 3 epochs are done in"):
        learn.fit(2, resume=learn.save("all"))


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hacked",)


def torn(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "flipped":  # one bit of one weight, of which torch.load knows nothing
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif how == "text":
        path.write_text("not a checkpoint")
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Hostile()))
    elif how == "hostile":
        torch.save({"model": Hostile()}, path)
    elif how == "tensor":
        torch.save(torch.ones(2), path)
    else:
        state = torch.load(path)
        torch.save({**state, "opt": 3} if how == "number" else state["model"], path)


@pytest.mark.parametrize(
    "how",
    ["empty", "truncated", "flipped", "text", "pickle", "hostile", "tensor", "number", "bare"],
)
def test_a_file_that_is_not_whole_gets_one_clear_line(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learner(tmp_path).fit(1, cbs=SaveAtEnd())
    torn(tmp_path / "models" / "end.pth", how)
    learn = learner(tmp_path)
    before = weights(learn)

    for call in (lambda: learn.load("end"), lambda: learn.fit(2, resume="end")):
        with pytest.raises(OptionError, match=r"load: .*end\.pth (is|has) .*Give a file") as error:
            call()
        assert "\n" not in str(error.value)

    assert all(map(torch.equal, weights(learn), before))
    assert not Path("hacked").exists()


def test_a_checkpoint_is_loaded_as_it_was_written_or_not_at_all(tmp_path: Path) -> None:
    learner(tmp_path).fit(1, cbs=SaveAtEnd())
    path, dice = tmp_path / "models" / "end.pth", random.Random(0)
    whole, state = path.read_bytes(), load_state(path)
    torn = [whole[:n] for n in range(0, len(whole), 2000)]
    for _ in range(100):
        at = dice.randrange(len(whole))
        torn.append(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
    refused = 0

    for content in torn:
        path.write_bytes(content)
        try:
            found = load_state(path)
            assert all(map(torch.equal, found["model"].values(), state["model"].values()))
        except OptionError:
            refused += 1

    assert refused > len(torn) // 2


@pytest.mark.parametrize("entry", ["fit", "callbacks", "random", "loaders", "opt"])
def test_a_file_made_by_hand_changes_nothing(entry: str, tmp_path: Path) -> None:
    learner(tmp_path).fit(1, cbs=SaveAtEnd())
    path = tmp_path / "models" / "end.pth"
    state = torch.load(path)
    junk = {"loaders": [], "fit": {"epoch": 1, "within_epoch": False}}
    junk["callbacks"] = {"param_stats": {"history": 3}}  # in place of the packed ones
    torch.save({**state, entry: junk.get(entry, {"torch": 1})}, path)
    learn = learner(tmp_path)
    before, drawn = weights(learn), torch.get_rng_state()

    with pytest.raises(OptionError, match=r"does not fit this Learner|state is of another class"):
        learn.fit(2, resume="end")

    assert all(map(torch.equal, weights(learn), before))
    assert torch.get_rng_state().equal(drawn)
    assert learn.n_steps == 0
    assert len(learn.recorder.values) == 0


# --- writing while it trains


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may be larger than 100,000 bytes; pytest's log included, so in the test alone."""
    limit, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_old_file_and_the_training_goes_on(tmp_path: Path) -> None:
    learn = learner(tmp_path, cbs=None)
    path = learn.save("net")
    learn.model.append(nn.Linear(200, 200))
    before = path.read_bytes()
    with small_disk(), pytest.raises(OSError, match=r"File too large: '.*net\.pth'"):
        learn.save("net")

    learn.model[-1] = nn.Identity()
    big = Callback(after_epoch=lambda cb: setattr(cb.learn.model, "x", nn.Linear(200, 200)))
    not_written = pytest.warns(HookkitWarning, match=r"net\.pth was not written \(File too large\)")
    with small_disk(), not_written:
        learn.fit(1, cbs=[big, Callback(after_fit=lambda cb: cb.learn.save("net"))])

    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["net.pth"]
    assert learn.n_steps == 5
