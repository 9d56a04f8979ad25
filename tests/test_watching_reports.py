"""What a watched loop is told and tells: losses, epochs, arguments, names, warnings."""

import copy
import pickle
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from test_watching import Log, batches, net, sgd, train
from torch import nn

from hookkit.callbacks import Callback
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import ArgumentError, HookError, HookkitWarning, NeverFiredWarning
from hookkit.recorders import ActivationStats, ParamStats
from hookkit.training import watch

# --- the loss


class Wrapped:
    """As accelerate's: an optimizer in name, whose own step hooks do not work."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_the_loss_of_a_step_is_the_mean_of_what_its_batches_reported(late: bool, each: int):
    model, seen = net(), []
    opt = sgd(model)

    with watch(model, Wrapped(Wrapped(opt))) as w:
        for i, x in enumerate(batches(4)):
            loss = model(x).pow(2).mean()
            seen.append(loss.item())
            (loss / each).backward()
            if not late:
                w.loss(loss)
            if (i + 1) % each == 0:
                opt.step()
            if late:
                w.loss(loss.item())

    assert w.opt is opt
    np.testing.assert_allclose(w.losses, np.reshape(seen, (-1, each)).mean(1), rtol=1e-6)


class Returns(nn.Module):
    """A model that returns more than its scores."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net(), kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.net(x)
        value = y.pow(2).mean()
        by_name = {"value": y.sum(), "loss": value, "logits": y}
        return {"loss": value, "by_name": by_name, "second": (y, value)}[self.kind]


@pytest.mark.parametrize("kind", ["loss", "by_name", "second"])
@pytest.mark.parametrize("reported", [False, True])
def test_a_loss_that_the_model_returns_is_found(kind: str, reported: bool):
    """A scalar that is only a guess (an actor-critic's value) gives way to what is reported."""
    model, values = Returns(kind), []
    opt = sgd(model)

    with watch(model, opt) as w:
        for step in range(3):
            for x in batches(2):
                out = model(x)
                loss = out if kind == "loss" else out["loss" if kind == "by_name" else 1]
                values.append(loss.item())
            if reported:
                w.loss(100.0 + step)
            loss.backward()
            opt.step()
        model.eval()
        model(batches()[0])

    want = np.reshape(values, (3, 2)).mean(1)
    if reported:
        first = np.reshape(values, (3, 2))[:, 0]
        want = np.array([100.0, 101.0, 102.0])
        want = want if kind == "second" else (first + want) / 2  # each batch has its own
    np.testing.assert_allclose(w.losses, want, rtol=1e-5)


def test_values_reported_before_the_first_batch_and_several_times_in_an_epoch_are_all_kept():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w:
        w.epoch(valid_loss=9.0)  # of the untrained model
        for epoch in range(2):
            for part in range(2):
                train(model, opt, 2)
                w.note(valid_loss=10.0 * epoch + part)
                w.note(accuracy=0.5)
            train(model, opt, 1)
            w.epoch(seconds=1.0)

    rows = w.run_record().valid
    assert [(r["epoch"], r["step"], r.get("valid_loss")) for r in rows] == [
        *[(0, 0, 9.0), (0, 1, 0.0), (0, 4, 1.0)],
        *[(1, 6, 10.0), (1, 9, 11.0)],
    ]
    assert [r.get("accuracy") for r in rows] == [None, 0.5, 0.5, 0.5, 0.5]
    assert [r.get("seconds") for r in rows] == [None, None, 1.0, None, 1.0]
    assert "10 steps in 2 epochs" in repr(w)


