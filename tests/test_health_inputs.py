"""The rule input_scale, by what layers are given: too large, too small, far from 0."""

import pytest
import torch
from health_runs import alarms, found
from torch import nn

from hookkit import ActivationStats, ParamStats, watch


class Memory(nn.Module):
    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.rnn, self.head = kind(2, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Beside(nn.Module):
    """Numbers beside an embedding."""

    def __init__(self):
        super().__init__()
        self.kind, self.body = nn.Embedding(5, 4), nn.Linear(6, 1)

    def forward(self, x):
        kind = (x[:, 0] > x[:, 0].mean()).long()
        return self.body(torch.cat([self.kind(kind), x], 1))


def trained(model, data, n=60, lr=1e-2, target=lambda x: x.mean(tuple(range(1, x.ndim)))):
    torch.manual_seed(0)
    opt = torch.optim.Adam(model.parameters(), lr)
    with watch(model, opt, ActivationStats(include_paramless=True), ParamStats()) as w:
        for _ in range(n):
            x = torch.randn(32, *data[0])
            opt.zero_grad()
            loss = (model(data[1](x)).squeeze(-1) - target(x)).pow(2).mean()
            loss.backward()
            opt.step()
            w.loss(loss)
    return w.run_record()


def as_is(x):
    return x


def net(*more, n=8):
    return nn.Sequential(nn.Linear(n, 16), *more, nn.ReLU(), nn.Linear(16, 1))


LARGE = {
    "a linear layer": (net, (8,)),
    "a recurrence": (Memory, (6, 2)),
    "another recurrence": (lambda: Memory(nn.LSTM), (6, 2)),
    "beside an embedding": (Beside, (2,)),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_inputs_are_named_whatever_layer_is_given_them(case):
    torch.manual_seed(0)
    made, shape = LARGE[case]

    assert "input_scale" in alarms(trained(made(), (shape, lambda x: 100 * x)))
    assert "input_scale" not in alarms(trained(made(), (shape, as_is)))


def test_before_a_norm_large_inputs_are_a_note():
    run = trained(net(nn.BatchNorm1d(16)), ((8,), lambda x: 100 * x))

    assert found(run, "input_scale").severity == "note"


def test_tiny_inputs_are_named_in_whatever_unit_they_are():
    f = found(trained(net(), ((8,), lambda x: x / 1000)), "input_scale")

    assert f.severity == "error"  # nothing is learnt
    assert "tiny" in f.cause


@pytest.mark.parametrize(
    "data",
    [
        lambda x: nn.functional.normalize(x, dim=1),  # vectors of length 1
        lambda x: nn.functional.one_hot(x.argmax(1), x.shape[1]).float(),
    ],
)
def test_vectors_whose_elements_are_small_because_they_are_many_are_usual(data):
    torch.manual_seed(0)

    assert "input_scale" not in alarms(trained(net(n=2000), ((2000,), data)))


def test_inputs_far_from_zero_are_no_problem():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    run = trained(model, ((8,), lambda x: 1 + x / 11), 400, 3e-2, lambda x: 3 + x.mean(1))

    assert "input_scale" not in alarms(run)


def test_a_first_call_on_zeros_is_no_tiny_input():
    torch.manual_seed(0)
    cell, head = nn.GRUCell(2, 16), nn.Linear(16, 1)
    net = nn.ModuleList([cell, head])
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt, ActivationStats(), ParamStats()) as w:
        for _ in range(60):
            x = torch.randn(32, 5, 2)
            x[:, 0], h = 0.0, torch.zeros(32, 16)  # a start token
            for t in range(5):
                h = cell(x[:, t], h)
            opt.zero_grad()
            loss = (head(h)[:, 0] - x.mean((1, 2))).square().mean()
            loss.backward()
            opt.step()
            w.loss(loss)

    assert "input_scale" not in alarms(w.run_record())
