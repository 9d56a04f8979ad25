"""A summary fails where the model fails, in its words; bad options are errors with the cure."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import entry

from hookkit.errors import ArgumentError, OptionError
from hookkit.summaries import Summary, summary


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(4, 4).double()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.fc(self.conv(x).mean((2, 3)))
            return out


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(4, 4).bfloat16(), torch.randn(2, 4)),
        (mlp(), torch.ones(2, 4, dtype=torch.long)),
        (Double(), torch.randn(2, 4)),
        (nn.Conv1d(2, 2, 1).double(), torch.randn(1, 2, 3)),
        (nn.Embedding(4, 2), torch.tensor([4])),
        (nn.Embedding(4, 2), torch.tensor([-1])),
    ],
    ids=["bfloat16", "ids", "double", "conv", "index", "negative index"],
)
def test_a_model_that_fails_on_types_or_indices_fails_in_its_own_words(
    model: nn.Module, x: Tensor
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as real:
        model(x)

    with pytest.raises(type(real.value)) as seen:
        summary(model, x)

    assert str(seen.value) == str(real.value)


def test_a_second_look_up_is_checked_as_the_first() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.kinds = nn.Embedding(9, 2), nn.Embedding(2, 2)

        def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
            return torch.add(self.words(ids), self.kinds(kinds))

    with pytest.raises(IndexError):
        summary(Two(), torch.tensor([8]), torch.tensor([2]))


def test_autocast_and_good_indices_stay_on_fake_tensors() -> None:
    assert summary(Autocast(), torch.randn(1, 1, 5, 5)).run == "fake"
    assert summary(nn.Embedding(4, 2), torch.tensor([0, 3])).run == "fake"


@pytest.mark.parametrize(
    "view",
    [
        torch.inference_mode()(lambda x: x.view(2, 8).reshape(4, 4).T),
        lambda x: torch.stack([*x.split([1, 3])[1].unbind(0), torch.tensor([2.0]).expand(4)]),
        lambda x: x * torch.tensor(2.0).view(1)[0].item(),
        lambda x: x.clone().view(-1)[2:5].mul_(2),
        lambda x: torch.view_as_real(torch.complex(x, x).conj().T.resolve_conj()),
    ],
    ids=["inference", "several", "constant", "in place", "complex"],
)
def test_views_stay_on_fake_tensors_with_their_true_shape(view: Any) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = view(x)
            return out

    net, x = Net(), torch.ones(4, 4)
    s = summary(net, x)

    assert (s.run, s[""].shape) == ("fake", list(net(x).shape))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_counted_and_says_what_is_unknown() -> None:
    s = summary(torch.jit.script(mlp()), torch.randn(3, 4))

    assert (s.n_params, s.macs, s.rows[0].type) == (58, 3 * (4 * 8 + 8 * 2), "Sequential")
    assert "Scripted modules run as one: shapes and saved bytes inside them are unkn" in str(s)


@pytest.mark.parametrize(
    ("model", "n"),
    [
        (nn.LSTM(4, 3), 1),
        (nn.LSTM(4, 3).requires_grad_(False), 0),
        (nn.LSTM(4, 3, proj_size=2), 0),
        (nn.GRU(4, 3), 0),
    ],
    ids=["lstm", "frozen", "projected", "gru"],
)
def test_an_lstm_says_that_its_workspace_is_not_counted(model: nn.Module, n: int) -> None:
    s = summary(model, torch.ones(5, 2, 4))

    assert (
        s.footnotes == ("The workspace of an LSTM's kernel on CPU is not in the saved bytes.",) * n
    )


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_model_that_differentiates_by_torch_func_runs_without_saved_bytes(real: bool) -> None:
    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            if real and x.sum().item() > 1e9:
                return x
            return torch.func.vmap(torch.func.jacrev(self.f))(x)

    s = summary(Physics(), torch.ones(5, 2))

    assert (s.run, s.output) == ("real" if real else "fake", "5×1×2 float32")
    assert s.footnotes == (
        "torch.func runs in the forward: saved bytes are unknown, and left out of the sums.",
    )
    assert s.macs


def test_a_model_that_gives_no_tensor_has_not_failed() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    seen = summary(Silent(), torch.ones(2))

    assert "✗" not in seen.text() + seen.html()


def test_a_size_works_where_tensors_are_made_on_meta() -> None:
    with torch.device("meta"):
        assert summary(nn.Linear(4, 3), (4,)).output == "1×3 float32"


def test_lazy_parameters_that_require_grad_are_not_frozen() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))

    assert "frozen" not in str(summary(lazy))
    assert summary(lazy)["0"].trainable is True

    for p in lazy.parameters():
        p.requires_grad = False
    assert summary(lazy)["0"].trainable is False


def test_a_dict_has_the_totals_at_its_top_too() -> None:
    plain = summary(mlp(), torch.ones(2, 4)).to_dict()

    names = ("n_params", "n_trainable", "macs", "saved_bytes", "param_bytes", "buffer_bytes")
    assert {n: plain[n] for n in names} == plain["totals"]


@pytest.mark.parametrize("name", ["mlp", "moe_top1"])  # on fake tensors, and for real
def test_macs_that_are_not_counted_are_none_and_not_zero(name: str) -> None:
    e = entry(name)
    net = e.build()
    args = e.args()

    s, full = summary(net, *args, macs=False), summary(net, *args)

    assert (s.macs, s.uncounted, {r.macs for r in s}, {r.total.macs for r in s}) == (
        None, {}, {None}, {None},
    )  # fmt: skip
    assert (s.run, s.saved_bytes, s.step_bytes) == (full.run, full.saved_bytes, full.step_bytes)
    texts = [s.text(width=100), s.text(depth=0), s.html(), s.html(by="saved", depth=1)]
    assert not any("MACs" in text for text in texts)
    assert "saved for backward" in texts[0]
    plain = json.loads(s.to_json())
    assert (plain["macs"], plain["totals"]["macs"], plain["rows"][0]["macs"]) == (None,) * 3
    assert str(s.diff(full)) == str(full.diff(s)) == "no difference"


def test_a_failed_run_without_macs_shows_its_table_without_them() -> None:
    with pytest.raises(RuntimeError) as error:
        summary(mlp(), torch.ones(2, 5), macs=False)

    assert "MACs" not in error.value.__notes__[0]


def test_one_name_is_one_column_and_a_slice_gives_rows() -> None:
    seen = summary(mlp(), torch.ones(2, 4), columns="macs")

    assert seen.text().splitlines()[1].split() == ["Layer", "MACs"]
    assert seen.text(columns="params").splitlines()[1].split() == ["Layer", "Params"]
    assert [r.name for r in seen[1:]] == ["0", "1", "2"]


def uncounted() -> Summary:
    return summary(mlp(), torch.ones(2, 4), macs=False)


class Holder:
    model = mlp()

    def summary(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s: s.text(depth=-1), OptionError, "depth=-1.: Give a whole number from 0"),
        (lambda s: s.html(depth="all"), OptionError, "depth='all'.: Give a whole number"),
        (lambda s: s.text(width=-5), OptionError, "width=-5.: Give a whole number from 1"),
        (lambda s: s.text(columns=[]), OptionError, "columns=\\[\\] draws nothing: give names"),
        (lambda s: s.text(columns=3), ArgumentError, "columns=3: give names of columns"),
        (lambda s: s.top("macs", -1), OptionError, "n=-1.: Give a whole number from 0"),
        (lambda s: s[None], ArgumentError, "s\\[None\\]: give the name of a row"),
        (lambda s: s.diff(3), ArgumentError, "diff: expected a Summary, found an int. Give a S"),
        (lambda s: s.diff(mlp()), ArgumentError, "Give hookkit.summary\\(model, x\\)"),
        (lambda s: summary(mlp(), columns=[]), OptionError, "columns=\\[\\] draws nothing"),
        (lambda s: s.text(depth=True), OptionError, "depth=True.: Give a whole number from 0"),
        (lambda s: s.text(width=80.0), OptionError, "width=80.0.: Give a whole number from 1"),
        (lambda s: s.text(fold="no"), ArgumentError, "Summary.fold='no'.: give True"),
        (lambda s: s.html(fold=2), ArgumentError, "Summary.fold=2.: give True"),
        (lambda s: s.html(columns=["size"]), OptionError, 'no column "size"'),
        (lambda s: s.html(by=3), OptionError, "bars show the share of params, macs, saved"),
        (lambda s: summary(mlp(), macs="no"), ArgumentError, "summary.macs='no'.: give True"),
        (
            lambda s: summary(mlp(), torch.ones(2, 4), macs=False, columns=["params", "macs"]),
            OptionError,
            'column "macs": with macs=False MACs are not counted. Leave one of them out.',
        ),
        (lambda s: uncounted().text(columns="macs"), OptionError, 'column "macs": with macs=Fal'),
        (lambda s: uncounted().html(by="macs"), OptionError, 'html.by="macs".: with macs=False'),
        (lambda s: uncounted().top(), OptionError, 'top.by="macs".: with macs=False MACs are'),
        (lambda s: s.top(3), OptionError, 'top\\(by="3"\\): choose one of n_params'),
        (lambda s: s.top("macs", True), OptionError, "n=True.: Give a whole number from 0"),
        (lambda s: s[True], ArgumentError, "s\\[True\\]: give the name of a row"),
        (lambda s: summary(mlp(), fold="no"), ArgumentError, "summary.fold='no'.: give True"),
        (lambda s: summary(mlp(), fold=None), ArgumentError, "summary.fold=None.: give True"),
        (lambda s: summary(mlp(), depth=True), OptionError, "depth=True.: Give a whole number"),
        (lambda s: summary(mlp(), model_kwargs=[1]), ArgumentError, "kwargs=\\[1\\] is of ty"),
        (lambda s: summary(mlp(), model_kwargs={1: 2}), ArgumentError, "Give a dict of keyword in"),
        (lambda s: summary(mlp(), opt=torch.optim.SGD), ArgumentError, "found the class SGD. Give"),
        (lambda s: summary(Holder()), ArgumentError,
         "found a Holder. It holds a model: use learn.summary\\(\\), or summary\\(learn.model"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_work_is_an_error_with_the_cure(
    call: Callable[[Summary], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(summary(mlp()))


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (((1, 3, 32, 32),), "takes (1, 3, 32, 32) for the size of one sample, and makes a batch of "
         "one of it: (1, 1, 3, 32, 32). Leave the batch dimension out, summary(model, (3, 32, 3"),
        (([1, 3, 32, 32],), "there is no tensor among the inputs. Give the inputs as the model"),
        ((1, 3, 32, 32), "there is no tensor among the inputs. Give the inputs as the model"),
        (("x",), "or the size of one sample, summary(model, (3, 224, 224))"),
    ],
)  # fmt: skip
def test_a_size_where_a_tensor_was_meant_is_explained(args: Any, hint: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as error:
        summary(nn.Sequential(nn.Conv2d(3, 4, 3)), *args)

    assert hint in "".join(error.value.__notes__)


def test_a_model_that_fails_on_tensors_gets_no_hint() -> None:
    with pytest.raises(RuntimeError) as error:
        summary(nn.Linear(3, 4), torch.ones(2, 5))

    assert "hookkit: " not in "".join(error.value.__notes__)
