"""Two models side by side: where they begin to differ, and that nothing of theirs is changed."""

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from hookkit import Hooks, compare_models, hook_outputs, select
from hookkit.errors import ArgumentError, HookError, OptionError, SelectionError
from hookkit.inspection.differences import difference
from hookkit.inspection.pairing import Names, braced

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two linear layers, and what a test does with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, m in modules.items():
            self.add_module(name, m)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def in_turn(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), inner,
        nn.Linear(16, 4),
    )  # fmt: skip


def broken(model: nn.Module, *names: str) -> Any:
    other = copy.deepcopy(model)
    for name in names:
        other.get_parameter(name).data[0] += 0.5
    return other


def different(comparison: Any) -> list[str]:
    return [r.name for r in comparison.different]


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "4.0.weight", "5.bias"])
def test_the_layer_with_another_weight_is_the_first(name: str) -> None:
    comparison = compare_models(net(), broken(net(), name), X)

    assert comparison.first is not None
    assert comparison.first.name == name.rpartition(".")[0]
    assert [r.name for r in comparison] == ["0", "1", "2", "3", "4.0", "4.1", "4", "5", ""]


def test_figures_are_those_of_float64() -> None:
    model = net().eval()
    other = broken(model, "0.weight")
    a, b = (m[0](X).detach().double() for m in (model, other))

    row = compare_models(model, other, X).first

    assert row is not None
    apart = (a - b).abs()
    assert row.max_abs_error == pytest.approx(float(apart.max()))
    assert row.rel_error == pytest.approx(float(apart.norm() / a.norm()))
    assert row.cosine == pytest.approx(float(torch.cosine_similarity(a.ravel(), b.ravel(), dim=0)))
    assert row.n_different == int((apart > 1e-5 + 1.3e-6 * a.abs()).sum())
    assert (row.type, row.shape) == ("Linear", (5, 16))


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "max_abs_error", "rel_error", "n_different"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0, 0.0, 0),
        ([1.0, INF], [1.0, INF], 0.0, 0.0, 0),
        ([1.0, INF], [1.0, -INF], INF, INF, 1),
        ([1.0, INF], [1.0, 1.0], INF, INF, 1),
        ([1.0, 2.0], [1.0, NAN], INF, INF, 1),
        ([0.0, 0.0], [0.0, 3.0], 3.0, INF, 1),
        ([0.0], [0.0], 0.0, 0.0, 0),
        ([], [], 0.0, 0.0, 0),
        ([2**60, 3], [2**60 + 1, 3], 1.0, 2**-60, 1),  # float64 has not all whole numbers
    ],
)
def test_what_is_not_finite_zero_or_whole_is_compared(
    a: list[float], b: list[float], max_abs_error: float, rel_error: float, n_different: int
) -> None:
    for tolerance in (0.0, 1e-2) if max_abs_error == INF else (0.0,):
        apart = difference(torch.tensor(a), torch.tensor(b), tolerance, 0.0)

        assert (apart.max_abs_error, apart.rel_error, apart.n_different) == (
            max_abs_error,
            rel_error,
            n_different,
        )


def test_chunks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(1000, dtype=torch.complex64), torch.randn(1000, dtype=torch.complex64)
    whole = difference(a, b, 1e-3, 1e-3)

    monkeypatch.setattr("hookkit.inspection.differences._CHUNK", 7)

    assert difference(a, b, 1e-3, 1e-3) == pytest.approx(whole)


def test_another_dtype_has_the_looser_tolerance() -> None:
    model, x = nn.Linear(8, 4), torch.full((2, 8), 1.001)
    model.weight.data.fill_(0.25)
    model.bias.data.fill_(1.0)
    half = copy.deepcopy(model).bfloat16()

    comparison = compare_models(model, half, x)

    assert comparison.first is None
    assert comparison[0].rel_error > 1e-5
    assert compare_models(model, half, x, rtol=0).first is not None


# -- what only one side has, or cannot be compared -------------------------------------------------


class Loop(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.n = nn.Linear(4, 4), n

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.lin(x) for _ in range(self.n)]


