"""`save`, `load` and `fit(resume=…)`: a file holds the training, and a fit goes on bit for bit."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import plain, quiet
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hookkit.callbacks import (
    Callback,
    GradientAccumulation,
    MixedPrecision,
    SaveModelCallback,
    SchedulerCallback,
)
from hookkit.errors import OptionError
from hookkit.learner import Learner
from hookkit.records import Run
from hookkit.stats import ActivationStats, ParamStats

Fit = Callable[..., None]


def learner(folder: Path, own_generator: bool = False, workers: int = 0) -> Any:
    """With a shuffling loader, dropout and batch norm: all draw, or keep, numbers."""
    torch.manual_seed(1)
    x = torch.randn(40, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    g = torch.Generator().manual_seed(5) if own_generator else None
    train = DataLoader(data, 8, shuffle=True, generator=g, num_workers=workers)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
    dls = (train, DataLoader(data, 20))
    return plain(dls, net, loss_func=nn.MSELoss(), opt_func=torch.optim.AdamW, path=folder)


class Dies(Callback):
    """Ends a fit as a machine that is switched off, after what saves."""

    order = 100

    def after_epoch(self) -> None:
        if self.learn.epoch == 1:
            raise KeyboardInterrupt


def saver() -> SaveModelCallback:
    return SaveModelCallback(every_epoch=True, with_opt=True)


def fits() -> dict[str, Fit]:
    """Ways to train for four epochs."""

    def by(*cbs: Callable[[], Any], one_cycle: bool = False) -> Fit:
        def fit(learn: Any, *more: Any, **options: Any) -> None:
            run = learn.fit_one_cycle if one_cycle else learn.fit
            run(4, 1e-2, cbs=[*(cb() for cb in cbs), *more], **options)

        return fit

    def schedule(make: Any, by_epoch: bool) -> Callable[[], Any]:
        return lambda: SchedulerCallback(make, by_epoch)

    return {
        "plain": by(),
        "one cycle": by(one_cycle=True),
        "one cycle, accumulation": by(lambda: GradientAccumulation(2), one_cycle=True),
        "by step": by(schedule(lambda opt, n: StepLR(opt, 7), False)),
        "by epoch": by(schedule(lambda opt, n: StepLR(opt, 1, 0.5), True)),
        "plateau": by(schedule(lambda opt, n: ReduceLROnPlateau(opt, patience=0), True)),
        "fp16": by(lambda: MixedPrecision(init_scale=2.0**20, growth_interval=3)),
    }


def state(learn: Any) -> tuple[dict[str, Tensor], Any]:
    return learn.model.state_dict(), learn.opt.state_dict()


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("way", fits())
def test_a_resumed_fit_ends_as_one_that_was_never_interrupted(
    way: str, own_generator: bool, tmp_path: Path
) -> None:
    fit = fits()[way]
    whole = learner(tmp_path, own_generator)
    fit(whole)

    cut = learner(tmp_path, own_generator)
    with pytest.raises(KeyboardInterrupt):
        fit(cut, saver(), Dies())
    torch.manual_seed(99)
    again = learner(tmp_path, own_generator)
    torch.rand(7)
    fit(again, resume="model_1")

    torch.testing.assert_close(state(again), state(whole), rtol=0, atol=0)
    assert again.n_steps == whole.n_steps
    assert [row["epoch"] for row in again.recorder.rows()] == [2, 3]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fit_that_has_ended_goes_on_too_whatever_the_workers(
    workers: int, tmp_path: Path
) -> None:
    whole = learner(tmp_path, workers=workers)
    whole.fit(3)
    first = learner(tmp_path, workers=workers)
    first.fit(2)
    file = first.save("run")

    again = learner(tmp_path, workers=workers)
    again.fit(3, resume=file)

    assert file == tmp_path / "models" / "run.pth"
    torch.testing.assert_close(state(again), state(whole), rtol=0, atol=0)


def test_what_both_parts_recorded_is_joined_to_the_whole(tmp_path: Path) -> None:
    def recorded(learn: Any, n: int, **options: Any) -> Any:
        learn.fit(n, cbs=[ActivationStats(), ParamStats(), saver()], **options)
        return learn.run_record()

    whole = recorded(learner(tmp_path), 4)
    first = recorded(learner(tmp_path), 2).save(tmp_path / "first.npz")
    later = recorded(learner(tmp_path), 4, resume="model_1")
    run = Run.load(first) + later

    assert [(r["epoch"], r["step"]) for r in run.valid] == [(i, 5 * i + 4) for i in range(4)]
    torch.testing.assert_close(run.losses, whole.losses, rtol=0, atol=0)
    for joined, own in zip(run.records, whole.records, strict=True):
        assert joined.steps.tolist() == own.steps.tolist() == list(range(20))
        assert joined.epochs.tolist() == own.epochs.tolist()
        for name in own.values:
            want = torch.from_numpy(own.values[name])
            got = torch.from_numpy(joined.values[name])
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda learn: None, r"run.pth does not exist. The folder has other\."),
        (lambda learn: learn.save("run", with_opt=False), "saved without the optimizer"),
        (
            lambda learn: learn.fit(1, cbs=Callback(after_train=lambda cb: cb.learn.save("run"))),
            r"or within an epoch\. Use a file that learn.save wrote in `after_epoch`",
        ),
        (lambda learn: (learn.fit(5), learn.save("run")), "5 epochs are done in it, of 4 in all"),
        (
            lambda learn: (learn.fit_one_cycle(4), learn.save("run")),
            r"schedules of \[20\] steps, and this fit of \[\]\. Give the same number of epochs",
        ),
    ],
)
def test_a_file_that_a_fit_cannot_go_on_from_is_refused(
    write: Any, said: str, tmp_path: Path
) -> None:
    learn = learner(tmp_path)
    learn.save("other")
    write(learn)
    before = copy.deepcopy(learn.model.state_dict())

    with pytest.raises(OptionError, match=said):
        learn.fit(4, resume="run")

    torch.testing.assert_close(learn.model.state_dict(), before, rtol=0, atol=0)
    assert not learn.fitting


def test_saving_before_the_schedule_has_its_epoch_is_refused_with_the_cure(tmp_path: Path) -> None:
    early = Callback(after_epoch=lambda cb: cb.learn.save("run"))
    half = SchedulerCallback(lambda opt, n: StepLR(opt, 1, 0.5), by_epoch=True)

    with pytest.raises(OptionError, match=r"SchedulerCallback comes later.* `order = 61`"):
        learner(tmp_path).fit(1, cbs=[early, half])


def test_weights_and_optimizer_are_loaded_or_a_state_dict_alone(tmp_path: Path) -> None:
    learn, other = learner(tmp_path), learner(tmp_path)
    learn.fit(1)
    learn.save("best")

    assert other.load("best") is other
    torch.testing.assert_close(state(other), state(learn), rtol=0, atol=0)

    net = learner(tmp_path).model
    torch.save(net.state_dict(), tmp_path / "net.pth")
    learn.load(tmp_path / "net")
    torch.testing.assert_close(learn.model.state_dict(), net.state_dict(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        quiet(path=tmp_path).load("best")


def test_a_file_is_found_as_its_path_is_written_and_has_the_plain_models_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learn = Learner(None, nn.Linear(2, 1))
    learn.create_opt()
    names = list(learn.model.state_dict())
    learn.model = torch.compile(learn.model, backend="eager")

    file = learn.save("run")

    assert file == Path("models/run.pth")
    assert list(torch.load(file, weights_only=True)["model"]) == names
    for path in ("run", "models/run", file):
        learn.load(path)
    with pytest.raises(OptionError, match=r"load: models/rum\.pth does not exist\..* has run\."):
        learn.load("rum")
