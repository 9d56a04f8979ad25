"""`preserve_state` puts a model and the process back, whatever ran inside it."""

import copy
import random
import subprocess
import sys
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hooked import fingerprint
from torch import Tensor, nn

from hookkit import Hooks, edit_output, hook_output
from hookkit.inspection.preserve import preserve_state


class Odd(nn.Module):
    """Does all at once that a forward may do to its module, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.seen: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.last: Tensor | None = None
        self.plain = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.lin(x)) + torch.randn(3) * random.random() * np.random.rand()
        self.seen.append(x)
        self.by_name["x"], self.last = x, x
        self.new = nn.Linear(3, 3)
        self.ema = self.ema + 1
        self.plain += 1
        self.lin.weight.requires_grad_(False)
        self.lin.bias.grad = torch.ones(3)
        self.eval()
        torch.set_grad_enabled(False)
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_that_changes_everything_changes_nothing(fails: bool) -> None:
    model, x = Odd(), torch.ones(2, 3)
    before = fingerprint(model, (x,), {})

    try:
        with preserve_state(model):
            model(x)
            assert fingerprint(model, (x,), {}) != before
            if fails:
                raise KeyError
    except KeyError:
        pass

    assert fingerprint(model, (x,), {}) == before


@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.weight.detach().mul_(2),
        lambda m: m.weight.data[1].zero_(),
        lambda m: m.weight.grad.zero_(),
        lambda m: m.bias.copy_(torch.ones(3)),
        lambda m: torch._foreach_add_(list(m.parameters()), 1.0),
        lambda m: torch.add(m.bias, 1, out=m.bias),
        lambda m: nn.init.ones_(m.weight),
        lambda m: torch.optim.SGD(m.parameters(), 1.0).step(),
    ],
)
def test_params_that_are_written_are_put_back(
    write: Callable[[nn.Linear], Any], params: bool
) -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    before = fingerprint(model, (), {}), model.weight.grad.clone()

    with preserve_state(model, params=params), torch.no_grad():
        write(model)

    assert fingerprint(model, (), {}) == before[0]
    assert torch.equal(model.weight.grad, before[1])


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

    with preserve_state(model):
        model.acts["gelu"] = nn.GELU  # type: ignore[index, operator]
        model.acts.move_to_end("relu")  # type: ignore[operator, union-attr]
        list.append(model.items[0], "c")  # type: ignore[index, arg-type]

    assert [*OrderedDict.items(model.acts)] == [("relu", nn.ReLU)]  # type: ignore[arg-type]
    assert [*list.__iter__(model.items[0])] == ["a", "b"]  # type: ignore[index, arg-type]


class Box:
    """A class of the user's."""

    def __init__(self) -> None:
        self.n, self.rows, self.inner = 0, {"a": [1]}, SimpleNamespace(n=0)


class Holds(nn.Module):
    """Has whatever an attribute may hold, and changes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.recent, self.log = deque([1], maxlen=3), {"n": [0], "deep": ({1}, [[]])}
        self.cache = [torch.zeros(2), {"k": torch.zeros(2)}]
        self.counts = defaultdict(list, a=[1])
        self.box, self.user = Box(), UserDict(a=1)
        self.noise = torch.Generator().manual_seed(0)
        self.teacher = [nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))]

    def forward(self, x: Tensor) -> Tensor:
        self.recent.extend([2, 3, 4])
        self.log["n"].append(1)
        self.log["deep"][0].add(2)
        self.log["deep"][1][0].append(3)
        self.cache[0] += 1
        self.cache[1]["k"].mul_(0).add_(2)
        self.counts["b"].append(2)
        self.box.n, self.user["b"] = 1, 2
        self.box.rows["a"].append(2)
        self.teacher.append(self.teacher[0])
        with torch.no_grad():
            self.teacher[0][1].weight.add_(1)
        x = self.teacher[0].eval()(self.teacher[0].train()(x))
        return x + torch.rand(2, generator=self.noise)

    def state(self) -> Any:
        """All of it, in a form that can be compared."""
        return copy.deepcopy(
            [
                [*self.recent], self.log, str(self.cache), [*self.counts.items()], vars(self.user),
                (self.box.n, self.box.rows), self.noise.get_state().tolist(), len(self.teacher),
                fingerprint(self.teacher[0], (), {}),
            ]
        )  # fmt: skip


@pytest.mark.parametrize("params", [False, True])
def test_what_attributes_hold_is_put_back(params: bool) -> None:
    model, x = Holds(), torch.ones(3, 2)
    before, cached = model.state(), model.cache[0]

    with preserve_state(model, params=params):
        model(x)
        changed = model.state()

    assert model.state() == before
    assert model.cache[0] is cached
    assert all(a != b for a, b in zip(changed, before, strict=True))


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


def test_replaced_memory_is_put_back() -> None:
    model = nn.BatchNorm1d(3)
    weight, mean = model.weight.data_ptr(), model.running_mean.data_ptr()

    with preserve_state(model):
        model.weight.data = torch.zeros(4)
        model.running_mean.data = torch.ones(3)

    assert (model.weight.data_ptr(), model.running_mean.data_ptr()) == (weight, mean)
    assert (model.weight.shape, model.running_mean.sum()) == ((3,), 0)


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_from_before_can_still_be_used(training: bool) -> None:
    model = nn.BatchNorm1d(3)
    x = torch.randn(2, 3, requires_grad=True)
    loss = (x * model.running_var).sum() + model(x).sum()

    with preserve_state(model, params=True):
        model.train(training)(x)

    loss.backward()


def test_lazy_modules_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    with preserve_state(model):
        model(torch.ones(2, 5))

    assert [type(m) for m in model] == [nn.LazyLinear, nn.LazyBatchNorm1d]
    assert nn.parameter.is_lazy(model[0].weight)
    model(torch.ones(2, 4))


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
