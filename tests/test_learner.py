"""Learner: every way to use one, on every kind of batch; nothing left behind; clear errors."""

import copy
from collections.abc import Callable, Iterator
from operator import gt
from typing import Any

import numpy as np
import pytest
import torch
from learners import EventLog, plain, quiet
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from hookkit.callbacks import (
    Callback,
    EarlyStoppingCallback,
    GradientAccumulation,
    GradientClip,
    LogTo,
    MixedPrecision,
    ProgressCallback,
    SaveModelCallback,
    TrainEvalCallback,
)
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import HookkitError, HookkitWarning, ModelRunError
from hookkit.recorders import ActivationStats, GradientStats
from hookkit.testing import RegModel, mlp, synth_dbunch
from hookkit.training import Learner, watch
from hookkit.training.data import DataLoaders

# --- it trains


def test_a_fit_is_the_plain_loop_to_the_bit() -> None:
    dls, model = synth_dbunch(n_train=6), mlp(1, 8, 1)
    truth = copy.deepcopy(model)
    opt = torch.optim.SGD(truth.parameters(), lr=0.01)
    torch.manual_seed(3)
    for _ in range(2):
        for x, y in dls.train:
            nn.functional.mse_loss(truth(x), y).backward()
            opt.step()
            opt.zero_grad()

    torch.manual_seed(3)
    learn = plain((dls.train, None), model, loss_func=nn.MSELoss())
    learn.fit(2, lr=0.01)

    for p, q in zip(model.parameters(), truth.parameters(), strict=True):
        assert p.equal(q)


def test_the_optimizer_is_made_once_unless_a_new_one_is_wanted_and_no_hook_stays() -> None:
    learn = quiet()
    assert learn.opt is None

    learn.fit(1)
    first, hooks = learn.opt, dict(learn.opt._optimizer_step_post_hooks)
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=Callback(after_step=lambda cb: 1 / 0))
    assert learn.opt is first
    assert hooks == dict(first._optimizer_step_post_hooks) == {}
    learn.fit(1, reset_opt=True)

    assert learn.opt is not first
    assert learn.opts == [learn.opt]


# --- steps


def test_steps_are_counted_over_fits_and_stepped_is_of_this_batch() -> None:
    seen: list[tuple[bool, int]] = []
    look = Callback(after_batch=lambda cb: seen.append((cb.stepped, cb.n_steps)))
    learn = quiet(n_trn=4, cbs=[look, GradientAccumulation(2)])

    learn.fit(2)
    learn.validate()

    valid = [[(False, n)] * 2 for n in (2, 4)]
    first = [(False, 0), (True, 1), (False, 1), (True, 2), *valid[0]]
    assert seen == [*first, (False, 2), (True, 3), (False, 3), (True, 4), *valid[1], *valid[1]]
    run = learn.run_record()
    assert run.losses.shape == (4,)
    assert np.isfinite(run.losses).all()
    assert [(row["epoch"], row["step"]) for row in run.valid] == [(0, 1), (1, 3)]
    assert (run.info["optimizer"], run.info["model"]) == ("SGD", "RegModel")
    text = learn.show_training_loop()
    assert repr(text) == str(text)
    assert "after_batch: [TrainEvalCallback, Callback" in text
    assert text.index("before_fit") < text.index("before_train") < text.index("after_batch")


@pytest.mark.parametrize("put_in", [False, True])
def test_an_optimizer_without_torchs_hooks_is_counted_too_also_if_put_in(put_in: bool) -> None:
    class Own:
        def __init__(self, groups: Any, lr: float) -> None:
            self.param_groups = groups

        def step(self) -> None:
            for g in self.param_groups:
                for p in g["params"]:
                    p.data -= g["lr"] * p.grad

        def zero_grad(self) -> None:
            for g in self.param_groups:
                for p in g["params"]:
                    p.grad = None

    def other(cb: Any) -> None:
        cb.learn.opt = torch.optim.SGD(cb.learn.model.parameters(), lr=0.1)

    learn = quiet(opt_func=Own, cbs=Callback(before_fit=other) if put_in else None)

    learn.fit(1)

    assert learn.n_steps == 3


