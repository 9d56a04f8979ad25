"""`preserve_state` puts a model and the process back; what it cannot put back, it names."""

import itertools
import pickle
import random
import subprocess
import sys
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hooked import fingerprint
from torch import Tensor, nn

from hookkit import Hooks, edit_output, hook_output
from hookkit.inspection import summary
from hookkit.inspection.preserve import _MOST_BYTES, preserve_state

CACHE: dict[str, Any] = {}


class Odd(nn.Module):
    """Does all at once that a forward may do to its module, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.lin(x)) + torch.randn(3) * random.random() * np.random.rand()
        self.n_calls, self.last = self.n_calls + 1, x
        self.new = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(3))
        self.ema = self.ema + 1
        self.lin.weight.data.mul_(2)
        self.lin.weight.requires_grad_(False)
        self.lin.bias.grad = torch.ones(3)
        self.lin.register_forward_hook(lambda *_: None)
        self.eval()
        torch.set_grad_enabled(False)
        return x


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("params", [False, True])
def test_a_forward_that_changes_everything_changes_nothing(fails: bool, params: bool) -> None:
    model, x = Odd(), torch.ones(2, 3)
    before = fingerprint(model, (x,), {})

    try:
        with preserve_state(model, params=params) as state:
            model(x)
            assert fingerprint(model, (x,), {}) != before
            if fails:
                raise KeyError
    except KeyError:
        pass

    assert fingerprint(model, (x,), {}) == before
    assert state.not_restored == []


class Slotted:
    __slots__ = ("n",)


class Box:
    """A class of the user's, with objects inside."""

    def __init__(self) -> None:
        self.n, self.rows = 0, {"a": [1]}
        self.inner = SimpleNamespace(n=0, rows=[], mean=torch.zeros(2), slots=Slotted())
        self.inner.slots.n = 0


class Runs(nn.Module):
    """Holds something in `held`, and does something to it when it runs."""

    total = 0
    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self, held: Any, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.act = held, act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self.held)
        return x


class Cache(dict[str, Any]):
    """A dict with a list in an attribute."""

    def __init__(self) -> None:
        self.order = list[str]()


def content_of(x: Any) -> Any:
    return x.get_state().tolist() if isinstance(x, torch.Generator) else pickle.dumps(x)


RESTORED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "deque": (deque([1], maxlen=3), lambda x: x.extend([2, 3, 4])),
    "set": ({1}, lambda x: x.add(2)),
    "dict that makes values": (defaultdict(list, a=[1]), lambda x: x["b"].append(2)),
    "nested": ({"a": [({1}, [deque()])]}, lambda x: x["a"][0][1][0].append(3)),
    "tensors in a list": ([torch.zeros(2)], lambda x: x[0].add_(1)),
    "tensors in a dict": ({"k": torch.zeros(2)}, lambda x: x["k"].mul_(0).add_(2)),
    "a plain tensor": (torch.zeros(2), lambda x: x.data.fill_(1)),
    "an array": ([np.zeros(3)], lambda x: np.add(x[0], 1, out=x[0])),
    "torch's generator": (torch.Generator(), lambda x: torch.rand(2, generator=x)),
    "Python's generator": (random.Random(0), lambda x: x.random()),
    "NumPy's generator": (np.random.default_rng(0), lambda x: x.random()),
    "NumPy's old generator": (np.random.RandomState(0), lambda x: x.rand()),
    "an object": (Box(), lambda x: (setattr(x, "n", 1), x.rows["a"].append(2))),
    "a dict with attributes": (Cache(), lambda x: (x.update(b=2), x.order.append("b"))),
    "an object around a dict": (UserDict(a=1), lambda x: x.update(b=2)),
    "a tensor in an object in an object": (Box(), lambda x: x.inner.mean.add_(1)),
    "a module in a list": ([nn.BatchNorm1d(2).train()], lambda x: x[0](torch.randn(3, 2))),
    "weights of a module in a list": ([nn.Linear(2, 2)], lambda x: x[0].weight.data.zero_()),
}


@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("name", RESTORED)
def test_what_an_attribute_holds_is_put_back(name: str, params: bool) -> None:
    held, act = RESTORED[name]
    model, before = Runs(held, act), content_of(held)

    with preserve_state(model, params=params) as state, torch.no_grad():
        model(torch.ones(1))
        changed = content_of(held)

    assert changed != before
    assert content_of(held) == before
    assert model.held is held
    assert state.not_restored == []


