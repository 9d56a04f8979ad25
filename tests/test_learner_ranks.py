"""A Learner in `distrib_ctx` gives the numbers of one process, on every rank."""

import os
import pickle
import re
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import in_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from hookkit._core import distributed as ranks
from hookkit.callbacks import Callback, GradientClip
from hookkit.callbacks.events import CancelFitException
from hookkit.errors import HookkitWarning, OptionError
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.training import Learner
from hookkit.training.data import DataLoaders

accelerate = pytest.importorskip("accelerate")
DataLoaderConfiguration = accelerate.utils.DataLoaderConfiguration
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

N, BS = 13, 4


def data(n: int) -> TensorDataset:
    made = torch.Generator().manual_seed(n)
    return TensorDataset(torch.randn(n, 3, generator=made), torch.randn(n, 1, generator=made))


class Stream(IterableDataset[Any]):
    """The same rows without a length."""

    def __init__(self, n: int) -> None:
        self.rows = data(n)

    def __iter__(self) -> Any:
        return iter([self.rows[i] for i in range(len(self.rows))])


class AllRows:
    """A metric that is no mean over batches: the root of the mean squared error."""

    def reset(self) -> None:
        self.errors: list[Tensor] = []

    def update(self, pred: Tensor, y: Tensor) -> None:
        self.errors.append(pred - y)

    def compute(self) -> Tensor:
        return torch.cat(self.errors).square().mean().sqrt()


def mae(pred: Tensor, y: Tensor) -> Tensor:
    return (pred - y).abs().mean()


def by_column(pred: Tensor, y: Tensor) -> Tensor:
    return torch.stack([pred.mean(), y.mean()])


def of_torchmetrics() -> list[Any]:
    if find_spec("torchmetrics") is None:
        return []
    from torchmetrics import MeanSquaredError, MetricCollection, PearsonCorrCoef

    return [MeanSquaredError(), MetricCollection([PearsonCorrCoef()])]


def learner(valid: Any, model: nn.Module | None = None, lr: float = 0.0) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    dls = DataLoaders(DataLoader(data(16), BS), valid)
    metrics = [mae, by_column, AllRows(), *of_torchmetrics()]
    learn = Learner(dls, model or net, nn.MSELoss(), torch.optim.SGD, lr, metrics=metrics)
    learn.logger = lambda row: None
    return learn


@cache
def loaders() -> dict[str, Any]:
    return {
        "13 rows": DataLoader(data(N), BS),
        "fewer rows than ranks have room for": DataLoader(data(5), BS),
        "a multiple": DataLoader(data(16), BS),
        "a stream": DataLoader(Stream(N), BS),
        "a list": [(x[None], y[None]) for x, y in data(3)],
    }


def context(learn: Any, **options: Any) -> Any:
    if not ranks.is_distributed():
        return nullcontext()
    config = DataLoaderConfiguration(**options)
    return learn.distrib_ctx(cpu=True, dataloader_config=config)


def plain(x: Any) -> Any:
    return x.tolist() if hasattr(x, "tolist") else x


def validated(learn: Any, case: str) -> list[Any]:
    with context(learn, split_batches=case == "split"):
        return [plain(x) for x in learn.validate()]


def predicted(learn: Any, **options: Any) -> list[Any]:
    with context(learn):
        return [plain(x) for x in learn.get_preds(with_input=True, with_loss=True, **options)]


def recorders() -> list[Any]:
    return [ActivationStats(with_hist=True, units=True), GradientStats(), ParamStats()]


def stop(cb: Any) -> None:
    if cb.learn.train_iter == 1:
        raise CancelFitException


def failing(cb: Any) -> None:
    raise ZeroDivisionError