# --- batches of any kind


def test_several_inputs_and_several_targets() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(torch.cat([a, b], 1))
            return y, 2 * y

    def loss(pred: Any, u: Tensor, v: Tensor) -> Tensor:
        return (pred[0] - u).pow(2).mean() + (pred[1] - v).pow(2).mean()

    t = torch.randn(8, 1)
    dls = DataLoaders([(t, t, t, t)] * 2, [(t, t, t, t)] * 2, n_inp=2)
    learn = plain(dls, Two(), loss_func=loss)

    learn.fit(1)
    preds, targets = learn.get_preds()

    assert [p.shape for p in preds] == [t.shape for t in targets] == [(16, 1), (16, 1)]
    assert learn.x == learn.y is None


class KeywordModel(nn.Module):
    """As Hugging Face's: keywords in, a mapping with its own loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.fc(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


KEYWORDS = [{"x": torch.randn(4, 2), "labels": torch.tensor([0, 1, 2, 0])}] * 3


def test_a_mapping_goes_in_by_keyword_and_the_models_own_loss_is_used() -> None:
    def loss(pred: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(pred["logits"], batch["labels"])

    learn = plain((KEYWORDS, KEYWORDS), KeywordModel())
    with_loss = plain((KEYWORDS, KEYWORDS), copy.deepcopy(learn.model), loss_func=loss)
    before = learn.model.fc.weight.clone()

    learn.fit(1)
    with_loss.fit(1)
    preds, targets = learn.get_preds()

    assert not before.equal(learn.model.fc.weight)
    assert with_loss.model.fc.weight.equal(learn.model.fc.weight)
    assert preds["logits"].shape == (12, 3)
    assert preds["loss"].shape == (3,)
    assert targets["labels"].shape == (12,)
    assert learn.recorder.values[0][1] == pytest.approx(preds["loss"][0].item(), rel=1e-5)


class Stream(IterableDataset[Any]):
    """Twelve samples; a DataLoader of it has a `__len__` that raises."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(1), torch.ones(1))] * 12)


def test_a_loader_whose_length_raises_is_one_without_a_length() -> None:
    pytest.importorskip("tqdm")
    stream = DataLoader(Stream(), 4)
    learn = quiet(data=DataLoaders(stream, stream), cbs=[ProgressCallback])

    learn.fit(2)
    preds, _ = learn.get_preds()

    assert (learn.n_steps, learn.n_iter) == (6, None)
    assert preds.shape == (12, 1)
    assert "? + ? batches" in repr(learn)


# --- the loss


def test_the_loss_is_the_datasets_or_a_callbacks_and_one_not_reduced_is_named() -> None:
    class Own(TensorDataset):
        loss_func = staticmethod(nn.functional.l1_loss)

    def give(self: Any) -> None:
        self.learn.loss_grad = (self.pred - self.x).pow(2).mean()

    t = torch.ones(4, 1)
    assert plain(DataLoaders(DataLoader(Own(t, t), 2)), RegModel()).loss_func is Own.loss_func

    learn = quiet(cbs=Callback(after_loss=give))
    learn.dls = [t] * 2, None  # loaders set by hand
    learn.fit(1)
    assert learn.n_steps == 2

    with pytest.raises(RuntimeError, match=r"only for scalar outputs") as caught:
        quiet(loss_func=nn.MSELoss(reduction="none")).fit(1)
    assert caught.value.__notes__ == ["the loss was 16×1, epoch 0, batch 0 (training)"]


# --- validate and get_preds


MORE: dict[str, Callable[[], list[Callback]]] = {
    "nothing": list,
    "bf16": lambda: [MixedPrecision("bf16")],
    "fp16": lambda: [MixedPrecision("fp16")],
    "steps": lambda: [GradientAccumulation(2), GradientClip(), TrainEvalCallback()],
}


