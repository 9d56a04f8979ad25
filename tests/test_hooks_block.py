"""What a `with` block reports at its end: hooks that never fired, and why; stops not reached."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backwards import BackwardIn, here, pytorchs_thread
from hooked import n_hooks
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from hookkit.edits import edit_grad, edit_output, scale, zero
from hookkit.errors import HookError, NeverFiredWarning, OptionError
from hookkit.hooks import Hook, StopForward, hook_inputs, hook_output, hook_outputs


@pytest.fixture
def x() -> Tensor:
    return torch.ones(2, 3)


def reported(block: Any, run: Callable[[], Any] = lambda: None) -> str:
    """The one warning of the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with block:
            run()
    assert [w.category for w in caught] == [NeverFiredWarning]
    assert caught[0].filename == __file__
    return str(caught[0].message)


def test_modules_without_names_are_counted_one_by_one() -> None:
    layers = [nn.ReLU(), nn.Tanh(), nn.ReLU()]
    h = hook_outputs(layers)

    text = reported(h)

    assert text.startswith("hook_outputs: 3 of 3 hooks never fired: ")
    assert "ReLU() at [0]: not called" in text
    assert "Tanh(): not called" in text
    assert "ReLU() at [2]: not called" in text
    assert list(h.silent) == ["ReLU() at [0]", "Tanh()", "ReLU() at [2]"]


@pytest.mark.parametrize("backward_in", [here, pytorchs_thread])
def test_a_run_that_is_only_recomputed_in_the_block_is_reported(
    x: Tensor, backward_in: BackwardIn
) -> None:
    layer = nn.Linear(3, 3)
    loss = checkpoint(layer, x.requires_grad_(), use_reentrant=True).sum()

    text = reported(hook_output(layer), lambda: backward_in(loss.backward))

    assert "seen only while a checkpoint recomputed it; run the forward in the block too" in text


@pytest.mark.parametrize("edits", [False, True])
def test_an_output_without_tensors_is_the_reason_reported(x: Tensor, edits: bool) -> None:
    class Policy(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Normal(super().forward(x), 1.0)

    layer = Policy(3, 3)
    hooks = edit_grad(layer, scale(2)) if edits else hook_output(layer, grad=True)

    text = reported(hooks, lambda: layer(x).loc.sum().backward())

    assert "Policy(in_features=3, out_features=3, bias=True): hookkit finds no tensor there" in text
    assert "hook a layer inside it, or one that gives tensors" in text


def test_a_module_that_is_gone_is_reported_and_cannot_be_hooked_again() -> None:
    hooks, single = hook_outputs([nn.ReLU()]), hook_output(nn.ReLU())
    edits = edit_output(nn.ReLU(), zero())

    assert "a module that is gone: the module is gone" in reported(hooks)
    single.remove()
    for made in (hooks, single):
        with pytest.raises(HookError, match=r"the module of this hook is gone\. Make a new hook"):
            made.register()
    with pytest.raises(HookError, match=r"the module of this hook is gone\. Make a new hook"):
        edits.__enter__()
    assert repr(single) == "Hook(a module that is gone, 0 calls, removed)"


def test_a_stop_that_is_not_reached_names_what_it_waits_for(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3))

    text = reported(hook_outputs({"fc": net[0], "other": nn.Tanh()}, stop=True), lambda: net(x))

    assert "stop=True was never reached, so the whole forward ran. Never fired: 'other'" in text
    assert "Run the model inside the block, or do not hook these modules" in text


def test_a_stop_in_front_of_a_layer_stores_its_input_and_does_not_run_it(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    with hook_inputs([net[1]], stop=True) as h, hook_output(net[1]) as after:
        net(x)

    assert torch.equal(h[0].stored[0], net[0](x))
    assert after.n_calls == 0


def test_a_stop_waits_for_all_in_whatever_order_they_run(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))

    with hook_outputs([net[1], net[0]], stop=True) as h:
        net(x)
        raise AssertionError("not reached")

    assert [hook.n_calls for hook in h] == [1, 1]
    assert n_hooks(net) == 0


