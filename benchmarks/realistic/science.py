"""Functions and equations: a physics-informed net, SIREN, LBFGS, bfloat16."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trials import Watch, healthy, update


def derivative(u: Tensor, t: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), t, create_graph=True)[0]


@healthy
def oscillator_pinn(watch: Watch, *, relu: bool = False, lr: float = 3e-3) -> float:
    """u'' + 0.4 u' + 4 u = 0 from equation and start alone; the loss begins low and hovers."""
    act = nn.ReLU if relu else nn.Tanh
    net = nn.Sequential(nn.Linear(1, 48), act(), nn.Linear(48, 48), act(), nn.Linear(48, 1))
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.998)
    with watch(net, opt) as w:
        for _ in range(700):
            t = torch.cat([torch.zeros(1), 3 * torch.rand(63)])[:, None].requires_grad_()
            u = net(t)
            du = derivative(u, t)
            equation = (derivative(du, t) + 0.4 * du + 4 * u).pow(2).mean()
            loss = equation + 20 * ((u[0] - 1) ** 2 + du[0] ** 2).sum()
            update(w, opt, loss, sched=schedule)
    t = torch.linspace(0, 3, 200)[:, None]
    speed = math.sqrt(4 - 0.04)
    exact = (-0.2 * t).exp() * ((speed * t).cos() + 0.2 / speed * (speed * t).sin())
    with torch.no_grad():
        return float((net(t) - exact).pow(2).mean() / exact.pow(2).mean())


class Sine(nn.Module):
    """A linear layer and sin(30 x), with the weights of the SIREN paper, or PyTorch's own."""

    def __init__(self, n_in: int, n_out: int, bound: float, siren: bool):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        if siren:
            nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return (30 * self.linear(x)).sin()


@healthy
def siren_picture(watch: Watch, *, siren: bool = True, lr: float = 3e-4) -> float:
    """A picture of 48×48 from coordinates, by sines; the score is the error between pixels."""
    axis = torch.linspace(-1, 1, 48)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    picture = (9 * x * y).sin() * (-(x**2 + y**2)).exp() + 0.5 * ((x - 0.3).abs() < 0.2).float()
    points, value = torch.stack([x, y], 2).view(-1, 2), picture.view(-1, 1) * 2 - 0.5
    hidden = math.sqrt(6 / 64) / 30
    net = nn.Sequential(Sine(2, 64, 1 / 2, siren), Sine(64, 64, hidden, siren), nn.Linear(64, 1))
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    test = torch.rand(len(points)) < 0.2
    x, y = points[~test], value[~test]
    with watch(net, opt) as w:
        for _ in range(300):
            i = torch.randint(0, len(x), (512,))
            loss = F.mse_loss(net(x[i]), y[i])
            update(w, opt, loss)
    with torch.no_grad():
        return float((net(points[test]) - value[test]).pow(2).mean() / value.var())


@healthy
def surface_lbfgs(
    watch: Watch, *, lr: float = 1.0, search: bool = True, gain: float = 1.0
) -> float:
    """A smooth surface by LBFGS over all data, with a line search."""
    x = torch.rand(400, 2) * 4 - 2
    y = (x[:, 0] * x[:, 1] + (2 * x[:, 0]).sin() + x[:, 1] ** 2 / 2)[:, None]
    y = (y - y.mean()) / y.std()
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.LBFGS(
        net.parameters(),
        lr=lr,
        max_iter=4,
        history_size=20,
        line_search_fn="strong_wolfe" if search else None,
    )
    with watch(net, opt) as w:

        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(net(x[:300] * gain), y[:300])
            loss.backward()
            return loss

        for _ in range(120):
            w.loss(opt.step(closure))
    with torch.no_grad():
        return float(F.mse_loss(net(x[300:] * gain), y[300:]))


@healthy
def field_surrogate(watch: Watch, *, bf16: bool = False, lr: float = 3e-4) -> float:
    """Three material numbers to a curve of 16 points; layer norm and AdamW, a small rate."""
    x, at = torch.rand(2000, 3), torch.linspace(0, 1, 16)
    a, b, c = (v[:, None] for v in x.unbind(1))
    y = (6 * a * at + 3 * b).sin() * (-3 * c * at).exp() + b * at
    y = (y - y.mean(0)) / y.std(0)
    net = nn.Sequential(
        nn.Linear(3, 64),
        nn.LayerNorm(64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 16),
    )
    x = (x - 0.5) * 3.5
    if bf16:
        net, x, y = (t.to(torch.bfloat16) for t in (net, x, y))
    opt = torch.optim.AdamW(net.parameters(), lr=lr, eps=1e-8)
    with watch(net, opt) as w:
        for _ in range(400):
            i = torch.randint(0, 1600, (64,))
            loss = (net(x[i]) - y[i]).pow(2).mean()
            update(w, opt, loss)
    with torch.no_grad():
        return float((net(x[1600:]) - y[1600:]).float().pow(2).mean())
