"""`untouched` puts a model and the process back, whatever ran inside it."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from test_summaries_zoo import fingerprint
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit import Hooks, edit_output, hook_all, hook_output
from hookkit.modelinfo.tree import Tree
from hookkit.modelinfo.untouched import untouched


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


@pytest.mark.parametrize("e", ZOO, ids=lambda e: e.name)
def test_every_model_is_as_before(e: Entry) -> None:
    model, args, kwargs = e.build(), e.args(), e.kwargs()
    before = fingerprint(model, (), {})

    with untouched(model, params=True), suppress(Exception):
        model(*args, **kwargs)

    assert fingerprint(model, (), {}) == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_that_changes_everything_changes_nothing(fails: bool) -> None:
    model, x = Odd(), torch.ones(2, 3)
    before = fingerprint(model, (x,), {})

    try:
        with untouched(model):
            model(x)
            assert fingerprint(model, (x,), {}) != before
            if fails:
                raise KeyError
    except KeyError:
        pass

    assert fingerprint(model, (x,), {}) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.weight.detach().mul_(2),
        lambda m: m.weight.data.mul_(2),
        lambda m: m.weight.data[0].zero_(),
        lambda m: m.weight.grad.zero_(),
    ],
)
def test_params_are_put_back_if_asked_for(write: Callable[[nn.Linear], Any]) -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    before = fingerprint(model, (), {}), model.weight.grad.clone()

    with untouched(model, params=True):
        write(model)

    assert fingerprint(model, (), {}) == before[0]
    assert torch.equal(model.weight.grad, before[1])


def test_params_are_put_back_that_were_copied_before_a_write() -> None:
    model = nn.Linear(3, 3)
    before = fingerprint(model, (), {})

    with untouched(model) as copy, torch.no_grad():
        part = model.weight[1]
        copy(part)
        part.zero_()

    assert fingerprint(model, (), {}) == before


def test_replaced_memory_is_put_back() -> None:
    model = nn.BatchNorm1d(3)
    weight, mean = model.weight.data_ptr(), model.running_mean.data_ptr()

    with untouched(model):
        model.weight.data = torch.zeros(4)
        model.running_mean.data = torch.ones(3)

    assert (model.weight.data_ptr(), model.running_mean.data_ptr()) == (weight, mean)
    assert (model.weight.shape, model.running_mean.sum()) == ((3,), 0)


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_from_before_can_still_be_used(training: bool) -> None:
    model = nn.BatchNorm1d(3)
    x = torch.randn(2, 3, requires_grad=True)
    loss = (x * model.running_var).sum() + model(x).sum()

    with untouched(model, params=True):
        model.train(training)(x)

    loss.backward()


def test_lazy_modules_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    with untouched(model):
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
        hook_all(lambda *_: calls.append("all")),
    ):
        hooks = list(model[0]._forward_hooks.items())
        with untouched(model):
            edited = model(torch.zeros(1, 3))
        assert list(model[0]._forward_hooks.items()) == hooks
        assert (h.n_calls, g.n_calls, calls) == (0, 0, ["own"])
        again = model(torch.zeros(1, 3))
        again.sum().backward()

    assert torch.equal(edited, again)
    assert (h.n_calls, g.n_calls, calls.count("observer")) == (1, 1, 1)


def test_observers_stay_on_if_asked_for() -> None:
    model = nn.Linear(3, 3)

    with hook_output(model) as h, untouched(Tree(model), observers=True):
        model(torch.zeros(1, 3))

        assert h.n_calls == 1
