"""What is stored of objects that hold tensors and are no container: references, watched."""

import copy
import gc
import warnings
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.errors import OverwrittenWarning
from hookkit.hooks import Hook, Hooks, hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.hooks.references import tensors_held


class Box:
    def __init__(self, t: Any) -> None:
        self.t = t


class Slotted:
    __slots__ = ("t",)

    def __init__(self, t: Any) -> None:
        self.t = t


class Gives(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Any) -> Any:
        return self.make(x)


X = torch.ones(2)


HOLDERS: dict[str, tuple[Any, Any]] = {
    "a new tensor in an object": (lambda x: Box(x * 2), lambda o: setattr(o, "t", o.t * 2)),
    "an in-place write": (lambda x: Box(x * 2), lambda o: o.t.add_(1)),
    "a slot": (lambda x: Slotted(x * 2), lambda o: o.t.add_(1)),
    "a list in an object": (lambda x: Box([x * 2]), lambda o: o.t.append(x_more())),
    "an object that was empty": (lambda x: Box([]), lambda o: o.t.append(x_more())),
    "an object that is emptied": (lambda x: Box([x * 2]), lambda o: o.t.clear()),
    "an object in an object": (lambda x: Box(Box({"k": x * 2})), lambda o: o.t.t.clear()),
    "a set": (lambda x: {x * 2}, lambda o: o.add(x_more())),
    "a namespace": (lambda x: SimpleNamespace(t=x * 2), lambda o: o.t.mul_(2)),
}


def x_more() -> Tensor:
    return torch.zeros(2)


@pytest.mark.parametrize("options", [{}, {"detach": False}, {"clone": False}, {"keep": "all"}])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_holder_that_changes_after_it_was_stored_is_reported_once(
    name: str, options: Any
) -> None:
    make, change = HOLDERS[name]
    with hook_output(layer := Gives(make), **options) as h:
        out = layer(X)
    change(out)

    with pytest.warns(OverwrittenWarning, match=r"stored of Gives\(\) has a \w+, .* has changed"):
        _ = h.stored
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ = h.stored


@pytest.mark.parametrize("name", HOLDERS)
def test_a_holder_that_stays_as_it_was_is_no_alarm(name: str) -> None:
    with hook_output(layer := Gives(HOLDERS[name][0])) as h:
        out = layer(X)

    assert h.stored is out


@pytest.mark.parametrize(
    "make",
    [
        lambda x: nn.Linear(2, 2),
        lambda x: lambda: x,
        lambda x: (x.mul, len, torch.float32, torch.device("cpu"), "text", slice(2)),
        lambda x: ([], {}, (), deque(), None, torch.Size([2])),
        lambda x: Box(nn.Linear(2, 2)),
        lambda x: type(x),
        lambda x: (t for t in [x, x]),
    ],
)
def test_what_holds_no_tensor_of_its_own_is_no_alarm(make: Any) -> None:
    layer, x = Gives(make), torch.ones(2, requires_grad=True) * 2

    with hook_output(layer, cpu=True, dtype=torch.float64) as h:
        layer(x)

    assert tensors_held(h.stored) == [] or isinstance(h.stored, tuple)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({}, "its tensors are not detached"),
        ({"dtype": torch.float64}, "not detached and its tensors have kept their dtype"),
    ],
)
def test_an_option_that_cannot_reach_into_a_holder_is_reported(options: Any, fault: str) -> None:
    layer, x = Gives(lambda x: {"a": (1, Box(x * 2))}), torch.ones(2, requires_grad=True)

    with hook_output(layer, **options) as h:
        layer(x)

    place = r"Gives\(\) has a Box at \['a'\]\[1\], which is stored as a reference"
    with pytest.warns(OverwrittenWarning, match=rf"hook_output: .* {place}.* {fault}"):
        _ = h.stored


def test_one_warning_for_all_hooks_names_a_layer_and_the_cure() -> None:
    net = nn.Sequential(Gives(lambda box: box), Gives(lambda box: box))
    with hook_inputs(net) as h:
        net(box := Box(X * 2))
    box.t.add_(1)

    with pytest.warns(OverwrittenWarning) as found:
        _ = h.stored
    (warning,) = found

    assert "hook_inputs: what is stored of '0' (Gives) has a Box at [0]" in str(warning.message)
    assert "Hook(module, f, pre=True)" in str(warning.message)


def test_the_cure_works() -> None:
    layer = Gives(lambda box: None)
    with (
        Hook(layer, lambda m, i: i[0].t.clone(), pre=True) as h,
        Hook(layer, lambda m, i: copy.deepcopy(i[0]), pre=True) as whole,
    ):
        layer(box := Box(X * 2))
    box.t.add_(1)

    torch.testing.assert_close(h.stored, X * 2)
    torch.testing.assert_close(whole.stored.t, X * 2)


def test_a_function_that_gives_the_holder_itself_is_warned_of_too() -> None:
    layer = Gives(lambda box: None)
    with Hooks([layer], lambda m, i: i[0], pre=True) as h:
        layer(box := Box(X * 2))
    box.t.add_(1)

    with pytest.warns(OverwrittenWarning, match="Hooks: what is stored .* a Box"):
        _ = h.stored


def test_calls_are_watched_one_by_one() -> None:
    layer, box = Gives(lambda box: None), Box([])
    with hook_input(layer, keep="all") as h:
        for _ in range(3):
            layer(box)
            box.t.append(X * 2)

    with pytest.warns(OverwrittenWarning, match="the model has changed it since"):
        _ = h.calls


def test_a_deque_is_a_container() -> None:
    layer, x = Gives(lambda x: deque([x * 2], maxlen=3)), torch.ones(2, requires_grad=True)
    with hook_output(layer) as h:
        out = layer(x)
    with torch.no_grad():
        out[0].add_(1)
    out.clear()

    assert type(h.stored) is deque
    assert h.stored.maxlen == 3
    torch.testing.assert_close(h.stored[0], 2 * X)
    assert not h.stored[0].requires_grad


def test_the_tensors_of_a_holder_are_not_kept_alive_by_the_watch() -> None:
    layer, box = Gives(lambda box: None), Box(X * 2)
    with hook_outputs([layer]), hook_input(layer) as h:
        layer(box)
    old = weakref.ref(box.t)
    box.t = None
    gc.collect()

    assert old() is None
    with pytest.warns(OverwrittenWarning, match="has changed it since"):
        _ = h.stored


def test_a_large_object_is_looked_at_in_bounds() -> None:
    many = Box([Box(i) for i in range(10_000)])

    assert tensors_held(many) == []
    assert len(tensors_held(Box([Box(X + i) for i in range(100)]))) == 100


def test_a_key_value_cache_of_transformers_is_reported_and_an_output_is_not() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(1, 50, (1, 5))
    layers = [layer.self_attn for layer in model.model.layers]

    def length(module: nn.Module, given: Any) -> int:
        return given["past_key_values"].get_seq_length()

    with hook_inputs(layers, keep="all") as h, Hook(layers[0], length, pre=True, keep="all") as n:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    with torch.no_grad(), hook_outputs([model, model.model]) as once:
        out = model(ids)

    with pytest.warns(OverwrittenWarning, match=r"DynamicCache at \['past_key_values'\]"):
        _ = h[0].calls
    assert n.calls == [0, 5, 6]
    assert torch.equal(once.stored[0].logits, out.logits)
