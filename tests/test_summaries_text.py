"""What a summary prints keeps to its width, loses no column at 80, and does nothing to a screen."""

import dataclasses
import re
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.summaries import layer_info, module_summary, summary
from hookkit.texts import clip, csv_cell, harmless, width

NASTY = [
    "a\x1b[31mred",
    "line\nbreak",
    "tab\tcr\rnul\x00",
    "right\u202eto left\u2066",
    "c1\x9b31m",
    "half\ud800",
    "sep\u2028\u2029",
    "=1+1",
    "n" * 10_000,
    "w" + "\u0301" * 10_000,
]


def named(name: str) -> Any:
    """A model with `name` wherever a user's code can put one."""

    class Layer(nn.Linear):
        def extra_repr(self) -> str:
            return name

        def forward(self, x: Tensor) -> Any:
            return {name: super().forward(x)}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, Layer(3, 4))
            self.unused = Layer(3, 4)
            self.spare = nn.ModuleDict({name: Layer(3, 4)})
            self.tied = Layer(3, 4)
            self.tied.weight = self.spare[name].weight  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Any:
            return getattr(self, name)(x)

    Layer.__name__ = Net.__name__ = name if "\x00" not in name and "\ud800" not in name else "L"
    return Net()


def acting(text: str) -> set[str]:
    """The characters in `text` that act on a screen or turn a line around."""
    bad = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return {c for c in text if unicodedata.category(c) in bad} - {"\n"}


@pytest.mark.parametrize("name", NASTY, ids=lambda n: ascii(n)[:12])
@pytest.mark.filterwarnings("ignore:.*is the name of")
def test_names_do_nothing_to_a_screen_and_keep_to_the_width(name: str) -> None:
    net = named(name)
    opt = torch.optim.SGD([{"params": list(net.parameters())[:1], "name": name, "lr": 0.1}])

    s = summary(net, torch.ones(2, 3), opt=opt)
    texts = [str(s), s.text(width=80), s.html(), str(s.diff(summary(nn.Linear(3, 3))))]

    assert name in s or name == ""
    assert not any(acting(text) for text in texts)
    table = s.text(width=80).split("─\n")
    assert all(width(line) <= 80 for part in table[:2] for line in part.splitlines())
    assert all(len(text) < 100_000 for text in texts)
    assert max(map(len, s.text(width=80).splitlines())) < 2000


@pytest.mark.parametrize("name", NASTY[:6], ids=lambda n: ascii(n)[:12])
def test_fastais_layout_does_nothing_to_a_screen(name: str) -> None:
    class Learn:
        model = named(name)

    text = module_summary(Learn(), torch.ones(2, 3))

    assert not acting(text)
    assert layer_info(Learn(), torch.ones(2, 3))[0][3] == {name: [1, 4]}


@pytest.mark.parametrize("name", NASTY[:6], ids=lambda n: ascii(n)[:12])
def test_the_note_of_an_error_does_nothing_to_a_screen(name: str) -> None:
    with pytest.raises(RuntimeError) as error:
        summary(named(name), torch.ones(2, 9))

    assert not acting("".join(error.value.__notes__))


def test_joined_emoji_and_persian_stay_as_they_are() -> None:
    for text in ("👨‍👩‍👧", "می\u200cخواهم", "卷积", "e\u0301"):
        assert harmless(text) == text


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@x", "'@x"),
        ("\t=1", "\\t=1"),
        ("layer1.0", "layer1.0"),
    ],
)
def test_a_cell_is_no_formula(text: str, cell: str) -> None:
    assert csv_cell(text) == cell


def test_clipping_a_long_name_looks_at_its_beginning_only() -> None:
    assert clip("卷" * 1_000_000, 5) == "卷卷…"


