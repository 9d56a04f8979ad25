"""The recorders of a Learner under `watch`: the same records, in loops of every kind."""

import gc
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hooked import n_hooks
from test_watching import batches, net, sgd, train
from torch import nn

from hookkit.callbacks import Callback
from hookkit.callbacks.events import CancelStepException
from hookkit.diagnosis import diagnose
from hookkit.errors import HookError
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.records import Record
from hookkit.training import Learner, watch


def recorders() -> list[object]:
    return [ActivationStats(with_hist=True), GradientStats(), ParamStats()]


def data(n: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x.sum(1, keepdim=True)) for x in batches(n)]


def same(a: Record, b: Record) -> None:
    assert (a.names, a.types) == (b.names, b.types)
    for own, other in (a.steps, b.steps), (a.epochs, b.epochs), (a.iters, b.iters):
        np.testing.assert_array_equal(own, other)
    assert set(a.values) == set(b.values)
    for key, table in a.values.items():
        np.testing.assert_allclose(table, b.values[key], rtol=1e-6, atol=1e-12, err_msg=key)
    if a.hist is not None:
        np.testing.assert_array_equal(a.hist, b.hist)


def learned(epochs: int = 2):
    model = net(1)
    pair = (data(), data(2))
    learn = Learner(pair, model, nn.MSELoss(), torch.optim.SGD, lr=0.1, cbs=recorders())
    with learn.no_logging():
        learn.fit(epochs)
    return learn.run_record()


def watched(model: nn.Module, epochs: int = 2):
    opt, mse = sgd(model), nn.MSELoss()
    with watch(model, opt, *recorders(), loss_func=mse) as w:
        for _ in range(epochs):
            model.train()
            for x, y in data():
                mse(model(x), y).backward()
                opt.step()
                opt.zero_grad()
            model.eval()
            with torch.no_grad():
                for x, y in data(2):
                    mse(model(x), y)
            w.epoch()
    assert n_hooks(model, opt) == 0
    return w.run_record()


def test_the_records_are_those_of_the_learner():
    other, own = learned(), watched(net(1))

    same(own.activations, other.activations)
    same(own.gradients, other.gradients)
    same(own.params, other.params)
    np.testing.assert_allclose(own.losses, other.losses, rtol=1e-6)
    for row, true in zip(own.valid, other.valid, strict=True):
        assert (row["epoch"], row["step"]) == (true["epoch"], true["step"])
        assert row["train_loss"] == pytest.approx(true["train_loss"])


def test_a_fit_that_is_interrupted_has_a_row_for_the_epoch_that_it_was_in():
    pair, stop = (data(), data(2)), Callback(after_step=lambda self: 1 / (self.n_steps != 8))
    learn = Learner(pair, net(1), nn.MSELoss(), torch.optim.SGD, lr=0.1)

    with learn.no_logging():
        with pytest.raises(ZeroDivisionError):
            learn.fit(2, cbs=stop)
        learn.fit(1)

    rows, losses = learn.run_record().valid, learn.losses.by_step(14)
    assert [(row["epoch"], row["step"]) for row in rows] == [(0, 5), (1, 7), (0, 13)]
    means = [losses[:6].mean(), losses[6], losses[8:].mean()]
    assert [row["train_loss"] for row in rows] == pytest.approx(means)
    assert ["valid_loss" in row for row in rows] == [True, False, True]


def test_a_recorder_is_read_without_its_model():
    cbs = [ActivationStats(True, units=True), *recorders()[1:], FlightRecorder("report")]
    model = net(1)
    opt = sgd(model)
    with watch(model, opt, *cbs):
        train(model, opt, 4)

    del model, opt
    gc.collect()

    acts, grads, params, _ = cbs
    assert [len(cb.record()) for cb in (acts, grads, params)] == [4] * 3
    assert len(acts.stats[0]) == 2
    assert acts.hist(0).shape[1] == 4
    assert isinstance(acts.dead_units(0), list)
    assert "4 steps" in str(diagnose(acts))
    if importlib.util.find_spec("matplotlib"):
        assert acts.plot_layer_stats(0)
    no_longer = r"'train_iter': the Learner or Watcher .* no longer exists"
    with pytest.raises(AttributeError, match=no_longer):
        _ = acts.train_iter