@pytest.mark.parametrize("verb", ["validate", "get_preds"])
@pytest.mark.parametrize("when", [None, "before_batch", "after_backward", "after_epoch"])
@pytest.mark.parametrize("more", MORE)
def test_a_pass_without_learning_changes_nothing_that_a_fit_goes_on_with(
    more: str, when: str | None, verb: str
) -> None:
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    learn = quiet(model=net, cbs=GradientAccumulation(3))
    results = {"final_record", "cbs", "_past", "heard"}  # and callbacks, which are back

    def state() -> dict[str, Any]:
        tensors = {name: t.tolist() for name, t in net.state_dict().items()}
        modes = [m.training for m in net.modules()]
        own = {name: x for name, x in vars(learn).items() if name not in results}
        return {**tensors, "modes": modes, **own}

    def asks(cb: Any = None) -> None:
        if learn.eval_pass:
            return
        before = state()
        getattr(learn, verb)(cbs=MORE[more]())
        after = state()
        assert before.keys() == after.keys()
        assert all(before[k] is after[k] or before[k] == after[k] for k in before)

    learn.fit(1, cbs=[] if when is None else Callback(**{when: asks}))
    net[1].eval()
    asks()

    dtypes = []
    learn.fit(1, cbs=Callback(after_pred=lambda cb: dtypes.append(cb.learn.pred.dtype)))
    assert set(dtypes) == {torch.float32}
    assert learn.n_steps == 2


def test_predictions_come_in_order_without_a_graph_and_with_what_is_asked_for() -> None:
    learn = quiet(n_val=3)
    inputs, truth = learn.dls.valid_ds.tensors

    x, preds, y, losses = learn.get_preds(with_input=True, with_loss=True)

    assert x.equal(inputs)
    assert preds.equal(learn.model(inputs).detach())
    assert not preds.requires_grad
    assert y.equal(truth)
    torch.testing.assert_close(losses, (preds - y).pow(2)[:, 0])
    assert learn.loss_func.reduction == "mean"


def test_predictions_of_any_shapes_or_of_a_reused_output_are_kept_apart() -> None:
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = torch.zeros(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.buffer.copy_(x)

    data = [(torch.full((2, 1), float(i)), torch.zeros(2)) for i in range(3)]
    preds, _ = plain((data, data), Reuses()).get_preds()
    assert preds.flatten().tolist() == [0, 0, 1, 1, 2, 2]

    data = [(torch.ones(2, n), torch.ones(2)) for n in (3, 4)]
    learn = plain((data, data), nn.Identity())
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        learn.get_preds()


def test_predictions_of_items_that_are_no_tensors_are_those_of_all_batches() -> None:
    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> Any:
            y = {"y": torch.tensor(float(i)), "file": f"{i}.png"}
            return torch.ones(1), y if i < 3 else dict(reversed(y.items()))

    def batch(n: int) -> Any:
        images = [{"boxes": torch.full((2,), float(i))} for i in range(n)]
        return torch.ones(n, 1), images, ("a",) * n, f"batch of {n}", 4, None

    data = DataLoader(Images(), 2)
    learn = plain((data, data), nn.Linear(1, 1), loss_func=lambda p, y: p.mean())
    _, y = learn.get_preds()
    assert y["y"].tolist() == [0, 1, 2, 3, 4]
    assert y["file"] == [f"{i}.png" for i in range(5)]

    learn = plain(DataLoaders([], n_inp=1), nn.Linear(1, 1), loss_func=lambda p, *y: p.mean())
    _, (images, letters, names, four, nothing) = learn.get_preds(dl=[batch(2), batch(1)])
    assert [image["boxes"].tolist() for image in images] == [[0, 0], [1, 1], [0, 0]]
    assert letters == ("a", "a", "a")
    assert names == ["batch of 2", "batch of 1"]
    assert (four, nothing) == (4, None)

    with pytest.raises(ValueError, match=r"a batch has .*, and the first one"):
        learn.get_preds(dl=[(torch.ones(1, 1), {k: torch.ones(1)}) for k in "ab"])


@pytest.mark.parametrize("ask", ["validate", "get_preds"])
@pytest.mark.parametrize(
    "event", ["before_batch", "after_pred", "after_loss", "after_step", "after_epoch"]
)
def test_validating_during_a_batch_leaves_it_and_its_record_alone(event: str, ask: str) -> None:
    def asks(cb: Any) -> None:
        getattr(cb.learn, ask)(dl=[(torch.zeros(2, 1), torch.full((2, 1), 1e6))])

    def recorded(*more: Callback) -> list[Any]:
        cbs = [ActivationStats(modules=""), GradientStats(modules="")]
        torch.manual_seed(0)
        sums = HookCallback("", hook=lambda m, i, o: o.sum())
        log = EventLog("before_fit", "after_fit", "before_epoch")
        batches = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(3)]
        both = [*cbs, sums, log, *more]
        learn = plain((batches, batches), RegModel(), loss_func=nn.MSELoss(), cbs=both)
        learn.fit(2)
        assert log.seen == ["before_fit", "before_epoch", "before_epoch", "after_fit"]
        rows = learn.recorder.values, learn.recorder.losses
        return [*(cb.record().values for cb in cbs), sums.hooks.stored[0].item(), rows]

    cb = Callback(**{event: asks})
    cb.run_valid = False

    alone, asked = recorded(), recorded(cb)

    np.testing.assert_equal(asked, alone)
    assert asked[0]["count"].shape == (1, 6)


