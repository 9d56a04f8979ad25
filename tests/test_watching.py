"""`watch` around plain loops: the events, what callbacks see, and that nothing is left behind."""

import copy
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookkit.callbacks import Callback
from hookkit.callbacks.readout import run_of
from hookkit.errors import ArgumentError, HookError, HookkitWarning, NeverFiredWarning
from hookkit.events import EVENTS, CancelBatchException, CancelFitException, CancelStepException
from hookkit.recording import HookCallback
from hookkit.stats import ActivationStats, ParamStats
from hookkit.watching import Watcher, watch
from hookkit.watching.checks import NEVER_SENT

BATCH = ["before_batch", "after_pred", "before_step", "after_step", "after_batch"]
OPEN = ["before_fit", "before_epoch", "before_train"]
CLOSE = ["after_train", "after_epoch", "after_fit"]


class Log(Callback):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.cleaned = 0

    def cleanup_fit(self) -> None:
        self.cleaned += 1


def _noting(event: str):
    def note(self: Log) -> None:
        self.events.append(event)

    return note


for _event in EVENTS:
    if _event not in NEVER_SENT:
        setattr(Log, _event, _noting(_event))


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


# --- events


def test_the_events_of_a_plain_loop():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log):
        train(model, opt, 2)

    assert log.events == OPEN + BATCH * 2 + CLOSE


def test_a_callback_class_is_made_into_one():
    model = net()

    w = watch(model, sgd(model), Log)

    assert w.log.events == []


def test_validation_in_between_is_no_training():
    model, log, seen = net(), Log(), Seen()
    log.run_valid = False
    opt = sgd(model)

    with watch(model, opt, log, seen):
        for _ in range(2):
            train(model, opt, 1)
            model.eval()
            with torch.no_grad():
                model(batches()[0])
            model.train()

    validation = ["before_validate", "after_validate"]
    assert log.events == OPEN + BATCH + validation + BATCH + validation + CLOSE
    assert [row[1] for row in seen.rows] == [1, 2]


def test_a_validation_forward_is_a_batch_that_does_not_train():
    model, seen = net(), []
    opt = sgd(model)
    cb = Callback(
        before_batch=lambda self: seen.append(self.training),
        after_pred=lambda self: seen.append(self.pred.shape),
        after_batch=lambda self: seen.append(self.train_iter),
    )

    with watch(model, opt, cb):
        model.eval()
        model(batches()[0])

    assert seen == [False, (5, 2), 0]


def test_a_validation_forward_that_fails_is_cancelled():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log):
        model.eval()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        model.train()
        train(model, opt, 1)

    validation = ["before_validate", "before_batch", "after_cancel_batch", "after_validate"]
    assert log.events == ["before_fit", *validation, *OPEN[1:], *BATCH, *CLOSE]


def test_marked_batches_are_batches_of_their_own():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log) as w:
        for x in batches(2):
            w.batch()
            model(x).sum().backward()
        opt.step()

    half = ["before_batch", "after_pred", "after_batch"]
    assert log.events == OPEN + half + BATCH + CLOSE


def test_a_rollout_without_gradients_is_no_batch():
    model, log = net(), Log()
    log.run_valid = False
    opt = sgd(model)

    with watch(model, opt, log):
        with torch.no_grad():
            model(batches()[0])
        train(model, opt, 1)

    validation = ["before_validate", "before_epoch", "before_train", "after_validate"]
    assert [e for e in log.events if e not in validation] == ["before_fit", *BATCH, *CLOSE]


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


def test_nothing_is_recorded_between_batches():
    model = net()
    opt, hooked = sgd(model), HookCallback("2", hook=lambda m, i, o: None)

    with watch(model, opt, hooked):
        train(model, opt, 1)

        assert not hooked.recording


def test_accumulated_batches_end_without_a_step():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log) as w:
        train(model, opt, 4, each=2)

    half = ["before_batch", "after_pred", "after_batch"]
    assert log.events == OPEN + (half + BATCH) * 2 + CLOSE
    assert (w.n_steps, w.loop.train_iter) == (2, 4)


def test_gradients_of_the_step_are_there_in_after_step():
    model, seen = net(), Seen()
    opt = sgd(model)

    with watch(model, opt, seen):
        train(model, opt)

    assert seen.rows == [(0, 1, True, True), (0, 2, True, True), (0, 3, True, True)]
    assert all(g > 0 for g in seen.grads)


