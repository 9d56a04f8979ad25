"""Hand-made records and runs: what recorders would have written, without a training."""

from dataclasses import replace
from typing import Any

import numpy as np

from hookkit.records import Record, Run

EDGES = np.concatenate(([-np.inf], -np.logspace(4, -6, 31), np.logspace(-6, 4, 31), [np.inf]))


def small_names() -> list[tuple[str, str]]:
    return [("fc1", "Linear"), ("act", "ReLU"), ("fc2", "Linear")]


def record(
    layers: list[tuple[str, str]],
    n: int = 300,
    kind: str = "activation",
    *,
    every: int = 1,
    epoch: int = 100,
    hist: bool = True,
    seed: int = 0,
) -> Record:
    """A healthy-looking record of `n` columns, `every` steps apart, `epoch` steps an epoch."""
    rng, m = np.random.default_rng(seed), len(layers)
    steps = np.arange(n, dtype=np.int64) * every
    depth, time = np.linspace(0, 1, m)[:, None], np.linspace(0, 1, n)[None]
    small = 1e-3 if kind == "gradient" else 1.0
    std = (
        small
        * (0.8 + 0.5 * np.sin(7 * depth) + 0.6 * time)
        * np.exp(0.08 * rng.normal(size=(m, n)))
    )
    mean = 0.2 * std * np.sin(20 * depth) + 0.02 * std * rng.normal(size=(m, n))
    relu = np.array([kind in ("ReLU", "GELU") for _, kind in layers])[:, None]
    values = {
        "count": np.full((m, n), 4096.0),
        "mean": mean,
        "std": std,
        "rms": np.sqrt(mean**2 + std**2),
        "min": mean - 3 * std,
        "max": mean + 3 * std,
        "near_zero": np.where(relu, 0.5, 0.04) + 0.01 * rng.random((m, n)),
        "zero": np.where(relu, 0.5, 0.0) + np.zeros((m, n)),
        "nonfinite": np.zeros((m, n)),
    }
    return Record(
        kind, tuple(name for name, _ in layers), tuple(kind for _, kind in layers),
        steps, steps // epoch, steps, np.full(n, 1, np.int64), values,
        normal_hist(mean, std) if hist else None, EDGES if hist else None, {"eps": 0.05},
    )  # fmt: skip


def normal_hist(mean: np.ndarray, std: np.ndarray, size: int = 2048) -> np.ndarray:
    """(rows, bins, n) counts of normal values; a logistic curve stands in for the normal one."""
    edges = np.clip(EDGES, -1e30, 1e30)[None, :, None]
    z = (edges - mean[:, None]) / np.maximum(std[:, None], 1e-30)
    below = 1 / (1 + np.exp(-np.clip(1.702 * z, -60, 60)))
    return np.diff(np.round(size * below), axis=1).astype(np.int64)


def params(
    layers: list[tuple[str, str]], n: int = 300, *, every: int = 1, epoch: int = 100, seed: int = 1
) -> Record:
    """Weights and biases of the layers that have them, moving at about 1e-3 a step."""
    rng = np.random.default_rng(seed)
    have = [
        (a, b)
        for a, b in layers
        if b in ("Linear", "Conv2d", "Embedding", "LayerNorm", "BatchNorm2d")
    ]
    rows = [(f"{a}.{p}", b) for a, b in have for p in ("weight", "bias")]
    ndim = [2 if n.endswith("weight") and "Norm" not in b else 1 for n, b in rows]
    steps, m = np.arange(n, dtype=np.int64) * every, len(rows)
    ratio = 10 ** (-2.6 - 0.7 * np.linspace(0, 1, n)[None] + 0.15 * rng.normal(size=(m, n)))
    ones = np.ones((m, n))
    values = {
        "weight_norm": 5 * ones, "grad_norm": 0.1 * ones, "update_norm": 5 * ratio,
        "update_ratio": ratio, "grad_rms": 1e-3 * ones, "weight_rms": 0.05 * ones,
        "nonfinite": 0 * ones,
    }  # fmt: skip
    meta = {
        "ndim": ndim,
        "numel": [100] * m,
        "requires_grad": [True] * m,
        "in_optimizer": [True] * m,
    }
    return Record(
        "param", tuple(a for a, _ in rows), tuple(b for _, b in rows),
        steps, steps // epoch, steps, np.ones(n, np.int64), values, meta=meta,
    )  # fmt: skip


def run(layers: list[tuple[str, str]] | None = None, n: int = 300, **options: Any) -> Run:
    """A healthy run: all three records, losses, gradient norms and validation."""
    layers, rng = layers or small_names(), np.random.default_rng(5)
    epoch = options.get("epoch", 100)
    losses = 0.1 + 2.2 * np.exp(-np.arange(n) / (n / 4 + 1)) * np.exp(0.1 * rng.normal(size=n))
    epochs = -(-n // epoch)
    ends = [min(n, (e + 1) * epoch) - 1 for e in range(epochs)]
    valid = [
        {"epoch": e, "train_loss": losses[end], "valid_loss": losses[end] + 0.05, "accuracy": 0.9}
        for e, end in enumerate(ends)
    ]
    return Run(
        record(layers, n, **options),
        record(layers, n, "gradient", seed=3, **options),
        params(layers, n, epoch=epoch),
        losses, valid, 0.5 + np.exp(0.3 * rng.normal(size=n)),
        info={"model": "Net", "optimizer": "AdamW", "n_classes": 10},
    )  # fmt: skip


def with_values(r: Record, statistic: str, cells: Any, value: Any) -> Record:
    """A copy of `r` with some cells of one statistic set."""
    table = r.values[statistic].copy()
    table[cells] = value
    return replace(r, values={**r.values, statistic: table})


def exploding(source: Run) -> Run:
    """Grows from the middle layer on, and is NaN from three quarters of the run."""
    r = source.activations
    assert r is not None
    m, n = r.values["rms"].shape
    start, end = n // 3, 3 * n // 4
    growth = np.ones((m, n))
    growth[m // 2 :, start:end] = np.exp(np.linspace(0, 25, end - start))
    scaled = {k: r.values[k] * growth for k in ("mean", "std", "rms", "min", "max")}
    for table in scaled.values():
        table[m // 2 :, end:] = np.nan
    bad = r.values["nonfinite"].copy()
    bad[m // 2 :, end:] = 4096
    hist = None
    if r.hist is not None:
        hist = normal_hist(np.nan_to_num(scaled["mean"]), np.nan_to_num(scaled["std"], nan=1.0))
        hist[m // 2 :, :, end:] = 0
    losses = np.where(np.arange(n) < end, source.losses, np.nan)
    values = {**r.values, **scaled, "nonfinite": bad}
    return replace(source, activations=replace(r, values=values, hist=hist), losses=losses)
