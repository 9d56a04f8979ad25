"""Where NaN comes from, and what the rules read where little is recorded."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_loops import LOOPS, blobs, fit, net, sgd
from torch import nn

from hookkit import FlightRecorder, GradientStats, ParamStats, Run, diagnose, watch


def first(run):
    found = diagnose(run)
    assert found[0].rule == "non_finite", found
    return found[0]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Log(nn.Module):
    def forward(self, x):
        return x.relu().log()  # of 0


def test_nan_in_the_data_is_told_from_nan_that_a_function_makes():
    model = nn.Sequential(nn.Linear(8, 32), Log(), nn.Linear(32, 3))

    assert "the data" in first(LOOPS["non_finite"](True)).cause
    assert "log, sqrt or a division" in first(fit(model)).cause


def test_a_loss_alone_that_stops_being_a_number_is_named_with_its_step():
    losses = np.append(np.linspace(2, 1, 50), np.full(20, math.nan))

    found = first(Run(losses=losses))

    assert (found.severity, found.steps) == ("error", (50,))


def test_losses_that_are_not_known_in_every_step_are_no_nan():
    losses = np.full(100, math.nan)
    losses[::10] = np.linspace(2, 1, 10)

    assert diagnose(Run(losses=losses)).healthy


def test_an_incident_of_the_flight_recorder_is_the_finding():
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, opt, FlightRecorder("report")) as w:
        for i in range(5):
            x, y = blobs()
            if i == 3:
                x[0] = math.inf
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    found = first(w)
    assert found.steps == (3,)
    assert found.layers == ("0",)


def test_steps_that_a_scaler_skips_are_a_note():
    model = net()
    opt = sgd(0.05)(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    with watch(model, opt, GradientStats(of="params"), ParamStats()) as w:
        for _ in range(60):
            x, y = blobs()
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            scaler.scale(loss * 1e3).backward()
            scaler.step(opt)
            scaler.update()
            w.loss(loss)

    assert not [f for f in diagnose(w).alarms if f.rule == "non_finite"]


@pytest.mark.parametrize("rule", ["not_in_optimizer", "bad_init"])
def test_every_fourth_step_is_enough(rule):
    run = LOOPS[rule](True)
    some = {
        kind: dataclasses.replace(
            record,
            steps=record.steps[::4], epochs=record.epochs[::4], iters=record.iters[::4],
            spans=record.spans[::4], hist=None, edges=None,
            values={key: table[:, ::4] for key, table in record.values.items()},
        )
        for kind, record in (("activations", run.activations), ("params", run.params))
    }  # fmt: skip

    assert rule in diagnose(dataclasses.replace(run, **some)).rules


def test_matrices_of_one_rate_are_judged_together():
    model = net()
    groups = [{"params": model[:4].parameters()}, {"params": model[4].parameters(), "lr": 5.0}]

    found = diagnose(fit(model, lambda model: torch.optim.Adam(groups, 1e-3), n=60))

    assert "lr_too_high" not in {f.rule for f in found.alarms}  # one matrix of three


def test_weights_that_were_trained_before_may_move_little():
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))

    def found():
        return diagnose(fit(model, sgd(1e-5), n=100))

    assert "lr_too_low" in {f.rule for f in found().alarms}
    fit(model, lr=3e-3)
    assert not found().alarms


def test_where_gradients_fade_nothing_is_said_of_the_rate():
    layers = [part for _ in range(7) for part in (nn.Linear(8, 8), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(8, 3))

    found = diagnose(fit(model, sgd(0.05), n=100))

    assert "vanishing" in found.rules
    assert not found.alarms


def test_targets_that_are_far_and_are_learnt_are_no_alarm():
    def batch(i):
        x = torch.randn(32, 8)
        return x, x[:, :1] * 30 + 200

    found = diagnose(fit(net(1), batch=batch, loss_func=F.mse_loss, n=150, lr=0.05))

    assert "target_scale" not in found.rules


def test_the_first_loss_counts_where_the_first_step_did_the_damage():
    losses = np.append(1.0, np.linspace(50, 20, 99))

    assert "not_learning" in diagnose(Run(losses=losses)).rules
