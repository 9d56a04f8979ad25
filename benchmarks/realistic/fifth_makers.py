"""Waves by a GAN and by diffusion, VICReg, a student taught in float16, a GCN of many graphs."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy, update
from .vision_data import digits, error_rate, standard_digits


def waves(n: int) -> Tensor:
    """(n, 32) sines of two, three or four periods, which begin anywhere."""
    t, periods = torch.arange(32) / 32, torch.randint(2, 5, (n, 1))
    return (2 * math.pi * (periods * t + torch.rand(n, 1))).sin() + 0.05 * torch.randn(n, 32)


def unlike_waves(made: Tensor) -> float:
    """How far waves are from the nearest that was made, and those made from the nearest wave."""
    far = torch.cdist(made.detach().nan_to_num(9.0).clamp(-9, 9), waves(1500))
    return float(far.min(0).values.mean() + far.min(1).values.mean()) / 2


@healthy
def waves_gan(watch: Watch, *, unit: float = 1.0, zeroed: bool = True) -> float:
    """A GAN of convolutions with two watches and two Adams; how unlike waves its samples are."""
    gen = nn.Sequential(nn.Linear(12, 384), nn.Unflatten(1, (48, 8)), nn.BatchNorm1d(48), nn.ReLU())
    gen.extend([nn.ConvTranspose1d(48, 32, 4, 2, 1), nn.BatchNorm1d(32), nn.ReLU()])
    gen.extend([nn.ConvTranspose1d(32, 1, 4, 2, 1), nn.Flatten()])
    critic = nn.Sequential(nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 32, 5, 2, 2), nn.LeakyReLU(0.2))
    critic.extend([nn.Conv1d(32, 64, 5, 2, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(512, 1)])
    opt_g, opt_d = (torch.optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.9)) for m in (gen, critic))
    bce = F.binary_cross_entropy_with_logits
    with watch(gen, opt_g) as of_gen, watch(critic, opt_d) as of_critic:
        for _ in range(500):
            fake, real = gen(torch.randn(64, 12)), critic(unit * waves(64))
            wrong = critic(fake.detach())
            loss_d = bce(real, torch.ones_like(real)) + bce(wrong, torch.zeros_like(wrong))
            if zeroed:
                opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            of_critic.loss(loss_d)
            guess = critic(fake)
            update(of_gen, opt_g, bce(guess, torch.ones_like(guess)))
    return unlike_waves(gen.eval()(torch.randn(1500, 12)) / unit)


@failing("sounds of 16 bits as they are, to 10000", names=("input_scale",), trace=True)
def waves_gan_16_bits(watch: Watch) -> float:
    return waves_gan(watch, unit=1e4)


@failing("the critic's zero_grad is forgotten", names=("grads_pile_up",), trace=True)
def waves_gan_critic_piles_up(watch: Watch) -> float:
    return waves_gan(watch, zeroed=False)


class Cleaner(nn.Module):
    """Guesses what is behind noise of any strength, by residual layers."""

    def __init__(self, scaled: bool):
        super().__init__()
        self.first, self.last, self.scaled = nn.Linear(32, 160), nn.Linear(160, 32), scaled
        self.how = nn.ModuleList(nn.Linear(24, 160) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(3))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        angle = sigma.log() * torch.logspace(-1, 1, 12)
        how = torch.cat([angle.sin(), angle.cos()], 1)
        h = self.first(x / (sigma**2 + 0.5).sqrt() if self.scaled else x)
        for layer, strength in zip(self.layers, self.how, strict=True):
            h = h + layer(F.silu(h + strength(how)))
        return self.last(F.silu(h))


@healthy
def waves_denoiser(watch: Watch, *, score: bool = False, scaled: bool = True) -> float:
    """Diffusion by strengths from 0.02 to 40, NAdam, an average of weights; as for the GAN."""
    net = Cleaner(scaled)
    opt = torch.optim.NAdam(net.parameters(), lr=2e-3)
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.98))

    def loss_of(_: int) -> Tensor:
        sigma, noise, x = 0.02 * 2000 ** torch.rand(192, 1), torch.randn(192, 32), waves(192)
        return F.mse_loss(net(x + sigma * noise, sigma), -noise / sigma if score else x)

    fit(watch, net, opt, loss_of, 600, after_step=lambda: mean.update_parameters(net))
    strengths = 0.02 * 2000 ** torch.linspace(1, 0, 40)
    x = strengths[0] * torch.randn(1500, 32)
    with torch.no_grad():
        for sigma, then in zip(strengths, [*strengths[1:], torch.tensor(0.0)], strict=True):
            out = mean(x, sigma.expand(1500, 1))
            x = x + (then - sigma) * (-sigma * out if score else (x - out) / sigma)
    return unlike_waves(x)


@failing("noise / sigma as target, unweighted", names=("target_scale", "initial_loss"), trace=True)
def waves_denoiser_unweighted_score(watch: Watch) -> float:
    return waves_denoiser(watch, score=True)


@failing("noisy inputs as they are, with a std to 40", names=("input_scale",), trace=True)
def waves_denoiser_raw_inputs(watch: Watch) -> float:
    return waves_denoiser(watch, scaled=False)


@healthy
def digits_vicreg(watch: Watch, *, variance: float = 25.0, lr: float = 0.02) -> float:
    """VICReg with momentum; the error of a ridge regression on embeddings."""
    x, y, x_test, y_test = standard_digits()
    net = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten())
    net.extend([nn.Linear(384, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 48)])
    opt = torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=1e-4)

    def view(images: Tensor) -> Tensor:
        moved = images.roll(torch.randint(-1, 2, (2,)).tolist(), (2, 3))
        return moved + 0.5 * torch.randn_like(moved)

    def apart(z: Tensor) -> Tensor:
        z = z - z.mean(0)
        together = (z.T @ z / (len(z) - 1)).fill_diagonal_(0)
        near = F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        return variance * near + together.square().sum() / 48

    def loss_of(_: int) -> Tensor:
        i = pick(len(x), 128)
        a, b = net(view(x[i])), net(view(x[i]))
        return 25 * F.mse_loss(a, b) + apart(a) + apart(b)

    fit(watch, net, opt, loss_of, 200)
    net.eval()
    with torch.no_grad():
        z, z_test = (F.pad(net(v).nan_to_num(), (0, 1), value=1.0) for v in (x, x_test))
    fitted = torch.linalg.solve(z.T @ z + torch.eye(49), z.T @ F.one_hot(y).float())
    return float(((z_test @ fitted).argmax(1) != y_test).float().mean())


@failing("the term of the variance is left out", names=("representation_collapse",), trace=True)
def digits_vicreg_no_variance(watch: Watch) -> float:
    return digits_vicreg(watch, variance=0.0)


@failing("the rate for batches of 4096 that a paper gives: 4.8", names=("lr_too_high",), trace=True)
def digits_vicreg_lr_of_4096(watch: Watch) -> float:
    return digits_vicreg(watch, lr=4.8)


@healthy
def digits_half_student(watch: Watch, *, squared: bool = True, unit: float = 1.0) -> float:
    """Distillation in autocast of float16 with a GradScaler; the error of the student."""
    x, y, x_test, y_test = digits()
    x, x_test = x.flatten(1) / 16, x_test.flatten(1) / 16
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for i in torch.cat([torch.randperm(1400) for _ in range(12)]).split(70):
        opt.zero_grad()
        F.cross_entropy(teacher(x[i]), y[i]).backward()
        opt.step()
    soft = (teacher(x) / 8).softmax(1).detach()
    layers = [m for n in (64, 48, 48) for m in (nn.Linear(n, 48), nn.GELU())]
    student, scaler = nn.Sequential(*layers, nn.Linear(48, 10)), torch.GradScaler("cpu", 2.0**12)
    opt = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    with watch(student, opt) as w:
        for _ in range(450):
            i = pick(1400)
            with torch.autocast("cpu", torch.float16):
                out = student(unit * x[i])
            loss = F.kl_div((out.float() / 8).log_softmax(1), soft[i], reduction="batchmean")
            loss = loss * 64 if squared else loss
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            w.loss(loss)
    return error_rate(student, unit * x_test, y_test)


@failing("the temperature squared, 64, is left out", names=("lr_too_low",), trace=True)
def digits_half_student_no_square(watch: Watch) -> float:
    return digits_half_student(watch, squared=False)


@failing("16-bit images: to 65535", names=("fp16_range", "non_finite", "input_scale"), trace=True)
def digits_half_student_16_bits(watch: Watch) -> float:
    return digits_half_student(watch, unit=65535.0)


class Crowd(nn.Module):
    """Three graph convolutions over lists of edges, with shortcuts."""

    def __init__(self, clamped: bool, uniform: bool):
        super().__init__()
        self.first, self.head, self.clamped = nn.Linear(4, 48), nn.Linear(48, 1), clamped
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        for layer in self.layers if uniform else ():
            nn.init.uniform_(layer.weight)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = torch.bincount(edges[1], minlength=len(x)).float()[:, None]
        scale = (degree.clamp(min=1) if self.clamped else degree) ** -0.5
        h = self.first(x)
        for layer in self.layers:
            near = torch.zeros_like(h).index_add(0, edges[1], (h * scale)[edges[0]])
            h = h + F.elu(layer(near * scale))
        return self.head(h).squeeze(1)


@healthy
def crowd_gcn(watch: Watch, *, clamped: bool = True, uniform: bool = False) -> float:
    """Many small graphs at once; whose second neighbours agree with them; the share it misses."""
    net = Crowd(clamped, uniform)
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def graphs(n: int) -> tuple[Tensor, Tensor, Tensor]:
        at = torch.rand(n, 24, 2)
        near = (torch.cdist(at, at) < 0.28) & ~torch.eye(24, dtype=torch.bool)
        k, i, j = near.nonzero().T
        x = torch.randn(n, 24, 4)
        a = near / near.sum(2, keepdim=True).clamp(min=1)
        y = (a @ (a @ x[..., :1]))[..., 0] * x[..., 1] > 0
        return x.flatten(0, 1), torch.stack([24 * k + i, 24 * k + j]), y.flatten().float()

    def loss_of(_: int) -> Tensor:
        x, edges, y = graphs(16)
        return criterion(net(x, edges), y)

    fit(watch, net, opt, loss_of, 900, loss_func=criterion)
    x, edges, y = graphs(200)
    with torch.no_grad():
        return float(((net(x, edges) > 0) != (y > 0)).float().mean())


@failing("degree ** -0.5 is infinite for who has no neighbours", names=("non_finite",), trace=True)
def crowd_gcn_isolated(watch: Watch) -> float:
    return crowd_gcn(watch, clamped=False)


@failing("weights by init.uniform_", names=("bad_init", "initial_loss", "exploding"), trace=True)
def crowd_gcn_uniform(watch: Watch) -> float:
    return crowd_gcn(watch, uniform=True)
