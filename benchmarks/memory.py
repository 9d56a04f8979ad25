"""What ten thousand recorded steps of forty layers with histograms hold: it must not grow.

Run `python benchmarks/memory.py` (`--steps 10000 --layers 40`). Prints what the tables and rings
hold and how much the process has grown, and how many steps a record has come to merge.
"""

from __future__ import annotations

import argparse
import resource

import torch
from torch import nn

from hookkit.stats import ActivationStats, GradientStats, ParamStats
from hookkit.watching import watch


def grown_mib(since: float = 0.0) -> float:
    """Peak resident memory of this process in MiB, above `since`."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - since


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--all", action="store_true", help="gradients and parameters too")
    o = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(o.layers)])
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 16)
    stats = ActivationStats(with_hist=True)
    more = [GradientStats(with_hist=True), ParamStats()] if o.all else []
    print(
        f"{o.layers} layers, torch {torch.__version__}\n"
        f"{'steps':>8} {'MiB held':>9} {'grown':>7}  spans"
    )
    with watch(model, opt, stats, *more):
        start = 0.0
        for step in range(1, o.steps + 1):
            model(x).mean().backward()
            opt.step()
            opt.zero_grad()
            start = start or grown_mib()
            if step in (10, 100) or step % (o.steps // 10) == 0:
                held, span = (
                    stats.accumulator.n_bytes / 2**20,
                    stats.accumulator.history.stride,
                )
                print(f"{step:8} {held:9.2f} {grown_mib(start):7.1f}  {span}", flush=True)


if __name__ == "__main__":
    main()
