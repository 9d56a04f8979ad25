"""Gratings, segmentation, a grid of boxes, super-resolution, an autoencoder, dials."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fresh_images import pick
from .trials import Watch, failing, fit, healthy, update
from .vision_data import batches, digits, error_rate, shapes


def gratings(n: int) -> tuple[Tensor, Tensor]:
    """Photos (N, 3, 16, 16) of stripes, values 0 to 255, and which of twelve ways they run."""
    y, place = torch.randint(12, (n,)), torch.arange(16.0)
    angle = (y * math.pi / 12 + 0.05 * torch.randn(n))[:, None, None]
    along = place[:, None] * angle.sin() + place * angle.cos()
    wave = ((0.7 + 0.5 * torch.rand(n, 1, 1)) * along + 6.3 * torch.rand(n, 1, 1)).sin()[:, None]
    photo = 128 + 50 * wave * torch.randn(n, 3, 1, 1) + 40 * torch.randn(n, 3, 16, 16)
    return photo.clamp(0, 255), y


@healthy
def vgg_gratings(watch: Watch, *, zero: bool = True, softmax: bool = False) -> float:
    """A small VGG with batch norm; SGD, and the rate falls after given epochs."""
    x, y = gratings(2000)
    x = (x - x.mean((0, 2, 3), True)) / x.std((0, 2, 3), keepdim=True)
    net = nn.Sequential()
    for a, b in ((3, 16), (16, 16), (16, 32), (32, 32)):
        net.extend([nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()])
        if a == b:
            net.append(nn.MaxPool2d(2))
    net.extend([nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 12)])
    if softmax:
        net.append(nn.Softmax(1))
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), 0.05, 0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [5, 7], 0.1)
    with watch(net, opt, loss_func=criterion):
        for _ in range(8):
            for i in batches(1500, 64, 23):
                if zero:
                    opt.zero_grad()
                criterion(net(x[i]), y[i]).backward()
                opt.step()
            sched.step()
    return error_rate(net, x[1500:], y[1500:])


@failing("zero_grad is forgotten", names=("grads_pile_up",), trace=True)
def vgg_gratings_no_zero_grad(watch: Watch) -> float:
    return vgg_gratings(watch, zero=False)


@failing("a softmax at the end, before CrossEntropyLoss", names=("probabilities",), trace=True)
def vgg_gratings_softmax(watch: Watch) -> float:
    return vgg_gratings(watch, softmax=True)


class Dilated(nn.Module):
    """Three branches of dilated convolutions beside each other, and four scores per pixel."""

    def __init__(self, keep: type[nn.ModuleList] | type[list]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.InstanceNorm2d(16), nn.ELU())
        self.branches = keep(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=d, dilation=d),
                nn.ELU(),
                nn.Conv2d(16, 12, 3, padding=d, dilation=d),
                nn.ELU(),
            )
            for d in (1, 2, 4)
        )
        self.head = nn.Conv2d(36, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(torch.cat([branch(h) for branch in self.branches], 1))


@healthy
def dilated_masks(
    watch: Watch, *, keep: type[nn.ModuleList] | type[list] = nn.ModuleList, dim: int = 1
) -> float:
    """What each pixel belongs to, a polynomial fall of the rate; 1 minus the mean of the IoU."""
    data = shapes(900, 52)
    x, y = data.image, (data.mask[:, 0] * (data.label[:, None, None] + 1)).long()
    net, criterion = Dilated(keep), nn.NLLLoss(torch.tensor([0.3, 1.0, 1.0, 1.0]))
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, 240, 0.9)

    def loss_of(_: int) -> Tensor:
        i = pick(700, 24)
        return criterion(F.log_softmax(net(x[i]), dim), y[i])

    fit(watch, net, opt, loss_of, 240, sched=sched)
    with torch.no_grad():
        guess, true = (F.one_hot(t, 4).bool() for t in (net(x[700:]).argmax(1), y[700:]))
    return 1 - float(((guess & true).sum((0, 1, 2)) / (guess | true).sum((0, 1, 2))).mean())


@failing("the branches are in a plain list", names=("unregistered",), trace=True)
def dilated_masks_plain_list(watch: Watch) -> float:
    return dilated_masks(watch, keep=list)


@failing("log_softmax over columns of pixels, not classes", names=("softmax_dim",), trace=True)
def dilated_masks_last_dim(watch: Watch) -> float:
    return dilated_masks(watch, dim=-1)


def scenes(n: int) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 24, 24) of boxes and discs; for 4×4 cells: there?, round?, x, y, w, h."""
    image, cells = 0.2 * torch.randn(n, 1, 24, 24), torch.zeros(n, 6, 16)
    place, where = torch.arange(24.0), torch.rand(n, 16).argsort(1)
    for k in range(3):
        there, kind = (torch.rand(n) < 1 / (k + 1)).float(), torch.randint(2, (n,)).float()
        dx, dy = 0.15 + 0.7 * torch.rand(2, n)
        w = 4 + 6 * torch.rand(n)
        h = torch.where(kind == 1, w, 4 + 6 * torch.rand(n))
        cell = where[:, k]
        x, y = 6 * (cell % 4 + dx), 6 * (cell // 4 + dy)
        u = ((place - x[:, None]) / w[:, None] * 2)[:, None, :]
        v = ((place - y[:, None]) / h[:, None] * 2)[:, :, None]
        disc, box = u**2 + v**2 < 1, (u.abs() < 1) & (v.abs() < 1)
        inside = torch.where(kind[:, None, None] == 1, disc, box)
        image[:, 0] += there[:, None, None] * inside * (0.8 + 0.7 * torch.rand(n, 1, 1))
        cells[torch.arange(n), :, cell] = torch.stack([there, kind, dx, dy, w / 12, h / 12], 1)
    return image, cells.view(n, 6, 4, 4)


def matches(out: Tensor, cells: Tensor) -> float:
    """1 minus the F1 score: the cell is found, the class is right, sizes and place about so."""
    there, found = cells[:, 0] > 0, out[:, 0] > 0
    near = (out[:, 2:4].sigmoid() - cells[:, 2:4]).abs().amax(1) < 0.35
    size = (out[:, 4:] ** 2 - cells[:, 4:]).abs().amax(1) < 0.25
    good = there & found & near & size & ((out[:, 1] > 0) == (cells[:, 1] > 0))
    return 1 - 2 * float(good.sum()) / float(there.sum() + found.sum())


@healthy
def yolo_grid(watch: Watch, *, lr: float = 3e-3, root: bool = False) -> float:
    """A box for each cell of a grid as in YOLO: roots of sizes, and most cells empty."""
    x, cells = scenes(3400)
    net = nn.Sequential()
    for a, b, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 3), (48, 48, 1)):
        net.append(nn.Conv2d(a, b, 3, stride, 1, bias=False))
        net.extend([nn.BatchNorm2d(b), nn.LeakyReLU(0.1)])
    net.append(nn.Conv2d(48, 6, 1))
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.05, 370)
    bce = F.binary_cross_entropy_with_logits
    with watch(net, opt) as w:
        for i in batches(3000, 32, 370):
            out, true = net(x[i]), cells[i]
            there = true[:, 0] > 0
            weight = torch.where(there, 1.0, 0.5)
            size = out[:, 4:].sqrt() if root else out[:, 4:]
            off = (out[:, 2:4].sigmoid() - true[:, 2:4]) ** 2 + (size - true[:, 4:].sqrt()) ** 2
            loss = (bce(out[:, 0], true[:, 0], weight, reduction="sum")) / len(i)
            loss = loss + bce(out[:, 1][there], true[:, 1][there], reduction="sum") / len(i)
            loss = loss + 5 * off.sum(1)[there].sum() / len(i)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            w.loss(loss.item())
    net.eval()
    with torch.no_grad():
        out = net(x[3000:])
    out[:, 4:] = out[:, 4:].clamp(min=0).sqrt() if root else out[:, 4:]
    return matches(out, cells[3000:])


