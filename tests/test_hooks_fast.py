"""The fast path: hooks that store the last output and nothing more."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit.errors import OverwrittenWarning
from hookkit.hooks import hook_input, hook_output, hook_outputs
from hookkit.selecting import select


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


class _Owner(nn.Module):
    """A module that owns its hook, as fastai's DynamicUnet does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.hook = hook_output(self.fc)

    def forward(self, x: Tensor) -> Tensor:
        self.fc(x)
        stored: Tensor = self.hook.stored
        return stored


def test_one_that_is_wanted_inside_the_block_sees_what_comes_after(
    net: nn.Sequential, x: Tensor
) -> None:
    with hook_outputs(net) as h:
        first = h["0"]
        assert (first.stored, first.n_calls) == (None, 0)
        net(x)
        assert first.n_calls == 1
        y = net(-x)

    assert first.n_calls == 2
    assert torch.equal(first.stored, net[0](-x))
    assert torch.equal(h["2"].stored, y)
    assert repr(first) == "Hook('0' (Linear), 2 calls, stored 3×5, removed)"


def test_a_single_hook_is_gone_after_its_block(net: nn.Sequential, x: Tensor) -> None:
    with hook_output(net[0]) as h:
        net(x)

    assert h.removed
    assert n_hooks(net) == 0


def test_one_of_many_can_be_removed_and_the_rest_stay(net: nn.Sequential, x: Tensor) -> None:
    h = hook_outputs(net)
    h[1].remove()
    assert (n_hooks(net), h.removed, h[0].removed, h[1].removed) == (2, False, False, True)

    h.remove()

    assert (n_hooks(net), h.removed) == (0, True)