class Ranks(nn.Module):
    """A model of two towers, such as CLIP: it returns a scale beside both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(4, 3), nn.Linear(4, 3), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x), self.scale.exp()


def ranked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a, b, scale = model(x)
    return nn.functional.cross_entropy(scale * a @ b.T, torch.arange(len(x)))


def weighted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)["logits"].abs().mean()  # not the "loss" that the model returns


def with_forces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    energy = model(x)  # a scalar, and not the loss
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy.square() + (force + x).square().mean()


OTHER_LOSSES = [
    pytest.param(Ranks, ranked, id="scalar beside the output"),
    pytest.param(lambda: Returns("by_name"), weighted, id="by name"),
    pytest.param(lambda: Returns("loss"), with_forces, id="scalar output"),
    pytest.param(lambda: Returns("loss"), lambda m, x: m(x) + m.net[0].weight.norm(), id="a term"),
]


@pytest.mark.parametrize(("make", "loss_of"), OTHER_LOSSES)
@pytest.mark.parametrize("reported", [None, "before backward", "after the step"])
def test_another_loss_than_the_one_that_backward_is_called_on_is_not_recorded(
    make: Any, loss_of: Any, reported: str | None
):
    model, truth = make(), []
    opt, n = sgd(model), 4
    w = watch(model, opt).start()

    def train() -> None:
        for x in batches(n):
            loss = loss_of(model, x)
            truth.append(loss.item())
            if reported == "before backward":
                w.loss(loss)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if reported == "after the step":
                w.loss(loss.item())
        w.stop()

    if reported:
        train()
        np.testing.assert_allclose(w.losses, truth, rtol=1e-5)
    else:
        certain = not isinstance(model, Ranks)  # a scalar beside the output was but a guess
        match = r"called on another.*w\.loss\(loss\)"
        with (
            pytest.warns(NeverFiredWarning, match=match) if certain else nullcontext([0]) as warned
        ):
            train()
        assert len(warned) == 1
        assert np.isnan(w.losses).all()
        assert w.run_record().losses is None


@pytest.mark.parametrize(
    "trained",
    [
        lambda loss: loss / 3,
        lambda loss: torch.amp.GradScaler("cpu").scale(loss.double().mean()),
        lambda loss: torch.stack([loss, loss]).mean() + 1.0,
        lambda loss: (loss - 1).clamp(max=100.0),
    ],
)
def test_the_loss_that_a_model_returns_is_recorded_where_it_is_scaled_or_summed(trained: Any):
    model, truth = Returns("by_name"), []
    opt = sgd(model)

    with watch(model, opt) as w:
        for _ in range(3):
            losses = [model(x)["loss"] for x in batches(5)]
            truth.append(sum(loss.item() for loss in losses) / 5)
            trained(sum(losses)).backward()
            opt.step()

    np.testing.assert_allclose(w.losses, truth, rtol=1e-5)


@pytest.mark.parametrize("reported", [False, True])
def test_the_loss_function_can_be_watched_and_is_warned_of_if_called_twice(reported: bool):
    model, mse, losses, seen = net(), nn.MSELoss(), [], []
    opt = sgd(model)
    look = Callback(before_step=lambda self: seen.append(self.learn.loss.item()))

    with watch(model, opt, look, loss_func=mse) as w:
        for x in batches():
            loss = mse(model(x), torch.zeros(5, 2))
            losses.append(loss.item())
            loss.backward()
            opt.step()
            mse(torch.ones(3), torch.zeros(3))
    assert w.losses.tolist() == pytest.approx(losses)
    assert seen == pytest.approx(losses)
    assert len(mse._forward_hooks) == 0

    w = watch(model, opt, loss_func=mse).start()
    for x in batches(2):
        y = model(x)
        loss = mse(y, torch.zeros(5, 2)) + mse(y, torch.ones(5, 2))
        loss.backward()
        opt.step()
        if reported:
            w.loss(loss)
    twice = pytest.warns(NeverFiredWarning, match=r"MSELoss was called more than once.*w\.loss")
    with nullcontext() if reported else twice:
        w.stop()
    assert not reported or w.losses[-1] == pytest.approx(loss.item())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_called_in_parts_has_the_mean_of_its_batches_losses(frozen: bool):
    model = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
    model["body"].requires_grad_(not frozen)
    opt, mse, truth = sgd(model), nn.MSELoss(), []

    with watch(model, opt, acts := ActivationStats(), loss_func=mse) as w:
        for i, x in enumerate(batches(6)):
            y = model["head"](model["body"](x) + model["body"](-x))
            loss = mse(y, torch.ones_like(y))
            (loss / 3).backward()
            truth.append(loss.item())
            if i % 3 == 2:
                opt.step()
                opt.zero_grad()

    assert acts.record().value("count").tolist() == [[240.0] * 2, [15.0] * 2]
    np.testing.assert_allclose(w.losses, np.reshape(truth, (2, 3)).mean(1), rtol=1e-6)


# --- epochs and facts


def test_a_run_has_what_was_reported_of_its_epochs():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w:
        for epoch in range(2):
            for i, x in enumerate(batches(2)):
                model(x).sum().backward()
                w.loss(float(epoch + i))
                opt.step()
            w.epoch(valid_loss=torch.tensor(0.5), accuracy=np.float32(1), each=torch.ones(2))
        w.info["n_classes"] = 2
        run = w.run_record()

        with pytest.raises(ArgumentError, match=r"epoch\(epoch=…\): .* another name: my_epoch=…"):
            w.epoch(step=77, epoch=3)

    reported = {"valid_loss": 0.5, "accuracy": 1.0, "each": [1.0, 1.0]}
    assert run.valid == [
        {"epoch": 0, "step": 1, "train_loss": 0.5, **reported},
        {"epoch": 1, "step": 3, "train_loss": 1.5, **reported},
    ]
    assert type(run.valid[0]["accuracy"]) is float
    assert (run.info["n_classes"], run.info["optimizer"]) == (2, "SGD")
    assert run.losses.tolist() == [0.0, 1.0, 1.0, 2.0]


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((nn.Linear,), {}, r"expected a model .* found the class Linear"),
        (([],), {}, "found a list"),
        ((net(), 3), {}, "expected a torch optimizer, a list of them, or None"),
        ((net(), torch.optim.SGD), {}, "expected a torch optimizer, a list of them, or None"),
        ((net(), None, print), {}, r"expected a callback, found .*Give a Callback"),
        ((net(), None, Callback(), sgd(net())), {}, r"expected a callback, found a SGD"),
        ((net(),), {"loss_func": "ce"}, r"loss_func='ce'.* Give the loss function"),
        ((net(),), {"loss_func": nn.MSELoss}, r"found the class MSELoss\. Call the class"),
        ((net(),), {"show": "yes"}, r"show='yes'.* give True or False"),
    ],
)
def test_what_cannot_work_is_refused(arguments: Any, options: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        watch(*arguments, **options)


def test_fastais_optimizers_and_learner_are_named_with_what_works():
    class Adam:
        param_lists = hypers = ()

    learner = type("Learner", (), {"__module__": "fastai.learner"})()

    with pytest.raises(ArgumentError, match=r"fastai's own.*OptimWrapper"):
        watch(net(), Adam())
    with pytest.raises(HookError, match=r"(?s)ActivationStats is a callback of hookkit, "):
        ActivationStats().learn = learner


@pytest.mark.parametrize("loss", ["x", [[1.0], [2.0, 3.0]], 1j, torch.ones(2)])
def test_a_loss_that_is_not_one_number_is_refused(loss: object):
    model = net()

    with watch(model, sgd(model)) as w, pytest.raises(ArgumentError, match="loss as one number"):
        w.loss(loss)


def test_a_watcher_is_no_value_and_a_running_one_cannot_be_started():
    w = watch(net(), None, ActivationStats())

    for made in copy.copy, copy.deepcopy, pickle.dumps:
        with pytest.raises(HookError, match=r"cannot be copied or pickled\. w\.run_record\(\)"):
            made(w)
    with w, pytest.raises(HookError, match="while it is running"):
        w.start()


# --- names


def test_callbacks_are_completed_by_name() -> None:
    model = net()
    acts = ActivationStats(modules="0")

    with watch(model, opt := sgd(model), acts, ParamStats) as w:
        train(model, opt, 2)
        assert w.run_record().losses is None
        w.loss(2.0)
        train(model, opt, 1)
        assert np.isnan(w.losses).tolist() == [True, False, True]
        assert repr(w).startswith("Watcher(Sequential: 3 steps in 1 epoch; activation_stats, param")
        assert repr(w).endswith("running)")

    assert {"activation_stats", "param_stats", "loss"} <= set(dir(w))
    assert w.activation_stats is acts
    with pytest.raises(AttributeError, match=r"'activation_stat'.*Nearest: \"activation_stats\""):
        _ = w.activation_stat


# --- what is warned of


@pytest.mark.parametrize("event", ["after_loss", "before_backward", "after_backward"])
def test_what_a_watched_loop_does_not_see_is_named_with_what_to_use(event: str):
    mine = type("Mine", (Callback,), {event: lambda self: None})

    with pytest.warns(HookkitWarning, match=rf"Mine\.{event} is never called in watch.* use "):
        watch(net(), None, mine)
    no_batch = pytest.raises(AttributeError, match=r"a watched loop has no 'xb'.*HookCallback")
    with no_batch, watch(net(), None, Callback(before_fit=lambda self: self.xb)):
        pass


@pytest.mark.parametrize("read", ["run_record", "diagnose", "losses"])
def test_a_watch_that_was_never_entered_says_so_at_the_first_read(read: str):
    model = net()
    opt = sgd(model)
    w = watch(model, opt, ParamStats())
    train(model, opt)

    with pytest.warns(NeverFiredWarning, match=r"never entered.*`with watch\(…\) as w:`"):
        value = getattr(w, read) if read == "losses" else getattr(w, read)()

    assert len(value) == 0 if read == "losses" else value is not None


def test_a_model_that_never_ran_or_another_optimizer_is_warned_of():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w:
        with pytest.warns(NeverFiredWarning, match="no training forward of Sequential"):
            opt.step()
        opt.step()

    assert w.n_steps == 2
    with pytest.warns(HookkitWarning, match="SGD holds none of the parameters of Sequential"):
        watch(net(), opt)


def test_batches_without_a_step_are_warned_of_at_the_end():
    for given in True, False:
        model = net()
        w = watch(model, sgd(model) if given else None).start()
        train(model, sgd(net()), 2)

        with pytest.warns(NeverFiredWarning, match=r"2 training batches.*no optimizer step.*Give"):
            w.stop()


def in_parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for part in model:
        x = part(x)
    return x


@pytest.mark.parametrize("forward", [nn.Module.__call__, in_parts])
def test_a_train_that_is_forgotten_after_a_validation_is_warned_of_and_known(forward: Any):
    model = net()
    opt = sgd(model)

    def epochs(n: int) -> None:
        for _ in range(n):
            for x in batches():
                opt.zero_grad()
                forward(model, x).square().mean().backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                forward(model, batches()[0])

    with watch(model, opt, ParamStats()) as w:
        epochs(1)
        with pytest.warns(NeverFiredWarning, match=r"eval mode .*Call model\.train\(\)"):
            epochs(1)
        epochs(1)

    assert w.run_record().info["eval_steps"] == [6, 9]


def test_a_model_in_eval_mode_is_recorded_in_batches_that_are_marked():
    """Defect: the cure that the warning names recorded NaN."""
    model = net().eval()
    opt, acts, log = sgd(model), ActivationStats(), Log()

    with watch(model, opt, acts, log) as w:
        for x in batches(5):
            w.batch()
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

    assert acts.record().value("count").tolist() == [[40.0] * 5, [10.0] * 5]
    assert np.isfinite(acts.record().value("mean")).all()
    assert log.events.count("before_validate") == 0


# --- a recorder has one run


def test_a_recorder_belongs_to_one_run():
    acts, hooked = ActivationStats(), HookCallback()
    model = net()
    opt = sgd(model)
    with watch(model, opt, acts, hooked):
        train(model, opt, 3)
        half = pickle.loads(pickle.dumps(acts))

    with watch(model, opt, hooked):
        train(model, opt, 1)
    for used in acts, half:
        with pytest.raises(HookError, match=r"ActivationStats.* has recorded another run"):
            watch(model, opt, used).start()

    assert len(acts.record()) == 3


def test_a_training_in_another_thread_is_warned_of_and_one_of_a_copy_is_not():
    model = net(1)

    def run(trained: nn.Module) -> None:
        thread = threading.Thread(target=train, args=(trained, sgd(trained)))
        thread.start()
        thread.join()

    elsewhere = pytest.warns(HookkitWarning, match="was trained in another thread")
    with elsewhere, watch(model, None, ActivationStats()):
        run(model)
    with watch(model, None, ActivationStats()):
        run(copy.deepcopy(model))
