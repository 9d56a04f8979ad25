"""`lr_find` and `predict`."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookkit import (
    ActivationStats,
    Callback,
    CancelBatchException,
    CSVLogger,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    Learner,
    LogTo,
    MixedPrecision,
    ModelRunError,
    ParamStats,
    SaveModelCallback,
    TrainEvalCallback,
)
from hookkit.training.lr_finder import minimum, slide, steep, valley

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def learner(*cbs: Any, opt_func: Any = torch.optim.Adam, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(DATA, 8, shuffle=True, generator=generator)
    layers = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
    net, valid = nn.Sequential(*layers), DataLoader(DATA, 32)
    learn = Learner((loader, valid), net, nn.MSELoss(), opt_func, cbs=list(cbs), **kwargs)
    learn.logger = lambda row: None
    return learn


def find(learn: Any, **options: Any) -> Any:
    return learn.lr_find(**{"num_it": 40, "show_plot": False, **options})


def trained(learn: Any) -> list[Any]:
    """Everything that a training depends on, after one more epoch."""
    learn.fit(1)
    weights = [t.clone() for t in learn.model.state_dict().values()]
    draws = torch.rand(2), random.random(), float(np.random.rand())
    return [weights, learn.opt.state_dict(), draws, learn.run_record(), learn.recorder.values]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def observers(folder: Path) -> list[Any]:
    files = [SaveModelCallback(), CSVLogger(append=True), LogTo(folder / "a.jsonl", every=1)]
    return [ActivationStats(), ParamStats(), EarlyStoppingCallback(), GradientClip(), *files]


MODES: dict[str, Callable[[], Any]] = {
    "plain": lambda: [],
    "bf16": lambda: [MixedPrecision("bf16")],
    "fp16": lambda: [MixedPrecision(init_scale=64.0), GradientAccumulation(2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_nothing_of_it_stays(mode: Any, first: bool, tmp_path: Path) -> None:
    results, files = [], []
    for finds in (False, True):
        folder = tmp_path / str(finds)
        learn = learner(*mode(), *observers(folder), path=folder)
        random.seed(0)
        np.random.seed(0)
        if not first:
            learn.fit(1)
        if finds:
            find(learn)
        results.append(trained(learn))
        files.append((learn.n_steps, (folder / "a.jsonl").read_text(), len(learn.cbs)))

    assert same(*results)
    assert files[0] == files[1]


@pytest.mark.parametrize(("error", "when"), [(ValueError, 7), (KeyboardInterrupt, 0)])
def test_it_is_undone_whatever_ends_it(error: Any, when: int) -> None:
    def fail(cb: Any) -> None:
        if cb.learn.opt.param_groups[0]["lr"] < 1e-4 and cb.train_iter == when:
            raise error

    results = []
    for cbs in ([], [Callback(after_pred=fail)]):
        learn = learner(*cbs)
        random.seed(0)
        np.random.seed(0)
        if cbs:
            with pytest.raises(error):
                find(learn)
            assert learn.opt is None
            assert list(learn.cbs)[2:] == cbs
            learn.remove_cbs(cbs)
        results.append(trained(learn))

    assert same(*results)


@pytest.mark.parametrize("num_it", [10, 100])
def test_the_rates_grow_from_one_end_to_the_other_and_all_is_as_before(num_it: int) -> None:
    learn = learner(TrainEvalCallback(), default_cbs=False)
    learn.model.eval()
    learn.model[0].weight.grad = mine = torch.ones(16, 4)
    before = dict(vars(learn))

    found = find(learn, start_lr=1e-5, end_lr=1e-2, num_it=num_it, stop_div=False)

    assert len(found.lrs) == len(found.losses) == num_it
    np.testing.assert_allclose(found.lrs, 1e-5 * 1000 ** (np.arange(num_it) / num_it))
    assert not any(m.training for m in learn.model)
    assert [p.grad for p in learn.model.parameters()] == [mine, *[None] * 5]
    assert vars(learn).keys() == before.keys()
    assert all(vars(learn)[name] is x or vars(learn)[name] == x for name, x in before.items())


def test_each_rate_is_tried_on_a_batch_that_has_a_loss() -> None:
    def cancel(cb: Any) -> None:
        if cb.learn.iter % 2:
            raise CancelBatchException

    found = find(learner(Callback(before_batch=cancel)))

    assert len(found.lrs) == len(found.losses) == 40


def test_the_suggestion_trains_and_a_rate_a_thousand_times_off_does_not() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    found = learner().lr_find()
    losses = {}
    for factor in (1, 1e-3, 1e3):
        learn = learner(lr=found.valley * factor)
        learn.fit(5)
        losses[factor] = learn.recorder.values[-1][1]

    assert losses[1] < 0.5 * losses[1e-3]
    assert losses[1] < 0.5 * losses[1e3]
    ax = plt.gcf().axes[0]  # drawn by default
    curve, valley, *_ = ax.lines
    assert len(curve.get_xdata()) == len(found.lrs) - 5
    assert valley.get_xdata() == [found.valley]


def test_one_that_diverges_at_once_says_so() -> None:
    learn = learner(opt_func=torch.optim.SGD)

    with pytest.raises(ModelRunError, match=r"too large after \d+ of 40 .* smaller start_lr"):
        find(learn, start_lr=1e6, end_lr=1e9)

    assert learn.validate()[0] < 100


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
def test_the_suggestions_are_fastais() -> None:
    fastais = pytest.importorskip("fastai.callback.schedule")
    rng, lrs = np.random.default_rng(0), np.geomspace(1e-7, 10, 85)
    for n in (20, 85):
        for slope in (-1.0, 0.0, 1.0, -0.01):
            for noise in (1.0, 0.01):
                losses = noise * rng.normal(size=n) + slope * np.arange(n)
                given = torch.from_numpy(lrs[:n]), torch.from_numpy(losses)
                for f in (valley, steep, minimum, slide):
                    truth, _ = getattr(fastais, f.__name__)(*given, n)
                    assert f(lrs[:n], losses) == pytest.approx(truth, rel=1e-6), f


# --- predict


def test_a_prediction_is_that_of_the_whole_pass() -> None:
    learn = learner()
    learn.fit(1)
    preds, _ = learn.get_preds()
    before = learn.run_record()

    for item in (DATA[3], DATA[3][0], (DATA[3][0],), DATA[3][0].numpy()):
        torch.testing.assert_close(learn.predict(item), preds[3])

    assert learn.run_record() == before


def test_the_loaders_own_collate_makes_the_batch() -> None:
    def padded(items: Any) -> Any:
        return nn.utils.rnn.pad_sequence([torch.as_tensor(x) for x in items], batch_first=True)

    class Sum(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sum(1)

    learn = Learner(DataLoader([[1.0], [1.0, 2.0]], 2, collate_fn=padded), Sum(), None)

    assert learn.predict([1.0, 2.0, 3.0]).item() == 6.0
    assert Learner(None, Sum()).predict(torch.ones(3)).item() == 3.0
