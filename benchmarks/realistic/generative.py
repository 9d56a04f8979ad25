"""Autoencoders and adversarial nets that train well."""

from __future__ import annotations

from itertools import islice, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from realistic.trials import Watch, healthy, update
from realistic.vision_data import batches, digits


class VAE(nn.Module):
    """An encoder of means and log-variances, and a decoder that gives logits of pixels."""

    def __init__(self, n_latent: int = 8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, n_latent), nn.Linear(64, n_latent)
        self.decoder = nn.Sequential(nn.Linear(n_latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def spread(self, h: Tensor) -> Tensor:
        """The log-variance of the latents."""
        return self.logvar(h)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, and the mean and log-variance of the latents."""
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.spread(h)
        z = mu + (0.5 * logvar).exp() * torch.randn_like(mu) if self.training else mu
        return self.decoder(z), mu, logvar


@healthy
def generative_vae(
    watch: Watch, *, model: VAE | None = None, beta: float = 1.0, white: float = 16.0
) -> float:
    """The evidence bound of grey digits, per image, with Adam; how well held-out ones return."""
    x, _, x_test, _ = (t.flatten(1) / 16 if t.ndim == 4 else t for t in digits())
    model = model or VAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 400):
            xb = x[idx] * 16 / white
            logits, mu, logvar = model(xb)
            recon = F.binary_cross_entropy_with_logits(logits, xb, reduction="sum") / len(xb)
            kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
            loss = recon + beta * kl
            update(w, opt, loss)
    model.eval()
    with torch.no_grad():
        return F.mse_loss(model(x_test * 16 / white)[0].sigmoid(), x_test).item()


class Quantizer(nn.Module):
    """Gives for each vector the nearest of a codebook, and what that costs."""

    def __init__(self, n_codes: int, dim: int, bound: float):
        super().__init__()
        self.codes = nn.Embedding(n_codes, dim)
        nn.init.uniform_(self.codes.weight, -bound, bound)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Quantised vectors with the gradient of what came in, and the two losses' sum."""
        flat = z.permute(0, 2, 3, 1)
        idx = torch.cdist(flat.reshape(-1, flat.shape[-1]), self.codes.weight).argmin(1)
        q = self.codes(idx).view(flat.shape).permute(0, 3, 1, 2)
        cost = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), cost


class VQVAE(nn.Module):
    """A convolutional autoencoder with sixteen quantised vectors for each digit."""

    def __init__(self, n_codes: int = 64, bound: float = 1.0):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU()
        )
        self.to_code = nn.Conv2d(32, 8, 1)
        self.quantizer = Quantizer(n_codes, 8, bound)
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The picture again, and the cost of the codes."""
        q, cost = self.quantizer(self.to_code(self.encoder(x)))
        return self.decoder(q), cost


@healthy
def generative_vqvae(watch: Watch, *, model: VQVAE | None = None) -> float:
    """Reconstruction, codebook and commitment with Adam."""
    x, _, x_test, _ = digits()
    x, x_test = x / 8 - 1, x_test / 8 - 1
    model = model or VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 300):
            out, cost = model(x[idx])
            loss = F.mse_loss(out, x[idx]) + cost
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
    with torch.no_grad():
        return F.mse_loss(model.eval()(x_test)[0], x_test).item()


@healthy
def generative_denoising_autoencoder(watch: Watch, *, white: float = 1.0) -> float:
    """Takes noise from digits; AdamW, a cosine with warm restarts, gradients of two batches."""
    x, _, x_test, _ = (t.flatten(1) / 16 if t.ndim == 4 else t for t in digits())
    sizes = [64, 128, 32, 128, 64]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.SiLU())]
    model = nn.Sequential(*layers[:-1])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 60, 2)
    criterion = nn.MSELoss()
    with watch(model, opt, loss_func=criterion):
        for i, idx in enumerate(batches(len(x), 32, 600)):
            noisy = x[idx] + 0.3 * torch.randn_like(x[idx])
            (criterion(model(noisy), white * x[idx]) / 2).backward()
            if i % 2:
                opt.step()
                opt.zero_grad()
                sched.step()
    with torch.no_grad():
        noisy = x_test + 0.3 * torch.randn_like(x_test)
        return F.mse_loss(model(noisy) / white, x_test).item()


class Generator(nn.Module):
    """From 16 numbers to a digit, as in DCGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64 * 4)
        self.body = nn.Sequential(
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Images between -1 and 1."""
        return self.body(self.first(z).view(-1, 64, 2, 2))


def critic(norm: bool) -> nn.Sequential:
    """Says how real an image is; with spectral norm or with dropout."""
    wrap = spectral_norm if norm else nn.Identity()
    return nn.Sequential(
        wrap(nn.Conv2d(1, 32, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Identity() if norm else nn.Dropout(0.2),
        wrap(nn.Conv2d(32, 64, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        wrap(nn.Linear(256, 1)),
    )


def distance(fake: Tensor, real: Tensor) -> float:
    """Fréchet's distance of 20 principal components, which sees missing kinds of images."""
    fake, real = fake.flatten(1), real.flatten(1)
    axes = torch.linalg.eigh(torch.cov(real.T))[1][:, -20:]
    fake, real = fake @ axes, real @ axes
    a, b = torch.cov(fake.T), torch.cov(real.T)
    root = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
    gap = (fake.mean(0) - real.mean(0)).pow(2).sum() + a.trace() + b.trace() - 2 * root
    return gap.item()


def noise(n: int) -> Tensor:
    """What the generator starts from."""
    return torch.randn(n, 16)


@healthy
def gan_dcgan(
    watch: Watch,
    *,
    lr_d: float = 1e-3,
    lr_g: float = 2e-4,
    noise_of: object = noise,
    cut: bool = False,
) -> float:
    """Cross entropy of logits, two Adams with beta1 of 0.5, the fakes detached for D."""
    x, _, x_test, _ = digits()
    x, x_test = x / 8 - 1, x_test / 8 - 1
    gen, dis = Generator(), critic(norm=False)
    opt_g = torch.optim.Adam(gen.parameters(), lr_g, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(dis.parameters(), lr_d, betas=(0.5, 0.999))
    bce, one, zero = nn.BCEWithLogitsLoss(), torch.ones(64, 1), torch.zeros(64, 1)
    with watch(gen, opt_g) as wg, watch(dis, opt_d) as wd:
        for idx in batches(len(x), 64, 350):
            fake = gen(noise_of(64))  # type: ignore[operator]
            loss_d = bce(dis(x[idx]), 0.9 * one) + bce(dis(fake.detach()), zero)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            wd.loss(loss_d)
            loss_g = bce(dis(fake.detach() if cut else fake), one)
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            wg.loss(loss_g)
    with torch.no_grad():
        return distance(gen(noise_of(400)), x_test)  # type: ignore[operator]


@healthy
def gan_hinge_spectral(watch: Watch, *, lr_d: float = 1e-3, norm: bool = True) -> float:
    """Hinge losses, spectral norm, two critic steps for each of the generator's."""
    x, _, x_test, _ = digits()
    x, x_test = x / 8 - 1, x_test / 8 - 1
    gen, dis = Generator(), critic(norm)
    opt_g = torch.optim.Adam(gen.parameters(), 1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(dis.parameters(), lr_d, betas=(0.0, 0.9))
    with watch([gen, dis], [opt_g, opt_d]) as w:
        stream = batches(len(x), 64, 600)
        while pair := list(islice(stream, 2)):
            for idx in pair:
                real, fake = dis(x[idx]), dis(gen(noise(64)).detach())
                loss_d = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
                opt_d.zero_grad()
                loss_d.backward()
                opt_d.step()
            loss_g = -dis(gen(noise(64))).mean()
            update(w, opt_g, loss_g)
    with torch.no_grad():
        return distance(gen(noise(400)), x_test)
