"""Gradients of outputs and inputs, each against a truth computed without any hook."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import Gives
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit._core.pytree import tree_map
from hookkit.edits import edit_grad, edit_output, scale
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.hooks import Hook, hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.hooks.selection import select


def double() -> nn.Linear:
    return nn.Linear(4, 4).double()


# A hooked module, and a model that uses it: each a way in which module backward hooks go wrong.
# The truth is the gradient with respect to `eps` in output + eps, handed on in the output's place.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "relu_ after": (double, lambda m, x: m(x).relu_().pow(2).sum()),
    "+= after": (double, lambda m, x: m(x).add_(x).pow(2).sum()),
    "slice assignment after": (double, lambda m, x: assigned(m(x)).pow(2).sum()),
    "in-place module": (lambda: nn.ReLU(inplace=True), lambda m, x: m(x * 1).pow(2).sum()),
    "in-place on its input": (
        lambda: Gives(lambda x: x.mul_(3)),
        lambda m, x: m(x * 1).exp().sum(),
    ),
    "residual on its input": (nn.Tanh, lambda m, x: plus(x * 1, m).pow(2).sum()),
    "nested tuple, inner used": (
        lambda: Gives(lambda x: (x * 2, (x * 3, x.exp()))),
        lambda m, x: m(x)[1][0].pow(2).sum(),
    ),
    "dropout in eval": (
        lambda: nn.Dropout().eval(),
        lambda m, x: (both := x * 1).pow(3).sum() + m(both).exp().sum(),
    ),
    "empty Sequential": (nn.Sequential, lambda m, x: x.pow(3).sum() + m(x).exp().sum()),
    "leaf returned": (lambda: Gives(lambda x: x), lambda m, x: x.sin().sum() + m(x).exp().sum()),
    "same tensor twice": (
        lambda: Gives(lambda x: pair(x * 2)),
        lambda m, x: (lambda a, b: a.pow(2).sum() + b.exp().sum())(*m(x)),
    ),
    "view": (nn.Flatten, lambda m, x: m((x * 1).view(2, 2, -1)).pow(2).sum()),
    "chunks": (lambda: Gives(lambda x: (x * 1).chunk(2)), lambda m, x: (m(x)[0] * m(x)[1]).sum()),
    "expanded gradient": (double, lambda m, x: m(x).sum()),
    "used twice": (double, lambda m, x: (y := m(x)).pow(2).sum() + y.exp().sum()),
}


def assigned(y: Tensor) -> Tensor:
    y[:, 0] = 3
    return y


def plus(x: Tensor, m: nn.Module) -> Tensor:
    x += m(x)
    return x


def pair(y: Tensor) -> tuple[Tensor, Tensor]:
    return y, y


def truth(m: nn.Module, use: Callable[..., Tensor], x: Tensor) -> list[list[Tensor | None]]:
    """The gradient with respect to a zero added to each output leaf, for each call."""
    zeros: list[list[Tensor]] = []

    def shifted(*args: Any, **kwargs: Any) -> Any:
        mine: list[Tensor] = []

        def one(t: Tensor) -> Tensor:
            if not (t.is_floating_point() or t.is_complex()):
                return t
            mine.append(torch.zeros_like(t, requires_grad=True))
            return t + mine[-1]

        out = tree_map(one, m(*args, **kwargs))
        zeros.append(mine)
        return out

    use(shifted, x).backward()
    return [[z.grad for z in mine] for mine in zeros]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("once_more", [False, True])
def test_output_gradients_are_those_of_a_zero_added_to_the_output(
    name: str, once_more: bool
) -> None:
    torch.manual_seed(0)
    build, use = CASES[name]
    m = build()
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    want = truth(m, use, x)
    m.zero_grad()
    x.grad = None
    use(m, x).backward()
    plain = [x.grad, *(p.grad for p in m.parameters())]
    m.zero_grad()
    x.grad = None

    with hook_output(m, grad=True, keep="all") as h:
        loss = use(m, x)
        if once_more:
            loss.backward(retain_graph=True)
            m.zero_grad()
            x.grad = None
        loss.backward()

    for call, expected in zip(h.calls, want, strict=True):
        got = [g for g in call if g is not None]
        torch.testing.assert_close(got, [g for g in expected if g is not None])
    for a, b in zip([x.grad, *(p.grad for p in m.parameters())], plain, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_an_in_place_module_still_changes_its_caller_s_tensor() -> None:
    relu = nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    a = x * 1

    with hook_input(relu, grad=True) as h:
        b = relu(a)
        (a * 3 + b).sum().backward()

    assert b is a
    assert a.tolist() == [0.0, 2.0]
    assert x.grad is not None
    assert x.grad.tolist() == h.stored[0].tolist() == [0.0, 4.0]


@pytest.mark.parametrize("leaf", [True, False])
def test_one_tensor_in_several_places_has_a_gradient_for_each(leaf: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    m, given = Gives(lambda a, b, c: 2 * a + 3 * b + 4 * c), x if leaf else x * 1

    with hook_input(m, grad=True) as h:
        m(given, given, c=given).sum().backward()

    assert [g.tolist() for g in h.stored] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [9.0, 9.0]


def test_a_module_may_change_the_lists_and_dicts_of_its_caller() -> None:
    def f(x: Tensor, found: dict[str, list[Tensor]]) -> Tensor:
        y = x * 2
        found["losses"].append(y.mean())
        return y

    m, found = Gives(f), {"losses": list[Tensor]()}
    x = torch.ones(2, requires_grad=True)

    with hook_input(m, grad=True, keep="all") as h:
        m(m(x, found), found=found)
        sum(found["losses"]).backward()

    assert len(found["losses"]) == 2
    assert [[g.sum().item() for g in call] for call in h.calls] == [[6], [2, 1]]


def test_a_dict_that_is_handed_on_stays_the_callers() -> None:
    def f(name: str) -> Callable[..., Any]:
        def add(state: dict[str, Tensor]) -> dict[str, Tensor]:
            state[name] = state["x"] * 2
            return state

        return add

    net = nn.Sequential(Gives(f("h")), Gives(f("y")))
    state = {"x": torch.ones(2, requires_grad=True)}

    with hook_outputs(net, grad=True) as h:
        assert net(state) is state
        (state["h"] + 3 * state["y"]).sum().backward()

    assert [*state] == ["x", "h", "y"]
    assert [g[0].item() for g in h[1].stored] == [8, 1, 3]


def test_of_a_part_of_the_inputs_only_its_gradient_is_stored() -> None:
    net = nn.ModuleDict({"pair": Gives(lambda a, b: 2 * a + 3 * b)})
    x = torch.ones(2, requires_grad=True)
    with hook_inputs(select(net, "pair[1]"), grad=True) as h:
        net["pair"](x, x + 1).sum().backward()

    assert torch.equal(h[0].stored[0], torch.full((2,), 3.0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 5.0))


def test_stored_gradients_are_not_rewritten_by_the_optimizer() -> None:
    m = Gives(lambda x: x)
    p = nn.Parameter(torch.ones(3))
    with hook_output(m, grad=True) as h:
        (m(p) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        p.grad.zero_()

    assert h.stored[0].tolist() == [1.0, 2.0, 3.0]


def test_create_graph_gradients_can_be_kept_live() -> None:
    m = nn.Tanh()
    x = torch.randn(3, requires_grad=True)
    with hook_output(m, grad=True) as h, hook_output(m, grad=True, detach=False) as live:
        (g,) = torch.autograd.grad(m(x).pow(2).sum(), x, create_graph=True)
    g.sum().backward()

    assert not h.stored[0].requires_grad
    assert live.stored[0].requires_grad


def test_gradients_of_a_removed_hook_are_not_recorded() -> None:
    m = nn.Linear(2, 2)
    h = hook_output(m, grad=True)
    y = m(torch.ones(1, 2)).sum()
    h.remove()

    y.backward()

    assert h.stored is None


# -- PyTorch's full backward hook -------------------------------------------------------------


def test_is_forward_false_gives_the_gradients_of_inputs_and_outputs() -> None:
    m = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    with Hook(m, lambda m, gi, go: (gi, go), is_forward=False) as h:
        m(x).pow(2).sum().backward()

    (grad_in,), (grad_out,) = h.stored
    torch.testing.assert_close(grad_out, 2 * m(x).detach())
    torch.testing.assert_close(grad_in, x.grad)


def test_of_calls_that_a_reentrant_checkpoint_runs_again_the_last_ones_gradient_is_stored() -> None:
    act, x = nn.Tanh(), torch.ones(2, requires_grad=True)

    with hook_output(act, grad=True) as g:
        y = x
        for scale in (2.0, 3.0, 5.0):
            y = scale * checkpoint(act, y, use_reentrant=True)
        y.sum().backward()

    assert g.stored[0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_gradients_at_a_linear_are_the_same_with_two_and_three_dimensions(
    shape: tuple[int, ...],
) -> None:
    block = nn.Sequential(nn.Linear(4, 3))
    x = torch.ones(shape)

    with hook_output(block[0], grad=True) as g:  # a later hook comes later
        y = block[0](x)
        y.register_hook(lambda grad: 10 * grad)
        y.sum().backward()
    with edit_grad(block, scale(10)), hook_output(block[0], grad=True) as inner:
        block(x).sum().backward()
    with edit_grad(block[0], scale(10)), hook_output(block, grad=True) as outer:
        block(x).sum().backward()

    assert [h.stored[0].unique().item() for h in (g, inner, outer)] == [1, 1, 10]


def test_a_gradient_at_a_linear_whose_output_was_transposed_is_not_in_another_order() -> None:
    m, w = nn.Linear(4, 3), torch.arange(30.0).view(5, 2, 3)

    with edit_output(m, lambda o: o.transpose(0, 1)), hook_output(m, grad=True) as g:
        (m(torch.ones(2, 5, 4)) * w).sum().backward()

    assert torch.equal(g.stored[0], w)


@pytest.mark.parametrize("written", [True, False])
def test_a_block_that_ends_in_an_identity_has_a_gradient_where_it_is_written_in_place(
    written: bool,
) -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    x = torch.ones(2, 3)

    with hook_outputs([layer, *layer], grad=True) as g:
        h = layer(x)
        h = h.add_(x) if written else h + x
        (2 * h).sum().backward()

    assert [call[0].unique().tolist() for call in g.stored] == [[2.0]] * 3


def test_an_output_that_is_not_used_has_no_gradient_of_a_tensor_with_the_same_memory() -> None:
    x = torch.ones(2, 3, requires_grad=True)

    with hook_output(m := Gives(lambda x: ((y := 2 * x), y.view_as(y), y)), grad=True) as g:
        m(x)[0].sum().backward()

    assert g.stored[0].sum() == 6
    assert g.stored[1:] == (None, None)


def test_an_edited_gradient_of_a_view_is_not_that_of_the_tensor_it_is_a_view_of() -> None:
    x, made = torch.ones(3, requires_grad=True), list[Tensor]()

    def view(x: Tensor) -> Tensor:
        made.append(2 * x)
        return made[0].view_as(made[0])

    warned = pytest.warns(NeverFiredWarning)
    with warned, edit_grad(m := Gives(view), scale(10)):
        m(x)
        made[0].sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("make", [hook_output, hook_input])
def test_gradients_of_several_backward_passes_in_one_are_refused(make: Any) -> None:
    m, x = nn.Linear(3, 2), torch.ones(3, requires_grad=True)

    refused = pytest.raises(HookError, match=r"Linear.*: several backward passes run as one")
    with refused, make(m, grad=True):
        torch.autograd.grad(m(x), x, torch.eye(2), is_grads_batched=True)


def test_calls_that_a_reentrant_checkpoint_runs_again_leave_no_earlier_gradient_stored() -> None:
    m, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)

    warned = pytest.warns(NeverFiredWarning, match='ran its calls again; use keep="last"')
    with warned, hook_output(m, grad=True, keep="all") as g:
        for factor in (2.0, 3.0):
            (factor * checkpoint(m, x, use_reentrant=True)).sum().backward()

    assert g.stored is None
    assert g.calls[1] == (None,)
