"""Copies of hooked modules: {a guest's hook, one that the module owns} × {way} × {on, removed}.

A guest's hook stays with the original: its copies do nothing. A hook that a module owns (as
fastai's DynamicUnet owns the hooks on its encoder) is part of the module, and works in its copies.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.hooks import Hook, Hooks, hook_input, hook_output, hook_outputs

WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
KINDS: dict[str, Callable[[nn.Module], Hook]] = {
    "output": hook_output,
    "live": lambda m: hook_output(m, detach=False),
    "all": lambda m: hook_output(m, keep="all"),
    "input": hook_input,
    "function": lambda m: Hook(m, mean),
    "edit": lambda m: Hook(m, doubled, edit=True),
    "grad": lambda m: hook_output(m, grad=True),
    "input grad": lambda m: hook_input(m, grad=True),
    "backward": lambda m: Hook(m, None, is_forward=False),
}
every = pytest.mark.parametrize("kind", KINDS)
each_way = pytest.mark.parametrize("way", WAYS)
on_or_removed = pytest.mark.parametrize("on", [True, False], ids=["on", "removed"])


def mean(m: nn.Module, i: Any, o: Tensor) -> Tensor:
    return o.mean()


def doubled(m: nn.Module, i: Any, o: Tensor) -> Tensor:
    return o * 2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh())


class Owner(nn.Module):
    """A module that has a hook on a part of itself, as an attribute or in a list."""

    def __init__(self, kind: str, listed: bool = False) -> None:
        super().__init__()
        self.fc, self.act = net()
        hook = KINDS[kind](self.fc)
        self.held: Any = [hook] if listed else hook

    @property
    def hook(self) -> Hook:
        hook: Hook = self.held[0] if isinstance(self.held, list) else self.held
        return hook

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.fc(x))
        return y


def run(m: nn.Module) -> Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    y: Tensor = m(x)
    y.sum().backward()
    return y.detach()


def entries(m: nn.Module) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [h for part in m.modules() for name in names for h in getattr(part, name).values()]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b)


@pytest.mark.slow
@every
@each_way
@on_or_removed
def test_a_guests_hook_stays_with_the_original(kind: str, way: str, on: bool) -> None:
    model, plain = net(), run(net())
    hook = KINDS[kind](model[0])
    if not on:
        hook.remove()
    n = hook.n_calls

    twin = WAYS[way](model)

    assert torch.equal(run(twin), plain)
    assert hook.n_calls == n
    assert hook.module is model[0]
    hook.remove()
    assert entries(model) == []


@pytest.mark.slow
@every
@each_way
@pytest.mark.parametrize("listed", [False, True])
def test_a_hook_that_a_module_owns_works_in_its_copy(kind: str, way: str, listed: bool) -> None:
    owner = Owner(kind, listed)
    before = run(owner)
    stored, n = owner.hook.stored, owner.hook.n_calls

    twin = WAYS[way](owner)

    assert twin.hook is not owner.hook
    assert twin.hook.module is twin.fc
    assert (twin.hook.stored, twin.hook.removed) == (None, False)  # values are not copied
    assert torch.equal(run(twin), before)
    assert alike(twin.hook.stored, stored)
    assert owner.hook.n_calls == n
    twin.hook.remove()
    assert (entries(twin), twin.hook.removed) == ([], True)
    assert len(entries(owner)) > 0


@every
@each_way
def test_a_removed_hook_that_a_module_owns_is_removed_in_its_copy(kind: str, way: str) -> None:
    owner = Owner(kind)
    run(owner)
    owner.hook.remove()

    twin = WAYS[way](owner)
    run(twin)

    assert twin.hook.removed
    assert twin.hook.stored is None
    assert entries(twin) == []


@each_way
@on_or_removed
def test_a_hook_that_is_copied_alone_sees_nothing_of_the_original(way: str, on: bool) -> None:
    model = net()
    hook = hook_output(model[0])
    if not on:
        hook.remove()

    twin = WAYS[way](hook)
    run(model)

    assert twin.n_calls == 0
    assert twin.stored is None
    assert hook.n_calls == on


@each_way
def test_a_collection_that_a_module_owns_works_in_its_copy(way: str) -> None:
    owner = net()
    owner.sizes = hook_outputs(list(owner))

    twin = WAYS[way](owner)
    run(twin)

    assert isinstance(twin.sizes, Hooks)
    assert [h.module for h in twin.sizes] == list(twin)
    assert all(value is not None for value in twin.sizes.stored)
    assert [h.n_calls for h in owner.sizes] == [0, 0]
    with twin.sizes as again:
        run(twin)
    assert [h.n_calls for h in again] == [2, 2]
    assert entries(twin) == []


@each_way
def test_a_hook_on_the_module_that_owns_it(way: str) -> None:
    owner = nn.Linear(4, 2)
    owner.hook = hook_output(owner)

    twin = WAYS[way](owner)
    y = twin(torch.ones(1, 4))

    assert torch.equal(twin.hook.stored, y)
    assert owner.hook.n_calls == 0


@each_way
def test_a_hook_on_a_part_that_is_copied_later(way: str) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    first.hook = hook_output(second)
    owner = nn.Sequential(first, second)

    twin = WAYS[way](owner)
    y = twin(torch.ones(1, 4))

    assert twin[0].hook.module is twin[1]
    assert torch.equal(twin[0].hook.stored, y)
    assert first.hook.n_calls == 0
