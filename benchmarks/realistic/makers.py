"""Small pictures made by a GAN and by diffusion, and told from each other by contrast."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import batches, digits, pick, shapes
from .trials import Watch, failing, fit, healthy, update


def far_apart(a: Tensor, b: Tensor) -> float:
    """The energy distance between two sets of pictures; 0 if they are of one kind."""
    a, b = a.flatten(1), b.flatten(1)
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


@healthy
def lsgan_digits(watch: Watch, *, lr: float = 2e-3, fake_label: float = 0.0) -> float:
    """Least squares instead of cross entropy, Adam with a first beta of 0.5 for both nets."""
    x, _, x_test, _ = digits()
    x, x_test = x / 8 - 1, x_test / 8 - 1
    maker = nn.Sequential(nn.Linear(24, 64 * 4, bias=False), nn.BatchNorm1d(256), nn.ReLU())
    maker.extend([nn.Unflatten(1, (64, 2, 2)), nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False)])
    maker.extend([nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh()])
    critic = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 3))
    critic.extend([nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(256, 1)])
    opt_g = torch.optim.Adam(maker.parameters(), lr=lr, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=lr, betas=(0.5, 0.999))
    with watch([maker, critic], [opt_g, opt_d]) as w:
        for i in batches(len(x), 64, 260):
            fake = maker(torch.randn(64, 24))
            loss_d = (critic(x[i]) - 1).pow(2).mean()
            loss_d = 0.5 * (loss_d + (critic(fake.detach()) - fake_label).pow(2).mean())
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            update(w, opt_g, 0.5 * (critic(fake) - 1).pow(2).mean())
    maker.eval()
    with torch.no_grad():
        return far_apart(maker(torch.randn(400, 24)), x_test)


@failing("a learning rate of 0.2 with Adam in both nets", names=("lr_too_high",), trace=True)
def lsgan_digits_lr_x100(watch: Watch) -> float:
    return lsgan_digits(watch, lr=0.2)


@failing(
    "fakes are labelled 1 too", names=("vanishing", "zero_gradient", "mode_collapse"), trace=True
)
def lsgan_digits_all_real(watch: Watch) -> float:
    return lsgan_digits(watch, fake_label=1.0)


class Denoiser(nn.Module):
    """Residual convolutions over a noisy picture, each told the time by scale and shift."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3, 1, 1), nn.Conv2d(width, 1, 3, 1, 1)
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU())
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(4))
        self.tells = nn.ModuleList(nn.Linear(64, 2 * width) for _ in range(4))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None] * torch.logspace(0, 2, 8)
        time, h = self.time(torch.cat([waves.sin(), waves.cos()], 1)), self.first(x)
        for norm, conv, tell in zip(self.norms, self.convs, self.tells, strict=True):
            scale, shift = tell(time)[..., None, None].chunk(2, 1)
            h = h + conv(F.silu(norm(h) * (1 + scale) + shift))
        return self.last(F.silu(h))


def velocity(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the net says of pictures at random times, and the v that it should say."""
    t, noise = torch.rand(len(x)), torch.randn_like(x)
    a, s = ((t * math.pi / 2).cos().view(-1, 1, 1, 1), (t * math.pi / 2).sin().view(-1, 1, 1, 1))
    return net(a * x + s * noise, t), a * noise - s * x


@healthy
def v_diffusion(watch: Watch, *, per_step: bool = False, std: float = 0.0) -> float:
    """Diffusion by v and a cosine; the rate falls each epoch; the share of v's variance missed."""
    x, _, x_test, _ = digits()
    x, x_test, net = x / 8 - 1, x_test / 8 - 1, Denoiser()
    for p in net.parameters() if std else ():
        nn.init.normal_(p, 0, std)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    with watch(net, opt) as w:
        for _ in range(11):
            for i in torch.randperm(len(x)).split(64)[:-1]:
                update(w, opt, F.mse_loss(*velocity(net, x[i])), sched=sched if per_step else None)
            if not per_step:
                sched.step()
    with torch.no_grad():
        guess, true = velocity(net, x_test.repeat(3, 1, 1, 1))
    return float(F.mse_loss(guess, true) / true.var())


@failing("ExponentialLR(0.8) of epochs steps at each batch", names=("lr_too_low",), trace=True)
def v_diffusion_rate_per_step(watch: Watch) -> float:
    return v_diffusion(watch, per_step=True)


@failing("normal_() everywhere", names=("bad_init", "initial_loss", "exploding"), trace=True)
def v_diffusion_normal_init(watch: Watch) -> float:
    return v_diffusion(watch, std=1.0)


def seen(x: Tensor) -> Tensor:
    """One view of each picture: mirrored, brighter or darker, with new noise."""
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x, x.flip(-1))
    return x * (0.7 + 0.6 * torch.rand(len(x), 1, 1, 1)) + 0.3 * torch.randn_like(x)


@healthy
def moco_shapes(watch: Watch, *, normalize: bool = True, teach_keys: bool = False) -> float:
    """Momentum contrast with a queue of 512 keys; views whose own partner is not the nearest."""
    x = shapes(1500, 61).image
    x = (x - x.mean()) / x.std()
    net = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.GroupNorm(4, 24), nn.ReLU())
    net.extend([nn.Conv2d(24, 48, 3, 2, 1), nn.GroupNorm(4, 48), nn.ReLU(), nn.Flatten()])
    net.extend([nn.Linear(768, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32)])
    slow = copy.deepcopy(net)
    opt = torch.optim.SGD((slow if teach_keys else net).parameters(), lr=0.06, momentum=0.9)

    def embed(model: nn.Module, images: Tensor) -> Tensor:
        return F.normalize(model(images), dim=1) if normalize else model(images)

    queue = embed(slow, seen(x[:512])).detach()

    def loss_of(_: int) -> Tensor:
        nonlocal queue
        batch = x[pick(1200, 64)]
        query = embed(net, seen(batch))
        with torch.no_grad():
            keys = embed(slow, seen(batch))
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ queue.T], 1) / 0.1
        queue = torch.cat([queue[64:], keys])
        return F.cross_entropy(logits, torch.zeros(64, dtype=torch.long))

    @torch.no_grad()
    def follow() -> None:
        for old, new in zip(slow.parameters(), net.parameters(), strict=True):
            old.lerp_(new, 0.03)

    fit(watch, net, opt, loss_of, 320, after_step=follow)
    with torch.no_grad():
        a, b = (F.normalize(net(seen(x[1200:])), dim=1) for _ in "ab")
    return 1 - float(((a @ b.T).argmax(1) == torch.arange(300)).float().mean())


@failing("vectors not normalised", names=("initial_loss", "exploding", "lr_too_high"), trace=True)
def moco_shapes_not_normalized(watch: Watch) -> float:
    return moco_shapes(watch, normalize=False)


@failing("the optimizer has the slow copy's parameters", names=("unmoved",), trace=True)
def moco_shapes_other_net(watch: Watch) -> float:
    return moco_shapes(watch, teach_keys=True)
