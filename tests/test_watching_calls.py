"""How many functions of hookkit a steady step calls: a count, which no machine changes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookkit
from hookkit import ActivationStats, ParamStats, watch

FOLDER = str(Path(hookkit.__file__).parent)


def calls_in_a_step(*callbacks: Any, n: int = 16) -> float:
    """Calls of Python functions in hookkit/ in a training step after 100 others, on average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    opt, count = torch.optim.SGD(model.parameters(), 0.01), 0
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))

    def step() -> None:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(FOLDER)

    before = sys.getprofile()
    with watch(model, opt, *callbacks):
        for _ in range(100):
            step()
        sys.setprofile(profile)
        try:
            for _ in range(n):
                step()
        finally:
            sys.setprofile(before)
    return count / n


@pytest.mark.parametrize(
    ("make", "most"),
    [
        pytest.param(lambda: [], 20, id="watch"),
        pytest.param(lambda: [ActivationStats(with_hist=True), ParamStats()], 90, id="recorders"),
    ],
)
def test_a_steady_step_calls_few_functions(make: Any, most: int) -> None:
    assert 0 < calls_in_a_step(*make()) <= most
