"""Two models side by side: where they begin to differ, and that nothing of theirs is changed."""

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit import compare_models, hook_outputs, select

from hookkit.comparing.measures import difference
from hookkit.errors import ArgumentError, OptionError, SelectionError


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), inner,
        nn.Linear(16, 4),
    )  # fmt: skip


def nudged(model: nn.Module, *names: str) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).flatten()[0] += 0.5
    return other


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "4.0.weight", "5.bias"])
def test_the_layer_with_another_weight_is_the_first(name: str) -> None:
    model = net()

    found = compare_models(model, nudged(model, name), X)

    assert found.first is not None
    assert found.first.name == name.rpartition(".")[0]
    assert [r.name for r in found] == ["0", "1", "2", "3", "4.0", "4.1", "4", "5", ""]


def test_isolated_layers_show_their_own_error_behind_another_one() -> None:
    model = net()

    found = compare_models(model, nudged(model, "0.weight", "4.0.weight"), X, isolate=True)

    assert [r.name for r in found.different] == ["0", "4.0"]
    (behind,) = found["1"]
    assert (behind.own_rel, behind.own_different) == (0.0, 0)
    assert behind.rel > 0.01
    assert "9 differ, 2 by their own error, first 0 Linear" in found.headline


def test_errors_that_only_add_up_are_no_layers_own() -> None:
    class Scale(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(by, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.by * x

    a, b = (nn.Sequential(*(Scale(by) for _ in range(30))).double() for by in (1.0, 1.0 + 1e-6))
    x = torch.full((4,), 100.0, dtype=torch.float64)

    found = compare_models(a, b, x, rtol=1.3e-6, atol=0, isolate=True)

    assert found.first is None
    assert "differ, none by itself: small errors add up" in found.headline
    assert compare_models(a, b, x, rtol=1.3e-6, atol=0).first is not None


def test_figures_are_those_of_float64() -> None:
    model = net().eval()
    other = nudged(model, "0.weight")
    a, b = (m[0](X).detach().double() for m in (model, other))

    row = compare_models(model, other, X).first

    assert row is not None
    apart = (a - b).abs()
    assert row.max_abs == pytest.approx(float(apart.max()))
    assert row.rel == pytest.approx(float(apart.norm() / a.norm()))
    assert row.cosine == pytest.approx(float(torch.cosine_similarity(a.ravel(), b.ravel(), dim=0)))
    assert row.n_different == int((apart > 1e-5 + 1.3e-6 * a.abs()).sum())
    assert (row.type, row.shape, row.dtype, row.n) == ("Linear", (5, 16), "float32", 80)


@pytest.mark.parametrize(
    ("a", "b", "max_abs", "rel", "n_different"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0, 0.0, 0),
        ([1.0, math.inf], [1.0, math.inf], 0.0, 0.0, 0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf, math.inf, 1),
        ([1.0, 2.0], [1.0, math.nan], math.inf, math.inf, 1),
        ([0.0, 0.0], [0.0, 3.0], 3.0, math.inf, 1),
        ([0.0], [0.0], 0.0, 0.0, 0),
        ([], [], 0.0, 0.0, 0),
    ],
)
def test_what_is_not_finite_or_zero_is_compared(
    a: list[float], b: list[float], max_abs: float, rel: float, n_different: int
) -> None:
    found = difference(torch.tensor(a), torch.tensor(b), 0.0, 0.0)

    assert (found.max_abs, found.rel, found.n_different) == (max_abs, rel, n_different)


def test_chunks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(1000, dtype=torch.complex64), torch.randn(1000, dtype=torch.complex64)
    whole = difference(a, b, 1e-3, 1e-3)

    monkeypatch.setattr("hookkit.comparing.measures._CHUNK", 7)

    assert difference(a, b, 1e-3, 1e-3) == pytest.approx(whole)


def test_gradients_of_outputs_and_parameters_are_compared() -> None:
    model = net().eval()
    other = copy.deepcopy(model)
    other[5].weight.register_hook(lambda grad: 2 * grad)  # right outputs, a wrong gradient
    before = [p.grad for m in (model, other) for p in m.parameters()]

    found = compare_models(model, other, X, grads=True, loss=lambda out: out.square().sum())

    assert [(r.name, r.what) for r in found.different] == [("5.weight", "param_grad")]
    assert {r.what for r in found} == {"output", "grad", "param_grad"}
    assert [p.grad for m in (model, other) for p in m.parameters()] == before
    out = model(X)
    out.square().sum().backward()
    assert model[5].weight.grad is not None
    (row,) = found["5.weight"]
    assert row.max_abs == pytest.approx(float(model[5].weight.grad.abs().max()), rel=1e-5)


def test_a_port_with_other_names_is_paired() -> None:
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
    found = compare_models(model, Port().eval(), X, names=names)

    assert found.first is None
    assert len(found) == 9
    assert found["4.1"][0].other_name == "blocks.0.1"
    assert found.unpaired == ("stem (second only)",)


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ({"9": "0"}, 'first model is called "9". Nearest: .* Give names'),
        ({"0": "stem"}, 'second model is called "stem". Nearest: .* Give names'),
        ({"": "stack"}, 'second model is called "stack"'),
        ({"4.*": "stem.*"}, r'second model is called "stem\.\*"'),
    ],
)
def test_names_that_match_nothing_are_refused(names: dict[str, str], match: str) -> None:
    with pytest.raises(SelectionError, match=match):
        compare_models(net(), net(), X, names=names)


