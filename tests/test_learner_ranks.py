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
from test_stats_ranks import Counted
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from hookkit import ranks
from hookkit.callbacks import Callback, GradientClip
from hookkit.data import DataLoaders
from hookkit.errors import HookError, HookkitWarning, OptionError
from hookkit.events import CancelFitException
from hookkit.learner import Learner
from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats

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


class Batches(Dataset[Any]):
    """Makes its batches itself: of four rows, and one of a single row."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return data(N)[BS * i : BS * (i + 1)]


class InOrder:
    """A number that depends on every row, on their order and on how batches are cut."""

    def reset(self) -> None:
        self.seen = 0.0

    def update(self, pred: Tensor, y: Tensor) -> None:
        for row in (pred - y).flatten().tolist():
            self.seen = 0.9 * self.seen + row
        self.seen *= len(pred)

    def compute(self) -> float:
        return self.seen


class Rmse:
    """In fastai's form."""

    def reset(self) -> None:
        self.pairs: list[Tensor] = []

    def accumulate(self, learn: Any) -> None:
        self.pairs.append(learn.to_detach(learn.pred - learn.y))

    @property
    def value(self) -> float:
        return torch.cat(self.pairs).square().mean().sqrt().item()


def worst(pred: Tensor, y: Tensor) -> Tensor:
    """No mean over samples: it depends on how batches are cut."""
    return (pred - y).abs().max()


def by_column(pred: Tensor, y: Tensor) -> Tensor:
    return torch.stack([pred.mean(), y.mean()])


def learner(valid: Any, batch_norm: bool = True) -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 1))
    if batch_norm:  # whose buffers DDP sends at each call, also in evaluation
        model[1] = nn.BatchNorm1d(4)
    train = DataLoader(data(16), BS)
    metrics = [worst, by_column, InOrder(), Rmse()]
    learn = Learner(
        DataLoaders(train, valid), model, nn.MSELoss(), torch.optim.SGD, 0.0, metrics=metrics
    )
    learn.logger = lambda row: None
    return learn


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.rows)


OPTIONS = {
    "split batches": {"split_batches": True},
    "uneven": {"even_batches": False},
    "each reads a stream": {"dispatch_batches": False},
    "whole batches": {"dispatch_batches": True},
}


def context(learn: Learner, case: str = "") -> Any:
    config = DataLoaderConfiguration(**OPTIONS.get(case, {}))
    return learn.distrib_ctx(cpu=True, dataloader_config=config)


@cache
def loaders() -> dict[str, Any]:
    small = data(5)
    found = {
        "13 rows": DataLoader(data(N), BS),
        "fewer rows than ranks have room for": DataLoader(small, BS),
        "a multiple": DataLoader(data(16), BS),
        "batches without a size": DataLoader(data(N), batch_sampler=[[0, 1, 2], [3], [4, 5]]),
        "a part of the data": DataLoader(data(40), BS, sampler=Part(range(11))),
        "a stream": DataLoader(Stream(N), BS),
        "split batches": DataLoader(data(N), BS),
        "uneven": DataLoader(data(10), BS),
        "each reads a stream": DataLoader(Sized(N), BS),
        "whole batches": DataLoader(Batches(), batch_size=None),
        "a list": [(x[None], y[None]) for x, y in data(3)],
    }
    if accelerate.utils.compare_versions("accelerate", "<", "1.14"):  # refuses it
        del found["batches without a size"]
    return found


class Part(SubsetRandomSampler):
    """Always in the same order."""

    def __iter__(self) -> Any:
        return iter(self.indices)


def assert_close(got: list[Any], want: list[Any]) -> None:
    for one, true in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(true), rtol=1e-6, atol=1e-6)


def plain(x: Any) -> Any:
    return x.tolist() if hasattr(x, "tolist") else x


def validated(learn: Learner) -> list[Any]:
    return [plain(x) for x in learn.validate()]


def predicted(learn: Learner, **options: Any) -> list[Any]:
    return [plain(x) for x in learn.get_preds(with_input=True, with_loss=True, **options)]


