"""Networks on graphs: communities (GCN, GAT)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trials import Watch, healthy

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
