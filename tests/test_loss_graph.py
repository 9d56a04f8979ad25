"""What the autograd graph of a loss shows, and that it claims nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit.recorders.loss_graph import loss_facts

N, T, C = 4, 3, 7


def facts(loss):
    return loss_facts(loss.grad_fn)


def scores():
    return nn.Linear(5, C)(torch.randn(N, 5))


def sequences():
    return nn.Linear(5, C)(torch.randn(N, T, 5))


def column():
    return nn.Linear(5, 1)(torch.randn(N, 5))


def labels(*shape):
    return torch.zeros(shape or (N,), dtype=torch.long)


def ctc(log_probs):
    x = log_probs.transpose(0, 1)
    return F.ctc_loss(x, torch.ones(N, 1).long(), torch.full((N,), T), torch.ones(N).long())


def on_ones(given):
    return F.binary_cross_entropy_with_logits(given, torch.ones_like(given))


def distillation(student):
    teacher = torch.rand(N, C).softmax(1)
    return F.kl_div(F.log_softmax(student / 2, 1), teacher, reduction="batchmean")


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.cross_entropy(scores(), labels()),
        lambda: F.cross_entropy(sequences().transpose(1, 2), labels(N, T)),
        lambda: F.nll_loss(sequences().log_softmax(-1).view(-1, C), labels(N * T)),
    ],
)
def test_the_number_of_classes_is_known(loss):
    loss = loss()
    loss.backward()  # which frees what the graph has saved

    assert facts(loss) == {"loss_func": "cross_entropy", "n_classes": C}


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda: F.cross_entropy(scores().softmax(1), labels()), "Softmax"),
        (lambda: F.nll_loss(scores().softmax(1), labels()), "probabilities"),
        (lambda: F.nll_loss(scores(), labels()), "scores"),
        (lambda: F.nll_loss(scores().softmax(1).log(), labels()), ""),
        (lambda: ctc(sequences()), "scores"),
        (lambda: on_ones(column().sigmoid()), "Sigmoid"),
        (lambda: on_ones(column().sigmoid().clamp(1e-6, 1)[:2, 0]), "Sigmoid"),
        (lambda: on_ones(column().sigmoid().squeeze(1).chunk(2)[0]), "Sigmoid"),
        (lambda: on_ones(column().sigmoid().flatten()[torch.arange(2)]), "Sigmoid"),
        (lambda: F.cross_entropy(10 * column().sigmoid() * scores(), labels()), ""),
        (lambda: F.cross_entropy(scores(), labels()) + distillation(scores().softmax(1)),
         "Softmax"),
        (lambda: F.kl_div(scores().softmax(1), torch.rand(N, C).softmax(1), reduction="sum"),
         "probabilities"),
    ],
)  # fmt: skip
def test_what_a_loss_is_given_where_that_is_wrong(loss, given):
    assert facts(loss()).get("loss_input", "") == given


@pytest.mark.parametrize(
    ("loss", "dim"),
    [
        (lambda: F.nll_loss(scores().log_softmax(0), labels()), 0),
        (lambda: F.nll_loss(sequences().log_softmax(1).view(-1, C), labels(N * T)), 1),
        (lambda: F.nll_loss(torch.randn(2, C, 3, 3, requires_grad=True).log_softmax(-1),
                            labels(2, 3, 3)), 3),
        (lambda: ctc(sequences().log_softmax(-1)), None),
        (lambda: F.nll_loss(torch.randn(C, requires_grad=True).log_softmax(0), labels(1)[0]), None),
    ],
)  # fmt: skip
def test_a_softmax_over_another_dimension_than_the_classes(loss, dim):
    found = facts(loss()).get("softmax_dim")

    assert found is None if dim is None else found.startswith(f"over dimension {dim} of")


def squared(a, b):
    return (a - b).pow(2).mean()


DIFFERENCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, squared)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_column_or_channel_compared_with_a_row(difference):
    for given, target in (((N, 1), (N,)), ((N,), (N, 1)), ((N, 1, 3), (N, 3)), ((N, 3), (N, 1, 3))):
        x = torch.randn(given, requires_grad=True).relu()
        what = f"{given} is compared with {target}, which makes ({N}, {N}"
        assert facts(difference(x, torch.randn(target)))["broadcast"].startswith(what)
        assert "broadcast" in facts(difference(torch.randn(target), x))
        assert "broadcast" not in facts(difference(x, torch.randn(given)))


PRODUCTS = (
    lambda x, w: -(x * w).mean(),
    lambda x, w: (w * -x).sum() / N + 0.1,
    lambda x, w: 0.5 - (x.squeeze(1) * w[:, None]).mean(),
    lambda x, w: -torch.min(x.exp() * w, x.exp().clamp(0.8, 1.2) * w).mean(),  # PPO's
    lambda x, w: (1 - x * w).clamp(min=0).mean(),  # a hinge loss
)


@pytest.mark.parametrize("loss", PRODUCTS)
def test_a_column_times_a_row(loss):
    x, row = column(), torch.rand(N)

    assert facts(loss(x, row))["broadcast"].endswith(f"makes ({N}, {N})")
    if loss in PRODUCTS[:2]:  # of two columns
        assert "broadcast" not in facts(loss(x.squeeze(1)[:, None], row[:, None]))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w: (x * w).exp().mean(),  # no mean of products
        lambda x, w: (x * x.T).mean(),  # all pairs
        lambda x, w: nn.Linear(1, 1)((x * w).sum(1, keepdim=True)).mean(),  # inside the model
        lambda x, w: (x - x.T).sigmoid().log().mean(),  # a ranking loss: all pairs are meant
        lambda x, w: torch.where(torch.rand(N, N) > 0.5, x.T.expand(N, N), 0.0).logsumexp(1).sum(),
        lambda x, w: (nn.Linear(1, N)(x) - w).pow(2).mean(),
    ],
)
def test_other_squares_are_no_mistake(loss):
    assert "broadcast" not in facts(loss(column(), torch.rand(N)))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (x[:, None] - torch.randn(N, 3)).norm(dim=-1).min(1)[0].mean(),  # the nearest
        lambda x: (torch.randn(N, 1, 3) - x).square().sum(-1).neg().exp().mean(),  # a kernel
        lambda x: (x[:, None] - torch.randn(N, 2, 3)).square().mean(),
        lambda x: (x[:, 0, None] - torch.randn(N)).square().neg().exp().mean(),  # in 1 dimension
    ],
)
def test_rows_compared_on_purpose_are_no_mistake(loss):
    assert "broadcast" not in facts(loss(torch.randn(N, 3, requires_grad=True).relu()))


@pytest.mark.parametrize("difference", [squared, F.l1_loss, lambda a, b: (a - b).abs().mean()])
def test_a_mean_of_differences_has_the_name_of_the_loss_that_it_is(difference):
    name = "mse_loss" if difference is squared else "l1_loss"

    assert facts(difference(scores(), torch.ones(N, C)))["loss_func"] == name
    assert "loss_func" not in facts(scores().abs().mean())
    inside = F.log_softmax(scores().softmax(1), 1) @ torch.randn(C, 1)  # of the model
    assert facts(inside.mean()) == {}


def test_a_loss_that_is_a_sum_or_scaled_or_turned_has_no_name():
    loss = F.cross_entropy(scores(), labels())

    summed = F.cross_entropy(scores(), labels(), reduction="sum")
    for other in (summed, loss / 4, loss + column().square().mean()):
        assert "loss_func" not in facts(other)
    assert facts(-loss) == {}
