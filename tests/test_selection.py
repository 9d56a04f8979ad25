"""select, leaf_modules, unwrap: which modules, under which names, and what an error says."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.hooks.selection import leaf_modules, select, unwrap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.attn(h, h, h)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.lstm = nn.LSTM(4, 4)
        self.head1 = nn.Linear(4, 2)
        self.head2 = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head1(self.lstm(x)[0]) + self.head2(x)


@pytest.fixture
def net() -> Net:
    return Net()


MLPS = ["blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"]


# --- names and globs


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("stem", ["stem"]),
        ("blocks.1.mlp.0", ["blocks.1.mlp.0"]),
        ("blocks.*.mlp", MLPS),
        ("*", ["stem", "lstm", "head1", "head2"]),
        ("head?", ["head1", "head2"]),
        ("head[2-9]", ["head2"]),
        ("head[!2]", ["head1"]),
        ("head{1,2}", ["head1", "head2"]),
        ("head{2,1}", ["head2", "head1"]),
        ("blocks.[01].mlp", MLPS[:2]),
        ("**.mlp", MLPS),
        ("**.norm", ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]),
        ("blocks.1.mlp.**", ["blocks.1.mlp", *(f"blocks.1.mlp.{i}" for i in range(3))]),
        ("blocks.**.0", ["blocks.0", "blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.2.mlp.0"]),
        ("blocks.{0,2}.mlp.[02]", [f"blocks.{i}.mlp.{j}" for i in (0, 2) for j in (0, 2)]),
        ("", [""]),
        (re.compile(r"\.mlp$"), MLPS),  # searched in the names
        (nn.LayerNorm, [f"blocks.{i}.norm" for i in range(3)]),
        (Net, [""]),  # of a class the root too
        (lambda n, m: "mlp" in n and getattr(m, "out_features", 0) == 8, [f"{m}.0" for m in MLPS]),
    ],
)
def test_names_globs_and_other_selectors(net: Net, what: Any, names: list[str]) -> None:
    chosen = select(net, what)

    assert list(chosen) == names
    assert all(chosen[name] is net.get_submodule(name) for name in names)


def test_no_letter_of_a_glob_is_a_dot() -> None:
    net = nn.ModuleDict({"conv": nn.ModuleList([nn.ReLU(), nn.ReLU()]), "conv10": nn.Tanh()})

    assert list(select(net, "conv??", "conv[!x]?", "conv[.-9]?")) == ["conv10"]
    with pytest.raises(SelectionError):
        select(net, "conv?0?")


def test_characters_of_a_glob_are_themselves_but_for_a_range_and_an_exclamation_mark() -> None:
    net = nn.ModuleDict({"a": nn.ReLU(), "^": nn.ReLU(), "!": nn.ReLU(), "b[": nn.ReLU()})

    assert list(select(net, "[^a]")) == ["a", "^"]
    assert list(select(net, "[!]")) == ["!"]
    assert list(select(net, "b[[]")) == ["b["]
    with pytest.raises(SelectionError, match=r'the glob "\[b-a\]" cannot be read: bad char'):
        select(net, "[b-a]")


def test_keys_with_quotes_and_brackets() -> None:
    net = nn.ModuleDict({"it's": nn.Identity(), "a[0]": nn.ReLU(), 'b"': nn.ReLU()})

    assert list(select(net, "it's", "a[0]", 'b"')) == ["it's", "a[0]", 'b"']
    chosen = select(net, "it's[\"it's\"]", "b\"['b\"']")
    assert [chosen.path(name) for name in chosen] == ['["it\'s"]', "['b\"']"]


def test_a_name_that_exists_is_a_name_whatever_its_characters() -> None:
    odd = nn.ModuleDict({"conv*": nn.Linear(2, 2), "attn[0]": nn.Linear(2, 2), "attn": nn.ReLU()})

    assert list(select(odd, "conv*", "attn[0]")) == ["conv*", "attn[0]"]
    assert select(odd, "attn[0]").path("attn[0]") == ""


def test_without_a_selector_every_module_that_runs_but_the_root_is_selected(net: Net) -> None:
    names = [name for name, _ in net.named_modules()][1:]
    assert list(select(net)) == [n for n in names if n != "blocks" and "out_proj" not in n]
    assert list(select(nn.Linear(2, 2))) == [""]


def test_what_never_runs_is_selected_by_name_or_if_nothing_else_matches(net: Net) -> None:
    assert "blocks.0.attn.out_proj" not in select(net, nn.Linear)
    assert list(select(net, "blocks", "blocks.0.attn.out_proj")) == [
        "blocks",
        "blocks.0.attn.out_proj",
    ]
    assert list(select(net, nn.ModuleList)) == list(select(net, "bl*")) == ["blocks"]


# --- the other selectors


def test_modules_get_their_names(net: Net) -> None:
    assert list(select(net, net.head2, net.blocks[0].mlp)) == ["head2", "blocks.0.mlp"]


def test_a_module_list_is_its_entries_and_a_sequential_is_itself(net: Net) -> None:
    assert list(select(net, net.blocks)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(select(net, net.blocks[0].mlp)) == ["blocks.0.mlp"]


def test_lists_nest_and_generators_work(net: Net) -> None:
    chosen = select(net, ["head1", [nn.LSTM, (net.stem,)]], (b.mlp for b in net.blocks))

    assert list(chosen) == ["head1", "lstm", "stem", *MLPS]


def test_a_dict_renames(net: Net) -> None:
    chosen = select(net, {"blocks.0.mlp": "h", net.head1: "out", nn.LSTM: "rnn"}, "stem")

    assert list(chosen) == ["h", "out", "rnn", "stem"]
    assert chosen["h"] is net.blocks[0].mlp
    assert chosen.place("h") == ("blocks.0.mlp", "")


def test_a_selection_is_a_selector(net: Net) -> None:
    first = select(net, {"head1": "h"}, "lstm[0]")

    again = select(net, first, "stem", "lstm[0]")

    assert list(again) == ["h", "lstm[0]", "stem"]
    assert again.path("lstm[0]") == "[0]"


# --- paths into an output


@pytest.mark.parametrize(
    ("what", "name", "path"),
    [
        ("blocks.0.attn[0]", "blocks.0.attn", "[0]"),
        ("lstm[1][0]", "lstm", "[1][0]"),
        ("lstm[-1]", "lstm", "[-1]"),
        ("lstm", "lstm", ""),
        ("blocks.1['logits']", "blocks.1", "['logits']"),
        ('blocks.1["logits"][0]', "blocks.1", "['logits'][0]"),
        ("[0]", "", "[0]"),
    ],
)
def test_a_path_into_the_output(net: Net, what: str, name: str, path: str) -> None:
    chosen = select(net, what)

    (key,) = chosen
    assert chosen.path(key) == path
    assert chosen.place(key) == (name, path)


def test_a_path_goes_with_globs_and_dicts(net: Net) -> None:
    chosen = select(net, "blocks.*.attn[0]", {"lstm[0]": "h"})

    assert list(chosen) == [*(f"blocks.{i}.attn[0]" for i in range(3)), "h"]
    assert [chosen.path(name) for name in chosen] == ["[0]"] * 4


# --- shared modules, cycles, wrappers, odd modules


def test_a_pattern_gives_a_shared_module_once() -> None:
    shared = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(2, 2)})

    assert list(select(model)) == ["a", "a.0", "c"]
    assert list(select(model, "b.*")) == ["b.0"]
    assert list(select(model, "b", "*")) == ["b", "c"]
    assert list(select(model, re.compile("^b$"))) == ["b"]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        (["b", "c", "a"], ["b", "c", "a"]),
        ([["a", "b"], "c"], ["a", "b", "c"]),
        (["{a,b}"], ["a", "b"]),
        (["a.0", "b.0"], ["a.0", "b.0"]),
        (["a[0]", "b[0]"], ["a[0]", "b[0]"]),
        ([Block, "b.0"], ["a.0", "b.0"]),
        (["b.0", Block], ["b.0"]),
        (["a", "a"], ["a"]),
        ([{"b": "first"}, "b", "a"], ["first", "b", "a"]),
        (["module.b", "module.a"], ["b", "a"]),
    ],
)
def test_every_given_name_has_its_entry_in_order(what: Any, names: list[str]) -> None:
    shared = nn.Sequential(Block())
    model = nn.DataParallel(nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(2, 2)}))

    chosen = select(model, *what)

    assert list(chosen) == names
    assert all(chosen[name] in (shared, shared[0], model.module["c"]) for name in names)


def test_names_are_those_of_the_wrapped_model(net: Net) -> None:
    wrapped = nn.DataParallel(torch.compile(net, backend="eager"))  # type: ignore[arg-type]

    assert unwrap(wrapped) is net
    assert list(select(wrapped)) == list(select(net))
    assert list(select(wrapped, "module._orig_mod.stem", "**.mlp")) == ["stem", *MLPS]
    assert list(select(net, "module.stem", "_orig_mod.head1")) == ["stem", "head1"]
    assert list(select(wrapped, net)) == [""]


def test_module_at_the_end_of_a_name_is_a_wrappers_or_a_slip(net: Net) -> None:
    net.stem = nn.DataParallel(net.stem)

    assert list(select(nn.DataParallel(net), "module", "stem.module")) == ["", "stem"]
    for slip in ("module", "blocks.0.module", "module.module", "lstm.module"):
        with pytest.raises(SelectionError, match=f'no module matches "{slip}"'):
            select(net, slip)


def test_modules_that_are_shared_inside_shared_ones_are_walked_once() -> None:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(40):  # 2 to the power of 40 names
        model = nn.Sequential(model, model)
    first = ".".join("0" * 40)

    assert list(select(model, nn.Linear)) == [first]
    assert list(select(model, lambda m: isinstance(m, nn.Linear))) == [first]
    assert len(select(model)) == len(select(model, "**")) == len(select(model, "**.1")) == 40
    assert list(select(model, f"1.{first[2:]}")) == [f"1.{first[2:]}"]


def test_parametrizations_are_selected_only_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    parametrize.register_parametrization(model[0], "weight", nn.Softplus())

    assert list(select(model)) == ["0"]
    assert list(select(model, "**")) == ["0"]
    assert list(leaf_modules(model)) == ["0"]
    name = "0.parametrizations.weight.0"
    assert list(select(model, name)) == [name]
    with pytest.raises(SelectionError):
        select(model, nn.Softplus)


# --- leaf_modules


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_leaf_modules_leaves_out_what_cannot_fire() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    model = nn.ModuleList([nn.ParameterList([]), nn.ModuleDict({"a": nn.ReLU()}), scripted])

    assert list(leaf_modules(model)) == ["1.a"]
    assert list(leaf_modules(nn.Linear(2, 2))) == [""]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_layer_that_quantization_observes_is_a_leaf_and_its_observers_are_none() -> None:
    ao = pytest.importorskip("torch.ao.quantization")
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    net.qconfig = ao.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]

    assert list(leaf_modules(ao.prepare_qat(net))) == ["0", "1", "2", "3"]
    assert list(leaf_modules(ao.MinMaxObserver())) == [""]


# --- Selection


def test_the_repr_of_a_selection(net: Net) -> None:
    assert repr(select(net, "stem")) == "Selection(1 module: 'stem')"
    assert repr(select(net, [])) == "Selection(0 modules)"
    assert repr(select(net)) == (
        "Selection(25 modules: 'stem', 'blocks.0', 'blocks.0.norm', 'blocks.0.attn', …, 'head2')"
    )
    assert str(select(net, {"lstm[0]": "h"}, "blocks.0.attn", "")) == (
        "h              LSTM  = lstm[0]\nblocks.0.attn  MultiheadAttention\n(model)        Net"
    )


# --- what errors say


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "blocks.*.attention",
            'no module matches "blocks.*.attention". Nearest: "blocks.0.attn", "blocks.1.attn", '
            '"blocks.2.attn". print(select(model)) lists all.',
        ),
        ("zzz", 'no module matches "zzz". There are "stem", "blocks", "blocks.0" and '),
        ("blocks.7", 'no module matches "blocks.7". Nearest: "blocks.0", "blocks.1", "blocks.2".'),
        ("attn", 'Nearest: "blocks.0.attn", "blocks.1.attn", "blocks.2.attn".'),
        ("stem.weight", 'no module matches "stem.weight". Nearest: "stem".'),
        (
            "blocks[1]",
            '"blocks" is never called, and has no output. Its entries are modules: "bloc',
        ),
        (re.compile("mpl"), "no module matches re.compile('mpl'). print(select(model)) lists all"),
        (nn.Conv2d, "no module matches Conv2d. print(select(model)) lists all, with their class"),
        (lambda name, module: False, "no module matches <function"),
        (nn.Linear(1, 1), "the Linear given is no module of this Net. A copied, pickled or conv"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_matches_nothing_is_an_error_with_the_names_that_are_near(
    net: Net, what: Any, message: str
) -> None:
    with pytest.raises(SelectionError, match=re.escape(message)):
        select(net, what)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (3, ArgumentError, "select: 3 selects nothing. Give a name, a glob"),
        (None, ArgumentError, "select: None selects nothing"),
        ({"h": nn.ReLU()}, ArgumentError, "the new name of 'h' is a ReLU. Give text"),
        ({"blocks.*.mlp": "h"}, OptionError, 'gives the name "h" to one module, and .* matches 3'),
        ([{"head1": "stem"}, "stem"], OptionError, 'two modules have the name "stem", "head1" and'),
    ],
)
def test_a_selector_that_cannot_be_meant(net: Net, what: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        select(net, what)


# --- against a plain reference


def test_a_selection_of_another_model_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    chosen = select(net, nn.Linear)
    assert list(select(nn.Sequential(net), chosen)) == ["0"]

    with pytest.raises(SelectionError, match="no module of this Sequential"):
        select(copy.deepcopy(net), chosen)