@pytest.mark.parametrize(("a", "b"), [(3, 2), (2, 3)])
def test_a_call_and_a_tensor_that_one_side_lacks_are_differences(a: int, b: int) -> None:
    comparison = compare_models(Loop(a), Loop(b), X)

    first = comparison.first
    assert first is not None
    assert (first.name, first.call) == ("lin", 2)
    assert first.problem == f"not given by the {'second' if a > b else 'first'}"
    assert different(comparison) == ["lin", "[2]"]
    assert "→ lin Linear call 2" in str(comparison)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_layer_that_one_side_lacks_is_named_and_not_counted_as_equal(swapped: bool) -> None:
    a, b = Net(in_turn, more=nn.Identity(), never=nn.Linear(4, 4)), Net(in_turn)
    a.run = lambda m, x: m.more(in_turn(m, x))

    comparison = compare_models(b, a, X) if swapped else compare_models(a, b, X)

    lacks = "first" if swapped else "second"
    assert comparison.first is None
    assert comparison.not_judged == (f"more Identity: no such layer in the {lacks}",)
    assert comparison.not_judged[0] in str(comparison)


def test_a_layer_that_one_side_never_calls_is_said() -> None:
    found = compare_models(Net(in_turn), Net(lambda m, x: m.b(x)), X)

    assert found.first.name == ""
    assert found.first.place == "in its own forward, before b"
    assert found.not_judged == ("a Linear: never called in the second",)


def test_the_truth_value_of_a_comparison_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"truth value .* Ask `\.first is None`"):
        assert not compare_models(net(), net(), X)


class Gives(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


class Opaque:
    __slots__ = ("x",)


def test_tensors_in_the_attributes_of_a_result_are_compared() -> None:
    one, two = (Gives(lambda x, k=k: torch.distributions.Normal(x * k, 1.0)) for k in (1.0, 2.0))

    assert different(compare_models(one, two, X)) == [".loc"]
    assert compare_models(one, copy.deepcopy(one), X).first is None


@pytest.mark.parametrize("make", [lambda x: (x, Opaque()), lambda x: [x, (t for t in x)]])
def test_a_result_that_cannot_be_taken_apart_is_a_difference(make: Any) -> None:
    first = compare_models(Gives(make), Gives(make), X).first

    assert first is not None
    assert first.name == "[1]"
    assert "in which hookkit finds no tensor" in first.problem
    assert compare_models(Gives(lambda x: (x, {3})), Gives(lambda x: (x, {3})), X).first is None


def test_shapes_that_differ_are_named() -> None:
    first = compare_models(nn.Linear(4, 3), nn.Linear(4, 2), X).first

    assert first is not None
    assert first.problem == "5×2 in the second"


def test_nothing_in_common_is_an_error() -> None:
    one, two = nn.Sequential(nn.ReLU()), nn.ModuleDict({"a": nn.ReLU()})
    two.forward = two["a"].forward

    with pytest.raises(SelectionError, match=r"nothing was compared.* '0', the second ''\. Load"):
        compare_models(one, two, X, modules="0")


def test_a_tensor_that_one_side_lacks_is_no_difference_if_nothing_comes_of_it() -> None:
    def model(*more: Any) -> nn.Module:
        attend = Gives(lambda x: (x, *more))  # eager attention gives its weights too
        return Net(lambda m, x: m.a(m.attend(x)[0]), attend=attend)

    found = compare_models(model(torch.ones(3)), model(), X)

    assert found.first is None
    assert found.not_judged == (
        "attend[1] Gives: not given by the second, and what comes of it is the same",
    )


def test_float32_values_in_a_model_of_half_precision_have_its_tolerance() -> None:
    model = Net(lambda m, x: m.act(m.a(x).float()), act=nn.Tanh())

    assert compare_models(model, copy.deepcopy(model).bfloat16(), X).first is None


# -- names ----------------------------------------------------------------------------------------


def test_a_port_with_other_names_and_containers_is_paired() -> None:
    model = net().eval()

    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = copy.deepcopy(model[0:4])
            self.blocks = nn.ModuleList([copy.deepcopy(model[4])])
            self.head = copy.deepcopy(model[5])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[0](self.stem(x)))

    names = {str(i): f"stem.{i}" for i in range(4)} | {"4": "blocks.0", "5": "head"}
    comparison = compare_models(model, Port().eval(), X, names=names)

    assert comparison.first is None
    assert comparison["4.1"][0].other_name == "blocks.0.1"
    assert comparison.not_judged == (
        "stem Sequential: nothing in the first has its weights, name or place",
    )
    assert compare_models(model, Port().eval(), X, names=comparison.names).first is None


def test_a_model_inside_another_one_is_paired_by_the_empty_name() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = Net(lambda m, x: m.b(m.body(x)), body=copy.deepcopy(body))

    inside = compare_models(body, model, X, names={"": "body"})
    outside = compare_models(model, body, X, names={"body": ""}, modules="body*")

    assert [r.other_name for r in inside] == ["body.0", "body.1", "body"]
    assert inside.first is outside.first is None
    assert [text.partition(":")[0] for text in inside.not_judged] == ["(model) Net", "b Linear"]