# --- what cannot work


class OfFastai:
    """A metric in fastai's form, which can be called with one batch too."""

    def reset(self) -> None: ...
    def accumulate(self, learn: Any) -> None: ...
    def __call__(self, pred: Tensor, y: Tensor) -> float:
        return 0.0


def in_watch() -> None:
    with watch(RegModel(), None, MixedPrecision("bf16")):
        pass


def in_distrib_ctx(act: Callable[[Any], Any], **options: Any) -> None:
    pytest.importorskip("accelerate")
    with (learn := quiet(**options)).distrib_ctx(cpu=True):
        act(learn)


ONES = torch.ones(4, 1)
FASTAIS = type("SaveModel", (), {"__module__": "fastai.callback.tracker"})
AT_ONCE: dict[str, Callable[[], Any]] = {  # what was asked, by what is said
    "expected an nn.Module, found the class Linear": lambda: Learner(synth_dbunch(), nn.Linear),
    r"data come first: Learner\(dls, model": lambda: Learner(RegModel(), synth_dbunch()),
    r"Give DataLoaders\(train, valid\), the pair": lambda: Learner("data", RegModel()),
    r"opt_func=SGD \( .*found a SGD": lambda: quiet(
        opt_func=torch.optim.SGD(RegModel().parameters(), lr=0.1)
    ),
    r"The train loader is a str, which": lambda: DataLoaders("cuda"),
    r"SaveModel .*fastai(?s:.*)with hookkit\.watch": lambda: quiet(cbs=FASTAIS()),
    r"n_acc=0\).* whole number from 1": lambda: GradientAccumulation(0),
    r"patience=0.*Give a whole number from 1": lambda: EarlyStoppingCallback(patience=0),
    r'amp_mode=.*"fp16", "bf16"': lambda: MixedPrecision("fp8"),
    "only the loss of float16 is scaled": lambda: MixedPrecision("bf16", init_scale=2.0),
    r"in watch use torch\.autocast": in_watch,
    "LogTo: an int was given": lambda: LogTo(3),
    r"import wandb; LogTo\(wandb\)": lambda: LogTo("wandb"),
    r"LogTo\(statistics='men'\)": lambda: LogTo("a.jsonl", statistics="men"),
    "validate: this Learner has no data": lambda: Learner(None, RegModel()).validate(),
    "the loader gave no batch": lambda: quiet(data=([(ONES, ONES)], [])).get_preds(),
    r"n=5.*from -1 to 1": lambda: quiet().freeze_to(5),
    "freeze_to: call it before": lambda: in_distrib_ctx(lambda learn: learn.freeze()),
    "lr_find: call it before": lambda: in_distrib_ctx(lambda learn: learn.lr_find()),
    r'distrib_ctx\(mixed_precision="bf16"\)': lambda: in_distrib_ctx(
        lambda learn: learn.fit(1), cbs=MixedPrecision("bf16")
    ),
    "length of the training loader, which has none": lambda: quiet(
        data=(DataLoader(Stream(), 4), None)
    ).fit_one_cycle(1),
    "fit_one_cycle|fit: this Learner has no data": lambda: Learner(None, RegModel()).fit(1),
    r"all epochs. Give a whole number from 3": lambda: quiet().fit(2, start_epoch=3),
}
IN_A_FIT: dict[str, dict[str, Any]] = {  # options of a Learner, by what its fit says
    r"Training needs a loss; .*Give Learner\(…, loss": {"loss_func": None},
    r"the batch has no target: \(4×1,\) is all input": {"data": ([ONES] * 2, None)},
    r"; found 3\.0\. Return the": {"loss_func": lambda pred, y: 3.0},
    r"; found \(scalar, 1\)\. Return the": {"loss_func": lambda pred, y: (torch.ones(()), 1)},
    "fit was called inside a fit": {"cbs": Callback(after_epoch=lambda cb: cb.learn.fit(1))},
    r"splitter returned no parameter, .*requires_grad_": {"model": nn.Identity()},
    r"lr=.*: the optimizer has 1 parameter groups": {"lr": [1, 2]},
    r"have lr=\[3\.0\], which each fit would replace": {
        "splitter": lambda m: [{"params": list(m.parameters()), "lr": 3.0}]
    },
    r"metrics='acc.*give a function of \(pred, target": {"metrics": ["accuracy"]},
    r"metrics=3: give a function of": {"metrics": [3]},
    r"OfFastai.*an object with reset, update": {"metrics": OfFastai()},
    r"'acuracy'.*only train_loss, valid_loss\. Give": {"cbs": EarlyStoppingCallback("acuracy", gt)},
    "'time'.*no such column": {"cbs": SaveModelCallback("time", gt, every_epoch=True)},
    "none, since there is no Recorder": {"cbs": EarlyStoppingCallback(), "default_cbs": False},
}


