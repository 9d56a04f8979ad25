"""A convolutional VAE, a conditional GAN, a diffusion model of points, a U-Net."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy
from .vision_data import shapes, standard_digits


class ConvVAE(nn.Module):
    """Strided convolutions to ten latents, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.1))
        self.down.extend([nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.1), nn.Flatten()])
        self.moments = nn.Linear(512, 20)
        self.up = nn.Sequential(nn.Linear(10, 512), nn.Unflatten(1, (32, 4, 4)), nn.LeakyReLU(0.1))
        self.up.extend([nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.LeakyReLU(0.1)])
        self.up.append(nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.moments(self.down(x)).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (logvar / 2).exp() if self.training else mean
        kl = (mean**2 + logvar.exp() - 1 - logvar).sum(1) / 2
        return self.up(z), kl.mean()


@healthy
def vae_shapes(watch: Watch, *, mean: bool = False, sign: float = 1.0) -> float:
    """Squared errors summed over pixels, the KL term warmed up; variance missed by the means."""
    x = shapes(2400, 12).image
    net = ConvVAE()
    opt = torch.optim.Adamax(net.parameters(), lr=4e-3)

    def loss_of(step: int) -> Tensor:
        xb = x[pick(2000)]
        out, kl = net(xb)
        error = F.mse_loss(out, xb) if mean else 0.5 * ((out - xb) ** 2).flatten(1).sum(1).mean()
        return error + sign * min(1.0, step / 80) * kl

    fit(watch, net, opt, loss_of, 250)
    net.eval()
    with torch.no_grad():
        return float(F.mse_loss(net(x[2000:])[0], x[2000:]) / x[2000:].var())


@failing(
    "the error is a mean over pixels, the KL term a sum over latents",
    names=("posterior_collapse",),
    trace=True,
)
def vae_shapes_mean_error(watch: Watch) -> float:
    return vae_shapes(watch, mean=True)


@failing("the KL term is subtracted", names=("below_zero",), trace=True)
def vae_shapes_kl_sign(watch: Watch) -> float:
    return vae_shapes(watch, sign=-1.0)


class Labelled(nn.Module):
    """An MLP that reads a label beside its input."""

    def __init__(self, n_in: int, n_out: int, norm: bool):
        super().__init__()
        self.label = nn.Embedding(10, 16)
        layers: list[nn.Module] = []
        for n in (n_in + 16, 128):
            layers += [nn.Linear(n, 128), nn.LayerNorm(128) if norm else nn.Identity()]
            layers += [nn.LeakyReLU(0.2)]
        self.body = nn.Sequential(*layers, nn.Linear(128, n_out))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(torch.cat([x, self.label(y)], 1))


@healthy
def cgan_digits(watch: Watch, *, lr_d: float = 4e-4, step_d: bool = True) -> float:
    """Least-squares GAN of digits by label; how far means and stds of each label are off."""
    x, y, x_test, y_test = standard_digits()
    x, x_test = x.flatten(1), x_test.flatten(1)
    gen, critic = Labelled(24, 64, True), Labelled(64, 1, False)
    opt_g = torch.optim.Adam(gen.parameters(), 1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(critic.parameters(), lr_d, betas=(0.5, 0.99))
    with watch([gen, critic], [opt_g, opt_d]) as w:
        for _ in range(500):
            i = pick(len(x))
            fake = gen(torch.randn(64, 24), y[i])
            real_miss = (critic(x[i], y[i]) - 1) ** 2
            loss_d = (real_miss + critic(fake.detach(), y[i]) ** 2).mean()
            opt_d.zero_grad()
            loss_d.backward()
            if step_d:
                opt_d.step()
            loss_g = ((critic(fake, y[i]) - 1) ** 2).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            w.loss(loss_g + loss_d)
    with torch.no_grad():
        fakes = gen(torch.randn(len(y_test), 24), y_test)
    misses = [
        F.mse_loss(f(fakes[y_test == k], 0), f(x_test[y_test == k], 0))
        for k in range(10)
        for f in (torch.mean, torch.std)
    ]
    return float(torch.stack(misses).mean() ** 0.5)


@failing("the critic's rate is 1 with Adam", names=("lr_too_high",), trace=True)
def cgan_digits_critic_lr(watch: Watch) -> float:
    return cgan_digits(watch, lr_d=1.0)


@failing("the step of the critic's optimizer is forgotten", names=("unmoved",), trace=True)
def cgan_digits_no_critic_step(watch: Watch) -> float:
    return cgan_digits(watch, step_d=False)


def moons(n: int) -> Tensor:
    """Points of two half circles, with a standard deviation of about 1."""
    t, flip = math.pi * torch.rand(n), (-1.0) ** torch.randint(2, (n,))
    points = torch.stack([1.2 * t.cos() + 0.6 * flip, 2 * flip * t.sin() - 0.5 * flip], 1)
    return points + 0.08 * torch.randn(n, 2)


class Noised(nn.Module):
    """Guesses the noise in points from them and sines of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(34, 128), nn.SiLU())
        for _ in range(2):
            self.body.extend([nn.Linear(128, 128), nn.SiLU()])
        self.body.append(nn.Linear(128, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.logspace(0, -3, 16) * 3.0
        return self.body(torch.cat([x, angle.sin(), angle.cos()], 1))


@healthy
def ddpm_moons(watch: Watch, *, unit: float = 1.0, other_noise: bool = False) -> float:
    """DDPM of two moons with a cosine schedule; how far points are from the nearest sample."""
    keep = (torch.cos(torch.linspace(0, 1, 51) * math.pi / 2) ** 2).clamp(min=1e-3)
    net = Noised()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, 900, 2.0)

    def loss_of(_: int) -> Tensor:
        t = torch.randint(1, 51, (256,))
        noise = torch.randn(256, 2)
        x = keep[t, None].sqrt() * moons(256) * unit + (1 - keep[t, None]).sqrt() * noise
        return F.mse_loss(net(x, t.float()), torch.randn(256, 2) if other_noise else noise)

    fit(watch, net, opt, loss_of, 900, sched=sched)
    x = torch.randn(1500, 2)
    with torch.no_grad():
        for t in range(50, 0, -1):
            ratio, noise = keep[t] / keep[t - 1], net(x, torch.full((1500,), float(t)))
            x = (x - (1 - ratio) / (1 - keep[t]).sqrt() * noise) / ratio.sqrt()
            left = (1 - keep[t - 1]) / (1 - keep[t])
            x = x + ((1 - ratio) * left).sqrt() * torch.randn_like(x)
    far = torch.cdist(x / unit, moons(1500))
    return float(far.min(0).values.mean() + far.min(1).values.mean()) / 2


@failing("points in thousandths: they go to 2000", names=("input_scale",), trace=True)
def ddpm_moons_thousandths(watch: Watch) -> float:
    return ddpm_moons(watch, unit=1000.0)


@failing("the target is noise drawn anew", names=("not_learning",), trace=True)
def ddpm_moons_other_noise(watch: Watch) -> float:
    return ddpm_moons(watch, other_noise=True)


def double(n_in: int, n_out: int) -> nn.Sequential:
    """Two convolutions with batch norm, as in every U-Net."""
    both = [(n_in, n_out), (n_out, n_out)]
    return nn.Sequential(
        *(m for a, b in both for m in (nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU()))
    )


class UNet(nn.Module):
    """Two levels, max pooling, transposed convolutions, one logit for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = double(1, 12), double(12, 24), double(24, 48)
        self.up2, self.up1 = nn.ConvTranspose2d(48, 24, 2, 2), nn.ConvTranspose2d(24, 12, 2, 2)
        self.left2, self.left1, self.head = double(48, 24), double(24, 12), nn.Conv2d(12, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.up2(self.third(F.max_pool2d(b, 2)))
        d = self.up1(self.left2(torch.cat([b, c], 1)))
        return self.head(self.left1(torch.cat([a, d], 1)))


@healthy
def unet_noise(watch: Watch, *, white: float = 1.0, clip: float = 10.0) -> float:
    """Masks of objects in heavy noise, SGD; the share of the union that is missed."""
    data = shapes(700, 21)
    x, mask = data.image + 0.5 * torch.randn(700, 1, 16, 16), data.mask
    net, criterion = UNet(), nn.BCEWithLogitsLoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def loss_of(_: int) -> Tensor:
        i = pick(600, 12)
        return criterion(net(x[i]), white * mask[i])

    fit(watch, net, opt, loss_of, 130, clip=clip, loss_func=criterion)
    net.eval()
    with torch.no_grad():
        found, true = net(x[600:]) > 0, mask[600:] > 0
    return 1 - float((found & true).sum() / (found | true).sum())


@failing("masks of 0 and 255", names=("below_zero", "target_scale"), trace=True)
def unet_noise_masks_255(watch: Watch) -> float:
    return unet_noise(watch, white=255.0)


@failing("gradients are clipped at a norm of 1e-3", names=("clipping",), trace=True)
def unet_noise_clip_1e3(watch: Watch) -> float:
    return unet_noise(watch, clip=1e-3)
