"""A summary: what it says, how it is drawn, what it refuses. The zoo has its own file."""

import gc
import json
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn
from zoo import entry

from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.inspection import Summary, summary


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.fc = (
            nn.LayerNorm(d),
            nn.Sequential(nn.Linear(d, 4 * d), nn.Linear(4 * d, d)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x))


class Net(nn.Module):
    """Embedding, blocks, a bare parameter, a tied head."""

    def __init__(self, n: int = 3, d: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(d, 20, bias=False)
        self.emb = nn.Embedding(20, d)
        self.pos = nn.Parameter(torch.zeros(1, 5, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ids() -> Tensor:
    return torch.zeros(2, 5, dtype=torch.long)


# the value


def test_a_shared_layer_counts_where_it_is_defined_first_however_deep() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(3, 3)
            self.a, self.b = nn.Sequential(shared), shared

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    s = summary(Net(), torch.ones(2, 3))

    assert (s["a.0"].calls, s["a.0"].macs, s.macs) == (2, 2 * 2 * 9, 2 * 2 * 9)
    assert s["a.0"].notes == ("called 2×",)
    assert s["b"].notes == ("same as a.0",)


def test_saved_bytes_are_what_autograd_keeps() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    s = summary(net, torch.ones(5, 4))

    assert [r.saved_bytes for r in s] == [0, 5 * 4 * 4, 5 * 8 * 4, 0]  # ReLU's result, kept once
    assert summary(net.requires_grad_(False), torch.ones(5, 4)).saved_bytes == 0


def test_what_several_modules_save_counts_for_the_first() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x))  # a saves x, b saves what a returned
            return self.a(h) + self.b(h)  # a saves h first

    s = summary(Net(), torch.ones(2, 4))

    assert (s["a"].saved_bytes, s["b"].saved_bytes) == (2 * 32, 32)


def test_saved_bytes_do_not_hold_what_was_detached() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh().detach())

    s = summary(Detached(), torch.ones(2, 4))

    assert (s["a"].saved_bytes, s["b"].saved_bytes) == (0, 32)


def test_memory_of_a_step_has_gradients_and_the_optimizers_state() -> None:
    net = nn.Linear(4, 8, bias=False)
    opt = torch.optim.Adam(net.parameters())
    s = summary(net, torch.ones(5, 4), opt=opt)

    assert s.step_bytes == 4 * (32 + 32 + 64) + 5 * 4 * 4


def test_rows_are_found_by_name_and_by_a_wrappers_name() -> None:
    s = summary(nn.DataParallel(Net()), ids())

    assert s["module.blocks.1.norm"] is s["blocks.1.norm"]
    assert "blocks.1.norm" in s
    assert s[0] is s[""]


def test_an_unknown_row_is_answered_with_the_nearest() -> None:
    with pytest.raises(SelectionError, match=r'no row "blocks.1.nrom" among .*blocks.1.norm'):
        summary(Net(), ids())["blocks.1.nrom"]


def test_it_is_plain_data_and_survives_json() -> None:
    s = summary(Net(), ids())
    back = json.loads(s.to_json())

    assert back["totals"]["n_params"] == back["n_params"] == s.n_params
    assert [r["name"] for r in back["rows"]] == [r.name for r in s]
    assert back["run"] == "real"
    pytest.importorskip("pandas")
    df = s.to_df()
    assert df["n_params"].sum() == s.n_params
    assert df.loc["head", "notes"] == ("tied → emb.weight",)


def test_it_holds_no_reference_to_the_model() -> None:
    net = Net()
    s = summary(net, ids(), opt=torch.optim.SGD(net.parameters(), 0.1))
    gone = weakref.ref(net), weakref.ref(net.emb.weight)

    del net
    gc.collect()

    assert [r() for r in gone] == [None, None]
    assert s.n_params


# how it ran


def test_inputs_that_autograd_made_and_caches_of_any_class_are_copied() -> None:
    class Store:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor, store: Store) -> Tensor:
            store.seen.append(x)
            return x * 2

    store = Store()
    x = torch.ones(2, requires_grad=True) * 3

    assert summary(Keeps(), x, store).run == "real"
    assert store.seen == []


def test_the_callers_grad_mode_does_not_matter() -> None:
    net, expected = Net(), summary(Net(), ids()).saved_bytes

    for quiet in (torch.no_grad, torch.inference_mode):
        with quiet():
            assert summary(net, ids()).saved_bytes == expected > 0


