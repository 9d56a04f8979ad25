"""Odd and wrong use of the capture API: it works, or an error names what is wrong."""

import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hookkit.editing import (
    add,
    edit_grad,
    edit_input,
    edit_inputs,
    edit_output,
    edit_outputs,
    replace,
    scale,
    zero,
)
from hookkit.errors import (
    ArgumentError,
    HookError,
    HookkitError,
    NeverFiredWarning,
    OptionError,
    OverwrittenWarning,
    SelectionError,
)
from hookkit.features import feature_extractor
from hookkit.hooks import Hook, attach, hook_input, hook_inputs, hook_output, hook_outputs
from hookkit.nested import describe
from hookkit.selecting import select
from hookkit.swapping import Catcher, swap


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(4, 5)


class Gives(nn.Module):
    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


# --- which modules


WRONG = [None, 3, "fc", b"x", object(), [None], ["fc"], nn.Linear, {"a": 3}, {"a": None}, [3.5]]


@pytest.mark.parametrize(
    "make",
    [
        hook_outputs,
        hook_inputs,
        lambda ms: edit_outputs(ms, zero()),
        lambda ms: edit_inputs(ms, zero()),
        lambda ms: hook_output(ms),
        lambda ms: hook_input(ms),
        lambda ms: edit_output(ms, zero()),
        lambda ms: edit_input(ms, zero()),
        lambda ms: edit_grad(ms, zero()),
        lambda ms: attach(ms, print),
        lambda ms: Hook(ms, print),
    ],
)
@pytest.mark.parametrize("wrong", WRONG, ids=lambda x: repr(x).partition(" at 0x")[0])
def test_what_is_no_module_is_an_error_of_hookkit_in_each_function(make: Any, wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r": expected .*found "):
        make(wrong)


@pytest.mark.parametrize("model", [None, "net", 3, [nn.ReLU()]])
@pytest.mark.parametrize(
    "use",
    [
        lambda model: select(model, "0"),
        lambda model: feature_extractor(model, "0"),
        lambda model: swap(model, {"0": Catcher}).__enter__(),
    ],
)
def test_what_is_no_model_is_refused(use: Any, model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"nn\.Module"):
        use(model)


@pytest.mark.parametrize("option", ["detach", "stop"])
def test_an_option_of_an_extractor_is_true_or_false(net: nn.Sequential, option: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{option}='0'.* give True or False"):
        feature_extractor(net, **{option: "0"})  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["detach", "cpu", "grad", "gather", "stop", "clone"])
@pytest.mark.parametrize("make", [hook_output, hook_outputs, hook_input, hook_inputs])
@pytest.mark.parametrize("value", ["fc", [1], torch.ones(3)], ids=["text", "list", "tensor"])
def test_an_option_that_is_neither_true_nor_false_is_refused(
    make: Any, option: str, value: Any
) -> None:
    m = nn.Linear(2, 3)

    with pytest.raises(ArgumentError, match=rf"{make.__name__}\({option}=.* give True or False"):
        make([m] if make.__name__.endswith("s") else m, **{option: value})
    assert n_hooks(m) == 0


