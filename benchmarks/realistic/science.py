"""Kinds of networks by GIN, Poisson's equation, a VAE of rows, and voices told apart."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_curve
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from .data import batches, pick
from .trials import Watch, failing, fit, healthy, update


def network(kind: int) -> Tensor:
    """The adjacency (24, 24) of a random net, a ring with shortcuts, or one that has hubs."""
    n = 24
    a = torch.zeros(n, n)
    if kind == 0:
        a = (torch.rand(n, n) < 8 / n).float()
    for i in range(n) if kind == 1 else range(4, n) if kind == 2 else ():
        if kind == 1:
            other = [
                (i + k) % n if torch.rand(()) < 0.75 else int(torch.randint(n, ()))
                for k in (1, 2, 3, 4)
            ]
        else:
            other = torch.multinomial(1.0 + a[:i].sum(1) ** 1.2, 4).tolist()
        for j in other:
            a[i, j] = a[j, i] = 1.0
    return a.triu(1) + a.triu(1).T


class GIN(nn.Module):
    """Sums over neighbours and two layers, six times; the mean over nodes."""

    def __init__(self, listed: bool, normed: bool):
        super().__init__()
        norm = nn.BatchNorm1d if normed else nn.Identity
        self.inward, self.head = nn.Linear(3, 32), nn.Linear(32, 3)
        convs = [
            nn.Sequential(
                nn.Linear(32, 32), nn.Flatten(0, 1), norm(32), nn.ReLU(), nn.Linear(32, 32)
            )
            for _ in range(6)
        ]
        self.convs = convs if listed else nn.ModuleList(convs)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        h = self.inward(x)
        for conv in self.convs:
            h = conv(h + a @ h).unflatten(0, h.shape[:2]).relu()
        return self.head(h.mean(1))


@healthy
def gin_networks(watch: Watch, *, listed: bool = False, normed: bool = True) -> float:
    """Of which of three kinds a small network is; cross entropy of those held out."""
    y = torch.randint(3, (1500,))
    a = torch.stack([network(k) for k in y.tolist()])
    x = torch.cat([torch.ones(1500, 24, 1), torch.randn(1500, 24, 2)], 2)
    net = GIN(listed, normed)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(1300, 24)
        return F.cross_entropy(net(x[i], a[i]), y[i])

    fit(watch, net, opt, loss_of, 400, sched=CosineAnnealingLR(opt, 400))
    net.eval()
    with torch.no_grad():
        return float(F.cross_entropy(net(x[1300:], a[1300:]), y[1300:]))


@failing("the layers are in a plain list", names=("unregistered", "unmoved"), trace=True)
def gin_networks_plain_list(watch: Watch) -> float:
    return gin_networks(watch, listed=True)


@failing(
    "sums over neighbours, six times, without batch norm",
    names=("exploding", "bad_init", "initial_loss"),
    trace=True,
)
def gin_networks_no_norm(watch: Watch) -> float:
    return gin_networks(watch, normed=False)


@healthy
def poisson_pinn(watch: Watch, *, act: type[nn.Module] = nn.Tanh, lr: float = 5e-3) -> float:
    """Poisson's equation in a square, its edges by a penalty; the relative error."""
    net = nn.Sequential(nn.Linear(2, 40), act(), nn.Linear(40, 40), act(), nn.Linear(40, 1))
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    sched = ExponentialLR(opt, 0.996)
    k = math.pi

    def true(p: Tensor) -> Tensor:
        return (k * p[:, :1]).sin() * (2 * k * p[:, 1:]).sin()

    def residual(p: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(net(p.requires_grad_()).sum(), p, create_graph=True)
        bends = [torch.autograd.grad(slope[:, j].sum(), p, create_graph=True)[0] for j in (0, 1)]
        laplacian = bends[0][:, 0] + bends[1][:, 1]
        return laplacian + 5 * k**2 * true(p)[:, 0]

    def loss_of(_: int) -> Tensor:
        edge = torch.rand(120, 2)
        edge[torch.arange(120), torch.randint(2, (120,))] = torch.randint(2, (120,)).float()
        return 0.01 * residual(torch.rand(200, 2)).pow(2).mean() + 5 * net(edge).pow(2).mean()

    fit(watch, net, opt, loss_of, 600, sched=sched)
    p = torch.rand(2000, 2)
    with torch.no_grad():
        return float((net(p) - true(p)).norm() / true(p).norm())


@failing("ReLU, whose second derivatives are 0", names=(), trace=False)
def poisson_pinn_relu(watch: Watch) -> float:
    return poisson_pinn(watch, act=nn.ReLU)


@failing("Adam with the rate of 1 that was LBFGS's", names=("lr_too_high", "saturated"), trace=True)
def poisson_pinn_lr_1(watch: Watch) -> float:
    return poisson_pinn(watch, lr=1.0)


class RowVAE(nn.Module):
    """Rows of ten columns by way of four latents."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU())
        self.mean, self.log_var = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h).clamp(-10, 10)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp() if self.training else mean
        return self.decoder(z), mean, log_var


@healthy
def rows_vae(watch: Watch, *, averaged: bool = False, raw: bool = False) -> float:
    """A VAE of a table; the share of the columns' variance that what comes back misses."""
    factors = torch.randn(3000, 3)
    x = (factors @ torch.randn(3, 10)).tanh() + 0.6 * factors @ torch.randn(3, 10)
    x = x + 0.1 * torch.randn(3000, 10)
    x = (x - x.mean(0)) / x.std(0)
    if raw:  # grams, years, euros, …
        x = x * torch.logspace(-1, 3, 10) + 3 * torch.logspace(-1, 3, 10)
    net = RowVAE()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    with watch(net, opt) as w:
        for i in batches(2500, 100, 1000):
            out, mean, log_var = net(x[i])
            kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
            error = (out - x[i]).pow(2)
            error = error.mean() if averaged else 5 * error.sum(1).mean()
            update(w, opt, error + kl)
    net.eval()
    with torch.no_grad():
        return float(((net(x[2500:])[0] - x[2500:]).var(0) / x[2500:].var(0)).mean())


@failing(
    "errors are averaged over columns, the KL term summed over latents",
    names=("posterior_collapse",),
    trace=True,
)
def rows_vae_averaged(watch: Watch) -> float:
    return rows_vae(watch, averaged=True)


@failing("grams and euros as they are", names=("input_scale", "target_scale"), trace=True)
def rows_vae_raw(watch: Watch) -> float:
    return rows_vae(watch, raw=True)


class Voices(nn.Module):
    """A vector of length 1 for a voice, and cosines with those of the speakers that are known."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(40, 96), nn.BatchNorm1d(96), nn.PReLU(), nn.Linear(96, 24)
        self.body, self.speakers = nn.Sequential(*layers), nn.Parameter(torch.randn(40, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = F.normalize(self.body(x))
        return v, v @ F.normalize(self.speakers).T


def recordings(n_each: int) -> tuple[Tensor, Tensor]:
    """Features (70 * n_each, 40) of 70 speakers, most of which come from where they speak."""
    who = torch.arange(70).repeat_interleave(n_each)
    voice, room = torch.randn(70, 6)[who] @ torch.randn(6, 40), torch.randn(len(who), 8)
    x = voice * (1 + 0.3 * torch.randn(len(who), 1)) + 1.5 * room @ torch.randn(8, 40)
    x = x.tanh() + 0.1 * torch.randn_like(x)
    return (x - x.mean(0)) / x.std(0), who


@healthy
def voices_arcface(watch: Watch, *, clip: float = 5.0, shuffled: bool = True) -> float:
    """ArcFace of 40 speakers; the rate of equal errors for pairs of 30 others."""
    x, who = recordings(50)
    net = Voices()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    with watch(net, opt) as w:
        for step, i in enumerate(batches(2000, 50, 1000)):
            i = i if shuffled else torch.arange(50) + 50 * (step % 40)
            cosine = net(x[i])[1]
            own = F.one_hot(who[i], 40).bool()
            further = (cosine.clamp(-0.999, 0.999).acos() + 0.2).cos()
            loss = F.cross_entropy(16 * torch.where(own, further, cosine), who[i])
            update(w, opt, loss, clip=(net, clip))
    with torch.no_grad():
        v = net.eval()(x[2000:])[0]
    i, j = torch.triu_indices(len(v), len(v), 1)
    wrong, right, _ = roc_curve(who[2000:][i] == who[2000:][j], (v @ v.T)[i, j])
    return float(np.maximum(wrong, 1 - right).min())


@failing("gradients are clipped at a norm of 0.001", names=("clipping",), trace=True)
def voices_arcface_clip_1e3(watch: Watch) -> float:
    return voices_arcface(watch, clip=1e-3)


@failing("speaker after speaker, not shuffled", names=("unshuffled",), trace=True)
def voices_arcface_sorted(watch: Watch) -> float:
    return voices_arcface(watch, shuffled=False)
