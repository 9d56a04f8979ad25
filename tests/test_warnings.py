"""A warning is given at the user's line, however deep in hookkit or PyTorch it comes from."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookkit import (
    ActivationStats,
    edit_output,
    feature_extractor,
    hook_function,
    hook_outputs,
    swap,
    watch,
    zero,
)
from hookkit.errors import HookkitWarning
from hookkit.swapping import Wrapper

X = torch.ones(1, 2)


class Net(nn.Module):
    """It never calls `idle`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.idle = nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.fc(x))
        return out


def captures(net: Net) -> None:
    with hook_outputs([net.idle]):
        net(X)


def reads_what_was_overwritten(net: Net) -> None:
    h = hook_outputs([net.fc], detach=False)
    net(X)
    _ = h.stored


def sees_no_function(net: Net) -> None:
    with hook_function(F.softmax):
        net(X)


def edits(net: Net) -> None:
    with edit_output(net.idle, zero()):
        net(X)


def swaps(net: Net) -> None:
    with swap(net, {"idle": Wrapper}):
        net(X)


def extracts(net: Net) -> None:
    feature_extractor(net, "idle")(X)


def watches(net: Net) -> None:
    with watch(net, None, ActivationStats()):
        for _ in range(3):
            net(X).sum().backward()


@pytest.mark.parametrize(
    "act",
    [captures, reads_what_was_overwritten, sees_no_function, edits, swaps, extracts, watches],
)
def test_a_warning_names_the_users_line(act: Callable[[Net], None]) -> None:
    with pytest.warns(HookkitWarning) as caught:
        act(Net())

    assert {w.filename for w in caught} == {__file__}
    first = act.__code__.co_firstlineno
    assert all(first < w.lineno < first + 5 for w in caught)
