"""Rows once more: an FT-Transformer, clicks, rare frauds, a knowledge graph, two tasks at once."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_wine
from torch import Tensor, nn

from .fresh_images import pick
from .tables import halves
from .trials import Watch, fit, healthy


class Attend(nn.Module):
    """Attention over the columns of a row, and an MLP, each beside a shortcut."""

    def __init__(self, dim: int, gain: float):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
        )
        self.qkv.weight.data[: 2 * dim] *= gain
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU())
        self.back, self.soft = nn.Linear(2 * dim, dim), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(self.soft(q @ k.mT / q.shape[-1] ** 0.5) @ v)
        return x + self.back(self.mlp(x))


class Columns(nn.Module):
    """FT-Transformer (Gorishniy et al. 2021): a token for each column, and one to read from."""

    def __init__(self, n_columns: int, n_out: int, gain: float):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(n_columns, 24) * 0.3)
        self.shift = nn.Parameter(torch.randn(n_columns, 24) * 0.3)
        self.read = nn.Parameter(torch.randn(1, 1, 24) * 0.3)
        self.body = nn.Sequential(*(Attend(24, gain) for _ in range(2)), nn.LayerNorm(24))
        self.head = nn.Linear(24, n_out)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.scale + self.shift
        tokens = torch.cat([self.read.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.body(tokens)[:, 0])


@healthy
def ft_wine(watch: Watch, *, gain: float = 1.0, copied: bool = False) -> float:
    """Wine with one value in ten missing: the column's mean is filled in. RAdam."""
    x, y, x_test, y_test = halves(load_wine, 60)
    x, x_test = ((t - x.mean(0)) / x.std(0) for t in (x, x_test))
    x, x_test = (t.masked_fill(torch.rand(t.shape) < 0.1, 0.0) for t in (x, x_test))
    net = Columns(13, 3, gain)
    opt = torch.optim.RAdam(net.parameters(), lr=3e-3)
    if copied:
        net = deepcopy(net)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x), 24)
        return F.cross_entropy(net(x[i]), y[i].long())

    fit(watch, net, opt, loss_of, 200)
    with torch.no_grad():
        return float((net(x_test).argmax(1) != y_test).float().mean())


