"""What the autograd graph of a loss shows, and that it claims nothing else."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import ActivationStats, watch
from hookkit.callbacks.loss_facts import others_weights
from hookkit.callbacks.loss_graph import loss_by_graph

N, T, C = 4, 3, 7


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


def distillation(student):
    teacher = torch.rand(N, C).softmax(1)
    return F.kl_div(F.log_softmax(student / 2, 1), teacher, reduction="batchmean")


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.cross_entropy(scores(), labels()),
        lambda: F.cross_entropy(sequences().flatten(0, 1), labels(N * T)),
        lambda: F.cross_entropy(sequences().transpose(1, 2), labels(N, T)),
        lambda: F.nll_loss(sequences().log_softmax(-1).view(-1, C), labels(N * T)),
        lambda: F.nll_loss(sequences().transpose(1, 2).log_softmax(1), labels(N, T)),
    ],
)
def test_the_number_of_classes_is_known(loss):
    expected = {"loss_func": "cross_entropy", "n_classes": C, "loss_input": ""}
    loss = loss()
    loss.backward()

    assert loss_by_graph(loss) == {**expected, "chance": pytest.approx(math.log(C))}


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda: F.cross_entropy(scores().softmax(1), labels()), "Softmax"),
        (lambda: F.nll_loss(scores().softmax(1), labels()), "Softmax"),
        (lambda: F.nll_loss(scores(), labels()), "scores"),
        (lambda: F.nll_loss(scores().softmax(1).log(), labels()), ""),
        (lambda: ctc(sequences()), "scores"),
        (lambda: F.binary_cross_entropy_with_logits(column().sigmoid(), torch.ones(N, 1)),
         "Sigmoid"),
        (lambda: F.cross_entropy(10 * column().sigmoid() * scores(), labels()), ""),
        (lambda: F.cross_entropy(scores(), labels()) + distillation(scores().softmax(1)),
         "Softmax"),
        (lambda: distillation(scores()), ""),
    ],
)  # fmt: skip
def test_what_a_loss_is_given_where_that_is_wrong(loss, given):
    assert loss_by_graph(loss()).get("loss_input", "") == given


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
    found = loss_by_graph(loss()).get("softmax_dim")

    assert found is None if dim is None else found.startswith(f"over dimension {dim} of")


def squared(a, b):
    return (a - b).pow(2).mean()


DIFFERENCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, squared)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_column_compared_with_a_row(difference):
    for given, target in ((column(), torch.randn(N)), (column()[:, 0], torch.randn(N, 1))):
        for pair in ((given, target), (target, given)):
            assert f"makes ({N}, {N})" in loss_by_graph(difference(*pair))["broadcast"]
        assert "broadcast" not in loss_by_graph(difference(given, target.view(given.shape)))


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_rows_of_a_channel_compared_with_rows(difference):
    for given, target in (((N, 1, 3), (N, 3)), ((N, 3), (N, 1, 3)), ((N, 1, 2, 3), (N, 2, 3))):
        loss = difference(torch.randn(given, requires_grad=True).relu(), torch.randn(target))
        what = f"{given} is compared with {target}, which makes ({N}, {N}, "
        assert loss_by_graph(loss)["broadcast"].startswith(what)


PRODUCTS = (
    lambda x, w: -(x * w).mean(),
    lambda x, w: (w * -x).sum() / N + 0.1,
    lambda x, w: 0.5 - (x.squeeze(1) * w[:, None]).mean(),
    lambda x, w: ((x - 1.0).square() * w).mean(),
    lambda x, w: -torch.min(x.exp() * w, x.exp().clamp(0.8, 1.2) * w).mean(),  # PPO's
    lambda x, w: (1 - x * w).clamp(min=0).mean(),  # a hinge loss
)


@pytest.mark.parametrize("loss", PRODUCTS)
def test_a_column_times_a_row(loss):
    row = torch.rand(N)

    assert loss_by_graph(loss(column(), row))["outer_product"].endswith(
        f" multiplied to ({N}, {N})"
    )


@pytest.mark.parametrize(
    "loss",
    [
        *(lambda x, w, loss=loss: loss(x.squeeze(1)[:, None], w[:, None]) for loss in PRODUCTS[:2]),
        lambda x, w: (x * w).exp().mean(),  # no mean of products
        lambda x, w: (x * x.T).mean(),  # all pairs
        lambda x, w: nn.Linear(1, 1)((x * w).sum(1, keepdim=True)).mean(),  # inside the model
    ],
)
def test_products_without_a_mistake(loss):
    assert "outer_product" not in loss_by_graph(loss(column(), torch.rand(N)))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (
            (x[:, None] - torch.randn(N, 3)).norm(dim=-1).min(1)[0].mean()
        ),  # of all, the next
        lambda x: (torch.randn(N, 1, 3) - x).square().sum(-1).neg().exp().mean(),  # a kernel
        lambda x: (x[:, None] - torch.randn(N, 2, 3)).square().mean(),
        lambda x: (x[:, 0, None] - torch.randn(N)).square().neg().exp().mean(),  # in 1 dimension
        lambda x: (x[:, 0, None] - torch.randn(N)).abs().min(1)[0].mean(),
    ],
)
def test_rows_compared_on_purpose_are_no_mistake(loss):
    assert "broadcast" not in loss_by_graph(loss(torch.randn(N, 3, requires_grad=True).relu()))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: (x - x.T).sigmoid().log().mean(),  # a ranking loss: all pairs are meant
        lambda x: torch.where(torch.rand(N, N) > 0.5, x.T.expand(N, N), 0.0).logsumexp(1).sum(),
        lambda x: (nn.Linear(1, N)(x) - torch.randn(N)).pow(2).mean(),
    ],
)
def test_other_squares_are_no_mistake(loss):
    assert "broadcast" not in loss_by_graph(loss(column()))


def test_what_is_inside_the_model_is_no_part_of_the_loss():
    attention = F.log_softmax(scores().softmax(1), 1) @ torch.randn(C, 1)

    assert loss_by_graph(attention.mean()) == {}


@pytest.mark.parametrize(
    ("loss", "chance"),
    [
        (lambda: F.cross_entropy(scores(), labels()), math.log(C)),
        (lambda: sum(F.binary_cross_entropy_with_logits(column(), torch.full((N, 1), y))
                     for y in (0.0, 1.0)), 2 * math.log(2)),
        (lambda: F.cross_entropy(scores(), labels()) + column().square().mean(), None),
        (lambda: F.cross_entropy(scores(), labels()) / 4, None),
        (lambda: sum(F.cross_entropy(scores(), labels()) for _ in "ab") / 2, math.log(C)),
        (lambda: F.cross_entropy(scores(), labels(), reduction="sum"), None),
    ],
)  # fmt: skip
def test_chance_is_known_of_cross_entropies_and_of_their_sums(loss, chance):
    found = loss_by_graph(loss()).get("chance")

    assert found == (chance and pytest.approx(chance))


@pytest.mark.parametrize("difference", [squared, F.l1_loss, lambda a, b: (a - b).abs().mean()])
def test_a_mean_of_differences_has_the_name_of_the_loss_that_it_is(difference):
    name = "mse_loss" if difference is squared else "l1_loss"

    assert loss_by_graph(difference(scores(), torch.ones(N, C)))["loss_func"] == name
    assert "loss_func" not in loss_by_graph(scores().abs().mean())


def test_the_weights_of_another_model_are_counted():
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    fake = generator(torch.ones(N, 2))

    assert others_weights(critic(fake).mean(), generator.parameters()) == 2
    assert others_weights(critic(fake.detach()).mean(), critic.parameters()) == 0
    both = [*generator.parameters(), *critic.parameters()]
    assert others_weights(critic(fake).mean(), both) == 0


def test_where_no_weight_of_the_model_is_in_the_loss_none_is_anothers():
    assert others_weights(column().mean(), nn.Linear(5, 1).parameters()) == 0


def test_watch_knows_of_another_model_in_the_loss_but_not_of_a_head_in_the_same_optimizer():
    def facts(generator, critic, trained):
        opt = torch.optim.SGD(trained, lr=0.1)
        with watch(generator, opt, ActivationStats()) as w:
            loss = critic(generator(torch.ones(N, 2))).mean()
            loss.backward()
            opt.step()
            w.loss(loss)
        return w.run_record().info

    net, head = nn.Linear(2, 3), nn.Linear(3, 1)

    assert facts(net, head, net.parameters())["others_weights"] == 2
    assert "others_weights" not in facts(net, head, [*net.parameters(), *head.parameters()])


def encoder(width=3):
    """An encoder of two views of each sample."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, width))
    return [net(torch.randn(N, 5)) for _ in "ab"]


