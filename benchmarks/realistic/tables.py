"""Rows of measurements: regression, classes, categories with embeddings, quantiles, counts."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from torch import Tensor, nn
from torch.optim import Optimizer

from .trials import Watch, healthy, update


def halves(loader: object, n_test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Raw training and held-out rows of one of scikit-learn's tables: x, y, x, y."""
    x, y = (torch.from_numpy(a).float() for a in loader(return_X_y=True))  # type: ignore[operator]
    i = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[i[n_test:]], y[i[n_test:]], x[i[:n_test]], y[i[:n_test]]


def mlp(n_in: int, n_out: int, width: int = 64, rate: float = 0.1) -> nn.Sequential:
    """Two hidden layers with ReLU and dropout."""
    return nn.Sequential(
        nn.Linear(n_in, width),
        nn.ReLU(),
        nn.Dropout(rate),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(rate),
        nn.Linear(width, n_out),
    )


@healthy
def diabetes_mlp(
    watch: Watch, *, scaled: bool = True, flat: bool = True, zeros: bool = False, relu: bool = False
) -> float:
    """A standardised target, AdamW, a one-cycle rate, batches of 32."""
    x, y, x_test, y_test = halves(load_diabetes, 100)
    x, x_test = ((t - x.mean(0)) / x.std(0) for t in (x, x_test))
    mean, std = (y.mean(), y.std()) if scaled else (0.0, 1.0)
    y, net = (y - mean) / std, mlp(10, 1)
    for p in net.parameters():
        p.data.mul_(0 if zeros else 1)
    if relu:
        net.append(nn.ReLU())
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 2e-3, total_steps=300)
    with watch(net, opt) as w:
        for _ in range(30):
            for i in torch.randperm(len(x))[:320].split(32):
                opt.zero_grad()
                out = net(x[i]).squeeze(1) if flat else net(x[i])
                loss = ((out - y[i]) ** 2).mean()
                loss.backward()
                opt.step()
                schedule.step()
                w.loss(loss)
    net.eval()
    with torch.no_grad():
        out = net(x_test).squeeze(1) * std + mean
    return float(F.mse_loss(out, y_test) / y_test.var())


@healthy
def cancer_mlp(
    watch: Watch,
    *,
    scaled: bool = True,
    sign: float = 1.0,
) -> float:
    """Two classes with one logit; SGD with momentum; the watcher sees the loss module."""
    x, y, x_test, y_test = halves(load_breast_cancer, 150)
    if scaled:
        x, x_test = ((t - x.mean(0)) / x.std(0) for t in (x, x_test))
    net, criterion = mlp(30, 1, rate=0.0), nn.BCEWithLogitsLoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, maximize=sign < 0)
    with watch(net, opt, loss_func=criterion):
        for _ in range(16):
            for i in torch.randperm(len(x)).split(32):
                opt.zero_grad()
                criterion(net(x[i]).squeeze(1), y[i]).backward()
                opt.step()
    return float(((net(x_test).squeeze(1) > 0) != y_test.bool()).float().mean())


class Lion(Optimizer):
    """Steps by the sign of a mean of gradients (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: object, lr: float = 1e-4, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - b1).sign(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - b2)


@healthy
def wine_lion(
    watch: Watch,
    *,
    softmax_dim: int = 1,
    lr: float = 1e-3,
    biases_only: bool = False,
    in_order: bool = False,
) -> float:
    """Three classes, log-softmax with NLL, Lion by hand, batches of 16 with batch norm."""
    x, y, x_test, y_test = halves(load_wine, 60)
    x, x_test = ((t - x.mean(0)) / x.std(0) for t in (x, x_test))
    x, y = (x[y.argsort()], y.sort().values) if in_order else (x, y)
    net = nn.Sequential(
        nn.Linear(13, 32),
        nn.BatchNorm1d(32),
        nn.SiLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.SiLU(),
        nn.Linear(32, 3),
        nn.LogSoftmax(softmax_dim),
    )
    named = net.named_parameters()
    opt = Lion([p for n, p in named if "bias" in n or not biases_only], lr=lr, weight_decay=0.1)
    with watch(net, opt) as w:
        for _ in range(30):
            rows = torch.arange(len(x)) if in_order else torch.randperm(len(x))
            for i in rows[:112].split(16):
                loss = F.nll_loss(net(x[i]), y[i].long())
                update(w, opt, loss)
    net.eval()
    with torch.no_grad():
        return float(F.cross_entropy(net[:-1](x_test), y_test.long()))


class Housing(nn.Module):
    """Embeddings of a city (50) and a kind (6) beside income, area, age."""

    def __init__(self) -> None:
        super().__init__()
        self.city, self.kind = nn.Embedding(50, 8), nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, city: Tensor, kind: Tensor, numbers: Tensor) -> Tensor:
        x = torch.cat([self.city(city), self.kind(kind), numbers], 1)
        return self.head(self.body(x)).squeeze(1)


def houses(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """City, kind, (income, area, age) in their units, and the logarithm of the price."""
    city, kind = torch.randint(0, 50, (n,)), torch.randint(0, 6, (n,))
    income, area = 5e4 * torch.randn(n).mul(0.5).exp(), 40 + 160 * torch.rand(n)
    age, level, style = 100 * torch.rand(n), torch.randn(50), 0.3 * torch.randn(6)
    price = 0.6 * level[city] + style[kind] + 0.8 * (income / 5e4).log() + 0.007 * area
    price = price - 0.004 * age * (1 + 0.5 * level[city]) + 0.1 * torch.randn(n)
    return city, kind, torch.stack([income, area, age], 1), price


@healthy
def housing_embeddings(
    watch: Watch,
    *,
    scaled: bool = True,
    embedding_lr: float = 3e-3,
    new_head: bool = False,
    wd: float = 0.01,
) -> float:
    """Log prices from categories and numbers; two groups of AdamW, Huber loss."""
    city, kind, numbers, y = houses(2600)
    if scaled:
        numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    y, net = (y - y.mean()) / y.std(), Housing()
    slow = [*net.body.parameters(), *net.head.parameters()]
    fast = {"params": [*net.city.parameters(), *net.kind.parameters()], "lr": embedding_lr}
    opt = torch.optim.AdamW([{"params": slow}, fast], lr=3e-3, weight_decay=wd)
    if new_head:
        net.head, net.body = (
            nn.Linear(32, 1),
            nn.Sequential(*net.body[:2], nn.Linear(64, 32), nn.ReLU()),
        )
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 120)
    with watch(net, opt) as w:
        for _ in range(10):
            for i in torch.randperm(2000)[:1920].split(64):
                loss = F.huber_loss(net(city[i], kind[i], numbers[i]), y[i])
                opt.zero_grad()
                loss.backward()
                opt.step()
                schedule.step()
                w.loss(loss.item())
    with torch.no_grad():
        i = slice(2000, None)
        return float(F.mse_loss(net(city[i], kind[i], numbers[i]), y[i]))
