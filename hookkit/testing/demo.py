"""A real training from one command: `python -m hookkit.testing.demo`.

Trains a small convolutional net on scikit-learn's 1,797 scans of handwritten digits, records what
every layer does, prints the summary, the layers' statistics and the diagnosis, and writes a report
with pictures. It uses hookkit's public interface only: read it as an example.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookkit._core.devices import accelerator
from hookkit._core.messages import missing_extra
from hookkit.callbacks import ProgressCallback
from hookkit.recorders import ActivationStats, GradientStats, ParamStats
from hookkit.records import Record
from hookkit.training import Learner
from hookkit.training.data import DataLoaders


def digits(seed: int = 42, batch_size: int = 64, device: str = "cpu") -> DataLoaders:
    """Load the digits, (n, 1, 8, 8) float32 in [0, 1], 1,437 to train on, 360 to validate."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing_extra("scikit-learn", "demo", "load its handwritten digits") from None
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    shuffler = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=shuffler)
    train, valid = order[:-360], order[-360:]
    return DataLoaders(
        DataLoader(TensorDataset(x[train], y[train]), batch_size, shuffle=True, generator=shuffler),
        DataLoader(TensorDataset(x[valid], y[valid]), 2 * batch_size),
        device=device,
    )


def conv_net(n_classes: int = 10) -> nn.Sequential:
    """Make three convolutions with batch norm and ReLU, and a linear head; takes (n, 1, 8, 8).

    >>> [name for name, _ in conv_net().named_children()][:4]
    ['conv1', 'norm1', 'act1', 'conv2']
    """
    layers: dict[str, nn.Module] = {}
    for i, (ni, nf, stride) in enumerate([(1, 16, 1), (16, 32, 2), (32, 64, 2)], 1):
        layers[f"conv{i}"] = nn.Conv2d(ni, nf, 3, stride, 1, bias=False)
        layers[f"norm{i}"] = nn.BatchNorm2d(nf)
        layers[f"act{i}"] = nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    layers["head"] = nn.Linear(64, n_classes)
    return nn.Sequential(OrderedDict(layers))


def accuracy(pred: Tensor, y: Tensor) -> Tensor:
    """Return the share of rows of `pred`, (n, classes), whose largest entry is at `y`, (n,)."""
    return (pred.argmax(dim=-1) == y).float().mean()


def train(epochs: int, seed: int, device: str) -> Learner:
    """Fit a Learner for `epochs`; record activations, gradients and weights."""
    torch.manual_seed(seed)
    recorders = [
        ActivationStats(with_hist=True, include_paramless=True, units=True),
        GradientStats(),
        ParamStats(),
    ]
    learn = Learner(
        digits(seed, device=device),
        conv_net(),
        nn.CrossEntropyLoss(),
        opt_func=torch.optim.AdamW,
        metrics=[accuracy],
        cbs=[ProgressCallback, *recorders],
    )
    learn.fit_one_cycle(epochs, 1e-2)
    return learn


def lines_of_last(record: Record, of: Sequence[str] = ("mean", "std", "near_zero")) -> list[str]:
    """Return the last recorded step as lines: a heading, then three statistics of each layer."""
    width = max(map(len, record.labels))
    lines = [" ".join([f"{'layer':{width}}", *(f"{name:>10}" for name in of)])]
    for row, name in enumerate(record.labels):
        values = [f"{record.value(statistic, row)[-1]:>10.3f}" for statistic in of]
        lines.append(" ".join([f"{name:{width}}", *values]))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, draw; return the exit code."""
    p = argparse.ArgumentParser(
        prog="python -m hookkit.testing.demo", description=__doc__.splitlines()[0]
    )
    p.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the report")
    p.add_argument("--epochs", type=int, default=8, help="passes over the training digits")
    p.add_argument("--seed", type=int, default=42, help="of the split, the weights, the order")
    p.add_argument("--device", default=accelerator(), help="cpu, cuda, cuda:<n>, mps or xpu")
    opts = p.parse_args(argv)
    if opts.epochs < 1:
        p.error(f"--epochs {opts.epochs}: give 1 or more")
    opts.out.mkdir(parents=True, exist_ok=True)
    learn = train(opts.epochs, opts.seed, opts.device)
    print(learn.summary())
    print(f"\nThe last of {len(learn.activation_stats.stats)} recorded steps:\n")
    print("\n".join(lines_of_last(learn.activation_stats.record())))
    print(f"\nDiagnosis: {learn.diagnose()}")
    report = learn.report(opts.out / "report.html")
    learn.plot().savefig(opts.out / "run.png", dpi=150)
    print(f"\nValidation accuracy: {learn.recorder.values[-1][-1]:.1%}")
    print(f"{report.name}, with all pictures, and run.png are in {opts.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
