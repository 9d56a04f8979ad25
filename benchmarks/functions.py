"""What it costs to see calls of torch functions: over the bare forward, and over a training step.

Run `python benchmarks/functions.py` (`--rounds 60`). As in `capture.py`: each round runs every
method once in shuffled order, best of four calls, over the bare one of the same round (CPU time); a
cell is the median ratio. The MLP is small, so that a function takes little and the mode much.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from capture import Block, best, installed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hookkit import ActivationStats, hook_function, select, watch

SDPA = F.scaled_dot_product_attention
Runs = dict[str, Callable[[], Any]]


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
        "bare again": lambda: model(x),
        "a mode that does nothing": inside(NoOp),
        "a mode that stores detached clones": inside(lambda: Storing(f)),
        "hook_function": inside(lambda: hook_function(f)),
        "hook_function, within": inside(lambda: hook_function(f, within=chosen)),
        "hook_function, inputs, within": inside(lambda: hook_function(f, chosen, inputs=True)),
    }


def trainings(model: nn.Module, x: Tensor, f: Any, names: str) -> tuple[Runs, list[Any]]:
    """The methods on ten training steps, and the watchers that have to be left."""
    opened = []

    def loop(stats: ActivationStats | None) -> Callable[[], Any]:
        torch.manual_seed(0)
        own, data = type(model)(*[type(m)() for m in model.children()]), x
        opt = torch.optim.SGD(own.parameters(), lr=1e-4)
        if stats is not None:
            opened.append(watch(own, opt, stats).__enter__())

        def run() -> None:
            for _ in range(10):
                own(data).sum().backward()
                opt.step()
                opt.zero_grad()

        return run

    functions = [F.relu, SDPA]
    runs = {
        "bare again": loop(None),
        "ActivationStats()": loop(ActivationStats()),
        "ActivationStats(functions=…)": loop(ActivationStats(functions=functions)),
        "ActivationStats(every=10)": loop(ActivationStats(every=10)),
        "ActivationStats(functions=…, every=10)": loop(
            ActivationStats(functions=functions, every=10)
        ),
    }
    return {"bare": loop(None), **runs}, opened


def ratios(runs: Runs, bare: Callable[[], Any], rounds: int) -> tuple[float, dict[str, float]]:
    """Seconds of `bare`, and the median ratio of each method."""
    seconds, found = [], {name: list[float]() for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name in random.sample(sorted(runs), len(runs)):
            seconds.append(best(bare))
            found[name].append(best(runs[name]) / seconds[-1])
    each = {name: statistics.median(found[name]) for name in runs}
    return statistics.median(seconds), each


def table(results: dict[str, tuple[float, dict[str, float]]]) -> str:
    """The results as a markdown table."""
    head = [f"{name}, bare {bare * 1e3:.2f} ms" for name, (bare, _) in results.items()]
    lines = ["| method | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for method in next(iter(results.values()))[1]:
        cells = [f"{each[method]:.3f}" for _, each in results.values()]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What seeing calls of functions costs, over bare.")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    models = {"mlp24": mlp(), "gpt12": gpt()}
    found = {}
    with torch.no_grad():
        for name, (model, *rest) in models.items():
            found[name] = ratios(
                forwards(model, *rest), lambda m=model, x=rest[0]: m(x), args.rounds
            )
    print(table(found))
    found = {}
    for name, given in models.items():
        runs, opened = trainings(*given)
        bare = runs.pop("bare")
        found[name] = ratios(runs, bare, max(args.rounds // 4, 1))
        for w in opened:
            w.__exit__(None, None, None)
    print("\n" + table(found))
    print(f"\n{installed('torch', 'numba')}, 1 thread")


if __name__ == "__main__":
    main()