@pytest.mark.parametrize("said", AT_ONCE)
def test_what_cannot_work_is_refused_with_its_cure(said: str) -> None:
    with pytest.raises(HookkitError, match=said):
        AT_ONCE[said]()


@pytest.mark.parametrize("said", IN_A_FIT)
def test_what_cannot_work_is_refused_as_a_fit_begins(said: str) -> None:
    learn = quiet(**IN_A_FIT[said])

    with pytest.raises(HookkitError, match=said):
        learn.fit(1)

    assert not learn.fitting
    assert "recorder" not in dir(learn) or learn.recorder.values == []


def test_a_validation_without_a_batch_is_a_warning_within_a_fit() -> None:
    learn = plain((synth_dbunch().train, []), RegModel(), loss_func=nn.MSELoss())

    with pytest.warns(HookkitWarning, match="the validation loader gave no batch"):
        learn.fit(1)


def test_gradients_from_before_a_fit_are_no_part_of_its_first_step() -> None:
    def trained(*, before: bool) -> Tensor:
        torch.manual_seed(0)
        learn = quiet(n_trn=1)
        if before:
            learn.model(torch.ones(2, 1)).sum().backward()
        torch.manual_seed(1)
        learn.fit(1)
        return torch.cat(list(learn.model.parameters()))

    assert trained(before=True).equal(trained(before=False))