def test_a_size_means_one_float_image_batch() -> None:
    net = nn.Conv2d(3, 4, 3).bfloat16()

    assert summary(net, (3, 8, 8)).inputs == "1×3×8×8 bfloat16"
    with pytest.raises(OptionError, match="sizes are whole numbers from 1"):
        summary(net, (3, 0, 8))


def test_one_sample_through_batchnorm_falls_back_to_evaluation_and_says_so() -> None:
    s = summary(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (3,))

    assert s["1"].outputs == ("1×4",)
    assert "Run in evaluation mode: in training mode BatchNorm refuses" in str(s)


def test_a_model_on_meta_takes_inputs_from_the_cpu_or_meta() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    assert summary(net, (3, 8, 8)).run == "meta"
    assert summary(net, torch.ones(2, 3, 8, 8, device="meta")).run == "meta"


@pytest.mark.parametrize("warm", [False, True])
def test_compiled_parts_are_seen_whole_and_nothing_is_compiled(warm: bool) -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.compile(nn.Linear(4, 4), backend=backend)
            self.b = nn.Linear(4, 4)
            self.b.compile(backend=backend)
            self.square = torch.compile(lambda x: x @ x.T, backend=backend)

        def forward(self, x: Tensor) -> Any:
            return self.square(self.b(self.a(x)))

    net = torch.compile(Parts(), backend=backend)
    if warm:
        net(torch.ones(2, 4))
    n_compiled = len(compiled)

    s = summary(net, torch.ones(2, 4))

    assert (s.macs, s.run) == (2 * 2 * 4 * 4 + 2 * 4 * 2, "real")
    assert len(compiled) == n_compiled == int(warm)


def test_flex_attention_is_counted_and_runs_on_as_before() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(6, 12, bias=False).requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            q, k, v = self.qkv(x).view(2, 5, 2, 6).transpose(1, 2).split(2, dim=-1)
            return flex(q, k, v)

    net, x = Net(), torch.randn(2, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to be compiled
        s = summary(net, x)
        out = net(x)

    assert (s.macs, s.uncounted) == (2 * 5 * 6 * 12 + 2 * 2 * 5 * 5 * (2 + 2), {})
    assert out.shape == (2, 2, 5, 2)


def test_inputs_of_any_structure_and_names_like_options() -> None:
    class Odd(nn.Module):
        def forward(self, x: dict[str, Tensor], *, depth: Tensor, fold: None = None) -> Tensor:
            return x["a"] + depth

    one = torch.ones(2)

    assert summary(Odd(), {"a": one}, model_kwargs={"depth": one}).inputs == (
        "({'a': 2}, depth=2) float32"
    )


def test_lazy_parameters_that_require_grad_are_not_frozen() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))

    assert "frozen" not in str(summary(lazy))
    assert summary(lazy)["0"].trainable is True

    for p in lazy.parameters():
        p.requires_grad = False
    assert summary(lazy)["0"].trainable is False


# errors


def test_a_failing_layer_is_named_with_what_it_got_under_the_models_own_error() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(9, 4)))

    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes .* \(2x8 and 9x4\)") as e:
        summary(net, torch.ones(2, 4))

    note = e.value.__notes__[-1]
    assert "0      Linear      2×8         40  ✓" in note
    assert "got 2×8, is Linear(in_features=9, out_features=4, bias=True)" in note
    assert n_hooks(net) == 0