class Wide(nn.Module):
    """Long names, deep, structured outputs, billions of parameters."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.query_key_value_projection = nn.Linear(40_000, 400_000)
        self.conditional_attention_block = Wide(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        inner = self.conditional_attention_block(x)
        return {"last_hidden_state": self.query_key_value_projection(x), "inner": (inner, x)}


@pytest.mark.parametrize("depth", [0, 3, 9])
def test_eighty_columns_drop_none(depth: int) -> None:
    with torch.device("meta"):
        net, x = Wide(depth), torch.ones(2, 3, 40_000)

    text = summary(net, x).text(width=80)

    assert "Not shown" not in text
    head = next(line for line in text.splitlines() if line.startswith("Layer"))
    assert head.split() == ["Layer", "Type", "Output", "Params", "Train", "MACs", "Saved"]
    assert all(width(line) <= 80 for line in text.splitlines())
    assert "query_k" in text


# structured outputs


@dataclasses.dataclass
class BaseModelOutputWithPast:
    last_hidden_state: Tensor
    past_key_values: tuple[tuple[Tensor, Tensor], ...]
    loss: Tensor | None = None


class Outputs(nn.Module):
    """A dataclass in a dict, keys of two columns a character, and a tuple that has grown long."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = nn.Linear(32, 64), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        q = self.query(x)
        past = BaseModelOutputWithPast(q, tuple((x, q) for _ in range(3)))
        return self.head({"出力": past, "hidden_states": [x, x], "attentions": None})


def structured() -> Any:
    return summary(nn.Sequential(Outputs(), nn.Identity()), torch.ones(2, 10, 32))


@pytest.mark.parametrize("n", [100, 80, 60, 40])
def test_a_structured_output_continues_below(n: int, golden: Callable[[str, str], None]) -> None:
    golden(f"summary_structured_{n}.txt", structured().text(width=n))


@pytest.mark.parametrize("n", [*range(30, 130, 7), 1000])
def test_a_structured_output_keeps_to_the_width(n: int) -> None:
    lines = structured().text(width=n).splitlines()

    assert max(map(width, lines)) <= n
    assert n < 66 or not any(line.startswith("Not shown") for line in lines)


@pytest.mark.parametrize("n", [80, 100, 1000])
def test_nothing_of_a_structured_output_is_lost_where_its_words_fit(n: int) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": x, "past": (x, x), "attentions": {"self": x, "cross": None}}

    s = summary(nn.Sequential(nn.Linear(2, 2), Pair()), torch.ones(1, 2), columns=["output"])

    rows = s.text(width=n).split("─\n")[1].splitlines()[1:]
    cell = [row.removeprefix("1").strip() for row in rows if "─" not in row]

    assert " ".join(cell) == s["1"].outputs[0]
    assert all(line.endswith(",") for line in cell[:-1])
    assert len(cell) == 3


@pytest.mark.parametrize("n", range(36, 60))
def test_nothing_of_a_shape_is_lost(n: int) -> None:
    net = nn.Sequential(OrderedDict(vocabulary_projection=nn.Linear(4, 32000), end=nn.Identity()))
    s = summary(net, torch.ones(1, 1024, 4), columns=["output", "params", "saved"])

    lines = s.text(width=n).splitlines()

    header = next(line for line in lines if line.startswith("Layer"))
    at = slice(header.index("Output"), header.index("Params"))
    first = next(i for i, line in enumerate(lines) if line.startswith("voca"))
    last = next(i for i, line in enumerate(lines) if line.startswith("end"))
    cell = "".join(line[at].split()[0] for line in lines[first:last])
    assert cell == "1×1024×32000"
    assert max(map(width, lines)) <= n


def test_html_breaks_a_long_word_of_a_structure_after_a_name() -> None:
    html = structured().html()

    assert "BaseModelOutputWithPast(<wbr>last_hidden_state=2×10×64, past_key_values=((" in html
    assert "&#x27;hidden_…</span></span>" in html
    assert max(map(int, re.findall(r"minmax\((\d+)ch,1fr\)", html))) < 30
    assert '[2×10×32, 2×10×32], &#x27;attentions&#x27;: None}"' in html  # in the tooltip


def test_a_long_structure_ends_in_an_ellipsis() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x] * 60

    net = nn.Sequential(nn.Linear(2, 2), Many())

    rows = summary(net, torch.ones(1, 2)).text(width=80).split("─\n")[1].splitlines()[1:]

    assert [row.strip() for row in rows].index("…") == 5


