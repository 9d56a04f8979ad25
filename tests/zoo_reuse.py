"""Modules called again, in-place operations, outputs that are views or the input itself."""

import torch
from torch import Tensor, nn
from zoo_base import add, module, rand

B = 2


# reuse


def shared() -> nn.Sequential:
    fc = nn.Linear(8, 8)
    return nn.Sequential(fc, nn.ReLU(), fc, nn.Sequential(nn.Linear(8, 8), fc))


add(
    "shared_module",
    lambda: shared().eval(),
    rand(B, 8),
    params=2 * (8 * 8 + 8),
    macs=4 * B * 64,
    calls={"0": 3, "3": 1, "3.0": 1},
    note="one Linear under three names; named_modules gives the first",
)


@module(
    "re_entrant",
    rand(B, 8),
    params=72,
    macs=2 * B * 64,
    calls={"": 2, "leaf": 2, "child": 1},
)
class ReEntrant(nn.Module):
    """A child that calls back into its parent through a plain (unregistered) reference."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(8, 8)
        self.child = _CallsParent(self)

    def forward(self, x: Tensor, inner: bool = True) -> Tensor:
        return self.child(self.leaf(x)) if inner else self.leaf(x)


class _CallsParent(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "parent", parent)

    def forward(self, x: Tensor) -> Tensor:
        return self.parent(x, inner=False)


# in-place


@module(
    "inplace",
    rand(B, 8),
    params=144,
    macs=2 * B * 64,
    tags={"inplace"},
    note="fc1's and fc2's outputs are overwritten after their hooks ran",
)
class InplaceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(8, 8), nn.ReLU(inplace=True)
        self.fc2 = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.fc1(x))
        y = self.fc2(h)
        y += 1
        y.mul_(2)
        return y


@module("view_outputs", rand(B, 8), params=72, macs=B * 64)
class Chunked(nn.Module):
    """Outputs that are views: chunk, then an in-place write into one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.fc = _Split(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.split(self.fc(x))
        return torch.cat([a * 2, b], 1)


class _Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.tensor_split(x, 2, 1)
        return a, b


add(
    "identity_outputs",
    lambda: nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.Dropout(), nn.Sequential()).eval(),
    rand(B, 8),
    params=72,
    macs=B * 64,
    calls={"0": 1, "2": 1, "3": 1},
    note="output is the input object: Identity, Dropout in eval, empty Sequential",
)
