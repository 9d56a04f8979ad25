"""`compare_models` on ports, stateful and in-place models, shared containers and saved captures."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hookkit import Hooks, compare_models, hook_output, hook_outputs, select
from hookkit.comparing.measures import difference
from hookkit.errors import ArgumentError, HookError, OptionError

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


def broken(model: nn.Module, *names: str) -> nn.Module:
    other = copy.deepcopy(model)
    for name in names:
        other.get_parameter(name).data[0] += 0.5
    return other


def in_turn(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


# -- names ----------------------------------------------------------------------------------------


def test_a_model_inside_another_one_is_paired_by_the_empty_name() -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = Net(lambda m, x: m.b(m.body(x)), body=copy.deepcopy(body))

    inside = compare_models(body, model, X, names={"": "body"})
    outside = compare_models(model, body, X, names={"body": ""}, modules="body*")

    assert [r.other_name for r in inside] == ["body.0", "body.1", "body"]
    assert inside.first is None
    assert inside.unpaired == ("b (second only)", "(model) (second only)")
    assert [(r.name, r.other_name) for r in outside][-1] == ("body", "")
    assert outside.first is None


def test_names_of_modules_that_are_not_compared_can_be_mapped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    port = Net(lambda m, x: m.act(m.fc(x)), fc=model[0], act=model[1])

    found = compare_models(model, port, X, modules="1", names={"0": "fc", "1": "act"})

    assert [(r.name, r.other_name) for r in found] == [("1", "act")]


def test_a_mapped_container_without_such_a_part_leaves_the_part_unpaired() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    port = Net(lambda m, x: m.fc(x), fc=model[0][0])

    found = compare_models(model, port, X, names={"0": "fc"})

    assert found.unpaired == ("0.0 (first only)",)
    assert found.first is None


def test_modules_that_do_not_run_are_not_unpaired() -> None:
    model = Net(in_turn)
    other = Net(in_turn, never=nn.Linear(4, 4), once=nn.Identity())
    other.run = lambda m, x: in_turn(m, m.once(x))

    assert compare_models(model, other, X).unpaired == ("once (second only)",)


def test_tensors_that_one_output_lacks_are_listed() -> None:
    one, two = Net(lambda m, x: {"y": m.a(x)}), Net(lambda m, x: {"y": m.a(x), "z": x})

    assert compare_models(one, two, X).unpaired == ("(model)['z'] (second only)",)
    assert compare_models(two, one, X).unpaired == ("(model)['z'] (first only)",)


# -- isolate --------------------------------------------------------------------------------------


def test_own_errors_of_modules_that_work_in_place_are_right() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        m.act(h)  # what it returns is not used
        return m.b(h) + h

    model = Net(forward, act=nn.ReLU(inplace=True))

    found = compare_models(model, broken(model, "a.weight"), X, isolate=True)

    assert [r.name for r in found.different] == ["a"]


def test_own_errors_of_modules_that_share_a_dict_are_right() -> None:
    class Writes(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.lin, self.i = nn.Linear(4, 4), i

        def forward(self, x: Tensor, cache: dict[int, Tensor]) -> Tensor:
            cache[self.i] = self.lin(x)
            return cache[self.i]

    def forward(m: Any, x: Tensor) -> Tensor:
        cache: dict[int, Tensor] = {}
        for layer in m.layers:
            x = layer(x, cache)
        return x + sum(cache.values())

    model = Net(forward, layers=nn.ModuleList(Writes(i) for i in range(3)))

    found = compare_models(model, broken(model, "layers.0.lin.bias"), X, isolate=True)

    assert [r.name for r in found.different] == ["layers.0.lin"]


def test_code_between_layers_is_an_own_error_of_the_module_around_them() -> None:
    inner = Net(lambda m, x: m.b(torch.relu(m.a(x))))
    model = Net(lambda m, x: m.b(m.inner(m.a(x))), inner=inner)
    other = broken(model, "a.bias")
    other.inner.run = lambda m, x: m.b(torch.tanh(m.a(x)))

    found = compare_models(model, other, X, isolate=True)

    assert [r.name for r in found.different] == ["a", "inner"]
    (row,) = found["inner"]
    received = inner.a(model.a(X)).detach().double()
    apart = torch.tanh(received) - torch.relu(received)
    assert row.own_rel == pytest.approx(float(apart.norm() / torch.relu(received).norm()))


def test_the_text_shows_the_largest_own_errors_and_counts_them() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    other = broken(model, "1.bias", "9.bias", "17.bias")
    other[17].bias.data += 5.0

    found = compare_models(model, other, X, isolate=True, grads=True)

    lines = found.text().splitlines()
    assert ", 3 by their own error, first 1 Linear" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["→", "9", "17"]


def test_attention_of_one_tensor_is_isolated_beside_that_of_three() -> None:
    class Attention(nn.Module):
        def __init__(self, of: nn.MultiheadAttention) -> None:
            super().__init__()
            self.of = [of]  # hidden, as the weights of a port are its own

        def forward(self, x: Tensor) -> Tensor:
            return self.of[0](x, x, x, need_weights=False)[0] + self.off

        off = 0.0

    torch.manual_seed(0)
    mha = nn.MultiheadAttention(4, 2).eval()
    model = Net(lambda m, x: m.b(m.att(h := m.a(x), h, h, need_weights=False)[0]), att=mha)
    port = Net(lambda m, x: m.b(m.att(m.a(x))), att=Attention(mha))
    port.a.weight.data[0] += 0.5

    found = compare_models(model, port, X, isolate=True)
    port.att.off = 0.1
    off = compare_models(model, port, X, isolate=True)

    assert [r.name for r in found.different] == ["a"]
    assert [r.name for r in off.different] == ["a", "att[0]"]


def test_experts_are_isolated_behind_a_router_that_is_broken() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        chosen = m.a(x).argmax(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(m.experts):
            out[chosen == i] = expert(x[chosen == i])
        return m.b(out)

    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    model = Net(forward, experts=experts)

    found = compare_models(model, broken(model, "a.weight", "experts.1.bias"), X, isolate=True)

    assert [r.name for r in found.different] == ["a", "experts.1"]


def test_own_errors_of_recursive_calls_are_right() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor, n: int = 2) -> Tensor:
            return self(x * 2, n - 1) + self.lin(x) if n else x

    model = Net(lambda m, x: m.again(m.a(x)), again=Again())

    found = compare_models(model, broken(model, "a.bias"), X, isolate=True)

    assert [r.name for r in found.different] == ["a"]
    assert [r.own_rel for r in found["again"]] == [0.0, 0.0, 0.0]


def test_gradients_behind_a_checkpoint_are_compared_beside_own_errors() -> None:
    model = Net(lambda m, x: checkpoint(lambda x: m.b(m.a(x).tanh()), x, use_reentrant=False))

    found = compare_models(model, broken(model, "a.bias"), X, isolate=True, grads=True)

    assert [r.name for r in found if r.own_different] == ["a"]
    assert [(r.name, r.what) for r in found if r.what == "grad"] == [
        ("", "grad"), ("b", "grad"), ("a", "grad"),
    ]  # fmt: skip


def test_a_module_with_other_inputs_has_no_own_error() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x)

    model = Net(in_turn, b=Two(4, 4))
    other = broken(model, "a.bias")
    other.run = lambda m, x: m.b(m.a(x), torch.ones(()))

    found = compare_models(model, other, X, isolate=True)

    (row,) = found["b"]
    assert row.own_different is None
    assert row.differs
    assert "–" in str(found)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_is_given_quantized_inputs() -> None:
    ao = torch.ao.quantization
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = Net(lambda m, x: m.out(m.net(m.into(x))), into=ao.QuantStub(), net=inner,
                out=ao.DeQuantStub()).eval()  # fmt: skip
    other: Any = copy.deepcopy(model)
    engine = next(e for e in torch.backends.quantized.supported_engines if e != "none")
    other.qconfig = ao.get_default_qconfig(engine)
    other = ao.prepare(other)
    other(X)
    other = ao.convert(other)

    found = compare_models(model, other, X, isolate=True)

    assert all(0 <= r.own_rel < 0.1 for r in found)
    assert found.unpaired == ()


# -- state ----------------------------------------------------------------------------------------


def test_each_run_begins_with_the_same_state() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            self.total += self.n
            return x * self.total

    norm = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(norm, Counts())

    found = compare_models(model, model, X, isolate=True)

    assert found.first is None
    assert (model[1].n, float(model[1].total)) == (0, 0.0)


def test_what_a_generator_yields_is_compared_and_its_layers_too() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        for layer in (m.a, m.b):
            x = layer(x)
            yield x * m.scale

    model, other = Net(forward), Net(forward)
    model.scale, other.scale = 1.0, 2.0

    found = compare_models(model, other, X)

    assert [r.name for r in found] == ["a", "b", "[0]", "[1]"]
    assert [r.name for r in found.different] == ["[0]", "[1]"]


def test_models_made_in_inference_mode_are_compared() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        x = torch.ones(2, 4)

    assert compare_models(model, model, x).first is None


def test_integers_are_compared_exactly() -> None:
    a, b = torch.tensor([2**60, 3, -1]), torch.tensor([2**60 + 1, 3, -1])

    assert difference(a, b, 0.0, 0.0)[::3] == (1.0, 1)
    assert difference(a[1:].to(torch.uint8), b[1:].to(torch.uint8) + 1, 0.0, 0.0)[::3] == (255.0, 2)


@pytest.mark.parametrize(("a", "b"), [(math.inf, 1.0), (math.inf, -math.inf), (math.nan, 1.0)])
def test_no_relative_tolerance_covers_what_is_not_finite(a: float, b: float) -> None:
    for x, y in ((a, b), (b, a)):
        found = difference(torch.tensor([1.0, x]), torch.tensor([1.0, y]), 1e-2, 1e-2)

        assert (found.max_abs, found.rel, found.n_different) == (math.inf, math.inf, 1)


# -- gradients ------------------------------------------------------------------------------------


def test_a_loss_that_cannot_be_used_is_an_error() -> None:
    model = Net(in_turn)

    with pytest.raises(ArgumentError, match="loss gave 5×4 for the output of the first model"):
        compare_models(model, model, X, grads=True, loss=lambda out: out)
    with pytest.raises(ArgumentError, match="loss= is what grads=True differentiates"):
        compare_models(model, model, X, loss=lambda out: out.sum())


def test_gradients_of_parametrized_parameters_are_unpaired() -> None:
    model = Net(in_turn)
    other = copy.deepcopy(model)
    nn.utils.parametrizations.weight_norm(other.b)

    found = compare_models(model, other, X, grads=True)

    assert found.first is None
    assert [(r.name, r.what) for r in found][3:6] == [("", "grad"), ("b", "grad"), ("a", "grad")]
    assert found.unpaired == ("b.weight param grad (first only)",)


def test_of_a_compiled_model_the_parameters_gradients_are_compared() -> None:
    model = Net(in_turn)
    other = torch.compile(copy.deepcopy(model), backend="eager")

    for a, b in ((model, other), (other, model)):
        found = compare_models(a, b, X, grads=True, names={"a": "a"})

        assert found.first is None
        assert [r.name for r in found if r.what == "param_grad"] == [
            "a.weight", "a.bias", "b.weight", "b.bias",
        ]  # fmt: skip


def test_an_error_of_the_second_model_comes_with_what_was_found_until_then() -> None:
    model = Net(in_turn)
    other = broken(model, "a.bias")
    other.b = nn.Linear(3, 4)

    with pytest.raises(RuntimeError) as error:
        compare_models(model, other, X)

    notes = "\n".join(error.value.__notes__)
    assert "until then 1 tensor compared, 1 differs, first a Linear" in notes


# -- files ----------------------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    pytest.importorskip("safetensors")

    def saved(model: nn.Module, layers: Any, **options: Any) -> Path:
        with hook_outputs(layers, **options) as h:
            model(X)
        return h.save(tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors")

    return saved


def test_a_file_of_last_calls_is_compared_with_last_calls(save: Any) -> None:
    model = Net(lambda m, x: m.b(m.a(m.a(x))))
    last, every = (save(model, select(model), keep=keep) for keep in ("last", "all"))

    for a, b in ((last, model), (model, last), (last, every), (every, last), (every, model)):
        found = compare_models(a, b, *([X] if model in (a, b) else []))

        assert (found.first, found.unpaired) == (None, ("(model) (first only)",)[:0])
        assert len(found) == (3 if last not in (a, b) else 2)


def test_rows_of_a_file_are_in_the_order_in_which_the_model_runs(save: Any) -> None:
    model = Net(lambda m, x: m.a(m.b(x)))

    found = compare_models(save(model, select(model)), broken(model, "b.bias"), X)

    assert [r.name for r in found] == ["b", "a"]
    assert found.first is found[0]


def test_files_keep_names_and_paths_apart(save: Any) -> None:
    odd = nn.ModuleDict({"a/b": nn.Linear(4, 4), "c:1": nn.LSTM(4, 4)})
    model = Net(lambda m, x: m.odd["c:1"](m.odd["a/b"](x))[0], odd=odd)
    leaf = "odd.c:1[1][0]"

    path = save(model, select(model, "odd.a/b", leaf))

    for a, b in ((path, model), (model, path)):
        found = compare_models(a, b, X)
        assert [r.name for r in found] == ["odd.a/b", leaf]
        assert (found.first, found.unpaired) == (None, ())


def test_positions_in_a_file_are_told_from_names(save: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    path = save(model, [model[0], model[2]])

    assert "has positions (0, 1, …) for names" in str(compare_models(path, model, X))
    found = compare_models(path, model, X, names={"1": "2"})
    assert (found.first, found.notes) == (None, ())


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    model, path = nn.Sequential(nn.Linear(4, 4)), tmp_path / "x.safetensors"
    save_file({"0": model(X).detach(), "w": X}, path, {"keys": "no json"})

    found = compare_models(path, model, X)

    assert (found.first, found.unpaired) == (None, ("w (first only)",))


def test_a_file_of_gradients_is_no_file_of_outputs(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = Net(in_turn)
    with hook_output(model.a) as one, Hooks(select(model, "a"), None, pre=True) as h:
        model(X)
    path = h.save(tmp_path / "inputs.safetensors")

    assert one.n_calls == 1
    assert compare_models(path, path).first is None
    with pytest.raises(OptionError, match="stored by hooks of kind 'pre'"):
        compare_models(path, model, X)


def test_a_dtype_that_a_file_cannot_hold_is_an_error_with_the_layer(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Sequential(nn.Identity())
    with hook_outputs(select(model, "*")) as h:
        model(torch.empty(2, 4, dtype=torch.bits8))

    said = r"Hooks\.save: '0' is of torch\.bits8, which safetensors \d\S+ cannot hold\. Give its"
    with pytest.raises(HookError, match=said):
        h.save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


# -- text -----------------------------------------------------------------------------------------


def test_long_names_lose_their_beginning() -> None:
    deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = Net(lambda m, x: m.a_name_that_is_longer_than_the_rest(x),
                a_name_that_is_longer_than_the_rest=deep)  # fmt: skip
    other = broken(model, "a_name_that_is_longer_than_the_rest.1.bias")

    text = compare_models(model, other, X, isolate=True).text(72)

    assert "_rest.1 " in text
    assert max(map(len, text.splitlines()[1:])) <= 72
