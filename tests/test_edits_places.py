"""Where an edit lands: patches by the module itself, calls by number, what PyTorch never calls."""
# ruff: noqa: PT031, SIM117 - the inner block is what is tested

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hooked import n_hooks
from torch import Tensor, nn

from hookkit.edits import (
    add,
    edit_function,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    patch_from,
    replace,
    scale,
    zero,
)
from hookkit.errors import HookError, HookkitWarning, NeverFiredWarning, OptionError
from hookkit.hooks import hook_output, hook_outputs
from hookkit.hooks.selection import select


class Loop(nn.Module):
    """Calls its layers in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


A, B = torch.randn(2, 4), torch.randn(2, 4)


def equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b))


# --- patches


def test_a_slice_of_a_list_is_patched_by_its_modules() -> None:
    model = Loop()
    with hook_outputs(model.layers) as clean:
        model(A)

    with edit_outputs(model.layers[1:], patch_from(clean)), hook_outputs(model.layers) as h:
        model(B)

    assert equal(h[1].stored, clean[1].stored)
    assert equal(h[2].stored, clean[2].stored)


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_position_in_a_list_is_no_name_in_another_model(as_dict: bool) -> None:
    model, other = Loop(), Loop()
    with hook_outputs(other.layers) as clean:
        other(A)
    run: Any = clean.as_dict() if as_dict else clean

    with pytest.raises(HookError, match="A position in a list is no name"):
        with edit_outputs(model.layers, patch_from(run)):
            model(B)


def test_another_model_is_patched_by_the_names_of_select() -> None:
    model, other = Loop(), Loop()
    with hook_outputs(select(other, "layers.*")) as clean:
        other(A)

    with edit_outputs(select(model, "layers.1"), patch_from(clean)):
        with hook_output(model.layers[1]) as h:
            model(B)

    assert equal(h.stored, clean["layers.1"].stored)


EVERY = slice(None)


@pytest.mark.parametrize(
    ("shape", "at", "from_at"),
    [
        ((3, 7, 2), None, None),
        ((3, 7, 2), (EVERY, 1), None),
        ((1, 7, 2), None, None),  # one sample
        ((1, 7, 2), (EVERY, slice(1, 3)), None),
        ((3, 5, 2), (EVERY, 6), (EVERY, 4)),
        ((1, 5, 2), (EVERY, 6), (EVERY, 4)),
    ],
    ids=str,
)
def test_the_part_of_a_run_that_is_patched_in(shape: Any, at: Any, from_at: Any) -> None:
    layer, x, run = nn.Identity(), torch.randn(3, 7, 2), torch.randn(shape)
    with hook_output(layer) as clean:
        layer(run)
    wanted = x.clone()
    part = ... if at is None else at
    wanted[part] = run[part if from_at is None else from_at]

    with edit_output(layer, patch_from(clean, at=at, from_at=from_at)):
        assert equal(layer(x), wanted)


@pytest.mark.parametrize(
    ("shape", "at", "from_at", "error"),
    [
        ((3, 1, 2), None, None, HookError),  # one token
        ((1, 5, 2), (EVERY, slice(0, 2)), (EVERY, slice(0, 3)), HookError),
        ((1, 5, 2), (EVERY, 6), (EVERY, 5), IndexError),
    ],
)
def test_what_does_not_fit_is_not_patched_in(shape: Any, at: Any, from_at: Any, error: Any) -> None:
    layer = nn.Identity()
    with hook_output(layer) as clean:
        layer(torch.randn(shape))

    with pytest.raises(error, match=r"one position is not|out of bounds"):
        with edit_output(layer, patch_from(clean, at=at, from_at=from_at)):
            layer(torch.zeros(3, 7, 2))


def test_call_by_call_needs_a_counterpart_for_each() -> None:
    layer = nn.Identity()
    with hook_output(layer, keep="all") as clean:
        layer(A), layer(B)

    with edit_output(layer, patch_from(clean)):
        assert equal(layer(B), A)
        assert equal(layer(A), B)
        with pytest.raises(HookError, match="call 3 has no counterpart among the 2"):
            layer(A)


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


def test_calls_that_never_come_are_reported() -> None:
    net = nn.Identity()
    with pytest.warns(NeverFiredWarning, match="`calls=` chose none of the calls that it got"):
        assert _seen(net, 2, edit_output(net, zero(), calls=[5])) == [1, 1]


@pytest.mark.parametrize("calls", [-1, [0, -2], ["a"], "0", 1.5, [0.5], torch.ones(2)])
def test_calls_are_numbers(calls: Any) -> None:
    net = nn.Identity()
    with pytest.raises(OptionError, match=r"edit_output\(calls=.*numbered 0, 1, … in each `with`"):
        edit_output(net, zero(), calls=calls)
    assert n_hooks(net) == 0


# --- what fits


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (replace(torch.ones(3)), RuntimeError),
        (scale(torch.ones(5)), RuntimeError),
        (scale("a"), TypeError),  # type: ignore[arg-type]
        (zero(at=7), IndexError),
        (replace((torch.ones(2),)), HookError),
    ],
    ids=str,
)
def test_an_error_of_pytorch_has_a_note_that_names_the_layer(change: Any, error: Any) -> None:
    with pytest.raises(error) as caught:
        change(nn.Identity(), torch.ones(2, 2))

    assert caught.value.__notes__ == [f"hookkit: raised by {change} on Identity(). There is 2×2."]


@pytest.mark.parametrize(
    ("change", "dtype", "kind"),
    [
        (scale(0.5), torch.int64, "fractions"),
        (scale(1j), torch.float32, "complex numbers"),
        (replace(1j, at=0), torch.float32, "complex numbers"),
    ],
    ids=str,
)
def test_a_number_is_not_cut_to_fit_a_dtype(change: Any, dtype: torch.dtype, kind: str) -> None:
    with pytest.raises(HookError, match=rf"of {kind} does not go into a tensor of {dtype}"):
        change(nn.Identity(), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [add, scale, replace])
@pytest.mark.parametrize(
    "at",
    [
        (slice(None), slice(1, 3)),
        (slice(None), [1, 2]),
        (slice(None), torch.tensor([1, 2])),
        torch.tensor([[False, True, True, False]] * 2),
        (slice(None), torch.tensor([False, True, True, False])),
    ],
    ids=["slice", "list", "index", "mask", "mask of a dimension"],
)
def test_a_tensor_of_another_dtype_is_cast_at_every_kind_of_index(
    dtype: torch.dtype, make: Any, at: Any
) -> None:
    x = torch.full((2, 4, 3), 2.0, dtype=dtype)

    y = make(torch.full((3,), 4.0), at=at)(nn.Identity(), x)

    value = {add: 6.0, scale: 8.0, replace: 4.0}[make]
    assert y.dtype == dtype
    assert y[0, :, 0].tolist() == [2.0, value, value, 2.0]


@pytest.mark.parametrize("value", [torch.distributions.Normal(0, 1), (None, [])])
def test_a_change_of_what_has_no_tensor_is_an_error(value: Any) -> None:
    with pytest.raises(HookError, match="finds no tensor"):
        zero()(nn.Identity(), value)


# --- what is never called


def test_what_only_lends_its_weights_is_reported() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)

    unused = pytest.warns(NeverFiredWarning, match="MultiheadAttention uses its weights without")
    with unused, edit_output(attention.out_proj, zero()):
        attention(x, x, x)


# --- heads


class Grouped(nn.Module):
    """Packs the heads of a single query into queries, as transformers does."""

    num_heads = 4

    def forward(self, q: Tensor, kv: Tensor) -> Tensor:
        if q.shape[2] == 1:
            return F.scaled_dot_product_attention(q.view(1, 2, 2, 8), kv, kv).view(1, 4, 1, 8)
        return F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)


def test_heads_that_a_model_packs_are_warned_of() -> None:
    model, kv = Grouped(), torch.randn(1, 2, 5, 8)

    with pytest.warns(HookkitWarning, match="called with 4 heads, and now with 2.*edit_input"):
        with edit_function(F.scaled_dot_product_attention, zero(at=(slice(None), 1)), within=model):
            model(torch.randn(1, 4, 5, 8), kv)
            model(torch.randn(1, 4, 1, 8), kv)