@failing("the root of sizes that the net may guess below 0", names=("non_finite",), trace=True)
def yolo_grid_root(watch: Watch) -> float:
    return yolo_grid(watch, root=True)


@failing("a learning rate of 1 with Adam", names=("lr_too_high",), trace=True)
def yolo_grid_lr_1(watch: Watch) -> float:
    return yolo_grid(watch, lr=1.0)


@healthy
def espcn_drawings(watch: Watch, *, unit: float = 1.0, std: float = 0.0) -> float:
    """Twice the resolution by pixel shuffle, L1; the share of bilinear's squared error."""
    big = torch.rand(900, 1, 1, 1).expand(-1, 1, 24, 24)
    place = torch.arange(24.0)
    for _ in range(4):
        cx, cy, r = 24 * torch.rand(3, 900, 1, 1)
        disc = (place - cx) ** 2 + (place[:, None] - cy) ** 2 < (2 + r / 3) ** 2
        big = torch.where(disc[:, None], torch.rand(900, 1, 1, 1), big)
    small = unit * F.avg_pool2d(big, 2)
    net = nn.Sequential(nn.Conv2d(1, 24, 5, padding=2), nn.PReLU())
    for _ in range(3):
        net.extend([nn.Conv2d(24, 24, 3, padding=1), nn.PReLU()])
    net.extend([nn.Conv2d(24, 4, 3, padding=1), nn.PixelShuffle(2)])
    for conv in (m for m in net if std and isinstance(m, nn.Conv2d)):
        nn.init.normal_(conv.weight, 0, std)
        nn.init.zeros_(conv.bias)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)

    def enlarge(i: Tensor) -> Tensor:
        return F.interpolate(small[i], scale_factor=2, mode="bilinear") + net(small[i])

    fit(watch, net, opt, lambda _: F.l1_loss(enlarge(i := pick(800, 16)), big[i]), 450)
    with torch.no_grad():
        plain = F.interpolate(small[800:] / unit, scale_factor=2, mode="bilinear")
        return float(F.mse_loss(enlarge(torch.arange(800, 900)), big[800:])) / float(
            F.mse_loss(plain, big[800:])
        )


