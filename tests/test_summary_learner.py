"""fastai's layout, to the character, and a Learner's own view; nothing of the learner moves."""

import pickle
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookkit.errors import ArgumentError, ModelRunError
from hookkit.inspection import layer_info, learner_summary, module_summary

GOLDEN = Path(__file__).parent / "golden"


def SGD(*args: Any, **kwargs: Any) -> None:
    """Stands for the optimizer function that fastai's text names."""


class Loss:
    def __repr__(self) -> str:
        return "FlattenedLoss of MSELoss()"


def callback(name: str, order: int) -> Any:
    return type(name, (), {"order": order})()


def learner(model: nn.Module, *batch: Tensor, **more: Any) -> SimpleNamespace:
    """All that the summary reads of a Learner, its callbacks out of order."""
    train = more.pop("train", None)
    if train is None:
        train = DataLoader(TensorDataset(*batch), batch_size=len(batch[0]))
    cbs = [
        ("ProgressCallback", 60),
        ("TrainEvalCallback", -10),
        ("Recorder", 50),
        ("CastToTensor", 9),
    ]
    given: dict[str, Any] = {
        "model": model,
        "dls": SimpleNamespace(train=train),
        "opt": None,
        "opt_func": partial(SGD, mom=0.9),
        "loss_func": Loss(),
        "cbs": [callback(*cb) for cb in cbs],
    }
    return SimpleNamespace(**(given | more))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.BatchNorm1d(50), nn.Linear(50, 1))


def conv(ni: int, nf: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(ni, nf, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(nf), nn.ReLU())


def conv_net() -> nn.Sequential:
    body = (conv(3, 16), conv(16, 32, 2), conv(32, 32))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def golden(name: str) -> str:
    return (GOLDEN / f"fastai_summary_{name}.txt").read_text().rstrip("\n")


@pytest.mark.parametrize("name", ["mlp", "mlp_after_fit", "conv"])
def test_it_reads_as_in_fastai(name: str) -> None:
    net = conv_net() if name == "conv" else mlp()
    batch = (torch.randn(8, 3, 32, 32) if name == "conv" else torch.randn(16, 1)), torch.zeros(16)
    more: dict[str, Any] = {"opt_func": SGD, "loss_func": nn.CrossEntropyLoss()}
    if name != "conv":
        more = {} if name == "mlp" else {"opt": torch.optim.SGD(net.parameters(), 0.1)}

    text = learner_summary(learner(net, train=[batch], **more))

    assert re.sub(r"0x[0-9a-f]+", "0x...", text) == golden(name)


def test_the_text_shows_unquoted_and_carries_its_summary() -> None:
    text = learner_summary(learner(mlp(), torch.randn(16, 1), torch.randn(16, 1)))

    assert isinstance(text, str)
    assert repr(text) == str(text)
    assert text.summary.n_params == 251
    assert text.summary.macs == 16 * 100
    assert text._repr_html_() == text.summary.html()
    again = pickle.loads(pickle.dumps(text))
    assert (repr(again), again.summary.n_params) == (text, 251)


def test_layer_info_is_for_one_sample() -> None:
    assert layer_info(learner(mlp(), torch.ones(1)), torch.randn(16, 1)) == [
        ("Linear", 100, True, [1, 50], False),
        ("ReLU", "", "", [1, 50], True),
        ("BatchNorm1d", 100, True, [1, 50], True),
        ("Linear", 51, True, [1, 1], False),
    ]


def test_totals_are_right_where_fastai_misses_them() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.scale = nn.Parameter(torch.ones(5))
            self.head = nn.Linear(4, 4).requires_grad_(False)
            self.unused = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0]) * self.scale.sum()

    learn = SimpleNamespace(model=Odd())
    text = module_summary(learn, torch.randn(2, 7, 3))

    n = sum(p.numel() for p in learn.model.parameters())
    assert f"Total params: {n}\n" in text
    assert f"Total trainable params: {n - 20}\n" in text
    assert "Total non-trainable params: 20\n" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["Parameter", "5", "True"] in rows
    assert ["Linear", "not", "called", "2", "True"] in rows
    assert ["Linear", "20", "False"] in rows


