"""What the diagnosis once got wrong."""

import pytest
import torch
import torch.nn.functional as F
from health_loops import Headed, blobs, fit, net, sgd, train
from torch import nn

from hookkit import diagnose
from hookkit.health.loss_graph import loss_facts


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_an_unused_head_does_not_come_before_nan():
    def batch(i):
        x, y = blobs()
        if i == 30:
            x[0, 0] = float("nan")
        return x, y

    found = diagnose(fit(Headed(unused=True), batch=batch))

    assert found[0].rule == "non_finite"
    assert found[0].severity == "error"
    assert found[0].layers == ("body",)
    assert [f.severity for f in found if f.rule == "no_gradient"] == ["note"]


def test_what_was_seen_is_a_cause_and_not_a_likely_one():
    found = diagnose(fit(nn.Sequential(*net(), nn.Softmax(1))))

    text = str(found)
    assert "Cause: a softmax before a loss that applies its own" in text
    assert "ikely" not in text
    assert "Right in" not in text


@pytest.mark.parametrize(
    "pick",
    [
        lambda p: p.squeeze(1),
        lambda p: p[:4, 0],
        lambda p: p.clamp(1e-6, 1)[:, 0],
        lambda p: p.flatten()[torch.arange(4)],
        lambda p: p.chunk(2)[0][:, 0],
    ],
)
def test_probabilities_are_seen_through_an_index_a_slice_and_a_clamp(pick):
    p = pick(nn.Linear(5, 1)(torch.randn(8, 5)).sigmoid())
    loss = F.binary_cross_entropy_with_logits(p, torch.ones_like(p))

    assert loss_facts(loss.grad_fn)["loss_input"] == "Sigmoid"


def test_one_batch_in_each_step_is_seen():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*blobs(256)), 32)

    found = diagnose(fit(net(), batch=lambda i: next(iter(loader))))

    assert "repeated_data" in found.rules
    assert "1 different batch" in str(found)
    assert not found.alarms


def test_a_bert_whose_pooler_is_not_used_is_healthy():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    body, head = transformers.BertModel(config), nn.Linear(32, 2)
    model = nn.ModuleDict({"body": body, "head": head})

    def loss(i):
        x = torch.randint(1, 50, (4, 12))
        scores = head(body(x).last_hidden_state)
        return F.cross_entropy(scores.flatten(0, 1), (x > 25).long().flatten())

    found = diagnose(train(model, loss, lr=1e-3))

    assert found.healthy, found
    assert [f.layers for f in found if f.rule == "no_gradient"] == [
        ("body.pooler.dense.weight", "body.pooler.dense.bias")
    ]


def test_a_detached_body_alarms():
    found = diagnose(fit(Headed(cut=True, unused=True)))

    assert found.rules[0] == "no_gradient"
    assert found.alarms
    assert found[0].layers[:2] == ("body.weight", "body.bias")


def test_a_head_that_is_trained_alone_is_no_alarm():
    found = diagnose(
        fit(net(width=64), lambda model: torch.optim.Adam(model[4].parameters(), 0.1), n=60)
    )

    assert found.healthy, found
    assert "not_in_optimizer" in found.rules


def test_a_minimax_generator_turns_the_sign_of_a_loss_on_purpose():
    made, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), net(1)
    critic[0] = nn.Linear(2, 32)

    def loss(i):
        score = critic(made(torch.randn(32, 4)))
        return -F.binary_cross_entropy_with_logits(score, torch.zeros_like(score))

    assert not diagnose(train(made, loss)).alarms


def test_a_lost_sign_is_seen_where_the_loss_is_reported_with_it():
    w = fit(net(), sgd(0.01), loss_func=lambda x, y: -F.cross_entropy(x, y))

    assert diagnose(w).rules[0] == "ascent"
