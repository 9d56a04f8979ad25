"""Networks on graphs: communities (GCN, GAT, GraphSAGE with sampled neighbours), molecules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trials import Watch, healthy, update

N_NODES, N_KINDS = 400, 4


def communities(signal: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """A stochastic block model: features (weak), adjacency, the kind of each node."""
    kind = torch.arange(N_NODES) % N_KINDS
    same = kind[:, None] == kind[None]
    edges = (torch.rand(N_NODES, N_NODES) < torch.where(same, 0.06, 0.01)).float().triu(1)
    x = torch.randn(N_NODES, 32) + signal * F.one_hot(kind, 32)
    return x, edges + edges.T, kind


def normalised(adjacency: Tensor) -> Tensor:
    """D^-1/2 (A + I) D^-1/2."""
    a = adjacency + torch.eye(len(adjacency))
    scale = a.sum(1).rsqrt()
    return scale[:, None] * a * scale[None]


class GraphConv(nn.Module):
    """A linear layer, then a sum over neighbours."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return a @ self.linear(x)


class GCN(nn.Module):
    """Graph convolutions with ReLU and dropout in between."""

    def __init__(self, depth: int, rate: float):
        super().__init__()
        sizes = [32, *[32] * (depth - 1), N_KINDS]
        self.convs = nn.ModuleList(map(GraphConv, sizes, sizes[1:]))
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.relu(conv(self.drop(x), a))
        return self.convs[-1](self.drop(x), a)


def test_error(net: nn.Module, x: Tensor, a: Tensor, kind: Tensor, test: Tensor) -> float:
    net.eval()
    with torch.no_grad():
        return float((net(x, a).argmax(1) != kind)[test].float().mean())


@healthy
def gcn_communities(
    watch: Watch,
    *,
    depth: int = 4,
    rate: float = 0.5,
    raw: bool = False,
    constant: bool = False,
    decay: float = 5e-4,
) -> float:
    """A GCN trained on a fifth of all nodes, the whole graph at once, with Adam's own decay."""
    x, a, kind = communities()
    if constant:
        x = x / x
    train = torch.randperm(N_NODES) < N_NODES // 5
    a = a + torch.eye(N_NODES) if raw else normalised(a)
    net = GCN(depth, rate)
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=decay)
    with watch(net, opt) as w:
        for _ in range(200):
            opt.zero_grad()
            loss = F.cross_entropy(net(x, a)[train], kind[train])
            loss.backward()
            opt.step()
            w.loss(loss)
    return test_error(net, x, a, kind, ~train)


class Attend(nn.Module):
    """Graph attention with several heads."""

    def __init__(self, n_in: int, n_out: int, heads: int, dim: int):
        super().__init__()
        self.heads, self.softmax = heads, nn.Softmax(dim)
        self.linear = nn.Linear(n_in, heads * n_out, bias=False)
        self.source, self.goal = (nn.Parameter(torch.randn(heads, n_out) * 0.1) for _ in range(2))

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        h = self.linear(x).view(len(x), self.heads, -1)
        score = (h * self.goal).sum(2)[:, None] + (h * self.source).sum(2)[None]
        score = F.leaky_relu(score, 0.2).masked_fill(a[:, :, None] == 0, -1e9)
        return torch.einsum("ijh,jhd->ihd", self.softmax(score), h).flatten(1)


class GAT(nn.Module):
    """Two layers of attention."""

    def __init__(self, dim: int):
        super().__init__()
        self.one, self.two = Attend(32, 8, 4, dim), Attend(32, N_KINDS, 1, dim)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return self.two(self.drop(F.elu(self.one(self.drop(x), a))), a)


@healthy
def gat_communities(watch: Watch, *, dim: int = 1, lr: float = 0.01) -> float:
    """Graph attention over neighbours and oneself."""
    x, a, kind = communities()
    a = a + torch.eye(N_NODES)
    train = torch.randperm(N_NODES) < N_NODES // 4
    net, criterion = GAT(dim), nn.CrossEntropyLoss()
    opt = torch.optim.Adam(net.parameters(), lr=lr, weight_decay=5e-4)
    with watch(net, opt, loss_func=criterion):
        for _ in range(150):
            net.train()
            loss = criterion(net(x, a)[train], kind[train])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return test_error(net, x, a, kind, ~train)


