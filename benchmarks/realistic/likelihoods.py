"""Losses that are likelihoods: variance, counts, survival, ordered grades, mixtures, quantiles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tables import mlp
from .trials import Watch, healthy, update


def noisy_curve(n: int) -> tuple[Tensor, Tensor]:
    """Three inputs and a curve of the first whose noise grows with the second."""
    x = torch.randn(n, 3)
    return x, (2 * x[:, 0]).sin() + (0.02 + 0.3 * x[:, 1].sigmoid()) * torch.randn(n)


@healthy
def gaussian_variance(watch: Watch, *, relu: bool = False, lr: float = 3e-3) -> float:
    """Gaussian NLL with a learnt variance, which goes below zero; Adam with cosine."""
    x, y = noisy_curve(2000)
    net, criterion = mlp(3, 2, rate=0.0), nn.GaussianNLLLoss(eps=0.0 if relu else 1e-6)
    net[-1].bias.data[1] = 1.0
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 400)

    def loss_of(i: Tensor | slice) -> Tensor:
        mean, raw = net(x[i]).unbind(1)
        return criterion(mean, y[i], F.relu(raw) if relu else F.softplus(raw) + 1e-4)

    with watch(net, opt) as w:
        for _ in range(400):
            loss = loss_of(torch.randint(0, 1600, (64,)))
            update(w, opt, loss, sched=schedule)
    with torch.no_grad():
        return float(loss_of(slice(1600, None)))


@healthy
def quantile_pinball(watch: Watch, *, zeroed: bool = True, lr: float = 0.01) -> float:
    """Three quantiles with the pinball loss; RMSprop."""
    x, y = noisy_curve(2000)
    net, q = mlp(3, 3, rate=0.0), torch.tensor([0.1, 0.5, 0.9])
    opt = torch.optim.RMSprop(net.parameters(), lr=lr, momentum=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 150, 0.3)

    def pinball(i: Tensor | slice) -> Tensor:
        off = y[i, None] - net(x[i])
        return torch.maximum(q * off, (q - 1) * off).mean()

    with watch(net, opt) as w:
        for _ in range(400):
            if zeroed:
                opt.zero_grad()
            loss = pinball(torch.randint(0, 1600, (64,)))
            loss.backward()
            opt.step()
            schedule.step()
            w.loss(loss)
    with torch.no_grad():
        return float(pinball(slice(1600, None)))


@healthy
def poisson_counts(watch: Watch, *, log_input: bool = True, unit: float = 1.0) -> float:
    """Counts of visits with a log rate; Adam with a plateau schedule."""
    x = torch.randn(2400, 6)
    rate = (0.8 * x[:, 0] - 0.6 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]).clamp(-3, 3).exp() * 2
    y, x = torch.poisson(rate), x * unit
    net, criterion = mlp(6, 1, rate=0.0), nn.PoissonNLLLoss(log_input=log_input, eps=0.0)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=3)
    with watch(net, opt, loss_func=criterion):
        for _ in range(16):
            for i in torch.randperm(2000).split(100):
                opt.zero_grad()
                loss = criterion(net(x[i]).squeeze(1), y[i])
                loss.backward()
                opt.step()
            schedule.step(loss.item())
    with torch.no_grad():
        out = net(x[2000:]).squeeze(1)
        return float(F.poisson_nll_loss(out if log_input else out.log(), y[2000:]))


@healthy
def cox_survival(watch: Watch, *, decay: float = 1e-3, unit: float = 1.0) -> float:
    """Cox's partial likelihood over big batches; the score is 1 minus concordance."""
    x = torch.randn(1500, 8)
    risk = x[:, 0] - 0.7 * x[:, 1] + 0.8 * x[:, 2] * x[:, 3]
    time = torch.empty(1500).exponential_() * (-risk).exp()
    limit = torch.empty(1500).exponential_() * 3
    seen, time = (time <= limit).float(), torch.minimum(time, limit)
    net = nn.Sequential(nn.Linear(8, 48), nn.SELU(), nn.Linear(48, 48), nn.SELU(), nn.Linear(48, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    with watch(net, opt) as w:
        for _ in range(300):
            i = torch.randperm(1200)[:200]
            i = i[time[i].argsort(descending=True)]
            out = net(x[i] * unit).squeeze(1)
            loss = -((out - out.logcumsumexp(0)) * seen[i]).sum() / seen[i].sum()
            update(w, opt, loss, clip=(net, 5.0))
    with torch.no_grad():
        out, t = net(x[1200:] * unit).squeeze(1), time[1200:]
    pairs = (t[:, None] < t[None]) & (seen[1200:, None] > 0)
    return 1 - float((out[:, None] > out[None])[pairs].float().mean())


class Grades(nn.Module):
    """One score and four thresholds that rise."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.steps = mlp(10, 1, rate=0.2), nn.Parameter(torch.zeros(3))
        self.first = nn.Parameter(torch.tensor(-1.5))

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.cat([self.first[None], F.softplus(self.steps)]).cumsum(0)
        return self.score(x) - steps


@healthy
def ordinal_grades(watch: Watch, *, per_batch: bool = False, biases_only: bool = False) -> float:
    """Five ordered grades by cumulative logits; the rate falls by epoch."""
    x = torch.randn(1600, 10)
    raw = 1.2 * x[:, 0] - x[:, 1] + x[:, 2].abs() + 0.3 * torch.randn(1600)
    grade = torch.bucketize(raw, raw.quantile(torch.tensor([0.2, 0.4, 0.6, 0.8])))
    above, net = (grade[:, None] > torch.arange(4)).float(), Grades()
    used = [p for n, p in net.named_parameters() if "bias" in n or not biases_only]
    opt = torch.optim.Adam(used, lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.85)
    with watch(net, opt) as w:
        for _ in range(15):
            for i in torch.randperm(1200).split(50):
                loss = F.binary_cross_entropy_with_logits(net(x[i]), above[i])
                opt.zero_grad()
                loss.backward()
                opt.step()
                if per_batch:
                    schedule.step()
                w.loss(loss)
            if not per_batch:
                schedule.step()
    net.eval()
    return float(((net(x[1200:]) > 0).sum(1) - grade[1200:]).abs().float().mean())


@healthy
def mixture_density(watch: Watch, *, lr: float = 5e-3, gain: float = 1.0) -> float:
    """Five Gaussians for a curve that turns back; Adam."""
    y = torch.rand(2500) * 2 - 1
    x = (y + 0.3 * (2 * math.pi * y).sin() + 0.05 * torch.randn(2500))[:, None]
    net = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 15)
    )
    for layer in (net[0], net[2], net[4]):
        layer.weight.data *= gain
    opt = torch.optim.Adam(net.parameters(), lr=lr)

    def nll(i: Tensor | slice) -> Tensor:
        weight, mean, log_std = net(x[i]).chunk(3, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 3).exp())
        both = weight.log_softmax(1) + normal.log_prob(y[i, None])
        return -both.logsumexp(1).mean()

    with watch(net, opt) as w:
        for _ in range(400):
            loss = nll(torch.randint(0, 2000, (100,)))
            update(w, opt, loss)
    with torch.no_grad():
        return float(nll(slice(2000, None)))
