"""A run on fake tensors, which a large model gets, leaves no fake tensor anywhere."""

import copy
import gc
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hooked import fingerprint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

from hookkit._core.pytree import tree_leaves
from hookkit.errors import ModelRunError
from hookkit.hooks import Hook
from hookkit.inspection import summary, tracing


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_MACS", -1)


class Store:
    """An object of a script, which is no module."""

    last: Any = None


class Keeps(nn.Module):
    """Gives what it computes to functions that store it somewhere."""

    def __init__(self, *stores: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.stores = nn.Linear(4, 4), stores
        self.object, self.list, self.deque = Store(), list[Any](), deque[Any](maxlen=2)
        self.deep = {"inner": [SimpleNamespace(last=None, items=[])]}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        for store in self.stores:
            store(y.detach())
        self.object.last = self.deep["inner"][0].last = y.detach()
        for items in (self.list, self.deque, self.deep["inner"][0].items):
            items.append(y.detach())
        return y


def fake_tensors() -> int:
    from torch._subclasses.fake_tensor import FakeTensor

    gc.collect()
    return sum(type(x) is FakeTensor for x in gc.get_objects())


@pytest.mark.usefixtures("fake")
def test_no_fake_tensor_stays_in_what_the_modules_hold() -> None:
    net = Keeps()

    s = summary(net, torch.ones(1, 4))

    assert (s.run, s.macs, s.not_restored) == ("fake", 16, ())
    assert fake_tensors() == 0
    assert (net.object.last, net.list, [*net.deque]) == (None, [], [])
    assert net.deep == {"inner": [SimpleNamespace(last=None, items=[])]}


@pytest.mark.usefixtures("fake", "whole_heap")
@pytest.mark.parametrize("cached", [False, True])
def test_a_fake_tensor_stored_outside_of_the_modules_is_an_error_with_the_cure(
    cached: bool,
) -> None:
    store = Store()
    table = lru_cache(torch.ones)
    keep = (lambda y: table(y.shape[-1])) if cached else (lambda y: setattr(store, "last", y))

    with pytest.raises(
        ModelRunError, match=r"outside of its modules, in: \w+.*cache_clear\(\)"
    ) as e:
        summary(Keeps(keep), torch.ones(1, 4))

    assert cached or "in: Store." in str(e.value)
    table.cache_clear()
    assert type(table(4)) is Tensor


@pytest.mark.usefixtures("fake", "whole_heap")
def test_fake_tensors_in_an_autograd_graph_that_is_never_freed_are_no_error() -> None:
    class Steps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            key, last = super().forward(x), torch.zeros(1, 4) - 1e38
            out = torch.zeros_like(key)
            for i in range(2):
                most = torch.maximum(last, key[:, i])
                out[:, i] = torch.exp(last - most) / torch.exp(key[:, i] - most)
                last = most
            return out

    assert summary(Steps(4, 4), torch.ones(1, 2, 4)).run == "fake"


@pytest.mark.usefixtures("fake")
def test_a_fake_run_leaves_parameters_that_the_forward_writes() -> None:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.div_(2)  # which PyTorch computes for real
                self.bias.copy_(torch.ones(4))
            return super().forward(x)

    net = Scales(4, 4)
    before = copy.deepcopy(net.state_dict())

    assert summary(net, torch.ones(1, 4)).run == "fake"
    assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_a_run_that_does_not_fit_in_memory_goes_on_without_values() -> None:
    class Large(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.empty(2**28, 2**28)[0, 0]

    assert summary(Large(4, 4), torch.ones(1, 4)).run == "fake"


@pytest.mark.usefixtures("fake")
def test_a_patched_forward_runs_for_real_and_loses_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.cache = nn.Linear(4, 4), None

        def forward(self, x: Tensor) -> Any:
            if self.cache is not None:
                x = x + self.cache
            self.cache = self.lin(x).detach()
            return self.lin(x)

    net = Net()
    old = net.forward
    net.forward = lambda x: old(x) * 2  # type: ignore[method-assign]
    before = fingerprint(net, (), {})

    s = summary(net, torch.ones(1, 4))

    assert (s["lin"].calls, s.warnings, s.run) == (2, (), "real")
    assert fingerprint(net, (), {}) == before
    assert net.cache is None
    net(torch.ones(1, 4))


@pytest.mark.parametrize(
    "register",
    [
        lambda net, f: net[0].register_forward_hook(f),
        lambda net, f: net.register_forward_pre_hook(f),
        lambda net, f: Hook(net[0], f, edit=True),
        lambda net, f: register_module_forward_hook(f),
    ],
)
@pytest.mark.usefixtures("fake")
def test_hooks_of_the_user_get_real_tensors(register: Any) -> None:
    net, seen = nn.Sequential(nn.Linear(4, 4)), list[Any]()
    handle = register(net, lambda m, i, o=None: seen.extend(tree_leaves((i, o))))

    s = summary(net, torch.ones(1, 4))
    handle.remove()

    assert (s.run, {type(o) for o in seen}) == ("real", {Tensor})


@pytest.mark.usefixtures("fake")
def test_a_model_that_reads_values_runs_for_real() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    s = summary(Reads(4, 4), torch.ones(1, 4))

    assert (s.run, s.macs) == ("real", 16)


@pytest.mark.parametrize("swallow", [Exception, BaseException])
def test_a_run_is_stopped_also_if_the_model_catches_everything(
    swallow: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_MACS", 10)

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.b(self.a(x)) + 1  # type: ignore[no-any-return]
            except swallow:
                return x

    s = summary(Catches(), torch.ones(1, 4))

    assert (s.run, s.macs) == ("fake", 32)


class Differentiates(nn.Linear):
    """Gives the gradient of its own output, and says when the output's memory was freed."""

    def __init__(self, differentiates: bool) -> None:
        super().__init__(4, 4)
        self.differentiates = differentiates

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        memory = StorageWeakRef(y.untyped_storage())
        total = y.sum()
        del y
        seen.append(memory.expired())
        return torch.autograd.grad(total, self.weight)[0] if self.differentiates else total


seen = list[bool]()


@pytest.mark.parametrize("differentiates", [False, True])
def test_what_autograd_saves_is_kept_only_for_a_forward_that_differentiates(
    differentiates: bool,
) -> None:
    seen.clear()

    s = summary(Differentiates(differentiates), torch.ones(3, 4))

    assert (s.run, s.failed) == ("real", ())
    assert seen == ([True, False] if differentiates else [True])
    assert s.saved_bytes == (0 if differentiates else 2 * 3 * 4 * 4)
    assert s.output == ("4×4 float32" if differentiates else "scalar float32")


@pytest.mark.usefixtures("fake")
def test_inside_autocast_later_calls_compute_with_real_parameters() -> None:
    net, x = nn.Linear(4, 4), torch.ones(1, 4)

    with torch.autocast("cpu", torch.bfloat16):
        assert summary(net, x).run == "fake"
        out = net(x)

    assert type(out) is Tensor
    out.sum().backward()
