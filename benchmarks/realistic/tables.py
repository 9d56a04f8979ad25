"""Customers who leave, flats by three tasks, NeuMF and ListNet."""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from .data import batches, pick
from .trials import Watch, failing, fit, healthy, update


class Block(nn.Module):
    """A residual block of a ResNet for tables."""

    def __init__(self, n: int):
        super().__init__()
        layers = (
            nn.BatchNorm1d(n),
            nn.Linear(n, 2 * n),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(2 * n, n),
        )
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def customers(n: int) -> tuple[Tensor, Tensor]:
    """Standardised columns (n, 14), of whose cells 2 % are NaN, and who left: one in eight."""
    x = torch.randn(n, 14)
    odds = 2 * x[:, 0] * x[:, 1] + 1.5 * x[:, 2].abs() - 2 * (x[:, 3] > 0.5) + x[:, 4:7].sum(1)
    y = odds + 0.5 * torch.randn(n) > odds.quantile(0.88)
    return torch.where(torch.rand(n, 14) < 0.02, torch.nan, x), y.float()


@healthy
def churn_resnet(watch: Watch, *, filled: bool = True, half: bool = False) -> float:
    """Who leaves, with a weight for those few; 1 - the average precision."""
    x, y = customers(4000)
    x = x.nan_to_num(0.0) if filled else x
    net = nn.Sequential(nn.Linear(14, 32), Block(32), Block(32), nn.BatchNorm1d(32), nn.ReLU())
    net.extend([nn.Linear(32, 1), nn.Flatten(0)])
    if half:
        net, x, y = net.half(), x.half(), y.half()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=1e-3)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(7.0, dtype=x.dtype))
    loss_of = partial(_churn_loss, net, criterion, x, y)
    fit(watch, net, opt, loss_of, 600, sched=CosineAnnealingLR(opt, 600))
    with torch.no_grad():
        out = net.eval()(x[3000:]).float().nan_to_num(0.0, 0.0, 0.0)
    return 1 - float(average_precision_score(y[3000:], out))


def _churn_loss(net: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor, _: int) -> Tensor:
    i = pick(3000, 64)
    return criterion(net(x[i]), y[i])


@failing("cells that are missing stay NaN", names=("non_finite",), trace=True)
def churn_resnet_missing_cells(watch: Watch) -> float:
    return churn_resnet(watch, filled=False)


@failing(
    "net.half(), without float32 weights or a scaler, and Adam's eps of 1e-8",
    names=("fp16_underflow", "fp16_range", "non_finite"),
    trace=True,
)
def churn_resnet_half(watch: Watch) -> float:
    return churn_resnet(watch, half=True)


