"""Which optimizer steps `watch` counts, and what it records of them: steps that are skipped, of
several optimizers, of one made later, of a wrapper. Numbers are compared with a plain loop's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as global_hooks

from hookkit import ActivationStats, Callback, GradientStats, ParamStats, watch
from hookkit.errors import HookkitWarning


def net(n_out: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, n_out))


# --- steps that a GradScaler skips


def test_a_fused_step_that_a_grad_scaler_skips_is_no_step():
    model, x = net(), torch.randn(8, 4)
    opt = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorders = ActivationStats(), GradientStats(of="params"), ParamStats()

    with watch(model, opt, *recorders) as w:
        for i in range(6):
            loss = model(x).pow(2).mean() * (float("inf") if i == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    assert w.n_steps == 5
    for recorder in recorders:
        assert recorder.record().steps.tolist() == [0, 1, 2, 3, 4]
        assert (recorder.record().value("nonfinite") == 0).all()
    assert (w.param_stats.record().value("update_norm") > 0).all()


# --- several optimizers, and optimizers that come later


def updates(model: nn.Module, step: Any) -> dict[str, float]:
    """The norms by which a step changes the parameters."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step()
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return {name: change.double().norm().item() for name, change in moved.items()}


def agrees(record: Any, field: str, truth: list[dict[str, float]]) -> None:
    """What was recorded of each step is the truth.

    In the first step of optimizers that are found as they step, parameters without one are unknown.
    """
    for name in record.names:
        own, want = record.value(field, name), [step[name] for step in truth]
        first = int(np.isnan(own[0]) and want[0] == 0)
        np.testing.assert_allclose(own[first:], want[first:], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_is_made_later_is_seen(given: bool):
    model, x, moved, losses = net(), torch.randn(16, 4), [], []
    opt = torch.optim.SGD(model[2].parameters(), 0.1)

    with watch(model, opt if given else None, ActivationStats(), ParamStats()) as w:
        for phase in range(2):
            if phase:
                opt = torch.optim.Adam(model.parameters(), 0.01)
            for _ in range(30):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                model.zero_grad()
                loss.backward()
                moved.append(updates(model, opt.step))
                w.loss(loss)
                losses.append(loss.item())
            w.epoch(valid_loss=loss.item())

    assert (w.n_steps, w.opt) == (60, opt)
    agrees(w.param_stats.record(), "update_norm", moved)
    np.testing.assert_allclose(w.losses, losses, rtol=1e-6)
    assert [row["step"] for row in w.run_record().valid] == [29, 59]
    assert w.run_record().info["optimizer"] == "Adam"
    assert w.param_stats.record().meta["optimizer"] == ["Adam"] * 4
    assert [finding.rule for finding in w.diagnose().alarms] == []


def test_the_learning_rates_of_several_optimizers_are_those_that_their_steps_used():
    g, d, used = nn.Linear(2, 2), nn.Linear(2, 1), {"g": [], "d": []}
    opts = {"g": torch.optim.SGD(g.parameters(), 1.0), "d": torch.optim.SGD(d.parameters(), 1.0)}
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in opts.values()]

    with watch({"g": g, "d": d}, [*opts.values()], ParamStats()) as w:
        for _ in range(3):
            for _ in range(2):
                for name in "d", "g":
                    opts[name].zero_grad()
                    d(g(torch.randn(8, 2))).mean().backward()
                    used[name].append(opts[name].param_groups[0]["lr"])
                    opts[name].step()
            for schedule in schedules:
                schedule.step()

    rates = w.param_stats.record()
    assert rates.value("lr", "d.weight")[0::2].tolist() == used["d"]
    assert rates.value("lr", "g.weight")[1::2].tolist() == used["g"]
    assert w.run_record().info["lr"] == [used["g"][-1]]


@pytest.mark.parametrize("given", [True, False])
def test_gradients_of_parameters_that_no_optimizer_holds_are_not_recorded(given: bool):
    model, used = net(), []
    opt = torch.optim.SGD(model[2].parameters(), 0.01)  # which zeroes its own gradients alone
    params, grads = ParamStats(), GradientStats(of="params")

    with watch(model, opt if given else None, params, grads) as w:
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            squares = [p.grad.double().square().sum() for p in model[2].parameters()]
            used.append(sum(squares).sqrt().item())
            opt.step()
            opt.zero_grad()

    np.testing.assert_allclose(w.run_record().grad_norms, used, rtol=1e-5)
    assert np.isnan(params.record().value("grad_norm", "0.weight")).all()
    assert np.isnan(grads.record().value("rms", "0.weight")).all()
    assert params.record().meta["in_optimizer"] == [False, False, True, True]