def test_entered_again_it_starts_afresh(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs(net) as h:
        net(x)
        net(x)
    with h:
        y = net(-x)

    assert [hook.n_calls for hook in h] == [1, 1, 1]
    assert torch.equal(h.stored[2], y)
    assert n_hooks(net) == 0


def test_an_interrupt_while_they_are_registered_leaves_none(
    net: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(net[2], "register_forward_hook", interrupted)

    with pytest.raises(KeyboardInterrupt):
        hook_outputs(net)

    assert n_hooks(net) == 0


def test_grad_mode_is_what_it_was(net: nn.Sequential, x: Tensor) -> None:
    modes: list[bool] = []
    with hook_outputs(net):
        net[0].register_forward_hook(lambda m, i, o: modes.append(torch.is_grad_enabled()))
        net(x)
        with torch.no_grad():
            net(x.requires_grad_())
        modes.append(torch.is_grad_enabled())

    assert modes == [True, False, True]


def test_grad_mode_is_what_it_was_where_no_lazy_clone_can_be_made(
    net: nn.Sequential, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(t: Tensor) -> Tensor:
        raise RuntimeError

    monkeypatch.setattr("hookkit.hooks.capture.lazy_clone", refused)

    with hook_outputs(net) as h:
        y = net(x)

    assert torch.is_grad_enabled()
    assert torch.equal(h[2].stored, y)
    assert not h[2].stored.requires_grad


def test_what_was_captured_in_inference_mode_can_be_used_outside(
    net: nn.Sequential, x: Tensor
) -> None:
    with hook_outputs(net) as h, torch.inference_mode():
        net(x)

    assert not any(t.is_inference() for t in h.stored)
    (h.stored[0] * nn.Parameter(torch.ones(5))).sum().backward()


def test_an_input_that_is_handed_on_keeps_its_memory(x: Tensor) -> None:
    array, before = x.numpy(), x.clone()
    layers = nn.Sequential(nn.Identity(), nn.Dropout(0.0).eval())

    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), hook_outputs(layers) as h, hook_input(layers[0]) as i:
            layers(x)
        array += 1  # reaches the batch, not what was stored
        x.add_(1)  # reaches the array, as it would without hooks

        assert (array == x.numpy()).all()
        for stored in (*h.stored, i.stored[0]):
            torch.testing.assert_close(stored, before, rtol=0, atol=0)
        before = x.clone()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_keyword_input_that_is_handed_on_keeps_its_memory(x: Tensor, mode: Any) -> None:
    class Pair(nn.Module):
        def forward(self, input: Tensor) -> dict[str, Tensor]:
            return {"same": input, "more": input + 1}

    array, before = x.numpy(), x.clone()
    layers = [nn.Identity(), Pair()]
    with mode(), hook_outputs(layers) as h:
        for layer in layers:
            layer(input=x)
    x.add_(1)

    assert (array == x.numpy()).all()
    assert torch.equal(h.stored[0], before)
    assert torch.equal(h.stored[1]["same"], before)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_any_input_that_is_handed_on_keeps_its_memory(x: Tensor, mode: Any) -> None:
    class Pick(nn.Module):
        def forward(self, which: Any, *given: Any, **named: Any) -> Tensor:
            return given[which] if isinstance(which, int) else named["x"]

    class First(nn.Module):
        def forward(self, xs: list[Tensor], flag: bool) -> Tensor:
            return xs[0]

    array, before, other = x.numpy(), x.clone(), torch.zeros(2)
    layers = [Pick(), Pick(), First()]
    with mode(), hook_outputs(layers) as h:
        layers[0](1, other, x)
        layers[1]("x", other, x=x)
        layers[2]([x], True)
    x.add_(1)

    assert (array == x.numpy()).all()
    assert all(torch.equal(stored, before) for stored in h.stored)


def test_a_parameter_that_is_returned_keeps_its_memory() -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.w

    layer = Weights()
    array = layer.w.detach().numpy()
    with hook_output(layer) as h:
        layer()

    with torch.no_grad():
        layer.w.mul_(2)

    assert array.tolist() == [2, 2, 2]
    assert h.stored.tolist() == [1, 1, 1]


def test_a_recomputed_call_is_not_recorded(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs(net) as h:
        checkpoint(net, x.requires_grad_(), use_reentrant=False).sum().backward()

    assert [hook.n_calls for hook in h] == [1, 1, 1]


def test_copies_of_a_module_that_owns_its_hook_work(x: Tensor) -> None:
    owner = _Owner()
    for twin in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        y = twin(x)

        assert torch.equal(y, twin.fc(x))
        assert twin.hook.module is twin.fc
        twin.hook.remove()
        assert n_hooks(twin) == 0
    assert owner.hook.n_calls == 0


def test_a_copy_of_the_hook_alone_is_off(net: nn.Sequential, x: Tensor) -> None:
    h = hook_output(net[0])
    twin = copy.deepcopy(h)

    net(x)

    assert (twin.removed, twin.stored, h.n_calls) == (True, None, 1)


def test_neither_module_nor_values_wait_for_the_garbage_collector(x: Tensor) -> None:
    gc.disable()
    try:
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
        h = hook_outputs(net)
        net(x)
        value, module = weakref.ref(h.stored[0]), weakref.ref(net[0])
        assert h[0].module is module()

        del net
        assert module() is None
        assert value() is not None
        del h
        assert value() is None
    finally:
        gc.enable()


def test_a_hook_can_be_switched_off_and_on_again(net: nn.Sequential, x: Tensor) -> None:
    h = hook_output(net[0])

    h.switch.on = False
    net(x)
    assert h.n_calls == 0

    h.switch.on = True
    net(x)
    assert h.n_calls == 1
    h.remove()


def test_a_removed_one_is_inert_in_a_call_under_way(net: nn.Sequential, x: Tensor) -> None:
    h = hook_output(net[0])
    handle = net[0].register_forward_hook(lambda m, i, o: h.remove(), prepend=True)

    net(x)

    assert h.n_calls == 0
    handle.remove()


def test_removed_hooks_are_pickled_without_their_modules(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(4, 4000))
    with hook_outputs(select(net, "0")) as h:
        net(x)

    data = pickle.dumps(h)

    assert len(data) < 4000
    assert pickle.loads(data).names == ("0",)


def test_one_that_another_thread_takes_off_in_the_middle_of_a_call_lets_the_model_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.LSTM(4, 4)  # a tuple: the slow path
    h = hook_output(layer)

    def taken_off(*seen: object) -> tuple[object, ...]:
        h.remove()
        return ()

    monkeypatch.setattr("hookkit.hooks.calls.inputs_and_buffers", taken_off)

    output, _ = layer(torch.randn(2, 3, 4))

    assert output.shape == (2, 3, 4)


LIVE = pytest.mark.parametrize("options", [{"clone": False}, {"detach": False}], ids=str)


@LIVE
def test_live_hooks_give_what_the_module_gave(
    options: dict[str, bool], net: nn.Sequential, x: Tensor
) -> None:
    with hook_outputs(net, **options) as h:
        y = net(x)
        inside = h.stored[2]

    for stored in (inside, h.stored[2], h[2].stored):
        assert stored.data_ptr() == y.data_ptr()
        assert stored.requires_grad is ("detach" in options)
    assert h[2].stored is h[2].stored
    assert [hook.n_calls for hook in h] == [1, 1, 1]


@LIVE
def test_a_live_hook_warns_of_a_later_write_wherever_it_is_read(
    options: dict[str, bool], net: nn.Sequential, x: Tensor
) -> None:
    for read in (lambda h: h.stored, lambda h: h[0].stored):
        with hook_outputs(net[:1], **options) as h:
            y = net[0](x)
            with torch.no_grad():
                y.mul_(2)
            with pytest.warns(OverwrittenWarning, match=r"'0' \(Linear\) was overwritten"):
                read(h)
        read(h)  # warned once


@LIVE
def test_a_live_hook_left_in_place_holds_no_graph_it_need_not(
    options: dict[str, bool], net: nn.Sequential, x: Tensor
) -> None:
    h = hook_output(net[2], **options)
    y = net(x)
    given = weakref.ref(y)  # with its graph
    del y
    gc.collect()

    assert (given() is None) == ("clone" in options)
    assert h.stored.shape == (3, 2)


def test_after_a_block_live_hooks_hold_no_graph(net: nn.Sequential, x: Tensor) -> None:
    with pytest.raises(ZeroDivisionError), hook_outputs(net, clone=False) as h:  # noqa: PT012
        y = net(x)
        given = weakref.ref(y)  # with its graph
        _ = 1 / 0

    del y
    gc.collect()
    assert given() is None
    assert h.stored[2].shape == (3, 2)


@LIVE
def test_live_hooks_keep_odd_outputs_as_other_hooks_do(options: dict[str, bool], x: Tensor) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[0, :1]

    m, big = Odd(), torch.randn(100, 100)
    with hook_output(m, **options) as h:
        m(big)
    assert h.stored.untyped_storage().nbytes() == 4  # not the whole of `big`
    with hook_output(m, **options) as h, torch.inference_mode():
        m(big)
    assert not h.stored.is_inference()


@LIVE
def test_copies_of_live_hooks_work_where_the_module_owns_them(
    options: dict[str, bool], x: Tensor
) -> None:
    m = _Owner()
    m.hook.remove()
    m.hook = hook_output(m.fc, **options)
    twin = copy.deepcopy(m)

    assert torch.equal(twin(x), m.fc(x))
    assert m.hook.n_calls == 1


@LIVE
@pytest.mark.parametrize("keep", ["last", "all"])
def test_a_live_hook_keeps_what_a_container_held(
    options: dict[str, bool], keep: str, x: Tensor
) -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
            return {"h": x * 2}, [x + 1]

    m = Gives()
    with hook_output(m, keep=keep, **options) as h:
        named, listed = m(x.requires_grad_())
        taken = named.pop("h")
        listed.append(taken)

    assert list(h.stored[0]) == ["h"]
    assert len(h.stored[1]) == 1
    assert h.stored[0]["h"].data_ptr() == taken.data_ptr()
    assert (h.stored[0]["h"] is taken) == ("detach" in options)


@pytest.mark.parametrize("keep", ["last", "all"])
def test_in_inference_mode_what_is_stored_is_what_the_layer_gave(keep: str, x: Tensor) -> None:
    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))

    with hook_outputs(m, detach=False, keep=keep) as h, torch.inference_mode():
        m(x)

    assert torch.equal(h[0].stored, m[0](x))


def test_what_is_read_inside_of_an_inference_mode_can_be_used_after_it(x: Tensor) -> None:
    m, layer = nn.Flatten(), nn.Linear(4, 4)
    for options in ({}, {"clone": True}, {"clone": False}, {"keep": "all"}):
        with hook_output(m, **options) as h, torch.inference_mode():
            m(x)
            assert torch.equal(h.stored, x)

        layer(h.stored).sum().backward()
        assert h.stored is h.stored


@LIVE
def test_live_hooks_give_the_same_tensor_at_each_read(
    options: dict[str, bool], net: nn.Sequential, x: Tensor
) -> None:
    left = hook_outputs(net, **options)
    with hook_outputs(net, **options) as h:
        net(x)

    for hooks in (h, left):
        assert hooks.stored[0] is hooks.stored[0]
        assert hooks[0].stored is hooks.stored[0]
    left.remove()


@LIVE
def test_a_write_after_an_eager_call_is_reported_though_a_graph_ran_before(
    options: dict[str, bool], x: Tensor
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    h = hook_output(net[1], **options)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    compiled(x)
    assert torch.equal(h.stored, net(x))

    y = net(-x)
    with torch.no_grad():
        y.zero_()

    with pytest.warns(OverwrittenWarning, match="Tanh"):
        assert h.stored.sum() == 0
    h.remove()
