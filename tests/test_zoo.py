"""Every zoo entry's truth, checked another way than it was written down; and walks of its model."""

import dataclasses
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from zoo import ZOO, Entry, entry

from hookkit._core.modules import find, walk
from hookkit.fastai import total_params
from hookkit.hooks.selection import leaf_modules, select
from hookkit.inspection.tree import Tree
from hookkit.recorders.parameters import named_parameters


class Flops(TorchDispatchMode):
    """torch's own formulas, summed; FlopCounterMode's module tracker refuses autograd.grad."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def plain_run(e: Entry, model: nn.Module):
    """One forward without fused kernels; the error a `raises` entry must raise is swallowed."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # torch's, on machines without an Intel GPU
            torch.random.fork_rng(devices=[]),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            torch.backends.mkldnn.flags(enabled=False),
        ):
            return e.run(model)
    except ValueError:
        if "raises" not in e.tags:
            raise
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def unwrapped(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


@pytest.mark.parametrize("e", ZOO, ids=lambda e: e.name)
def test_walks_agree_and_what_an_entry_says_of_its_model_is_true(e: Entry) -> None:
    model = e.build()

    if "lazy" not in e.tags:
        assert_walks_agree(e, model)
    assert_true(e, unwrapped(model))


def assert_walks_agree(e: Entry, model: nn.Module) -> None:
    """Every walk of a model finds the same modules and parameters."""
    places, found = list(walk(model)), Tree(model)
    assert [(place.name, place.module, place.is_first) for place in found.places] == places
    assert {id(p) for _, p in found.params} == {id(p) for p in found.model.parameters()}
    assert {id(t) for t in found.tensors} == {
        id(t) for t in (*found.model.parameters(), *found.model.buffers())
    }
    every = {id(m) for m in found.model.modules()}
    assert {id(m) for m in (*found.modules, *found.scripted)} == every

    chosen = select(model)
    assert all(find(model, name) == (name, module) for name, module, _ in places)
    for name in chosen:
        assert select(model, name)[name] is chosen[name]
        if not isinstance(chosen[name], nn.ModuleList):
            assert list(select(model, chosen[name])) == [name]
    assert set(leaf_modules(model)) <= {"", *chosen}

    if "meta" not in e.tags:
        inner = unwrapped(model.module if e.name == "data_parallel" else model)
        recorded = [name for name, _, _ in named_parameters(model)]
        assert recorded == [name for name, _ in inner.named_parameters()]
    assert total_params(model)[0] == e.n_params


def assert_true(e: Entry, model: nn.Module) -> None:
    """The counts of an entry are those of PyTorch's own walks, hooks and formulas."""
    if "lazy" in e.tags:
        plain_run(e, model)
    distinct = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    if "scripted" in e.tags:
        distinct = {p.data_ptr(): p for p in model.parameters()}
    called = Counter[str]()
    for name in e.calls or {}:
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: count(name))

    def count(name: str) -> None:
        called[name] += 1

    with Flops() as counter:
        plain_run(e, model)

    assert sum(p.numel() for p in distinct.values()) == e.n_params
    assert sum(p.numel() for p in distinct.values() if p.requires_grad) == e.n_trainable
    assert {name: called[name] for name in e.calls or {}} == dict(e.calls or {})
    if e.macs is None:
        assert e.note, "no number, and no reason why"
    else:
        assert counter.total == 2 * e.macs


def test_builds_and_inputs_are_seeded_and_leave_the_rng_alone():
    state = torch.get_rng_state()

    a, b = entry("mlp").build(), entry("mlp").build()

    assert torch.equal(a[0].weight, b[0].weight)
    assert torch.equal(entry("mlp").args()[0], entry("mlp").args()[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_names_are_unique() -> None:
    assert len({e.name for e in ZOO}) == len(ZOO)


def test_a_wrong_truth_would_be_found() -> None:
    e = dataclasses.replace(entry("mlp"), macs=1)

    with pytest.raises(AssertionError):
        assert_true(e, e.build())
