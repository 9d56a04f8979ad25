"""Classifiers of images that train well: residual nets, a vision transformer, plain CNNs."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from realistic.trials import Watch, healthy, update
from realistic.vision_data import batches, error_rate, standard_digits


class BasicBlock(nn.Module):
    """Two convolutions with batch norm beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.short = nn.Identity() if n_in == n_out else nn.Conv2d(n_in, n_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.short(x))


def resnet(n_classes: int = 10) -> nn.Sequential:
    """A small ResNet for images of 8×8 pixels."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        BasicBlock(12, 12),
        BasicBlock(12, 24, 2),
        BasicBlock(24, 48, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, n_classes),
    )


@healthy
def vision_resnet_one_cycle(
    watch: Watch,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    max_lr: float = 0.1,
    clip: float = 0.0,
    momentum: float | None = None,
    zero: bool = True,
    shuffle: bool = True,
    size: int = 64,
    epochs: int = 9,
) -> float:
    """SGD with Nesterov momentum and one cycle of the learning rate."""
    x, y, x_test, y_test = standard_digits()
    x, y = data or (x, y)
    loader = DataLoader(TensorDataset(x, y), size, shuffle=shuffle, drop_last=True)
    model = resnet()
    opt = torch.optim.SGD(
        model.parameters(), max_lr, momentum or 0.9, weight_decay=5e-4, nesterov=True
    )
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr, epochs=epochs, steps_per_epoch=len(loader), cycle_momentum=momentum is None
    )
    with watch(model, opt) as w:
        for _ in range(epochs):
            model.train()
            for xb, yb in loader:
                loss = F.cross_entropy(model(xb), yb)
                if zero:
                    opt.zero_grad()
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                opt.step()
                sched.step()
                w.loss(loss.item())
    return error_rate(model, x_test, y_test)


class Attention(nn.Module):
    """Self-attention of several heads, as people write it by hand."""

    def __init__(self, dim: int, n_heads: int, softmax_dim: int):
        super().__init__()
        self.n_heads, self.softmax = n_heads, nn.Softmax(softmax_dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """The values, weighted by the softmax of the scaled products."""
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]))
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class ViTBlock(nn.Module):
    """Attention and an MLP, each after its norm and beside a shortcut."""

    def __init__(self, dim: int, dropout: float, softmax_dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, 4, softmax_dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * dim, dim)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """A vision transformer over 16 patches of 2×2 pixels."""

    def __init__(self, dim: int = 48, dropout: float = 0.1, softmax_dim: int = -1):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 2, 2)
        self.pos = nn.Parameter(torch.randn(1, 16, dim) * 0.2)
        self.blocks = nn.ModuleList(ViTBlock(dim, dropout, softmax_dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the mean token."""
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))


@healthy
def vision_vit_adamw(
    watch: Watch, *, model: nn.Module | None = None, n_steps: int = 300, n_sched: int = 300
) -> float:
    """AdamW with groups, a warm-up and a cosine, gradients clipped at 1."""
    x, y, x_test, y_test = standard_digits()
    model = model or ViT()
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=2e-3)
    warm = min(20, n_sched // 4)

    def factor(i: int) -> float:
        share = min(1.0, max(0.0, (i - warm) / (n_sched - warm)))
        return (i + 1) / (warm + 1) if i < warm else 0.5 * (1 + math.cos(math.pi * share))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    model.train()
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, n_steps):
            loss = F.cross_entropy(model(x[idx]), y[idx], label_smoothing=0.05)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            w.loss(loss)
    return error_rate(model, x_test, y_test)


def lenet() -> nn.Sequential:
    """A plain CNN with ReLUs and without normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@healthy
def vision_lenet_adam(
    watch: Watch, *, model: nn.Module | None = None, scale: float = 1.0, decay: float = 0.0
) -> float:
    """Adam at its default rate; the loss is a module and nobody reports it."""
    x, y, x_test, y_test = standard_digits()
    x, x_test = x * scale, x_test * scale
    model = model or lenet()
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)
    with watch(model, opt, loss_func=criterion):
        for idx in batches(len(x), 50, 300):
            opt.zero_grad()
            criterion(model(x[idx]), y[idx]).backward()
            opt.step()
    return error_rate(model, x_test, y_test)


def deep_mlp(act: type[nn.Module] = nn.ReLU, gain: float = math.sqrt(2)) -> nn.Sequential:
    """Twelve layers in a row, with the initialisation of He et al. if nobody changes the gain."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(12):
        layers += [nn.Linear(64, 64), act()]
        nn.init.normal_(layers[-2].weight, std=gain / 8)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers, nn.Linear(64, 10))


@healthy
def vision_deep_mlp_sgd(watch: Watch, *, model: nn.Module | None = None) -> float:
    """Twelve layers without shortcuts, plain SGD with momentum, halved in steps."""
    x, y, x_test, y_test = standard_digits()
    model = model or deep_mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, 100, 0.5)
    with watch(model, opt) as w:
        for idx in batches(len(x), 64, 300):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            update(w, opt, loss, sched=sched)
    return error_rate(model, x_test, y_test)


def mobilenet() -> nn.Sequential:
    """Depthwise separable convolutions with batch norm and ReLU6."""

    def separable(n_in: int, n_out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(n_in, n_in, 3, stride, 1, groups=n_in, bias=False),
            nn.BatchNorm2d(n_in),
            nn.ReLU6(),
            nn.Conv2d(n_in, n_out, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU6(),
        )

    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
    body = separable(16, 32, 2), separable(32, 32, 1), separable(32, 64, 2)
    return nn.Sequential(stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@healthy
def vision_mobilenet_mixup_ema(watch: Watch, *, keep: float = 0.95, size: int = 64) -> float:
    """RMSprop, mixed images and labels, bfloat16, and an average of the weights that is used."""
    x, y, x_test, y_test = standard_digits()
    model = mobilenet()
    ema = deepcopy(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5)
    with watch(model, opt) as w:
        for idx in batches(len(x), size, 250):
            lam, other = torch.distributions.Beta(0.3, 0.3).sample(), idx.flip(0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(lam * x[idx] + (1 - lam) * x[other])
            loss = lam * F.cross_entropy(logits.float(), y[idx], label_smoothing=0.1)
            loss = loss + (1 - lam) * F.cross_entropy(logits.float(), y[other], label_smoothing=0.1)
            update(w, opt, loss)
            for a, b in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                a.copy_(keep * a + (1 - keep) * b)
    return error_rate(ema, x_test, y_test)
