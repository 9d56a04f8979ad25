"""Recorders and `watch` record the thread that entered; hooks of one's own see all threads.

The other thread's forwards run at fixed points of the training, so that nothing depends on time.
"""

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookkit.callbacks.hook_callback import HookCallback
from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.training import watch

Call = Callable[[], Any]


def elsewhere(call: Call) -> None:
    """Runs `call` to its end in another thread, and raises what it raised."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


class Meet(nn.Module):
    """Passes its input on; in the main thread it runs `call` in another one before."""

    call: Call | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.call is not None and threading.current_thread() is threading.main_thread():
            elsewhere(self.call)
        return x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Meet(), nn.ReLU(inplace=True), nn.Linear(4, 2))


class Loop:
    """A training of `net()` whose steps another thread interferes with, at one point of each."""

    def __init__(self, *cbs: Any, where: str = "", grad: bool = True) -> None:
        self.model, self.mse, self.where, self.grad = net(), nn.MSELoss(), where, grad
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if where == "inside":
            self.model[1].call = self.interfere  # type: ignore[assignment]
        with watch(self.model, self.opt, *cbs, loss_func=self.mse) as self.w:
            for i in range(4):
                self.step(torch.full((5, 3), float(i + 1)))

    def step(self, x: Tensor) -> None:
        self.meets("before")
        self.opt.zero_grad()
        y = self.model(x)
        self.meets("after forward")
        loss = self.mse(y, torch.zeros(5, 2))
        loss.backward()
        self.meets("after backward")
        self.opt.step()
        self.meets("after step")

    def meets(self, where: str) -> None:
        if where == self.where:
            elsewhere(self.interfere)

    def interfere(self) -> None:
        with torch.set_grad_enabled(self.grad):
            y = self.model(torch.full((7, 3), 1e6))
            loss = self.mse(y, torch.zeros(7, 2))
            if self.grad:
                torch.autograd.grad(loss, list(self.model.parameters()))


POINTS = ("before", "inside", "after forward", "after backward", "after step")


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", POINTS)
def test_another_thread_s_forward_is_not_recorded(where: str, grad: bool) -> None:
    alone, met = (
        [
            ActivationStats(with_hist=True, units=True, include_paramless=True),
            GradientStats(include_paramless=True),
            ParamStats(),
        ]
        for _ in range(2)
    )

    by_itself = Loop(*alone)
    loop = Loop(*met, FlightRecorder("raise"), where=where, grad=grad)

    assert [cb.record() for cb in met] == [cb.record() for cb in alone]
    assert loop.w.loop.train_iter == 4
    np.testing.assert_array_equal(loop.w.run_record().losses, by_itself.w.run_record().losses)
    for p, q in zip(loop.model.parameters(), by_itself.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_hook_of_one_s_own_sees_the_calls_of_all_threads() -> None:
    seen: list[int] = []

    Loop(HookCallback("0", hook=lambda m, i, o: seen.append(len(o))), where="inside")

    assert seen == [5, 7] * 4


class OnThreads(nn.DataParallel):
    """Two replicas on the CPU, made by PyTorch's own `replicate`, each run in a thread."""

    def forward(self, x: Tensor) -> Tensor:
        replicas = nn.parallel.replicate(self.module, [0, 1])
        with ThreadPoolExecutor(2) as pool:
            return torch.cat([*pool.map(lambda m, half: m(half), replicas, x.chunk(2))])


def test_replicas_of_data_parallel_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
        return [[t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices]

    torchs = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(torchs, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(torchs, "_get_device_index", lambda x, *args: x)
    model, stats = net(), ActivationStats()
    wrapped = OnThreads(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes: list[Any] = []
    cb = HookCallback(hook=lambda m, i, o: shapes.append(tuple(o.shape)))

    with watch(wrapped, opt, stats, cb):
        wrapped(torch.ones(6, 3)).sum().backward()
        opt.step()

    assert stats.record().value("count", "0").tolist() == [24]
    assert sorted(shapes) == [(3, 2), (3, 2), (3, 4), (3, 4)]