def cosine(a, b):
    return F.cosine_similarity(a, b).mean()


def dots(a, b):
    return (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)


def sampled(word, context):
    """Negative sampling, of which the first context is right and the others are not."""
    logits = (word[:, None] * context).sum(-1)
    return (-F.logsigmoid(logits[:, 0]) - F.logsigmoid(-logits[:, 1:]).sum(1)).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: -cosine(a, b),
        lambda a, b: 1 - dots(a, b).mean(),
        lambda a, b: 2 - cosine(a, b) - cosine(b, a),
        lambda a, b: -(cosine(a, b) + cosine(b, a)) / 2,
        lambda a, b: F.mse_loss(a, b),
        lambda a, b: (a - b).square().sum(1).mean(),
        lambda a, b: (F.normalize(a, dim=1) - F.normalize(b, dim=1)).norm(dim=1).mean(),
        lambda a, b: F.pairwise_distance(a, b).mean(),
        lambda a, b: -F.logsigmoid((a * b).sum(1)).mean(),
        lambda a, b: F.softplus(-(a * b).sum(1)).mean(),
        lambda a, b: sampled(a, b[:, None]),
    ],
)  # fmt: skip
def test_a_loss_that_only_pulls_outputs_together(loss):
    loss = loss(*encoder())
    loss.backward()

    assert loss_by_graph(loss)["pulls"].startswith(f"two outputs of shape ({N}, ")


def against(a, b):
    return F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).T, torch.arange(N))


