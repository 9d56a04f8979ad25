"""Every capture feature over the zoo.

What is compared with is made by hand, of plain PyTorch hooks, on a model of its own
(`reference.py`).
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import (
    GRADIENTS,
    arrived,
    backward,
    buffers,
    by_hand,
    changed,
    copied,
    flat,
    gradients_by_hand,
    hookable,
    input_gradients_by_hand,
    plain_backward,
    run,
    same,
)
from torch import Tensor, nn
from zoo import ZOO, Entry

from hookkit._core.modules import can_run, walk
from hookkit._core.pytree import tree_map
from hookkit.edits import edit_grads, edit_outputs
from hookkit.edits.swapping import Catcher, swap
from hookkit.errors import HookError
from hookkit.hooks import hook_inputs, hook_output, hook_outputs
from hookkit.hooks.selection import leaf_modules
from hookkit.inspection.collecting import collect
from hookkit.inspection.features import feature_extractor

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def every(entries: list[Entry]) -> Any:
    """One test for each of the entries, but for two without a module that takes hooks."""
    found = [e for e in entries if e.name not in ("scripted", "traced")]
    return pytest.mark.parametrize("entry", found, ids=lambda e: e.name)


def is_bare(model: nn.Module) -> bool:
    """No hook of hookkit remains: their keys are negative."""
    modules = hookable(model).values()
    return all(k >= 0 for m in modules for k in (*m._forward_hooks, *m._forward_pre_hooks))


def leaf_modules_of(model: nn.Module) -> dict[str, nn.Module]:
    leaves = leaf_modules(model)
    return {n: m for n, m in leaves.items() if not isinstance(m, torch.jit.ScriptModule)}


# --- hooks


@every(ZOO)
def test_every_call_is_seen_as_by_plain_hooks_and_the_run_is_bit_identical(entry: Entry) -> None:
    want_in, want_out, want = by_hand(entry)
    bare, model = entry.build(), entry.build()
    plain = run(entry, bare)
    modules = hookable(model)

    with (
        hook_inputs(modules, keep="all") as before,
        hook_outputs(modules, keep="all") as after,
        hook_outputs(modules) as last,
        hook_outputs(modules, cpu=True) as moved,
    ):
        got = run(entry, model)

    assert got[1] is plain[1], "another end of the run"
    assert same(got[0], plain[0]), "other outputs than without hooks"
    assert same(got[0], want[0]), "other outputs than with plain hooks"
    assert all(same([p], [q]) for p, q in zip(buffers(bare), buffers(model), strict=True))
    assert is_bare(model), "hooks are left"
    for name in modules:
        ins, outs = want_in.get(name, []), want_out.get(name, [])
        assert before[name].n_calls == len(ins), name
        for g, w in zip(before[name].calls, ins, strict=True):
            assert same([*flat(g), *flat(g.kwargs)], w), name
        for g, w in zip(after[name].calls, outs, strict=True):
            assert same(list(flat(g)), w), name
        for hook in (after[name], last[name], moved[name]):
            assert hook.n_calls == len(outs), name
        for hook in (last[name], moved[name]):
            assert not outs or same(list(flat(hook.stored)), outs[-1]), name


# Their modules make one of their outputs from another, which is a use of that one here; the
# reference leaves it out.
OWN_USE = ("lstmcell_loop", "model_output", "nested_structures", "tree")


def assert_same_gradients(hooks: Any, want: dict[str, list[Any]], skip: bool = False) -> None:
    for name in hooks.names:
        for mine, hers in zip(hooks[name].calls, want.get(name, []), strict=True):
            if skip and len(mine) > 1:
                continue
            a, b = arrived(mine), arrived(hers)
            assert len(a) == len(b), name
            torch.testing.assert_close(a, b, msg=name)


def agree(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    """Parameter gradients to the last bit."""
    pairs = zip(got, want, strict=True)
    return all((a is None) == (b is None) and (a is None or same([a], [b])) for a, b in pairs)


@every(GRADIENTS)
def test_gradients_of_outputs_are_those_of_a_hand_tapped_model(entry: Entry) -> None:
    model = entry.build()

    with hook_outputs(hookable(model), grad=True, keep="all") as h:
        got = backward(entry, model)

    assert_same_gradients(h, gradients_by_hand(entry), entry.name.startswith(OWN_USE))
    assert agree(got, plain_backward(entry)), "parameters have other gradients"


@every(GRADIENTS)
def test_gradients_of_inputs_are_those_of_a_model_called_with_clones(entry: Entry) -> None:
    model = entry.build()

    with hook_inputs(hookable(model), grad=True, keep="all") as h:
        got = backward(entry, model)

    if any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        torch.testing.assert_close(got, plain_backward(entry))  # its three inputs are three now
    else:
        assert agree(got, plain_backward(entry)), "parameters have other gradients"
    assert is_bare(model), "hooks are left"
    if not entry.tags & {"mutates_input", "inplace"}:  # they do not write into a clone
        assert_same_gradients(h, input_gradients_by_hand(entry))


@every(ZOO)
def test_a_stop_at_a_layer_stores_its_first_call_and_runs_nothing_after_it(entry: Entry) -> None:
    ended: list[str] = []
    twin = entry.build()
    for name, m in hookable(twin).items():
        m.register_forward_hook(lambda m, i, o, name=name: ended.append(name))
    run(entry, twin)
    first = by_hand(entry)[1]

    for name in dict.fromkeys([*list(first)[:1], *list(first)[-2:]]):
        model, calls = entry.build(), []
        modules = hookable(model)
        for m in modules.values():
            m.register_forward_hook(lambda m, i, o, calls=calls: calls.append(m))
        with hook_output(modules[name], stop=True) as h:
            run(entry, model)

        assert h.n_calls == 1, name
        assert same(copied(h.stored), first[name][0]), name
        if not entry.tags & {"raises", "compiled"}:
            assert len(calls) == ended.index(name) + 1, name
        assert is_bare(model), name


# --- features and catchers


WHOLE = [e for e in ZOO if not e.tags & {"raises", "lazy", "scripted", "compiled", "meta"}]


@every([e for e in WHOLE if e.name != "generator_out"])  # which runs nothing
def test_extracted_features_are_the_first_outputs_of_their_layers(entry: Entry) -> None:
    model, outputs = entry.build(), by_hand(entry)[1]
    layers = list(leaf_modules(model))
    wrapper = "module." if entry.name == "data_parallel" else ""

    torch.manual_seed(1)
    extract = feature_extractor(model, *layers)
    features = extract(*entry.args(), **entry.kwargs())

    for name in layers:
        calls = outputs.get(wrapper + name or "(root)", [[]])
        assert same(list(flat(features[name])), calls[0]), name


@every([e for e in WHOLE if "cyclic" not in e.tags and e.name != "needs_grad"])  # of its forward
def test_collected_rows_are_the_outputs_of_layers_or_refused(entry: Entry, tmp_path: Path) -> None:
    model, outputs = entry.build(), by_hand(entry)[1]
    wrapper = "module." if entry.name == "data_parallel" else ""

    def forward(model: nn.Module, batch: int) -> None:
        torch.manual_seed(1)
        model(*entry.args(), **entry.kwargs())

    for i, name in enumerate([*leaf_modules(model)][:4]):
        try:
            acts = collect(model, [0], name, tmp_path / str(i), forward=forward)
        except (HookError, NotImplementedError):  # called twice, a structure, sparse; no data
            continue
        assert same([acts[name][:]], outputs[wrapper + name or "(root)"][0]), name


@every([e for e in ZOO if not e.tags & {"raises", "lazy"}])
def test_catchers_record_what_hooks_see(entry: Entry) -> None:
    model = entry.build()
    names = [name for name, m, first in walk(model) if name and first and can_run(m)]
    modules = [id(m) for m in model.modules()]
    inputs, outputs, plain = by_hand(entry)

    with swap(model, dict.fromkeys(names, Catcher)) as caught:
        got = run(entry, model)

    assert [id(m) for m in model.modules()] == modules
    assert same(got[0], plain[0])
    if entry.tags & {"compiled", "cyclic"} or entry.name == "direct_forward":
        return  # .forward() runs a catcher, and no hook
    for name in set(names) & {*hookable(model)}:
        calls = caught[name].calls  # type: ignore[attr-defined]
        ins, outs = inputs.get(name, []), outputs.get(name, [])
        for call, before, after in zip(calls, ins, outs, strict=True):
            assert same(copied(call.output), after), name
            assert same([*copied(tuple(call.inputs)), *copied(call.inputs.kwargs)], before), name


# --- edits


def doubled(t: Tensor) -> Tensor:
    return t * 2 if t.is_floating_point() or t.is_complex() else t


@every(WHOLE)
def test_doubled_outputs_are_those_of_a_model_that_doubles_by_hand(entry: Entry) -> None:
    model, twin = entry.build(), entry.build()
    for m in leaf_modules(twin).values():
        m.register_forward_hook(lambda m, i, o: changed(doubled, o))

    with edit_outputs(leaf_modules(model), lambda m, i, o: tree_map(doubled, o)):
        got = run(entry, model)

    want = run(entry, twin)
    assert got[1] is want[1]
    assert same(got[0], want[0])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


# the cell of `lstmcell_loop` makes one of its outputs from the other, which is a use of it here
@every([e for e in GRADIENTS if e.name != "lstmcell_loop"])
def test_doubled_gradients_are_those_of_a_model_that_doubles_by_hand(entry: Entry) -> None:
    model, twin = entry.build(), entry.build()

    def double(m: nn.Module, i: Any, o: Any) -> Any:
        return changed(lambda t: Doubled.apply(t) if t.requires_grad else t, o)

    for m in leaf_modules_of(twin).values():
        m.register_forward_hook(double)

    with edit_grads(leaf_modules_of(model), lambda m, g: 2 * g):
        got = backward(entry, model)

    want = backward(entry, twin)
    assert [g is None for g in got] == [g is None for g in want]
    torch.testing.assert_close(arrived(got), arrived(want))
