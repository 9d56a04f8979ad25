"""A gradient hook leaves the run as it is, also where the output shares memory with other tensors.

An output that is the module's input, a view, a parameter or there twice has in-place operations
reach the others, as they do without the hook. So each case runs with and without it, and both are
compared bit by bit. Then what the hook stores: the gradient of what was handed on, whoever kept it.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.editing import edit_grad
from hookkit.errors import ArgumentError, OverwrittenWarning
from hookkit.hooks import attach_grad, hook_input, hook_output, hook_outputs, hook_tensor
from hookkit.nested import leaves
from hookkit.selecting import select
from hookkit.stats import GradientStats
from hookkit.watching import watch


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def used_later(m: nn.Module, x: Tensor) -> Tensor:
    """The output is written, its input is used: what the U-Net's list of skips is to a ReLU."""
    y = m(x)
    y.mul_(3)
    return (x.flatten() + y.sum()).pow(2).sum()


def only_the_input_is_used(m: nn.Module, x: Tensor) -> Tensor:
    m(x).mul_(3)
    return x.pow(2).sum()


def input_is_written(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    x.mul_(3)
    return y.pow(2).sum()


def somebody_keeps_the_input(m: nn.Module, x: Tensor) -> Tensor:
    kept.append(x)
    return m(x).mul_(3).pow(2).sum()


kept: list[Tensor] = []


def output_is_written(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).relu_().pow(2).sum()


def nothing_is_written(m: nn.Module, x: Tensor) -> Tensor:
    return (m(x).pow(2).sum() + x.exp().sum()).exp()


def the_input_is_read_before(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    out = y * 2
    return out.add_(x.reshape(out.shape)).pow(2).sum()


USES = [
    used_later,
    only_the_input_is_used,
    input_is_written,
    somebody_keeps_the_input,
    output_is_written,
    nothing_is_written,
    the_input_is_read_before,
]

HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "output": lambda m: hook_output(m, grad=True),
    "input": lambda m: hook_input(m, grad=True),
    "edit": lambda m: edit_grad(m, lambda m, g: g),
}


def results(use: Callable[..., Tensor], m: nn.Module, hook: Any) -> tuple[Tensor, Tensor | None]:
    kept.clear()
    p = torch.tensor([[0.5, -1.0], [2.0, 3.0]], requires_grad=True)
    with hook:
        loss = use(m, p * 1)
        loss.backward()
    return loss.detach(), p.grad


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("m", [View(), nn.Identity(), nn.Flatten(0), nn.Dropout().eval()], ids=str)
@pytest.mark.parametrize("use", USES)
def test_values_and_gradients_are_those_without_the_hook(
    use: Callable[..., Tensor], m: nn.Module, hook: str
) -> None:
    want = results(use, m, nullcontext())

    got = results(use, m, HOOKS[hook](m))

    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_part_of_the_input_that_is_written_alone_is_no_matter() -> None:
    def use(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).mul_(3).pow(2).sum()

    m = Part()
    want = results(use, m, nullcontext())

    got = results(use, m, hook_output(m, grad=True))

    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Residual(nn.Module):
    """The shortcut is the tensor that the activation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.act, self.layer = nn.Identity(), nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        r = self.short(x)
        return r + self.layer(self.act(x))  # type: ignore[no-any-return]


def test_a_shortcut_before_an_in_place_activation_is_what_it_is_without_the_hook() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), Residual()), torch.randn(2, 4)
    y = net(x)
    y.sum().backward()
    want = [y.detach(), *(p.grad for p in net.parameters())]
    net.zero_grad()

    with hook_outputs([net[1].short], grad=True):
        z = net(x)
        z.sum().backward()

    got = [z.detach(), *(p.grad for p in net.parameters())]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Twice(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, self.f(y)


def one_is_written(m: nn.Module, x: Tensor) -> Tensor:
    a, b = m(x)
    a.mul_(3)
    return (a.sum() + b.sum()).pow(2)


def the_other_is_written(m: nn.Module, x: Tensor) -> Tensor:
    a, b = m(x)
    b.mul_(3)
    return (a.sum() + b.sum()).pow(2)


@pytest.mark.parametrize("use", [one_is_written, the_other_is_written])
@pytest.mark.parametrize("f", [lambda y: y, lambda y: y.view(-1), lambda y: y.t()])
def test_outputs_that_share_their_memory_are_written_together(
    use: Callable[..., Tensor], f: Callable[[Tensor], Tensor]
) -> None:
    m = Twice(f)
    want = results(use, m, nullcontext())

    got = results(use, m, hook_output(m, grad=True))

    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_outputs_that_share_their_memory_and_are_only_read_have_a_gradient_each() -> None:
    m = Twice(lambda y: y)

    with hook_output(m, grad=True) as h:
        a, b = m(torch.ones(2, requires_grad=True))
        (a * 2 + b * 3).sum().backward()

    torch.testing.assert_close(h.stored, (torch.full((2,), 2.0), torch.full((2,), 3.0)))


def test_an_optimizers_step_between_batches_is_no_matter() -> None:
    m = Weight()
    opt = torch.optim.SGD(m.parameters(), lr=0.1)

    with hook_output(m, grad=True) as h:
        for _ in range(3):
            opt.zero_grad()
            m(torch.zeros(1)).pow(2).sum().backward()
            opt.step()

    assert h.n_calls == 3


def test_a_parameter_written_in_no_grad_before_the_backward_has_its_gradient() -> None:
    m = Weight()

    with hook_output(m, grad=True) as h:
        loss = m(torch.zeros(1)).sum()
        with torch.no_grad():
            m.weight.mul_(2)
        loss.backward()

    assert h.stored[0].tolist() == [1.0, 1.0]


def test_attach_grad_names_what_is_no_function() -> None:
    m = nn.Identity()

    with pytest.raises(ArgumentError, match="attach_grad: fn must be a function, found int"):
        attach_grad(m, 3)  # type: ignore[arg-type]
    assert not m._forward_hooks


def test_the_graph_keeps_no_memory_and_no_model_alive() -> None:
    m = nn.Identity()
    h = hook_output(m, grad=True)
    x = torch.ones(1000, requires_grad=True) * 1
    memory = weakref.ref(x)
    gc.disable()
    try:
        loss = m(x).sum()
        del x
        loss.backward()
        gone = weakref.ref(m)
        del m, h, loss
        assert gone() is None
    finally:
        gc.enable()
    assert memory() is None


# -- what is stored where the memory is written ------------------------------------------------


@pytest.mark.parametrize("once_more", [False, True])
@pytest.mark.parametrize(
    ("f", "want"),
    [
        (lambda x: x.view(-1), [0.0, 3.0, 6.0, 9.0]),
        (lambda x: x.t(), [[0.0, 3.0], [6.0, 9.0]]),
        (lambda x: x[1], [0.0, 3.0]),
        (lambda x: x[:, ::2].reshape(-1), [0.0, 3.0]),
    ],
    ids=["flat", "transposed", "row", "column"],
)
def test_a_view_that_is_written_has_the_gradient_from_before(
    f: Callable[[Tensor], Tensor], want: Any, once_more: bool
) -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x * 1)

    m = Viewed()

    with hook_output(m, grad=True) as h:
        y = m(torch.ones(2, 2, requires_grad=True))
        y.mul_(3)
        loss = (y * torch.arange(float(y.numel())).view(y.shape)).sum()
        if once_more:
            loss.backward(retain_graph=True)
        loss.backward()

    assert h.stored[0].tolist() == want


@pytest.mark.parametrize(
    ("f", "g"),
    [
        (lambda x: torch.view_as_real(torch.complex(x, x)), lambda y: y),
        (lambda x: torch.view_as_complex(x.view(2, 1, 2) * 1), lambda y: torch.view_as_real(y)),
        (lambda x: (torch.complex(x, 2 * x)).conj(), lambda y: torch.view_as_real(y * 1)),
    ],
    ids=["real", "complex", "conjugate"],
)
def test_views_of_another_kind_of_number_too(
    f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]
) -> None:
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x)

    m, seen = Viewed(), list[Tensor]()

    with hook_output(m, grad=True) as h:
        y = m(torch.ones(2, 2, requires_grad=True))
        z = y * 1  # the same operations, on a tensor of its own
        z.register_hook(seen.append)
        for t in (y, z):
            t.mul_(3)
            w = g(t)
            (w * torch.arange(float(w.numel())).view(w.shape)).sum().backward(retain_graph=True)

    torch.testing.assert_close(h.stored[0], seen[0])


def test_an_edit_of_the_gradient_of_a_view_that_is_written_changes_that_part() -> None:
    m, x = Part(), torch.ones(2, 2, requires_grad=True)

    with edit_grad(m, lambda m, g: g * 10):
        a = x * 1
        m(a).mul_(3)
        a.sum().backward()

    assert x.grad is not None
    assert x.grad.tolist() == [[30.0, 30.0], [1.0, 1.0]]


# -- what others keep of the output --------------------------------------------------------------


class Gives(nn.Module):
    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x * 2,
    "view": lambda x: (x * 2).view(-1),
    "its input": lambda x: x,
    "tuple": lambda x: (y := x * 2, y * 2),
    "tuple of views": lambda x: (x * 2).chunk(2),
    "repeated": lambda x: (y := x * 2, y),
    "a view of the other": lambda x: (y := x * 2, y.view(-1)),
    "nested": lambda x: {"a": (y := x * 2), "b": [y * 2, (y.t(), None)]},
}


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_uses_of_what_another_hook_keeps_count(name: str, position: str, with_stats: bool) -> None:
    m, kept = Gives(OUTPUTS[name]), list[Any]()
    net = nn.Sequential(nn.Linear(2, 2, bias=False), m)
    nn.init.eye_(net[0].weight)
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.ones(2, 2)

    def keep() -> None:
        m.register_forward_hook(lambda m, i, o: kept.append(leaves(o)))

    if position == "before":
        keep()
    hook = hook_output(m, grad=True)
    stats = GradientStats(modules="1", include_paramless=True)
    with watch(net, opt, stats) if with_stats else nullcontext(), hook as h:
        if position == "after":
            keep()
        given = leaves(net(x))
        loss = sum(((k + 1) * t).sum() for k, t in enumerate(given))
        loss = loss + sum((10 * (k + 1) * t).sum() for k, t in enumerate(kept[0]))
        loss.backward()
        opt.step()

    want = [[11.0 * (k + 1)] * t.numel() for k, t in enumerate(given)]
    assert [g.flatten().tolist() for g in h.stored] == want
    if with_stats:
        assert sorted(stats.record().values["mean"][:, 0].tolist()) == [w[0] for w in want]


def test_a_hook_that_keeps_the_live_output_counts_too() -> None:
    m = Gives(OUTPUTS["repeated"])

    with hook_output(m, detach=False) as live, hook_output(m, grad=True) as h:
        a, _ = m(torch.ones(2, requires_grad=True))
        (a + 10 * live.stored[1]).sum().backward()

    assert [g.tolist() for g in h.stored] == [[1.0, 1.0], [10.0, 10.0]]


def test_the_gradient_is_of_what_an_earlier_hook_has_made_of_the_output() -> None:
    m = Gives(OUTPUTS["tuple"])
    m.register_forward_hook(lambda m, i, o: (o[0] * 5, o[1]))

    with hook_output(m, grad=True) as h:
        a, b = m(torch.ones(2, requires_grad=True))
        (a + 3 * b).sum().backward()

    assert [g.tolist() for g in h.stored] == [[1.0, 1.0], [3.0, 3.0]]


def test_one_leaf_of_several_outputs_has_the_gradient_that_it_has_among_them() -> None:
    net = nn.Sequential(Gives(OUTPUTS["tuple"]))

    with hook_output(net[0], grad=True) as h, hook_outputs(select(net, "0[0]"), grad=True) as part:
        a, b = net(torch.ones(2, requires_grad=True))
        (a + 3 * b).sum().backward()

    assert h.stored[0].tolist() == part[0].stored[0].tolist() == [1.0, 1.0]


def test_a_hook_of_the_users_on_the_tensor_stays_where_it_was() -> None:
    seen: list[list[float]] = []

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y.register_hook(lambda g: seen.append(g.tolist()))
        return y, y * 2

    m = Gives(forward)
    with hook_output(m, grad=True) as h:
        a, b = m(torch.ones(2, requires_grad=True))
        (a + b).sum().backward()

    assert seen == [[3.0, 3.0]]  # with what goes through the other output
    assert h.stored[0].tolist() == [1.0, 1.0]


def test_a_gradient_that_the_user_retains_inside_the_module_is_what_it_was() -> None:
    mine: list[Tensor] = []

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y.retain_grad()
        mine.append(y)
        return y, y * 2

    m = Gives(forward)
    with hook_output(m, grad=True):
        a, b = m(torch.ones(2, requires_grad=True))
        (a + b).sum().backward()

    assert mine[0].grad is not None
    assert mine[0].grad.tolist() == [3.0, 3.0]


def test_what_autograd_has_saved_of_several_outputs_stays_valid() -> None:
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    m = Gives(lambda x: (y := x.exp(), y * y))
    a, b = m(x)
    (a + b).sum().backward()
    want = x.grad
    x.grad = None

    with hook_output(m, grad=True):
        a, b = m(x)
        (a + b).sum().backward()

    assert x.grad is not None
    assert want is not None
    torch.testing.assert_close(x.grad, want, rtol=0, atol=0)


def test_a_hook_added_while_the_module_runs_sees_that_it_returns_its_input() -> None:
    m, made = nn.Identity(), list[Any]()
    m.register_forward_pre_hook(lambda m, i: made.append(hook_output(m, grad=True)))
    x = torch.ones(2, requires_grad=True) * 1

    y = m(x)
    (y * 2 + x * 10).sum().backward()

    assert made[0].stored[0].tolist() == [2.0, 2.0]


# -- one tensor ----------------------------------------------------------------------------------


def test_hook_tensor_on_a_view_that_is_written_stores_its_gradient() -> None:
    base = torch.ones(2, 2, requires_grad=True) * 1
    v = base.view(-1)

    h = hook_tensor(v)
    v.mul_(3)
    (v * torch.arange(4.0)).sum().backward()

    assert h.stored is not None
    assert h.stored.tolist() == [0.0, 3.0, 6.0, 9.0]


def test_hook_tensor_on_a_view_whose_base_is_written_stores_its_gradient() -> None:
    base = torch.ones(2, 2, requires_grad=True) * 1

    with hook_tensor(base[1]) as h:
        base.mul_(3)
        (base * torch.arange(4.0).view(2, 2)).sum().backward()

    assert h.stored is not None
    assert h.stored.tolist() == [6.0, 9.0]


def test_hook_tensor_that_is_removed_stores_nothing_of_a_view_that_is_written() -> None:
    v = (torch.ones(2, 2, requires_grad=True) * 1).view(-1)
    h = hook_tensor(v)
    v.mul_(3)
    h.remove()

    v.sum().backward()

    assert h.stored is None


def test_hook_tensor_on_a_view_of_a_leaf_that_is_written_warns_that_nothing_came() -> None:
    p = torch.ones(4, requires_grad=True)
    v = p.view(2, 2)
    h = hook_tensor(v)
    with torch.no_grad():
        p.mul_(2)
    v.sum().backward()

    with pytest.warns(OverwrittenWarning, match=r"a 2×2 tensor\. The tensor is a view of a leaf"):
        stored = h.stored

    assert stored is None