# the sums of folded blocks


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 2))


class Mixes(nn.Module):
    """A gate beside equal experts, and a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        outs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outs @ self.gate(x).softmax(-1)[..., None])[..., 0]


def mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), *(Mixes() for _ in range(3)), nn.Linear(2, 2))


SUMS = r"×(\d+): (\d+) params(?:, (\d+) MACs)?"


@pytest.mark.parametrize("n", [140, 80, 40])
def test_the_sums_of_folds_add_up_with_the_totals(n: int) -> None:
    s = summary(mixture(), torch.ones(1, 2))

    outer, inner = re.findall(SUMS, s.text(width=n))

    assert (outer[0], inner[0]) == ("3", "3")  # the first expert saves the input of all
    for said, number in [(1, "n_params"), (2, "macs")]:
        unfolded = [getattr(s[name].total, number) for name in ("0", "4")]
        assert sum(unfolded) + int(outer[said]) == getattr(s, number)
        alone = [getattr(s[name].total, number) for name in ("1.gate", "1.experts.0")]
        block = getattr(s["1"], number) + sum(alone) + int(inner[said])
        assert 3 * block == int(outer[said])


def test_html_says_the_sums_of_folds_in_the_same_words() -> None:
    s = summary(mixture(), torch.ones(1, 2))
    words = [m.group() for m in re.finditer(SUMS, s.text(width=100))]

    assert [f'title="{w}">{w[:2]}</span>' in s.html() for w in words] == [True, True]


def test_folds_without_a_run_say_their_parameters_and_empty_ones_nothing() -> None:
    drops = nn.Sequential(*(nn.Dropout() for _ in range(4)))

    assert re.findall(SUMS, summary(mixture()).text(width=100)) == [
        ("3", "240", ""),
        ("4", "68", ""),
    ]
    assert "0..3  ×4" in str(summary(drops, torch.ones(1, 2)))
    assert "×4:" not in summary(drops, torch.ones(1, 2)).text(width=100)


# HTML


class Attends(nn.Module):
    """A container with multiply-accumulates of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) @ self.k(x).T


def page(**options: Any) -> str:
    return summary(Attends(), torch.ones(3, 4)).html(**options).partition("</style>")[2]


def test_html_has_the_columns_that_were_chosen() -> None:
    html = page(columns=["type", "percent", "calls", "dtype"])
    heads = html.partition("</div>")[0]
    same = summary(Attends(), torch.ones(3, 4), columns=("type", "percent", "calls", "dtype"))

    assert [c for c in ("Layer", "Type", "Share", "Calls", "Dtype") if f">{c}<" in heads] == [
        "Layer", "Type", "Share", "Calls", "Dtype",
    ]  # fmt: skip
    assert not any(f">{c}<" in heads for c in ("Output", "Params", "Train", "MACs", "Saved"))
    assert ">50%</span>" in html
    assert same.html().partition("</style>")[2] == html
    assert "share of all" not in html


def test_an_open_container_shows_its_own_share_and_its_total() -> None:
    html = page()

    assert '<span class="o">36<i>Σ 132</i></span><span class="c">132</span>' in html
    assert "<i>Σ 40</i>" in html
    assert "Σ an open container with all inside it" in html


@pytest.mark.parametrize(
    ("by", "said"),
    [("params", "all parameters"), ("macs", "all MACs"), ("saved", "all bytes saved for backward")],
)
def test_bars_are_explained(by: str, said: str) -> None:
    html = page(by=by)

    assert f'<span class="k"></span>share of {said}' in html
    assert html.count('class="w"') == {"params": 3, "macs": 4, "saved": 3}[by]


def test_a_word_has_room_and_is_not_broken() -> None:
    net = nn.Sequential()
    net.add_module("conditional_attention_projection", nn.Linear(2, 2))
    style, _, html = summary(net, torch.ones(1, 2)).html().partition("</style>")

    assert "overflow-wrap" not in style
    assert "--cols:minmax(35ch,2.2fr)" in html
