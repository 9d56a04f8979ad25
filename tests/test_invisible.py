"""Training with hooks, statistics and everything else on is training without, to the last bit."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from learners import RNNNet, conv_net
from torch import Tensor, nn

from hookkit.callbacks import Callback
from hookkit.recording import HookCallback
from hookkit.testing import mlp, synth_learner


class InPlace(nn.Module):
    """In-place layers, a residual written in place, dropout, a module and a ReLU used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(6, 8), nn.ReLU(inplace=True)
        self.drop, self.shared = nn.Dropout(0.3), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.stem(x))
        g = self.shared(self.drop(h))
        g += h
        h = self.norm(self.act(self.shared(g)))
        out: Tensor = self.head(h)
        return out


def image_batches() -> Any:
    return [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(4)]


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "in place": (InPlace, lambda: _flat(6), nn.MSELoss()),
    "conv": (conv_net, image_batches, nn.CrossEntropyLoss()),
    "rnn": (RNNNet, lambda: _sequences(), nn.MSELoss()),
    "mlp": (lambda: mlp(6, 9, 1), lambda: _flat(6), nn.MSELoss()),
}


def _flat(n: int) -> Any:
    return [(torch.randn(8, n), torch.randn(8, 1)) for _ in range(4)]


def _sequences() -> Any:
    return [(torch.randn(8, 3, 4), torch.randn(8, 1)) for _ in range(4)]


def stats_callbacks() -> list[Any]:
    from hookkit.stats import ActivationStats, FlightRecorder, GradientStats, ParamStats

    return [
        ActivationStats(with_hist=True, include_paramless=True, units=True),
        GradientStats(with_hist=True),
        ParamStats(),
        FlightRecorder("report"),
    ]


GUESTS: dict[str, Callable[[], list[Any]]] = {
    "forward hooks": lambda: [HookCallback(include_paramless=True, hook=lambda m, i, o: o)],
    "backward hooks": lambda: [
        HookCallback(is_forward=False, include_paramless=True, hook=lambda m, i, o: (i, o))
    ],
    "some batches": lambda: [HookCallback(every=2, on_valid=True, hook=lambda m, i, o: o)],
    "statistics": stats_callbacks,
    "reads between": lambda: [
        Callback(after_epoch=lambda cb: (cb.learn.validate(), cb.learn.get_preds()))
    ],
}


def trained(net: str, guests: list[Any]) -> tuple[dict[str, Tensor], list[float], list[Any]]:
    """Weights and buffers, losses, and what the generators would give next."""
    make_net, make_data, loss_func = NETS[net]
    torch.manual_seed(0)
    data = make_data()
    model = make_net()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)  # type: ignore[operator]
    learn = synth_learner(
        data=(data, data),
        model=model,
        loss_func=loss_func,
        cbs=guests,
        opt_func=lambda p, lr: torch.optim.AdamW(p, lr=lr),
        lr=1e-2,
    )
    learn.logger = lambda row: None
    learn.fit(2)
    losses = learn.recorder.raw_losses().tolist()
    rest = [torch.rand(1).item(), np.random.rand(), random.random()]
    return copy.deepcopy(model.state_dict()), losses, rest


@pytest.mark.slow
@pytest.mark.parametrize("guest", GUESTS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_training_is_bit_identical_with_guests(net: str, guest: str) -> None:
    if (net, guest) == ("in place", "backward hooks"):
        pytest.skip("PyTorch's full backward hooks refuse it")
    weights, losses, rest = trained(net, [])

    watched, watched_losses, watched_rest = trained(net, GUESTS[guest]())

    assert watched_losses == losses
    assert watched_rest == rest
    for name, value in weights.items():
        assert value.equal(watched[name]), name


def test_a_guest_that_draws_a_random_number_is_caught() -> None:
    """The test of the test."""
    noisy = Callback(after_pred=lambda cb: torch.rand(1))

    assert trained("in place", [noisy])[1] != trained("in place", [])[1]
