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


def train_on_numbers(loss_of, divide=1.0, shown=1.0, model=None, **options):
    """Two steps of which the loss is reported as a number, `shown` times what it is."""
    model = net(3) if model is None else model
    opt = sgd(model)
    with watch(model, opt, ActivationStats(), **options) as w:
        for _ in range(2):
            loss = loss_of(model(torch.randn(5, 4)))
            (loss / divide if divide != 1 else loss).backward()
            opt.step()
            w.loss(shown * loss.item())
    return w.run_record().info


def test_a_loss_that_is_a_number_is_known_by_the_backward_pass():
    info = train_on_numbers(lambda y: F.cross_entropy(y, CLASSES))

    assert (info["loss_func"], info["n_classes"], info["loss_input"]) == ("cross_entropy", 3, "")


@pytest.mark.parametrize("change", [{"divide": 4.0}, {"shown": 5.0}])
def test_a_number_that_is_not_what_backward_began_with_has_no_known_chance(change):
    info = train_on_numbers(lambda y: F.cross_entropy(y.softmax(1), CLASSES), **change)

    assert info["loss_func"] is None
    assert not {"chance", "n_classes"} & set(info)
    assert info["loss_input"] == "Softmax"  # a mistake all the same


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_named_loss_shows_its_mistakes_too():
    model = nn.Linear(4, 1)
    loss = nn.MSELoss()

    info = train_on_numbers(lambda y: loss(y, torch.randn(5)), model=model, loss_func=loss)

    assert info["loss_func"] == "MSELoss"
    assert info["broadcast"] == "(5, 1) is compared with (5,), which makes (5, 5)"


def test_looking_for_the_backward_pass_leaves_nothing_on_the_parameters():
    model = net(3)
    opt = sgd(model)
    with watch(model, opt, ActivationStats()):
        model(torch.randn(5, 4)).sum().backward()
        assert not any(p._backward_hooks for p in model.parameters())
        model(torch.randn(5, 4))
        opt.step()

    assert not any(p._backward_hooks for p in model.parameters())


def test_a_loss_that_is_a_leaf_is_reported_although_no_operation_made_it():
    model = net()
    opt = sgd(model)
    with watch(model, opt) as w:
        number = model(torch.randn(5, 4)).mean().item()
        loss = torch.tensor(number, requires_grad=True)  # the model learns nothing by it
        loss.backward()
        opt.step()
        w.loss(loss)

    assert w.run_record().losses.tolist() == [pytest.approx(number)]
