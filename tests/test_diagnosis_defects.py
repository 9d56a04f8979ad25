"""What the diagnosis once got wrong, of NaN above all, and what it reads of little."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diagnosis_loops import LOOPS, Headed, blobs, fit, net, sgd, train
from torch import nn

from hookkit import ActivationStats, FlightRecorder, GradientStats, ParamStats, Run, diagnose, watch
from hookkit.records import Record


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def first(run):
    found = diagnose(run)
    assert found[0].rule == "non_finite", found
    return found[0]


def test_an_unused_head_or_pooler_is_a_note_and_a_detached_body_alarms():
    unused = diagnose(fit(Headed(unused=True)))
    cut = diagnose(fit(Headed(cut=True, unused=True)))

    assert unused.healthy, unused
    rows = [f.layers for f in unused if f.rule == "no_gradient"]
    assert rows == [("unused.weight", "unused.bias")]
    assert cut.rules[0] == "no_gradient"
    assert cut.alarms
    assert cut[0].layers[:2] == ("body.weight", "body.bias")


def test_a_head_that_is_trained_alone_is_no_alarm_and_every_tenth_step_is_enough():
    model = net(width=64)
    opt = torch.optim.Adam(model[4].parameters(), 0.1)

    found = diagnose(fit(model, lambda _: opt, n=60, recorders=[ParamStats(every=10)]))

    assert found.healthy, found
    assert "not_in_optimizer" in found.rules


def test_a_minimax_generator_turns_the_sign_of_a_loss_on_purpose():
    made, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), net(1)
    critic[0] = nn.Linear(2, 32)

    def loss(i):
        score = critic(made(torch.randn(32, 4)))
        return -F.binary_cross_entropy_with_logits(score, torch.zeros_like(score))

    assert not diagnose(train(made, loss)).alarms


# --- where NaN comes from, and what is read where little is recorded


class Log(nn.Module):
    def forward(self, x):
        return x.relu().log()  # of 0


def test_nan_in_the_data_is_told_from_nan_that_a_function_makes():
    model = nn.Sequential(nn.Linear(8, 32), Log(), nn.Linear(32, 3))

    assert "the data" in first(LOOPS["non_finite"](True)).cause
    assert "log, sqrt or a division" in first(fit(model)).cause


@pytest.mark.parametrize(
    ("losses", "rule"),
    [
        ([*np.linspace(2, 1, 50), *[math.nan] * 20], "non_finite"),
        (np.where(np.arange(100) % 10, math.nan, np.linspace(2, 1, 100)), None),
        ([1.0, *np.linspace(50, 20, 99)], "not_learning"),  # the first step did the damage
    ],
)
def test_of_losses_alone_the_first_and_the_first_nan_count_and_unknown_ones_do_not(losses, rule):
    found = diagnose(Run(losses=np.array(losses)))

    assert found.rules == ((rule,) if rule else ())
    if rule == "non_finite":
        assert (found[0].severity, found[0].steps) == ("error", (50,))


def test_losses_that_are_all_nan_are_known_and_an_error():
    w = fit(net(), loss_func=lambda out, y: out.mean() * math.nan, n=20, recorders=())

    run, found = w.run_record(), w.diagnose()
    assert (len(run.losses), run.n_steps, found.n_steps) == (20, 20, 20)
    assert np.isnan(run.losses).all()
    assert (found[0].rule, found[0].severity, found[0].steps) == ("non_finite", "error", (0,))
    assert "losses" not in found.not_judged


def test_an_incident_of_the_flight_recorder_is_the_finding():
    def batch(i):
        x, y = blobs()
        if i == 3:
            x[0] = math.inf
        return x, y

    found = first(fit(net(), batch=batch, n=5, recorders=[FlightRecorder("report")]))

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


@pytest.mark.parametrize("first", ["policy", "value"])
def test_gradients_are_followed_from_the_head_that_was_called_first(first):
    """Whatever the hash seed of Python: two heads are equally deep."""
    before = {"a.weight": "", "b.weight": "a.weight", "c.weight": "b.weight"}
    before |= dict.fromkeys([f"{first}.weight", "policy.weight", "value.weight"], "c.weight")
    names = ("a.weight", "b.weight", "c.weight", "policy.weight", "value.weight")
    axes = *[np.arange(20)] * 3, np.ones(20, int)
    size = np.tile([[1.0], [1], [1], [1e-3], [1]], 20)

    found = diagnose(
        Run(
            Record("activation", ("a",), ("Linear",), *axes, {}, meta={"predecessors": before}),
            params=Record("param", names, ("Linear",) * 5, *axes, {"grad_rms": size}),
        )
    )

    assert ("exploding" in found.rules) == (first == "policy")


def test_targets_that_are_far_and_are_learnt_are_no_alarm():
    def batch(i):
        x = torch.randn(32, 8)
        return x, x[:, :1] * 30 + 200

    found = diagnose(fit(net(1), batch=batch, loss_func=F.mse_loss, n=150, lr=0.05))

    assert "target_scale" not in found.rules


class Registered(nn.Module):
    """Its last layer is registered first."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x))


def spoiled(values):
    """A run whose step 8 has a NaN where `values` makes one."""
    model = Registered()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, opt, ActivationStats(), GradientStats(), ParamStats()) as w:
        for step in range(12):
            x, y = torch.randn(8, 4), torch.zeros(8, 2)
            if step == 8:
                values(model, x)
            w.loss(loss := F.mse_loss(model(x), y))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return w.run_record()


def test_the_first_layer_is_the_first_in_the_graph_wherever_it_is_registered():
    run = spoiled(lambda model, x: model.first.weight.data.fill_(math.nan))

    found = first(run)

    assert found.layers == ("first",)
    assert found.steps == (8,)


def test_the_norm_of_all_gradients_is_unknown_where_one_is_not_finite():
    def spoil(model, x):
        model.last.bias.register_hook(lambda grad: grad * math.nan)

    norms = spoiled(spoil).grad_norms

    assert np.isfinite(norms[:8]).all()
    assert np.isnan(norms[8])