def test_weights_are_unchanged_in_before_step_and_changed_in_after_step():
    model, seen = net(), []
    opt = sgd(model)
    weight = model[0].weight
    cb = Callback(
        before_step=lambda self: seen.append(weight.detach().clone()),
        after_step=lambda self: seen.append(weight.detach().clone()),
    )
    before = weight.detach().clone()

    with watch(model, opt, cb):
        train(model, opt, 1)

    assert torch.equal(seen[0], before)
    assert torch.equal(seen[1], weight.detach())
    assert not torch.equal(*seen)


def test_a_step_skipped_by_the_gradient_scaler_is_not_counted():
    model, log = net(), Log()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    with watch(model, opt, log) as w:
        for i, x in enumerate(batches()):
            loss = model(x).pow(2).mean() * (float("inf") if i == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    assert w.n_steps == 2
    assert (
        log.events == OPEN + BATCH + ["before_batch", "after_pred", "after_batch"] + BATCH + CLOSE
    )


def test_a_closure_s_forward_comes_before_its_before_step():
    model, log = net(), Log()
    opt = sgd(model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(batches(1)[0]).pow(2).mean()
        loss.backward()
        return loss

    with watch(model, opt, log):
        opt.step(closure)

    assert log.events == OPEN + BATCH + CLOSE


def test_a_closure_is_evaluated_as_it_was_given():
    model, log, seen = net(), Log(), []
    opt = sgd(model)
    x = batches(1)[0]

    def closure(*args: object) -> torch.Tensor:
        seen.append(args)
        return loss

    with watch(model, opt, log) as w:
        loss = model(x).pow(2).mean()
        loss.backward()
        results = [opt.step(closure), opt.step(closure=closure)]

    assert seen == [(), ()]
    assert all(result is loss for result in results)
    assert log.events[: len(OPEN + BATCH)] == OPEN + BATCH
    assert w.n_steps == 2


@pytest.mark.parametrize("given", [0.5, net()])
def test_what_is_no_closure_reaches_the_step_as_it_was_given(given: object):
    class Own(torch.optim.SGD):
        def step(self, first: object) -> None:
            seen.append(first)
            super().step()

    model, log, seen = net(), Log(), []
    opt = Own(model.parameters(), lr=0.1)

    with watch(model, opt, log):
        model(batches(1)[0]).sum().backward()
        opt.step(given)

    assert seen == [given]
    assert log.events == OPEN + BATCH + CLOSE


def test_a_step_can_be_cancelled_after_its_closure():
    model, x = net(), batches(1)[0]
    opt = torch.optim.LBFGS(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    def cancel(self: Callback) -> None:
        raise CancelStepException

    with watch(model, opt, Callback(before_step=cancel)) as w:
        opt.step(closure)

    assert (w.n_steps, w.loop.n_cancelled_steps) == (0, 1)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_closure_that_is_called_many_times_is_one_step():
    model, seen = net(), Seen()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(batches(1)[0]).pow(2).mean()
        loss.backward()
        return loss

    with watch(model, opt, seen) as w:
        for _ in range(2):
            opt.step(closure)

    assert w.n_steps == 2
    assert w.loop.train_iter > 2


def test_checkpointed_recomputation_is_no_batch():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, log = Checkpointed(), Log()
    opt = sgd(model)

    with watch(model.inner, opt, log):
        train(model, opt, 2)

    assert log.events == OPEN + BATCH * 2 + CLOSE


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


def test_entering_again_appends():
    model, seen = net(), Seen()
    opt = sgd(model)
    w = watch(model, opt, seen)

    for _ in range(2):
        with w:
            train(model, opt, 2)

    assert [row[:2] for row in seen.rows] == [(0, 1), (0, 2), (1, 3), (1, 4)]
    assert n_hooks(model, opt) == 0


# --- several optimizers, several models


def test_two_optimizers_of_one_model_make_one_step():
    model, log = net(), Log()
    opts = [sgd(model[0]), torch.optim.AdamW(model[2].parameters())]

    with watch(model, opts, log) as w:
        for x in batches(2):
            model(x).sum().backward()
            for opt in opts:
                opt.step()

    assert log.events == OPEN + BATCH * 2 + CLOSE
    assert w.n_steps == 2


def test_two_optimizers_found_by_themselves_make_one_step():
    model, log = net(), Log()
    opts = [sgd(model[0]), torch.optim.AdamW(model[2].parameters())]

    with watch(model, None, log) as w:
        for x in batches(3):
            model(x).sum().backward()
            for opt in opts:
                opt.step()

    assert log.events == OPEN + BATCH * 3 + CLOSE
    assert w.n_steps == 3


def test_the_steps_of_two_players_alternate():
    g, d, log, grads = net(4), net(1), Log(), []
    opt_g, opt_d = sgd(g), sgd(d)
    now = Callback(after_step=lambda self: grads.append(d[0].weight.grad is not None))

    with watch({"g": g, "d": d}, [opt_g, opt_d], log, now) as w:
        for z in batches(2):
            d(g(z).detach()).mean().backward()
            opt_d.step()
            opt_d.zero_grad()
            d(g(z)).mean().backward()
            opt_g.step()
            opt_g.zero_grad()
            opt_d.zero_grad()

    step = ["before_batch", "before_step", "after_step", "after_batch"]
    assert log.events == OPEN + step * 4 + CLOSE
    assert w.n_steps == 4
    assert grads == [True] * 4


class Fancy(torch.optim.SGD):
    """An optimizer whose step is its base's and more: PyTorch runs the hooks of both."""

    fails = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails:
            raise RuntimeError("no step")
        return super().step(closure)


def test_a_step_that_calls_its_base_s_is_one_step():
    model, log = net(), Log()
    opt = Fancy(model.parameters(), lr=0.1)

    with watch(model, opt, log):
        train(model, opt, 2)

    assert log.events == OPEN + BATCH * 2 + CLOSE


def test_after_a_step_that_raised_the_loop_may_go_on():
    model, log = net(), Log()
    opt = Fancy(model.parameters(), lr=0.1)

    with watch(model, opt, log) as w:
        opt.fails = True
        with pytest.raises(RuntimeError, match="no step"):
            train(model, opt, 1)
        opt.fails = False
        train(model, opt, 2)

    broken = ["before_batch", "after_pred", "before_step", "after_batch"]
    assert log.events == OPEN + broken + BATCH * 2 + CLOSE
    assert w.n_steps == 2


def test_a_step_within_another_optimizer_s_step_is_one_step():
    class Around(torch.optim.Optimizer):  # as SAM
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure=None):
            return self.base.step()

    model, log = net(), Log()
    opt = Around(sgd(model))

    with watch(model, None, log):
        train(model, opt, 2)

    assert log.events == OPEN + BATCH * 2 + CLOSE


def test_optimizers_that_step_within_the_backward_make_one_step():
    model, log = net(), Log()
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with watch(model, None, log) as w:
        for x in batches(3):
            model(x).sum().backward()

    assert log.events == OPEN + BATCH * 3 + CLOSE
    assert w.n_steps == 3


def test_two_watchers_see_the_same_loop():
    model, first, second = net(), Log(), Log()
    opt = sgd(model)

    with watch(model, opt, first), watch(model, None, second):
        train(model, opt, 2)

    assert first.events == second.events == OPEN + BATCH * 2 + CLOSE
    assert n_hooks(model, opt) == 0


def test_a_callback_in_two_running_watchers_is_refused():
    model, log = net(), Log()
    opt = sgd(model)
    other = watch(model, opt, log)

    with watch(model, opt, log):
        with pytest.raises(HookError, match="its own: Log"):
            other.start()
        with pytest.raises(HookError, match="its own: Log"):
            watch(model, opt, log)
        train(model, opt, 1)

    assert log.events == OPEN + BATCH + CLOSE
    assert log.cleaned == 1


def test_an_optimizer_made_later_is_found():
    model, seen = net(), Seen()

    with watch(model, seen) as w:
        train(model, sgd(model))

    assert len(seen.rows) == 3
    assert isinstance(w.opt, torch.optim.SGD)
    assert n_hooks(model) == 0


def test_the_optimizer_of_another_model_is_ignored():
    model, other, seen = net(), net(), Seen()
    others = sgd(other)

    with watch(model, None, seen):
        train(other, others)
        train(model, sgd(model), 1)

    assert len(seen.rows) == 1


def test_each_forward_can_be_a_step():
    model, log = net(), Log()

    with watch(model, None, log, each_forward=True) as w:
        for x in batches(2):
            model(x).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad

    order = ["before_batch", "before_step", "after_pred", "after_step", "after_batch"]
    assert log.events == OPEN + order * 2 + CLOSE
    assert w.n_steps == 2


def test_a_model_used_through_its_parts_is_seen():
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net(8), nn.Linear(8, 2)

        def act(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    model, log = Agent(), Log()
    opt = sgd(model)

    with watch(model, opt, log):
        for x in batches(2):
            model.act(x).sum().backward()
            opt.step()

    step = ["before_batch", "before_step", "after_step", "after_batch"]
    assert log.events == OPEN + step * 2 + CLOSE


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_of_a_model_in_parts_has_the_mean_of_its_batches_losses(
    frozen: bool, named: bool, set_to_none: bool
):
    model = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
    model["body"].requires_grad_(not frozen)
    opt, mse, truth = sgd(model), nn.MSELoss(), []

    with watch(model, opt, loss_func=mse if named else None) as w:
        for i, x in enumerate(batches(6)):
            y = model["head"](model["body"](x) + model["body"](-x))
            loss = mse(y, torch.ones_like(y))
            (loss / 3).backward()
            if not named:
                w.loss(loss)
            truth.append(loss.item())
            if i % 3 == 2:
                opt.step()
                opt.zero_grad(set_to_none)

    assert (w.loop.train_iter, w.n_steps) == (6, 2)
    np.testing.assert_allclose(w.losses, np.reshape(truth, (2, 3)).mean(1), rtol=1e-6)


class Wrapped:
    """As accelerate's: an optimizer in name, whose own step hooks do not work."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_a_wrapped_optimizer_is_unwrapped():
    model = net()
    opt = sgd(model)

    assert watch(model, Wrapped(Wrapped(opt))).opt is opt


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


class Boom(Exception):
    pass


def raising(event: str, error: type[BaseException]) -> Callback:
    def fail(self: Callback) -> None:
        raise error("boom")

    return Callback(**{event: fail})


HEARD = [*OPEN, *BATCH, *CLOSE]


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("event", HEARD)
def test_nothing_is_left_after_an_exception_in_any_event(event: str, error: type[BaseException]):
    model, log = net(), Log()
    opt = sgd(model)
    before = n_hooks(model, opt)

    with pytest.raises(error), watch(model, opt, raising(event, error), log, HookCallback):
        train(model, opt, 2)

    assert n_hooks(model, opt) == before
    assert log.cleaned == 1


def test_an_exception_in_a_callback_says_where():
    model = net()
    opt = sgd(model)

    with pytest.raises(Boom) as caught, watch(model, opt, raising("after_step", Boom)):
        train(model, opt)

    assert "event after_step, epoch 0, batch 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_of_the_loop_passes_and_ends_it(error: type[BaseException]):
    model, log = net(), Log()
    opt = sgd(model)

    w = watch(model, opt, log)
    with pytest.raises(error), w:  # noqa: PT012
        train(model, opt, 1)
        model(batches()[0])
        raise error

    assert n_hooks(model, opt) == 0
    assert log.events == OPEN + BATCH + ["before_batch", "after_pred"]
    assert (log.cleaned, w.n_steps) == (1, 1)


def test_a_failed_forward_is_cancelled_and_the_loop_may_go_on():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 3))
        train(model, opt, 1)

    assert log.events == [*OPEN, "before_batch", "after_cancel_batch", *BATCH, *CLOSE]


def test_cancel_fit_ends_the_block_quietly():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log, raising("after_step", CancelFitException)) as w:
        train(model, opt)
        raise AssertionError("not reached")

    assert w.n_steps == 1
    ends = ["after_cancel_fit", "after_batch", "after_train", "after_epoch", "after_fit"]
    assert log.events[-5:] == ends
    assert n_hooks(model, opt) == 0


def test_cancel_batch_keeps_the_batch_from_the_callbacks_only():
    model, log = net(), Log()
    opt = sgd(model)
    cancel = Callback(before_batch=lambda self: cancel_first(self.train_iter))
    before = model[0].weight.detach().clone()

    def cancel_first(i: int) -> None:
        if not opt.state and i == 0 and not done:
            done.append(1)
            raise CancelBatchException

    done: list[int] = []
    with watch(model, opt, log, cancel) as w:
        train(model, opt, 2)

    assert log.events == [*OPEN, "before_batch", "after_cancel_batch", *BATCH, *CLOSE]
    assert w.n_steps == 2
    assert not torch.equal(before, model[0].weight)


def test_cancel_step_leaves_the_weights_alone():
    model, log = net(), Log()
    opt = sgd(model, momentum=0.9, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())

    with watch(model, opt, log, raising("before_step", CancelStepException)) as w:
        train(model, opt, 1)

    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert w.n_steps == 0
    assert "after_cancel_step" in log.events
    assert "after_step" not in log.events


class OwnSGD:
    """An optimizer that is not torch's, as those of fastai: it runs no step hooks."""

    def __init__(self, params: Any) -> None:
        self.params, self.lr = list(params), 0.1

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self.params, "lr": self.lr}]

    def step(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.data.sub_(self.lr * p.grad)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


def train_own(w: Watcher, model: nn.Module, n: int = 3) -> None:
    opt = OwnSGD(model.parameters())
    for x in batches(n):
        model(x).pow(2).mean().backward()
        w.loop.step_began(opt)
        opt.step()
        w.loop.step_ended(opt)
        opt.zero_grad()


def test_the_steps_of_an_optimizer_without_step_hooks_are_reported():
    model, twin = net(), net()
    with watch(model, None, Seen(), ParamStats()) as w:
        train_own(w, model)
    with watch(twin, sgd(twin), Seen(), ParamStats()) as v:
        train(twin, v.opt)

    assert w.seen.rows == v.seen.rows
    assert w.seen.grads == pytest.approx(v.seen.grads)
    for name, values in v.param_stats.record().values.items():
        np.testing.assert_allclose(w.param_stats.record().values[name], values, rtol=1e-5)


def test_the_rates_of_groups_that_are_made_anew_each_time_are_of_each_step():
    model, params = net(), ParamStats()
    opt = OwnSGD(model.parameters())
    with watch(model, None, params) as w:
        for x in batches(3):
            model(x).pow(2).mean().backward()
            w.loop.step_began(opt)
            opt.step()
            w.loop.step_ended(opt)
            opt.zero_grad()
            opt.lr /= 2

    np.testing.assert_allclose(params.record().value("lr")[0], [0.1, 0.05, 0.025])


def test_a_step_cancelled_of_an_optimizer_without_step_hooks_leaves_the_weights_alone():
    model = net()
    before = copy.deepcopy(model.state_dict())

    with watch(model, None, raising("before_step", CancelStepException)) as w:
        train_own(w, model)

    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert (w.n_steps, w.loop.n_cancelled_steps) == (0, 3)


def test_start_and_stop_without_a_with():
    model, log = net(), Log()
    opt = sgd(model)

    w = watch(model, opt, log).start()
    train(model, opt, 1)
    w.stop()
    w.stop()

    assert log.events == OPEN + BATCH + CLOSE
    assert n_hooks(model, opt) == 0


def test_copies_and_pickles_made_meanwhile_are_inert():
    model, log = net(), Log()
    opt = sgd(model)

    with watch(model, opt, log):
        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        n = len(log.events)
        twin(batches()[0])
        thawed(batches()[0])

        assert len(log.events) == n


def test_training_under_watch_is_bit_identical():
    states = []
    for watched in False, True:
        model = net()
        opt = torch.optim.AdamW(model.parameters())
        torch.manual_seed(3)
        if watched:
            with watch(model, opt, Log, Seen, HookCallback):
                train(model, opt, 5)
        else:
            train(model, opt, 5)
        states.append((model.state_dict(), torch.get_rng_state()))

    assert torch.equal(states[0][1], states[1][1])
    assert all(torch.equal(v, states[1][0][k]) for k, v in states[0][0].items())


def test_the_output_is_not_kept_alive():
    model, freed = net(), []
    opt = sgd(model)

    with watch(model, opt, Log):
        out = model(batches()[0])
        out.register_hook(lambda g: None)
        import weakref

        ref = weakref.ref(out)
        out.sum().backward()
        del out
        freed.append(ref() is None)
        opt.step()

    assert freed == [True]


# --- the loss


def test_the_loss_is_what_was_reported():
    model = net()
    opt = sgd(model)
    seen = []

    with watch(model, opt) as w:
        for i, x in enumerate(batches(4)):
            loss = model(x).pow(2).mean()
            seen.append(loss.item())
            if i < 2:
                w.loss(loss)
            loss.backward()
            opt.step()
            if i == 2:
                w.loss(loss.item())

    assert w.losses.tolist()[:3] == pytest.approx(seen[:3])
    assert w.losses.shape == (4,)
    assert w.losses[3] != w.losses[3]


def test_the_loss_of_accumulated_batches_is_their_mean():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w:
        for i, x in enumerate(batches(4)):
            (model(x).pow(2).mean() / 2).backward()
            w.loss(float(i))
            if i % 2:
                opt.step()

    assert w.losses.tolist() == [0.5, 2.5]


def test_a_loss_that_the_model_returns_is_found():
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.net(x)
            return {"loss": y.pow(2).mean(), "logits": y}

    model, losses = WithLoss(), []
    opt = sgd(model)

    with watch(model, opt) as w:
        for x in batches():
            out = model(x)
            losses.append(out["loss"].item())
            out["loss"].backward()
            opt.step()
        model.eval()
        model(batches()[0])

    assert w.losses.tolist() == pytest.approx(losses)


@pytest.mark.parametrize("reported", [False, True])
def test_a_scalar_beside_other_outputs_is_the_loss_only_if_none_is_reported(reported: bool):
    """An actor-critic's value is no loss; a language model's `(logits, loss)` is."""

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            logits = self.layer(x)
            return logits, logits.mean()

    model = Critic()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    values = []

    with watch(model, opt) as w:
        for step in range(3):
            for _ in range(5):
                logits, value = model(torch.randn(2, 4))
                values.append(value.item())
            if reported:
                w.loss(100.0 + step)
            logits.sum().backward()
            opt.step()

    want = [100, 101, 102] if reported else np.array(values).reshape(3, 5).mean(1)
    np.testing.assert_allclose(w.losses, want, rtol=1e-5)


def test_the_loss_function_can_be_watched():
    model, losses, seen = net(), [], []
    opt, mse = sgd(model), nn.MSELoss()
    cb = Callback(before_step=lambda self: seen.append(self.learn.loss.item()))

    with watch(model, opt, cb, loss_func=mse) as w:
        for x in batches():
            loss = mse(model(x), torch.zeros(5, 2))
            losses.append(loss.item())
            loss.backward()
            opt.step()
            mse(torch.ones(3), torch.zeros(3))

    assert w.losses.tolist() == pytest.approx(losses)
    assert seen == pytest.approx(losses)
    assert len(mse._forward_hooks) == 0


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

    reported = {"valid_loss": 0.5, "accuracy": 1.0, "each": [1.0, 1.0]}
    assert run.valid == [
        {"epoch": 0, "step": 1, "train_loss": 0.5, **reported},
        {"epoch": 1, "step": 3, "train_loss": 1.5, **reported},
    ]
    assert type(run.valid[0]["accuracy"]) is float
    assert run.info["n_classes"] == 2
    assert run.info["optimizer"] == "SGD"
    assert run.losses.tolist() == [0.0, 1.0, 1.0, 2.0]


def test_facts_of_a_run_are_known_to_its_loop_and_copied_with_it():
    w = watch(net(), None)
    w.info = {"n_classes": 2}
    other = copy.copy(w)
    other.info["n_classes"] = 3

    assert run_of(w.loop, quiet=True).info["n_classes"] == 2
    assert [each.run_record().info["n_classes"] for each in (w, other)] == [2, 3]
    assert pickle.loads(pickle.dumps(w)).info == {"n_classes": 2}


def test_what_watch_counts_of_an_epoch_cannot_be_reported():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w:
        model(next(iter(batches(1)))).sum().backward()
        w.loss(2.0)
        opt.step()
        with pytest.raises(ArgumentError, match=r"epoch\(epoch=…, step=…\): .* name: my_epoch=…\."):
            w.epoch(step=77, epoch=3)
        with pytest.raises(ArgumentError, match=r"epoch\(step=…\): watch counts epoch and step"):
            w.note(step=torch.tensor(7))
        w.epoch(my_step=77)

    assert w.run_record().valid == [{"epoch": 0, "step": 0, "train_loss": 2.0, "my_step": 77}]


def test_a_run_without_losses_says_so():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w:
        train(model, opt)

    assert w.run_record().losses is None
    assert w.run_record().valid == [{"epoch": 0, "step": w.n_steps - 1}]


# --- arguments


def test_what_is_no_model_is_refused():
    with pytest.raises(ArgumentError, match=r"expected a model .* found the class Linear"):
        watch(nn.Linear)
    with pytest.raises(ArgumentError, match="found a list"):
        watch([])


@pytest.mark.parametrize("opt", [3, "adam", torch.optim.SGD])
def test_what_is_no_optimizer_is_refused(opt: object):
    with pytest.raises(ArgumentError, match="expected a torch optimizer, a list of them, or None"):
        watch(net(), opt)


def test_an_optimizer_without_step_hooks_is_refused_by_name():
    class Optimizer:  # as fastai's
        param_lists = hypers = ()

    with pytest.raises(ArgumentError, match=r"fastai's own.*OptimWrapper"):
        watch(net(), Optimizer())


def test_what_is_no_callback_is_refused():
    model = net()

    with pytest.raises(ArgumentError, match="Callback"):
        watch(model, sgd(model), print)


def test_an_optimizer_of_another_model_is_warned_of():
    with pytest.warns(HookkitWarning, match="SGD holds none of the parameters of Sequential"):
        watch(net(), sgd(net()))


def test_starting_twice_is_refused():
    model = net()

    with watch(model, sgd(model)) as w, pytest.raises(HookError, match="while it is running"):
        w.start()


def test_a_loss_that_is_no_number_is_refused():
    model = net()

    with watch(model, sgd(model)) as w, pytest.raises(ArgumentError, match=r"shape \(2,\)"):
        w.loss(torch.ones(2))


def test_a_scripted_model_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(net())

    with pytest.raises(HookError, match="scripted"):
        watch(model).start()


def test_an_unknown_name_shows_the_nearest():
    model = net()

    with pytest.raises(AttributeError, match="Nearest: log"):
        watch(model, sgd(model), Log).logg  # noqa: B018


def test_a_model_that_never_ran_is_warned_of_at_the_first_step():
    model = net()
    opt = sgd(model)

    with watch(model, opt) as w, pytest.warns(NeverFiredWarning, match="no training forward"):
        opt.step()

    assert isinstance(w, Watcher)
    assert w.n_steps == 1


def test_a_model_in_eval_mode_is_told_to_call_train():
    model = net().eval()
    opt = sgd(model)

    with watch(model, opt):
        model(batches()[0]).sum().backward()
        with pytest.warns(NeverFiredWarning, match=r"eval mode .* Call model\.train\(\)"):
            opt.step()


def called(model, x):
    return model(x)


def called_in_parts(model, x):
    for part in model:
        x = part(x)
    return x


@pytest.mark.filterwarnings("ignore:watch saw the optimizer step, but .* was in eval mode")
@pytest.mark.parametrize("forward", [called, called_in_parts])
@pytest.mark.parametrize("watched", [lambda model: model, list])
@pytest.mark.parametrize(("forgotten", "n"), [(True, 6), (False, 0)])
def test_train_that_is_forgotten_after_a_validation_is_diagnosed(forgotten, n, watched, forward):
    model = net()
    opt = sgd(model)
    with watch(watched(model), opt, ParamStats()) as w:
        for _ in range(3):
            model.train(not forgotten or w.n_steps == 0)
            for x in batches()[:3]:
                opt.zero_grad()
                forward(model, x).square().mean().backward()
                opt.step()
            model.eval()
            with torch.no_grad():
                forward(model, batches()[0])

    run = pickle.loads(pickle.dumps(w)).run_record()

    assert run.info.get("eval_steps", [0])[0] == n
    assert ("eval_mode" in run.diagnose().rules) == forgotten


def test_a_frozen_part_in_eval_mode_is_no_forgotten_train():
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1), "judge": nn.Linear(4, 4)})
    model["judge"].eval().requires_grad_(False)
    g, d = sgd(model["g"]), sgd(model["d"])

    with watch(model, [g, d], ParamStats()) as w:
        for x in batches():
            fake = model["g"](x)
            looks = (model["judge"](fake) - model["judge"](x)).square().mean()
            model["d"](fake.detach()).mean().backward()
            d.step()
            model["judge"](x + 1.0)
            (model["d"](fake).mean() + looks).backward()
            g.step()
            g.zero_grad(), d.zero_grad()

    assert "eval_steps" not in w.run_record().info