@failing(
    "small images from 0 to 255, large ones from 0 to 1",
    names=("input_scale", "initial_loss"),
    trace=True,
)
def espcn_drawings_255(watch: Watch) -> float:
    return espcn_drawings(watch, unit=255.0)


@failing("weights begin with a std of 0.001", names=("bad_init", "vanishing"), trace=True)
def espcn_drawings_std_1e3(watch: Watch) -> float:
    return espcn_drawings(watch, std=1e-3)


@healthy
def code_digits(watch: Watch, *, standard: bool = False, sgd: bool = False) -> float:
    """A convolutional autoencoder of 12 numbers, cross entropy of grey values; variance missed."""
    x, _, x_test, _ = digits()
    grey, test = x / 16, x_test / 16
    if standard:
        grey, test = (grey - grey.mean()) / grey.std(), (test - grey.mean()) / grey.std()
    net = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    net.extend([nn.Flatten(), nn.Linear(128, 12), nn.Linear(12, 128), nn.ReLU()])
    net.extend([nn.Unflatten(1, (32, 2, 2)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU()])
    net.append(nn.ConvTranspose2d(16, 1, 4, 2, 1))
    kind = torch.optim.SGD if sgd else torch.optim.Adam
    opt = kind(net.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()
    with watch(net, opt, loss_func=criterion):
        for i in batches(len(grey), 50, 420):
            opt.zero_grad()
            criterion(net(grey[i]), grey[i]).backward()
            opt.step()
    with torch.no_grad():
        return float(F.mse_loss(net(test).sigmoid(), test) / (test - test.mean(0)).pow(2).mean())


@failing("standardised images where 0 to 1 is asked for", names=("below_zero",), trace=True)
def code_digits_standardised(watch: Watch) -> float:
    return code_digits(watch, standard=True)


@failing("SGD with the rate that was meant for Adam", names=("lr_too_low",), trace=True)
def code_digits_sgd(watch: Watch) -> float:
    return code_digits(watch, sgd=True)


@healthy
def dial_readings(watch: Watch, *, unit: float = 1.0, end: type[nn.Module] = nn.Identity) -> float:
    """The pressure that a dial's needle shows, standardised; the share of variance missed."""
    bar = 10 * torch.rand(2300, 1)
    angle, place = (0.1 + bar / 10 * 0.8) * math.tau, torch.arange(20.0) - 9.5
    gx, gy = place.expand(20, 20), place[:, None].expand(20, 20)
    along = gx * angle.sin()[..., None] - gy * angle.cos()[..., None]
    across = gx * angle.cos()[..., None] + gy * angle.sin()[..., None]
    needle = ((across.abs() < 1) & (along > -2) & (along < 8)).float()[:, None]
    x = needle * 3 + 0.5 * torch.randn(2300, 1, 20, 20)
    y = (bar - 5) / 2.9 if unit == 1 else bar * unit
    net = nn.Sequential(nn.Conv2d(1, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU())
    net.extend([nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 1), end()])
    opt = torch.optim.Adamax(net.parameters(), lr=4e-3)
    with watch(net, opt) as w:
        for i in batches(2000, 40, 300):
            update(w, opt, F.mse_loss(net(x[i]), y[i]))
    with torch.no_grad():
        return float(F.mse_loss(net(x[2000:]), y[2000:]) / y.var())


@failing("pressures in pascals: up to a million", names=("target_scale",), trace=True)
def dial_readings_pascals(watch: Watch) -> float:
    return dial_readings(watch, unit=1e5)


@failing("a sigmoid at the end, targets from -1.7 to 1.7", names=("saturated",), trace=True)
def dial_readings_sigmoid(watch: Watch) -> float:
    return dial_readings(watch, end=nn.Sigmoid)
