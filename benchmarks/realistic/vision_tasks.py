"""Tasks other than classification that train well: masks, boxes, sizes, resolution, teachers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from realistic.trials import Watch, healthy, update
from realistic.vision import lenet, resnet
from realistic.vision_data import batches, error_rate, shapes, standard_digits


def conv(n_in: int, n_out: int) -> nn.Sequential:
    """A convolution, group norm and a SiLU."""
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, 1, 1), nn.GroupNorm(4, n_out), nn.SiLU())


class UNet(nn.Module):
    """Two levels down, two up, with what was seen on the way down beside it."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.down1, self.down2 = conv(1, dim), conv(dim, 2 * dim)
        self.middle = conv(2 * dim, 4 * dim)
        self.up2 = nn.ConvTranspose2d(4 * dim, 2 * dim, 2, 2)
        self.up1 = nn.ConvTranspose2d(2 * dim, dim, 2, 2)
        self.dec2, self.dec1 = conv(4 * dim, 2 * dim), conv(2 * dim, dim)
        self.out = nn.Conv2d(dim, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A logit for each pixel."""
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.dec2(torch.cat([self.up2(c), b], 1))
        return self.out(self.dec1(torch.cat([self.up1(b), a], 1)))


def dice_bce(logits: Tensor, mask: Tensor) -> Tensor:
    """Half of each loss."""
    p = logits.sigmoid()
    overlap = 2 * (p * mask).sum((1, 2, 3)) + 1
    dice = 1 - overlap / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    return 0.5 * dice.mean() + 0.5 * F.binary_cross_entropy_with_logits(logits, mask)


@healthy
def vision_unet_dice(
    watch: Watch, *, model: nn.Module | None = None, image: Tensor | None = None
) -> float:
    """Objects are cut out of noise; Adam with cosine; how much of the union is missed."""
    data, test = shapes(1024, 0), shapes(256, 1)
    images = data.image if image is None else image
    loader = DataLoader(TensorDataset(images, data.mask), 32, shuffle=True)
    model = model or UNet()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6 * len(loader))
    with watch(model, opt) as w:
        for _ in range(6):
            for xb, mask in loader:
                loss = dice_bce(model(xb), mask)
                update(w, opt, loss, sched=sched)
    with torch.no_grad():
        found, mask = model(test.image) > 0, test.mask > 0
    return 1 - ((found & mask).sum() / (found | mask).sum()).item()


class Detector(nn.Module):
    """One body, a head for the class and one for the box."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(1, 16), nn.MaxPool2d(2), conv(16, 32), nn.MaxPool2d(2), conv(32, 32), nn.Flatten()
        )
        self.neck = nn.Sequential(nn.Linear(512, 64), nn.SiLU())
        self.label, self.box = nn.Linear(64, 3), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class, and the box."""
        h = self.neck(self.body(x))
        return self.label(h), self.box(h)


@healthy
def vision_detector(watch: Watch, *, pixels: float = 1.0, forget_box: bool = False) -> float:
    """Cross entropy for the class and five times smooth L1 for the box, with AdamW."""
    data, test = shapes(1024, 0), shapes(256, 1)
    model = Detector()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    with watch(model, opt) as w:
        for idx in batches(1024, 64, 300):
            logits, box = model(data.image[idx])
            loss = F.cross_entropy(logits, data.label[idx])
            loss = loss + 5 * F.smooth_l1_loss(box, pixels * data.box[idx])
            update(w, opt, loss, clip=(model, 10.0))
    with torch.no_grad():
        logits, box = model(test.image)
        wrong = (logits.argmax(1) != test.label).float().mean()
        return (wrong + (box / pixels - test.box).abs().mean()).item()


@healthy
def vision_size_regression(watch: Watch, *, column: bool = True) -> float:
    """How large the object is, standardised; Huber's loss by hand; Adagrad."""
    data, test = shapes(1024, 0), shapes(256, 1)
    size, size_test = ((d.box[:, 2] - 0.4375) / 0.108 for d in (data, test))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ELU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ELU(),
        nn.Flatten(), nn.Linear(512, 32), nn.ELU(), nn.Linear(32, 1),
    )  # fmt: skip
    opt = torch.optim.Adagrad(model.parameters(), lr=0.01)
    with watch(model, opt) as w:
        for idx in batches(1024, 64, 400):
            pred, y = model(data.image[idx]), size[idx]
            gap = (pred - (y[:, None] if column else y)).abs()
            loss = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
    with torch.no_grad():
        return F.mse_loss(model(test.image)[:, 0], size_test).item()