def spread(z):
    return F.relu(1 - z.std(0)).mean()


@pytest.mark.parametrize(
    "loss",
    [
        against,  # in-batch negatives
        lambda a, b: -cosine(a, b.detach()) - cosine(b, a.detach()),  # a stopped gradient
        lambda a, b: cosine(a, b),  # pushed apart
        lambda a, b: F.triplet_margin_loss(a, b, b.flip(0)),
        lambda a, b: sampled(a, torch.stack([b, b.flip(0)], 1)),
        lambda a, b: F.mse_loss(a, b) + spread(a) + spread(b),  # VICReg
        lambda a, b: -F.logsigmoid((a * b).sum(1) - (a * b.flip(0)).sum(1)).mean(),  # BPR
        lambda a, b: -F.logsigmoid(dots(a, b)).mean() - F.logsigmoid(-dots(a, b.flip(0))).mean(),
        lambda a, b: dots(a, b.flip(0)).mean() - dots(a, b).mean(),
        lambda a, b: F.mse_loss((a * b).sum(1), torch.ones(N)),  # factors of a matrix
        lambda a, b: F.mse_loss(a, b) + F.mse_loss(a, torch.ones(N, 3)),
        lambda a, b: (a - b).square().mean() + (a[:, 0] - torch.ones(N)).square().mean(),
        lambda a, b: (a * b - torch.ones(N, 3)).square().mean(),  # a gate
        lambda a, b: a.square().mean() + b.square().mean(),
        lambda a, b: (a - 0.9 * b - torch.ones(N, 3)).square().mean(),  # a residual, with rewards
        lambda a, b: F.mse_loss(a[:, :1], b[:, :1]),  # two values
        lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_a_loss_that_keeps_outputs_apart_or_has_targets_does_not_only_pull(loss):
    assert "pulls" not in loss_by_graph(loss(*encoder()))


def test_a_physical_residual_does_not_pull_outputs_together():
    x = torch.randn(N, 2, requires_grad=True)
    u = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))(x) * x
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)

    assert "pulls" not in loss_by_graph((slope - u).square().mean())


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_a_divergence_of_probabilities_and_of_their_logarithms(reduction):
    teacher = torch.rand(N, C).softmax(1)
    right = F.kl_div(scores().log_softmax(1), teacher, reduction=reduction)
    wrong = F.kl_div(scores().softmax(1), teacher, reduction=reduction)
    by_exp = F.kl_div(scores().log_softmax(1).exp(), teacher, reduction=reduction) * 0.5 + right

    given = nn.Linear(4, C)(torch.randn(N, 4)) / 2
    by_scores = 4 * F.kl_div(given, teacher, reduction=reduction) + right

    assert not loss_by_graph(right).get("loss_input")
    assert loss_by_graph(by_scores)["loss_input"] == "scores"
    assert loss_by_graph(wrong)["loss_input"] == "probabilities"
    assert loss_by_graph(by_exp)["loss_input"] == "probabilities"


def test_an_expected_value_may_be_of_probabilities():
    values, p = torch.randn(N, C), scores().softmax(1)

    assert not loss_by_graph((values - p * values).sum(1).square().mean()).get("loss_input")
    assert not loss_by_graph(-(p * values).sum(1).mean()).get("loss_input")


def test_scores_of_a_sequence_that_is_turned_before_the_layer_are_known():
    x = nn.Linear(5, C)(torch.randn(N, T, 5).transpose(0, 1))

    assert loss_by_graph(ctc(x.transpose(0, 1)))["loss_input"] == "scores"


def test_a_loss_of_many_terms_is_read_without_recursion():
    a, b = encoder()
    total = torch.zeros(())
    for _ in range(3000):
        total = total + F.mse_loss(a, b)

    assert loss_by_graph(total)["pulls"] == f"two outputs of shape ({N}, 3)"


SOFT = torch.rand(N, C).softmax(1)


def soft(how=lambda logs: -(SOFT * logs).sum(1).mean()):
    return how(scores().log_softmax(1))


@pytest.mark.parametrize(
    ("loss", "chance"),
    [
        (lambda: F.cross_entropy(scores(), SOFT), math.log(C)),
        (soft, math.log(C)),
        (lambda: soft(lambda logs: (logs * -SOFT).sum(-1).mean()), math.log(C)),
        (lambda: soft(lambda logs: -(SOFT * logs).sum() / N), math.log(C)),
        (lambda: soft(lambda logs: -(SOFT * logs).mean()), None),  # a share of it
        (lambda: soft(lambda logs: -(SOFT * logs).sum()), None),  # grows with the batch
        (lambda: soft(lambda logs: -(SOFT * logs).sum(0).mean()), None),
        (lambda: F.kl_div(scores().log_softmax(1), SOFT, reduction="batchmean"), None),
        (lambda: -(scores().softmax(1) * scores().log_softmax(1)).sum(1).mean(), None),  # entropy
    ],
)
def test_shares_of_classes_have_the_chance_of_a_cross_entropy(loss, chance):
    assert loss_by_graph(loss()).get("chance_of_shares") == (chance and pytest.approx(chance))
    assert "chance" not in loss_by_graph(loss())