def test_training_without_a_step_is_warned_of_at_the_end():
    model = net()

    w = watch(model).start()
    model(batches()[0]).sum().backward()

    with pytest.warns(NeverFiredWarning, match="no torch optimizer stepped a parameter"):
        w.stop()


def test_steps_of_another_optimizer_than_the_given_one_are_warned_of_at_the_end():
    model = net()
    w = watch(model, sgd(model)).start()
    train(model, sgd(model), 2)

    with pytest.warns(
        NeverFiredWarning, match=r"2 training batches.*never called, SGD is not what steps"
    ):
        w.stop()


def test_the_repr_says_how_far_it_is():
    model = net()
    opt = sgd(model)
    w = watch(model, opt, Log)
    seen = [repr(w)]

    with w:
        train(model, opt)
        seen.append(repr(w))

    assert seen[0] == "Watcher(Sequential: 0 steps in 0 epochs; log; not started)"
    assert seen[1] == "Watcher(Sequential: 3 steps in 1 epoch; log; running)"


@pytest.mark.parametrize("loss", ["x", None, {}, [[1.0], [2.0, 3.0]], 1j])
def test_a_loss_that_is_nothing_like_a_number_is_refused(loss: object):
    model = net()

    with (
        watch(model, sgd(model)) as w,
        pytest.raises(ArgumentError, match=r"loss as one number, found .*(Give|Reduce)"),
    ):
        w.loss(loss)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_func": "ce"}, r"loss_func='ce'.*found a str.* Give the loss function"),
        (
            {"loss_func": nn.MSELoss},
            r"found the class MSELoss\. Call the class: MSELoss",
        ),
        ({"each_forward": "yes"}, r"each_forward='yes'.* give True or False"),
        ({"each_forward": None}, "each_forward=None"),
    ],
)
def test_options_that_cannot_work_are_refused(given: dict[str, object], message: str):
    model = net()

    with pytest.raises(ArgumentError, match=message):
        watch(model, sgd(model), **given)


