"""Causes that real trainings show from their start or throughout: first weights, rates, codes."""

import numpy as np
import pytest
import torch
from health_runs import N, acts, alarms, falling, found, weights
from torch import nn
from torch.nn.functional import mse_loss

from hookkit import ActivationStats, GradientStats, ParamStats, watch
from hookkit.health import diagnose
from hookkit.records import Run


def trained(model, opt, loss_of, n=80):
    stats = ActivationStats(include_paramless=True), GradientStats(), ParamStats()
    with watch(model, opt, *stats) as w:
        for _ in range(n):

            def closure():
                opt.zero_grad()
                loss = loss_of(model)
                loss.backward()
                return loss

            w.loss(opt.step(closure).detach())
    return w.run_record()


def deep(n, act, width=16):
    layers = [part for _ in range(n) for part in (nn.Linear(width, width), act())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def regression(model, n=64, width=16):
    x = torch.randn(n, width)
    return mse_loss(model(x).squeeze(-1), x[:, 0] + x[:, 1])


class Coder(nn.Module):
    """A variational autoencoder of 16 numbers."""

    def __init__(self, n_classes=0):
        super().__init__()
        self.body, self.mu, self.logvar = (nn.Linear(n, m) for n, m in ((16, 32), (32, 4), (32, 4)))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        h = self.body(x).relu()
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(mu + torch.randn_like(mu) * (0.5 * logvar).exp()), mu, logvar


def vae_loss(beta):
    basis = torch.randn(3, 16)

    def loss_of(model):
        x = torch.randn(64, 3) @ basis
        out, mu, logvar = model(x)
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
        return mse_loss(out, x) + beta * kl

    return loss_of


@pytest.mark.parametrize(("beta", "named"), [(100.0, True), (0.01, False)])
def test_a_code_that_a_penalty_pushes_to_nothing_has_collapsed(beta, named):
    torch.manual_seed(0)
    model = Coder()
    run = trained(model, torch.optim.Adam(model.parameters(), 1e-2), vae_loss(beta), 300)

    assert ("representation_collapse" in alarms(run)) == named
    if named:
        assert "mu" in found(run, "representation_collapse").layers


def test_a_layer_that_fades_before_a_norm_has_not_collapsed():
    fades = [1.0, np.geomspace(1, 0.01, N), 1.0, 1.0]
    kinds = ("Linear", "Linear", "BatchNorm1d", "Linear")

    assert alarms(Run(acts(kinds, rms=fades))) == set()
    assert "representation_collapse" in alarms(Run(acts(("Linear",) * 4, rms=fades)))


class Pairs(nn.Module):
    """How well users and items match."""

    def __init__(self, std):
        super().__init__()
        self.user, self.item = nn.Embedding(30, 8), nn.Embedding(30, 8)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=std)

    def forward(self, ids):
        return (self.user(ids[0]) * self.item(ids[1])).sum(-1)


def matched(model):
    ids = torch.randint(30, (2, 64))
    return mse_loss(model(ids), ((ids[0] + ids[1]) % 2).float())


def test_embeddings_that_begin_far_away_are_named():
    torch.manual_seed(0)
    model = Pairs(6.0)
    run = trained(model, torch.optim.Adam(model.parameters(), 1e-3), matched)

    assert found(run, "bad_init").severity == "warning"


def test_embeddings_as_pytorch_makes_them_are_not():
    torch.manual_seed(0)
    model = Pairs(1.0)
    run = trained(model, torch.optim.Adam(model.parameters(), 1e-3), matched)

    assert "bad_init" not in diagnose(run).rules


class Last(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 16, 2, batch_first=True), nn.Linear(16, 1)
        with torch.no_grad():
            for p in self.rnn.parameters():
                p *= times

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1]).squeeze(-1)


@pytest.mark.parametrize(("times", "named"), [(0.05, True), (1.0, False)])
def test_a_recurrence_that_begins_too_small_is_named_where_it_learns_nothing(times, named):
    torch.manual_seed(0)
    model = Last(times)

    def loss_of(model):
        x = torch.randn(64, 5, 1)
        return mse_loss(model(x), x[:, -1, 0] * x[:, -2, 0].sign())

    run = trained(model, torch.optim.SGD(model.parameters(), 1e-2), loss_of, 150)

    assert ("bad_init" in alarms(run)) == named


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.Tanh])
def test_gradients_that_vanish_before_the_first_step_come_before_what_decay_does_then(act):
    torch.manual_seed(0)
    model = deep(14, act)
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight *= 0.3 if act is nn.Tanh else 1.0
    opt = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    d = diagnose(trained(model, opt, regression, 150))

    assert d[0].rule in ("vanishing", "bad_init")
    assert "weight_decay" in d.rules  # it shrinks what has no gradient, which is a consequence


@pytest.mark.parametrize(("lr", "named"), [(1e-5, True), (1e-2, False)])
def test_steps_that_still_agree_at_the_end_are_too_small(lr, named):
    torch.manual_seed(0)
    model = deep(1, nn.ReLU, 64)
    opt = torch.optim.Adam(model.parameters(), lr)
    run = trained(model, opt, lambda m: regression(m, 256, 64) + 1e-3, 200)

    assert ("lr_too_low" in alarms(run)) == named


