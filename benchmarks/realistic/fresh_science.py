"""Physics and probability once more: ODEs, operators, energies, densities, meta-learning."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .fresh_images import pick
from .trials import Watch, fit, healthy
from .vision_data import digits


def tanh_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    net = nn.Sequential()
    for a, b in pairwise(sizes):
        net.extend([nn.Linear(a, b), nn.Tanh()])
    return net[:-1]


@healthy
def ode_spirals(
    watch: Watch, *, step: float = 0.1, zeros: bool = False, half: bool = False
) -> float:
    """A vector field, integrated by RK4, that follows spirals; the share of variance missed."""
    turn = torch.tensor([[-0.2, 2.0], [-2.0, -0.2]])
    move = torch.linalg.matrix_exp(turn * 0.1)
    path = [2 * torch.randn(300, 2)]
    for _ in range(10):
        path.append(path[-1] @ move.T)
    true = torch.stack(path, 1)
    net = tanh_mlp(2, 48, 2)
    if zeros:
        for p in net.parameters():
            nn.init.zeros_(p)
    given = net[:1].parameters() if half else net.parameters()
    opt = torch.optim.Adam(given, lr=1e-2)

    def roll(z: Tensor) -> Tensor:
        out = []
        for _ in range(10):
            k1 = net(z)
            k2 = net(z + step / 2 * k1)
            k3 = net(z + step / 2 * k2)
            z = z + step / 6 * (k1 + 2 * k2 + 2 * k3 + net(z + step * k3))
            out.append(z)
        return torch.stack(out, 1)

    def loss_of(_: int) -> Tensor:
        i = pick(250, 50)
        return F.mse_loss(roll(true[i, 0]), true[i, 1:])

    fit(watch, net, opt, loss_of, 150)
    with torch.no_grad():
        return float(F.mse_loss(roll(true[250:, 0]), true[250:, 1:]) / true.var())


class Spectral(nn.Module):
    """The lowest 12 frequencies mixed by weights of their own, beside a pointwise layer."""

    def __init__(self, dim: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(12, dim, dim, 2))
        self.point = nn.Conv1d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., :12]
        mixed = torch.einsum("bif,fio->bof", low, torch.view_as_complex(self.weight))
        return F.gelu(torch.fft.irfft(mixed, x.shape[-1]) + self.point(x))


@healthy
def fno_heat(watch: Watch, *, std: float = 0.04, unit: float = 1.0, flat: bool = True) -> float:
    """A Fourier neural operator: a field after diffusion and drift; relative error."""
    f = torch.arange(1, 9.0)
    grid = torch.linspace(0, 1, 65)[:-1]
    a, phase = torch.randn(500, 8, 1) / f[:, None], 6.28 * torch.rand(500, 8, 1)
    wave = 6.283 * f[:, None] * grid
    x = (a * torch.sin(wave + phase)).sum(1)
    fall = torch.exp(-0.02 * f**2)[:, None]
    y = unit * (a * fall * torch.sin(wave + phase - f[:, None])).sum(1) + 0.3 * unit * x**2
    net = nn.Sequential(
        nn.Conv1d(2, 24, 1), Spectral(24, std), Spectral(24, std), nn.Conv1d(24, 1, 1)
    )
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.StepLR(opt, 80, 0.5)

    def out(i: Tensor) -> Tensor:
        return net(torch.stack([x[i], grid.expand(len(i), -1)], 1))

    def loss_of(_: int) -> Tensor:
        i = pick(400, 20)
        return ((out(i).squeeze(1) if flat else out(i)) - y[i]).square().mean()

    fit(watch, net, opt, loss_of, 250, sched=sched)
    with torch.no_grad():
        return float((out(torch.arange(400, 500)).squeeze(1) - y[400:]).norm() / y[400:].norm())


@healthy
def hamilton_pendulum(watch: Watch, *, unit: float = 1.0) -> float:
    """An energy whose derivatives are the motion (Greydanus et al. 2019); variance missed."""
    q, p = 5 * torch.rand(1500) - 2.5, 4 * torch.rand(1500) - 2
    x, y = torch.stack([q * unit, p], 1), torch.stack([p, -2 * q.sin()], 1)
    net = tanh_mlp(2, 64, 64, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def motion(z: Tensor) -> Tensor:
        z = z.clone().requires_grad_()
        dq, dp = torch.autograd.grad(net(z).sum(), z, create_graph=True)[0].T
        return torch.stack([dp, -dq * unit], 1)

    def loss_of(_: int) -> Tensor:
        i = pick(1200, 100)
        return F.mse_loss(motion(x[i]), y[i])

    fit(watch, net, opt, loss_of, 350)
    return float(F.mse_loss(motion(x[1200:]), y[1200:]).detach() / y.var())


class MaskedLinear(nn.Linear):
    """A layer in which a unit sees only units of a lower degree (Germain et al. 2015)."""

    def __init__(self, before: Tensor, after: Tensor, strict: bool):
        super().__init__(len(before), len(after))
        seen = after[:, None] > before if strict else after[:, None] >= before
        self.register_buffer("mask", seen.float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


@healthy
def made_digits(watch: Watch, *, sign: float = 1.0, often: int = 1, lr: float = 2e-3) -> float:
    """MADE over black and white digits; nats for a pixel given those before it."""
    x, _, x_test, _ = digits()
    x, x_test = ((t.flatten(1) > 7).float() for t in (x, x_test))
    pixel, hidden = torch.arange(64), torch.arange(256) % 63
    net = nn.Sequential(
        MaskedLinear(pixel, hidden, False),
        nn.ReLU(),
        MaskedLinear(hidden, hidden, False),
        nn.ReLU(),
        MaskedLinear(hidden, pixel, True),
    )
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    with watch(net, opt) as w:
        for _ in range(15):
            for k, i in enumerate(torch.randperm(1400).split(50)):
                logits = net(x[i])
                loss = sign * F.binary_cross_entropy_with_logits(logits, x[i], reduction="sum")
                loss = loss / len(i)
                if k % often == 0:
                    opt.zero_grad()
                loss.backward()
                opt.step()
                w.loss(loss)
    past = torch.tril(torch.ones(64, 64), -1)  # the own pixel and later ones are hidden
    with torch.no_grad():
        out = torch.stack([net(x_test * past[k])[:, k] for k in range(64)], 1)
    return F.binary_cross_entropy_with_logits(out, x_test).item()


class Bayes(nn.Module):
    """A linear layer with a normal distribution for each weight, drawn anew for each batch."""

    def __init__(self, n_in: int, n_out: int, rho: float):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(n_out, n_in + 1) / n_in**0.5)
        self.rho = nn.Parameter(torch.full((n_out, n_in + 1), rho))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mu + F.softplus(self.rho) * torch.randn_like(self.mu)
        return F.linear(x, weight[:, :-1], weight[:, -1])

    def kl(self) -> Tensor:
        var = F.softplus(self.rho) ** 2
        return 0.5 * (var + self.mu**2 - 1 - var.log()).sum()


@healthy
def bayes_by_backprop(watch: Watch, *, share: float = 1.0, rho: float = -4.0) -> float:
    """Blundell et al. 2015 on a noisy curve; the share of variance missed by the mean of draws."""
    x = 4 * torch.rand(2500, 1) - 2
    y = torch.sin(3 * x) * x + 0.1 * torch.randn(2500, 1)
    net = nn.Sequential(Bayes(1, 40, rho), nn.Tanh(), Bayes(40, 40, rho), nn.Tanh())
    net.append(Bayes(40, 1, rho))
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    layers = [m for m in net if isinstance(m, Bayes)]

    def loss_of(_: int) -> Tensor:
        i = pick(2000, 100)
        nll = (net(x[i]) - y[i]).square().mean() / (2 * 0.1**2)
        return nll + share * sum(m.kl() for m in layers) / 2000

    fit(watch, net, opt, loss_of, 500)
    with torch.no_grad():
        mean = torch.stack([net(x[2000:]) for _ in range(30)]).mean(0)
    return float(F.mse_loss(mean, y[2000:]) / y.var())


@healthy
def wgan_ring(watch: Watch, *, tanh: bool = False, same_opt: bool = False) -> float:
    """WGAN-GP on a ring of eight blobs; the sliced Wasserstein distance to it."""

    def real(n: int) -> Tensor:
        angle = torch.randint(0, 8, (n,)) * math.pi / 4
        return 3 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2)

    def mlp(n_in: int, n_out: int) -> nn.Sequential:
        inner = nn.Linear(n_in, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2)
        return nn.Sequential(*inner, nn.Linear(96, n_out))

    g, d = mlp(4, 2), mlp(2, 1)
    if tanh:
        g.append(nn.Tanh())
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in (g, d))
    with watch({"g": g, "d": d}, [opt_g, opt_d]) as w:
        for step in range(900):
            a, b = real(100), g(torch.randn(100, 4))
            if step % 3:
                b, mix = b.detach(), torch.rand(100, 1)
                mid = (mix * a + (1 - mix) * b).requires_grad_()
                (slope,) = torch.autograd.grad(d(mid).sum(), mid, create_graph=True)
                loss = d(b).mean() - d(a).mean() + 5 * (slope.norm(dim=1) - 1).square().mean()
            else:
                loss = -d(b).mean()
            opt = opt_d if step % 3 or same_opt else opt_g
            opt_g.zero_grad()
            opt_d.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    way = F.normalize(torch.randn(2, 50), dim=0)
    with torch.no_grad():
        a, b = ((t @ way).sort(0).values for t in (real(1000), g(torch.randn(1000, 4))))
    return float((a - b).abs().mean())


@healthy
def maml_sines(watch: Watch, *, inner: float = 0.05, copied: bool = False) -> float:
    """MAML: one step on ten points of a new sine, then its other points; variance missed."""
    net = tanh_mlp(1, 40, 40, 1)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def adapted() -> Tensor:
        size, phase = 0.5 + 2 * torch.rand(1), math.pi * torch.rand(1)
        x = 10 * torch.rand(40, 1) - 5
        y = size * torch.sin(x + phase)
        own = dict(net.named_parameters())
        if copied:
            own = {k: p.detach().clone().requires_grad_() for k, p in own.items()}
        first = F.mse_loss(functional_call(net, own, (x[:20] / 2,)), y[:20])
        grads = torch.autograd.grad(first, list(own.values()), create_graph=True)
        new = {k: p - inner * g for (k, p), g in zip(own.items(), grads, strict=True)}
        return F.mse_loss(functional_call(net, new, (x[20:] / 2,)), y[20:])

    fit(watch, net, opt, lambda _: torch.stack([adapted() for _ in range(6)]).mean(), 350)
    return float(torch.stack([adapted().detach() for _ in range(100)]).mean())


class Springs(nn.Module):
    """An interaction network: a message for each pair of bodies, then their sum."""

    def __init__(self, eps: float):
        super().__init__()
        self.frame = nn.Linear(2, 2, bias=False)
        self.message, self.update = tanh_mlp(3, 64, 32), nn.Linear(32, 2)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.frame(x)
        apart = x[:, None] - x[:, :, None]
        far = (apart.square().sum(-1, keepdim=True) + self.eps).sqrt()
        return self.update(self.message(torch.cat([apart, far], -1)).sum(2))


@healthy
def springs_interaction(watch: Watch, *, eps: float = 1e-6, unit: float = 1.0) -> float:
    """Accelerations of five bodies on springs, AMSGrad; the share of variance missed."""
    x = torch.randn(1500, 5, 2)
    apart = x[:, None] - x[:, :, None]
    far = apart.norm(dim=-1, keepdim=True)
    y = unit * ((far - 1) * apart / (far + 1e-6)).sum(2)
    net = Springs(eps)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3, amsgrad=True)

    def loss_of(_: int) -> Tensor:
        i = pick(1200, 40)
        return F.mse_loss(net(x[i]), y[i])

    fit(watch, net, opt, loss_of, 300)
    with torch.no_grad():
        return float(F.mse_loss(net(x[1200:]), y[1200:]) / y.var())
