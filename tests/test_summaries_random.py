"""A summary leaves the random numbers of the process alone, also of threads that draw meanwhile."""

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.modelinfo import dummy_eval, sandbox
from hookkit.summaries import summary

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(1, dtype=torch.float64)),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
}


class Between(nn.Module):
    """Has another thread draw three numbers in the middle of its forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        ask_other_thread()
        out: Tensor = self.inner(x)
        return out


class Other:
    """A thread that draws three numbers each time that it is called."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw, self.drawn = draw, []  # type: ignore[var-annotated]
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.ending = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while self.go.acquire() and not self.ending:
            self.drawn += [self.draw() for _ in range(3)]
            self.done.release()

    def __call__(self) -> None:
        self.go.release()
        assert self.done.acquire(timeout=30)

    def end(self) -> None:
        self.ending = True
        self.go.release()
        self.thread.join(30)


other: Any = None


def ask_other_thread() -> None:
    other()


@pytest.fixture(params=DRAWS)
def draw(request: pytest.FixtureRequest) -> Any:
    global other
    f = DRAWS[request.param]
    other = Other(f)
    yield f
    other.end()


def needs_values(x: Tensor) -> Tensor:
    """Reads `x`, so that it cannot run on fake tensors."""
    return x * float(x.sum())


class Real(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return needs_values(x)


@pytest.mark.parametrize("inner", [nn.Dropout(), Real()], ids=["fake", "real"])
def test_no_number_of_another_thread_is_drawn_twice(inner: nn.Module, draw: Any) -> None:
    net = Between(inner).train()
    other()

    s = summary(net, torch.ones(2, 4))
    other()

    assert s.run == ("real" if isinstance(inner, Real) else "fake")
    assert len(other.drawn) >= 9
    assert len(set(other.drawn)) == len(other.drawn)


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], Any], real: bool) -> None:
        super().__init__()
        self.draw, self.real = draw, real

    def forward(self, x: Tensor) -> Tensor:
        self.draw()
        return needs_values(x) if self.real else x * 2


def states() -> Any:
    numpys: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(
    "draw",
    [
        lambda: nn.functional.dropout(torch.ones(5)),
        lambda: torch.randn(3),
        lambda: torch.randperm(4),
        lambda: torch.manual_seed(torch.initial_seed()),
        lambda: torch.manual_seed(99),
        random.random,
        lambda: np.random.rand(2),
    ],
    ids=["dropout", "randn", "randperm", "same seed", "other seed", "python", "numpy"],
)
def test_what_a_forward_draws_or_seeds_is_undone(
    draw: Callable[[], Any], real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox.threading, "active_count", lambda: 1)
    torch.rand(2)
    before = states()

    s = summary(Draws(draw, real), torch.ones(2, 4))

    assert s.run == ("real" if real else "fake")
    assert states() == before


def test_a_summary_on_fake_tensors_sets_no_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(torch.Generator):
        def set_state(self, state: Any) -> Any:
            raise AssertionError("the state of the process was set")

    monkeypatch.setattr(sandbox, "_generators", lambda: iter([Watched()]))
    monkeypatch.setattr(random, "setstate", None)
    monkeypatch.setattr(np.random, "set_state", None)

    assert summary(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.ones(1, 2)).run == "fake"


def test_a_real_forward_that_draws_is_undone_after_an_error_too() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            raise RuntimeError("no")

    net = Fails()
    before = torch.get_rng_state()

    with pytest.raises(RuntimeError, match="no"):
        summary(net, torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="no"):
        dummy_eval(net, x=torch.ones(1, 2))

    assert torch.equal(torch.get_rng_state(), before)


def test_two_summaries_at_once_leave_the_switches_as_they_were() -> None:
    global other
    inside, leave = threading.Semaphore(0), threading.Semaphore(0)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    fused, filters = torch.backends.mha.get_fastpath_enabled(), list(log.filters)

    def meet() -> None:
        inside.release()
        assert leave.acquire(timeout=30)

    other = meet
    net, x = Between(nn.Identity()), torch.ones(1)
    first, second = (threading.Thread(target=summary, args=(net, x)) for _ in range(2))
    first.start()
    assert inside.acquire(timeout=30)
    second.start()
    assert inside.acquire(timeout=30)
    assert not torch.backends.mha.get_fastpath_enabled()
    leave.release()  # one of them ends, in the order in which they began or not
    leave.release()
    first.join(30)
    second.join(30)

    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert (log.filters, log.disabled) == (filters, False)


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