def trained(learn: Learner) -> tuple[Any, ...]:
    """Rows of epochs, and the losses of batches, smoothed, and of steps."""
    recorder, run = learn.recorder, learn.run_record()
    rows = [{name: plain(value) for name, value in row.items()} for row in recorder.rows()]
    return rows, recorder.raw_losses().tolist(), recorder.losses, run.losses.tolist()


def stop(cb: Callback) -> None:
    if cb.learn.train_iter == 1:
        raise CancelFitException


def work(rank: int, folder: Path) -> None:
    seen: dict[str, Any] = {}
    for case, loader in loaders().items():
        learn = learner(loader, batch_norm=case != "uneven")
        with context(learn, case):
            seen[case] = validated(learn)
            seen[f"predictions, {case}"] = predicted(learn)
            if case == "13 rows":
                seen["given"] = predicted(learn, dl=DataLoader(data(7), 3))
                preds, _ = learn.get_preds(concat_dim=None)
                seen["lists"] = [plain(x) for x in preds]
                learn.fit(2)
                seen["fit"] = trained(learn)
                learn.fit(1, cbs=Callback(before_batch=stop))
                seen["cancelled"] = learn.recorder.raw_losses()[-1]
    seen["recorded"] = recorded(rank)
    n = ranks.world_size()
    seen["ddp"], seen["fsdp2"] = learnt(n), learnt(n, fsdp_plugin=sharding())
    learn = learner(None)
    with pytest.raises(OptionError, match="runs version 1 of FSDP on devices only, and these are"):
        learn.distrib_ctx(cpu=True, fsdp_plugin=sharding(1)).__enter__()
    with pytest.raises(OptionError, match=r"the validation loader has batch_size=None.*dispatch"):
        context(learner(loaders()["whole batches"])).__enter__()
    learn = learner(DataLoader(Stream(N), BS))
    unknown = "have no length, so the rows that accelerate adds"
    with context(learn, "each reads a stream"), pytest.warns(HookkitWarning, match=unknown):
        learn.validate()
    seen["torchmetrics"] = {n: of_torchmetrics(n) for n in SIZES}
    seen["thawed"] = thawed(n)
    seen["sent"] = sent(n)
    (folder / f"seen{rank}").write_bytes(pickle.dumps(seen))
    if n == 2:  # the last: it ends rank 1
        seen["lost"] = lost(rank, folder)
        (folder / f"seen{rank}").write_bytes(pickle.dumps(seen))


def recorders() -> list[Any]:
    return [
        ActivationStats(with_hist=True, units=True, on_valid=True),
        GradientStats(),
        ParamStats(),
    ]


def failing(cb: Callback) -> None:
    raise ZeroDivisionError


def recorded(rank: int = 0) -> dict[str, Any]:
    """Runs as one rank reads them while the others do not: no collective, or it would hang."""
    learn, found = learner(loaders()["13 rows"]), dict[str, Any]()
    during = list[str]()
    look = Callback(after_batch=lambda cb: during.append(str(cb.learn.diagnose())))
    with context(learn) if ranks.is_distributed() else nullcontext():
        learn.fit(1, cbs=recorders())
        if rank == 0:
            learn.diagnose()
        found["whole"] = learn.run_record()
        found["valid"] = learn.activation_stats.record(valid=True)
        learn.fit(1, cbs=[Callback(before_batch=stop), *([look] * (rank == 0)), *recorders()])
        found["during"] = during
        found["cancelled"] = learn.run_record()
        with pytest.raises(ZeroDivisionError):
            learn.fit(1, cbs=[Callback(after_epoch=failing), *recorders()])
        found["failed"] = str(learn.diagnose())
        found["rescued"] = learn.gather().run_record()
    return found


def sharding(version: int = 2) -> Any:
    return accelerate.utils.FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
    )