class Sage(nn.Module):
    """Mean of sampled neighbours beside the node's own features, twice, each of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 48), nn.Linear(96, 48)
        self.head = nn.Linear(48, N_KINDS)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            x = F.normalize(F.relu(layer(torch.cat([x, a @ x], 1))), dim=1)
        return self.head(x)


def sampled(a: Tensor, n: int) -> Tensor:
    """Each row the mean over `n` neighbours, drawn anew."""
    i = torch.multinomial(a + 1e-9, n)
    return torch.zeros_like(a).scatter_(1, i, 1 / n)


@healthy
def sage_communities(watch: Watch, *, lr: float = 0.1, shuffled: bool = False) -> float:
    """GraphSAGE with sampled neighbours, batches of nodes, SGD with Nesterov momentum."""
    x, a, kind = communities(signal=1.5)
    train, test = torch.randperm(N_NODES).split([200, 200])
    net = Sage()
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3, nesterov=True)
    with watch(net, opt) as w:
        for _ in range(40):
            for i in train[torch.randperm(200)[:198]].split(33):
                y = kind[i][torch.randperm(len(i))] if shuffled else kind[i]
                loss = F.cross_entropy(net(x, sampled(a, 6))[i], y)
                update(w, opt, loss)
    return test_error(net, x, a / a.sum(1, keepdim=True), kind, test)


class MessagePassing(nn.Module):
    """Messages along bonds, a GRU for each atom, the sum over a molecule's atoms."""

    def __init__(self, rounds: int, width: int = 48):
        super().__init__()
        self.rounds, self.atom = rounds, nn.Embedding(5, width)
        self.message = nn.Sequential(nn.Linear(width + 3, width), nn.ReLU())
        self.update = nn.GRUCell(width, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        h = self.atom(atoms)
        for _ in range(self.rounds):
            pairs = torch.cat([h[:, None].expand(-1, 9, -1, -1), bonds], 3)
            got = (self.message(pairs) * bonds.sum(3, keepdim=True)).sum(2)
            h = self.update(got.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return self.head(h).sum(1)


def molecules(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random trees of 9 atoms with three kinds of bonds, and an energy that adds up over bonds."""
    atoms = torch.randint(0, 5, (n, 9))
    parent = (torch.rand(n, 8) * torch.arange(1, 9)).long()
    order, bonds = torch.randint(0, 3, (n, 8)), torch.zeros(n, 9, 9, 3)
    rows, child = torch.arange(n)[:, None].expand(-1, 8), torch.arange(1, 9).expand(n, -1)
    bonds[rows, child, parent, order] = bonds[rows, parent, child, order] = 1.0
    mass = torch.tensor([0.5, -1.0, 1.5, 0.2, -0.7])[atoms]
    ends = mass.gather(1, parent) * mass[:, 1:] * torch.tensor([1.0, 1.7, 0.6])[order]
    return atoms, bonds, -4000 + 25 * (mass + 0.3 * mass**2).sum(1) + 30 * ends.sum(1)


@healthy
def molecule_energy(
    watch: Watch, *, raw: bool = False, flat: bool = True, lr: float = 3e-3
) -> float:
    """Energies by message passing, standardised; AdamW with warm-up and clipping."""
    atoms, bonds, energy = molecules(700)
    mean, std = energy[:600].mean(), energy[:600].std()
    y = energy if raw else (energy - mean) / std
    net = MessagePassing(2)
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1, (t + 1) / 30))
    with watch(net, opt) as w:
        for _ in range(12):
            for i in torch.randperm(600).split(32):
                out = net(atoms[i], bonds[i])
                loss = (((out.squeeze(1) if flat else out) - y[i]) ** 2).mean()
                update(w, opt, loss, clip=(net, 5.0), sched=schedule)
    with torch.no_grad():
        out = net(atoms[600:], bonds[600:]).squeeze(1)
    out = out if raw else out * std + mean
    return float((out - energy[600:]).abs().mean() / std)
