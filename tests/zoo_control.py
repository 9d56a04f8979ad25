"""Control flow: data-dependent, early exit, direct calls, checkpoints, gradients in forward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo_base import add, module, rand

B = 2


# control flow


@module(
    "direct_forward",
    rand(B, 4),
    params=2 * 20 + 10,
    macs=B * (2 * 16 + 8),
    calls={"a": 0, "b": 0, "c": 1},
    note="a runs by .forward, b's weight is used by a function: no hook can see them",
)
class DirectForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a.forward(x)
        return self.c(F.linear(h, self.b.weight, self.b.bias))


@module(
    "unused_heads",
    rand(B, 4),
    params=30 + 3 * 21,
    macs=B * (24 + 18),
    calls={"heads": 0, "heads.cls": 1, "heads.seg": 0, "heads.aux": 0},
)
class UnusedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleDict({k: nn.Linear(6, 3) for k in ("seg", "cls", "aux")})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["cls"](self.body(x))


@module(
    "swallows_exceptions",
    rand(B, 4),
    params=40,
    macs=B * 16,
    calls={"try_me": 1, "instead": 0},
    note="`except Exception` in forward would swallow an early stop",
)
class Swallows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.try_me, self.instead = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            h = self.try_me(x)
        except Exception:
            h = self.instead(x)
        return h * 2


@module(
    "raises",
    rand(B, 4),
    params=40,
    macs=2 * B * 16,
    tags={"raises"},
    note="raises ValueError inside bad, after bad.fc ran",
)
class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ok, self.bad = nn.Linear(4, 4), _Bad()

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.ok(x))


class _Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"cannot work with {tuple(self.fc(x).shape)}")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if not torch.is_grad_enabled():
            return self.block(h)
        return checkpoint(self.block, h, use_reentrant=self.reentrant)


for reentrant in (False, True):
    add(
        "checkpointed_reentrant" if reentrant else "checkpointed",
        lambda r=reentrant: Checkpointed(r).train(),
        rand(B, 8),
        params=144,
        macs=2 * B * 64,
        calls={"stem": 1, "block.0": 1, "block.2": 1},
        tags={"checkpoint_reentrant"} if reentrant else set(),
        note="the block runs again in backward: still one call",
    )


@module(
    "needs_grad",
    rand(B, 4),
    params=30 + 7,
    macs=B * (4 * 6 + 6) * 2,
    tags={"no_grad_in"},
    note="the backward inside forward costs both products once more",
)
class NeedsGrad(nn.Module):
    """An energy model: its output is the gradient of its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.out(torch.tanh(self.fc(x))).sum()
        return torch.autograd.grad(energy, x)[0]


@module(
    "grad_mode_switches",
    rand(B, 4),
    params=20,
    macs=2 * B * 16,
    calls={"fc": 2},
    note="one call without grad, one with",
)
class NeedsGradMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.fc(x)
        with torch.enable_grad():
            return self.fc(x) - frozen
