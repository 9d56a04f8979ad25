"""A run on fake tensors, which a large model gets, leaves no fake tensor anywhere."""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from test_summaries_zoo import RUNS, fingerprint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from zoo import Entry

from hookkit import edit_output
from hookkit.errors import ModelRunError
from hookkit.modelinfo import fakes, tracing
from hookkit.nested import leaves
from hookkit.summaries import summary

# What models of the zoo warn of in a real run.
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),
]


@pytest.fixture(params=["real", "fake"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of a run; every model is too large for a real one in the second."""
    if request.param == "fake":
        monkeypatch.setattr(tracing, "MAX_MACS", -1)
    return str(request.param)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_MACS", -1)


class Store:
    """An object of a script, which is no module."""

    last: Any = None
    of_class: ClassVar[list[Any]] = []


STORE = Store()
ITEMS: list[Any] = [torch.zeros(1)]
TABLE: dict[str, Any] = {"last": torch.zeros(1)}
SPACE = SimpleNamespace(last=None)
LAST: Any = None


@lru_cache
def table(n: int) -> Tensor:
    return torch.ones(n)


def in_global(y: Tensor) -> None:
    global LAST
    LAST = y


def in_default(y: Tensor, seen: list[Any] = []) -> None:  # noqa: B006
    seen.append(y)


def in_attribute_of_function(y: Tensor) -> None:
    in_attribute_of_function.last = y  # type: ignore[attr-defined]


def closure() -> Callable[[Tensor], None]:
    last = None

    def store(y: Tensor) -> None:
        nonlocal last
        last = y

    return store


STORES: dict[str, Callable[[Tensor], Any]] = {
    "object": lambda y: setattr(STORE, "last", y),
    "class": lambda y: setattr(Store, "last", y),
    "list of a class": lambda y: Store.of_class.append(y),
    "list": lambda y: ITEMS.append(y),
    "replaced item": lambda y: ITEMS.__setitem__(0, y),
    "dict": lambda y: TABLE.__setitem__("last", y),
    "new key": lambda y: TABLE.__setitem__("new", y),
    "namespace": lambda y: setattr(SPACE, "last", y),
    "global": in_global,
    "default": in_default,
    "function": in_attribute_of_function,
    "closure": closure(),
    "deque": deque[Any](maxlen=2).append,
    "cached function": lambda y: table(y.shape[-1]),
}


class Keeps(nn.Module):
    """Gives what it computes to a function that stores it somewhere."""

    def __init__(self, store: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.store = nn.Linear(4, 4), store
        self.deep = {"inner": [SimpleNamespace(last=None)]}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        self.store(y.detach())
        self.deep["inner"][0].last = y.detach()
        return y


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.usefixtures("fake")
def test_a_tensor_stored_outside_of_the_model_is_no_fake_one(store: Any) -> None:
    table.cache_clear()
    before = [*ITEMS], dict(TABLE), STORE.last, Store.of_class[:]
    net = Keeps(store)

    s = summary(net, torch.ones(1, 4))

    assert (s.run, s.macs) == ("fake", 16)
    assert fake_tensors() == 0
    after = [*ITEMS], dict(TABLE), STORE.last, Store.of_class[:]
    assert [id(x) for x in before[0]] == [id(x) for x in after[0]]
    assert (before[1], before[2:]) == (after[1], after[2:])
    assert type(net(torch.ones(1, 4))) is Tensor
    assert type(table(4)) is Tensor


def fake_tensors() -> int:
    import gc

    from torch._subclasses.fake_tensor import FakeTensor

    gc.collect()
    return sum(type(x) is FakeTensor for x in gc.get_objects())


def test_a_state_that_a_script_keeps_stays_real(run: str) -> None:
    state = Store()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if state.last is not None:
                x = x + state.last
            state.last = self.lin(x).detach()
            return state.last  # type: ignore[no-any-return]

    net = Net()

    assert summary(net, torch.ones(1, 4)).run == run
    assert type(net(torch.ones(1, 4))) is Tensor
    assert type(state.last) is Tensor


def test_a_patched_forward_is_seen_and_loses_nothing(run: str) -> None:
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
        lambda net, f: edit_output(net[0], f),
        lambda net, f: register_module_forward_hook(f),
    ],
)
@pytest.mark.usefixtures("fake")
def test_hooks_of_the_user_get_real_tensors(register: Any) -> None:
    net, seen = nn.Sequential(nn.Linear(4, 4)), list[Any]()
    handle = register(net, lambda m, i, o=None: seen.extend(leaves((i, o))))

    s = summary(net, torch.ones(1, 4))
    handle.remove()

    assert (s.run, {type(o) for o in seen}) == ("real", {Tensor})


@pytest.mark.usefixtures("fake")
def test_fakes_that_cannot_be_found_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes.Outside, "put_back", lambda self: None)
    try:
        with pytest.raises(ModelRunError, match="has stored 2 of them where they cannot be found"):
            summary(Keeps(STORES["list"]), torch.ones(1, 4))
    finally:
        del ITEMS[1:]


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


def test_many_saved_bytes_stop_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_SAVED_BYTES", 100)

    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU())

    assert summary(net, torch.ones(1, 4)).run == "real"
    assert summary(net, torch.ones(9, 4)).run == "fake"


@pytest.mark.usefixtures("fake")
def test_inside_autocast_later_calls_compute_with_real_parameters() -> None:
    net, x = nn.Linear(4, 4), torch.ones(1, 4)

    with torch.autocast("cpu", torch.bfloat16):
        assert summary(net, x).run == "fake"
        out = net(x)

    assert type(out) is Tensor
    out.sum().backward()


# An LSTM's and an EmbeddingBag's kernels save more on real tensors; sparse ones have no fake.
DIFFER = ("lstm_classifier", "lstm_tuple", "embedding_bag", "sparse_input")


@pytest.mark.parametrize("e", RUNS, ids=lambda e: e.name)
def test_a_fake_run_changes_nothing_and_sees_the_same(
    e: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = summary(e.build(), *e.args(), model_kwargs=e.kwargs())
    model, args, kwargs = e.build(), e.args(), e.kwargs()
    before = fingerprint(model, args, kwargs)
    monkeypatch.setattr(tracing, "MAX_MACS", -1)

    s = summary(model, *args, model_kwargs=kwargs)

    assert fingerprint(model, args, kwargs) == before
    assert [(r.name, r.outputs, r.calls, r.macs) for r in s] == [
        (r.name, r.outputs, r.calls, r.macs) for r in real
    ]
    assert s.saved_bytes == real.saved_bytes or e.name in DIFFER
