"""Every zoo entry's truth, checked another way than it was written down."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from zoo import ZOO, Entry, entry, select_zoo

from hookkit.stats.parameters import named_parameters

ids = [e.name for e in ZOO]


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


@pytest.mark.parametrize("e", ZOO, ids=ids)
def test_parameters_are_the_distinct_parameters_by_identity(e):
    model = e.build()
    if "lazy" in e.tags:
        plain_run(e, model)
    distinct = {id(p): p for m in model.modules() for p in m._parameters.values() if p is not None}
    if "scripted" in e.tags:
        distinct = {p.data_ptr(): p for p in model.parameters()}

    assert sum(p.numel() for p in distinct.values()) == e.n_params
    assert sum(p.numel() for p in distinct.values() if p.requires_grad) == e.n_trainable


@pytest.mark.parametrize("e", ZOO, ids=ids)
def test_forward_runs_and_its_macs_are_the_formula(e):
    model = unwrapped(e.build())
    if "lazy" in e.tags:
        plain_run(e, model)

    with Flops() as counter:
        plain_run(e, model)

    if e.macs is None:
        assert e.note
    else:
        assert counter.total == 2 * e.macs


@pytest.mark.parametrize("e", [e for e in ZOO if e.calls], ids=lambda e: e.name)
def test_modules_are_called_as_often_as_said(e):
    model = unwrapped(e.build())
    n = {name: 0 for name, _ in model.named_modules()}

    def count(name):
        def hook(*_):
            n[name] += 1

        return hook

    for name, m in model.named_modules():
        m.register_forward_pre_hook(count(name))
    plain_run(e, model)

    assert {name: n[name] for name in e.calls} == dict(e.calls)


def test_builds_and_inputs_are_seeded_and_leave_the_rng_alone():
    state = torch.get_rng_state()

    a, b = entry("mlp").build(), entry("mlp").build()

    assert torch.equal(a[0].weight, b[0].weight)
    assert torch.equal(entry("mlp").args()[0], entry("mlp").args()[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_names_are_unique_and_there_are_at_least_ninety():
    assert len(set(ids)) == len(ids) >= 90


def test_tags_select():
    assert entry("dropout_train") in select_zoo(having={"train_rng"})
    assert entry("dropout_train") not in select_zoo(without={"train_rng"})


def test_a_wrong_truth_would_be_found():
    e = dataclasses.replace(entry("mlp"), macs=1)

    with pytest.raises(AssertionError):
        test_forward_runs_and_its_macs_are_the_formula(e)


@pytest.mark.parametrize("e", select_zoo(without={"lazy", "meta"}), ids=lambda e: e.name)
def test_recorded_parameters_have_the_names_the_model_gives_them(e):
    model = e.build()
    inner = unwrapped(model.module if e.name == "data_parallel" else model)

    found = [name for name, _, _ in named_parameters(model)]

    assert found == [name for name, _ in inner.named_parameters()]