class Flats(nn.Module):
    """A trunk and three heads: what it costs, how far from the centre it is, is it furnished."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(9, 64), nn.LeakyReLU(), nn.Linear(64, 48), nn.LeakyReLU()
        self.trunk = nn.Sequential(*layers)
        self.rent, self.zone, self.furnished = (nn.Linear(48, n) for n in (1, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        return self.rent(h)[:, 0], self.zone(h), self.furnished(h)[:, 0]


@healthy
def flats_three_tasks(watch: Watch, *, euros: bool = False, reduction: str = "mean") -> float:
    """Rents, zones and furniture by one net and SGD; the mean of what each head misses."""
    x = torch.randn(6000, 9)
    zone = ((x[:, 0] + x[:, 1] * x[:, 2]).clamp(-1.9, 1.9) + 2).long()
    rent = 900 + 250 * x[:, 3] + 150 * x[:, 4].relu() * x[:, 5] + 120 * (zone - 1.5)
    furnished = (x[:, 6] * x[:, 7] + 0.5 * x[:, 8] > 0).float()
    mean, std = (0.0, 1.0) if euros else (rent.mean(), rent.std())
    goal, net = (rent - mean) / std, Flats()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    with watch(net, opt) as w:
        for i in batches(5000, 60, 1200):
            a, b, c = net(x[i])
            loss = F.mse_loss(a, goal[i], reduction=reduction)
            loss = loss + F.cross_entropy(b, zone[i], reduction=reduction)
            loss = loss + F.binary_cross_entropy_with_logits(c, furnished[i], reduction=reduction)
            update(w, opt, loss)
    with torch.no_grad():
        a, b, c = (out.nan_to_num(0.0) for out in net(x[5000:]))
        missed = F.mse_loss(a, goal[5000:]) / goal.var()
        errors = (b.argmax(1) != zone[5000:]).float() + ((c > 0) != (furnished[5000:] > 0)).float()
    return float(missed + errors.mean()) / 3


@failing("rents in euros, some 900, by MSELoss and SGD", names=("target_scale",), trace=True)
def flats_three_tasks_euros(watch: Watch) -> float:
    return flats_three_tasks(watch, euros=True)


@failing(
    'reduction="sum" with the rate for a mean', names=("target_scale", "lr_too_high"), trace=True
)
def flats_three_tasks_sums(watch: Watch) -> float:
    return flats_three_tasks(watch, reduction="sum")


class NeuMF(nn.Module):
    """Products of vectors of users and goods, and an MLP of others, as one logit."""

    def __init__(self, sigmoid: bool):
        super().__init__()
        self.users, self.goods = nn.Embedding(600, 32), nn.Embedding(250, 32)
        for p in self.parameters():
            nn.init.normal_(p, 0, 0.1)
        layers = nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()
        self.mlp, self.head = nn.Sequential(*layers), nn.Linear(32, 1)
        self.last = nn.Sigmoid() if sigmoid else nn.Identity()

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, v = self.users(user), self.goods(item)
        deep = self.mlp(torch.cat([u[:, 16:], v[:, 16:]], 1))
        return self.last(self.head(torch.cat([u[:, :16] * v[:, :16], deep], 1)))[:, 0]


@healthy
def neumf_shop(watch: Watch, *, decay: float = 0.0, sigmoid: bool = False) -> float:
    """What users buy, with three random goods for each; 1 - the area under the ROC curve."""
    taste = torch.randn(600, 4) @ torch.randn(4, 250) + 0.7 * torch.randn(250)
    bought = (taste + 0.5 * torch.randn(600, 250) > 2.8).nonzero()
    bought = bought[torch.randperm(len(bought))]
    n, net = len(bought) * 4 // 5, NeuMF(sigmoid)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=decay)
    criterion = nn.BCEWithLogitsLoss()

    def sample(pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        user = pairs[:, 0].repeat(4)
        item = torch.cat([pairs[:, 1], torch.randint(250, (3 * len(pairs),))])
        return user, item, (torch.arange(len(user)) < len(pairs)).float()

    with watch(net, opt, loss_func=criterion):
        for i in batches(n, 128, 1000):
            user, item, y = sample(bought[i])
            opt.zero_grad()
            criterion(net(user, item), y).backward()
            opt.step()
    user, item, y = sample(bought[n:])
    with torch.no_grad():
        return 1 - float(roc_auc_score(y, net(user, item)))


@failing("weight decay of 0.01 inside Adam", names=("weight_decay",), trace=True)
def neumf_shop_decay(watch: Watch) -> float:
    return neumf_shop(watch, decay=0.01)


@failing("a sigmoid before BCEWithLogitsLoss", names=("probabilities",), trace=True)
def neumf_shop_sigmoid(watch: Watch) -> float:
    return neumf_shop(watch, sigmoid=True)


@healthy
def listnet_search(watch: Watch, *, raw: bool = False, lr: float = 3e-3) -> float:
    """Which of ten pages fit a query best, by ListNet and RMSprop; 1 - NDCG."""
    x = torch.randn(2500, 10, 6)
    fit_ = x[..., 0] + x[..., 1] * (x[..., 2] > 0) + 0.6 * x[..., 3].abs() - 0.5 * x[..., 4]
    grade = (fit_ + 0.3 * torch.randn(2500, 10)).clamp(0, 3.99).floor()
    if raw:  # BM25, clicks, words, links, bytes, days
        x = (x + 3) * torch.tensor([8.0, 300, 150, 40, 9000, 200])
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    net.extend([nn.Linear(32, 1), nn.Flatten(1)])
    opt = torch.optim.RMSprop(net.parameters(), lr=lr)

    def loss_of(_: int) -> Tensor:
        i = pick(2000, 16)
        return F.cross_entropy(net(x[i]), grade[i].softmax(1))

    fit(watch, net, opt, loss_of, 1200)
    with torch.no_grad():
        return 1 - float(ndcg_score(2 ** grade[2000:] - 1, net(x[2000:])))


@failing("clicks, bytes and days as they are", names=("input_scale",), trace=True)
def listnet_search_raw(watch: Watch) -> float:
    return listnet_search(watch, raw=True)


@failing("a learning rate of 0.5 with RMSprop", names=("lr_too_high", "dead"), trace=True)
def listnet_search_lr_half(watch: Watch) -> float:
    return listnet_search(watch, lr=0.5)
