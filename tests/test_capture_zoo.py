"""The rest of the capture features over the whole zoo: input gradients, stop, edits, catchers.

`test_hooks_zoo` has outputs, inputs and output gradients; `test_editing`, `test_swapping` and
`test_features` have doubling, wrapping and extracting. What is compared with is made by hand here,
of plain PyTorch hooks, on a model of its own.
"""

import warnings
from typing import Any

import pytest
import torch
from reference import (
    GRADIENTS,
    arrived,
    backward,
    changed,
    copied,
    hookable,
    input_gradients_by_hand,
    plain_backward,
    plain_run,
    run,
    same,
)
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit.editing import edit_grads, edit_inputs
from hookkit.hooks import hook_all, hook_inputs, hook_output, hook_outputs, print_sizes
from hookkit.modules import can_run, walk
from hookkit.nested import tmap
from hookkit.selecting import leaf_modules, select, unwrap
from hookkit.swapping import Catcher, swap


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def every(entries: list[Entry]) -> Any:
    return pytest.mark.parametrize("entry", entries, ids=lambda e: e.name)


def is_bare(model: nn.Module) -> bool:
    """No hook of hookkit remains: their keys are negative."""
    modules = hookable(model).values()
    return all(k >= 0 for m in modules for k in (*m._forward_hooks, *m._forward_pre_hooks))


