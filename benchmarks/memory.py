"""What recorded steps of forty layers with histograms hold in memory: it must not grow.

The statistics are all that is recorded. The process grows by what its greatest resident size has
risen since the first step. `--full` takes 10,000 steps instead of 2,000.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import torch
from rows import Row, main
from torch import nn

from hookkit.recorders import ActivationStats
from hookkit.training import watch


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
                held[step] = sum(t.nbytes for t in stats.tally.tables().values()) / 2**20
    grown = peak_mib() - start
    first, last = marks
    case, what = f"40 layers, {last:,} steps", "size of the statistics"
    yield Row(case, what, held[last], "target", 20.0, 1.0, "MiB")
    yield Row(case, "growth of the process", grown, "target", 20.0, 1.0, "MiB")
    yield Row(case, what, held[last], f"the same after {first:,} steps", held[first], 1.0, "MiB")


if __name__ == "__main__":
    main(__doc__ or "", rows)
