"""Diffusion, flow matching and a normalising flow."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realistic.generative import distance
from realistic.trials import Watch, failing, healthy, update
from realistic.vision_data import batches, digits


def embedded(t: Tensor, dim: int = 32) -> Tensor:
    """Sines and cosines of the time, which runs from 0 to 1."""
    freqs = torch.exp(torch.linspace(0, math.log(1000), dim // 2))
    return torch.cat([(t[:, None] * freqs).sin(), (t[:, None] * freqs).cos()], 1)


class FiLMBlock(nn.Module):
    """A residual block whose group norm is scaled and shifted by the time."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, dim), nn.GroupNorm(4, dim)
        self.conv1, self.conv2 = nn.Conv2d(dim, dim, 3, 1, 1), nn.Conv2d(dim, dim, 3, 1, 1)
        self.time = nn.Linear(64, 2 * dim)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """Images in, images out."""
        scale, shift = self.time(emb)[:, :, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))


class Denoiser(nn.Module):
    """A small convolutional net that says what noise is in an image at a time."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.stem, self.down = nn.Conv2d(1, dim, 3, 1, 1), nn.Conv2d(dim, dim, 4, 2, 1)
        self.a, self.b, self.c = FiLMBlock(dim), FiLMBlock(dim), FiLMBlock(dim)
        self.up, self.out = nn.ConvTranspose2d(dim, dim, 4, 2, 1), nn.Conv2d(2 * dim, 1, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise in `x`."""
        emb = self.time(embedded(t))
        h = self.a(self.stem(x), emb)
        low = self.c(self.b(self.down(h), emb), emb)
        return self.out(F.silu(torch.cat([h, self.up(low)], 1)))


@healthy
def diffusion_ddpm(watch: Watch, *, white: float = 1.0, lr: float = 2e-3) -> float:
    """Noise is predicted under a linear schedule; an average of the weights is evaluated."""
    x, _, x_test, _ = digits()
    x, x_test = (x / 8 - 1) * white, (x_test / 8 - 1) * white
    alpha_bar = (1 - torch.linspace(1e-3, 0.15, 100)).cumprod(0)
    model = Denoiser()
    ema = deepcopy(model)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def loss_of(net: nn.Module, xb: Tensor) -> Tensor:
        t = torch.randint(0, 100, (len(xb),))
        a, eps = alpha_bar[t].view(-1, 1, 1, 1), torch.randn_like(xb)
        return F.mse_loss(net(a.sqrt() * xb + (1 - a).sqrt() * eps, t / 100), eps)

    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 250):
            loss = loss_of(model, x[idx])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            w.loss(loss.item())
            for a, b in zip(ema.parameters(), model.parameters(), strict=True):
                a.data.lerp_(b.data, 0.05)
    with torch.no_grad():
        return sum(loss_of(ema, x_test).item() for _ in range(5)) / 5


@failing("the images have values to 255", names=("input_scale",), trace=True)
def diffusion_ddpm_pixels_255(watch: Watch) -> float:
    """The noise disappears in them."""
    return diffusion_ddpm(watch, white=127.5)


class Velocity(nn.Module):
    """An MLP that gets the image and the time."""

    def __init__(self, n_hidden: int = 192, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.net = nn.Sequential(
            nn.Linear(65, n_hidden),
            nn.SiLU(),
            nn.Linear(n_hidden, n_hidden),
            nn.SiLU(),
            nn.Linear(n_hidden, n_hidden),
            nn.SiLU(),
            nn.Linear(n_hidden, 64),
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Where the image goes at this time."""
        return self.net(torch.cat([x, self.scale * t], 1))


@healthy
def diffusion_flow_matching(watch: Watch, *, scale: float = 1.0) -> float:
    """Rectified flow from noise to digits; the samples are compared with held-out digits."""
    x, _, x_test, _ = (t.flatten(1) / 8 - 1 if t.ndim == 4 else t for t in digits())
    model = Velocity(scale=scale)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
    with watch(model, opt) as w:
        for idx in batches(len(x), 128, 500):
            t, start = torch.rand(128, 1), torch.randn(128, 64)
            loss = F.mse_loss(model((1 - t) * start + t * x[idx], t), x[idx] - start)
            update(w, opt, loss, sched=sched)
    with torch.no_grad():
        z = torch.randn(400, 64)
        for i in range(40):
            z = z + model(z, torch.full((400, 1), i / 40)) / 40
        return distance(z, x_test)


@failing("the time goes in as 0 to 1000", names=("input_scale",), trace=True)
def diffusion_flow_time_1000(watch: Watch) -> float:
    """Beside pixels between -1 and 1."""
    return diffusion_flow_matching(watch, scale=1000.0)


class Coupling(nn.Module):
    """Half of the numbers scale and shift the other half."""

    def __init__(self, dim: int, odd: bool):
        super().__init__()
        self.odd, half = odd, dim // 2
        self.net = nn.Sequential(nn.Linear(half, 96), nn.ReLU(), nn.Linear(96, dim))
        nn.init.normal_(self.net[2].weight, std=0.01)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers changed, and the logarithm of the determinant."""
        a, b = x.chunk(2, 1)[:: -1 if self.odd else 1]
        s, t = self.net(a).chunk(2, 1)
        s = s.tanh()
        b = b * s.exp() + t
        return torch.cat([b, a] if self.odd else [a, b], 1), s.sum(1)


class RealNVP(nn.Module):
    """Six couplings."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(dim, i % 2 == 1) for i in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normal numbers, and the logarithm of the determinant."""
        total = torch.zeros(len(x))
        for step in self.steps:
            x, logdet = step(x)
            total = total + logdet
        return x, total


@healthy
def flow_realnvp(watch: Watch, *, sign: float = 1.0, lr: float = 1e-3) -> float:
    """The negative log-likelihood of noisy digits, which falls below zero."""
    x, _, x_test, _ = (t.flatten(1) / 16 if t.ndim == 4 else t for t in digits())
    model = RealNVP()
    opt = torch.optim.Adam(model.parameters(), lr=lr)

    def nll(xb: Tensor, sign: float = 1.0) -> Tensor:
        z, logdet = model(xb + torch.rand_like(xb) / 16)
        return (0.5 * z.pow(2).sum(1) + 32 * math.log(2 * math.pi) - sign * logdet).mean()

    with watch(model, opt) as w:
        for idx in batches(len(x), 100, 350):
            loss = nll(x[idx], sign)
            update(w, opt, loss, clip=(model, 50.0))
    with torch.no_grad():
        return nll(x_test).item()


@failing("the log-determinant has the wrong sign", names=("below_zero",), trace=True)
def flow_realnvp_sign(watch: Watch) -> float:
    """Everything is pressed into one point."""
    return flow_realnvp(watch, sign=-1.0)