NAMED: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "an object in an object": (Box(), lambda x: setattr(x.inner, "n", 1), "0.held"),
    "a list in an object in an object": (Box(), lambda x: x.inner.rows.append(1), "0.held"),
    "slots": (Slotted(), lambda x: setattr(x, "n", 1), "0.held"),
    "slots deep inside": (Box(), lambda x: setattr(x.inner.slots, "n", 1), "0.held"),
    "an iterator": (itertools.count(), next, "0.held"),
    "a class attribute": (0, lambda x: setattr(Runs, "total", Runs.total + 1), "Runs.total"),
    "a dict of the class": (0, lambda x: Runs.seen.update({str(len(Runs.seen)): 1}), "Runs.seen"),
    "a global": (0, lambda x: CACHE.update({str(len(CACHE)): 1}), f"{__name__}.CACHE"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_put_back_is_named_in_the_summary(name: str) -> None:
    held, act, expected = NAMED[name]

    s = summary(nn.Sequential(Runs(held, act)), torch.ones(1))

    assert s.not_restored == (expected,)
    assert s.text(width=200).endswith(f"the model put back as it was, except: {expected}")


def test_an_array_that_is_too_large_to_copy_is_named() -> None:
    large = np.empty(_MOST_BYTES + 1, np.uint8)  # its memory is never touched
    fixed = large[:]
    fixed.flags.writeable = False

    with preserve_state(Runs([large, fixed], len)) as state:
        pass

    assert state.not_restored == ["held"]


@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.weight.detach().mul_(2),
        lambda m: m.weight.data[1].zero_(),
        lambda m: m.weight.grad.zero_(),
        lambda m: torch._foreach_add_(list(m.parameters()), 1.0),
        lambda m: torch.add(m.bias, 1, out=m.bias),
        lambda m: torch.optim.SGD(m.parameters(), 1.0).step(),
        lambda m: setattr(m.weight, "data", torch.zeros(4)),
    ],
)
def test_params_that_are_written_or_replaced_are_put_back(
    write: Callable[[nn.Linear], Any], params: bool
) -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    before = fingerprint(model, (), {}), model.weight.grad.clone(), model.weight.data_ptr()

    with preserve_state(model, params=params), torch.no_grad():
        write(model)

    assert fingerprint(model, (), {}) == before[0]
    assert torch.equal(model.weight.grad, before[1])
    assert model.weight.data_ptr() == before[2]


class Makes(OrderedDict[str, Any]):
    """Makes its values when they are read, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Loads:
    """Loads itself as soon as anything of it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("the attributes were read")

    __class__ = __dict__  # type: ignore[assignment]


class LoadsList(list[Any]):
    """Loads its items as they are read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was read")

    __len__ = __getitem__ = __iter__  # type: ignore[assignment]


def test_nothing_that_computes_its_content_is_read() -> None:
    model = nn.Linear(2, 2)
    model.acts = Makes(relu=nn.ReLU)  # type: ignore[assignment]
    model.items = [LoadsList("ab"), Loads(), weakref.proxy(model)]  # type: ignore[assignment]

    with preserve_state(model) as state:
        model.acts["gelu"] = nn.GELU  # type: ignore[index, operator]
        model.acts.move_to_end("relu")  # type: ignore[operator, union-attr]
        list.append(model.items[0], "c")  # type: ignore[index, arg-type]

    assert [*OrderedDict.items(model.acts)] == [("relu", nn.ReLU)]  # type: ignore[arg-type]
    assert [*list.__iter__(model.items[0])] == ["a", "b"]  # type: ignore[index, arg-type]
    assert state.not_restored == []


def test_lazy_modules_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    with preserve_state(model):
        model(torch.ones(2, 5))

    assert [type(m) for m in model] == [nn.LazyLinear, nn.LazyBatchNorm1d]
    assert nn.parameter.is_lazy(model[0].weight)
    model(torch.ones(2, 4))


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_from_before_can_still_be_used(training: bool) -> None:
    model = nn.BatchNorm1d(3)
    x = torch.randn(2, 3, requires_grad=True)
    loss = (x * model.running_var).sum() + model(x).sum()

    with preserve_state(model, training=training, params=True):
        model(x)

    loss.backward()
    assert model.training


def test_hooks_that_observe_are_off_and_back_in_their_order() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 3)), list[str]()
    model[0].register_forward_hook(lambda *_: calls.append("own"))

    with (
        hook_output(model[0]) as h,
        hook_output(model[0], grad=True) as g,
        Hooks([model[0]], lambda *_: calls.append("observer")),
        edit_output(model[0], lambda o: o + 1),
    ):
        hooks = list(model[0]._forward_hooks.items())
        with preserve_state(model):
            edited = model(torch.zeros(1, 3))
        assert list(model[0]._forward_hooks.items()) == hooks
        assert (h.n_calls, g.n_calls, calls) == (0, 0, ["own"])
        again = model(torch.zeros(1, 3))
        again.sum().backward()

    assert torch.equal(edited, again)
    assert (h.n_calls, g.n_calls, calls.count("observer")) == (1, 1, 1)


@pytest.mark.slow
def test_flex_attention_runs_in_a_process_that_has_compiled_nothing() -> None:
    code = """if True:
        import torch
        from torch.nn.attention.flex_attention import flex_attention
        from hookkit.inspection.preserve import preserve_state
        q = torch.ones(1, 1, 4, 2)
        with preserve_state(torch.nn.Identity()):
            assert flex_attention(q, q, q).shape == q.shape
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
