"""Images once more: dense, spiking and ConvNeXt nets, attacks, captions, few labels, key points."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trials import Watch, fit, healthy
from .vision_data import digits, error_rate, shapes, standard_digits


def pick(n: int, size: int = 64) -> Tensor:
    """Indices of one random batch."""
    return torch.randint(0, n, (size,))


class Dense(nn.Module):
    """BN, ReLU and a convolution, whose output is put beside its input."""

    def __init__(self, n_in: int, n_new: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(n_in)
        self.conv = nn.Conv2d(n_in, n_new, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


@healthy
def densenet_restarts(watch: Watch, *, lr: float = 0.1) -> float:
    """A DenseNet, SGD without weight decay, a cosine with warm restarts."""
    x, y, x_test, y_test = standard_digits()
    blocks = [Dense(16 + 12 * i, 12) for i in range(4)]
    net = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), *blocks, nn.ReLU(), nn.Flatten())
    net.append(nn.Linear(64 * 16, 10))
    opt = torch.optim.SGD(net.parameters(), lr, momentum=0.8)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 50, 2)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x))
        return F.cross_entropy(net(x[i]), y[i])

    fit(watch, net, opt, loss_of, 150, sched=sched)
    return error_rate(net, x_test, y_test)


class ConvNeXt(nn.Module):
    """A depthwise convolution, LayerNorm, an MLP, a scale for each channel, a branch that drops."""

    def __init__(self, dim: int, drop: float):
        super().__init__()
        self.depth, self.norm = nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.LayerNorm(dim)
        self.wide, self.back = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.scale, self.drop = nn.Parameter(torch.full((dim,), 0.1)), drop

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depth(x).permute(0, 2, 3, 1))
        h = (self.scale * self.back(F.gelu(self.wide(h)))).permute(0, 3, 1, 2)
        if self.training and self.drop:
            h = h * (torch.rand(len(x), 1, 1, 1) >= self.drop) / (1 - self.drop)
        return x + h


@healthy
def convnext_erasing(
    watch: Watch, *, erased: int = 3, wd: float = 0.05, drop: float = 0.1
) -> float:
    """AdamW, a linear fall of the rate, and squares of the images erased."""
    x, y, x_test, y_test = standard_digits()
    net = nn.Sequential(
        nn.Conv2d(1, 32, 2, 2), *(ConvNeXt(32, drop) for _ in range(3)), nn.Flatten(2)
    )
    net.extend([nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 10)])
    opt = torch.optim.AdamW(net.parameters(), 4e-3, weight_decay=wd)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, 250)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x))
        xb, (top, left) = x[i].clone(), torch.randint(0, 9 - erased, (2,)).tolist()
        xb[:, :, top : top + erased, left : left + erased] = 0
        return F.cross_entropy(net(xb), y[i])

    fit(watch, net, opt, loss_of, 250, sched=sched, clip=5.0)
    return error_rate(net, x_test, y_test)


@healthy
def shapes_multilabel(watch: Watch, *, act: nn.Module | None = None, roll: bool = False) -> float:
    """Which of three shapes a scene has, any number of them; group norm; 1 minus mean accuracy."""
    one = shapes(2600, 5)
    which = torch.randint(0, 2600, (2000, 3))
    on = torch.rand(2000, 3) < torch.tensor([1.0, 0.5, 0.3])
    x = (one.image[which] * on[..., None, None, None]).sum(1)
    y = ((F.one_hot(one.label[which], 3) * on[..., None]).sum(1) > 0).float()
    layers: list[nn.Module] = []
    for n_in, n_out in ((1, 16), (16, 32), (32, 64)):
        conv = nn.Conv2d(n_in, n_out, 3, 2 if n_in > 1 else 1, 1)
        layers += [conv, nn.GroupNorm(4, n_out), nn.SiLU()]
    head = [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 3), act or nn.Identity()]
    net, criterion = nn.Sequential(*layers, *head), nn.BCEWithLogitsLoss()
    opt = torch.optim.NAdam(net.parameters(), lr=2e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(1600)
        target = y[i.roll(1)] if roll else y[i]
        return criterion(net(x[i]), target)

    fit(watch, net, opt, loss_of, 250, loss_func=criterion)
    net.eval()
    with torch.no_grad():
        out = net(x[1600:])
    return float(((out > 0) != y[1600:].bool()).float().mean())


@healthy
def keypoint_heatmaps(
    watch: Watch, *, lr: float = 3e-3, shift: bool = False, bias: float = 0.0
) -> float:
    """Where a shape's centre is, as a heatmap with MSE; the mean distance in pixels."""
    data = shapes(1800, 9)
    x, centre = data.image, data.box[:, :2] * 16
    grid = torch.arange(16.0)
    near = ((grid[None, None] - centre[..., None]) ** 2) / 4
    heat = torch.exp(-near[:, 1, :, None] - near[:, 0, None, :])
    sizes = ((1, 16), (16, 24), (24, 24), (24, 16))
    net = nn.Sequential(
        *(m for a, b in sizes for m in (nn.Conv2d(a, b, 5, padding=2), nn.ReLU())),
        nn.Conv2d(16, 1, 1),
        nn.ReLU() if bias else nn.Identity(),
        nn.Flatten(1, 2),
    )
    net[8].bias.data += bias
    opt = torch.optim.Adam(net.parameters(), lr=lr)

    def loss_of(_: int) -> Tensor:
        i = pick(1500, 32)
        target = heat[i + 1 if shift else i]
        return 100 * F.mse_loss(net(x[i]), target)

    fit(watch, net, opt, loss_of, 200)
    with torch.no_grad():
        top = net(x[1500:]).flatten(1).argmax(1)
    found = torch.stack([top % 16, top // 16], 1)
    return float((found - centre[1500:]).norm(dim=1).mean())


@healthy
def adversarial_digits(watch: Watch, *, sign: float = 1.0, limit: float = 0.3) -> float:
    """Trained on images that one step of the gradient's sign made hard; the error under attack."""
    x, y, x_test, y_test = standard_digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU())
    net.append(nn.Linear(128, 10))
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)

    def attacked(xb: Tensor, yb: Tensor, step: float) -> Tensor:
        xb = xb.clone().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(net(xb), yb), xb)
        return (xb + step * grad.sign()).detach()

    def loss_of(_: int) -> Tensor:
        i = pick(len(x))
        return F.cross_entropy(net(attacked(x[i], y[i], sign * limit)), y[i])

    fit(watch, net, opt, loss_of, 300)
    return error_rate(net, attacked(x_test, y_test, 0.3), y_test)