class Cross(nn.Module):
    """Deep and cross network: hashed ids and numbers; products beside an MLP."""

    def __init__(self, n_numbers: int):
        super().__init__()
        self.ids, n = nn.EmbeddingBag(500, 8, mode="sum", sparse=True), 8 + n_numbers
        nn.init.normal_(self.ids.weight, std=0.1)
        self.cross = nn.ModuleList(nn.Linear(n, n) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(n, 64), nn.PReLU(), nn.Linear(64, 32), nn.PReLU())
        self.head = nn.Linear(n + 32, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        first = x = torch.cat([self.ids(ids), numbers], 1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.head(torch.cat([x, self.deep(first)], 1)).squeeze(1)


@healthy
def dcn_clicks(watch: Watch, *, sparse_steps: bool = True, leak: bool = False) -> float:
    """Clicks of users on items; SparseAdam for the ids, Adam for the rest; 1 minus AUC."""
    user, item = torch.randint(0, 40, (12000,)), 40 + torch.randint(0, 60, (12000,))
    taste, numbers = torch.randn(500, 2) * 1.5, torch.randn(12000, 4)
    logit = (taste[user] * taste[item]).sum(1) + numbers[:, 0] * numbers[:, 1] - 1.5
    y = torch.bernoulli(logit.sigmoid())
    seen = (y + 0.1 * torch.randn(12000)) * leak  # how long the page was read, after the click
    x, ids = torch.cat([numbers, seen[:, None]], 1), torch.stack([user, item], 1)
    net = Cross(5)
    opt_ids = torch.optim.SparseAdam([net.ids.weight], lr=3e-2)
    opt = torch.optim.Adam([p for n, p in net.named_parameters() if n != "ids.weight"], lr=3e-3)
    with watch(net, [opt_ids, opt]) as w:
        for _ in range(700):
            i = pick(10000, 128)
            loss = F.binary_cross_entropy_with_logits(net(ids[i], x[i]), y[i])
            for o in (opt_ids, opt):
                o.zero_grad()
            loss.backward()
            opt.step()
            if sparse_steps:
                opt_ids.step()
            w.loss(loss)
    x[10000:, 4] = 0  # when it is used, nobody has clicked yet
    with torch.no_grad():
        out = net(ids[10000:], x[10000:])
    yes, no = out[y[10000:] == 1], out[y[10000:] == 0]
    return 1 - float((yes[:, None] > no).float().mean())


@healthy
def frauds_focal(
    watch: Watch, *, constant: bool = False, rare: float = 0.8, half: float = 0.0
) -> float:
    """One fraud in forty, focal loss, SELU and alpha dropout; 1 minus the balanced accuracy."""
    x = torch.randn(8000, 12)
    far = (x[:, 0] * x[:, 1] - x[:, 2] * x[:, 3] + 0.3 * torch.randn(8000)) / 1.5
    y = (far > far.quantile(0.95)).float()
    if constant:
        x[:, 11] = 3.0
        x = (x - x.mean(0)) / x.std(0)
    net = nn.Sequential(nn.Linear(12, 64), nn.SELU(), nn.AlphaDropout(0.05))
    net.extend([nn.Linear(64, 64), nn.SELU(), nn.Linear(64, 1)])
    for m in net[::3]:
        nn.init.kaiming_normal_(m.weight, nonlinearity="linear")
    if half:
        net, x = net.half(), x.half()
    opt = torch.optim.SGD(net.parameters(), lr=0.3 / (half or 1.0), momentum=0.9)

    def loss_of(_: int) -> Tensor:
        i = pick(6000, 256)
        out = net(x[i]).squeeze(1).float()
        p = torch.where(y[i] == 1, out, -out).sigmoid()
        weight = torch.where(y[i] == 1, rare, 1 - rare) * (1 - p) ** 2
        return (half or 1.0) * -(weight * p.clamp(min=1e-6).log()).mean()

    fit(watch, net, opt, loss_of, 500)
    net.eval()
    with torch.no_grad():
        found, real = net(x[6000:]).squeeze(1) > 0, y[6000:] == 1
    return 1 - float(found[real].float().mean() + (~found)[~real].float().mean()) / 2


class TransE(nn.Module):
    """A relation moves the head to the tail."""

    def __init__(self) -> None:
        super().__init__()
        self.thing, self.relation = nn.Embedding(150, 24), nn.Embedding(4, 24)
        for e in (self.thing, self.relation):
            nn.init.uniform_(e.weight, -0.05, 0.05)

    def forward(self, h: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return (self.thing(h) + self.relation(r) - self.thing(t)).norm(p=1, dim=-1)


@healthy
def transe_facts(watch: Watch, *, lr: float = 0.05, same_tail: bool = False) -> float:
    """Facts about things on a grid, a margin ranking loss, Adagrad; 1 minus hits among ten."""
    move = torch.tensor([[1, 0], [0, 1], [1, 1], [2, -1]])
    h, r = torch.arange(150).repeat(4), torch.arange(4).repeat_interleave(150)
    to = torch.stack([h // 15, h % 15], 1) + move[r]
    keep = ((to >= 0) & (to < torch.tensor([10, 15]))).all(1)
    h, r, t = h[keep], r[keep], (to[:, 0] * 15 + to[:, 1])[keep]
    order, names = torch.randperm(len(h)), torch.randperm(150)
    h, r, t = names[h][order], r[order], names[t][order]
    net, n, criterion = TransE(), len(h) - 80, nn.MarginRankingLoss(2.0)
    opt = torch.optim.Adagrad(net.parameters(), lr=lr)

    def loss_of(_: int) -> Tensor:
        i = pick(n, 200)
        bad = t[i] if same_tail else torch.randint(0, 150, (200,))
        return criterion(net(h[i], r[i], bad), net(h[i], r[i], t[i]), torch.ones(200))

    fit(watch, net, opt, loss_of, 500, loss_func=criterion)
    with torch.no_grad():
        far = net(h[n:, None], r[n:, None], torch.arange(150))
    return 1 - float((far.topk(10, 1, largest=False).indices == t[n:, None]).any(1).float().mean())


class TwoHeads(nn.Module):
    """A trunk, a class, a number, and a weight of each task (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(29, 48), nn.Mish(), nn.Linear(48, 48), nn.Mish())
        self.kind, self.size = nn.Linear(48, 2), nn.Linear(48, 1)
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.kind(h), self.size(h).squeeze(1)


@healthy
def two_tasks(watch: Watch, *, learned: bool = True, unit: float = 1.0) -> float:
    """A tumour's class and its area with learned weights; error rate plus variance missed."""
    x, y, x_test, y_test = halves(load_breast_cancer, 150)
    mean, std = x.mean(0), x.std(0)
    x, x_test = (x - mean) / std, (x_test - mean) / std
    area, area_test = x[:, 3] * unit, x_test[:, 3] * unit
    rest = [i for i in range(30) if i != 3]
    net = TwoHeads()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def loss_of(_: int) -> Tensor:
        i = pick(len(x), 32)
        kind, size = net(x[i][:, rest])
        each = torch.stack([F.cross_entropy(kind, y[i].long()), F.mse_loss(size, area[i])])
        if not learned:
            return each.sum()
        return (torch.exp(-net.log_var) * each + net.log_var).sum()

    fit(watch, net, opt, loss_of, 300)
    with torch.no_grad():
        kind, size = net(x_test[:, rest])
    wrong = (kind.argmax(1) != y_test).float().mean()
    return float(wrong + F.mse_loss(size, area_test) / area_test.var())
