"""Data of several trainings: scikit-learn's digits, shapes drawn on noise, Python's manual."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics
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


def pick(n: int, size: int = 64) -> Tensor:
    """Indices of one random batch."""
    return torch.randint(0, n, (size,))


def generator() -> random.Random:
    """Python's random numbers, seeded as torch is."""
    return random.Random(torch.initial_seed())


LETTERS = " etaosnirlcdhmupfb\"'ygv.wxk,_()-:=jq`*0z1/[]><2{}#|5"


@cache
def manual() -> tuple[Tensor, Tensor]:
    """Letters of Python's manual in alphabetical order of pages: to train with, and held out."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).lower().split())
    ids = torch.tensor([k for c in text if (k := LETTERS.find(c)) >= 0])
    return ids[:-9600], ids[-9600:]