def test_a_comparison_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    paths = []
    for name in ("a", "b"):
        port = nn.ModuleDict({name: nn.ReLU()})
        with hook_outputs(select(port, name)) as h:
            port[name](X)
        paths.append(h.save(tmp_path / f"{name}.safetensors"))
    match = r"nothing was compared.* The first has 'a', the second 'b'\. Give names="

    with pytest.raises(SelectionError, match=match):
        compare_models(*paths)
    with pytest.raises(SelectionError, match=r"The first has 'a', the second '0'"):
        compare_models(paths[0], nn.Sequential(nn.ReLU()), X)
    assert compare_models(*paths, names={"a": "b"}).first is None
    assert main([*map(str, paths)]) == 1


def test_another_dtype_has_the_looser_tolerance() -> None:
    model = nn.Linear(8, 4)
    model.weight.data.fill_(0.25)
    model.bias.data.fill_(1.0)

    x = torch.ones(2, 8)
    found = compare_models(model, copy.deepcopy(model).bfloat16(), x * 1.001)

    assert found.first is None
    assert found[0].rel > 1e-5
    assert compare_models(model, copy.deepcopy(model).bfloat16(), x * 1.001, rtol=0).first


def test_modes_are_compared_from_one_random_state() -> None:
    model = net()
    evaluated = copy.deepcopy(model).eval()
    state = torch.get_rng_state()

    found = compare_models(model, evaluated, X)

    assert found.first is not None
    assert found.first.name == "1"
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, evaluated.training) == (True, False)


def test_shapes_calls_and_layers_that_differ_are_named() -> None:
    class Twice(nn.Module):
        def __init__(self, n: int, out: int) -> None:
            super().__init__()
            self.lin, self.head, self.n = nn.Linear(8, 8), nn.Linear(8, out), n

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.n):
                x = self.lin(x)
            return self.head(x)

    a = Twice(2, 3)
    b = Twice(3, 4)
    b.lin = a.lin
    found = compare_models(a, b, X)

    assert [(r.name, r.call) for r in found][:2] == [("lin", 0), ("lin", 1)]
    assert found.first is not None
    assert found.first.name == "head"
    assert found.first.problem == "5×4 in the second"
    assert found.unpaired == ("lin call 2 (second only)",)
    assert "lin call 2 (second only)" in str(found)


