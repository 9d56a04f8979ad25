"""The small data, models and Learners of `hookkit.testing`."""

from typing import Any

import pytest
import torch
from torch import nn

from hookkit.testing import (
    SGD,
    ConvLayer,
    EventLog,
    FlatMSELoss,
    RegModel,
    RNNNet,
    conv_net,
    mlp,
    synth_dbunch,
    synth_learner,
)


def test_the_synthetic_data_are_a_line_with_noise() -> None:
    dls = synth_dbunch(a=5, b=-1, bs=8, n_train=3, n_valid=2)

    x, y = dls.train_ds.tensors

    assert (len(dls.train), len(dls.valid), x.shape) == (3, 2, (24, 1))
    assert (y - 5 * x + 1).abs().max() < 1


def test_the_synthetic_learner_has_fastais_arguments_in_order() -> None:
    model = mlp(1, 1)

    learn = synth_learner(3, 1, False, 0.5, synth_dbunch(n_train=4), model, wd=0.1)

    assert (len(learn.dls.train), learn.lr, learn.model, learn.wd) == (4, 0.5, model, 0.1)
    assert repr(learn.loss_func) == "FlattenedLoss of MSELoss()"
    assert isinstance(synth_learner().model, RegModel)


def test_the_optimizer_is_torchs_under_fastais_names() -> None:
    opt = SGD([nn.Parameter(torch.ones(1))], 0.1, mom=0.9, wd=0.01)

    assert type(opt) is torch.optim.SGD
    assert (opt.defaults["momentum"], opt.defaults["weight_decay"]) == (0.9, 0.01)


def test_the_loss_flattens_both_sides() -> None:
    pred, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 0])

    assert FlatMSELoss()(pred, y) == 2.5


@pytest.mark.parametrize(
    ("kwargs", "kinds", "shape"),
    [
        ({}, ["Conv2d", "BatchNorm2d", "ReLU"], (2, 16, 8, 8)),
        ({"stride": 2}, ["Conv2d", "BatchNorm2d", "ReLU"], (2, 16, 4, 4)),
        ({"ks": 5, "act_cls": None}, ["Conv2d", "BatchNorm2d"], (2, 16, 8, 8)),
        ({"norm": False}, ["Conv2d", "ReLU"], (2, 16, 8, 8)),
        ({"transpose": True, "stride": 2}, ["ConvTranspose2d", "BatchNorm2d", "ReLU"], None),
    ],
)
def test_conv_layers(kwargs: Any, kinds: list[str], shape: Any) -> None:
    layer = ConvLayer(3, 16, **kwargs)

    assert [type(m).__name__ for m in layer] == kinds
    assert (layer[0].bias is None) == ("norm" not in kwargs)
    if shape is not None:
        assert layer(torch.randn(2, 3, 8, 8)).shape == shape


def test_conv_layers_in_one_dimension() -> None:
    assert ConvLayer(3, 4, ndim=1)(torch.randn(2, 3, 8)).shape == (2, 4, 8)


@pytest.mark.parametrize(
    ("net", "x", "shape"),
    [
        (mlp(8, 16, 3), (4, 8), (4, 3)),
        (conv_net(1, 10), (4, 1, 8, 8), (4, 10)),
        (RNNNet(4, 8, 2), (4, 5, 4), (4, 2)),
        (RegModel(), (4, 1), (4, 1)),
    ],
)
def test_the_nets_take_and_give_what_they_say(net: nn.Module, x: Any, shape: Any) -> None:
    assert net(torch.randn(x)).shape == shape


def test_an_event_log_can_listen_to_some_events_only() -> None:
    log = EventLog("after_pred", "after_fit", order=7)
    learn = synth_learner(n_trn=1, n_val=1, cbs=log)
    learn.logger = lambda row: None

    learn.fit(1)

    assert log.seen == ["after_pred", "after_pred", "after_fit"]
    assert log.order == 7


@pytest.mark.usefixtures("cuda")
def test_a_synthetic_learner_on_cuda() -> None:
    learn = synth_learner(cuda=True)
    learn.logger = lambda row: None

    learn.fit(1)

    assert learn.model.a.is_cuda