def recorded(rank: int = 0) -> dict[str, Any]:
    """Runs as one rank reads them while the others do not: no collective, or it would hang."""
    learn, found = learner(loaders()["13 rows"]), dict[str, Any]()
    during = list[str]()
    look = Callback(after_batch=lambda cb: during.append(str(cb.learn.diagnose())))
    with context(learn):
        learn.fit(1, cbs=recorders())
        if rank == 0:
            learn.diagnose()
        found["whole"] = learn.run_record()
        learn.fit(1, cbs=[Callback(before_batch=stop), *([look] * (rank == 0)), *recorders()])
        found["during"], found["cancelled"] = during, learn.run_record()
        with pytest.raises(ZeroDivisionError):
            learn.fit(1, cbs=[Callback(after_epoch=failing), *recorders()])
        found["failed"] = str(learn.diagnose())
        found["rescued"] = learn.gather().run_record()
    return found


def learnt() -> dict[str, Any]:
    """A fit of ranks that together take what one process takes: the same batches of 16 rows."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    learn = learner(DataLoader(data(N), BS), net, 0.05)
    learn.dls.loaders[0] = DataLoader(data(64), 16 // ranks.world_size())
    learn.opt_func = partial(torch.optim.SGD, momentum=0.9)
    with context(learn):
        learn.fit(1)
    with context(learn):  # once more, with an optimizer that has a state by now
        cbs = [ActivationStats(), GradientStats(of="params"), ParamStats(), GradientClip(100.0)]
        learn.fit(2, cbs=cbs)
    run = learn.run_record()
    assert learn.model is net
    return {
        "weights": [p.detach().clone() for p in net.parameters()],
        "momenta": [learn.opt.state[p]["momentum_buffer"].clone() for p in net.parameters()],
        "losses": run.losses,
        "valid": [row["valid_loss"] for row in run.valid],
        "activations": [run.activations.value(name) for name in ("count", "mean", "std", "max")],
        "gradients": run.gradients.value("rms"),
        "parameters": [run.params.value(f"{of}_norm") for of in ("weight", "grad", "update")],
    }


def work(rank: int, folder: Path) -> None:
    seen: dict[str, Any] = {}
    for case, loader in loaders().items():
        seen[case] = validated(learner(loader), case)
        seen[f"predictions, {case}"] = predicted(learner(loader))
    seen["split"] = validated(learner(loaders()["13 rows"]), "split")
    seen["given"] = predicted(learner(None), dl=DataLoader(data(7), 3))
    seen["of training"] = predicted(learner(None), ds_idx=0)
    learn = learner(loaders()["13 rows"])
    with context(learn):
        learn.fit(2)
    rows = [{name: plain(value) for name, value in row.items()} for row in learn.epochs]
    seen["fit"] = rows, learn.losses.by_batch().tolist(), learn.run_record().losses.tolist()
    seen["recorded"], seen["learnt"] = recorded(rank), learnt()
    refused(learner)
    (folder / f"seen{rank}").write_bytes(pickle.dumps(seen))


def refused(learner: Any) -> None:
    """Rows that accelerate cannot tell from its own are a warning."""
    part = DataLoader(data(40), BS, sampler=SubsetRandomSampler(range(11)))
    said = "A validation loader has another length, so they may count"
    own_parts = context(learner(DataLoader(Stream(N), BS)), dispatch_batches=False)
    for block in (context(learner(part)), own_parts):
        with pytest.warns(HookkitWarning, match=said), block:
            pass


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found in `work`."""
    folder = tmp_path_factory.mktemp("ranks")
    in_ranks(work, folder)
    return [pickle.loads((folder / f"seen{r}").read_bytes()) for r in range(2)]


def close(got: Any, want: Any) -> None:
    for one, true in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(true), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [*loaders(), "split"])
def test_losses_and_metrics_are_those_of_the_data_set_and_predictions_whole(
    seen: Any, case: str
) -> None:
    loader = loaders()["13 rows" if case == "split" else case]
    want = validated(learner(loader), "")

    for found in seen:
        close(found[case], want)
        assert found[case] == seen[0][case]
        if case != "split":  # in order, too
            close(found[f"predictions, {case}"], predicted(learner(loader)))
        close(found["given"], predicted(learner(None), dl=DataLoader(data(7), 3)))
        close(found["of training"], predicted(learner(None), ds_idx=0))


