"""Wrappers, foreign hooks, modes and state."""

from typing import Any

import torch
from torch import Tensor, nn
from zoo_base import add, module, rand

B = 2


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


SMALL, SMALL_MACS = 72 + 18, B * 80


# wrappers

add(
    "scripted",
    lambda: torch.jit.script(small().eval()),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    tags={"scripted"},
    note="a ScriptModule refuses forward hooks",
)
add(
    "traced",
    lambda: torch.jit.trace(small().eval(), torch.randn(B, 8)),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    tags={"scripted"},
    note="submodules accept hooks that never fire",
)


@module(
    "script_part",
    rand(B, 8),
    params=SMALL + 6,
    macs=SMALL_MACS + B * 4,
    tags={"scripted"},
)
class ScriptPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fast = torch.jit.script(small())
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fast(x))


add(
    "compiled_cold",
    lambda: torch.compile(small().eval(), backend="eager"),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"": 1, "0": 1, "2": 1},
    tags={"compiled"},
    note="not yet called; calls and names are those of the model inside",
)
add(
    "data_parallel",
    lambda: nn.DataParallel(small().eval()),
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"": 1, "module": 1, "module.0": 1},
    note="names begin with module.",
)


class Recorder:
    """A user's own hook, picklable."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, *_: Any) -> None:
        self.n += 1


class Doubling:
    """A user's hook that replaces an output: later hooks see the replaced one."""

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2


def user_hooks() -> nn.Module:
    net = small().eval()
    net[0].register_forward_hook(Recorder())
    net[0].register_forward_hook(Doubling())
    net[1].register_forward_pre_hook(Recorder())
    net[2].register_full_backward_hook(Recorder())
    return net


add(
    "user_hooks",
    user_hooks,
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    note="forward, forward-pre and full backward hooks of the user are there already",
)


def instance_forward() -> nn.Module:
    net = small().eval()
    inner = net[0].forward
    net[0].forward = lambda x: inner(x) + 1
    return net


add(
    "patched_forward",
    instance_forward,
    rand(B, 8),
    params=SMALL,
    macs=SMALL_MACS,
    calls={"0": 1},
    note="as accelerate and monkey-patchers do: forward is an instance attribute",
)


# modes and state


def mixed_modes() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout()
    )
    net.train()
    net[1].eval()
    return net


add(
    "mixed_modes",
    mixed_modes,
    rand(B, 4),
    params=40 + 16 + 72,
    macs=B * (32 + 64),
    note="a batch-norm kept in eval inside a training model",
)


@module(
    "stateful_buffers",
    rand(B, 4),
    params=20,
    macs=B * 16,
    note="writes buffers in place, even in eval, and replaces one",
)
class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.n_calls += 1
        self.ema.lerp_(h.detach().mean(0), 0.1)
        self.scratch = torch.ones(2)
        return h - self.ema.clone()


@module(
    "caches_activations",
    rand(B, 4),
    params=20,
    macs=B * 16,
    note="keeps its last output as an ordinary attribute",
)
class CachingAttr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.fc(x)
        return self.cache


@module("mutates_input", rand(B, 4), params=20, macs=B * 16, tags={"mutates_input", "inplace"})
class MutatesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mul_(0.5))


add(
    "empty_model",
    lambda: nn.Sequential().eval(),
    rand(B, 4),
    params=0,
    macs=0,
    calls={"": 1},
    tags={"no_grad_in"},
)
