"""Parameters: bare, aliased, part-frozen, parametrized."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo_base import add, module, rand

B = 2


# bare and listed


@module(
    "param_list_dict",
    rand(B, 4),
    params=2 * 16 + 24 + 6,
    macs=B * (16 + 16 + 24),
    calls={"ws": 0, "named": 0},
)
class ParamListDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList(torch.randn(4, 4) for _ in range(2))
        self.named = nn.ParameterDict({"a": torch.randn(4, 6), "b": torch.zeros(6)})

    def forward(self, x: Tensor) -> Tensor:
        for w in self.ws:
            x = x @ w
        return x @ self.named["a"] + self.named["b"]


@module(
    "scalar_and_empty_params",
    rand(B, 4),
    params=20 + 1 + 0,
    macs=B * 16,
    note="a 0-d, an empty and a None parameter",
)
class ScalarParam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.logit_scale.exp()


# aliased


@module(
    "alias_storage",
    rand(B, 8),
    params=2 * 72,
    macs=2 * B * 64,
    note="two Parameters over one storage: both count as parameters, their bytes once",
)
class AliasStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


# frozen


def frozen_part() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 20), nn.Linear(20, 4)).eval()
    net[0].bias.requires_grad_(False)
    net[2].weight.requires_grad_(False)
    return net


add(
    "frozen_part",
    frozen_part,
    rand(B, 10),
    params=110 + 220 + 84,
    trainable=100 + 20 + 84,
    macs=B * (100 + 200 + 80),
    note="the bias of one layer and the weight of another are frozen",
)


def all_frozen() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False).eval()


add("all_frozen", all_frozen, rand(B, 4), params=30, trainable=0, macs=B * 24, tags={"no_grad_in"})


# parametrized


def weight_norm() -> nn.Sequential:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 2)
    ).eval()


add(
    "weight_norm",
    weight_norm,
    rand(B, 8),
    params=(6 + 48 + 6) + 14,
    macs=B * (48 + 12),
    note="g (6x1), v (6x8), bias (6); `.weight` is computed",
)
add(
    "weight_norm_old",
    lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 6)), nn.Linear(6, 2)).eval(),
    rand(B, 8),
    params=(6 + 48 + 6) + 14,
    macs=B * (48 + 12),
    note="the hook of torch.nn.utils.weight_norm, set before hookkit's",
)
add(
    "spectral_norm",
    lambda: parametrizations.spectral_norm(nn.Linear(8, 6)).train(),
    rand(B, 8),
    params=48 + 6,
    macs=B * 48,
    note="reading .weight in training mode advances the power iteration",
)
