"""Rules on what a loss's own operations show: broadcast, softmax_dim."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import ParamStats, watch
from hookkit.health import diagnose


def trained(loss_of, out=1, n=40):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, out))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt, ParamStats()) as w:
        for _ in range(n):
            x = torch.randn(32, 4)
            loss = loss_of(net(x), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    return diagnose(w)


def classes(x):
    return (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [F.mse_loss, lambda p, y: (p - y).abs().mean()])
def test_a_column_against_a_row_is_an_error(loss):
    d = trained(lambda pred, x: loss(pred, x[:, 0]))

    assert d[0].rule == "broadcast"
    assert "(32, 1) is compared with (32,), which makes (32, 32)" in d[0].evidence
    assert "broadcast" not in trained(lambda pred, x: loss(pred, x[:, :1])).rules


def test_a_softmax_over_the_batch_is_an_error():
    d = trained(lambda pred, x: F.nll_loss(pred.log_softmax(0), classes(x)), out=3)

    assert d[0].rule == "softmax_dim"
    assert "over dimension 0 of (32, 3)" in d[0].evidence
    good = trained(lambda pred, x: F.nll_loss(pred.log_softmax(1), classes(x)), out=3)
    assert "softmax_dim" not in good.rules


def views_compared(stop, n=40):
    """SimSiam on noisy views: an encoder, a predictor, and a gradient that is stopped or not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    guess = nn.Linear(8, 8)
    both = nn.ModuleList([net, guess])
    opt = torch.optim.SGD(both.parameters(), 0.1)
    with watch(both, opt, ParamStats()) as w:
        for _ in range(n):
            x = torch.randn(32, 4)
            a, b = (net(x + 0.1 * torch.randn(32, 4)) for _ in "ab")
            loss = -F.cosine_similarity(guess(a), b.detach() if stop else b).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
    return diagnose(w)


def test_a_loss_that_only_pulls_views_together_is_an_error():
    d = views_compared(stop=False)

    assert (d[0].rule, d[0].severity) == ("representation_collapse", "error")
    assert "the loss only pulls together two outputs of shape (32, 8)" in d[0].evidence
    assert "representation_collapse" not in views_compared(stop=True).rules


def test_a_divergence_of_probabilities_is_an_error():
    def divergence(pred, x, log):
        own = pred.log_softmax(1) if log else pred.softmax(1)
        return F.kl_div(own, F.one_hot(classes(x), 3).float(), reduction="batchmean")

    d = trained(lambda pred, x: divergence(pred, x, log=False), out=3)

    assert d[0].rule == "probabilities"
    assert "reads them as their logarithms" in d[0].evidence
    good = trained(lambda pred, x: divergence(pred, x, log=True), out=3)
    assert "probabilities" not in good.rules