@pytest.mark.parametrize("option", ["is_forward", "pre", "edit"])
def test_the_kind_of_a_hook_is_given_by_true_or_false(option: str) -> None:
    with pytest.raises(ArgumentError, match=rf"Hook\({option}='no'\): give True or False"):
        Hook(nn.ReLU(), print, **{option: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize("leaf", ["[0", "zzz(", "[0]x", 3, None])
def test_a_leaf_path_that_cannot_be_read_is_refused_at_once(leaf: Any) -> None:
    m = nn.ReLU()

    with pytest.raises(OptionError, match=r"Hook: leaf=.* is no path into what a module gives"):
        Hook(m, None, leaf=leaf)
    assert n_hooks(m) == 0


SPELLINGS = [".", "..", "0.", ".0", "0..x", "[", "]", "{", "0[", "(", "0['x", "-1", " 0", "a" * 99]


@pytest.mark.parametrize("text", SPELLINGS, ids=repr)
def test_a_text_that_means_nothing_is_no_module(net: nn.Sequential, text: str) -> None:
    with pytest.raises(SelectionError, match="no module matches"):
        select(net, text)


def test_a_lone_tensor_is_the_one_gradient_of_a_backward_edit(x: Tensor) -> None:
    m = nn.Linear(5, 3)

    with Hook(m, lambda m, into, out: into[0] * 0, is_forward=False, edit=True):
        m(x.requires_grad_()).sum().backward()

    assert x.grad is not None
    assert not x.grad.any()


def test_attach_takes_a_function() -> None:
    with pytest.raises(ArgumentError, match="attach: fn must be a function, found int"):
        attach(nn.ReLU(), 3)  # type: ignore[arg-type]


def test_no_modules_at_all_is_an_empty_capture(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs([]) as h, edit_outputs([], zero()) as e, swap(net, {}) as new:
        net(x)

    assert h.stored == []
    assert e.n_calls == new == {}
    assert feature_extractor(net, [])(x) == {}


def test_a_module_given_twice_is_captured_twice(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs([net[0], net[0]]) as h, hook_outputs([net[0], net[0]], grad=True) as g:
        net(x).sum().backward()

    assert torch.equal(h[0].stored, h[1].stored)
    assert torch.equal(g[0].stored[0], g[1].stored[0])
    assert n_hooks(net) == 0


def test_iterables_of_any_kind_are_read_once(net: nn.Sequential, x: Tensor) -> None:
    modules: Iterator[nn.Module] = (m for m in net)

    with hook_outputs(modules) as h, hook_outputs(set(net)) as s, hook_outputs(net.children()) as c:
        net(x)

    assert len(h) == len(s) == len(c) == 3
    assert list(modules) == []


def test_names_of_any_characters_find_their_module() -> None:
    names = ["a b", "ü", "x[0]", "a*", "$", "None", "h\n", "{q,k}", "]", "?", "0", "__class__"]
    net = nn.ModuleDict({name: nn.Identity() for name in names if not hasattr(nn.ModuleDict, name)})

    with hook_outputs(select(net)) as h:
        for m in net.values():
            m(torch.ones(2))

    for name in net:
        assert select(net, name)[name] is net[name]
        assert h[name].n_calls == 1
        assert name in repr(h[name]) or "\\n" in repr(h[name])


class Contrary(nn.Module):
    """A module that supports nothing it does not need: slots, properties, no truth, no length."""

    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    @property
    def hooks(self) -> Any:
        raise RuntimeError("hooks")

    @property
    def stored(self) -> Any:
        raise RuntimeError("stored")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "lin":
            return super().__getattr__(name)
        return lambda *seen: 3

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __len__(self) -> int:
        raise RuntimeError("len")

    def __iter__(self) -> Any:
        raise RuntimeError("iter")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __hash__(self) -> int:
        return id(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(x)
        return out


def test_a_contrary_module_is_captured_edited_swapped_and_extracted(x: Tensor) -> None:
    m = Contrary()
    want = m(x)

    with (
        hook_output(m) as own,
        hook_outputs(select(m, "", "lin")) as h,
        hook_outputs([m], grad=True) as g,
        edit_output(m, scale(2)),
        swap(m, {"lin": Catcher}) as caught,
    ):
        y = m(x)
        y.sum().backward()

    assert torch.equal(own.stored, want)
    assert torch.equal(h[1].stored if h[1].n_calls else caught["lin"].calls[0].output, want)
    assert torch.equal(y, 2 * want)
    assert g[0].n_calls == 1
    assert torch.equal(feature_extractor(m, "lin")(x)["lin"], want)


# --- what happens meanwhile


def test_a_hook_that_removes_itself_has_seen_one_call(net: nn.Sequential, x: Tensor) -> None:
    hooks: list[Hook] = []
    hooks.append(Hook(net[0], lambda m, i, o: hooks[0].remove()))

    net(x)
    net(x)
    hooks[0].remove()

    assert hooks[0].n_calls == 1
    assert n_hooks(net) == 0


def test_a_hook_removed_by_one_before_it_is_not_called(net: nn.Sequential, x: Tensor) -> None:
    h = hook_output(net[0])
    handle = attach(net[0], lambda *seen: h.remove(), prepend=True)

    net(x)
    handle.remove()

    assert h.n_calls == 0
    assert n_hooks(net) == 0


def test_an_edit_that_removes_itself_is_applied_once(net: nn.Sequential, x: Tensor) -> None:
    def once(m: nn.Module, i: Any, o: Tensor) -> Tensor:
        edits.remove()
        return o * 0

    edits = edit_output(net[2], once)

    assert not net(x).any()
    assert net(x).any()
    edits.remove()
    assert edits.n_calls == {"0": 1}
    assert n_hooks(net) == 0


def test_a_module_that_is_replaced_in_the_block_is_reported(net: nn.Sequential, x: Tensor) -> None:
    def use() -> list[int]:
        with hook_outputs(net) as h:
            net[0] = nn.Linear(5, 10)
            net(x)
        return [hook.n_calls for hook in h]

    with pytest.warns(NeverFiredWarning, match="1 of 3 hooks never fired: '0': the module is gone"):
        assert use() == [0, 1, 1]


def test_a_module_added_in_the_block_can_be_hooked_there(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs(net) as h:
        net.append(nn.Tanh())
        with hook_output(net[3]) as t:
            y = net(x)

    assert torch.equal(t.stored, y)
    assert [hook.n_calls for hook in h] == [1, 1, 1]


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


def test_ctrl_c_in_the_model_leaves_nothing_in_an_extractor_or_a_swap(x: Tensor) -> None:
    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(5, 5), Gives(interrupted), nn.ReLU())
    places = list(model)

    with pytest.raises(KeyboardInterrupt):
        feature_extractor(model, "2")(x)
    with pytest.raises(KeyboardInterrupt), swap(model, {"0": Catcher}):
        model(x)

    assert n_hooks(model) == 0
    assert list(model) == places


def test_a_block_may_end_in_another_thread(net: nn.Sequential, x: Tensor) -> None:
    h = hook_output(net)
    h.__enter__()
    net(x)

    thread = threading.Thread(target=h.__exit__, args=(None, None, None))
    thread.start()
    thread.join()

    assert h.n_calls == 1
    assert n_hooks(net) == 0


def test_a_layer_that_has_left_the_model_is_reported_by_its_extractor(
    net: nn.Sequential, x: Tensor
) -> None:
    extract = feature_extractor(net, "2")
    net[2] = nn.Linear(10, 7)
    assert extract(x)["2"].shape == (4, 7)  # known by name

    del net[2]

    with pytest.raises(SelectionError, match='no module matches "2"'):
        extract(x)


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


def test_a_parameter_that_a_module_returns_is_stored_as_it_was(x: Tensor) -> None:
    p = nn.Parameter(torch.ones(2))
    m = Gives(lambda x: p)

    with hook_output(m) as h:
        m(x)
    with torch.no_grad():
        p.mul_(7)

    assert h.stored.tolist() == [1.0, 1.0]
    assert not h.stored.requires_grad


class Shares(nn.Module):
    """Gives its parameter or its buffer, or a view of it."""

    def __init__(self, what: str, view: bool) -> None:
        super().__init__()
        self.weight, self.what, self.view = nn.Parameter(torch.zeros(3)), what, view
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        t: Tensor = getattr(self, self.what)
        return t.view(3, 1) if self.view else t


SHARING = [
    *(nn.Identity(), nn.Flatten(0), Gives(lambda x: x[:1])),
    *(Shares(what, view) for what in ("weight", "table") for view in (True, False)),
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "capture",
    [
        lambda m: hook_output(m),
        lambda m: hook_output(m, keep="all"),
        lambda m: hook_outputs([m]),
        lambda m: hook_input(m),
        lambda m: hook_output(m, grad=True),
        lambda m: hook_input(m, grad=True),
        lambda m: Hook(m, lambda m, i, o: o),
        lambda m: Hook(m, lambda m, i, o: (i, o)),
        lambda m: Hook(m, lambda m, i: i, pre=True),
        lambda m: edit_output(m, lambda m, i, o: replace(i[0])(m, i[0])),
    ],
)
@pytest.mark.parametrize("m", SHARING, ids=range(len(SHARING)))
def test_memory_that_the_user_shares_with_numpy_stays_shared(
    m: nn.Module, capture: Any, requires_grad: bool
) -> None:
    x = torch.zeros(2, 3, requires_grad=requires_grad)
    mine = [x, *m.parameters(), *m.buffers()]
    with torch.no_grad():
        for t in mine:
            t.zero_()
    arrays = [t.detach().numpy() for t in mine]

    made = capture(m)
    m(x)
    for detach in (True, False):
        feature_extractor(nn.Sequential(m), "0", detach=detach)(x)
    made.remove()
    with torch.no_grad():
        for t in mine:
            t.add_(1)

    assert all((array == t.detach().numpy()).all() for array, t in zip(arrays, mine, strict=True))
    assert arrays[0].min() == 1


def test_memory_shared_with_numpy_stays_shared_where_a_view_of_it_was_given() -> None:
    x = torch.zeros(2, 3)
    array, m = x.numpy(), nn.Identity()

    with hook_output(m) as h:
        m(x[:1])
    x.add_(1)

    assert array.min() == 1
    assert h.stored.max() == 0


def holds_itself(x: Tensor) -> dict[str, Any]:
    d: dict[str, Any] = {"x": x * 2}
    d["me"] = d
    return d


def test_a_structure_without_end_is_stored_if_a_leaf_of_it_is_wanted(x: Tensor) -> None:
    m = Gives(holds_itself)

    with Hook(m, None, leaf="['x']") as h:
        m(x)

    assert torch.equal(h.stored, 2 * x)


def test_a_long_structure_is_stored(x: Tensor) -> None:
    m = Gives(lambda x: [x + i for i in range(5000)])

    with hook_output(m) as h:
        m(x)

    assert torch.equal(h.stored[-1], x + 4999)


def test_complex_numbers_go_into_complex_tensors(x: Tensor) -> None:
    m = Gives(lambda x: torch.complex(x, x))

    with edit_output(m, add(1j)):
        y = m(x)

    torch.testing.assert_close(y, torch.complex(x, x + 1))


# --- copies


def test_hooks_that_are_off_carry_nothing_in_a_pickle(net: nn.Sequential, x: Tensor) -> None:
    with hook_outputs(net, keep="all") as h:
        net(x)

    data = pickle.dumps(h)
    twin = pickle.loads(data)

    assert len(data) < 1000
    assert repr(twin) == "Hooks(3 hooks, removed)"
    assert twin.stored == [None, None, None]


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


def test_a_capture_spans_inference_no_grad_and_training(net: nn.Sequential, x: Tensor) -> None:
    with hook_output(net, keep="all") as h, hook_output(net, grad=True) as g:
        with torch.inference_mode():
            net(x)
        with torch.no_grad():
            net(x)
        net(x).sum().backward()

    for call in h.calls:
        torch.testing.assert_close(call, net(x).detach())
        assert not call.is_inference()
    assert g.n_calls == 3
    assert torch.equal(g.stored[0], torch.ones(4, 3))


def test_a_generator_is_stored_as_it_is_and_its_layers_call_by_call(x: Tensor) -> None:
    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for _ in range(3):
                yield self.layer(x)

    m = Yields()
    with hook_output(m) as h, hook_output(m.layer, keep="all") as layer:
        out = list(m(x))

    assert h.stored is not None
    assert len(layer.calls) == 3
    torch.testing.assert_close(layer.calls[2], out[2])


def test_every_error_and_warning_of_hookkit_has_the_one_base() -> None:
    for error in (ArgumentError, HookError, SelectionError):
        assert issubclass(error, HookkitError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert describe(None) == "None"


def test_memory_shared_with_numpy_stays_shared_inside_of_a_list() -> None:
    class Sum(nn.Module):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return xs[0] + xs[1]

    m, xs = Sum(), [torch.ones(3), torch.ones(3)]
    arrays = [x.numpy() for x in xs]

    with hook_input(m) as h:
        m(xs)
    for x in xs:
        x.add_(5)

    assert [array[0] for array in arrays] == [6, 6]
    assert [x[0].item() for x in h.stored[0]] == [1, 1]