class SAM(torch.optim.Optimizer):
    """As davda54/sam: a step evaluates the loss again at weights that it has changed."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        before, norm = (
            [p.clone() for p in params],
            torch.stack([p.grad.norm() for p in params]).norm(),
        )
        for p in params:
            p.add_(p.grad, alpha=0.5 / norm.item())
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, first in zip(params, before, strict=True):
            p.copy_(first)
        self.base_optimizer.step()
        self.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """As in torch_optimizer: each third step goes back halfway to the weights of three before."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.n = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.n += 1
        if self.n % 3 == 0:
            params = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(params, self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


MAKERS: dict[str, Any] = {
    "SAM": lambda params: SAM(params, lr=0.1),
    "Lookahead": lambda params: Lookahead(torch.optim.SGD(params, 0.1)),
    "LBFGS": lambda params: torch.optim.LBFGS(params, 0.1, max_iter=3),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_update_is_that_of_the_whole_step_of_any_optimizer(kind: str, given: bool):
    model, moved = net(), []
    opt = MAKERS[kind](model.parameters())

    with watch(model, opt if given else None, ActivationStats(), ParamStats()) as w:
        for _ in range(7):
            x = torch.randn(8, 4)

            def loss_of(x: torch.Tensor = x) -> torch.Tensor:
                opt.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if kind != "LBFGS":
                loss_of()
            moved.append(
                updates(model, opt.step if kind == "Lookahead" else lambda: opt.step(loss_of))
            )

    assert w.n_steps == 7
    agrees(w.param_stats.record(), "update_norm", moved)


def play(every: int | None, recorders: Any, n: int) -> tuple[list[tuple[int, float]], Any]:
    """Two players as in DCGAN's loop: G's output is used in D's step, detached, and in G's own."""
    torch.manual_seed(0)
    g, d, truth = nn.Linear(4, 2), nn.Linear(2, 1), []
    opt_g, opt_d = (torch.optim.SGD(m.parameters(), 0.01) for m in (g, d))
    with watch([g, d], [opt_g, opt_d], *recorders) as w:
        for i in range(n):
            fake = g(torch.randn(16, 4))
            fake.register_hook(
                lambda grad, i=i: truth.append((2 * i + 1, grad.square().mean().sqrt().item()))
            )
            opt_d.zero_grad()
            (d(torch.randn(16, 2)).mean() - d(fake.detach()).mean()).backward()
            opt_d.step()
            opt_g.zero_grad()
            d(fake).mean().backward()
            opt_g.step()
    return truth, w


@pytest.mark.parametrize("every", [None, 3])
def test_a_players_gradients_are_in_no_other_step_than_its_own(every: int | None):
    stats = GradientStats(every=every)

    truth, _ = play(every, [stats], 9)

    record, own = stats.record(), dict(truth)
    seen = dict(zip(record.steps.tolist(), record.value("rms", "0").tolist(), strict=True))
    known = {step: value for step, value in seen.items() if np.isfinite(value)}
    assert known.keys() <= own.keys()
    assert list(known) == ([*own] if every is None else [])  # the forward was in a step left out
    np.testing.assert_allclose([*known.values()], [own[step] for step in known], rtol=1e-5)


@pytest.mark.parametrize(
    "make", [ParamStats, lambda every: GradientStats(every=every, of="params")]
)
def test_every_that_passes_over_a_player_is_warned_of_with_one_that_does_not(make: Any):
    with pytest.warns(HookkitWarning, match=r"none of SGD, .*Use \w+\(every=7\)") as warned:
        play(4, [make(every=4)], 40)
    assert len(warned) == 1

    _, w = play(7, [recorder := make(every=7)], 40)

    seen = np.isfinite(recorder.record().value("grad_norm" if make is ParamStats else "rms"))
    assert w.n_steps == 80
    assert seen.any(axis=1).all()  # each parameter in some record


def test_another_watch_can_begin_and_end_within_a_step():
    model, others = net(), [net(), net()]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = watch(others[0], torch.optim.SGD(others[0].parameters(), lr=0.1), ParamStats()).start()

    def begin_and_end(cb: Any) -> None:  # as another thread may, while this one steps
        w.stop()
        watch(others[1], None, ParamStats()).start().stop()

    with watch(model, opt, Callback(before_step=begin_and_end)) as outer, watch(model, opt):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()

    assert outer.n_steps == 1
    assert not global_hooks._global_optimizer_pre_hooks
    assert not global_hooks._global_optimizer_post_hooks
