"""Rules on parameters that do not move, and on constant initial weights."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import FLAT, N, alarms, falling, found, weights
from torch import nn
from torch.func import functional_call, grad

from hookkit import ActivationStats, ParamStats, watch
from hookkit.errors import NeverFiredWarning
from hookkit.health import diagnose
from hookkit.records import Run


def test_weights_that_begin_at_zero_are_named_unless_something_is_learnt():
    norm = np.full((2, N), 5.0)
    norm[:, 0] = 0
    zero, half = weights(2, weight_norm=norm), weights(2, weight_norm=[norm[0], 5.0])

    f = found(Run(params=zero, losses=FLAT), "zero_init")
    assert (f.severity, f.layers) == ("error", ("0.weight", "1.weight"))
    for run in (
        Run(params=zero, losses=falling()),
        Run(params=zero),
        Run(params=half, losses=FLAT),
    ):
        assert "zero_init" not in alarms(run)


def test_a_parameter_outside_the_optimizer_is_named():
    p = weights(update_norm=[1, 0, 1, 1], in_optimizer=[True, False, True, True])

    f = found(Run(params=p), "not_in_optimizer")

    assert (f.layers, f.severity) == (("1.weight",), "warning")


def test_a_parameter_without_gradient_is_named():
    p = weights(update_norm=[1, 0, 1, 1], grad_norm=[1, np.nan, 1, 1])

    assert found(Run(params=p), "no_gradient").layers == ("1.weight",)


def test_a_bias_that_a_loss_of_derivatives_has_no_use_for_is_a_note():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt, ParamStats()) as w:
        for _ in range(50):
            x = torch.randn(32, 1, requires_grad=True)
            (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            opt.zero_grad()
            (slope - x.detach().cos()).pow(2).mean().backward()
            opt.step()

    f = found(w.run_record(), "no_gradient")

    assert (f.layers, f.severity) == (("2.bias",), "note")


def test_a_gradient_of_exactly_zero_is_an_error():
    p = weights(update_norm=[1, 0, 1, 1], grad_norm=[1, 0, 1, 1])

    assert found(Run(params=p), "zero_gradient").severity == "error"


@pytest.mark.parametrize("ndim", [2, 1])
def test_what_gets_a_gradient_and_never_moves_is_named(ndim):
    still = weights(update_norm=[1, 0, 1, 1], ndim=ndim)

    assert found(Run(params=still), "unmoved").layers == ("1.weight",)


def test_a_bias_before_a_batch_norm_may_stay_where_it_is():
    still = weights(update_norm=[1, 0, 1, 1], ndim=1, grad_rms=[1, 1e-9, 1, 1])

    assert alarms(Run(params=still, info={"lr": [0.1]})) == set()


def test_a_norm_in_bfloat16_that_swallows_its_steps_is_named():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
    net.bfloat16()
    opt = torch.optim.Adam(net.parameters(), lr=3e-4)
    with watch(net, opt, ParamStats()) as w:
        for _ in range(60):
            x = torch.randn(32, 8, dtype=torch.bfloat16)
            loss = (net(x).squeeze(1) - x.sum(1)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    f = found(w.run_record(), "unmoved")

    assert "1.weight" in f.layers
    assert "precision" in f.cause


def test_frozen_layers_are_no_finding():
    p = weights(
        update_norm=[0, 0, 0, 1], grad_norm=[np.nan] * 3 + [1], in_optimizer=[False] * 3 + [True],
        requires_grad=[False] * 3 + [True],
    )  # fmt: skip

    assert alarms(Run(params=p, losses=falling())) == set()


def test_a_recurrence_whose_first_inputs_get_no_gradient_is_named():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.RNN(2, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    model, x = Late(), torch.zeros(8, 300, 2)
    x[:, 0] = torch.randn(8, 2)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, ParamStats()) as w:
        for _ in range(12):
            opt.zero_grad()
            F.cross_entropy(model(x), torch.randint(2, (8,))).backward()
            opt.step()

    f = found(w.run_record(), "zero_gradient")
    assert (f.layers, f.severity) == (("rnn.weight_ih_l0",), "error")


def decayed(**facts):
    """Two matrices that get no gradient and decay, and two that learn."""
    shrinks = np.geomspace(5, 0.01, N)
    p = weights(4, grad_norm=[0, 0, 0.1, 0.1], weight_norm=[shrinks, shrinks, 5, 5], **facts)
    return dataclasses.replace(p, meta={**p.meta, "in_optimizer": [True] * 4})


def test_steps_that_a_scaler_leaves_out_are_no_missing_step():
    info = {"no_step": True, "train_iter": 40}

    assert alarms(Run(info=info)) == {"unmoved"}
    lost = diagnose(Run(info={**info, "nan_losses": [40, 40]}))
    assert [(f.rule, f.severity) for f in lost] == [("non_finite", "error")]


@pytest.mark.parametrize(
    ("n", "kind", "severity"),
    [
        (N, "Linear", "note"),
        (N, "BatchNorm1d", "warning"),
        (N - 20, "Linear", "warning"),
    ],
)
def test_steps_in_eval_mode_matter_where_batch_norms_are_or_the_mode_has_changed(n, kind, severity):
    made = dataclasses.replace(weights(), types=("Linear", kind, "Linear", "Linear"))

    assert found(Run(params=made, info={"eval_steps": [n, N]}), "eval_mode").severity == severity


def test_weights_that_only_decay_have_no_gradient_in_the_first_place():
    info = {"weight_decay": [1e-2], "lr": [1e-2]}
    alone = weights(3, grad_norm=[0] * 3, weight_norm=[np.geomspace(5, 0.01, N)] * 3,
                    update_ratio=[0.3] * 3)  # fmt: skip

    f = found(Run(params=decayed(), losses=FLAT, info=info), "zero_gradient")

    assert f.layers == ("0.weight", "1.weight")
    assert f.threshold == "a gradient of exactly 0 in all records"
    assert not {"weight_decay", "lr_too_high"} & alarms(Run(params=alone, losses=FLAT, info=info))


def test_weights_that_move_without_decay_or_grow_have_gradients_that_were_not_seen():
    grows = weights(3, grad_norm=[0] * 3, weight_norm=[np.linspace(5, 6, N)] * 3)

    assert "zero_gradient" not in diagnose(Run(params=decayed(), losses=FLAT)).rules
    for losses in (FLAT, None):
        run = Run(params=grows, losses=losses, info={"weight_decay": [1e-2]})
        assert "zero_gradient" not in diagnose(run).rules


def test_weights_that_are_all_zero_and_partly_stay_so_need_no_loss_as_proof():
    norm = np.full((3, N), 5.0)
    norm[:, 0] = 0
    part = weights(3, weight_norm=[0, 0, norm[2]], update_norm=[0, 0, 1])
    all_move = weights(3, weight_norm=norm)
    one = weights(1, weight_norm=norm[:1])

    assert "zero_init" in alarms(Run(params=part, losses=falling()))
    assert "zero_init" not in alarms(Run(params=all_move, losses=falling()))
    assert "zero_init" not in alarms(Run(params=one, losses=falling()))


def begun(constant, norm=5.0, kind="Linear", **facts):
    """Four matrices, of which some begin at one value."""
    p = weights(4, weight_norm=[norm] * 4, **facts)
    return dataclasses.replace(p, meta={**p.meta, "constant": constant}, types=(kind,) * 4)


@pytest.mark.parametrize(("losses", "severity"), [(FLAT, "error"), (falling(), "warning")])
def test_layers_in_a_row_that_begin_constant_are_named(losses, severity):
    f = found(Run(params=begun([False, True, True, False]), losses=losses), "constant_init")

    assert (f.severity, f.layers) == (severity, ("1.weight", "2.weight"))


@pytest.mark.parametrize(
    "quiet",
    [
        begun([True, False, True, False]),  # the next layer breaks the symmetry
        begun([True] * 4, kind="Scale"),  # gates and scales of one's own
        begun([True] * 4, requires_grad=[False] * 4, update_norm=[0] * 4),
        begun([False] * 4),
    ],
)
def test_constants_that_are_meant_or_alone_are_no_finding(quiet):
    assert "constant_init" not in diagnose(Run(params=quiet, losses=falling())).rules


def test_constant_zeros_are_reported_by_zero_init():
    p = begun([True] * 4, norm=0)
    p.values["weight_norm"][:, 1:] = 5.0

    assert alarms(Run(params=p, losses=FLAT)) == {"zero_init", "not_learning"}


def test_a_step_that_is_forgotten_is_named_though_nothing_is_recorded():
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    unseen = pytest.warns(NeverFiredWarning, match="no optimizer step")
    with unseen, watch(model, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(5):
            opt.zero_grad()
            w.loss(loss := model(torch.randn(8, 4)).square().mean())
            loss.backward()

    d = w.diagnose()
    assert [(f.rule, f.severity) for f in d] == [("unmoved", "error")]
    assert "optimizer.step()" in d[0].fix
    assert d.headline == "0 layers, 0 steps: 1 error"
    assert copy.copy(w).diagnose().headline == d.headline


@pytest.mark.parametrize("way", ["data", "no_grad"])
def test_weights_that_are_changed_by_hand_miss_no_step(way):
    model = nn.Linear(4, 1)
    unseen = pytest.warns(NeverFiredWarning, match="no optimizer step")
    with unseen, watch(model, ParamStats()) as w:
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
            for p in model.parameters():
                if way == "data":
                    p.data -= 0.1 * p.grad
                else:
                    with torch.no_grad():
                        p -= 0.1 * p.grad
                p.grad = None

    assert "unmoved" not in w.diagnose().rules
    assert "unmoved" not in copy.copy(w).diagnose().rules


def test_weights_that_cannot_be_read_outside_of_a_transform_miss_no_step():
    model = nn.Linear(4, 1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    unseen = pytest.warns(NeverFiredWarning, match="no optimizer step")
    with unseen, watch(model, ParamStats()) as w:
        for x in torch.randn(5, 8, 4):
            grads = grad(lambda p, x=x: functional_call(model, p, x).square().mean())(weights)
            weights = {name: p - 0.1 * grads[name] for name, p in weights.items()}

    assert "unmoved" not in w.diagnose().rules


def test_steps_that_are_not_to_be_seen_are_not_missed():
    model = nn.Linear(4, 1)
    with watch(model, each_forward=True) as w:
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()

    assert "unmoved" not in w.diagnose().rules
