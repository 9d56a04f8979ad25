"""How much of what layers give differs from sample to sample, and when it is looked at."""

import math
import pickle

import pytest
import torch
from torch import nn

from hookkit import ActivationStats, GradientStats, watch
from hookkit.moments.variation import Variation


def share(t):
    looks = Variation()
    looks.see(0, t)
    return looks.read(1)[0, 0].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_is_the_variance_between_samples_over_the_mean_square(dtype):
    x = torch.randn(16, 7, 3) + 2

    expected = x.var(0, correction=0).mean() / x.square().mean()

    assert share(x.to(dtype)) == pytest.approx(expected.item(), rel=0.02)


def test_of_many_samples_and_values_some_are_enough_and_equal_ones_differ_in_nothing():
    assert share(torch.randn(500, 3, 64, 64) + 1) == pytest.approx(0.5, rel=0.1)
    assert share(torch.randn(1, 9).expand(20, 9)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "t", [torch.ones(3), torch.ones(1, 3), torch.ones(4, 3, dtype=torch.long), torch.ones(4, 0)]
)
def test_what_has_no_samples_is_passed(t):
    assert math.isnan(share(t))


def trained(n, forward=lambda net, x: net(x)):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with watch(net, opt, ActivationStats(), GradientStats()) as w:
        for i in range(n):
            forward(net, torch.randn(16, 4) * (i < 20)).mean().backward()
            opt.step()
    return w.run_record()


def test_the_first_look_and_the_last_are_known_of_activations_alone():
    run = trained(40)

    assert all(0.05 < x < 1 for x in run.activations.meta["first_variation"])
    assert run.activations.meta["last_variation"] == [0.0, 0.0]  # inputs are all 0 by record 32
    assert "first_variation" not in run.gradients.meta


def test_what_a_layer_is_given_is_looked_at_in_the_first_step_alone():
    inputs = []

    def forward(net, x):
        inputs.append(5 * x + 100)
        return net(inputs[-1])

    meta = trained(2, forward).activations.meta

    x = inputs[0]
    expected = [x.square().mean().sqrt(), x.max(), x.var(0, correction=0).mean() / x.pow(2).mean()]
    found = [meta[key][0] for key in ("given_rms", "given_max", "given_variation")]
    assert found == pytest.approx([float(e) for e in expected], rel=1e-5)
    assert meta["given_rms"][1] > 0  # of what the first layer and a ReLU give


def given(*calls):
    """RMS, the largest and the share of what one layer is given in those calls: (args, kwargs)."""
    looks = Variation()
    for args, kwargs in calls:
        looks.see_inputs(0, (args, kwargs))
        looks = pickle.loads(pickle.dumps(looks))
    return looks.read(1)[0, 2:].tolist()


@pytest.mark.parametrize("args", [(), (torch.ones(3, 2, dtype=torch.long),), (torch.ones(()),)])
def test_a_layer_that_is_given_no_batch_of_floats_has_no_size_of_it(args):
    assert all(map(math.isnan, given((args, {}))))


def test_one_sample_has_a_size_and_a_batch_by_keyword_too():
    *size, share = given(((), {"x": torch.tensor([[3.0, 4.0]])}))

    assert size == pytest.approx([12.5**0.5, 4])
    assert math.isnan(share)  # one sample is neither like others nor unlike them


def test_what_a_layer_is_given_in_all_its_calls_counts():
    calls = [torch.zeros(4, 2), torch.randn(4, 2), torch.randn(4, 2)]

    rms, most, share = given(*(((t,), {}) for t in calls))

    assert rms == pytest.approx(float(torch.stack(calls).square().mean().sqrt()))
    assert most == pytest.approx(float(torch.stack(calls).abs().max()))
    assert share > 0