def pretrained() -> nn.Sequential:
    """A ResNet that knows the digits 0 to 4."""
    x, y, _, _ = standard_digits()
    x, y = x[y < 5], y[y < 5]
    model = resnet(5)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for idx in batches(len(x), 64, 40):
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return model


@healthy
def vision_transfer_frozen(watch: Watch, *, head_last: bool = False, lr: float = 3e-3) -> float:
    """The body of a net for 0 to 4 is frozen, a new head learns 5 to 9."""
    x, y, x_test, y_test = standard_digits()
    x, y, x_test, y_test = x[y > 4], y[y > 4] - 5, x_test[y_test > 4], y_test[y_test > 4] - 5
    model = pretrained().requires_grad_(False)
    head = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 5))
    model[-1] = head
    opt = torch.optim.Adam(head.parameters(), lr=lr)
    if head_last:
        model[-1] = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 5))
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 150):
            model.train()
            model[:-1].eval()
            loss = F.cross_entropy(model(x[idx]), y[idx])
            update(w, opt, loss)
    return error_rate(model, x_test, y_test)


@healthy
def vision_super_resolution_amp(watch: Watch, *, scaler: bool = True) -> float:
    """Twice the resolution in float16 with a GradScaler; the loss is one part of a sum."""
    data, test = shapes(1024, 0), shapes(256, 1)
    small, small_test = (F.avg_pool2d(d.image, 2).flatten(1) for d in (data, test))
    target, target_test = ((d.mask + 0.2 * d.image).flatten(1) for d in (data, test))
    sizes = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 256)
    model = nn.Sequential(sizes[0], nn.PReLU(), sizes[1], nn.PReLU(), sizes[2])
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-15)
    amp = torch.amp.GradScaler("cpu", enabled=scaler)
    with watch(model, opt) as w:
        for idx in batches(1024, 64, 250):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(small[idx])
            loss = 1e-3 * F.l1_loss(out.float(), target[idx])
            opt.zero_grad()
            amp.scale(loss).backward()
            amp.step(opt)
            amp.update()
            w.loss(loss)
    with torch.no_grad():
        return F.l1_loss(model(small_test), target_test).item()


@healthy
def vision_distillation(watch: Watch, *, log: bool = True) -> float:
    """A small student learns from a teacher's softened answers alone."""
    x, y, x_test, y_test = standard_digits()
    teacher = lenet()
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for idx in batches(len(x), 50, 200):
        loss = F.cross_entropy(teacher(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    opt = torch.optim.NAdam(student.parameters(), lr=5e-3)
    with watch(student, opt) as w:
        for idx in batches(len(x), 64, 300):
            with torch.no_grad():
                target = (teacher(x[idx]) / 4).softmax(1)
            out = (student(x[idx]) / 4).softmax(1)
            loss = 16 * F.kl_div(out.log() if log else out, target, reduction="batchmean")
            update(w, opt, loss)
    return error_rate(student, x_test, y_test)


class Mixer(nn.Module):
    """Mixes tokens, then channels, beside shortcuts."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Two mixer blocks over 16 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(1, 32, 2, 2), nn.Linear(32, 10)
        self.blocks = nn.Sequential(Mixer(), Mixer())

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


@healthy
def vision_mixer_sam(watch: Watch, *, back: bool = True, rho: float = 0.05) -> float:
    """Sharpness-aware minimisation: the gradient is taken a little uphill of the weights."""
    x, y, x_test, y_test = standard_digits()
    model = MLPMixer()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 250):
            opt.zero_grad()
            loss = F.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
            moves = [rho * p.grad / norm for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            opt.zero_grad()
            F.cross_entropy(model(x[idx]), y[idx]).backward()
            if back:
                with torch.no_grad():
                    torch._foreach_sub_(list(model.parameters()), moves)
            opt.step()
            w.loss(loss)
    return error_rate(model, x_test, y_test)
