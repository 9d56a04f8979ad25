"""What a library does beyond a plain loop: accumulating, validating, resuming, logging.

`test_loops_page` has the plain trainings of each library.
"""

import sys
from contextlib import nullcontext
from importlib import import_module

import numpy as np
import pytest
import torch
from hooked import n_hooks
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hookkit.bridges import Bridge
from hookkit.callbacks import Callback
from hookkit.errors import MissingExtraError
from hookkit.recorders import ActivationStats, FlightRecorder, ParamStats
from hookkit.records import Run
from hookkit.training import watch

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
    def __init__(self, keyed: bool = False, seed: int = 1) -> None:
        g = torch.Generator().manual_seed(seed)
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


def bridge_of(library: str, *cbs):
    """hookkit's callback for `library` with `cbs`, where that is installed."""
    pytest.importorskip(library)
    return import_module(f"hookkit.bridges.{library}").HookkitCallback(*cbs)


def assert_rest_of(resumed: Run, whole: Run, first: int) -> None:
    """`resumed` is what `whole` has from the step `first` on, with its numbers."""
    params, rest = resumed.params, whole.params.steps >= first
    assert params.steps[0] == resumed.info["first_step"] == first
    for axis in ("steps", "epochs"):
        np.testing.assert_array_equal(getattr(params, axis), getattr(whole.params, axis)[rest])
    for name, values in whole.params.values.items():
        np.testing.assert_array_equal(params.values[name], values[:, rest])
    np.testing.assert_array_equal(resumed.losses[first:], whole.losses[first:])
    assert resumed.valid[-1] == whole.valid[-1]


def recorders() -> list[Callback]:
    return [ActivationStats(modules="a"), ParamStats()]


def plain(each: int = 1) -> Run:
    """The truth: a loop of one's own."""
    model = Net()
    opt = sgd(model)
    with watch(model, opt, *recorders()) as w:
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
    return w.run_record()


def same(run: Run, each: int = 1, epochs: bool = True) -> None:
    truth = plain(each)
    for own, true, keys in (
        (run.activations, truth.activations, ("count", "mean", "rms")),
        (run.params, truth.params, ("grad_norm", "update_norm", "weight_norm")),
    ):
        for key in keys:
            np.testing.assert_allclose(own.value(key), true.value(key), rtol=1e-4, atol=1e-6)
        if epochs:
            assert own.epochs.tolist() == true.epochs.tolist()
    np.testing.assert_allclose(run.losses, truth.losses, rtol=1e-4)


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
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", **options},
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return None

        def create_optimizer(self, *_):
            self.optimizer = sgd(self.model)
            return self.optimizer

    rows = Rows(keyed=True)
    return InOrder(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks])