def learnt(ranks: int, **options: Any) -> dict[str, Any]:
    """A fit of ranks that together take what one process takes: the same batches of 16 rows."""
    learn = learner(DataLoader(data(N), BS), batch_norm=False)
    learn.dls.loaders[0] = DataLoader(data(64), 16 // ranks)
    learn.opt_func = partial(torch.optim.SGD, momentum=0.9)
    plain, kind = learn.model, type(learn.model)
    with learn.distrib_ctx(cpu=True, **options) if ranks > 1 else nullcontext():
        learn.fit(1, 0.05)
    # once more, with an optimizer that has a state by now
    with learn.distrib_ctx(cpu=True, **options) if ranks > 1 else nullcontext():
        cbs = [ActivationStats(), GradientStats(of="params"), ParamStats(), GradientClip(100.0)]
        learn.fit(2, 0.05, cbs=cbs)
        names = {type(m).__name__ for m in learn.model.modules()}
        preds, within = learn.get_preds()[0], learn.run_record()
    assert learn.model is plain
    assert type(plain) is kind
    run = learn.run_record()
    momenta = [learn.opt.state[p]["momentum_buffer"].clone() for p in plain.parameters()]
    return {
        "weights": [p.detach().clone() for p in plain.parameters()],
        "momenta": momenta,
        "predictions": preds,
        "losses": run.losses,
        "norms before clipping": learn.gradient_clip.norms.read(),
        "valid": [row["valid_loss"] for row in run.valid],
        "activations": [run.activations.value(name) for name in ("count", "mean", "std", "max")],
        "gradients": run.gradients.value("rms"),
        "parameters": [run.params.value(f"{of}_norm") for of in ("weight", "grad", "update")],
        "classes": (within.info["model"], run.info["model"], *run.activations.types),
        "of parameters": run.params.types,
        "sharded": {"FSDPSequential", "FSDPLinear"} <= names,
        "later": learn.fit(1),
    }


def thawed(ranks: int) -> list[Tensor]:
    """What is learnt where layers are frozen before the `with`, and thaw and freeze in it."""
    learn = learner(DataLoader(data(N), BS), batch_norm=False)
    learn.dls.loaders[0] = DataLoader(data(64), 16 // ranks)
    learn.splitter = lambda model: [list(part.parameters()) for part in (model[0], model[2])]
    learn.freeze()
    with learn.distrib_ctx(cpu=True) if ranks > 1 else nullcontext():
        assert ranks == 1 or type(learn.model).__name__ == "DistributedDataParallel"
        learn.fit(1, 0.05, cbs=ParamStats())
        learn.unfreeze()
        learn.fit(1, 0.05, cbs=ParamStats())
        learn.freeze()
        learn.fit(1, 0.05)
    return [p.detach() for p in learn.model.parameters()]


SIZES = (13, 5)


def of_torchmetrics(n: int) -> list[Any]:
    """What metrics with sums, with tables and with lists find; nothing without torchmetrics."""
    if find_spec("torchmetrics") is None:
        return []
    from torchmetrics import MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
    from torchmetrics.utilities import dim_zero_cat

    class Errors(Metric):
        """Keeps rows and whole numbers, of which a rank without batches has no example."""

        def __init__(self) -> None:
            super().__init__()
            for state in ("rows", "signs"):
                self.add_state(state, [], "cat")

        def update(self, pred: Tensor, y: Tensor) -> None:
            self.rows.append(pred - y)
            self.signs.append((pred > y).long())

        def compute(self) -> Tensor:
            rows, signs = dim_zero_cat(self.rows), dim_zero_cat(self.signs)
            assert signs.dtype == torch.int64
            return (rows * signs).flatten().sort().values

    learn = learner(DataLoader(data(n), BS))
    learn.metrics = [MeanSquaredError(), MetricCollection([PearsonCorrCoef()]), Errors]
    with context(learn) if ranks.is_distributed() else nullcontext():
        return validated(learn)


def sent(n: int) -> Any:
    """What hookkit sends in a fit of two epochs of four batches a rank."""
    loaders = DataLoaders(DataLoader(data(4 * BS * n), BS), DataLoader(data(N), BS))
    net, metrics = nn.Linear(3, 1), [worst]
    learn = Learner(loaders, net, nn.MSELoss(), torch.optim.SGD, 0.1, metrics=metrics)
    learn.logger = lambda row: None
    with pytest.MonkeyPatch.context() as patch, learn.distrib_ctx(cpu=True):
        counted = Counted(patch)
        learn.fit(2, cbs=FlightRecorder("skip"))
    return counted.n_bytes


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two or four ranks has found in `work`."""
    folder = tmp_path_factory.mktemp("ranks")
    in_ranks(work, folder, request.param)
    return [pickle.loads((folder / f"seen{r}").read_bytes()) for r in range(request.param)]


@pytest.mark.parametrize("case", loaders())
def test_losses_and_metrics_are_those_of_the_data_set(seen: Any, case: str) -> None:
    want = validated(learner(loaders()[case], batch_norm=case != "uneven"))
    # batches that are cut in another way: `worst` and InOrder see that
    same = (0, 2, 4) if case in ("a stream", "split batches", "whole batches") else range(5)

    for found in seen:
        for i in same:
            # the float32 predictions, of about 1, are rounded as their batch's matmul does it
            assert found[case][i] == pytest.approx(want[i], rel=1e-6, abs=1e-6)
        assert found[case] == seen[0][case]


@pytest.mark.parametrize("which", ["whole", "cancelled", "rescued"])
def test_every_rank_reads_the_whole_by_itself(seen: Any, which: str) -> None:
    runs = [found["recorded"][which] for found in seen]
    first, one = runs[0], recorded()[which]

    assert all(run == first for run in runs)
    assert "rank" not in {**first.info, **first.activations.meta, **first.params.meta}
    assert first.activations.names == one.activations.names
    # a step takes the batches of all ranks
    rows = first.activations.value("count", 0)[:1] / one.activations.value("count", 0)[:1]
    assert rows.tolist() == [len(seen)]
    if which == "whole":
        valid = [found["recorded"]["valid"] for found in seen]
        want = recorded()["valid"]
        np.testing.assert_array_equal(valid[0].value("count"), want.value("count"))


def test_what_was_not_gathered_is_read_at_once_and_names_its_rank(seen: Any) -> None:
    alone = f"rank 0 of {len(seen)} alone; gather() on every rank merges all"

    assert len(seen[0]["recorded"]["during"]) == 1
    for text in (*seen[0]["recorded"]["during"], seen[0]["recorded"]["failed"]):
        assert alone in text.splitlines()[0]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_ranks_learn_and_record_what_one_process_does(seen: Any, way: str) -> None:
    want = learnt(1)

    for found in seen:
        assert found[way]["sharded"] == (way == "fsdp2")
        for name in ("classes", "of parameters"):
            assert found[way][name] == want[name]
        for name in want.keys() - {"sharded", "classes", "of parameters"}:
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6, equal_nan=True)
            close(found[way][name], want[name], msg=lambda text, name=name: f"{name}: {text}")


def test_ranks_learn_what_one_process_does_where_layers_freeze_and_thaw(seen: Any) -> None:
    want = thawed(1)

    for found in seen:
        torch.testing.assert_close(found["thawed"], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_torchmetrics_merge_their_own_counts(seen: Any, n: int) -> None:
    pytest.importorskip("torchmetrics")
    want = of_torchmetrics(n)

    for found in seen:
        for got, true in zip(found["torchmetrics"][n], want, strict=True):
            assert got == pytest.approx(true, rel=1e-4)


@pytest.mark.parametrize("case", loaders())
def test_predictions_are_whole_and_in_order_on_every_rank(seen: Any, case: str) -> None:
    want = predicted(learner(loaders()[case], batch_norm=case != "uneven"))

    for found in seen:
        assert_close(found[f"predictions, {case}"], want)


def test_predictions_for_a_loader_that_is_given_are_whole_too(seen: Any) -> None:
    want = predicted(learner(None), dl=DataLoader(data(7), 3))
    lists = learner(loaders()["13 rows"]).get_preds(concat_dim=None)[0]

    for found in seen:
        assert_close(found["given"], want)
        assert_close(found["lists"], [plain(x) for x in lists])


def test_training_losses_are_means_over_ranks(seen: Any) -> None:
    learn = learner(None)
    learn.fit(2)
    want = learn.recorder.raw_losses().reshape(-1, len(seen)).mean(1)

    for found in seen:
        rows, raw, smooth, steps = found["fit"]
        np.testing.assert_allclose(raw, want, rtol=1e-6)
        np.testing.assert_array_equal(steps, raw)
        np.testing.assert_allclose(smooth, smoothed(raw))
        assert [row["train_loss"] for row in rows] == [smooth[len(raw) // 2 - 1], smooth[-1]]
        assert found["fit"] == seen[0]["fit"]


def test_a_fit_sends_what_the_page_says(seen: Any) -> None:
    of_losses, of_metrics, of_steps = 8 + 16 * 4, 2 * (8 + 16), 8 * 4
    at_the_end = 8 + 8  # no losses since the last epoch; no incidents

    for found in seen:
        assert found["sent"] == {"all_reduce": 2 * (of_losses + of_metrics + of_steps) + at_the_end}


def smoothed(losses: list[float]) -> list[float]:
    average, found = 0.0, []
    for i, loss in enumerate(losses, 1):
        average = 0.98 * average + 0.02 * loss
        found.append(average / (1 - 0.98**i))
    return found


def test_losses_of_a_cancelled_epoch_are_means_over_ranks_too(seen: Any) -> None:
    first = learner(None)
    first.fit(1)
    want = first.recorder.raw_losses()[: len(seen)].mean()

    for found in seen:
        assert found["cancelled"] == pytest.approx(want, rel=1e-6)


def lost(rank: int, folder: Path) -> str:
    """What a rank says whose neighbour ends in validation."""
    learn = learner(loaders()["13 rows"], batch_norm=False)
    end = Callback(before_validate=lambda cb: os._exit(0))
    with context(learn):
        if rank == 1:
            (folder / "left1").touch()
            learn.fit(1, cbs=end)
        with pytest.raises(HookError) as error:
            learn.fit(1)
    return str(error.value)


def test_a_rank_that_ends_in_validation_ends_those_that_wait_for_it(seen: Any) -> None:
    if len(seen) > 2:
        pytest.skip("seen with two ranks")
    words = "rank 0 of 2 waited .* give its metrics each batch, epoch 0, batch 0 .not training"

    assert re.search(words, seen[0]["lost"])


def lost_in_training(rank: int, folder: Path) -> None:
    learn = learner(None, batch_norm=False)
    end = Callback(before_backward=lambda cb: os._exit(0) if rank and cb.iter == 1 else None)
    if rank == 1:
        (folder / "left1").touch()
    with context(learn), pytest.raises(RuntimeError) as error:
        learn.fit(1, cbs=end)
    (folder / "notes").write_text("\n".join(error.value.__notes__))


def test_the_error_where_gradients_are_averaged_says_when_and_who(tmp_path: Path) -> None:
    in_ranks(lost_in_training, tmp_path)

    words = "the loss was scalar, epoch 0, batch 1 .training.\n"
    words += "rank 0 of 2 was in the backward pass, where the ranks average their gradients"
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


def skipped(rank: int, folder: Path) -> None:
    learn = learner(None)
    learn.model = Beside()
    with context(learn):
        learn.fit(1, 0.1, cbs=[FlightRecorder("skip"), ActivationStats()])
    weights = [p.tolist() for p in learn.model.parameters()]
    found = weights, learn.n_steps, [i.name for i in learn.flight_recorder.incidents]
    (folder / f"skipped{rank}").write_text(repr(found))


def test_a_step_that_one_rank_skips_is_skipped_by_all(tmp_path: Path) -> None:
    in_ranks(skipped, tmp_path)

    first, second = ((tmp_path / f"skipped{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert first.endswith("1, ['aside'])")
