"""`watch` around plain loops: the events, what callbacks see, and that nothing is left behind."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from learners import EventLog
from torch import nn

from hookkit.callbacks import Callback
from hookkit.callbacks.events import (
    EVENTS,
    CancelBatchException,
    CancelFitException,
    CancelStepException,
)
from hookkit.callbacks.hook_callback import HookCallback
from hookkit.errors import HookError
from hookkit.recorders import ParamStats
from hookkit.training import watch
from hookkit.training.watch_checks import NEVER_SENT

BATCH = ["before_batch", "after_pred", "before_step", "after_step", "after_batch"]
OPEN = ["before_fit", "before_epoch", "before_train"]
CLOSE = ["after_train", "after_epoch", "after_fit"]


class Log(EventLog):
    """Writes down every event that a watched loop sends."""

    def __init__(self) -> None:
        super().__init__(*(event for event in EVENTS if event not in NEVER_SENT))
        self.events, self.cleaned = self.seen, 0

    def cleanup_fit(self) -> None:
        self.cleaned += 1


class Seen(Callback):
    """What the state was at each `after_step`."""

    def __init__(self) -> None:
        self.rows: list[tuple[object, ...]] = []
        self.grads: list[float] = []

    def after_step(self) -> None:
        learn = self.learn
        self.rows.append((learn.epoch, learn.n_steps, learn.stepped, learn.training))
        self.grads.append(sum(p.grad.abs().sum().item() for p in learn.model.parameters()))


def net(n_out: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, n_out))


def batches(n: int = 3) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=g) for _ in range(n)]


def train(model: nn.Module, opt: torch.optim.Optimizer, n: int = 3, each: int = 1) -> None:
    for i, x in enumerate(batches(n)):
        model(x).pow(2).mean().backward()
        if (i + 1) % each == 0:
            opt.step()
            opt.zero_grad()


def sgd(model: nn.Module, **options: object) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def logged() -> tuple[nn.Sequential, torch.optim.SGD, Log]:
    model = net()
    return model, sgd(model), Log()


# --- events


def test_the_events_of_a_plain_loop_and_the_gradients_in_after_step_also_if_entered_again():
    model, opt, log = logged()
    seen = Seen()
    w = watch(model, opt, log, seen)

    with w:
        train(model, opt, 2)
    assert log.events == OPEN + BATCH * 2 + CLOSE
    with w:
        train(model, opt, 1)

    assert seen.rows == [(0, 1, True, True), (0, 2, True, True), (1, 3, True, True)]
    assert all(g > 0 for g in seen.grads)
    assert n_hooks(model, opt) == 0


def test_validation_in_between_is_no_training():
    model, opt, log = logged()
    log.run_valid, seen, batch = False, Seen(), []
    look = Callback(
        before_batch=lambda self: batch.append(self.training),
        after_pred=lambda self: batch.append(self.pred.shape),
        after_batch=lambda self: batch.append(self.train_iter),
    )

    with watch(model, opt, log, seen, look):
        for _ in range(2):
            train(model, opt, 1)
            model.eval()
            with torch.no_grad():
                model(batches()[0])
            model.train()

    validation = ["before_validate", "after_validate"]
    assert log.events == OPEN + BATCH + validation + BATCH + validation + CLOSE
    assert [row[1] for row in seen.rows] == [1, 2]
    assert batch[:6] == [True, (5, 2), 1, False, (5, 2), 1]


def test_a_rollout_within_a_batch_is_not_recorded():
    model = net()
    opt = sgd(model)
    hooked, seen = HookCallback("2", hook=lambda m, i, o: None), []
    model[0].register_forward_hook(lambda m, i, o: seen.append(hooked.recording))

    with watch(model, opt, hooked):
        loss = model(batches()[0]).sum()
        with torch.no_grad():
            model(batches()[1])
        seen.append(hooked.recording)
        loss.backward()
        opt.step()
        model(batches()[1])
        seen.append(hooked.recording)

    assert seen == [True, False, True, True, True]


def test_epoch_marks_at_the_top_or_the_bottom_are_the_same():
    epochs = {}
    for place in "top", "bottom":
        model, seen = net(), Seen()
        opt = sgd(model)
        with watch(model, opt, seen) as w:
            for _ in range(3):
                if place == "top":
                    w.epoch()
                train(model, opt, 2)
                if place == "bottom":
                    w.epoch()
        epochs[place] = [row[0] for row in seen.rows], [r["epoch"] for r in w.run_record().valid]

    assert epochs["top"] == epochs["bottom"] == ([0, 0, 1, 1, 2, 2], [0, 1, 2])


# --- several optimizers, several models


def test_another_watcher_another_model_and_copies_made_meanwhile_are_left_alone():
    model, opt, log = logged()
    other, waiting = net(), watch(model, opt, log)

    with watch(model, log) as w:
        with pytest.raises(HookError, match="its own: Log"):
            waiting.start()
        with pytest.raises(HookError, match="its own: Log"):
            watch(model, opt, log)
        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        twin(batches()[0])
        thawed(batches()[0])
        train(other, sgd(other))
        train(model, opt, 1)

    assert (w.n_steps, w.opt, log.cleaned) == (1, opt, 1)
    assert log.events == OPEN + BATCH + CLOSE
    assert n_hooks(model, opt) == 0


class Fancy(torch.optim.SGD):
    """An optimizer whose step is its base's and more: PyTorch runs the hooks of both."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


