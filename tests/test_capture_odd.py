"""Odd and wrong use of the capture API: it works, or an error names what is wrong."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import Gives, n_hooks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from hookkit.edits import (
    edit_input,
    edit_output,
    zero,
)
from hookkit.errors import OptionError, OverwrittenWarning
from hookkit.hooks import Hook, Hooks, hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.inspection.features import feature_extractor


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(4, 5)


# --- which modules


@pytest.mark.parametrize("path", ["[0", "zzz(", "[0]x", 3, None])
def test_a_path_that_cannot_be_read_is_refused_at_once(path: Any) -> None:
    m = nn.ReLU()

    with pytest.raises(OptionError, match=r"Hook: path=.* is no path into what a module gives"):
        Hook(m, None, path=path)
    assert n_hooks(m) == 0


def test_a_lone_tensor_is_the_one_gradient_of_a_backward_edit(x: Tensor) -> None:
    m = nn.Linear(5, 3)

    with Hook(m, lambda m, into, out: into[0] * 0, is_forward=False, edit=True):
        m(x.requires_grad_()).sum().backward()

    assert x.grad is not None
    assert not x.grad.any()


# --- what happens meanwhile


def test_hooks_that_are_removed_during_a_call_see_no_more(net: nn.Sequential, x: Tensor) -> None:
    hooks: list[Hook] = []
    hooks.append(Hook(net[0], lambda m, i, o: [h.remove() for h in hooks]))
    hooks.append(hook_output(net[0]))

    net(x)
    net(x)

    assert [h.n_calls for h in hooks] == [1, 0]
    assert n_hooks(net) == 0


def test_an_exception_in_the_inner_block_leaves_the_outer_one_at_work(
    net: nn.Sequential, x: Tensor
) -> None:
    h, e = hook_outputs(net), edit_output(net[2], zero())

    def fails() -> None:
        with h, e:
            net(x)
            raise ValueError("mine")

    with h, e:
        with pytest.raises(ValueError, match="mine"):
            fails()
        assert not net(x).any()

    assert [hook.n_calls for hook in h] == [2, 2, 2]
    assert e.n_calls == {"0": 2}
    assert net(x).any()
    assert n_hooks(net) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, GeneratorExit, SystemExit])
def test_any_exception_of_a_function_passes_and_leaves_nothing(
    error: type[BaseException], net: nn.Sequential, x: Tensor
) -> None:
    def broken(*seen: Any) -> None:
        raise error

    for block in (
        lambda: Hook(net[0], broken),
        lambda: Hook(net[0], broken, pre=True),
        lambda: edit_output(net[0], broken),
        lambda: edit_input(net[0], broken),
    ):
        with pytest.raises(error), block():
            net(x)
        assert n_hooks(net) == 0


# --- what modules return


class Sub(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Tensor):
    """As a DTensor: no memory of its own, another tensor inside."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)
        made.elem = elem
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda t: t.elem if isinstance(t, Wrapped) else t, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        return tree_map(lambda t: Wrapped(t) if isinstance(t, Tensor) else t, out)


@pytest.mark.parametrize("kind", ["subclass", "wrapper"])
def test_tensor_subclasses_are_stored_as_what_they_are(kind: str, x: Tensor) -> None:
    def give(x: Tensor) -> Tensor:
        return (x * 2).as_subclass(Sub) if kind == "subclass" else Wrapped(x * 2)

    def bare(t: Any) -> Tensor:
        return t.elem if isinstance(t, Wrapped) else t.as_subclass(Tensor)  # type: ignore[no-any-return]

    m = Gives(give)
    with hook_output(m) as h, hook_output(m, clone=True) as c, hook_output(m, clone=False) as live:
        y = m(x)
    y.add_(5)

    for hook in (h, c):
        assert type(hook.stored) is type(y)
        assert torch.equal(bare(hook.stored), 2 * x)
    with pytest.warns(OverwrittenWarning, match="Gives"):
        assert type(live.stored) is type(y)


PARAMETER = nn.Parameter(torch.tensor([1.0, 2.0]))

KINDS: dict[str, Callable[[Tensor], Any]] = {
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: torch.complex(x, 2 * x),
    "conjugate": lambda x: torch.complex(x, 2 * x).conj(),
    "negative": lambda x: torch.complex(x, 2 * x).conj().imag,
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "scalar": lambda x: x.sum(),
    "bool": lambda x: x > 0,
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[0].expand(6, 5),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "parameter": lambda x: PARAMETER,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "clone": {"clone": True},
    "live": {"clone": False},
    "attached": {"detach": False},
    "all": {"keep": "all"},
    "cpu": {"cpu": True},
}


