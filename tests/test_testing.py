"""The small data, models and Learners of `hookkit.testing`."""

from typing import Any

import pytest
import torch
from torch import nn

from hookkit.testing import SGD, RegModel, mlp, synth_dbunch, synth_learner


def test_the_synthetic_data_are_a_line_with_noise() -> None:
    dls = synth_dbunch(a=5, b=-1, bs=8, n_train=3, n_valid=2)

    x, y = dls.train_ds.tensors

    assert (len(dls.train), len(dls.valid), x.shape) == (3, 2, (24, 1))
    assert (y - 5 * x + 1).abs().max() < 1


def test_the_synthetic_learner_has_fastais_arguments_in_order() -> None:
    model = mlp(1, 1)

    learn = synth_learner(3, 1, False, 0.5, synth_dbunch(n_train=4), model, wd=0.1)

    assert (len(learn.dls.train), learn.lr, learn.model, learn.wd) == (4, 0.5, model, 0.1)
    assert isinstance(learn.loss_func, nn.MSELoss)
    assert isinstance(synth_learner().model, RegModel)


def test_the_optimizer_is_torchs_under_fastais_names() -> None:
    opt = SGD([nn.Parameter(torch.ones(1))], 0.1, mom=0.9, wd=0.01)

    assert type(opt) is torch.optim.SGD
    assert (opt.defaults["momentum"], opt.defaults["weight_decay"]) == (0.9, 0.01)


@pytest.mark.parametrize(
    ("net", "x", "shape"), [(mlp(8, 16, 3), (4, 8), (4, 3)), (RegModel(), (4, 1), (4, 1))]
)
def test_the_nets_take_and_give_what_they_say(net: nn.Module, x: Any, shape: Any) -> None:
    assert net(torch.randn(x)).shape == shape


@pytest.mark.usefixtures("cuda")
def test_a_synthetic_learner_on_cuda() -> None:
    learn = synth_learner(cuda=True)
    learn.logger = lambda row: None

    learn.fit(1)

    assert learn.model.a.is_cuda
