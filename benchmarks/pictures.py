"""Every picture of three small trainings as PNG files, and whether they still look as they did.

    python benchmarks/pictures.py --write FOLDER      # draw them into a folder
    python benchmarks/pictures.py --against FOLDER    # draw them and name those that differ

One training is healthy, one breaks with NaN; the third is of a transformer of 45 layers, whose
learning rate becomes far too high half-way. The baseline that is committed is
`benchmarks/baselines/pictures`. Two pictures are the same if their sizes are equal and the mean
absolute difference of their pixels (0 to 255) is below 0.5, so that another version of a font or
of anti-aliasing passes. A picture that differs is written beside the baseline as `NAME.new.png`,
to be looked at; where it is better, it replaces the baseline in the same commit as the change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from torch import nn

from hookkit import plotting
from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.training import Watcher, watch


def trained(lr: float, n_steps: int, break_at: int | None) -> tuple[Watcher, ActivationStats]:
    """A small net on random data, recorded with everything on."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 9, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    xs = torch.randn(256, 1, 12, 12)
    ys = (xs.flatten(1) @ torch.randn(144, 10)).argmax(1)
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    stats = ActivationStats(include_paramless=True, units=True, with_hist=True)
    with watch(model, opt, stats, GradientStats(with_hist=True), ParamStats()) as w:
        for i in range(n_steps):
            at = (i * 32) % 256
            xb, yb = xs[at : at + 32], ys[at : at + 32]
            xb = xb * float("nan") if i == break_at else xb
            loss = nn.functional.cross_entropy(model(xb), yb)
            w.loss(loss)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if at == 224:
                w.epoch()
    return w, stats


class Block(nn.Module):
    """A block of a transformer, initialised as GPT-2's are: biases begin at 0."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.ln_1, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj, self.ln_2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.fc, self.act, self.out = nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)
        for layer in (self.qkv, self.proj, self.fc, self.out):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, -1)
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.out(self.act(self.fc(self.ln_2(x))))


def deep(n_steps: int = 120) -> Watcher:
    """A transformer that learns to count in threes, until its learning rate rises 300-fold."""
    torch.manual_seed(0)
    ends = nn.LayerNorm(32), nn.Linear(32, 16)
    model = nn.Sequential(nn.Embedding(16, 32), *(Block() for _ in range(6)), *ends)
    start = torch.randint(0, 16, (256, 1))
    xs = (start + 3 * torch.arange(25)) % 16
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    stats = ActivationStats(include_paramless=True, with_hist=True)
    with watch(model, opt, stats, GradientStats(), ParamStats()) as w:
        for i in range(n_steps):
            at = (i * 32) % 256
            opt.param_groups[0]["lr"] = 1e-3 if i < n_steps // 2 else 0.3
            scores = model(xs[at : at + 32, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), xs[at : at + 32, 1:].flatten())
            w.loss(loss)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if at == 224:
                w.epoch()
    return w


def pictures() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each picture, and a function that draws it."""
    for name, (w, stats) in {
        "healthy": trained(0.05, 120, None),
        "broken": trained(0.05, 60, 40),
    }.items():
        run = w.run_record()
        record = stats.record()
        yield f"{name}_run", lambda run=run: plotting.plot_run(run)
        yield f"{name}_loss", lambda run=run: plotting.plot_loss(run)
        yield f"{name}_depth", lambda run=run: plotting.plot_depth(run)
        yield f"{name}_stats", lambda record=record: plotting.plot_stats(record)
        yield f"{name}_layer_stats", lambda record=record: plotting.plot_layer_stats(record, 0)
        yield f"{name}_color_dim", lambda record=record: plotting.color_dim(record)
        yield f"{name}_color_dim_one", lambda record=record: plotting.color_dim(record, 1)
        yield f"{name}_density", lambda record=record: plotting.plot_density(record)
        yield f"{name}_dead", lambda record=record: plotting.plot_dead(record)
        yield f"{name}_updates", lambda run=run: plotting.plot_updates(run)
    run = deep().run_record()
    for name in ("plot_run", "plot_loss", "plot_depth", "plot_density"):
        yield f"deep_{name.removeprefix('plot_')}", partial(getattr(plotting, name), run)


def difference(a: Path, b: Path) -> float:
    """Mean absolute difference of two PNG files' pixels, 0 to 255; infinite for other sizes."""
    from matplotlib.image import imread

    x, y = imread(a), imread(b)
    if x.shape != y.shape:
        return float("inf")
    return float(np.abs(x - y).mean() * 255)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--write", type=Path)
    which.add_argument("--against", type=Path)
    o = parser.parse_args()
    folder = o.write or o.against
    folder.mkdir(parents=True, exist_ok=True)
    differ = []
    for name, draw in pictures():
        target = folder / f"{name}.png"
        fresh = target if o.write else folder / f"{name}.new.png"
        with plotting.offscreen():
            plotting.save(draw(), fresh, dpi=60)
        if o.against:
            d = difference(target, fresh) if target.exists() else float("inf")
            if d < 0.5:
                fresh.unlink()
            else:
                differ.append(name)
                print(f"{name}: differs by {d:.2f}")
    if o.against:
        print(f"{len(differ)} pictures differ")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