def test_training_losses_are_means_over_ranks(seen: Any) -> None:
    learn = learner(None)
    learn.fit(2)
    want = learn.losses.by_batch().reshape(-1, 2).mean(1)

    for found in seen:
        rows, raw, steps = found["fit"]
        np.testing.assert_allclose(raw, want, rtol=1e-6)
        assert steps == raw
        assert len(rows) == 2
        assert found["fit"] == seen[0]["fit"]


@pytest.mark.parametrize("which", ["whole", "cancelled", "rescued"])
def test_every_rank_reads_the_whole_and_what_was_not_gathered_names_its_rank(
    seen: Any, which: str
) -> None:
    runs = [found["recorded"][which] for found in seen]
    first, one = runs[0], recorded()[which]

    assert runs[0] == runs[1]
    assert "rank" not in {**first.info, **first.activations.meta, **first.params.meta}
    assert first.activations.names == one.activations.names
    # a step takes the batches of all ranks
    rows = first.activations.value("count", 0)[:1] / one.activations.value("count", 0)[:1]
    assert rows.tolist() == [2]

    (during,) = seen[0]["recorded"]["during"]
    for text in (during, seen[0]["recorded"]["failed"]):
        assert "rank 0 of 2 alone; gather() on every rank merges all" in text.splitlines()[0]


def test_ranks_learn_and_record_what_one_process_does(seen: Any) -> None:
    want = pickle.loads(pickle.dumps(learnt()))  # a Run's own arrays are read-only

    for found in seen:
        for name, true in want.items():
            say = partial(lambda name, text: f"{name}: {text}", name)
            torch.testing.assert_close(
                found["learnt"][name], true, rtol=1e-4, atol=1e-6, equal_nan=True, msg=say
            )


def lost_in_training(rank: int, folder: Path) -> None:
    learn = learner(None)
    end = Callback(before_backward=lambda cb: os._exit(0) if rank and cb.iter == 1 else None)
    if rank == 1:
        (folder / "left1").touch()
    with context(learn), pytest.raises(RuntimeError) as error:
        learn.fit(1, cbs=end)
    (folder / "notes").write_text("\n".join(error.value.__notes__))


def test_the_error_where_gradients_are_averaged_says_when_and_who(tmp_path: Path) -> None:
    in_ranks(lost_in_training, tmp_path)

    words = "the loss was scalar, epoch 0, batch 1 .training., rank 0 of 2"
    assert re.match(words, (tmp_path / "notes").read_text())


class BadAside(nn.Module):
    """On rank 1 it makes a NaN in the second batch, which no loss and no gradient gets."""

    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += self.training
        return x * (float("nan") if self.training and self.n == 2 and ranks.rank() else 1.0)


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.aside = nn.Linear(3, 1), BadAside()

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return self.a(x)


def reported_and_gone_on(rank: int, folder: Path) -> None:
    learn = learner(None, Beside(), 0.1)
    with context(learn):
        with pytest.raises(OptionError, match="one process alone would skip a step"):
            learn.fit(1, cbs=FlightRecorder("skip"))
        learn.fit(1, cbs=FlightRecorder("report"))
    incidents = [i.name for i in learn.run_record().incidents]  # the context has gathered them
    (folder / f"incidents{rank}").write_text(repr(incidents))

    whole, first, again = (learner(None, lr=0.1) for _ in range(3))
    for learn in (whole, first, again):
        learn.path = folder
    with context(whole):
        whole.fit(3)
    with context(first):
        first.fit(2)
        first.save("run")
    with context(again):
        again.load("run")
        again.fit(3, start_epoch=2)
    for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_incidents_of_one_rank_are_read_by_all_and_fits_go_on(tmp_path: Path) -> None:
    in_ranks(reported_and_gone_on, tmp_path)

    for rank in (0, 1):
        assert (tmp_path / f"incidents{rank}").read_text() == "['aside']"
