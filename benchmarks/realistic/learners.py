"""Other ways to learn: recommendation, two towers, experts, sets, digits by Muon."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from .tables import mlp
from .trials import Watch, healthy, update


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    i = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(x).float()[i] / 8 - 1, torch.from_numpy(y)[i]


class Factors(nn.Module):
    """Users and items as vectors, and a bias for each item."""

    def __init__(self, std: float):
        super().__init__()
        self.user, self.item = nn.Embedding(200, 16), nn.Embedding(300, 16)
        self.bias = nn.Embedding(300, 1)
        for e in (self.user, self.item, self.bias):
            nn.init.normal_(e.weight, std=std)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(1) + self.bias(item).squeeze(1)


@healthy
def bpr_factors(
    watch: Watch, *, sign: float = 1.0, std: float = 0.1, lr: float = 0.02, wd: float = 1e-4
) -> float:
    """Matrix factorisation with Bayesian personalised ranking; the score is 1 minus AUC."""
    taste, kind = torch.randn(200, 4), torch.randn(300, 4)
    liked = (taste @ kind.T + torch.randn(200, 300)) > 2.0
    user, item = liked.nonzero().T
    test = torch.rand(len(user)) < 0.2
    (user, item), held = (user[~test], item[~test]), (user[test], item[test])
    net = Factors(std)
    opt = torch.optim.Adam(net.parameters(), lr=lr, weight_decay=wd)
    with watch(net, opt) as w:
        for _ in range(300):
            i = torch.randint(0, len(user), (256,))
            other = torch.randint(0, 300, (256,))
            loss = -sign * F.logsigmoid(net(user[i], item[i]) - net(user[i], other)).mean()
            update(w, opt, loss)
    with torch.no_grad():
        u, i = held
        rest = torch.randint(0, 300, (len(u),))
        keep = ~liked[u, rest]
        return 1 - float((net(u, i) > net(u, rest))[keep].float().mean())


@healthy
def two_towers(watch: Watch, *, negatives: bool = True, temperature: float = 0.1) -> float:
    """Queries and documents in one space, by in-batch negatives; the score is 1 minus recall."""
    topic = torch.randn(2200, 6)
    query, doc = (
        torch.tanh(topic @ torch.randn(6, 24)) + 0.1 * torch.randn(2200, 24) for _ in "qd"
    )
    q, d = mlp(24, 32, rate=0.0), mlp(24, 32, rate=0.0)
    opt_q, opt_d = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (q, d))
    with watch([q, d], [opt_q, opt_d]) as w:
        for _ in range(300):
            i = torch.randint(0, 2000, (64,))
            a, b = F.normalize(q(query[i]), dim=1), F.normalize(d(doc[i]), dim=1)
            loss = F.cross_entropy(a @ b.T / temperature, torch.arange(64))
            if not negatives:
                loss = (a - b).pow(2).sum(1).mean()
            opt_q.zero_grad()
            opt_d.zero_grad()
            loss.backward()
            opt_q.step()
            opt_d.step()
            w.loss(loss)
    with torch.no_grad():
        near = F.normalize(q(query[2000:]), dim=1) @ F.normalize(d(doc[2000:]), dim=1).T
    hit = (near.topk(5, 1).indices == torch.arange(200)[:, None]).any(1)
    return 1 - float(hit.float().mean())


class Experts(nn.Module):
    """Four small networks, of which a gate chooses the best for each row."""

    def __init__(self, n_in: int, plain: bool):
        super().__init__()
        self.gate = nn.Linear(n_in, 4, bias=False)
        experts = [mlp(n_in, 1, 24, 0.0) for _ in range(4)]
        self.experts = experts if plain else nn.ModuleList(experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(1)
        top = F.one_hot(p.argmax(1), 4).float()
        out = torch.cat([expert(x) for expert in self.experts], 1)
        balance = 4 * (top.mean(0) * p.mean(0)).sum()
        return (out * top * p).sum(1) / (top * p).sum(1).detach(), balance


@healthy
def expert_mixture(watch: Watch, *, balance: float = 0.05, plain: bool = False) -> float:
    """A mixture of experts, one for each row, with a loss that balances their loads."""
    x = torch.randn(3000, 8)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    table = torch.randn(4, 8)
    y = (x * table[region]).sum(1) / 8**0.5
    net = Experts(8, plain)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 400)
    with watch(net, opt) as w:
        for _ in range(400):
            i = torch.randint(0, 2500, (128,))
            out, even = net(x[i])
            loss = F.mse_loss(out, y[i]) + balance * even
            update(w, opt, loss, sched=schedule)
    with torch.no_grad():
        return float(F.mse_loss(net(x[2500:])[0], y[2500:]) / y.var())


class Sets(nn.Module):
    """Points one by one, then their sum or mean, then a head."""

    def __init__(self, mean: bool):
        super().__init__()
        self.mean, self.point, self.head = mean, mlp(2, 64, rate=0.0), mlp(64, 3, rate=0.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.point(x)
        return self.head(h.mean(1) if self.mean else h.sum(1))


@healthy
def deep_sets(watch: Watch, *, mean: bool = True, lr: float = 0.02) -> float:
    """Which of three shapes 200 points come from; Adafactor."""
    kind = torch.randint(0, 3, (600,))
    raw, turn = torch.randn(600, 200, 2), torch.rand(600, 1) * 3.14
    ring = raw / raw.norm(dim=2, keepdim=True) * (1 + 0.15 * torch.randn(600, 200, 1))
    line = torch.randn(600, 200, 1) * torch.stack([turn.cos(), turn.sin()], 2) + 0.5 * raw
    x = torch.stack([0.8 * raw, ring, line], 1)[torch.arange(600), kind]
    net, criterion = Sets(mean), nn.CrossEntropyLoss()
    opt = torch.optim.Adafactor(net.parameters(), lr=lr)
    with watch(net, opt, loss_func=criterion):
        for _ in range(200):
            i = torch.randint(0, 400, (24,))
            opt.zero_grad()
            criterion(net(x[i]), kind[i]).backward()
            opt.step()
    with torch.no_grad():
        return float((net(x[400:]).argmax(1) != kind[400:]).float().mean())


@healthy
def digits_muon(
    watch: Watch, *, lr: float = 0.02, smooth: float = 0.1, scale: float = 1.0
) -> float:
    """Digits with Muon for hidden matrices, AdamW for the rest, label smoothing, EMA weights."""
    x, y = digits()
    x = (x + 1) * scale - 1
    net = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    muon = torch.optim.Muon([net[0].weight, net[2].weight], lr=lr, weight_decay=0.01)
    rest = [net[0].bias, net[2].bias, *net[4].parameters()]
    adamw, mean = torch.optim.AdamW(rest, lr=2e-3), deepcopy(net)
    with watch(net, [muon, adamw]) as w:
        for _ in range(250):
            i = torch.randint(0, 1300, (64,))
            loss = F.cross_entropy(net(x[i]), y[i], label_smoothing=smooth)
            for opt in (muon, adamw):
                opt.zero_grad()
            loss.backward()
            for opt in (muon, adamw):
                opt.step()
            w.loss(loss)
            for p, q in zip(mean.parameters(), net.parameters(), strict=True):
                p.data.lerp_(q.detach(), 0.05)
    with torch.no_grad():
        return float((mean(x[1300:]).argmax(1) != y[1300:]).float().mean())
