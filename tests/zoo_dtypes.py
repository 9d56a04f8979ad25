"""Parameters by dtype and place: half, complex, quantised, sparse, meta, lazy."""

from typing import Any

import torch
from torch import Tensor, nn
from zoo_base import add, ids, module, rand

B = 2


# dtypes


@module("mixed_dtypes", rand(B, 8), params=72 + 16 + 18, macs=B * (64 + 16))
class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lo, self.norm = nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8)
        self.hi = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.hi(self.norm(self.lo(x.bfloat16()).float()))


@module(
    "complex",
    rand(B, 8),
    params=64 + 18,
    macs=B * (64 + 16),
    note="a complex number is one parameter, a complex product one multiply-accumulate",
)
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((torch.fft.fft(x) @ self.w).abs())


def quantised() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)


if set(torch.backends.quantized.supported_engines) - {"none"}:
    add(
        "quantised_dynamic",
        quantised,
        rand(B, 8),
        params=0,
        macs=None,
        tags={"no_grad_in"},
        note="weights are packed objects, no Parameters: 0 parameters, no counted kernel",
    )


@module(
    "sparse_param",
    rand(B, 8),
    params=64 + 18,
    trainable=18,
    macs=None,
    tags={"sparse"},
    note="numel of a sparse parameter is that of its dense shape; the product is not counted",
)
class SparseParam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.sparse.mm(self.w, x.T).T)


add(
    "sparse_embedding",
    lambda: nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)).eval(),
    ids(20, B, 3),
    params=80 + 10,
    macs=B * 3 * 8,
    note="its gradient is a sparse tensor",
)


# where they live, when they come


def meta_net() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


add(
    "meta_device",
    lambda: meta_net().eval(),
    lambda: (torch.empty(B, 3, 8, 8, device="meta"),),
    params=3 * 8 * 9 + 8 + 8 * 36 * 10 + 10,
    macs=B * (36 * 8 * 27 + 2880),
    tags={"meta"},
    note="no values anywhere: shapes only",
)
add(
    "lazy",
    lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)).eval(),
    rand(B, 3, 6, 6),
    params=3 * 4 * 9 + 4 + 4 * 16 * 5 + 5,
    macs=B * (16 * 4 * 27 + 320),
    tags={"lazy"},
    note="uninitialised until the first forward: the truth is after it (it draws the weights)",
)


@module(
    "built_on_first_call",
    rand(B, 4),
    params=20 + 15,
    macs=B * (16 + 12),
    tags={"lazy"},
    note="head exists after the first forward only: the truth is after it",
)
class BuiltOnFirstCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Linear | None = None
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if self.head is None:
            self.head = nn.Linear(h.shape[1], 3)
        return self.head(h)


class Subclassed(nn.Parameter):
    """A Parameter subclass, as quantisation libraries make."""


class SubclassParam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Subclassed(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return x @ self.w


add("param_subclass", SubclassParam, rand(B, 4), params=16, macs=B * 16)