def test_the_stop_of_another_block_passes_through(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    with hook_output(net[0], stop=True) as outer, hook_output(net[1]) as inner:
        net(x)

    assert outer.n_calls == 1
    assert inner.n_calls == 0
    with pytest.raises(StopForward, match=r"the last wanted layer has fired\. Run the model in"):
        _run_stopped(net, x)


def _run_stopped(net: nn.Module, x: Tensor) -> None:
    h = hook_output(net, stop=True)
    h.__enter__()
    try:
        net(x)
    finally:
        h.__exit__(ValueError, ValueError(), None)  # the block ends for another reason


def test_nothing_is_reported_when_the_forward_failed(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(7, 7))

    with pytest.raises(RuntimeError, match="mat1 and mat2"), hook_outputs(net, stop=False):
        net(x)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), edit_output(net[1], zero()):
        net(x)


def test_calls_of_a_hook_that_keeps_the_last_are_refused_by_name(x: Tensor) -> None:
    h = Hook(nn.ReLU(), None, name="act")

    with pytest.raises(OptionError, match=r"Hook: \.calls of 'act'.* needs keep=\"all\""):
        _ = h.calls


@pytest.mark.parametrize("keep", ["last", "all"])
def test_entering_begins_anew(x: Tensor, keep: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    h = hook_outputs(net, keep=keep)
    net(x)

    with h:
        net(x)
        with h:
            net(x)

    assert h.n_calls == {"0": 2}
    assert keep == "last" or len(h[0].calls) == 2


def test_a_block_in_which_nothing_ran_has_nothing_of_the_calls_before_it(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    h = hook_outputs(net)
    net(x)

    assert "not called" in reported(h)
    assert (h.n_calls, list(h.stored)) == ({"0": 0}, [None])


def test_calls_of_an_edit_are_numbered_from_the_entering_of_its_block(x: Tensor) -> None:
    edit = edit_output(m := nn.Identity(), zero(), calls=0)
    m(x)

    with edit:
        first, second = m(x), m(x)

    assert first.sum() == 0
    assert second.sum() == 6


def test_an_edit_is_on_inside_its_with_alone_and_says_so(x: Tensor) -> None:
    edit, seen = edit_output(m := nn.Identity(), zero()), list[float]()

    seen.append(m(x).sum().item())
    with pytest.raises(HookError, match=r"inside their `with` only\. Write `with h:`"):
        edit.register()
    with edit:
        seen.append(m(x).sum().item())
        edit.remove()
        seen.append(m(x).sum().item())
        edit.register()
        seen.append(m(x).sum().item())
    seen.append(m(x).sum().item())

    assert seen == [6, 0, 6, 0, 6]
    assert edit.removed


def test_an_edit_that_was_never_entered_warns_when_it_is_gone(x: Tensor) -> None:
    edit = edit_output(m := nn.Identity(), zero())
    m(x)

    with pytest.warns(NeverFiredWarning, match="edit_output: it was never entered, so it did"):
        del edit


def test_a_gradient_of_an_earlier_block_does_not_displace_one_of_this(x: Tensor) -> None:
    m = nn.Linear(3, 3)
    with hook_output(m, grad=True, keep="all") as g, hook_output(m, grad=True) as last:
        before = m(x), m(x)
        before[1].sum().backward()
    with g, last:
        (3 * m(x)).sum().backward()
        before[0].sum().backward()

    assert [call[0].unique().tolist() for call in g.calls] == [[3.0]]
    assert last.stored[0].unique().tolist() == [3.0]


def test_a_stop_without_a_block_warns_that_the_forward_runs_to_its_end(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    hook_outputs([net[0]], stop=True)

    with pytest.warns(NeverFiredWarning, match=r"inside of a `with` only.* Write `with h:`"):
        net(x)
    net(x)
