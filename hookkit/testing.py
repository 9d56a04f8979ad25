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

from hookkit.callbacks import Callback
from hookkit.data import DataLoaders
from hookkit.events import EVENTS
from hookkit.learner import Learner


def synth_dbunch(
    a: float = 2,
    b: float = 3,
    bs: int = 16,
    n_train: int = 10,
    n_valid: int = 2,
    cuda: bool = False,
) -> DataLoaders:
    """Batches of (x, a·x + b + noise), each (bs, 1) float32: `n_train` and `n_valid` of them.

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
    """`a·x + b` with two scalar parameters and no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1) → (n, 1)."""
        return x * self.a + self.b


class FlatMSELoss(nn.MSELoss):
    """The mean squared error of prediction and target as flat vectors: fastai's MSELossFlat."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Any two tensors with the same number of elements → the loss."""
        return super().forward(input.flatten(), target.flatten().to(input.dtype))

    def __repr__(self) -> str:
        return "FlattenedLoss of MSELoss()"


def SGD(params: Any, lr: float, mom: float = 0.0, wd: float = 0.0) -> torch.optim.SGD:
    """torch's SGD under fastai's names for its options."""
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
    """A Learner on `synth_dbunch`, ready to fit.

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
    options = {"loss_func": FlatMSELoss(), "opt_func": partial(SGD, mom=0.9), **kwargs}
    return Learner(dls, RegModel() if model is None else model, lr=lr, **options)


class ConvLayer(nn.Sequential):
    """Convolution, batch norm, ReLU: fastai's ConvLayer in its default form.

    Args:
        ni: input channels.
        nf: output channels.
        ks: kernel size.
        stride: of the convolution.
        padding: None keeps the size at stride 1.
        bias: None gives one only where there is no norm.
        ndim: 1, 2 or 3 dimensions.
        norm: whether to normalise.
        act_cls: activation class, None for none.
        transpose: a transposed convolution instead.
    """

    def __init__(
        self,
        ni: int,
        nf: int,
        ks: int = 3,
        stride: int = 1,
        padding: int | None = None,
        bias: bool | None = None,
        ndim: int = 2,
        norm: bool = True,
        act_cls: type[nn.Module] | None = nn.ReLU,
        transpose: bool = False,
    ) -> None:
        kind = f"Conv{'Transpose' * transpose}{ndim}d"
        padding = ((ks - 1) // 2 if not transpose else 0) if padding is None else padding
        conv = getattr(nn, kind)(
            ni, nf, ks, stride, padding, bias=not norm if bias is None else bias
        )
        norms = [getattr(nn, f"BatchNorm{ndim}d")(nf)] if norm else []
        super().__init__(conv, *norms, *([act_cls()] if act_cls is not None else []))


def mlp(*sizes: int, act_cls: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them.

    >>> [type(m).__name__ for m in mlp(8, 16, 3)]
    ['Linear', 'ReLU', 'Linear']
    """
    layers: list[nn.Module] = []
    for ni, nf in pairwise(sizes):
        layers += [nn.Linear(ni, nf), act_cls()]
    return nn.Sequential(*layers[:-1])


def conv_net(ni: int = 1, n_out: int = 10, width: int = 8) -> nn.Sequential:
    """Three ConvLayers, average pooling and a linear head; (n, ni, h, w) → (n, n_out)."""
    return nn.Sequential(
        ConvLayer(ni, width),
        ConvLayer(width, 2 * width, stride=2),
        ConvLayer(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, n_out),
    )


class RNNNet(nn.Module):
    """An LSTM, whose output is a nested tuple, and a linear head; (n, steps, ni) → (n, n_out)."""

    def __init__(self, ni: int = 4, nh: int = 8, n_out: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(ni, nh, batch_first=True)
        self.head = nn.Linear(nh, n_out)

    def forward(self, x: Tensor) -> Tensor:
        """The head of the last step's state."""
        _, (h, _) = self.lstm(x)
        out: Tensor = self.head(h[-1])
        return out


class EventLog(Callback):
    """Appends every event it gets to `seen`. `order` and the events can be chosen.

    >>> log = EventLog("before_fit", "after_fit")
    >>> synth_learner(cbs=log).fit(0)
    >>> log.seen
    ['before_fit', 'after_fit']
    """

    def __init__(self, *events: str, order: float = 0) -> None:
        self.order, self.seen = order, list[str]()
        super().__init__(**{e: partial(_note, e) for e in events or EVENTS})


def _note(event: str, log: EventLog) -> None:
    log.seen.append(event)