def test_parts_of_what_is_a_layer_on_the_other_side_are_not_judged() -> None:
    model = Net(lambda m, x: m.act(m.a(x)), act=nn.GELU())
    port = Net(lambda m, x: m.act(m.a(x)), act=nn.Sequential(nn.GELU(), nn.Identity()))

    for one, other in ((model, port), (port, model)):
        comparison = compare_models(one, other, X)
        assert comparison.first is None
        assert len(comparison.not_judged) == 2


def test_modules_and_paths_select_what_is_compared() -> None:
    lstm = nn.Sequential(nn.LSTM(4, 4))
    other = broken(lstm, "0.bias_hh_l0")

    comparison = compare_models(lstm, other, X, modules="0[1][0]")

    assert [(r.name, r.differs) for r in comparison] == [("0[1][0]", True)]


class Packed(nn.Module):
    """Gives rows of these lengths to a layer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, self.layer = torch.tensor(sizes), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.layer(PackedSequence(x, self.sizes))


def test_rows_of_other_lengths_are_a_difference() -> None:
    assert compare_models(Packed(2, 2, 1), Packed(2, 2, 1), X).first is None

    comparison = compare_models(Packed(2, 2, 1), Packed(3, 2), X)

    assert different(comparison)[0] == "layer.batch_sizes"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pytree_tensors_are_said_not_to_be_compared() -> None:
    model = Gives(lambda x: torch.nested.nested_tensor([x[:2], x[2:]]))

    row = compare_models(
        model,
        model,
        X,
    ).first

    assert row is not None
    assert row.problem == "a nested tensor, which is not compared"


# -- the first ------------------------------------------------------------------------------------


def test_a_layer_that_is_given_a_difference_is_not_the_first() -> None:
    inner = Net(lambda m, x: m.b(torch.relu(m.a(x))))
    model = Net(lambda m, x: m.b(m.inner(m.a(x))), inner=inner)
    other = copy.deepcopy(model)
    other.inner.run = lambda m, x: m.b(torch.tanh(m.a(x)))

    first = compare_models(model, other, X).first

    assert different(compare_models(model, other, X)) == ["inner.b", "inner", "b", ""]
    assert (first.name, first.place) == ("inner", "in its own forward, after a and before b")
    assert first.input_error == 0


def test_the_place_of_a_difference_behind_all_layers_is_said() -> None:
    model = Net(in_turn)
    other = Net(lambda m, x: 2 * in_turn(m, x))

    first = compare_models(model, other, X).first

    assert (first.name, first.place) == ("", "in its own forward, after b, the last layer in it")


def test_errors_that_add_up_are_no_fault_of_the_layer_at_which_they_are_beyond() -> None:
    layers = [nn.Linear(4, 4) for _ in range(6)]
    model = nn.Sequential(*layers)
    other = copy.deepcopy(model)
    for layer in other:
        layer.bias.data += 1e-3

    first = compare_models(model, other, X, rtol=2e-3).first

    assert first.name == ""
    assert first.place.startswith("as errors of its layers add up, from ")
    assert compare_models(model, broken(other, "1.bias"), X, rtol=2e-3).first.name == "1"


def test_the_tolerance_is_relative_to_the_size_of_the_layer() -> None:
    small = nn.Linear(4, 4)
    small.weight.data *= 1e-4
    small.bias.data.zero_()
    other = copy.deepcopy(small)
    other.weight.data *= 1 + 1e-4

    assert compare_models(small, other, X).first is not None
    assert compare_models(small, other, X, rtol=1e-3).first is None


def test_no_tolerance_at_all_is_exact() -> None:
    model = nn.Linear(4, 4)
    other = copy.deepcopy(model)
    other.bias.data[0] = torch.nextafter(model.bias.data[0], torch.tensor(9.0))

    assert compare_models(model, model, X, rtol=0).first is None
    assert compare_models(model, other, X).first is None
    assert compare_models(model, other, torch.zeros(2, 4), rtol=0).first is not None


def test_the_ratio_of_signal_and_noise_is_in_decibels() -> None:
    model, other = nn.Identity(), Gives(lambda x: x * 1.1)

    row = compare_models(model, other, X)[-1]

    assert row.sqnr_db == pytest.approx(20.0, abs=1e-3)
    assert compare_models(model, model, X)[-1].sqnr_db == math.inf


def test_the_first_gradient_is_that_which_the_backward_reaches_first() -> None:
    model = Net(lambda m, x: m.b(m.act(m.a(x))), act=nn.Tanh())
    other = copy.deepcopy(model)
    other.act.register_full_backward_hook(lambda m, grad_in, grad_out: (2 * grad_in[0],))

    found = compare_models(model, other, X, grads=True)

    assert (found.first.name, found.first.what) == ("a", "grad")
    assert found.first.place == "in the backward between it and act Tanh grad"


# -- ports ----------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """The reference: layers in a row, a fused projection, a residual around all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q * k).tanh() * self.scale * v)


