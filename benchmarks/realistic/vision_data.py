"""Images for the trainings of vision: scikit-learn's digits, and shapes drawn on noise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) with values 0 to 16 and labels: 1400 to train with, 397 held out."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32)[order, None]
    y = torch.tensor(data.target)[order].long()
    return x[:1400], y[:1400], x[1400:], y[1400:]


def standard_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The digits with mean 0 and standard deviation 1."""
    x, y, x_test, y_test = digits()
    return (x - x.mean()) / x.std(), y, (x_test - x.mean()) / x.std(), y_test


class Shapes(NamedTuple):
    """Images (N, 1, 16, 16) of one object each, and what there is to know of it."""

    image: Tensor
    mask: Tensor
    box: Tensor  # centre x, centre y, width and height, as shares of the image
    label: Tensor  # 0 square, 1 disc, 2 cross


@cache
def shapes(n: int, seed: int) -> Shapes:
    """Squares, discs and crosses of different sizes and brightness on a noisy ground."""
    g = torch.Generator().manual_seed(seed)
    r = 2 + 3 * torch.rand(n, 1, 1, generator=g)
    cx, cy = (5 + 6 * torch.rand(n, 1, 1, generator=g) for _ in "xy")
    label = torch.randint(0, 3, (n,), generator=g)
    dx, dy = (torch.arange(16.0) - cx[..., 0])[:, None, :], (torch.arange(16.0) - cy[..., 0])
    dx, dy = dx.abs(), dy[:, :, None].abs()
    square = (dx <= r) & (dy <= r)
    kinds = torch.stack([square, dx**2 + dy**2 <= r**2, square & ((dx < 1) | (dy < 1))])
    mask = kinds[label, torch.arange(n)][:, None].float()
    light = 0.8 + torch.rand(n, 1, 1, 1, generator=g)
    image = mask * light + 0.3 * torch.randn(n, 1, 16, 16, generator=g)
    box = torch.cat([cx, cy, 2 * r, 2 * r], 1)[..., 0] / 16
    return Shapes(image, mask, box, label)


def batches(n: int, size: int, n_steps: int) -> Iterator[Tensor]:
    """Indices of `n_steps` batches, shuffled anew in each epoch."""
    step = 0
    while True:
        for idx in torch.randperm(n).split(size):
            if len(idx) < size:
                continue
            if step == n_steps:
                return
            step += 1
            yield idx


@torch.no_grad()
def error_rate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of images that the model puts in a wrong class."""
    model.eval()
    return (model(x).argmax(1) != y).float().mean().item()
