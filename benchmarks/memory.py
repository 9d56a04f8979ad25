"""What ten thousand recorded steps of forty layers with histograms hold: it must not grow.

Held is what the tables and rings have; grown, by how much the greatest resident size of the process
has risen since the first step. Less than `--full` takes 2,000 steps: from 600 on nothing grows.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import torch
from rows import Row, main
from torch import nn

from hookkit.stats import ActivationStats
from hookkit.watching import watch


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rows(full: bool, device: str) -> Iterator[Row]:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)])
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, stats, held = torch.randn(32, 16), ActivationStats(with_hist=True), {}
    marks = (1000, 10_000) if full else (1000, 2000)
    with watch(model, opt, stats):
        for step in range(1, marks[-1] + 1):
            model(x).mean().backward()
            opt.step()
            opt.zero_grad()
            if step == 1:
                start = peak_mib()
            if step in marks:
                held[step] = stats.accumulator.n_bytes / 2**20
    grown = peak_mib() - start
    first, last = marks
    yield Row(f"held after {last:,} steps", held[last], "the target", 20.0, 1.0, "MiB")
    yield Row("grown in them", grown, "the target", 20.0, 1.0, "MiB")
    yield Row(f"held after {last:,} steps", held[last], f"after {first:,}", held[first], 1.0, "MiB")


if __name__ == "__main__":
    main(__doc__ or "", rows)