class Transposed(nn.Module):
    """A linear layer whose matrix has the inputs first."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.w = nn.Parameter(layer.weight.detach().T.clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.bias


class SplitMixer(nn.Module):
    """A port: split projections with permuted rows, a transposed matrix, the residual outside."""

    def __init__(self, model: Mixer) -> None:
        super().__init__()
        order, parts = torch.tensor([2, 0, 3, 1]), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for part, w, b in zip(parts, model.qkv.weight.chunk(3), model.qkv.bias.chunk(3),
                              strict=True):  # fmt: skip
            part.weight.data, part.bias.data = w.data[order].clone(), b.data[order].clone()
        self.query, self.key, self.value = parts
        self.proj, self.ln = Transposed(model.out), copy.deepcopy(model.norm)
        self.proj.w.data = self.proj.w.data[order]
        self.scale = model.scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln(x)
        return self.proj((self.query(x) * self.key(x)).tanh() * self.scale * self.value(x))


class Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PortOfMixers(nn.Module):
    def __init__(self, model: Mixers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(SplitMixer, model.blocks))
        self.classify = copy.deepcopy(model.head)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.clone()
        for layer in self.layers:
            x = x + layer(x)
        return {"logits": self.classify(x)}


def test_a_port_is_paired_by_its_weights() -> None:
    model = Mixers()
    port = PortOfMixers(model)

    found = compare_models(model, port, X)

    assert found.first is None
    assert found.names["head"] == "classify"
    assert found.names["blocks.*.qkv"] == "layers.*.{query,key,value}"
    assert found.names["blocks.*.out"] == "layers.*.proj"
    assert found.names["blocks.*.norm"] == "layers.*.ln"
    (row,) = found["blocks.1.qkv"]
    assert (row.other_name, row.paired) == ("layers.1.{query,key,value}", "weights")
    assert "blocks.*" in " ".join(found.names)
    assert "blocks.0 Mixer: another value in the second" in "\n".join(found.not_judged)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda p: setattr(p.layers[1], "scale", 0.9), "blocks.1"),
        (lambda p: setattr(p.layers[2].ln, "eps", 0.1), "blocks.2.norm"),
        (lambda p: p.layers[1].proj.bias.data.zero_(), "blocks.1.out"),
        (lambda p: p.layers[0].key.bias.data.zero_(), "blocks.0.qkv"),
        (lambda p: p.classify.weight.data.mul_(0.9), "head"),
    ],
)
def test_a_wrong_detail_of_a_port_is_named_at_its_layer(change: Any, name: str) -> None:
    model = Mixers()
    port = PortOfMixers(model)
    change(port)

    found = compare_models(model, port, X)

    assert found.first.name == name, str(found)
    assert compare_models(model, port, X, names=found.names).first.name == name


def test_the_gradients_of_a_port_are_compared() -> None:
    model = Mixers()

    found = compare_models(model, PortOfMixers(model), X, grads=True)

    assert found.first is None
    assert {r.name for r in found if r.what == "param_grad"} >= {"blocks.1.out.weight", "head.bias"}


def test_equal_initial_values_are_no_pair() -> None:
    a = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    b = nn.ModuleDict({"last": nn.LayerNorm(4), "fc": a[1], "first": nn.LayerNorm(4)})
    b.forward = lambda x: b["last"](b["fc"](b["first"](x)))

    assert compare_models(a, b, X).names == {"0": "first", "1": "fc", "2": "last"}


class Residual(nn.Module):
    """Has two layers, by whatever names."""

    def __init__(self, one: str, two: str, source: "Residual | None" = None) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        if source is not None:
            layers = copy.deepcopy([*source.children()])  # type: ignore[arg-type]
        self.add_module(one, layers[0])
        self.add_module(two, layers[1])

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.children()
        return x + two(one(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("layer", ["a", "b"])
@pytest.mark.parametrize("swapped", [False, True])
def test_equal_blocks_of_which_one_is_wrong_are_paired_in_order(
    at: int, layer: str, swapped: bool
) -> None:
    torch.manual_seed(0)
    block = Residual("a", "b")
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))
    port = nn.Sequential(*(Residual("u", "v", block) for _ in range(3)))
    port.get_parameter(f"{at}.{'u' if layer == 'a' else 'v'}.weight").data[1, 1] += 0.3

    found = compare_models(port, model, X) if swapped else compare_models(model, port, X)

    assert (found.first.other_name if swapped else found.first.name) == f"{at}.{layer}"
    assert len(found) == 10


def test_equal_layers_without_a_pair_around_them_are_paired_by_their_place() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))
    port = nn.ModuleDict({n: copy.deepcopy(layer) for n in "abcd"})
    port.forward = lambda x: nn.Sequential(*port.values())(x)
    port["b"].weight.data[1, 1] += 0.3

    found = compare_models(model, port, X)

    assert found.names == {"0": "a", "1": "b", "2": "c", "3": "d"}
    assert found.first.name == "1"


def test_fewer_copies_of_a_layer_are_paired_from_the_first() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))
    port = nn.Sequential(nn.Sequential(*(copy.deepcopy(layer) for _ in range(3))))

    found = compare_models(model, port, X)

    assert found.names == {"0": "0.0", "1": "0.1", "2": "0.2"}
    assert found.first.name == ""


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_equal_blocks_with_a_fused_layer_are_paired_in_order(
    swapped: bool, wrong: int | None
) -> None:
    torch.manual_seed(0)
    mixer = Mixer()
    model = nn.Sequential(*(copy.deepcopy(mixer) for _ in range(3)))
    port = nn.Sequential(*(SplitMixer(mixer) for _ in range(3)))
    for block in port:
        block.register_forward_hook(lambda m, args, out: args[0] + out)
    if wrong is not None:
        port[wrong].proj.w.data[1, 1] += 0.3

    found = compare_models(port, model, X) if swapped else compare_models(model, port, X)

    assert swapped or found.names["*.qkv"] == "*.{query,key,value}"
    assert len(found) == 13
    assert found.first is None if wrong is None else found.first.name == str(wrong)


class Steps(nn.Module):
    """Calls a cell for each step."""

    def __init__(self, model: nn.Module, cell: nn.RNNCellBase, name: str) -> None:
        super().__init__()
        self.name, self.h = name, copy.deepcopy(model.h)
        cell.load_state_dict({k[:-3]: w for k, w in model.r.state_dict().items()})  # type: ignore[operator,union-attr]
        self.add_module(name, cell)

    def forward(self, x: Tensor) -> Tensor:
        cell, states = self.get_submodule(self.name), []
        state = (x.new_zeros(len(x), 4),) * 2
        for step in x.unbind(1):
            out = cell(step, state if isinstance(cell, nn.LSTMCell) else state[0])
            state = out if isinstance(out, tuple) else (out, out)
            states.append(state[0])
        return self.h(torch.stack(states, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["cell", "r"])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_loop_of_cells_is_no_difference_from_the_layer_for_all_steps(
    kind: str, name: str
) -> None:
    rnn = getattr(nn, kind)(4, 4, batch_first=True)
    model = Net(lambda m, x: m.h(m.r(x)[0]), r=rnn, h=nn.Linear(4, 3))
    port, x = Steps(model, getattr(nn, f"{kind}Cell")(4, 4), name), torch.randn(2, 6, 4)

    for a, b in ((model, port), (port, model)):
        found = compare_models(a, b, x, grads=True)
        assert found.first is None, str(found)
        assert {r.what for r in found} == {"output", "grad", "param_grad"}
        assert found.not_judged
    port.h.bias.data[1] += 1
    assert compare_models(model, port, x).first.name == "h"
    port.get_submodule(name).bias_hh.data[1] += 1  # type: ignore[union-attr,operator,index]
    assert compare_models(model, port, x).first.name == ""


def test_channels_may_be_first_or_last_and_rows_of_a_batch_in_one_axis() -> None:
    conv, fc = nn.Conv2d(3, 6, 2), nn.Linear(6, 2)
    a = nn.Sequential(conv, Gives(lambda x: x.flatten(2).mT), fc)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(12, 6), nn.Linear(6, 2)
            self.embed.weight.data = conv.weight.data.flatten(1)
            self.embed.bias.data, self.head.weight.data = conv.bias.data, fc.weight.data
            self.head.bias.data = fc.bias.data

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.unfold(x, 2).mT
            return self.head(self.embed(x).flatten(0, 1)).unflatten(0, (2, -1))

    found = compare_models(a, Other(), torch.randn(2, 3, 5, 4))

    assert found.first is None
    assert [r.other_name for r in found] == ["embed", "head", ""]


@pytest.mark.parametrize(
    ("names", "name", "pair"),
    [
        ({"h.*.fc": "l.*.mlp.fc"}, "h.3.fc.norm", "l.3.mlp.fc.norm"),
        ({"h.*": "l.*", "h.*.fc": "l.*.mlp"}, "h.3.fc", "l.3.mlp"),
        ({"h.*": "l.*", "h.0": "first"}, "h.0.fc", "first.fc"),
        ({"**.fc?": "**.linear?"}, "a.b.fc2", "a.b.linear2"),
        ({"**.fc?": "**.linear?"}, "fc2", "linear2"),
        ({"h.[0-2].fc": "l.[0-2].fc"}, "h.2.fc", "l.2.fc"),
        ({"h.[0-2].fc": "l.[0-2].fc"}, "h.3.fc", "h.3.fc"),
        ({"h.*.{q,k}": "l.*.{query,key}"}, "h.1.k", "l.1.key"),
        ({"h.*.qkv": "l.*.{q,k,v}"}, "h.1.qkv", "l.1.{q,k,v}"),
        ({"": "model"}, "head", "model.head"),
        ({"model": ""}, "model.head", "head"),
    ],
)
def test_names_speak_the_language_of_select(names: Any, name: str, pair: str) -> None:
    assert braced(Names(names).pair(name).b) == pair


# -- gradients ------------------------------------------------------------------------------------


def test_gradients_of_outputs_and_parameters_are_compared() -> None:
    model = net().eval()
    other = copy.deepcopy(model)
    other[5].weight.register_hook(lambda grad: 2 * grad)  # right outputs, a wrong gradient

    comparison = compare_models(model, other, X, grads=True, loss=lambda out: out.square().sum())

    assert [(r.name, r.what) for r in comparison.different] == [("5.weight", "param_grad")]
    assert comparison.first.place == "in its own backward, as the gradient of its output agrees"
    assert {r.what for r in comparison} == {"output", "grad", "param_grad"}
    assert all(p.grad is None for m in (model, other) for p in m.parameters())
    model(X).square().sum().backward()
    (row,) = comparison["5.weight"]
    assert row.max_abs_error == pytest.approx(float(model[5].weight.grad.abs().max()), rel=1e-5)


def test_gradients_of_outputs_are_what_retain_grad_gives() -> None:
    model = Net(lambda m, x: m.act(m.a(x)), act=nn.ReLU(inplace=True))
    other = Net(lambda m, x: 3 * m.act(m.a(x)), act=nn.ReLU(inplace=True))

    comparison = compare_models(model, other, X, grads=True)

    (_, grad) = comparison["a"]
    active = float((model.a(X) > 0).sum())
    assert (grad.what, grad.max_abs_error) == ("grad", 2.0)
    assert grad.n_different == active  # of what comes before the ReLU, which works in place


def test_modules_without_a_gradient_are_compared_by_their_outputs() -> None:
    net = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))

    comparison = compare_models(net, net, X, grads=True, modules="0")

    assert [r.what for r in comparison] == ["output"]


def test_an_input_that_a_module_hands_on_has_its_gradient() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)

    comparison = compare_models(net, broken(net, "1.weight"), x, grads=True)

    assert [(r.what, r.differs) for r in comparison["0"]] == [("output", False), ("grad", True)]
    assert x.grad is None


def test_gradients_behind_a_checkpoint_are_compared() -> None:
    model = Net(lambda m, x: checkpoint(lambda x: m.b(m.a(x).tanh()), x, use_reentrant=False))

    comparison = compare_models(model, broken(model, "a.bias"), X, grads=True)

    assert comparison.first.name == "a"
    assert [r.name for r in comparison if r.what == "grad"] == ["", "b", "a"]
    assert not any(r.call for r in comparison)  # what it runs again is no second call


def test_a_parameter_without_a_partner_is_a_difference() -> None:
    model = Net(in_turn)
    other = copy.deepcopy(model)
    nn.utils.parametrizations.weight_norm(other.b)

    comparison = compare_models(model, other, X, grads=True)

    parts = [f"b.parametrizations.weight.original{i}" for i in (0, 1)]
    assert different(comparison) == ["b.weight", *parts]


class Scales(nn.Module):
    """Has its parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.ParameterList([torch.ones(4), torch.ones(4)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.s[0] * self.s[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "names", "modules"),
    [
        (Scales(), ["s.0", "s.1"], None),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
         [f"parametrizations.weight.original{i}" for i in (0, 1)], None),
        (Attention(), ["mha.out_proj.weight", "mha.out_proj.bias"], None),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4))), ["0.0.weight"], "0"),
    ],
)  # fmt: skip
def test_gradients_of_parameters_in_modules_that_are_not_compared_are_compared(
    model: nn.Module, names: list[str], modules: Any
) -> None:
    other = copy.deepcopy(model)
    for name in names:
        other.get_parameter(name).register_hook(lambda grad: 100 * grad)

    comparison = compare_models(model, other, X, grads=True, modules=modules)

    assert different(comparison) == names
    assert {r.what for r in comparison.different} == {"param_grad"}