def test_an_optimizer_among_the_callbacks_is_refused():
    model, log = net(), Log()

    with pytest.raises(ArgumentError, match=r"SGD is among the callbacks\. .* comes second"):
        watch(model, log, sgd(model))
    assert log.learn is None


def stop_warning_once(w: Any, warning: str | None) -> None:
    """Stops `w`, which warns so, or not at all; and never again."""
    with nullcontext() if warning is None else pytest.warns(HookkitWarning, match=warning):
        w.stop()
    w.start().stop()


@pytest.mark.parametrize("reported", [False, True])
def test_a_loss_function_called_twice_in_a_batch_is_warned_of(reported: bool):
    model, mse = net(), nn.MSELoss()
    opt = sgd(model)
    w = watch(model, opt, loss_func=mse).start()
    for x in batches(2):
        y = model(x)
        loss = mse(y, torch.zeros(5, 2)) + mse(y, torch.ones(5, 2))
        loss.backward()
        opt.step()
        if reported:
            w.loss(loss)

    stop_warning_once(
        w, None if reported else r"MSELoss was called more than once.*w\.loss\(loss\)"
    )
    if reported:
        assert w.losses[-1] == pytest.approx(loss.item())


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize(
    ("loss_func", "why"),
    [
        (nn.functional.mse_loss, r"mse_loss is a plain function.*w\.loss\(loss\)"),
        (nn.MSELoss(), r"MSELoss was not called.*the very object"),
    ],
)
def test_a_loss_function_that_is_never_seen_is_warned_of(reported, loss_func, why):
    model = net()
    opt = sgd(model)
    w = watch(model, opt, loss_func=loss_func).start()
    for x in batches(2):
        loss = nn.functional.mse_loss(model(x), torch.zeros(5, 2))
        loss.backward()
        opt.step()
        if reported:
            w.loss(loss)

    stop_warning_once(w, None if reported else rf"recorded no loss: {why}")
    assert np.isfinite(w.losses).tolist() == [reported] * 2


