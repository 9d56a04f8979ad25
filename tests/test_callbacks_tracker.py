"""`EarlyStoppingCallback` and `SaveModelCallback`: the best epoch so far."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hookkit import (
    Callback,
    CancelValidException,
    EarlyStoppingCallback,
    HookkitWarning,
    SaveModelCallback,
)
from hookkit.callbacks import TrackerCallback
from hookkit.testing import synth_learner


def scripted(values: Any, cbs: Any = None, **kwargs: Any) -> Any:
    """A Learner whose metric `score` is `values`, one for each epoch."""
    learn = synth_learner(n_trn=2, n_val=1, cbs=cbs, metrics=score, **kwargs)
    learn.logger = lambda row: None
    learn.add_cb(Callback(before_validate=lambda cb: score_is(values[cb.learn.epoch])))
    return learn


now = [0.0]


def score_is(value: float) -> None:
    now[0] = value


def score(pred: Any, y: Any) -> float:
    return now[0]


# --- what is best


@pytest.mark.parametrize(("delta", "best"), [(0.0, 2), (0.5, 1)])
def test_it_knows_the_best_epoch_which_is_better_by_min_delta(delta: float, best: int) -> None:
    values = [1.0, 3.2, 3.5, 3.4]
    learn = scripted(values, cbs=TrackerCallback("score", np.greater, min_delta=delta))

    learn.fit(4)

    tracker = learn.tracker
    assert (tracker.best, tracker.best_epoch, tracker.new_best) == (values[best], best, False)
    assert TrackerCallback().comp(1.0, 2.0)  # a loss is better when less, a metric when greater
    assert TrackerCallback("error_rate").comp(1.0, 2.0)
    with pytest.warns(
        HookkitWarning, match=r"monitor='mae'\): greater is taken for better.*np.less"
    ):
        assert TrackerCallback("mae").comp(2.0, 1.0)
    assert TrackerCallback("score", comp=np.less).comp(1.0, 2.0)
    for name in ("accuracy", "valid_accuracy", "F1Score", "roc_auc_score"):  # no guess, no warning
        assert TrackerCallback(name).comp(2.0, 1.0)


def test_nan_is_never_the_best_and_a_cancelled_validation_is_not_judged() -> None:
    stop = EarlyStoppingCallback("score", np.greater, patience=2)
    learn = scripted([1.0, float("nan"), 9.0, 9.0], cbs=stop)
    learn.fit(2)
    assert (stop.best, stop.wait) == (1.0, 1)

    def cancel(cb: Any) -> None:
        raise CancelValidException

    learn.fit(3, cbs=Callback(before_validate=cancel))

    assert stop.wait == 0
    assert len(learn.recorder.values) == 5


# --- EarlyStoppingCallback


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 6), (3, 7)])
def test_it_stops_when_nothing_gets_better(patience: int, epochs: int) -> None:
    values = [1.0, 2.0, 1.5, 2.5, 2.5, 2.5, 2.5, 2.5]
    learn = scripted(values, cbs=EarlyStoppingCallback("score", np.greater, patience=patience))

    learn.fit(7)

    assert len(learn.recorder.values) == epochs


# --- SaveModelCallback


def weight(learn: Any) -> Any:
    return learn.model.a.detach().clone()


def test_the_best_weights_are_loaded_at_the_end(tmp_path: Path) -> None:
    seen: list[Any] = []
    learn = scripted([1.0, 3.0, 2.0], cbs=SaveModelCallback("score", np.greater), path=tmp_path)
    learn.add_cb(Callback(after_epoch=lambda cb: seen.append(weight(cb.learn))))

    learn.fit(3)

    assert torch.equal(weight(learn), seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["model.pth"]


@pytest.mark.parametrize("with_opt", [False, True])
def test_the_last_weights_are_saved_at_the_end(with_opt: bool, tmp_path: Path) -> None:
    cb = SaveModelCallback("score", np.greater, fname="best", with_opt=with_opt, at_end=True)
    learn = scripted([2.0, 1.0], cbs=cb, path=tmp_path)

    learn.fit(2)

    saved = torch.load(tmp_path / "models" / "best.pth")
    assert torch.equal(saved["model"]["a"], weight(learn))
    assert ("opt" in saved) == with_opt


def test_a_second_fit_begins_anew_and_loads_nothing_if_nothing_was_best(tmp_path: Path) -> None:
    learn = scripted([1.0, float("nan")], cbs=SaveModelCallback("score", np.greater), path=tmp_path)
    learn.fit(1)  # leaves a file
    learn.cbs[-1].run = False
    score_is(float("nan"))
    before = weight(learn)

    learn.fit(1)

    assert not torch.equal(weight(learn), before)


@pytest.mark.parametrize(("every", "epochs"), [(True, [0, 1, 2, 3]), (3, [0, 3])])
def test_every_epoch_or_every_third_is_saved(every: Any, epochs: list[int], tmp_path: Path) -> None:
    learn = scripted([0.0] * 4, cbs=SaveModelCallback(fname="m", every_epoch=every), path=tmp_path)

    learn.fit(4)

    found = sorted(p.name for p in (tmp_path / "models").iterdir())
    assert found == [f"m_{i}.pth" for i in epochs]


def test_a_fit_without_validation_monitors_the_training_loss(tmp_path: Path) -> None:
    learn = synth_learner(n_trn=2, cbs=SaveModelCallback("train_loss"), path=tmp_path)
    learn.dls.loaders[1] = None
    with learn.no_logging():
        learn.fit(2)

    assert learn.save_model.best_epoch is not None
