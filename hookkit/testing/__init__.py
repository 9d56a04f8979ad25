"""Small data, models and Learners, for tests and tutorials.

`synth_learner()` is a whole run in one call, as in fastai's test_utils: a line with noise, a model
of two numbers, a few batches.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookkit.training import Learner
from hookkit.training.data import DataLoaders


def synth_dbunch(
    a: float = 2,
    b: float = 3,
    bs: int = 16,
    n_train: int = 10,
    n_valid: int = 2,
    cuda: bool = False,
) -> DataLoaders:
    """Make batches of (x, a·x + b + noise), both (bs, 1) float32: `n_train` and `n_valid` batches.

    >>> len(synth_dbunch().train)
    10
    """

    def dataset(n: int) -> TensorDataset:
        x = torch.randn(bs * n, 1)
        return TensorDataset(x, a * x + b + 0.1 * torch.randn(bs * n, 1))

    train, valid = dataset(n_train), dataset(n_valid)
    return DataLoaders(
        DataLoader(train, bs, shuffle=n_train > 0),
        DataLoader(valid, bs),
        device="cuda" if cuda else "cpu",
    )


class RegModel(nn.Module):
    """Computes `a·x + b` with two scalar parameters and no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `a·x + b`, (n, 1), for `x`, (n, 1)."""
        return x * self.a + self.b


def SGD(params: Any, lr: float, mom: float = 0.0, wd: float = 0.0) -> torch.optim.SGD:
    """Make torch's SGD under fastai's names for its options."""
    return torch.optim.SGD(params, lr=lr, momentum=mom, weight_decay=wd)


def synth_learner(
    n_trn: int = 10,
    n_val: int = 2,
    cuda: bool = False,
    lr: float = 1e-3,
    data: Any = None,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> Learner:
    """Make a Learner on `synth_dbunch`, ready to fit.

    Args:
        n_trn: training batches.
        n_val: validation batches.
        cuda: whether batches and model go to the GPU.
        lr: learning rate.
        data: DataLoaders to use instead.
        model: model to use instead of a RegModel.
        kwargs: for the Learner.

    >>> synth_learner(n_trn=5).fit(0)
    """
    dls = synth_dbunch(n_train=n_trn, n_valid=n_val, cuda=cuda) if data is None else data
    options = {"loss_func": nn.MSELoss(), "opt_func": partial(SGD, mom=0.9), **kwargs}
    return Learner(dls, RegModel() if model is None else model, lr=lr, **options)


def mlp(*sizes: int, act_cls: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Make linear layers of these sizes with an activation between them.

    >>> [type(m).__name__ for m in mlp(8, 16, 3)]
    ['Linear', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = []
    for ni, nf in pairwise(sizes):
        layers += [nn.Linear(ni, nf), act_cls()]
    return nn.Sequential(*layers[:-1])
