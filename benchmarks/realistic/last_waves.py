"""A curve of many waves by a residual MLP with batch norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trials import Watch, failing, fit, healthy


class Residual(nn.Module):
    """Batch norm, ReLU and a linear layer, twice, added to the input."""

    def __init__(self, dim: int, bias: float):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.one, self.two = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.norm2.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.relu(self.norm2(self.one(F.relu(self.norm1(x))))))


@healthy
def residual_waves(watch: Watch, *, size: int = 64, bias: float = 0.0) -> float:
    """Regression with SGD, Nesterov and cosine; the share of variance missed."""
    x = torch.randn(4000, 5)
    y = (2 * x[:, :2]).sin().sum(1, True) * x[:, 2:3].cos() + 0.5 * (x[:, 3:4] * x[:, 4:]).tanh()
    net = nn.Sequential(nn.Linear(5, 64), *(Residual(64, bias) for _ in range(4)), nn.Linear(64, 1))
    opt = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=1e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 300)

    def loss_of(_: int) -> Tensor:
        i = torch.randint(3500, (size,))
        return F.mse_loss(net(x[i]), y[i])

    fit(watch, net, opt, loss_of, 300, sched=sched)
    net.eval()
    with torch.no_grad():
        return float(F.mse_loss(net(x[3500:]), y[3500:]) / y.var())


@failing("batch norm with batches of two rows", names=("small_batch",), trace=True)
def residual_waves_batch_2(watch: Watch) -> float:
    return residual_waves(watch, size=2)


@failing("batch norms' biases begin at -8 before ReLU", names=("dead", "bad_init"), trace=True)
def residual_waves_dead(watch: Watch) -> float:
    return residual_waves(watch, bias=-8.0)
