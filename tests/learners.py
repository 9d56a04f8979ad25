"""What tests of the loops share: quiet Learners, a log of events, and nets with odd layers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookkit.callbacks import Callback
from hookkit.callbacks.events import EVENTS
from hookkit.testing import synth_learner
from hookkit.training import Learner


def quiet(n_trn: int = 3, n_val: int = 2, **kwargs: Any) -> Any:
    """A `synth_learner` that prints no row."""
    learn = synth_learner(n_trn=n_trn, n_val=n_val, **kwargs)
    learn.logger = lambda row: None
    return learn


def plain(data: Any, model: nn.Module, **kwargs: Any) -> Any:
    """A Learner with SGD on `data` that prints no row."""
    learn = Learner(data, model, **{"opt_func": torch.optim.SGD, **kwargs})
    learn.logger = lambda row: None
    return learn


class EventLog(Callback):
    """Appends every event it gets to `seen`; the events can be chosen."""

    def __init__(self, *events: str, order: float = 0) -> None:
        self.order, self.seen = order, list[str]()
        super().__init__(**{e: partial(_note, e) for e in events or EVENTS})


def _note(event: str, log: EventLog) -> None:
    log.seen.append(event)


def conv_layer(ni: int, nf: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU: fastai's ConvLayer in its default form."""
    conv = nn.Conv2d(ni, nf, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(nf), nn.ReLU())


def conv_net(ni: int = 1, n_out: int = 10, width: int = 8) -> nn.Sequential:
    """Three conv layers, average pooling and a linear head; (n, ni, h, w) → (n, n_out)."""
    return nn.Sequential(
        conv_layer(ni, width),
        conv_layer(width, 2 * width, stride=2),
        conv_layer(2 * width, 4 * width, stride=2),
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
        _, (h, _) = self.lstm(x)
        out: Tensor = self.head(h[-1])
        return out
