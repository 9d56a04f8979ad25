"""What hooks store, whoever calls the model: memory, modes, threads, copies, compilers, Ctrl-C."""
# ruff: noqa: PT031, SIM117 - the inner block is what is tested

import asyncio
import collections
import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import Gives, n_hooks
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookkit.edits import edit_output, zero
from hookkit.errors import CompiledWarning, NeverFiredWarning, OverwrittenWarning
from hookkit.hooks import Hook, Hooks, attach, hook_inputs, hook_output, hook_outputs
from hookkit.inspection import summary


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

# --- memory and modes


def test_what_an_inference_stored_can_be_trained_on_after_it() -> None:
    layer, probe = nn.Linear(3, 3), nn.Linear(3, 1)
    with torch.inference_mode(), hook_output(layer) as h, hook_outputs([layer]) as several:
        layer(X)

    for stored in (h.stored, several.stored[0]):
        probe(stored).sum().backward()
        assert not stored.is_inference()


@pytest.mark.parametrize("options", [{"detach": False}, {"clone": False}])
def test_a_live_tensor_that_was_written_since_warns_at_its_reading(options: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    with hook_output(net[0], **options) as h, torch.no_grad():
        net(X)

    with pytest.warns(OverwrittenWarning, match=r"Linear.* was overwritten in place"):
        _ = h.stored


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x],
        lambda x: collections.deque([x]),
        lambda x: {0: x},
        lambda x: collections.OrderedDict({0: x}),
    ],
)
def test_a_live_hook_keeps_what_a_container_held(make: Any) -> None:
    with hook_output(layer := Gives(make), detach=False) as h:
        layer(X).clear()

    assert h.stored[0] is X


def test_lists_and_dicts_are_stored_as_they_were() -> None:
    def append(x: Tensor, found: dict[str, list[Tensor]]) -> Tensor:
        found["skips"].append(x)
        return x * 2

    net, found = [Gives(append), Gives(append)], {"skips": list[Tensor]()}
    with hook_inputs(net) as h, hook_inputs(net, detach=False) as live:
        net[1](net[0](X, found), found)

    for hooks in (h, live):
        assert [len(inputs[1]["skips"]) for inputs in hooks.stored] == [0, 1]
    assert len(found["skips"]) == 2


# --- threads, copies, Ctrl-C


REGISTERED: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "hook_input": lambda m, seen: hook_inputs([m]),
    "hook_output": lambda m, seen: hook_outputs([m], keep="all"),
    "hook_output, grad": lambda m, seen: hook_outputs([m], grad=True),
    "hook_input, grad": lambda m, seen: hook_inputs([m], grad=True),
    "edit_output": lambda m, seen: edit_output(m, zero()).__enter__(),
    "attach": lambda m, seen: attach(m, lambda *args: seen.append(args)),
    "attach, pre": lambda m, seen: attach(m, lambda *args: seen.append(args), pre=True),
}


@pytest.mark.parametrize("make", REGISTERED.values(), ids=REGISTERED)
def test_a_call_during_the_registration_of_a_hook_is_left_alone(make: Any) -> None:
    torch.compiler.reset()  # or an edit that saw no call warns of compiled code
    layer, seen = nn.Linear(3, 3), list[Any]()
    made = make(layer, seen)
    # PyTorch notes that a hook takes keyword inputs after it has registered the hook
    layer._forward_hooks_with_kwargs.clear()
    layer._forward_pre_hooks_with_kwargs.clear()

    y = layer(X)

    assert torch.equal(y, nn.functional.linear(X, layer.weight, layer.bias))
    assert not seen
    assert not isinstance(made, Hooks) or [*made.n_calls.values()] == [0]


def test_a_block_records_the_calls_of_all_threads() -> None:
    net = mlp()

    with hook_outputs(net) as h:
        thread = threading.Thread(target=net, args=(X,))
        thread.start()
        thread.join()
    with hook_outputs(net) as later:
        asyncio.run(asyncio.to_thread(net, X))

    torch.testing.assert_close(h.stored[2], net(X), rtol=0, atol=0)
    torch.testing.assert_close(later.stored[2], net(X), rtol=0, atol=0)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_copies_of_a_hooked_model_run_without_its_hooks(copied: Callable[[Any], Any]) -> None:
    net = mlp()
    with hook_outputs(net) as h, hook_outputs(net, grad=True) as g, edit_output(net[2], zero()):
        twin = copied(net)
        bare = twin(X)
        n_before = h.n_calls, [hook.n_calls for hook in g]
        net(X).sum().backward()

    assert n_before == ({"0": 0, "1": 0, "2": 0}, [0, 0, 0])
    torch.testing.assert_close(bare, net(X), rtol=0, atol=0)
    hook = copied(h[0])
    assert hook.stored is None
    assert hook.removed


