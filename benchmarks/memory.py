"""What a long recording costs: memory that must not grow, steps that must not slow down.

Forty layers with histograms hold much in each step; two small layers take many steps to fill their
table, in which a step costs as much as at the beginning. The process grows by what its greatest
resident size has risen since the first step. A writing of `LogTo` sends 50 steps of ten layers, and
its time is the median of nine. `--full` takes 100,000 steps instead of 20,000.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rows import Row, main
from torch import nn

from hookkit.callbacks import LogTo
from hookkit.recorders import ActivationStats
from hookkit.training import watch


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def trained(model: nn.Module, n: int, x: torch.Tensor, opt: torch.optim.Optimizer) -> float:
    """CPU seconds per step."""
    start = time.process_time()
    for _ in range(n):
        model(x).mean().backward()
        opt.step()
        opt.zero_grad()
    return (time.process_time() - start) / n


def small_net(depth: int) -> tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(depth)])
    return model, torch.randn(32, 16), torch.optim.SGD(model.parameters(), lr=1e-3)


def growth(depth: int, with_hist: bool, marks: tuple[int, ...]) -> tuple[float, list[float]]:
    """MiB by which the process has grown, and the CPU seconds of a step before each mark."""
    torch.set_num_threads(1)
    model, x, opt = small_net(depth)
    with watch(model, opt, ActivationStats(with_hist=with_hist)):
        trained(model, 1, x, opt)
        start, at, times = peak_mib(), 1, []
        for mark in marks:
            trained(model, mark - 1000 - at, x, opt)
            times.append(trained(model, 1000, x, opt))
            at = mark
    return peak_mib() - start, times


class TimedLog(LogTo):
    """Takes the CPU time of each `before_batch`, of which every fiftieth writes."""

    spent: list[float]

    def before_batch(self) -> None:
        start = time.process_time()
        super().before_batch()
        self.spent.append(time.process_time() - start)


def writings(at: tuple[int, ...]) -> list[float]:
    """CPU seconds that a writing takes at these steps: the median of nine."""
    model, x, opt = small_net(10)
    with tempfile.TemporaryDirectory() as folder:
        log = TimedLog(Path(folder, "run.jsonl"), every=50)
        log.spent, found = [], []
        with watch(model, opt, ActivationStats(), log):
            for step in at:
                trained(model, step + 225 - len(log.spent), x, opt)
                found.append(statistics.median(sorted(log.spent[-450:])[-9:]))
    return found


def alone(f: Callable[..., Any], *args: Any) -> Any:
    """What `f` returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(f, *args).result()


def rows(full: bool, device: str) -> Iterator[Row]:
    n = 100_000 if full else 20_000
    grown, _ = alone(growth, 40, True, (n // 10,))
    case = f"40 layers with histograms, {n // 10:,} steps"
    yield Row(case, "growth of the process", grown, "target", 20.0, 1.0, "MiB")
    grown, (first, last) = alone(growth, 2, False, (5_000, n))
    case = f"2 layers, {n:,} steps"
    yield Row(case, "growth of the process", grown, "target", 15.0, 1.0, "MiB")
    yield Row(case, "a step", last * 1e6, "a step at 5,000", first * 1e6, 1.2, "µs")
    early, late = writings((400, 4000))
    case = "LogTo, 10 layers, every 50 steps"
    yield Row(case, "a writing at 4,000", late * 1e3, "a writing at 400", early * 1e3, 1.2, "ms")


if __name__ == "__main__":
    main(__doc__ or "", rows)