def test_a_model_that_differentiates_by_torch_func_gets_the_cure() -> None:
    class Physics(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(torch.func.jacrev(super().forward))(x)

    with pytest.raises(RuntimeError, match="saved tensor hooks") as e:
        summary(Physics(2, 1), torch.ones(5, 2))

    assert "Give summary the module that is differentiated" in e.value.__notes__[0]


def test_an_error_outside_every_layer_marks_the_model() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + {}["missing"]

    with pytest.raises(KeyError, match="missing") as e:
        summary(Outside(), torch.ones(1, 2))

    assert "✗ (itself)" in e.value.__notes__[-1]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: summary(Net), ArgumentError, "the class Net. Call the class: Net(…)."),
        (lambda: summary("net"), ArgumentError, "expected an nn.Module, found the string"),
        (lambda: summary(Net(), ids(), opt=3), ArgumentError, "optimizer, found an int. Give"),
        (lambda: summary(Net(), ids(), depth=-1), OptionError, "depth=-1): Give a whole number"),
        (lambda: summary(Net(), ids(), columns=["mac"]), OptionError, 'no column "mac". There are'),
        (lambda: summary(Net(), ids(), dpeth=2), TypeError, "argument 'dpeth'"),
        (lambda: summary(Net(), ids()).text(columns=["x"]), OptionError, 'no column "x"'),
    ],
)  # fmt: skip
def test_bad_arguments_are_errors_before_anything_runs(
    call: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


# warnings


def test_trainable_parameters_without_a_gradient_are_a_warning() -> None:
    e = entry("unused_heads")
    (warning,) = summary(e.build(), *e.args()).warnings

    assert "4 trainable parameters are not part of the output of this run" in warning
    assert "heads.seg.weight" in warning


def test_parameters_in_no_group_are_a_warning() -> None:
    net = Net(1)
    opt = torch.optim.SGD(net.blocks.parameters(), 0.1)

    (warning,) = summary(net, ids(), opt=opt).warnings

    assert warning == "2 trainable parameters are in no optimizer group: pos, head.weight"


def test_batchnorm_in_evaluation_in_a_model_that_trains_is_a_warning() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    net[1].eval()

    assert summary(net, torch.ones(2, 1, 3, 3)).warnings == (
        "1 BatchNorm layer is in evaluation mode in a model that trains: 1",
    )
    assert summary(net.eval(), torch.ones(2, 1, 3, 3)).warnings == ()


def test_a_layer_of_another_dtype_than_most_is_marked() -> None:
    e = entry("mixed_dtypes")

    _, *lines = summary(e.build(), *e.args()).text(width=100).splitlines()

    marked = [line.split()[0] for line in lines if line.endswith("float32")]
    assert marked == ["norm", "hi"]


# drawing


OF_THE_ZOO = {
    "resnet": "resnetish",
    "gpt": "gpt_like",
    "lstm": "lstm_tuple",
    "unused": "unused_heads",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {},
    "unfolded": {"fold": False},
    "shallow": {"depth": 1},
    "columns": {"columns": ("type", "input", "calls", "params", "bytes")},
}


def drawn(name: str) -> Summary:
    torch.manual_seed(0)
    if name in OF_THE_ZOO:
        e = entry(OF_THE_ZOO[name])
        return summary(e.build(), *e.args())
    return summary(Net()) if name == "no_input" else summary(Net(), ids(), **OPTIONS[name])


@pytest.mark.parametrize("name", [*OF_THE_ZOO, *OPTIONS, "no_input"])
def test_texts_are_as_they_were_looked_at(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"summary_{name}.txt", drawn(name).text(width=100))


@pytest.mark.parametrize("name", ["gpt", "unused"])
def test_html_is_as_it_was_looked_at(name: str, golden: Callable[[str, str], None]) -> None:
    html = drawn(name).html().partition("</style>")[2]
    html = html.replace(", bias=True", "")  # in a LayerNorm's words since torch 2.13
    golden(f"summary_{name}.html", html.replace("<", "\n<").strip())


def test_the_width_is_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    s = summary(Net(), ids())

    assert str(s) == s.text(width=70) == repr(s)


def test_equal_siblings_are_folded_unless_they_differ() -> None:
    net = Net(5)
    assert "0..4  ×5" in summary(net, ids()).text(width=100)

    net.blocks[2].fc[0].weight.requires_grad_(False)
    text = summary(net, ids()).text(width=100)

    assert "0..1  ×2" in text
    assert "3..4  ×2" in text
    assert "  ×5" not in text
    assert "11%" in text  # of 32·8 weights and 32 biases, the weights are frozen: 11 %


def test_names_that_say_something_are_not_folded() -> None:
    net = nn.Sequential()
    for name in ("q", "k", "v", "conv1", "conv2", "conv3"):
        net.add_module(name, nn.Linear(2, 2))

    labels = [line.split()[0] for line in summary(net).text(width=80).splitlines()[3:7]]

    assert labels == ["q", "k", "v", "conv1..conv3"]


# elsewhere


def test_a_model_on_cuda_allocates_what_an_inference_does_and_keeps_its_random_state(
    cuda: torch.device,
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), *(nn.Dropout() for _ in range(200))).to(cuda)
    x = torch.randn(64, 3, 128, 128, device=cuda)
    state, memory = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    s = summary(net, x)

    assert (s.run, s["0"].calls) == ("real", 1)
    assert s.saved_bytes > 2**30
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.cuda.memory_allocated() == memory
    assert torch.cuda.max_memory_allocated() - memory < 2**28