class Shares(Net):
    """As the causal language models: the Trainer gives the size of the whole step."""

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        out = super().forward(x, labels)
        if labels is not None and num_items_in_batch is not None:
            out["loss"] = (out["logits"] - labels).pow(2).sum() / num_items_in_batch
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_with_accumulation_and_evaluation(tmp_path):
    model, bridge = Net(), bridge_of("transformers", *recorders())
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}

    hugging_face(model, bridge, out=tmp_path, **options).train()

    run = bridge.watcher.run_record()
    same(run, each=2)
    ends = [N // 2 - 1, N - 1]
    assert [(row["epoch"], row["step"]) for row in run.valid] == list(enumerate(ends))
    assert run.valid[0]["valid_loss"] > 0
    assert n_hooks(model, *bridge.watcher.loop.opts) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bridged", [False, True])
def test_hugging_face_s_losses_in_shares_add_up(tmp_path, bridged: bool):
    bridge = bridge_of("transformers", *recorders())
    bridges = [bridge] if bridged else []
    trainer = hugging_face(Shares(), *bridges, out=tmp_path, gradient_accumulation_steps=2)

    with nullcontext() if bridged else watch(trainer.model, None, *recorders()) as w:
        trainer.train()

    same((bridge.watcher if bridged else w).run_record(), each=2, epochs=bridged)


def lightning_module():
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            net = Net()
            self.a, self.act, self.b = net.a, net.act, net.b

        def forward(self, x):
            return self.b(self.act(self.a(x)))

        def training_step(self, batch, i):
            x, y = batch
            return mse(self(x), y)

        def validation_step(self, batch, i):
            x, y = batch
            self.log("val_loss", mse(self(x), y))

        def configure_optimizers(self):
            return sgd(self)

    return Module()


def lightning_trainer(tmp_path, each: int, *callbacks, **options):
    pl = pytest.importorskip("lightning.pytorch")
    return pl.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=each,
        callbacks=[*callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"max_epochs": EPOCHS, "enable_checkpointing": False, **options},
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_accumulation_and_validation(tmp_path):
    module, bridge = lightning_module(), bridge_of("lightning", *recorders())

    lightning_trainer(tmp_path, 2, bridge).fit(module, loader(), loader())

    run = bridge.watcher.run_record()
    same(run, each=2)
    assert [row["epoch"] for row in run.valid] == [0, 1]
    assert run.valid[1]["valid_loss"] > 0
    assert n_hooks(module, *bridge.watcher.loop.opts) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_steps", [-1, 5 * N + 3])  # all epochs; or until within the sixth
def test_metrics_of_lightning_are_of_the_epoch_in_which_they_were_logged(tmp_path, n_steps: int):
    module, validated = lightning_module(), []

    def training_step(self, batch, i):
        self.log("epoch_now", float(self.current_epoch))
        return mse(self(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.log("after", float(self.current_epoch))

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val_loss"].item()
            validated.append((self.current_epoch, loss))

    type(module).training_step = training_step
    type(module).on_train_epoch_end = on_train_epoch_end
    type(module).on_validation_end = on_validation_end
    bridge = bridge_of("lightning")
    options = {"max_epochs": 6, "check_val_every_n_epoch": 2, "max_steps": n_steps}

    lightning_trainer(tmp_path, 1, bridge, **options).fit(module, loader(), loader())

    rows = bridge.watcher.run_record().valid
    assert [row["epoch"] for row in rows] == list(range(6))
    assert [row["epoch_now"] for row in rows] == [row["after"] for row in rows] == list(range(6))
    assert [e for e, _ in validated] == [1, 3, 5][: 3 if n_steps == -1 else 2]
    assert [(r["epoch"], r["valid_loss"]) for r in rows if "valid_loss" in r] == validated


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_bad_step_of_lightning_is_skipped(tmp_path, by_hand: bool):
    module, flight, params = lightning_module(), FlightRecorder("skip"), ParamStats()
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
    bridge = bridge_of("lightning", flight, params)
    lightning_trainer(tmp_path, 1, bridge).fit(module, loader())

    assert [i.step for i in flight.incidents] == [1]
    assert bridge.watcher.loop.n_cancelled_steps == 1
    assert len(params.record()) == bridge.watcher.n_steps == next(n) - 1
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_of_lightning_has_the_numbers_of_the_whole(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")

    def trained(*cbs, **options):
        bridge = bridge_of("lightning", ParamStats())
        trainer = lightning_trainer(tmp_path, 1, bridge, *cbs, max_epochs=3)
        trainer.fit(lightning_module(), loader(), **options)
        return bridge.watcher.run_record()

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = trained(Save())

    assert_rest_of(trained(ckpt_path=tmp_path / "0.ckpt"), whole, N)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("each", "at"), [(1, N), (2, 3)])
def test_a_resumed_run_of_hugging_face_has_the_numbers_of_the_whole(tmp_path, each: int, at: int):
    def trained(resume=None, **options):
        bridge = bridge_of("transformers", ParamStats())
        options |= {"out": tmp_path, "gradient_accumulation_steps": each}
        hugging_face(Net(), bridge, **options).train(resume_from_checkpoint=resume)
        return bridge.watcher.run_record()

    whole = trained(save_strategy="steps", save_steps=at)

    assert_rest_of(trained(str(tmp_path / f"checkpoint-{at}")), whole, at)


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_a_missing_library_is_named(package: str, monkeypatch):
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
    for name in (package, *loaded, "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # its import fails
    monkeypatch.delitem(sys.modules, f"hookkit.bridges.{package}", raising=False)
    bridge = import_module(f"hookkit.bridges.{package}")
    monkeypatch.delitem(sys.modules, f"hookkit.bridges.{package}")

    with pytest.raises(MissingExtraError, match=f"pip install {package}"):
        bridge.HookkitCallback()


def test_a_library_s_own_epoch_and_step_take_no_other_s_place():
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