def test_long_and_nested_shapes_are_not_cut() -> None:
    text = module_summary(SimpleNamespace(model=nn.LSTM(3, 4)), torch.randn(100, 1028, 3))

    assert "['100 x 1028 x 4', \"['1 x 1028 x 4', '1 x 1028 x 4']\"]" in text


def test_a_frozen_body_is_shown_by_group() -> None:
    net = conv_net()
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    groups = [{"params": net[:2].parameters(), "lr": 1e-5}, {"params": net[2:].parameters()}]
    opt = torch.optim.Adam(groups, lr=1e-3)
    learn = learner(net, torch.randn(4, 3, 8, 8), torch.zeros(4), opt=opt, frozen_idx=1)

    text = learner_summary(learn)

    assert "Model frozen up to parameter group #1\n" in text
    rich = text.summary.text(width=120)
    assert "group 0: frozen (5,136) · lr 1e-05 · weight_decay 0" in rich
    assert "group 1: 9,610 of 9,610 trainable · lr 0.001" in rich
    assert "Optimizer Adam   state 76.9 kB (after the first step)" in rich
    assert "Callbacks TrainEvalCallback, CastToTensor, Recorder, ProgressCallback" in rich

    net(torch.randn(4, 3, 8, 8)).sum().backward()
    opt.step()
    held = sum(t.nbytes for state in opt.state.values() for t in state.values())
    known = learner_summary(learn).summary.optimizer
    assert known is not None
    assert known["state_bytes"] == held


class Counting(IterableDataset):
    def __iter__(self) -> Any:
        yield from ((torch.ones(3), 0.0) for _ in range(4))


@pytest.mark.parametrize(
    "train",
    [
        DataLoader(Counting(), 2),
        DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4)), batch_size=None),
        [(torch.ones(2, 3), torch.ones(2))],
        [torch.ones(2, 3)],
    ],
    ids=["iterable", "unbatched", "list", "inputs only"],
)
def test_any_loader_will_do(train: Any) -> None:
    assert "Total params: 8\n" in learner_summary(learner(nn.Linear(3, 2), train=train))


def test_a_model_in_evaluation_is_seen_as_it_trains_and_stays_so() -> None:
    net = mlp().eval()
    text = learner_summary(learner(net, torch.randn(16, 1), torch.randn(16, 1)))

    assert (
        text.summary.saved_bytes
        == module_summary(SimpleNamespace(model=mlp()), torch.randn(16, 1)).summary.saved_bytes
    )
    assert not any(m.training for m in net.modules())


@pytest.mark.parametrize("f", [module_summary, layer_info])
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ((nn.Linear(2, 3), torch.ones(1, 2)), "Linear and 1 inputs"),
        ((SimpleNamespace(model=nn.Linear(2, 3)),), "SimpleNamespace and 0 inputs"),
    ],
)
def test_a_model_in_the_place_of_the_learner_and_no_inputs_get_the_cure(
    f: Any, wrong: Any, found: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"found {found}. Write {f.__name__}\(learn, x\), or"):
        f(*wrong)


def test_without_data_there_are_two_cures() -> None:
    with pytest.raises(ModelRunError, match=r"no data. Make it with DataLoaders.*module_summary"):
        learner_summary(SimpleNamespace(model=nn.Linear(2, 3), dls=None))


def test_a_batch_that_is_a_mapping_goes_in_by_keyword() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.fc(x) * mask
            return y

    batch = {"x": torch.ones(4, 3), "mask": torch.ones(4, 1)}
    text = learner_summary(learner(Net(), train=[batch]))

    assert text.startswith("Net (Input shape: ['4 x 3', '4 x 1'])")
    assert "Total params: 8" in text