# -- captures in files ----------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    pytest.importorskip("safetensors")

    def saved(model: nn.Module, layers: Any, **options: Any) -> Path:
        with hook_outputs(layers, **options) as h:
            model(X)
        return h.save(tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors")

    return saved


def test_a_capture_takes_the_place_of_a_model(save: Any) -> None:
    model = nn.Sequential(nn.LSTM(4, 4), nn.Identity())
    other = broken(model, "0.bias_hh_l0")
    one, two = (save(m, select(m, "0", "")) for m in (model, other))

    for comparison in (compare_models(one, two), compare_models(one, other, X),
                       compare_models(model, two, X)):  # fmt: skip
        assert [r.name for r in comparison] == [
            "0[0]",
            "0[1][0]",
            "0[1][1]",
            "[0]",
            "[1][0]",
            "[1][1]",
        ]
        assert comparison.first is not None
        assert (comparison.first.name, comparison.first.type) == ("0[0]", "LSTM")
    assert compare_models(one, model, X).first is None


def test_a_capture_of_a_port_is_compared_by_the_names_that_were_found(save: Any) -> None:
    model = Mixers()
    port, wrong = PortOfMixers(model), PortOfMixers(model)
    wrong.layers[2].ln.eps = 0.1
    names = compare_models(model, port, X).names
    right, file = (save(m, select(m, "**", "")) for m in (port, wrong))

    assert compare_models(model, right, X, names=names).first is None
    found = compare_models(model, file, X, names=names)
    assert found["blocks.2.norm"][0].differs
    assert found.first.place == "of unknown inputs, as a file has none"


def test_a_capture_that_lacks_a_layer_differs_both_ways(save: Any) -> None:
    model = net().eval()
    every, fewer = save(model, select(model, "0", "1", "5")), save(model, select(model, "0", "1"))

    assert different(compare_models(every, fewer)) == ["5"]
    assert different(compare_models(fewer, every)) == ["5"]


def test_a_capture_of_last_calls_is_compared_with_last_calls(save: Any) -> None:
    model = Net(lambda m, x: m.b(m.a(m.a(x))))
    last, every = (save(model, select(model), keep=keep) for keep in ("last", "all"))

    for a, b in ((last, model), (model, last), (last, every), (every, last), (every, model)):
        comparison = compare_models(a, b, *([X] if model in (a, b) else []))

        assert comparison.first is None
        assert len(comparison) == (3 if last not in (a, b) else 2)


def test_captures_keep_names_and_paths_apart(save: Any) -> None:
    odd = nn.ModuleDict({"a/b": nn.Linear(4, 4), "c:1": nn.LSTM(4, 4)})
    model = Net(lambda m, x: m.odd["c:1"](m.odd["a/b"](x))[0], odd=odd)
    leaf = "odd.c:1[1][0]"

    path = save(model, select(model, "odd.a/b", leaf))

    for a, b in ((path, model), (model, path)):
        comparison = compare_models(a, b, X)
        assert [r.name for r in comparison] == ["odd.a/b", leaf]
        assert comparison.first is None


class Cache:
    """Of the user's own: holds tensors in attributes."""

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.lengths, self.note = [keys], {"n": torch.tensor(1)}, {"a", "b"}


def test_a_capture_has_the_tensors_in_objects(save: Any) -> None:
    model = Net(lambda m, x: {"out": m.a(x), "cache": Cache(m.b(x)), "set": {1}})
    other = broken(model, "b.bias")
    path = save(model, select(model, "a", "b", ""))

    assert compare_models(path, model, X).first is None
    assert compare_models(model, path, X).first is None
    assert compare_models(path, path).first is None
    found = compare_models(path, other, X)
    assert different(found) == ["b", "['cache'].keys[0]"]
    assert found.not_judged == ("['set'] set: not in a file",)


def test_tensors_without_values_are_a_difference() -> None:
    model = Net(lambda m, x: (m.a(x), torch.empty(2, device="meta")))

    row = compare_models(
        model,
        model,
        X,
    )[-1]

    assert (row.name, row.problem) == ("[1]", "on meta, without values")


def test_a_capture_of_inputs_is_no_capture_of_outputs(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = Net(in_turn)
    with Hooks(select(model, "a"), None, pre=True) as h:
        model(X)

    with pytest.raises(OptionError, match="hooks of kind 'pre' stored"):
        compare_models(h.save(tmp_path / "inputs.safetensors"), model, X)


# -- errors and text ------------------------------------------------------------------------------


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def scripted(m: nn.Module) -> Any:
    return torch.jit.script(nn.Sequential(nn.ReLU()))


VMAPPED = Net(lambda m, x: torch.vmap(m.a)(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: compare_models(m, 3, X), ArgumentError, "Give two models, or files"),
        (lambda m: compare_models(m, m, X, rtol=-1), OptionError, "rtol"),
        (lambda m: compare_models(m, m, X, grads="yes"), ArgumentError, "grads"),
        (lambda m: compare_models(m, m, X, modules="8"), SelectionError, '"8"'),
        (lambda m: compare_models(m, m, X, names=["0"]), OptionError, "is no dict"),
        *(
            (
                lambda m, names=names: compare_models(m, m, X, names=names),
                OptionError,
                match,
            )
            for names, match in (
                ({"4": "*"}, "cannot be read: a wildcard"),
                ({"{4,5}": "{a,b,c}"}, "as many names"),
                ({4: "b"}, "is no text"),
                ({"4": 5}, "is no text"),
            )
        ),
        (
            lambda m: compare_models(m, m, X, names={"8": "0"}),
            SelectionError,
            'has "8", and the first',
        ),
        (
            lambda m: compare_models(m, m, X, names={"0": "8"}),
            SelectionError,
            'has "8", and the sec',
        ),
        (lambda m: compare_models(m, m, X, isolate=True), OptionError, "isolate= is gone"),
        (lambda m: compare_models(m, m.to("meta"), X), ArgumentError, "without values"),
        (lambda m: compare_models(m, scripted(m), X), HookError, "TorchScript runs no Python"),
        (lambda m: compare_models(m, "no.safetensors", X), OptionError, "cannot be read"),
        (lambda m: compare_models(VMAPPED, VMAPPED, X), HookError, "inside a transform"),
        (lambda m: compare_models(m, m, X, loss=sum), ArgumentError, "what grads=True differ"),
        (lambda m: compare_models(nn.ReLU(), Detached(), X, grads=True), ArgumentError, "gradient"),
        (
            lambda m: compare_models(m, m, X, grads=True, loss=lambda out: out),
            ArgumentError,
            "one number with a gradient, and loss gave 5×4",
        ),
    ],
)
def test_bad_input_gets_a_clear_error(call: Any, error: type[Exception], match: str) -> None:
    pytest.importorskip("safetensors")

    with pytest.raises(error, match=match):
        call(net())


def test_an_error_of_the_second_model_comes_with_what_was_compared_until_then() -> None:
    model = Net(in_turn)
    other = broken(model, "a.bias")
    other.b = nn.Linear(3, 4)

    with pytest.raises(RuntimeError) as error:
        compare_models(model, other, X)

    notes = "\n".join(error.value.__notes__)
    assert "compare_models: raised by the second model" in notes
    assert "until then 1 tensor compared, 1 differs" in notes


def test_text_and_frame_show_the_first_difference() -> None:
    pd = pytest.importorskip("pandas")
    model = Net(in_turn)

    comparison = compare_models(
        model,
        broken(model, "b.bias"),
        X,
    )

    assert "\n→ b Linear  " in comparison.text()
    assert str(comparison) == comparison.text()
    frame = comparison.to_df()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["name"]) == [r.name for r in comparison]


def test_a_layer_whose_first_call_raised_is_paired_by_what_it_returned_later():
    class Retried(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.tried = nn.Linear(4, 4), False

        def forward(self, x):
            if not self.tried:
                self.tried = True
                raise ValueError
            return self.fc(x)

    class Net(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.head = name, nn.Linear(4, 2)
            setattr(self, name, Retried())

        def forward(self, x):
            layer = getattr(self, self.name)
            with contextlib.suppress(ValueError):
                layer(x)
            return self.head(layer(x))

    a, b = Net("u"), Net("v")
    b.v.load_state_dict(a.u.state_dict())
    b.head.load_state_dict(a.head.state_dict())

    found = compare_models(a, b, torch.randn(2, 4))

    assert found.first is None
    assert found.names == {"u": "v"}
