"""Flags, counted cells, roads from above, and boxes around their centres."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .data import batches, error_rate, pick
from .trials import Watch, failing, fit, healthy, update


def flags(n: int) -> tuple[Tensor, Tensor]:
    """Photos (N, 3, 20, 20) of flags, 0 to 255: three colours in any order, upright or lying."""
    y, place = torch.randint(12, (n,)), torch.arange(20.0).expand(n, 20)
    colours = torch.tensor([[190.0, 40, 40], [220, 220, 210], [40, 60, 150]])
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
    edges = torch.tensor([6.7, 13.3]) + 1.5 * torch.randn(n, 2)
    stripe = (place > edges[:, :1]).long() + (place > edges[:, 1:]).long()
    cloth = colours[orders[y % 6].gather(1, stripe)].movedim(2, 1)[:, :, None].repeat(1, 1, 20, 1)
    photo = torch.where((y < 6)[:, None, None, None], cloth, cloth.mT)
    light = 0.5 + torch.rand(n, 1, 1, 1)
    photo = photo * light + 30 * torch.randn(n, 3, 1, 1) + 40 * torch.randn(n, 3, 20, 20)
    return photo.clamp(0, 255), y


@healthy
def flags_plain_cnn(watch: Watch, *, divisor: float = 255.0, p: float = 0.1) -> float:
    """Two convolutions, two linear layers, a DataLoader, and a look at new flags each epoch."""
    x, y = flags(1900)
    x = (x / divisor - 0.5) / 0.5
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=50, shuffle=True)
    net = nn.Sequential(nn.Conv2d(3, 24, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    net.extend([nn.Conv2d(24, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(p)])
    net.extend([nn.Linear(512, 100), nn.ReLU(), nn.Dropout(p), nn.Linear(100, 12)])
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    criterion, missed = nn.CrossEntropyLoss(label_smoothing=0.05), 1.0
    with watch(net, opt) as w:
        for _ in range(8):
            net.train()
            for xb, yb in loader:
                update(w, opt, criterion(net(xb), yb))
            missed = error_rate(net, x[1500:], y[1500:])
    return missed


@failing("not divided by 255 before mean and std of 0.5", names=("input_scale",), trace=True)
def flags_plain_cnn_normalize_255(watch: Watch) -> float:
    return flags_plain_cnn(watch, divisor=1.0)


@failing("0.9 was meant to be kept, and is dropped", names=("dropout",), trace=True)
def flags_plain_cnn_keep_90(watch: Watch) -> float:
    return flags_plain_cnn(watch, p=0.9)


def cells(n: int) -> tuple[Tensor, Tensor]:
    """Pictures (N, 1, 24, 24) of up to eight dim cells, and how many there are."""
    count, place = torch.randint(0, 9, (n,)), torch.arange(24.0)
    image = 0.3 * torch.randn(n, 1, 24, 24)
    for k in range(8):
        cx, cy = 2 + 20 * torch.rand(2, n, 1, 1, 1)
        far = (place - cx) ** 2 + (place[:, None] - cy) ** 2
        shown = (count > k).float()[:, None, None, None] * (0.7 + torch.rand(n, 1, 1, 1))
        image = image + shown * (-far / (1.5 + 2 * torch.rand(n, 1, 1, 1))).exp()
    return (image - image.mean()) / image.std(), count


@healthy
def cells_counted(watch: Watch, *, train: bool = True, column: bool = True) -> float:
    """A plain stack of convolutions with batch norm; Huber's loss; the share of variance missed."""
    x, count = cells(2300)
    y = (count - 4) / 2.58
    net = nn.Sequential()
    for a, b, stride in ((1, 16, 1), (16, 16, 1), (16, 24, 2), (24, 24, 2), *[(24, 24, 1)] * 5):
        net.extend([nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()])
    net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 1)])
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 220)
    net.train(train)
    with watch(net, opt) as w:
        for i in batches(2000, 40, 220):
            guess = net(x[i])
            loss = F.huber_loss(guess.squeeze(1) if column else guess, y[i])
            update(w, opt, loss, sched=sched)
    net.eval()
    with torch.no_grad():
        return float(F.mse_loss(net(x[2000:])[:, 0], y[2000:]) / y[2000:].var())


@failing("eval(), and no train()", names=("vanishing", "bad_init", "not_learning"), trace=True)
def cells_counted_no_train(watch: Watch) -> float:
    return cells_counted(watch, train=False)


@failing("guesses (N, 1) against counts (N,)", names=("broadcast",), trace=True)
def cells_counted_column(watch: Watch) -> float:
    return cells_counted(watch, column=False)


def roads(n: int) -> tuple[Tensor, Tensor]:
    """Pictures (N, 1, 32, 32) of two roads among square fields, and masks of the roads."""
    place, mask = torch.arange(32.0), torch.zeros(n, 1, 32, 32)
    image = F.interpolate(0.6 * torch.rand(n, 1, 6, 6), 32)
    for _ in range(2):
        angle, off = 3.14 * torch.rand(n, 1, 1, 1), 8 * torch.randn(n, 1, 1, 1)
        far = (place - 15.5) * angle.sin() - (place[:, None] - 15.5) * angle.cos() - off
        mask = torch.maximum(mask, (far.abs() < 1.2).float())
    image = torch.where(mask > 0, 0.9, image) + 0.25 * torch.randn(n, 1, 32, 32)
    return (image - image.mean()) / image.std(), mask


