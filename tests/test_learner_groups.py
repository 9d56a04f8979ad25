"""Parameter groups, learning rates, freezing: plain torch optimizers."""

from typing import Any

import pytest
import torch
from learners import conv_layer, quiet
from torch import nn

from hookkit.testing import mlp, synth_learner
from hookkit.training.groups import make_optimizer, set_hyper


def halves(model: Any) -> list[Any]:
    return [model[0], model[2]]


def two_groups(**kwargs: Any) -> Any:
    return quiet(n_trn=1, n_val=1, model=mlp(1, 4, 1), splitter=halves, **kwargs)


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        (lambda m: list(m.parameters()), [4]),
        (lambda m: m.parameters(), [4]),
        (lambda m: [m[0], m[2]], [2, 2]),
        (lambda m: [list(m[0].parameters()), [m[2].weight]], [2, 1]),
        (lambda m: [{"params": m.parameters(), "momentum": 0.5}], [4]),
    ],
)
def test_a_splitter_gives_parameters_lists_modules_or_dicts(split: Any, sizes: list[int]) -> None:
    opt = make_optimizer(torch.optim.SGD, split(mlp(1, 4, 1)), 0.1)

    assert [len(g["params"]) for g in opt.param_groups] == sizes


def test_rates_and_weight_decay_are_the_learners_or_those_of_one_fit() -> None:
    learn = two_groups(lr=0.25, wd=0.1)

    def groups(key: str) -> list[float]:
        return [group[key] for group in learn.opt.param_groups]

    learn.fit(1, lr=slice(1e-4, 1e-2), wd=0.2)
    assert groups("lr") == pytest.approx([1e-4, 1e-2])
    assert groups("weight_decay") == [0.2, 0.2]
    learn.fit(1)

    assert groups("lr") == [0.25, 0.25]
    assert groups("weight_decay") == [0.1, 0.1]


def test_a_groups_own_weight_decay_holds_in_each_fit_and_its_own_rate_is_refused() -> None:
    def without_decay(model: Any) -> list[Any]:
        return [model[0], {"params": model[2].parameters(), "weight_decay": 0.0}]

    learn = quiet(model=mlp(1, 4, 1), splitter=without_decay, wd=0.1)
    for wd in (None, 0.2):
        learn.fit(1, wd=wd)
        assert [g["weight_decay"] for g in learn.opt.param_groups] == [wd or 0.1, 0.0]


def test_a_rate_held_in_a_tensor_is_filled_in_place() -> None:
    p = nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.1)
    opt = torch.optim.SGD([p], lr=rate)

    set_hyper(opt, "lr", [0.5])

    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


# --- freezing


def trainable(learn: Any) -> list[bool]:
    return [p.requires_grad for p in learn.model.parameters()]


def test_freezing_goes_by_group_and_frozen_weights_do_not_move() -> None:
    learn = two_groups(wd=0.1)

    learn.freeze_to(2)
    assert (trainable(learn), learn.frozen_idx) == ([False] * 4, 2)
    learn.unfreeze()
    assert (trainable(learn), learn.frozen_idx) == ([True] * 4, 0)
    learn.fit(1)
    learn.freeze()
    assert (trainable(learn), learn.frozen_idx) == ([False, False, True, True], 1)

    before = [p.clone() for p in learn.model.parameters()]
    learn.fit(2)
    same = [p.equal(q) for p, q in zip(before, learn.model.parameters(), strict=True)]
    assert same == [True, True, False, False]


@pytest.mark.parametrize(
    ("train_bn", "expected"), [(True, [False, True, True]), (False, [False] * 3)]
)
def test_batch_norms_in_frozen_groups_learn_by_default(
    train_bn: bool, expected: list[bool]
) -> None:
    model = nn.Sequential(conv_layer(1, 2), nn.Conv2d(2, 1, 1))
    learn = synth_learner(model=model, splitter=list, train_bn=train_bn)

    learn.freeze()

    assert trainable(learn)[:3] == expected