def test_hooks_that_a_ctrl_c_interrupts_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, remove, cuts = mlp(), RemovableHandle.remove, [1]

    def interrupted(self: RemovableHandle) -> None:
        if cuts:
            raise KeyboardInterrupt(cuts.pop())
        remove(self)

    monkeypatch.setattr(RemovableHandle, "remove", interrupted)

    with pytest.raises(KeyboardInterrupt), hook_outputs(net):
        net(X)

    assert n_hooks(net) == 0


def test_hooks_whose_registering_is_interrupted_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, register, times = mlp(), nn.Module.register_forward_hook, [1, 2]

    def interrupted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not times:
            raise KeyboardInterrupt
        times.pop()
        return register(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_hook", interrupted)

    with pytest.raises(KeyboardInterrupt):
        hook_outputs(net)

    assert n_hooks(net) == 0


# --- gradients


def test_a_gradient_that_an_in_place_write_took_away_is_reported() -> None:
    x, row = torch.ones(2, 2, requires_grad=True), Gives(lambda x: (x * 2)[0])

    with pytest.warns(NeverFiredWarning, match="its memory was written in place"):
        with hook_output(row, grad=True) as h:
            y = row(x)
            y._base.mul_(3)  # type: ignore[union-attr]
            y.sum().backward()

    assert h.stored is None or h.stored == (None,)


def test_of_several_calls_the_last_ones_gradient_is_stored() -> None:
    layer = nn.Linear(2, 2)

    with hook_output(layer, grad=True) as h, hook_output(layer, grad=True, keep="all") as each:
        first, last = layer(torch.ones(1, 2)), layer(torch.ones(1, 2))
        (first.sum() + 5 * last.sum()).backward()

    assert h.stored[0].unique().tolist() == [5]
    assert [g[0].unique().tolist() for g in each.calls] == [[1], [5]]


def test_a_full_backward_hook_is_pytorchs_and_its_error_names_the_way_out() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))

    with pytest.raises(RuntimeError, match="BackwardHookFunction") as caught:
        with Hooks(net, lambda m, gi, go: go, is_forward=False):
            net(X).sum().backward()

    assert "hook_output(module, grad=True)" in caught.value.__notes__[0]


# --- compiled models

COMPILED = {"backend": "eager"}


def test_an_optimizer_alone_makes_no_block_ask_for_eager_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = mlp()
    torch.compiler.reset()
    torch.optim.Adam(net.parameters())
    monkeypatch.setattr(torch.compiler, "set_stance", lambda *_: pytest.fail("it was asked for"))

    with hook_outputs(net) as h:
        net(X)

    assert len(h.stored) == 3


def test_a_hook_that_a_compiled_model_ignores_warns_once() -> None:
    net = mlp()
    compiled = torch.compile(net, **COMPILED)
    compiled(X)
    h = hook_output(net[0])
    compiled(X)

    with pytest.warns(CompiledWarning, match="use it in a `with` block"):
        assert h.stored is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert h.stored is None
    h.remove()


# --- messages, and a hook that others look at


def test_an_edit_that_a_summary_ran_has_fired() -> None:
    net = mlp()

    with warnings.catch_warnings():
        warnings.simplefilter("error", NeverFiredWarning)
        with edit_output(net[0], lambda o: o * 2):
            summary(net, X)


def test_fastais_names_are_there() -> None:
    h = Hook(layer := nn.Linear(3, 3), len, True, False, True)

    assert (h.hook_func, h.detach, h.cpu, h.gather, h.removed) == (len, False, True, False, False)
    h.hook.remove()
    assert h.removed
    h.hook_fn(layer, (X,), [1, 2])
    assert h.stored == 2


# --- cost


def test_a_hook_costs_few_python_calls() -> None:
    layers = nn.Sequential(*[nn.Identity() for _ in range(24)])
    modules, x = list(layers), torch.ones(2, requires_grad=True) * 1

    def run() -> None:
        with hook_outputs(modules) as h:
            layers(x)
        _ = h.stored

    n = n_calls(run) - n_calls(lambda: layers(x))

    assert n / 24 < 17  # of a raw hook that stores: 10; up to 2 are the compiler's stance


def n_calls(f: Callable[[], object]) -> int:
    """How many Python functions `f` calls."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    f()
    sys.setprofile(see)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count