def test_what_goes_wrong_with_a_batch_is_said_beside_pytorchs_own_error() -> None:
    learn = plain(([(torch.ones(2, 5), torch.ones(2, 1))], None), mlp(1, 1), loss_func=nn.MSELoss())
    with pytest.raises(RuntimeError, match=r"mat1 and mat2") as caught:
        learn.fit(1)
    said = "the model was given 2×5 as its inputs, epoch 0, batch 0 (training)"
    assert caught.value.__notes__[0].startswith(said)

    batches = (b for b in [(torch.ones(2, 1), torch.ones(2, 1))] * 3)
    with pytest.raises(ModelRunError, match=r"gave no batch. A generator can be read only once"):
        quiet(data=(batches, None)).fit(2)


# --- devices


@pytest.mark.parametrize("named", [True, False])
def test_batches_follow_the_model_or_both_follow_the_loaders(
    named: bool, gpu: torch.device
) -> None:
    dls = DataLoaders(*synth_dbunch().loaders, device=gpu if named else None)
    model = RegModel() if named else RegModel().to(gpu)
    seen: set[str] = set()
    look = Callback(after_pred=lambda cb: seen.update({cb.x.device.type, cb.pred.device.type}))
    learn = quiet(data=dls, model=model, cbs=look)

    learn.fit(1)
    preds, _ = learn.get_preds()

    assert seen == {gpu.type}
    assert preds.is_cpu


def test_on_cuda_no_batch_waits_for_the_device(cuda: torch.device) -> None:
    learn = quiet(n_trn=6, n_val=0, data=synth_dbunch(n_train=6, n_valid=1, cuda=True))
    before = Callback(before_batch=lambda cb: torch.cuda.set_sync_debug_mode("error"))
    after = Callback(after_batch=lambda cb: torch.cuda.set_sync_debug_mode("default"))
    before.order, after.order = -100, 100
    learn.dls.loaders[:] = [[(x.to(cuda), y.to(cuda)) for x, y in dl] for dl in learn.dls.loaders]

    learn.fit(1, cbs=[before, after])

    assert len(learn.recorder.losses) == 6


# --- predictions of the training data


def test_the_training_data_are_predicted_in_order_and_whole_or_as_the_users_sampler_says() -> None:
    x = torch.arange(12.0)[:, None]
    ds, seen = TensorDataset(x, x), list[float]()
    learn = plain((DataLoader(ds, 5, shuffle=True, drop_last=True), None), RegModel())
    learn.loss_func = nn.MSELoss()
    before = torch.get_rng_state()

    _, y = learn.get_preds(ds_idx=0)

    assert y.flatten().tolist() == list(range(12))
    assert torch.get_rng_state().equal(before)
    learn.fit(1, cbs=Callback(after_pred=lambda cb: seen.extend(cb.y.flatten().tolist())))
    assert len(seen) == 10
    assert seen != sorted(seen)

    for sampler in ([4, 1, 5], SubsetRandomSampler([4, 1, 5])):
        chosen = DataLoader(ds, 2, sampler=sampler, drop_last=True)
        _, y = plain((chosen, None), RegModel()).get_preds(ds_idx=0)
        assert y.flatten().tolist() == [4, 1, 5]


@pytest.mark.parametrize("ask", ["validate", "get_preds"])
def test_a_pass_draws_no_random_number_that_a_fit_would_have_drawn(ask: str) -> None:
    data = TensorDataset(torch.ones(6, 1), torch.ones(6, 1))
    train = DataLoader(data, 2, generator=torch.Generator())
    valid = DataLoader(data, 2, num_workers=0)
    learn = plain((train, valid), RegModel(), loss_func=nn.MSELoss())
    before = torch.get_rng_state(), train.generator.get_state()

    for i in (0, 1):
        getattr(learn, ask)(i)

    for was, now in zip(before, (torch.get_rng_state(), train.generator.get_state()), strict=True):
        assert was.equal(now)


def test_predictions_that_fail_keep_no_tensors() -> None:
    learn = quiet()
    alone = [*learn._past]

    def fail(cb: Any) -> None:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        learn.get_preds(cbs=Callback(after_pred=fail))

    assert not [cb for cb in learn._past if cb not in alone and hasattr(cb, "batches")]
