"""What a summary prints keeps to its width, loses no column at 80, and does nothing to a screen."""

import re
import unicodedata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.inspection import module_summary, summary

NASTY = [
    "a\x1b[31mred",
    "line\nbreak",
    "tab\tcr\rnul\x00",
    "right\u202eto left\u2066",
    "c1\x9b31m",
    "half\ud800",
    "sep\u2028\u2029",
    "<i>&",
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
def test_names_do_nothing_to_a_screen_or_a_page_and_keep_to_the_width(name: str) -> None:
    net, x = named(name), torch.ones(2, 3)
    opt = torch.optim.SGD([{"params": list(net.parameters())[:1], "name": name, "lr": 0.1}])

    s = summary(net, x, opt=opt)
    fastai = module_summary(SimpleNamespace(model=net), x)
    with pytest.raises(RuntimeError) as error:
        summary(net, torch.ones(2, 9))

    assert name in s
    texts = [str(s), s.text(width=80), s.html(), fastai, "".join(error.value.__notes__)]
    assert not any(acting(text) for text in texts)
    assert "<i>&" not in s.html().partition("</style>")[2]
    table = s.text(width=80).split("─\n")
    assert all(len(line) <= 80 for part in table[:2] for line in part.splitlines())
    assert all(len(text) < 100_000 for text in texts[:3])
    assert max(map(len, s.text(width=80).splitlines())) < 2000


class Wide(nn.Module):
    """Long names, deep, structured outputs, billions of parameters."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.query_key_value_projection = nn.Linear(40_000, 400_000)
        self.conditional_attention_block = Wide(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        inner = self.conditional_attention_block(x)
        return {"last_hidden_state": self.query_key_value_projection(x), "inner": (inner, x)}


def test_eighty_columns_drop_none() -> None:
    with torch.device("meta"):
        net, x = Wide(9), torch.ones(2, 3, 40_000)

    text = summary(net, x).text(width=80)

    assert "Not shown" not in text
    head = next(line for line in text.splitlines() if line.startswith("Layer"))
    assert head.split() == ["Layer", "Type", "Output", "Params", "Train", "MACs", "Saved"]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "query_k" in text
    assert "16,000,400,000  ✓" in text  # numbers are never cut


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))


def test_html_shows_the_totals_of_containers_and_of_folds() -> None:
    html = summary(net(), torch.ones(2, 4)).html(columns=["params", "macs"])

    _, model, first, layer, _, fold, *_ = [
        re.sub(r"<[^>]*>", " ", part).split() for part in html.split('<span class="l"')[1:]
    ]
    assert model[-2:] == ["60", "96"]
    assert first[-2:] == ["20", "32"]
    assert fold[-2:] == ["40", "64"]
    assert layer[-2:] == ["20", "32"]