def test_a_step_within_a_step_is_one_step():
    model, log = net(), Log()
    opt = Fancy(model.parameters(), lr=0.1)

    with watch(model, opt, log):
        train(model, opt, 2)

    assert log.events == OPEN + BATCH * 2 + CLOSE


@pytest.mark.parametrize("called", ["outer", "inner"])
@pytest.mark.parametrize("given", ["outer", "inner"])
def test_the_wrapper_or_the_model_may_be_called(given: str, called: str):
    inner, log = net(), Log()
    outer = nn.DataParallel(inner)
    opt = sgd(inner)

    with watch({"outer": outer, "inner": inner}[given], opt, log):
        train({"outer": outer, "inner": inner}[called], opt, 2)

    assert log.events == OPEN + BATCH * 2 + CLOSE


# --- how it ends


def raising(event: str, error: type[BaseException]) -> Callback:
    def fail(self: Callback) -> None:
        raise error

    return Callback(**{event: fail})


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("event", [*OPEN, *BATCH, *CLOSE])
def test_nothing_is_left_after_an_exception_in_any_event(event: str, error: type[BaseException]):
    model, opt, log = logged()
    with pytest.raises(error), watch(model, opt, raising(event, error), log, HookCallback):
        train(model, opt, 2)

    assert n_hooks(model, opt) == 0
    assert log.cleaned == 1


def test_a_failed_or_cancelled_batch_is_raised_to_the_loop_which_may_go_on():
    model, opt, log = logged()
    cancel = raising("before_batch", CancelBatchException)

    with watch(model, opt, log) as w:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        w.loop.add_cb(cancel)
        with pytest.raises(CancelBatchException):
            model(batches()[0])
        w.loop.remove_cb(cancel)
        train(model, opt, 1)

    assert log.events == [*OPEN, *["before_batch", "after_cancel_batch"] * 2, *BATCH, *CLOSE]


def test_cancel_step_leaves_the_weights_alone_and_cancel_fit_ends_the_block_quietly():
    model, log = net(), Log()
    opt = sgd(model, momentum=0.9, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    cancel = raising("before_step", CancelStepException)

    with watch(model, opt, log, cancel) as w:
        train(model, opt, 1)
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
        assert (w.n_steps, log.events[-2:]) == (0, ["after_cancel_step", "after_batch"])
        w.loop.remove_cb(cancel)
        w.loop.add_cb(raising("after_step", CancelFitException))
        train(model, opt)
        raise AssertionError("not reached")

    assert w.n_steps == 1
    ends = ["after_cancel_fit", "after_batch", "after_train", "after_epoch", "after_fit"]
    assert log.events[-5:] == ends
    assert n_hooks(model, opt) == 0


class OwnSGD:
    """An optimizer that is not torch's, as those of fastai: it runs no step hooks."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self.params, "lr": 0.1}]

    def step(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.data.sub_(0.1 * p.grad)


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_steps_of_an_optimizer_without_step_hooks_are_reported(cancelled: bool):
    model, twin = net(), net()
    opt, first = OwnSGD(model.parameters()), model[0].weight.detach().clone()
    with watch(twin, sgd(twin), ParamStats()) as v:
        train(twin, v.opt)
    with watch(model, None, ParamStats()) as w:
        if cancelled:
            w.loop.add_cb(raising("before_step", CancelStepException))
        for x in batches():
            model(x).pow(2).mean().backward()
            w.loop.begin_step(opt)
            opt.step()
            w.loop.end_step(opt)
            model.zero_grad()

    assert (w.n_steps, w.loop.n_cancelled_steps) == ((0, 3) if cancelled else (3, 0))
    assert torch.equal(model[0].weight, first) == cancelled
    for name, values in v.param_stats.record().values.items() if not cancelled else ():
        np.testing.assert_allclose(w.param_stats.record().values[name], values, rtol=1e-5)


@pytest.mark.parametrize("within", ["step", "closure", "cancelled step"])
def test_after_a_step_that_raised_the_loop_may_go_on(within: str):
    model, log = net(), Log()
    opt = Fancy(model.parameters(), lr=0.1)

    with watch(model, opt, log) as w:
        opt.fails = within != "closure"
        cancel = raising("before_step", CancelStepException)
        w.loop.add_cbs([cancel] * within.startswith("cancelled"))
        with pytest.raises(ZeroDivisionError):
            train(model, opt, 1) if opt.fails else opt.step(lambda: 1 / 0)
        w.loop.remove_cb(cancel)
        opt.fails = False
        train(model, opt, 2)

    assert log.events[-len(BATCH * 2 + CLOSE) :] == BATCH * 2 + CLOSE
    assert w.n_steps == 2


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_evaluated_as_it_was_given_before_the_step_can_be_cancelled(
    by_name, cancelled
):
    model, log, seen = net(), Log(), []
    opt = torch.optim.LBFGS(model.parameters(), max_iter=1)
    before = model[0].weight.detach().clone()
    cancel = [raising("before_step", CancelStepException)] * cancelled

    def closure(*args: object) -> torch.Tensor:
        opt.zero_grad()
        loss = model(batches(1)[0]).pow(2).mean()
        loss.backward()
        seen.append(args)
        return loss

    with watch(model, opt, log, *cancel) as w:
        loss = opt.step(closure=closure) if by_name else opt.step(closure)

    assert log.events[:6] == [*OPEN, "before_batch", "after_pred", "before_step"]
    assert (seen, loss.item() > 0) == ([()], True)
    assert (w.n_steps, w.loop.n_cancelled_steps) == (not cancelled, cancelled)
    assert torch.equal(model[0].weight, before) == cancelled
