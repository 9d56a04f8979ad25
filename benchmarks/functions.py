"""What it costs to see calls of torch functions, and attention patterns, in a forward.

Of the MLP each functional ReLU is stored, of the GPT each call of fused attention. PyTorch shows
calls of functions to a function mode, and makes every torch function slower while one is on; the
modes beside `hook_function` do the least that one has to. As in `capture.py`, each round runs every
method once in shuffled order, best of four calls, over the bare one of the same round.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from capture import Block
from rows import AGAIN, Row, against, best, main
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookkit import hook_attention, hook_function, select

SDPA = F.scaled_dot_product_attention
Runs = dict[str, Callable[[], Any]]

FORWARD = [
    ("hook_function", "a function mode that does nothing"),
    ("hook_function", "a function mode that stores clones"),
    ("hook_function(within=…)", "a function mode that stores clones"),
    ("hook_function(within=…, inputs=True)", "a function mode that stores clones"),
]
ATTENTION = ("hook_attention", "a function mode that stores clones")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class NoOp(TorchFunctionMode):
    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


class Storing(TorchFunctionMode):
    """The least that stores what one function gives."""

    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self.wanted, self.stored = wanted, list[Tensor]()

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = f(*args, **(kwargs or {}))
        if f is self.wanted:
            self.stored.append(y.detach().clone())
        return y


def mlp() -> tuple[nn.Module, Tensor, Any, str]:
    return nn.Sequential(*[Layer() for _ in range(24)]), torch.randn(16, 64), F.relu, "*"


def gpt() -> tuple[nn.Module, Tensor, Any, str]:
    return nn.Sequential(*[Block() for _ in range(12)]), torch.randn(2, 32, 64), SDPA, "*.attn"


def forwards(model: nn.Module, x: Tensor, f: Any, names: str) -> Runs:
    """The methods on one forward."""

    def inside(block: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            with block():
                model(x)

        return run

    chosen = select(model, names)
    return {
        AGAIN: lambda: model(x),
        "a function mode that does nothing": inside(NoOp),
        "a function mode that stores clones": inside(lambda: Storing(f)),
        "hook_function": inside(lambda: hook_function(f)),
        "hook_function(within=…)": inside(lambda: hook_function(f, within=chosen)),
        "hook_function(within=…, inputs=True)": inside(
            lambda: hook_function(f, chosen, inputs=True)
        ),
        **({"hook_attention": inside(lambda: hook_attention(chosen))} if f is SDPA else {}),
    }


def ratios(runs: Runs, bare: Callable[[], Any], rounds: int, device: str) -> dict[str, float]:
    """The median ratio of each method to `bare`."""
    found = {name: list[float]() for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name in random.sample(sorted(runs), len(runs)):
            base = best(bare, device)
            found[name].append(best(runs[name], device) / base)
    return {name: statistics.median(each) for name, each in found.items()}


def rows(full: bool, device: str) -> Iterator[Row]:
    random.seed(0)
    torch.manual_seed(0)
    rounds = 60 if full else 15
    models = {"MLP, 24 functional ReLUs": mlp(), "GPT, 12 blocks": gpt()}
    for name, (model, x, *rest) in models.items():
        model, x = model.to(device), x.to(device)
        with torch.no_grad():
            found = ratios(forwards(model, x, *rest), lambda m=model, x=x: m(x), rounds, device)
        pairs = [*FORWARD, ATTENTION] if "hook_attention" in found else FORWARD
        yield from against(f"{name}: a forward", found, pairs)


if __name__ == "__main__":
    main(__doc__ or "", rows)