def test_of_optimizers_that_are_found_the_second_is_known_from_the_second_step_on():
    model, params = net(1), ParamStats()
    opts = [sgd(model[0]), sgd(model[2])]

    with watch(model, None, params) as w:
        for x in batches(3):
            model.zero_grad()
            model(x).sum().backward()
            for opt in opts:
                opt.step()

    record = params.record()
    assert w.n_steps == len(record) == 3
    assert record.meta["in_optimizer"] == [True] * 4
    assert (record.value("update_norm")[:2] > 0).all()
    assert (record.value("update_norm")[2:, 1:] > 0).all()
    for name in ("grad_norm", "update_norm", "weight_norm"):  # it stepped after the step was over
        assert np.isnan(record.value(name)[2:, 0]).all()


@pytest.mark.parametrize(
    ("within", "none", "given"),
    [(True, True, True), (True, False, True), (True, True, False), (False, True, True)],
)
def test_steps_within_the_backward_and_gradients_that_are_gone_by_then_are_recorded_whole(
    within: bool, none: bool, given: bool
):
    model, x = net(1), batches(1)[0]
    acts, params = ActivationStats(), ParamStats()
    outputs, grads = GradientStats(), GradientStats(of="params")
    opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    used: dict[Any, list[float]] = {p: [] for p in opts}
    moved: dict[Any, list[float]] = {p: [] for p in opts}

    def step(p: torch.Tensor) -> None:
        before = p.detach().clone()
        used[p].append(p.grad.norm().item())
        opts[p].step()
        opts[p].zero_grad(set_to_none=none)
        moved[p].append((p.detach() - before).norm().item())

    for p in opts if within else ():
        p.register_post_accumulate_grad_hook(step)
    recorders = acts, params, outputs, grads
    with watch(model, list(opts.values()) if given else None, *recorders) as w:
        for i in range(3):
            model(x).pow(2).sum().backward()
            assert w.n_steps == i  # over when the next forward begins
            for p in () if within else reversed(list(opts)):
                step(p)

    assert w.n_steps == 3
    for record in acts.record(), outputs.record():
        assert record.value("count").tolist() == [[40.0] * 3, [5.0] * 3]
    updates = params.record().value("update_norm")
    np.testing.assert_allclose(updates, [*moved.values()], rtol=1e-4, atol=1e-7)
    if given:
        norms, roots = np.array([*used.values()]), np.sqrt([[p.numel()] for p in opts])
        np.testing.assert_allclose(grads.record().value("rms") * roots, norms, rtol=1e-5)
        np.testing.assert_allclose(params.record().value("grad_norm"), norms, rtol=1e-5)


def test_a_step_within_the_backward_cannot_be_left_out():
    model = net(1)
    opt = sgd(model[2])
    model[2].bias.register_post_accumulate_grad_hook(lambda p: opt.step())

    def cancel(self: Callback) -> None:
        raise CancelStepException

    with pytest.raises(HookError, match="within"), watch(model, opt, Callback(before_step=cancel)):
        model(batches(1)[0]).sum().backward()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("each", [1, 2])
def test_gradients_are_those_of_the_optimizers_that_step_in_turns(given, each):
    torch.manual_seed(0)
    nets = nn.ModuleDict({"g": nn.Linear(2, 3), "d": nn.Linear(3, 1)})
    opts = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
    params, grads = ParamStats(), GradientStats(of="params")
    want, turns = [], "gd" * 6

    with watch(nets, list(opts.values()) if given else None, params, grads):
        for name in turns:
            opts[name].zero_grad()  # the other's gradient stays
            for _ in range(each):  # through both: the other has a gradient from the first on
                nets["d"](nets["g"](torch.randn(8, 2))).square().mean().backward()
            want.append({n: p.grad.norm().item() for n, p in nets[name].named_parameters()})
            opts[name].step()

    record, by_grads = params.record(), grads.record()
    assert len(record) == len(turns)
    for row, full_name in enumerate(record.names):
        player, _, name = full_name.partition(".")
        own = [player == turn for turn in turns]
        norms = [step[name] if on else np.nan for on, step in zip(own, want, strict=True)]
        assert ((record.values["update_norm"][row] > 0) == own).all()
        np.testing.assert_allclose(record.values["grad_norm"][row], norms, rtol=1e-4)
        np.testing.assert_array_equal(np.isfinite(by_grads.value("rms", full_name)), own)