@pytest.mark.filterwarnings("ignore")  # torch's, on nested and quantized tensors
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_are_stored_as_they_are(kind: str, option: str, x: Tensor) -> None:
    m = Gives(KINDS[kind])

    with hook_output(m, **OPTIONS[option]) as h, hook_input(m) as i:
        y = m(x)

    assert torch.equal(i.stored[0], x)
    assert h.stored.dtype == y.dtype
    assert h.stored.layout == y.layout
    assert repr(h).startswith("Hook(Gives(), 1 call, stored ")
    for got, want in zip(dense(h.stored), dense(y), strict=True):
        assert torch.equal(got, want)


def dense(t: Tensor) -> list[Tensor]:
    if t.is_nested:
        return list(t.unbind())
    if t.layout is not torch.strided:
        return [t.to_dense()]
    if t.is_quantized:
        return [t.dequantize()]
    return [t.float() if t.dtype == torch.float8_e4m3fn else t]


class Table(nn.Module):
    """Gives a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2, 3)

    def forward(self, x: Any) -> Tensor:
        return self.table


SHARING: dict[str, nn.Module] = {
    "as it is": Gives(lambda x: x),
    "a view": Gives(lambda x: x.detach()[:1]),
    "in a list": Gives(lambda x: [x, {"x": x.t()}]),
    "an attribute": Table(),
}
CAPTURES: list[Callable[[nn.Module], Any]] = [
    lambda m: hook_output(m),
    lambda m: hook_outputs([m], keep="all"),
    lambda m: hook_input(m),
    lambda m: hook_input(m, grad=True),
    lambda m: Hook(m, lambda m, i, o: (i, o)),
    lambda m: Hook(m, lambda o: None, edit=True),
]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("m", SHARING.values(), ids=SHARING)
def test_memory_that_the_user_shares_with_numpy_stays_shared(m: nn.Module, grad: bool) -> None:
    for capture in CAPTURES:
        x = torch.zeros(2, 3, requires_grad=grad)
        mine = [x, m.table.zero_()] if isinstance(m, Table) else [x]
        arrays = [t.detach().numpy() for t in mine]

        made = capture(m)
        with torch.set_grad_enabled(grad):
            m(x)
            m(x=x)
            feature_extractor(nn.Sequential(m), "0", detach=True)(x)
        made.remove()
        with torch.no_grad():
            for t in mine:
                t.add_(1)

        assert all((array == 1).all() for array in arrays)


def test_an_array_that_is_made_after_the_capture_shares_its_tensors_memory() -> None:
    x, m = torch.zeros(2, 3), nn.Identity()

    with hook_output(m) as h:
        m(x)
    array = x.numpy()
    x.add_(1)

    assert array.min() == 1
    assert h.stored.max() == 0


@pytest.mark.parametrize("grad", [True, False])
def test_of_a_view_only_its_own_part_of_the_memory_is_kept(grad: bool) -> None:
    m = Gives(lambda x: (x * 2)[:, 0])

    with torch.set_grad_enabled(grad), hook_output(m) as h, hook_input(m) as i:
        m(torch.ones(4, 100, requires_grad=grad)[:2])

    assert h.stored.untyped_storage().nbytes() == 2 * 4
    assert i.stored[0].untyped_storage().nbytes() == 2 * 100 * 4


# --- copies


def test_what_is_stored_can_be_pickled_and_written_to(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs(net) as h, hook_input(net) as i:
        y = net(x)
    want = y.clone()

    stored, inputs = pickle.loads(pickle.dumps((list(h.stored), i.stored)))
    h[2].stored.numpy()[:] = 7
    h[1].stored.zero_()

    assert torch.equal(stored[2], want)
    assert torch.equal(inputs[0], x)
    assert torch.equal(y, want)


# --- modes


TRACED: dict[str, Callable[[nn.Module], Any]] = {
    "outputs": lambda net: hook_outputs(net),
    "calls": lambda net: hook_outputs(net, keep="all"),
    "gradients": lambda net: hook_outputs(net, grad=True),
    "inputs": lambda net: hook_inputs(net),
    "gradients of inputs": lambda net: hook_inputs(net, grad=True),
    "shapes": lambda net: Hooks(net, lambda m, i, o: (i[0].shape, o.shape)),
    "edit": lambda net: Hook(net[0], lambda o: o * 2, edit=True),
}


@pytest.mark.filterwarnings("ignore")  # of torch, that torch.jit is deprecated
@pytest.mark.parametrize("hooked", TRACED.values(), ids=TRACED)
def test_a_hooked_model_can_be_traced_by_torch_jit(hooked: Any) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2))
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))

    made = hooked(net)
    traced = torch.jit.trace(net.eval(), x)

    assert_close(traced(x), net(x))
    made.remove()


@pytest.mark.filterwarnings("error")
def test_a_capture_around_vmap_copies_all_samples_at_once() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(5, 4)
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(net, params, (x,)).sum()
        return y

    with hook_outputs(net) as h:
        torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)

    assert [*h.n_calls.values()] == [1, 1]
