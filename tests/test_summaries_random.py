"""A summary leaves the random numbers of the process alone."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.fastai import dummy_eval
from hookkit.modelinfo import tracing
from hookkit.summaries import summary


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], Any], fails: bool) -> None:
        super().__init__()
        self.draw, self.fails = draw, fails

    def forward(self, x: Tensor) -> Tensor:
        self.draw()
        if self.fails:
            raise RuntimeError("no")
        return x * 2


def states() -> Any:
    numpys: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2]


DRAWS = {
    "dropout": lambda: nn.functional.dropout(torch.ones(5)),
    "randperm": lambda: torch.randperm(4),
    "same seed": lambda: torch.manual_seed(torch.initial_seed()),
    "other seed": lambda: torch.manual_seed(99),
    "python": random.random,
    "numpy": lambda: np.random.rand(2),
}


@pytest.mark.parametrize("run", ["real", "fake"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_a_forward_draws_or_seeds_is_undone(
    draw: Callable[[], Any], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_MACS", -1 if run == "fake" else 10)
    torch.rand(2)
    before = states()

    s = summary(Draws(draw, False), torch.ones(2, 4))

    assert s.run == run
    assert states() == before


@pytest.mark.parametrize("look", [summary, lambda net, x: dummy_eval(net, x=x)])
def test_what_a_failing_forward_draws_is_undone(look: Callable[..., Any]) -> None:
    before = states()

    with pytest.raises(RuntimeError, match="no"):
        look(Draws(lambda: (torch.rand(3), random.random()), True), torch.ones(1, 2))

    assert states() == before


def test_layers_that_chance_left_out_are_said_to_miss_in_this_run_only() -> None:
    class LayerDrop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand(()) > 0.5:
                    x = x + layer(x)
            return x + self.layers[0](x)

    torch.manual_seed(0)
    (warned,) = summary(LayerDrop(), torch.ones(3, 4)).warnings

    assert "not part of the output of this run, and would get no gradient: layers." in warned