def test_steps_that_cease_are_warned_of_at_the_end():
    model = net()
    head, whole = sgd(model[2]), sgd(model)
    w = watch(model, head).start()
    train(model, head, 3)
    train(model, whole, 12)

    with pytest.warns(
        NeverFiredWarning, match=r"last 12 training batches.*SGD steps no more.*none"
    ):
        w.stop()


@pytest.mark.parametrize(("each", "n", "given"), [(1, 3, True), (4, 14, True), (4, 31, False)])
def test_batches_without_a_step_at_the_end_are_not_warned_of(each: int, n: int, given: bool):
    model = net()
    opt = sgd(model)

    with watch(model, opt if given else None) as w:
        train(model, opt, n, each=each)

    assert w.n_steps == n // each
    with w:
        train(model, opt, 7, each=8)


def test_callbacks_are_completed_and_each_has_a_name_of_its_own() -> None:
    model = net()
    first, second = ActivationStats(modules="0"), ActivationStats(modules="2")

    with watch(model, sgd(model), first, second, ParamStats) as w:
        pass

    assert {"activation_stats", "activation_stats_2", "param_stats", "loss"} <= set(dir(w))
    assert (w.activation_stats, w.activation_stats_2) == (first, second)
    assert "activation_stats, activation_stats_2, param_stats" in repr(w)
    with pytest.raises(AttributeError, match=r"'activation_stats_3'.*Nearest: activation_stats"):
        _ = w.activation_stats_3
