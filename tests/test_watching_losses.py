"""What the graph of a reported loss says: which of PyTorch's losses it is, and what it is given."""

import pytest
import torch
from test_watching import net, sgd
from torch import nn
from torch.nn import functional as F

from hookkit.health import diagnose
from hookkit.stats import ActivationStats
from hookkit.watching import watch

CLASSES = torch.arange(5) % 3
SHARES = torch.full((5, 3), 0.5)
LOSSES = {
    "scores": (lambda y: F.cross_entropy(y, CLASSES), "cross_entropy", ""),
    "probabilities": (lambda y: F.cross_entropy(y.softmax(1), CLASSES), "cross_entropy", "Softmax"),
    "views": (lambda y: F.cross_entropy(y[None].squeeze(0), CLASSES), "cross_entropy", ""),
    "nll": (lambda y: F.nll_loss(y.softmax(1), CLASSES), "nll_loss", "Softmax"),
    "bce": (lambda y: F.binary_cross_entropy(y.sigmoid(), SHARES), "binary_cross_entropy", ""),
    "one in a row": (lambda y: F.mse_loss(y, SHARES)[None], "mse_loss", ""),
    "of one's own": (lambda y: (y - SHARES).square().mean(), "mse_loss", ""),
    "a sum": (lambda y: F.cross_entropy(y, CLASSES, reduction="sum"), None, None),
    "two together": (lambda y: F.cross_entropy(y, CLASSES) + y.square().mean(), None, None),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("late", [False, True])
def test_a_reported_loss_is_known_by_its_graph(name: str, late: bool):
    loss_of, kind, given = LOSSES[name]
    model = net(3)
    opt = sgd(model)
    with watch(model, opt, ActivationStats()) as w:
        loss = loss_of(model(torch.randn(5, 4)))
        if not late:
            w.loss(loss)
        loss.backward()
        opt.step()
        if late:
            w.loss(loss)
        model(torch.randn(5, 4)).sum().backward()
        w.loss(3.0)  # a number has no graph
        opt.step()

    info = w.run_record().info
    assert (info["loss_func"], info.get("loss_input")) == (kind, given)
    assert info.get("n_classes") == (3 if kind in ("cross_entropy", "nll_loss") else None)


def test_probabilities_before_a_reported_cross_entropy_are_found():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = sgd(model)
    with watch(model, opt, ActivationStats()) as w:
        for _ in range(30):
            x = torch.randn(32, 4)
            loss = F.cross_entropy(model(x).softmax(1), x.argmax(1) % 3)
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    finding = next(iter(diagnose(w)))
    assert (finding.rule, finding.severity) == ("probabilities", "error")
    assert "the loss is given what a softmax gives" in finding.evidence
