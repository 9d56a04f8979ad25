"""The same training in every loop gives the same records, and leaves no hook behind."""

import copy
import pickle
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hooked import n_hooks
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookkit.callbacks import Callback
from hookkit.errors import ArgumentError, HookError, MissingExtraError
from hookkit.stats import FlightRecorder, ParamStats
from hookkit.watching import watch

N, BATCH_SIZE, EPOCHS = 8, 4, 2  # batches of an epoch, rows of a batch, epochs


class Net(nn.Module):
    """Regression that returns its loss when it is given targets, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.b = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)

    def forward(self, x, labels=None):
        y = self.b(self.act(self.a(x)))
        return y if labels is None else {"loss": (y - labels).pow(2).mean(), "logits": y}


class Rows(Dataset):
    def __init__(self, keyed: bool = False) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(N * BATCH_SIZE, 4, generator=g)
        self.y = self.x.sum(1, keepdim=True)
        self.keyed = keyed

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]} if self.keyed else (self.x[i], self.y[i])


def loader() -> DataLoader:
    return DataLoader(Rows(), BATCH_SIZE)


def mse(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y - t).pow(2).mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class Probe(Callback):
    """What any recorder needs: outputs of a layer, gradients and updates, per optimizer step."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.epochs: list[int] = []
        self.outs: list[float] = []
        self.handle = None

    def before_fit(self) -> None:
        self.handle = self.learn.model.get_submodule("a").register_forward_hook(self.take)

    def take(self, m, i, o) -> None:
        if self.learn.training:
            self.outs.append(o.detach().double().pow(2).mean().item())

    def before_step(self) -> None:
        self.before = [p.detach().clone() for p in self.learn.model.parameters()]

    def after_step(self) -> None:
        params = list(self.learn.model.parameters())
        grads = [p.grad.double().norm().item() for p in params]
        moved = [(p.detach() - q).norm().item() for p, q in zip(params, self.before, strict=True)]
        self.rows.append([np.mean(self.outs), *grads, *moved])
        self.epochs.append(self.learn.epoch)
        self.outs = []

    def cleanup_fit(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def table(self) -> np.ndarray:
        return np.array(self.rows)


def plain(each: int = 1) -> tuple[Probe, np.ndarray]:
    """The truth: a loop of one's own."""
    model, probe = Net(), Probe()
    opt = sgd(model)
    with watch(model, opt, probe) as w:
        for _ in range(EPOCHS):
            for i, (x, y) in enumerate(loader()):
                loss = mse(model(x), y)
                w.loss(loss)
                (loss / each).backward()
                if (i + 1) % each == 0:
                    opt.step()
                    opt.zero_grad()
            w.epoch()
    assert n_hooks(model, opt) == 0
    return probe, w.losses


def same(probe: Probe, losses: np.ndarray | None = None, each: int = 1) -> None:
    truth, true_losses = plain(each)
    np.testing.assert_allclose(probe.table(), truth.table(), rtol=1e-4, atol=1e-6)
    assert probe.epochs == truth.epochs
    if losses is not None:
        np.testing.assert_allclose(losses, true_losses, rtol=1e-4)


def test_the_learner_gives_what_a_plain_loop_gives():
    from hookkit.learner import Learner

    probe = Probe()
    learn = Learner((loader(), None), Net(), mse, torch.optim.SGD, lr=0.05, cbs=probe)

    with learn.no_logging():
        learn.fit(EPOCHS)

    same(probe, learn.run_record().losses)


@pytest.mark.parametrize("given", ["prepared", "plain", "model only"])
def test_accelerate(given: str):
    accelerate = pytest.importorskip("accelerate")
    model, probe = Net(), Probe()
    opt = sgd(model)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, opt2, dl = accelerator.prepare(model, opt, loader())
    with_opt = {"prepared": opt2, "plain": opt, "model only": None}[given]

    with watch(prepared if given == "prepared" else model, with_opt, probe) as w:
        for _ in range(EPOCHS):
            for x, y in dl:
                with accelerator.accumulate(prepared):
                    loss = mse(prepared(x), y)
                    w.loss(loss)
                    accelerator.backward(loss)
                    opt2.step()
                    opt2.zero_grad()
            w.epoch()

    same(probe, w.losses, each=2)
    assert n_hooks(model, opt) == 0


def hugging_face(model, *callbacks, **options):
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        output_dir=options.pop("out"),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=EPOCHS,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return None

        def create_optimizer(self, *_):
            self.optimizer = sgd(self.model)
            return self.optimizer

    rows = Rows(keyed=True)
    return InOrder(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("each", [1, 2])
def test_hugging_face_with_nothing_but_watch(tmp_path, each: int):
    model, probe = Net(), Probe()
    trainer = hugging_face(model, out=tmp_path, gradient_accumulation_steps=each)

    with watch(trainer.model, None, probe) as w:
        trainer.train()

    probe.epochs = plain(each)[0].epochs
    same(probe, w.losses, each)
    assert n_hooks(model) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("each", [1, 2])
def test_hugging_face_with_the_bridge(tmp_path, each: int):
    pytest.importorskip("transformers")
    from hookkit.bridges.transformers import HookkitCallback

    model, probe = Net(), Probe()
    bridge = HookkitCallback(probe)
    trainer = hugging_face(
        model, bridge, out=tmp_path, gradient_accumulation_steps=each, eval_strategy="epoch"
    )

    trainer.train()

    same(probe, bridge.watcher.losses, each)
    assert len(bridge.watcher.run_record().valid) == EPOCHS
    assert bridge.watcher.run_record().valid[0]["valid_loss"] > 0
    assert [row["epoch"] for row in bridge.watcher.run_record().valid] == [0, 1]
    assert [row["step"] for row in bridge.watcher.run_record().valid] == [
        N // each - 1,
        2 * N // each - 1,
    ]
    assert n_hooks(model, *bridge.watcher.loop.opts) == 0


class Shares(Net):
    """As the causal language models: the Trainer gives the size of the whole step."""

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(x, labels)
        if labels is not None and num_items_in_batch is not None:
            out["loss"] = (out["logits"] - labels).pow(2).sum() / num_items_in_batch
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bridged", [False, True])
def test_hugging_face_s_losses_in_shares_add_up(tmp_path, bridged: bool):
    pytest.importorskip("transformers")
    from hookkit.bridges.transformers import HookkitCallback

    model, probe = Shares(), Probe()
    bridge = [HookkitCallback(probe)] * bridged
    trainer = hugging_face(model, *bridge, out=tmp_path, gradient_accumulation_steps=2)

    if bridged:
        trainer.train()
        w = bridge[0].watcher
    else:
        with watch(trainer.model, None, probe) as w:
            trainer.train()
        probe.epochs = plain(2)[0].epochs

    same(probe, w.losses, each=2)


def lightning_module(through: str):
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            net = Net()
            self.a, self.act, self.b = net.a, net.act, net.b
            self.net = net if through == "child" else None

        def forward(self, x):
            return self.b(self.act(self.a(x)))

        def training_step(self, batch, i):
            x, y = batch
            return mse(self.net(x) if through == "child" else self(x), y)

        def validation_step(self, batch, i):
            x, y = batch
            self.log("val_loss", mse(self(x), y))

        def configure_optimizers(self):
            return sgd(self)

    return Module()


def lightning_trainer(tmp_path, each: int, *callbacks):
    pl = pytest.importorskip("lightning.pytorch")
    return pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        accumulate_grad_batches=each,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("through", ["self", "child"])
@pytest.mark.parametrize("each", [1, 2])
def test_lightning(tmp_path, each: int, through: str):
    pytest.importorskip("lightning")
    from hookkit.bridges.lightning import HookkitCallback

    module, probe = lightning_module(through), Probe()
    bridge = HookkitCallback(probe)

    trainer = lightning_trainer(tmp_path, each, bridge)
    trainer.fit(module, loader(), loader())

    w = bridge.watcher
    same(probe, w.losses if through == "self" or each == 1 else None, each)
    assert [row["epoch"] for row in w.run_record().valid] == [0, 1]
    assert w.run_record().valid[1]["valid_loss"] > 0
    assert n_hooks(module, *w.loop.opts) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_bad_step_of_lightning_is_skipped(tmp_path, by_hand: bool):
    pytest.importorskip("lightning")
    from hookkit.bridges.lightning import HookkitCallback

    module, flight, params = lightning_module("self"), FlightRecorder("skip"), ParamStats()
    module.automatic_optimization = not by_hand
    of_batch, n = type(module).training_step, iter(range(100))

    def training_step(self, batch, i):
        loss = of_batch(self, batch, i) * (float("nan") if next(n) == 1 else 1)
        if by_hand:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    type(module).training_step = training_step
    bridge = HookkitCallback(flight, params)
    lightning_trainer(tmp_path, 1, bridge).fit(module, loader())

    assert [i.step for i in flight.incidents] == [1]
    assert bridge.watcher.loop.n_cancelled_steps == 1
    assert len(params.record()) == bridge.watcher.n_steps == next(n) - 1
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_lightning_leaves_nothing_after_an_exception(tmp_path):
    pytest.importorskip("lightning")
    from hookkit.bridges.lightning import HookkitCallback

    def fail(self):
        if self.n_steps == 2:
            raise ZeroDivisionError("boom")

    module = lightning_module("self")
    bridge = HookkitCallback(Callback(after_step=fail))

    with pytest.raises(ZeroDivisionError):
        lightning_trainer(tmp_path, 1, bridge).fit(module, loader())

    assert n_hooks(module, *bridge.watcher.loop.opts) == 0
    assert bridge.watcher.n_steps == 2


@pytest.mark.filterwarnings("ignore")
def test_ignite():
    engines = pytest.importorskip("ignite.engine")
    from hookkit.bridges.ignite import HookkitHandler

    model, probe = Net(), Probe()
    opt = sgd(model)
    engine = engines.create_supervised_trainer(model, opt, mse)
    handler = HookkitHandler(probe).attach(engine, model, opt)

    engine.run(loader(), max_epochs=EPOCHS)

    same(probe, handler.watcher.losses)
    assert n_hooks(model, opt) == 0


@pytest.mark.filterwarnings("ignore")
def test_ignite_s_exceptions_pass():
    engines = pytest.importorskip("ignite.engine")
    from hookkit.bridges.ignite import HookkitHandler

    model = Net()
    opt = sgd(model)
    engine = engines.create_supervised_trainer(model, opt, mse)
    handler = HookkitHandler().attach(engine, model, opt)

    with pytest.raises(RuntimeError):
        engine.run([(torch.ones(2, 3), torch.ones(2, 1))], max_epochs=1)

    assert n_hooks(model, opt) == 0
    assert handler.watcher.n_steps == 0


@pytest.mark.filterwarnings("ignore")
def test_skorch():
    skorch = pytest.importorskip("skorch")
    from hookkit.bridges.skorch import HookkitCallback

    probe, rows = Probe(), Rows()
    bridge = HookkitCallback(probe)
    net = skorch.NeuralNetRegressor(
        Net,
        max_epochs=EPOCHS,
        lr=0.05,
        batch_size=BATCH_SIZE,
        train_split=None,
        callbacks=[bridge],
        verbose=0,
    )

    net.fit(rows.x, rows.y)

    same(probe, bridge.watcher.losses)
    assert n_hooks(net.module_, net.optimizer_) == 0
    assert "HookkitCallback" in repr(net.get_params()["callbacks"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_skorch_net_is_copied_and_pickled_after_its_training(way):
    skorch = pytest.importorskip("skorch")
    from hookkit.bridges.skorch import HookkitCallback

    rows = Rows()
    net = skorch.NeuralNetRegressor(
        nn.Linear(rows.x.shape[1], rows.y.shape[1]),
        optimizer=torch.optim.SGD,
        max_epochs=EPOCHS,
        callbacks=[("hookkit", bridge := HookkitCallback(ParamStats()))],
        verbose=0,
    )
    net.fit(rows.x, rows.y)

    again = way(net)

    cloned = dict(again.callbacks_)["hookkit"].watcher
    assert repr(cloned) == repr(bridge.watcher)
    np.testing.assert_array_equal(cloned.losses, bridge.watcher.losses)
    again.partial_fit(rows.x, rows.y)
    more = dict(again.callbacks_)["hookkit"].watcher
    assert len(more.param_stats.record()) == 2 * len(bridge.watcher.param_stats.record())


@pytest.mark.filterwarnings("ignore")
def test_a_fastai_learner_is_exported_after_its_training(tmp_path):
    pytest.importorskip("fastai")
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    from hookkit.bridges.fastai import HookkitCallback

    bridge, dls = HookkitCallback(ParamStats()), DataLoaders(loader(), loader())
    learn = Learner(dls, Net(), mse, cbs=bridge)
    with learn.no_logging():
        learn.fit(1)

    torch.save(learn, tmp_path / "learner.pkl")  # as its export does
    loaded = torch.load(tmp_path / "learner.pkl", weights_only=False)

    (again,) = (cb for cb in loaded.cbs if isinstance(cb, HookkitCallback))
    assert repr(again.watcher) == repr(bridge.watcher)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", [True, False])
def test_fastai(native: bool):
    pytest.importorskip("fastai")
    from functools import partial

    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.optimizer import SGD, OptimWrapper

    from hookkit.bridges.fastai import HookkitCallback

    model, probe = Net(), Probe()
    bridge = HookkitCallback(probe)
    opt_func = SGD if native else partial(OptimWrapper, opt=torch.optim.SGD)
    learn = Learner(DataLoaders(loader(), loader()), model, mse, opt_func, lr=0.05, cbs=bridge)

    with learn.no_logging():
        learn.fit(EPOCHS)

    same(probe, bridge.watcher.losses)
    n = bridge.watcher.n_steps
    learn.validate()
    assert bridge.watcher.n_steps == n
    assert n_hooks(model) == 0


def fastai_learner(bridge, *cbs):
    pytest.importorskip("fastai")
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    def mae(y, t):
        return (y - t).abs().mean()

    dls = DataLoaders(loader(), loader())
    return Learner(dls, Net(), mse, lr=0.05, metrics=mae, cbs=[bridge, *cbs])


def test_what_fastai_s_recorder_has_of_an_epoch_is_kept(monkeypatch):
    """Without fastai: its events in their order, and a Recorder's log before the time is added."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hookkit.bridges import fastai as bridges
    monkeypatch.setattr(bridges._Callback, "__init__", lambda self: None)
    model = Net()
    opt, bridge = sgd(model), bridges.HookkitCallback()
    recorder = SimpleNamespace(
        metric_names=["epoch", "train_loss", "valid_loss", "mae", "time"],
        log=[0, 3.0, 0.5, 0.25],
        learn=SimpleNamespace(metrics=["mae"]),
        train_metrics=False,
        cancel_train=False,
        cancel_valid=False,
    )
    bridge.learn = SimpleNamespace(model=model, opt=opt, recorder=recorder)

    bridge.before_fit()
    bridge.before_train()
    model(torch.ones(1, 4)).sum().backward()
    bridge.before_step()
    opt.step()
    bridge.after_step()
    bridge.after_epoch()
    bridge.after_fit()
    recorder.log = [0, 9.0, 9.0]  # a validation by itself: nothing of a training
    for event in ("before_fit", "after_epoch", "after_fit"):
        getattr(bridge, event)()

    row = {"epoch": 0, "step": 0, "valid_loss": 0.5, "mae": 0.25}
    assert bridge.watcher.run_record().valid == [row]


@pytest.mark.filterwarnings("ignore")
def test_fastai_tells_validation_losses_and_metrics():
    pytest.importorskip("fastai")
    from hookkit.bridges.fastai import HookkitCallback

    bridge = HookkitCallback(Probe())
    learn = fastai_learner(bridge)

    with learn.no_logging():
        learn.fit(EPOCHS)
        run, values = bridge.watcher.run_record(), learn.recorder.values
        learn.validate()

    assert [list(row) for row in run.valid] == [
        ["epoch", "step", "train_loss", "valid_loss", "mae"]
    ] * EPOCHS
    assert [[row["valid_loss"], row["mae"]] for row in run.valid] == [v[1:3] for v in values]
    assert run.valid[1]["train_loss"] == pytest.approx(run.losses[N:].mean())
    assert bridge.watcher.run_record().valid == run.valid


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cancelled", ["train", "validate"])
def test_fastai_s_cancelled_parts_put_no_number_under_another_name(cancelled: str):
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback as FastaiCallback
    from fastai.callback.core import CancelTrainException, CancelValidException

    from hookkit.bridges.fastai import HookkitCallback

    class Cancel(FastaiCallback):
        def after_batch(self) -> None:
            if self.iter == 2 and self.training == (cancelled == "train"):
                raise CancelTrainException if self.training else CancelValidException

    bridge = HookkitCallback()
    learn = fastai_learner(bridge, Cancel())

    with learn.no_logging():
        learn.fit(EPOCHS)

    rows = bridge.watcher.run_record().valid
    assert [row.get("valid_loss") for row in rows] == (
        [values[0] for values in learn.recorder.values] if cancelled == "train" else [None, None]
    )


@pytest.mark.filterwarnings("ignore")
def test_a_validation_inside_a_fit_of_fastai_ends_nothing():
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback as FastaiCallback

    from hookkit.bridges.fastai import HookkitCallback

    class Aside(FastaiCallback):
        order = 90

        def after_batch(self) -> None:
            if self.training and self.iter == 3:
                self.learn.validate()
                self.model.train()
                self.learn.training = True

    probe = Probe()
    bridge = HookkitCallback(probe)
    learn = fastai_learner(bridge, Aside())

    with learn.no_logging():
        learn.fit(1)

    assert len(bridge.watcher.run_record().valid) == 1
    assert len(probe.rows) == bridge.watcher.n_steps == N


@pytest.mark.filterwarnings("ignore")
def test_fastai_begins_anew_after_an_exception():
    pytest.importorskip("fastai")
    from fastai.callback.core import Callback as FastaiCallback

    from hookkit.bridges.fastai import HookkitCallback

    class Fail(FastaiCallback):
        def after_batch(self) -> None:
            if self.iter == 3:
                raise ZeroDivisionError("boom")

    bridge = HookkitCallback(Probe())
    learn = fastai_learner(bridge)

    with learn.no_logging():
        with pytest.raises(ZeroDivisionError):
            learn.fit(1, cbs=Fail())
        learn.validate()
        learn.fit(1)

    assert bridge.watcher.n_steps == 4 + N
    assert n_hooks(learn.model) == 0


@pytest.mark.parametrize(
    ("module", "cls", "package"),
    [
        ("lightning", "HookkitCallback", "lightning"),
        ("skorch", "HookkitCallback", "skorch"),
        ("fastai", "HookkitCallback", "fastai"),
        ("transformers", "HookkitCallback", "transformers"),
    ],
)
def test_a_missing_library_is_named(module: str, cls: str, package: str, monkeypatch):
    from importlib import import_module

    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded, "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # its import fails
    monkeypatch.delitem(sys.modules, f"hookkit.bridges.{module}", raising=False)
    bridge = import_module(f"hookkit.bridges.{module}")
    monkeypatch.delitem(sys.modules, f"hookkit.bridges.{module}")

    with pytest.raises(MissingExtraError, match=f"pip install {package}"):
        getattr(bridge, cls)()


def test_a_library_s_own_epoch_and_step_take_no_other_s_place():
    from hookkit.bridges import Bridge

    model = Net()
    opt = sgd(model)
    bridge = Bridge()
    bridge.begin(model, opt)
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    bridge.epoch(epoch=0.5, step=7.0, accuracy=1.0)
    bridge.end()

    logged = {"logged_epoch": 0.5, "logged_step": 7.0, "accuracy": 1.0}
    assert bridge.watcher.run_record().valid == [{"epoch": 0, "step": 0, **logged}]


def test_a_watcher_that_never_began_says_so():
    from hookkit.bridges import Bridge

    with pytest.raises(HookError, match="no training has begun"):
        Bridge().watcher  # noqa: B018


@pytest.mark.parametrize("given", ["ActivationStats", [Callback()], None, nn.Linear])
def test_what_is_no_callback_is_refused_before_a_training_begins(given):
    from hookkit.bridges import Bridge

    with pytest.raises(ArgumentError, match=r"expected callbacks of hookkit, found .*such as Act"):
        Bridge(Callback, given)
