"""A researcher's daily idioms around hooks, each beside plain PyTorch."""

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.foundation import L
from hooked import n_hooks
from torch import nn

from hookkit.editing import (
    edit_grad,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    patch_from,
    scale,
    zero,
)
from hookkit.errors import (
    ArgumentError,
    NeverFiredWarning,
    OptionError,
    SelectionError,
)
from hookkit.hooks import Hooks, hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.selecting import select


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


# --- names and values of many hooks


def test_hooks_are_read_by_name_as_a_dict_or_pair_by_pair() -> None:
    net = mlp()
    with hook_outputs(select(net, "0", {"2": "last"})) as h:
        y = net(X)

    assert h.names == ("0", "last")
    assert list(h.as_dict()) == ["0", "last"]
    torch.testing.assert_close(h.as_dict()["last"], y, rtol=0, atol=0)
    assert [(name, hook is h[name]) for name, hook in h.items()] == [("0", True), ("last", True)]
    with hook_outputs([net[0], net[2]]) as h:  # without names: positions
        net(X)
    assert list(h.as_dict()) == ["0", "1"]


def test_hooks_of_the_same_name_are_not_read_by_name(tmp_path: Path) -> None:
    first, second = mlp(), mlp()
    pairs = [pair for net in (first, second) for pair in net.named_children()]
    with hook_outputs(pairs) as h:
        y = [first(X), second(2 * X)]

    assert torch.equal(h.stored[2], y[0])
    assert torch.equal(h.stored[5], y[1])
    for read in (h.as_dict, h.items, lambda: h.n_calls):
        with pytest.raises(SelectionError, match=r"several hooks are called '0'.* by position"):
            read()
    pytest.importorskip("safetensors")
    with pytest.raises(SelectionError, match="hook_outputs: several hooks are called '0'"):
        h.save(tmp_path / "two.safetensors")
    assert not any(tmp_path.iterdir())


def test_what_is_stored_is_an_L_and_a_list_which_torch_takes() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with hook_outputs(net, keep="all") as h:
        y = [net(X), net(2 * X)]

    assert isinstance(h.stored, L)
    assert isinstance(h.stored, list)
    assert torch.equal(torch.stack(h.stored)[1], y[1])
    assert torch.equal(torch.stack(h[1].calls), torch.stack(y))
    assert torch.equal(torch.cat(h.stored[1:]), y[1])
    assert h.stored.map(lambda t: tuple(t.shape)) == [(2, 4), (2, 4)]
    assert [len(h.stored[[0]]), len(h.stored[[False, True]]), len(h.stored)] == [1, 1, 2]
    for again in (copy.deepcopy(h.stored), pickle.loads(pickle.dumps(h.stored))):
        assert type(again) is type(h.stored)
        assert torch.equal(again[1], y[1])


# --- before the hooks that are there


def test_a_prepended_hook_comes_before_those_that_are_there() -> None:
    layer = nn.Identity()
    handle = layer.register_forward_hook(lambda m, i, o: o + 1)
    pre = layer.register_forward_pre_hook(lambda m, i: (i[0] * 10,))
    with (
        hook_output(layer, prepend=True) as own,
        hook_outputs([layer]) as edited,
        hook_inputs([layer], prepend=True) as given,
        hook_input(layer) as taken,
        Hooks([layer], lambda m, i, o: o * 2, edit=True, prepend=True, keep="none"),
    ):
        layer(torch.ones(1))

    seen = own.stored, edited[0].stored, given[0].stored[0], taken.stored[0]
    assert [t.item() for t in seen] == [20, 21, 1, 10]  # the last one prepended is the first
    handle.remove(), pre.remove()


# --- edits at some calls


def _seen(net: nn.Module, n: int, *edits: Any) -> list[float]:
    """What `net` gives for 1, in `n` calls inside of the edits."""
    with contextlib.ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit)
        return [net(torch.ones(1)).item() for _ in range(n)]


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ([0, 2], [5, 1, 5, 1]),
        (1, [1, 5, 1, 1]),
        (range(1, 3), [1, 5, 5, 1]),
        (lambda n: n > 0, [1, 5, 5, 5]),
        (None, [5, 5, 5, 5]),
    ],
)
def test_edits_are_limited_to_calls_by_number(calls: Any, wanted: list[float]) -> None:
    net = nn.Identity()
    edit = edit_output(net, scale(5), calls=calls)

    assert _seen(net, 4, edit) == wanted
    assert edit.n_calls == {"0": 4}
    assert _seen(net, 4, edit) == wanted  # numbers begin again with each `with`
    assert _seen(net, 4, edit_input(net, lambda x: (x[0] * 5,), calls=calls)) == wanted


def test_calls_are_counted_for_each_module_alone_also_within_one_forward() -> None:
    act, other = nn.Identity(), nn.Identity()
    net = nn.Sequential(act, other, act)

    assert _seen(net, 2, edit_outputs([act, other], scale(2), calls=[1])) == [2, 2]
    assert _seen(net, 2, edit_inputs([act], scale(3), calls=[1, 2])) == [3, 3]


def test_a_patch_call_by_call_at_some_calls() -> None:
    net = nn.Identity()
    with hook_output(net, keep="all") as clean:
        [net(torch.tensor([float(n)])) for n in (7, 8, 9)]

    assert _seen(net, 3, edit_output(net, patch_from(clean), calls=[1])) == [1, 8, 1]


def test_calls_that_never_come_are_reported() -> None:
    net = nn.Identity()
    with pytest.warns(NeverFiredWarning, match="`calls` is true of none of the calls that it got"):
        assert _seen(net, 2, edit_output(net, zero(), calls=[5])) == [1, 1]


@pytest.mark.parametrize("calls", [-1, [0, -2], ["a"], "0", 1.5, [0.5], torch.ones(2)])
def test_calls_are_numbers(calls: Any) -> None:
    net = nn.Identity()
    with pytest.raises(OptionError, match=r"edit_output\(calls=.*numbered 0, 1, … in each `with`"):
        edit_output(net, zero(), calls=calls)
    assert n_hooks(net) == 0


def test_a_function_of_calls_takes_the_number() -> None:
    with pytest.raises(ArgumentError, match=r"calls <lambda>\(a, b\) takes 2 .* Give f\(number\)"):
        edit_output(nn.Identity(), zero(), calls=lambda a, b: True)


# --- one clean sample for a batch


@pytest.mark.parametrize(
    "at", [None, (slice(None), 1), (slice(None), slice(1, 3)), (..., 0), 0, torch.tensor([1, 0])]
)
def test_one_clean_sample_patches_a_batch(at: Any) -> None:
    layer = nn.Identity()
    batch, clean = torch.zeros(3, 4, 2), torch.arange(8.0).reshape(1, 4, 2)
    with hook_output(layer) as run:
        layer(clean)
    wanted = batch.clone()
    wanted[... if at is None else at] = clean.expand(3, 4, 2)[... if at is None else at]

    with edit_output(layer, patch_from(run, at=at)):
        assert torch.equal(layer(batch), wanted)


# --- messages


@pytest.mark.parametrize("make", [hook_output, edit_output, edit_input, edit_grad])
def test_the_projection_that_attention_does_not_call_is_explained(make: Any) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.ones(1, 3, 4)
    given = () if make is hook_output else (zero(),)
    with (
        pytest.warns(
            NeverFiredWarning, match="MultiheadAttention uses its weights without calling"
        ),
        make(attention.out_proj, *given),
    ):
        attention(x, x, x)