def test_of_a_compiled_model_the_result_is_compared() -> None:
    model = net().eval()
    other = nudged(model, "5.bias")
    other.compile(backend="eager")

    found = compare_models(model, other, X)

    assert [r.name for r in found] == [""]
    assert found.first is not None
    assert "The second model is compiled" in str(found)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is:DeprecationWarning")
def test_of_a_scripted_model_the_result_is_compared() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    same, other = torch.jit.script(model), torch.jit.script(nudged(model, "0.bias"))

    for a, b in ((model, other), (other, model), (same, other)):
        found = compare_models(a, b, X)
        assert found.first is not None
        assert [r.name for r in found] == [""]
    assert compare_models(model, same, X).first is None


def test_files_take_the_place_of_models(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Sequential(nn.LSTM(8, 4), nn.Identity())
    other = nudged(model, "0.bias_hh_l0")
    paths = []
    for i, m in enumerate((model, other)):
        with hook_outputs(select(m, "0", ""), keep="all") as h:
            m(X)
            m(2 * X)
        paths.append(h.save(tmp_path / f"{i}.safetensors"))

    both = compare_models(*paths)
    live = compare_models(paths[0], other, X)

    assert [(r.name, r.call) for r in both][:4] == [
        ("0[0]", 0),
        ("0[1][0]", 0),
        ("0[1][1]", 0),
        ("0[0]", 1),
    ]
    assert both.first is not None
    assert (both.first.name, both.first.type) == ("0[0]", "LSTM")
    assert live.first is not None
    assert live.first.name == both.first.name
    assert any("call 1 (first only)" in text for text in live.unpaired)


def test_the_command_says_by_its_exit_code_whether_files_agree(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = net().eval()
    paths = []
    for i, m in enumerate((model, nudged(model, "5.bias"))):
        with hook_outputs(select(m)) as h:
            m(X)
        paths.append(str(h.save(tmp_path / f"{i}.safetensors")))

    def run(*args: str) -> Any:
        command = [sys.executable, "-m", "hookkit", "compare", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    same, other, missing = run(paths[0], paths[0]), run(*paths), run(paths[0], "none")
    assert (same.returncode, other.returncode, missing.returncode) == (0, 1, 2)
    assert "first 5 Linear" in other.stdout
    assert "none cannot be read" in missing.stderr


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: compare_models(m, 3, X), ArgumentError, "Give two models, or files"),
        (lambda m: compare_models(m, m, X, rtol=-1), OptionError, "rtol"),
        (lambda m: compare_models(m, m, X, grads="yes"), ArgumentError, "grads"),
        (lambda m: compare_models(m, m, X, modules="8"), SelectionError, '"8"'),
        (lambda m: compare_models(m, m, X, names=["0"]), OptionError, "is no dict"),
        (lambda m: compare_models(m, m, X, names={"*": "a"}), OptionError, "as many of them"),
        (lambda m: compare_models(m, m.to("meta"), X), ArgumentError, "without values"),
        (lambda m: compare_models(m, "no.safetensors", X), OptionError, "cannot be read"),
        (lambda m: compare_models(nn.ReLU(), Detached(), X, grads=True), ArgumentError, "gradient"),
    ],
)
def test_bad_input_gets_a_clear_error(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call(net())


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_an_error_of_a_model_says_which_one() -> None:
    with pytest.raises(RuntimeError) as error:
        compare_models(net(), nn.Linear(3, 3), X)

    assert "compare_models: raised by the second model" in error.value.__notes__


def test_text_html_frame_and_picture_show_the_first_difference() -> None:
    pd, plt = pytest.importorskip("pandas"), pytest.importorskip("matplotlib.pyplot")
    model = net()

    found = compare_models(model, nudged(model, "4.0.weight"), X, isolate=True)

    assert "first 4.0 Linear (own error" in str(found)
    assert "→ 4.0 Linear" in found.text(80)
    assert "4.0 Linear" in found._repr_html_()
    frame = found.to_df()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["name"]) == [r.name for r in found]
    ax = found.plot()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "error", "own error, if any", "first beyond the tolerance",
    ]  # fmt: skip
    plt.close("all")
