"""What comes next in a session, and what a state is worth: SASRec, temporal differences."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fresh_images import pick
from .trials import Watch, fit, healthy


class SasRec(nn.Module):
    """A causal transformer over the items of a session."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.place = nn.Embedding(120, 32), nn.Parameter(torch.randn(15, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        mask = torch.ones(n, n).triu(1).bool()
        return self.body(self.item(ids) + self.place[:n], mask=mask)


@healthy
def sasrec_sessions(watch: Watch, *, first_only: bool = False, clip: float = 0.0) -> float:
    """The next item against sampled others; 1 minus the hits among the best two of 120."""
    order = torch.randperm(120)
    jump = torch.randint(1, 3, (1500, 16))
    x = order[(torch.randint(0, 120, (1500, 1)) + jump.cumsum(1)) % 120]
    net = SasRec()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3, betas=(0.9, 0.98))
    if clip:
        opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def loss_of(_: int) -> Tensor:
        i = torch.arange(8) if first_only else pick(1300, 8)
        h, good = net(x[i, :-1]), x[i, 1:]
        bad = torch.randint(0, 120, (*good.shape, 5))
        up = (h * net.item(good)).sum(-1)
        down = (h[..., None, :] * net.item(bad)).sum(-1)
        return -F.logsigmoid(up).mean() - F.logsigmoid(-down).mean()

    fit(watch, net, opt, loss_of, 400, clip=clip or None)
    net.eval()
    with torch.no_grad():
        top = (net(x[1300:, :-1])[:, -1] @ net.item.weight.T).topk(2, 1).indices
    return 1 - float((top == x[1300:, -1:]).any(1).float().mean())


def walk(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States in [0, 1], next states, rewards and ends of a random walk that pays 1 on the right."""
    s = torch.rand(n)
    t = s + 0.15 * torch.randn(n)
    return s, t.clamp(0, 1), (t >= 1).float(), ((t >= 1) | (t <= 0)).float()


@healthy
def td_walk(watch: Watch, *, gamma: float = 1.0, ends: bool = True) -> float:
    """Values of a random walk by TD(0) with a target net; against Monte Carlo's."""
    net = nn.Sequential(nn.Linear(9, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    target = deepcopy(net)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    s, t, r, done = walk(4000)
    bumps = torch.linspace(0, 1, 9)

    def value(f: nn.Module, state: Tensor) -> Tensor:
        return f(torch.exp(-((state[:, None] - bumps) ** 2) * 40)).squeeze(1)

    def loss_of(step: int) -> Tensor:
        if step % 5 == 0:
            target.load_state_dict(net.state_dict())
        i = pick(4000, 128)
        ahead = value(target, t[i]) * (1 - done[i] if ends else 1)
        return F.mse_loss(value(net, s[i]), r[i] + gamma * ahead.detach())

    fit(watch, net, opt, loss_of, 1000)
    at = start = torch.rand(3000)
    won, alive = torch.zeros(3000), torch.ones(3000)
    for _ in range(200):
        at = at + 0.15 * torch.randn(3000)
        won = won + alive * (at >= 1)
        alive = alive * ((at > 0) & (at < 1))
    with torch.no_grad():
        mean = value(net, start)
    grid = (start * 10).long()
    miss = [(mean - won)[grid == k].mean() ** 2 for k in range(10)]
    return float(torch.stack(miss).mean() ** 0.5)