def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
    """A convolution, its group norm and its activation."""
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.GroupNorm(4, b), nn.LeakyReLU(0.1))


class SmallUNet(nn.Module):
    """Two steps down and two up, each joined to what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = conv(1, 8), conv(8, 16, 2), conv(16, 32, 2)
        self.deep, self.up1, self.up2 = conv(32, 32), conv(48, 16), conv(24, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(top)
        h = F.interpolate(self.deep(self.bottom(middle)), scale_factor=2)
        h = F.interpolate(self.up1(torch.cat([h, middle], 1)), scale_factor=2)
        return self.out(self.up2(torch.cat([h, top], 1)))


@healthy
def roads_unet(watch: Watch, *, lr: float = 3e-3, hard: bool = False) -> float:
    """A U-Net with group norm, cross entropy and Dice together; 1 minus the IoU on new pictures."""
    (x, y), net = roads(700), SmallUNet()
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-2)

    def loss_of(_: int) -> Tensor:
        i = pick(600, 16)
        out = net(x[i])
        p = out.sigmoid().round() if hard else out.sigmoid()
        dice = 1 - (2 * (p * y[i]).sum() + 1) / (p.sum() + y[i].sum() + 1)
        return dice if hard else dice + F.binary_cross_entropy_with_logits(out, y[i])

    fit(watch, net, opt, loss_of, 220)
    with torch.no_grad():
        guess, true = net(x[600:]) > 0, y[600:] > 0
    return 1 - float((guess & true).sum() / (guess | true).sum())


@failing("a learning rate of 3e-6", names=("lr_too_low",), trace=True)
def roads_unet_lr_3e6(watch: Watch) -> float:
    return roads_unet(watch, lr=3e-6)


@failing("Dice of rounded masks", names=("zero_gradient", "unmoved", "not_learning"), trace=True)
def roads_unet_rounded(watch: Watch) -> float:
    return roads_unet(watch, hard=True)


def stamps(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (N, 1, 32, 32) of up to three boxes; heat of their centres; width and height."""
    place, cell = torch.arange(32.0), torch.arange(8.0)
    image, heat, size = 0.3 * torch.randn(n, 1, 32, 32), torch.zeros(n, 8, 8), torch.zeros(n, 2, 64)
    where = torch.rand(n, 64).argsort(1)
    for k in range(3):
        there = (torch.rand(n) < 1 / (k + 1)).float()
        col, row = where[:, k] % 8, where[:, k] // 8
        w, h = 4 + 10 * torch.rand(2, n)
        u = (place - 4 * col[:, None] - 1.5).abs()[:, None, :] < w[:, None, None] / 2
        v = (place - 4 * row[:, None] - 1.5).abs()[:, :, None] < h[:, None, None] / 2
        image[:, 0] += (u & v) * (there * (0.7 + torch.rand(n)))[:, None, None]
        far = (cell - col[:, None]).pow(2)[:, None, :] + (cell - row[:, None]).pow(2)[:, :, None]
        heat = torch.maximum(heat, there[:, None, None] * (-far / 0.6).exp())
        size[torch.arange(n), :, where[:, k]] = torch.stack([w, h], 1)
    return image / image.std(), heat, size.view(n, 2, 8, 8)


@healthy
def stamps_centernet(watch: Watch, *, unit: float = 0.1, sigmoid: bool = False) -> float:
    """Heat where boxes have their centres, and their sizes there; 1 minus the F1 score."""
    x, heat, size = stamps(2200)
    net = nn.Sequential(conv(1, 16), conv(16, 32, 2), conv(32, 32), conv(32, 48, 2), conv(48, 48))
    net.extend([conv(48, 48), nn.Conv2d(48, 3, 1)])
    opt = torch.optim.NAdam(net.parameters(), lr=2e-3)
    with watch(net, opt) as w:
        for i in batches(2000, 32, 260):
            out, centre = net(x[i]), heat[i] == 1
            hot = out[:, 0].sigmoid() if sigmoid else out[:, 0]
            loss = F.binary_cross_entropy_with_logits(hot, heat[i]) * 10
            off = (out[:, 1:] - unit * size[i]).abs().sum(1)[centre]
            update(w, opt, loss + off.sum() / centre.sum().clamp(min=1))
    with torch.no_grad():
        out = net(x[2000:])
    hot, centre = out[:, 0], heat[2000:] == 1
    hot = (hot.sigmoid() if sigmoid else hot).sigmoid()
    found = (hot > 0.4) & (hot == F.max_pool2d(hot, 3, 1, 1))
    right = found & centre & ((out[:, 1:] / unit - size[2000:]).abs().amax(1) < 3)
    return 1 - 2 * float(right.sum()) / float(found.sum() + centre.sum())


@failing("sizes in pixels of the scan: to 1400", names=("target_scale",), trace=True)
def stamps_centernet_pixels(watch: Watch) -> float:
    return stamps_centernet(watch, unit=100.0)


@failing("a sigmoid before the loss with logits", names=("probabilities",), trace=True)
def stamps_centernet_sigmoid(watch: Watch) -> float:
    return stamps_centernet(watch, sigmoid=True)
