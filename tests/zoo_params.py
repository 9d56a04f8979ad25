"""Parameters: bare, tied, aliased, part-frozen, parametrized."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from zoo_base import add, ids, rand

B = 2


# bare and listed


class NoWeightName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x @ self.kernel + self.shift)


add(
    "no_weight_name",
    lambda: NoWeightName().eval(),
    rand(B, 4),
    params=16 + 4 + 20,
    macs=2 * B * 16,
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


add(
    "param_list_dict",
    lambda: ParamListDict().eval(),
    rand(B, 4),
    params=2 * 16 + 24 + 6,
    macs=B * (16 + 16 + 24),
    calls={"ws": 0, "named": 0},
)


class FunctionalOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3, 3, 3))
        self.v = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.conv2d(x, self.w)).mean((2, 3)), self.v)


add(
    "functional_only",
    lambda: FunctionalOnly().eval(),
    rand(B, 3, 6, 6),
    params=6 * 27 + 24,
    macs=B * (16 * 6 * 27 + 24),
    note="no submodule at all",
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


add(
    "scalar_and_empty_params",
    lambda: ScalarParam().eval(),
    rand(B, 4),
    params=20 + 1 + 0,
    macs=B * 16,
    note="a 0-d, an empty and a None parameter",
)


# tied


class Tied(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=bias)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.emb(x))))


add(
    "tied_weights",
    lambda: Tied().eval(),
    ids(50, B, 5),
    params=50 * 8 + 72 + 50,
    macs=B * 5 * (64 + 400),
)


class PartTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


add(
    "part_tied",
    lambda: PartTied().eval(),
    rand(B, 8),
    params=64 + 8 + 8,
    macs=2 * B * 64,
    note="weights tied, biases not",
)


class AliasStorage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = nn.Parameter(self.a.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))


add(
    "alias_storage",
    lambda: AliasStorage().eval(),
    rand(B, 8),
    params=2 * 72,
    macs=2 * B * 64,
    note="two Parameters over one storage: both count as parameters, their bytes once",
)


class ViewParam(nn.Module):
    """Two Parameters that are halves of one flat storage, as FSDP and flat optimizers make."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(32)
        self.u, self.v = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.u @ self.v


add("flat_views", ViewParam, rand(B, 4), params=32, macs=2 * B * 16)


# frozen


def frozen_body() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    for p in list(net[0].parameters()) + list(net[1].parameters()):
        p.requires_grad_(False)
    return net.eval()


add(
    "frozen_body",
    frozen_body,
    rand(B, 4),
    params=40 + 16 + 18,
    trainable=18,
    macs=B * (32 + 16),
)


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


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


add(
    "lora",
    lambda: nn.Sequential(LoRA(nn.Linear(16, 16)), nn.ReLU(), LoRA(nn.Linear(16, 16))).eval(),
    rand(B, 16),
    params=2 * (272 + 64),
    trainable=2 * 64,
    macs=2 * B * (256 + 64),
)


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
    tags={"mutates_buffers"},
    note="reading .weight in training mode advances the power iteration",
)
add(
    "orthogonal",
    lambda: parametrizations.orthogonal(nn.Linear(6, 6, bias=False)).eval(),
    rand(B, 6),
    params=36,
    macs=None,
    note="the parametrization's own products depend on torch's algorithm (matrix exponential)",
)


def pruned() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    prune.random_unstructured(net[0], "weight", amount=0.5)
    return net.eval()


add(
    "pruned",
    pruned,
    rand(B, 8),
    params=72 + 18,
    macs=B * (64 + 16),
    note="weight_orig counts whole; the mask is a buffer",
)