@pytest.mark.parametrize(("lr", "named"), [(2e-5, True), (2e-3, False)])
def test_steps_of_sgd_that_still_agree_at_the_end_are_too_small(lr, named):
    torch.manual_seed(0)
    model = deep(1, nn.ReLU, 64)
    opt = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    run = trained(model, opt, lambda m: 5 * regression(m, 256, 64) + 1e-3, 300)

    assert ("lr_too_low" in alarms(run)) == named


@pytest.mark.parametrize(("momentum", "named"), [(0.9, True), (0.0, False)])
def test_of_an_adam_with_little_momentum_large_shares_say_nothing(momentum, named):
    rates = weights(update_ratio=[1.2e-3] * 4, update_norm=[6.4e-3] * 4, lr=[1e-3] * 4)
    info = {"optimizer": "Adam", "momentum": [momentum]}

    assert ("lr_too_low" in alarms(Run(params=rates, losses=falling(end=2.0), info=info))) == named


@pytest.mark.parametrize(("lr", "named"), [(300.0, True), (0.1, False)])
def test_lbfgs_without_a_search_may_have_too_high_a_rate(lr, named):
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    model = deep(1, nn.Tanh)
    opt = torch.optim.LBFGS(model.parameters(), lr, max_iter=2)
    run = trained(model, opt, lambda m: mse_loss(m(x).squeeze(-1), x[:, 0]), 60)

    assert ("lr_too_high" in alarms(run)) == named


class Sum(nn.Module):
    """Adds up what it reads, by a recurrence of ReLUs."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1]).squeeze(-1)


def summed(model):
    x = torch.rand(32, 40, 1)
    return mse_loss(model(x), x.mean((1, 2)))


@pytest.mark.parametrize(("lr", "named"), [(0.1, True), (1e-3, False)])
def test_a_recurrence_whose_gradients_leap_is_named_though_the_loss_falls(lr, named):
    torch.manual_seed(0)
    model = Sum()
    run = trained(model, torch.optim.Adam(model.parameters(), lr), summed, 100)

    assert bool({"exploding", "lr_too_high"} & alarms(run)) == named


def test_clipped_gradients_do_not_leap():
    torch.manual_seed(0)
    model = Sum()

    for p in model.parameters():
        p.register_hook(lambda g: g / max(1.0, float(g.norm())))
    run = trained(model, torch.optim.Adam(model.parameters(), 0.1), summed, 100)

    assert "leaps" not in str(diagnose(run))


def steps(model, opt, loss_of=regression, n=120, told=None, zeroed=True):
    """A run whose `told(loss)` is reported, or nothing."""
    with watch(model, opt, ActivationStats(), GradientStats(), ParamStats()) as w:
        for _ in range(n):
            if zeroed:
                opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            opt.step()
            if told:
                w.loss(told(loss))
    return w.run_record()


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_that_pile_up_are_known_without_a_loss(made):
    torch.manual_seed(0)
    model, twin = deep(2, nn.ReLU), deep(2, nn.ReLU)

    piled = steps(model, made(model.parameters(), 1e-3), zeroed=False, n=150)
    fresh = steps(twin, made(twin.parameters(), 1e-3), n=150)

    assert "grads_pile_up" in alarms(piled)
    assert "grads_pile_up" not in alarms(fresh)


def test_steps_that_move_nothing_are_known_without_a_loss():
    torch.manual_seed(0)
    model = deep(2, nn.ReLU)

    assert "lr_too_low" in alarms(steps(model, torch.optim.SGD(model.parameters(), 1e-6)))
    assert "lr_too_low" not in alarms(steps(model, torch.optim.SGD(model.parameters(), 1e-2)))


@pytest.mark.parametrize(("value", "named"), [(0.995, True), (0.9, False)])
def test_a_momentum_near_1_is_named_where_the_loss_does_not_fall(value, named):
    torch.manual_seed(0)
    model = deep(2, nn.ReLU)
    opt = torch.optim.SGD(model.parameters(), 3e-2, momentum=value)

    assert ("momentum" in alarms(steps(model, opt, n=260, told=lambda x: x))) == named


@pytest.mark.parametrize(
    ("made", "named"), [(torch.optim.Adam, True), (torch.optim.RMSprop, False)]
)
def test_a_step_that_changes_a_third_of_the_weights_is_judged_by_its_optimizer(made, named):
    torch.manual_seed(0)
    model = deep(2, nn.Tanh)
    lr = 8e-2 if named else 8e-3  # RMSprop's first step is ten times as large as its rate

    def noisy(model):
        return regression(model, 16) + 1.0

    run = steps(model, made(model.parameters(), lr), noisy, 150, lambda x: x)

    assert ("in one step" in str(diagnose(run))) == named


class TwoHeads(nn.Module):
    """A choice of three, and a number beside it."""

    def __init__(self):
        super().__init__()
        self.trunk, self.choice, self.number = nn.Linear(16, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x).relu()
        return self.choice(h), self.number(h).squeeze(-1)


@pytest.mark.parametrize(("size", "named"), [(1000.0, True), (1.0, False)])
def test_targets_of_one_head_that_nobody_scaled_are_named(size, named):
    torch.manual_seed(0)
    model = TwoHeads()

    def both(model):
        x = torch.randn(64, 16)
        scores, number = model(x)
        label, target = x[:, :3].argmax(1), size * (1 + x[:, 0])
        return nn.functional.cross_entropy(scores, label) + (number - target).abs().mean()

    run = steps(model, torch.optim.Adam(model.parameters(), 1e-2), both, 200, lambda x: x)

    assert ("target_scale" in alarms(run)) == named
