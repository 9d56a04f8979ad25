"""Hook, Hooks and hook_output(s): what is stored, when it is stored, what is reported."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fastcore.foundation import L
from hooked import Gives, n_hooks
from test_pytree import STRUCTURES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit._core.pytree import tree_leaves, tree_map
from hookkit.errors import ArgumentError, HookError, NeverFiredWarning, SelectionError
from hookkit.hooks import (
    Hook,
    Hooks,
    attach,
    hook_input,
    hook_inputs,
    hook_output,
    hook_outputs,
)
from hookkit.hooks.selection import select


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 5)


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))


# -- what is stored ---------------------------------------------------------------------------


def test_detach_false_keeps_the_graph(net: nn.Sequential, x: Tensor) -> None:
    with hook_output(net[0], detach=False) as h:
        net(x)

    h.stored.sum().backward()
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_keep_their_type_and_the_forward_keeps_its_output(name: str) -> None:
    structure, _, _ = STRUCTURES[name]
    model = Gives(lambda x: tree_map(lambda t: t * x, structure))

    with hook_output(model) as h, hook_outputs([model], clone=False) as live:
        y = model(torch.tensor(2.0, requires_grad=True))

    for stored in (h.stored, live.stored[0]):
        assert type(stored) is type(y)
        for a, b in zip(tree_leaves(stored), tree_leaves(y), strict=True):
            assert torch.equal(a, b)
            assert b.requires_grad
            assert not a.requires_grad


@pytest.mark.parametrize("value", [None, 3, "text", ()])
def test_what_is_no_tensor_is_stored_as_it_is(value: Any, x: Tensor) -> None:
    model = Gives(lambda x: value)

    with hook_output(model) as h:
        assert model(x) is value

    assert h.stored is value
    assert h.n_calls == 1


@pytest.mark.parametrize("grad", [True, False])
def test_a_snapshot_is_not_written_through_numpy_or_data(grad: bool, x: Tensor) -> None:
    model = nn.Linear(5, 3).requires_grad_(False)
    with hook_output(model) as h, torch.set_grad_enabled(grad):
        y = model(x)
    want = y.clone()

    y.numpy()[:] = 7
    y.data.zero_()

    assert torch.equal(h.stored, want)


# -- inputs, calls, functions -----------------------------------------------------------------


def test_hook_func_sees_detached_tensors_and_keyword_inputs(x: Tensor) -> None:
    m, seen = nn.Linear(5, 3), []
    with Hook(m, lambda m, i, o: seen.append((i["input"].requires_grad, o.requires_grad))):
        m(input=x.requires_grad_())

    assert seen == [(False, False)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoints_recomputation_is_not_counted(reentrant: bool, x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    with hook_outputs(net, keep="all") as h, hook_outputs(net, grad=True) as g:
        y = checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)
        y.pow(2).sum().backward()

    assert [hook.n_calls for hook in h] == [1, 1, 1]
    torch.testing.assert_close(g.stored[2][0], 2 * y.detach())
    torch.testing.assert_close(g.stored[1][0], 2 * y.detach() @ net[2].weight)


def test_an_exception_of_the_function_names_the_module(net: nn.Sequential, x: Tensor) -> None:
    def broken(m: nn.Module, i: Any, o: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as e, Hook(net[0], broken):
        net(x)

    assert "raised by the hook" in e.value.__notes__[0]
    assert "Linear(in_features=5" in e.value.__notes__[0]
    assert n_hooks(net) == 0


def test_an_edit_of_inputs_gives_as_many_as_there_are() -> None:
    m, x = nn.Bilinear(2, 3, 4), (torch.zeros(5, 2), torch.ones(5, 3))
    reported = r"'two' \(Bilinear\): 1 positional inputs were returned.*called with \(5×2, 5×3\)"

    with (
        pytest.raises(HookError, match=reported),
        Hooks({"two": m}, lambda m, i: i[0], pre=True, edit=True),
    ):
        m(*x)
    with Hook(m, lambda m, i: (i[0] + 1, i[1]), pre=True, edit=True):
        torch.testing.assert_close(m(*x), m.forward(x[0] + 1, x[1]))


# -- Hooks as a collection --------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"keep": "all"}, {"clone": False}, {"stop": True}])
def test_every_name_of_a_shared_module_has_its_hook(options: Any, x: Tensor) -> None:
    model = nn.ModuleDict({"a": nn.Linear(5, 5), "c": nn.Linear(5, 5)})
    model["b"] = model["a"]
    with hook_outputs(select(model, "a", "b", "c"), **options) as h:
        model["b"](x)
        model["c"](x)

    y, z = model["b"](x), model["c"](x)
    assert h.names == ("a", "b", "c")
    for found, expected in zip(h.stored, [y, y, z], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert h["b"] is h[1]
    assert h["b"].n_calls == 1
    assert "b" in h


def test_an_unknown_name_is_answered_with_its_neighbours(net: nn.Sequential) -> None:
    h = hook_outputs({"encoder": net[0], "decoder": net[2]})

    with pytest.raises(SelectionError, match=r"no hook is called \"encodr\". Nearest: \"encoder\""):
        _ = h["encodr"]
    h.remove()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("fc", r'expected several modules, found the string "fc"\. Pass select'),
        (nn.Linear(1, 1), "expected several modules, found Linear"),
        (3, "expected several modules, found int"),
        ([nn.ReLU(), "fc"], r'found the string "fc"\. select\(model, name\) finds modules by name'),
        ([nn.ReLU(), None], "found None"),
    ],
)
def test_what_is_no_module_is_refused_at_once(modules: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        hook_outputs(modules)

    if isinstance(modules, list):
        assert n_hooks(modules[0]) == 0


def named_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_hooks_are_read_by_name_as_a_dict_or_pair_by_pair() -> None:
    net = named_mlp()
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
    first, second = named_mlp(), named_mlp()
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


# -- life -------------------------------------------------------------------------------------


def test_a_hook_that_never_fired_is_reported_by_name_with_the_reason(x: Tensor) -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 5), "list": nn.ModuleList(), "unused": nn.ReLU()})

    with pytest.warns(NeverFiredWarning) as w, hook_outputs(dict(model.items())):
        model["used"](x)

    text = str(w[0].message)
    assert text.startswith("hook_outputs: 2 of 3 hooks never fired: 'list' (ModuleList): a Module")
    assert "'unused' (ReLU): not called, or it raised an error (module.fo" in text
    assert w[0].filename == __file__


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda net, x: net(x), "no backward pass reached it inside the block"),
        (lambda net, x: torch.no_grad()(net)(x), "gradients switched off"),
        (lambda net, x: net.requires_grad_(False)(x), "requires a gradient"),
    ],
)
def test_a_gradient_that_never_came_has_its_reason(
    run: Any, reason: str, net: nn.Sequential, x: Tensor
) -> None:
    with pytest.warns(NeverFiredWarning, match=reason), hook_output(net[0], grad=True) as h:
        run(net, x)

    assert h.stored is None


def test_a_stop_that_the_model_swallows_is_reported(x: Tensor) -> None:
    inner = nn.ReLU()

    def bare(x: Tensor) -> Tensor:
        try:
            return inner(x)
        except BaseException:
            return x

    swallowed = pytest.warns(NeverFiredWarning, match="the model caught StopForward")
    with swallowed, hook_output(inner, stop=True):
        Gives(bare)(x)


@pytest.mark.parametrize("options", [{}, {"keep": "all"}, {"grad": True}, {"detach": False}])
def test_nothing_is_kept_alive_without_the_garbage_collector(options: Any, x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(5, 10), nn.ReLU())
    alive = weakref.ref(net[0])
    gc.disable()
    try:
        h = hook_outputs(net, **options)
        net(x).sum().backward()
        value = h.stored[0][0] if options.get("grad") else h.stored[0]
        stored = weakref.ref(value)
        del value, net
        if options.get("detach", True):
            assert alive() is None
        del h
        assert stored() is None
        assert alive() is None
    finally:
        gc.enable()


# -- attach, devices, checkpoints -------------------------------------------------------------


def test_attach_ignores_what_the_function_returns_unless_it_edits(
    net: nn.Sequential, x: Tensor
) -> None:
    want = net(x)
    observer = attach(net[2], lambda m, a, k, o: o * 0)
    assert torch.equal(net(x), want)

    editor = attach(net[2], lambda m, a, k, o: o * 0, edit=True)
    assert not net(x).any()

    for handle in (observer, editor, editor):
        handle.remove()
    assert n_hooks(net) == 0


def test_a_devices_outputs_arrive_on_the_cpu_when_they_are_read(
    net: nn.Sequential, x: Tensor, gpu: torch.device
) -> None:
    net.to(gpu)
    with hook_outputs(net, cpu=True) as h:
        y = net(x.to(gpu))
        y.zero_()

    assert all(t.device.type == "cpu" for t in h.stored)
    torch.testing.assert_close(h.stored[2], net(x.to(gpu)).cpu())


def test_gradients_of_inputs_arrive_under_a_reentrant_checkpoint() -> None:
    m, x = nn.Linear(2, 3), torch.ones(1, 2, requires_grad=True)

    with hook_input(m, grad=True) as h:
        checkpoint(m, x, use_reentrant=True).sum().backward()

    torch.testing.assert_close(h.stored[0], m.weight.sum(0, keepdim=True).detach())


# -- fastai's `hook_fn` ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"is_forward": False}, {"cpu": True}, {"detach": False}])
def test_hook_fn_calls_the_function_and_stores(kind: dict[str, bool]) -> None:
    m, x = nn.Linear(5, 3), torch.randn(4, 5)
    seen = []

    hook = Hook(m, lambda m, i, o: seen.append((m, i, o)) or o * 2, **kind)
    hook.remove()
    given = m(x)
    assert hook.hook_fn(m, (x,), given) is None

    assert seen[0][0] is m
    assert torch.equal(seen[0][1][0], x)
    assert torch.equal(seen[0][2], given)
    assert seen[0][2].requires_grad == (not kind.get("detach", True))
    assert torch.equal(hook.stored, given * 2)