class Clip(nn.Module):
    """A tower for images, one for captions, and a temperature that is learned."""

    def __init__(self, log_scale: float):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
        self.words = nn.EmbeddingBag(30, 48)
        self.text = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 32))
        self.log_scale = nn.Parameter(torch.tensor(log_scale))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        a, b = F.normalize(self.image(x), dim=1), F.normalize(self.text(self.words(t)), dim=1)
        return a @ b.T * self.log_scale.exp()


@healthy
def clip_digits(watch: Watch, *, log_scale: float = 2.0, own_order: bool = False) -> float:
    """Images against captions in both directions; digits then named by their captions."""
    x, y, x_test, y_test = standard_digits()

    def caption(label: Tensor) -> Tensor:
        return torch.stack([label, 10 + label % 2, 12 + label // 3], 1)

    net = Clip(log_scale)
    opt = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.1)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x), 32)
        j = i[torch.randperm(32)] if own_order else i
        noise = torch.randint(16, 30, (32, 2))
        logits = net(x[i], torch.cat([caption(y[j]), noise], 1))
        target = (y[j][:, None] == y[j]).float()
        target = target / target.sum(1, keepdim=True)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    fit(watch, net, opt, loss_of, 300)
    with torch.no_grad():
        found = net(x_test, caption(torch.arange(10))).argmax(1)
    return float((found != y_test).float().mean())


class Spike(torch.autograd.Function):
    """A step forwards; backwards the slope of a fast sigmoid (Zenke & Ganguli 2018), or none."""

    @staticmethod
    def forward(ctx: object, v: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(v)  # type: ignore[attr-defined]
        ctx.slope = slope  # type: ignore[attr-defined]
        return (v > 0).float()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        (v,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return ctx.slope * grad / (1 + 5 * v.abs()) ** 2, None  # type: ignore[attr-defined]


class Spiking(nn.Module):
    """Two layers that leak, integrate and fire for eight steps; the logits are potentials."""

    def __init__(self, threshold: float, slope: float):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 128), nn.Linear(128, 10)
        self.threshold, self.slope = threshold, slope

    def forward(self, x: Tensor) -> Tensor:
        v, total = torch.zeros(len(x), 128), torch.zeros(len(x), 10)
        for _ in range(8):
            v = 0.9 * v + self.hidden(x.flatten(1))
            fired = Spike.apply(v - self.threshold, self.slope)
            v, total = v - fired.detach() * self.threshold, total + self.out(fired) / 8
        return total


@healthy
def spiking_digits(watch: Watch, *, threshold: float = 1.0, slope: float = 1.0) -> float:
    """A spiking net with a surrogate gradient, Adamax."""
    x, y, x_test, y_test = standard_digits()
    net = Spiking(threshold, slope)
    opt = torch.optim.Adamax(net.parameters(), lr=5e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x))
        return F.cross_entropy(net(x[i]), y[i])

    fit(watch, net, opt, loss_of, 200)
    return error_rate(net, x_test, y_test)


@healthy
def fixmatch_digits(
    watch: Watch, *, first: int = 0, weight: float = 1.0, limit: float = 0.9
) -> float:
    """80 labels, and confident guesses for the rest as labels of noisier images."""
    x, y, x_test, y_test = digits()
    x, x_test = x / 8 - 1, x_test / 8 - 1
    few, y_few = x[:80], (y[:80] - first).clamp(min=0)
    net = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.LeakyReLU(0.1), nn.MaxPool2d(2))
    net.extend([nn.Conv2d(24, 48, 3, padding=1), nn.LeakyReLU(0.1), nn.Flatten()])
    net.extend([nn.Linear(768, 64), nn.LeakyReLU(0.1), nn.Linear(64, 10)])
    opt = torch.optim.SGD(net.parameters(), 0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def loss_of(_: int) -> Tensor:
        i, j = pick(80, 32), pick(len(x), 96)
        sure, guess = net(x[j]).detach().softmax(1).max(1)
        hard = net(x[j] + 0.5 * torch.randn(96, 1, 8, 8))
        rest = (F.cross_entropy(hard, guess, reduction="none") * (sure >= limit)).mean()
        return F.cross_entropy(net(few[i]), y_few[i]) + weight * rest

    fit(watch, net, opt, loss_of, 200)
    return error_rate(net, x_test, y_test)