def agree(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    """Parameter gradients to the last bit."""
    pairs = zip(got, want, strict=True)
    return all((a is None) == (b is None) and (a is None or same([a], [b])) for a, b in pairs)


# --- gradients of inputs


@every(GRADIENTS)
def test_gradients_of_every_input_are_those_of_a_model_called_with_clones(entry: Entry) -> None:
    plain = plain_backward(entry)
    model = entry.build()
    modules = hookable(model)
    if not modules:
        pytest.skip("no module to hook")

    with hook_inputs(modules, grad=True, keep="all") as h:
        got = backward(entry, model)

    if any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        torch.testing.assert_close(got, plain)  # its three inputs are three tensors now
    else:
        assert agree(got, plain)
    assert is_bare(model)
    if entry.tags & {"mutates_input", "inplace"}:
        return  # a module that writes into a clone does not do what it does
    want = input_gradients_by_hand(entry)
    for name in modules:
        for mine, hers in zip(h[name].calls, want.get(name, []), strict=True):
            a, b = arrived(mine), arrived(hers)
            assert len(a) == len(b), name
            torch.testing.assert_close(a, b, msg=name)


# --- options of what is stored


@pytest.mark.parametrize("options", [{"keep": "all"}, {"cpu": True}], ids=str)
@every(ZOO)
def test_however_it_is_stored_it_is_what_the_layer_gave(
    entry: Entry, options: dict[str, Any]
) -> None:
    plain, model = plain_run(entry), entry.build()
    modules = hookable(model)
    if not modules:
        pytest.skip("no module to hook")

    with hook_outputs(modules) as usual, hook_outputs(modules, **options) as other:
        got = run(entry, model)

    assert got[1] is plain[1]
    assert same(got[0], plain[0])
    for name in modules:
        assert same(copied(other[name].stored), copied(usual[name].stored)), name
        assert other[name].n_calls == usual[name].n_calls


# --- stop


@every(ZOO)
def test_a_stop_at_a_layer_stores_its_first_call_and_runs_nothing_after_it(entry: Entry) -> None:
    ended: list[tuple[str, list[Tensor]]] = []
    twin = entry.build()
    for name, m in hookable(twin).items():
        m.register_forward_hook(lambda m, i, o, name=name: ended.append((name, copied(o))))
    run(entry, twin)
    first: dict[str, tuple[int, list[Tensor]]] = {}
    for number, (name, output) in enumerate(ended):
        first.setdefault(name, (number, output))

    for name in dict.fromkeys([*list(first)[:2], *list(first)[-2:]]):
        model, calls = entry.build(), []
        modules = hookable(model)
        if not modules:
            pytest.skip("no module to hook")
        for m in modules.values():
            m.register_forward_hook(lambda m, i, o, calls=calls: calls.append(m))
        with hook_output(modules[name], stop=True) as h:
            run(entry, model)

        number, output = first[name]
        assert h.n_calls == 1, name
        assert same(copied(h.stored), output), name
        if not entry.tags & {"raises", "compiled"}:
            assert len(calls) == number + 1, name
        assert is_bare(model)


# --- edits that change nothing


@every(ZOO)
def test_copies_of_inputs_change_nothing(entry: Entry) -> None:
    if entry.tags & {"mutates_input", "inplace", "raises"}:
        pytest.skip("a copy is not the tensor that is written")
    plain, model = plain_run(entry), entry.build()
    modules = leaf_modules_of(model)
    if not modules:
        pytest.skip("no module to hook")

    with edit_inputs(modules, lambda m, i: tmap(Tensor.clone, i)):
        got = run(entry, model)

    assert is_bare(model)
    for a, b in zip(got[0], plain[0], strict=True):
        # a copy may choose another kernel: by its strides, or since query is no longer key
        assert same([a], [b]) or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def leaf_modules_of(model: nn.Module) -> dict[str, nn.Module]:
    leaves = leaf_modules(model)
    return {n: m for n, m in leaves.items() if not isinstance(m, torch.jit.ScriptModule)}


@every(GRADIENTS)
def test_doubled_gradients_are_those_of_a_model_that_doubles_by_hand(entry: Entry) -> None:
    twin, model = entry.build(), entry.build()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    def by_hand(m: nn.Module, i: Any, o: Any) -> Any:
        return changed(lambda t: Doubled.apply(t) if t.requires_grad else t, o)

    for m in leaf_modules_of(twin).values():
        m.register_forward_hook(by_hand)
    want = backward(entry, twin)

    if entry.name == "lstmcell_loop":
        pytest.skip("the cell makes one of its outputs from the other, which is a use of it here")
    with edit_grads(leaf_modules_of(model), lambda m, g: 2 * g):
        got = backward(entry, model)

    assert [g is None for g in got] == [g is None for g in want]
    torch.testing.assert_close(arrived(got), arrived(want))


# --- catchers, and looking at everything


@every([e for e in ZOO if not e.tags & {"raises", "lazy"}])
def test_catchers_record_what_hooks_see(entry: Entry) -> None:
    hooked, swapped = entry.build(), entry.build()
    names = [name for name, m, first in walk(swapped) if name and first and can_run(m)]
    modules = {n: m for n, m in hookable(hooked).items() if n in names}
    if not modules:
        pytest.skip("no module to hook")
    with hook_outputs(modules, keep="all") as h, hook_inputs(modules, keep="all") as i:
        plain = run(entry, hooked)

    before = [id(m) for m in swapped.modules()]
    with swap(swapped, dict.fromkeys(names, Catcher)) as caught:
        got = run(entry, swapped)

    assert [id(m) for m in swapped.modules()] == before
    assert same(got[0], plain[0])
    if entry.tags & {"compiled", "cyclic"} or entry.name == "direct_forward":
        return  # .forward() runs a catcher, and no hook
    for name in set(names) & set(modules):
        calls = caught[name].calls  # type: ignore[attr-defined]
        assert len(calls) == h[name].n_calls, name
        for call, before, after in zip(calls, i[name].calls, h[name].calls, strict=True):
            assert same(copied(call.output), copied(after)), name
            assert same(copied(tuple(call.inputs)), copied(tuple(before))), name


@every([e for e in ZOO if not e.tags & {"scripted", "compiled"}])
def test_everything_is_seen_once_by_a_global_hook_and_by_print_sizes(
    entry: Entry, capsys: pytest.CaptureFixture[str]
) -> None:
    model, seen = entry.build(), []
    plain = plain_run(entry)
    inside = {id(m) for m in hookable(model).values()}

    modules = hookable(model)
    if not modules:
        pytest.skip("no module to hook")
    everywhere = hook_all(lambda m, i, o: seen.append(id(m)))
    with hook_outputs(modules) as h, everywhere, print_sizes(model):
        got = run(entry, model)

    assert same(got[0], plain[0])
    assert sum(i in inside for i in seen) == sum(hook.n_calls for hook in h)
    assert is_bare(model)
    assert not nn.modules.module._has_any_global_hook()
    assert capsys.readouterr().out.count(" → ") == sum(
        hook.n_calls for hook in h if hook.module is not None and listed(model, hook.module)
    )


def listed(model: nn.Module, module: nn.Module) -> bool:
    return module is unwrap(model) or any(m is module for m in select(model).values())
