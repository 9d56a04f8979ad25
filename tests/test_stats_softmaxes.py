"""Softmaxes whose weights are added up over another dimension than they sum to 1 over."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit.stats.softmaxes import wrong_softmaxes


class Attends(nn.Module):
    def __init__(self, dim, heads=1, after=lambda a: a):
        super().__init__()
        self.qkv, self.dim, self.heads, self.after = nn.Linear(4, 12), dim, heads, after

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.mT).softmax(self.dim)
        return self.after(F.dropout(weights, 0.1)) @ v


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_whose_weights_are_shared_among_the_queries(heads):
    x = torch.randn(3, 5, 4)

    assert wrong_softmaxes(Attends(-1, heads)(x)) == []
    assert wrong_softmaxes(Attends(-2, heads)(x)) == [f"over dimension 2 of (3, {heads}, 5, 5)"]
    again = Attends(-2, heads, lambda a: a / a.sum(-1, keepdim=True))  # slot attention
    assert wrong_softmaxes(again(x)) == []


@pytest.mark.parametrize(("dim", "heads"), [(0, 1), (0, 2), (1, 2)])
def test_attention_whose_weights_are_shared_among_samples_or_heads(dim, heads):
    found = wrong_softmaxes(Attends(dim, heads)(torch.randn(3, 5, 4)))

    assert found == [f"over dimension {dim} of (3, {heads}, 5, 5)"]


def additive(dim, keys=6):
    """Bahdanau's attention: the weights of the keys, times the keys, added up."""
    memory = torch.randn(8, keys, 4, requires_grad=True)
    return (nn.Linear(4, 1)(memory).softmax(dim) * memory).sum(1)


def graph_attention(dim):
    """Weights of (node, neighbour, head)."""
    h = torch.randn(5, 3, 4, requires_grad=True)
    score = h.sum(2)[:, None] + h.sum(2)[None]
    return torch.einsum("ijh,jhd->ihd", score.softmax(dim), h)


def by_hand(dim):
    """A softmax as exponentials divided by their sum."""
    x = torch.randn(3, 5, 4, requires_grad=True)
    weights = (x @ x.mT).exp()
    return weights / weights.sum(dim, keepdim=True) @ x


@pytest.mark.parametrize(
    ("attention", "right", "wrong"),
    [(additive, 1, 0), (graph_attention, 1, 2), (by_hand, -1, 0), (by_hand, 2, 1)],
)
def test_the_dimension_of_keys_is_that_of_the_sum(attention, right, wrong):
    assert wrong_softmaxes(attention(right)) == []
    assert len(wrong_softmaxes(attention(wrong))) == 1


def pooled(x):
    """DiffPool: shares of clusters, of which each adds up its own nodes."""
    return nn.Linear(4, 3)(x).softmax(-1).mT @ x


def capsules(x):
    """Shares of the capsules above, of which each adds up what those below send."""
    sent = nn.Linear(4, 6)(x).view(2, 5, 3, 2)
    return (sent.sum(-1, keepdim=True).softmax(2) * sent).sum(1)


def dispatched(x):
    """Soft experts: weights of tokens for each slot, and of slots for each token."""
    logits = nn.Linear(4, 3)(x)
    slots = torch.einsum("bnd,bns->bsd", x, logits.softmax(1))
    return torch.einsum("bsd,bns->bnd", slots, logits.softmax(2))


def experts(x):
    """A gate's shares of three experts."""
    each = torch.stack([nn.Linear(4, 4)(x) for _ in range(3)], 2)
    return (nn.Linear(4, 3)(x).softmax(-1)[..., None] * each).sum(2)


def layers(x):
    """A mix of layers by learned shares, as ELMo's."""
    shares = torch.zeros(2, requires_grad=True).softmax(0)
    return (shares[:, None, None, None] * torch.stack([x, 2 * x])).sum(0)


def keys_first(x):
    """Weights of (key, query), turned before the product."""
    return (x @ x.mT).softmax(1).mT @ x


def dice(x):
    """A loss that adds up each class's probabilities over the places."""
    return (nn.Linear(4, 3)(x).softmax(-1) * torch.ones(2, 5, 3)).sum((0, 1))


@pytest.mark.parametrize("model", [pooled, capsules, dispatched, experts, layers, keys_first, dice])
def test_shares_that_are_meant_are_not_found(model):
    assert wrong_softmaxes(model(torch.randn(2, 5, 4, requires_grad=True))) == []


def test_reductions_and_other_operations_have_no_softmax_dimension():
    x = torch.randn(3, 5, requires_grad=True)

    assert wrong_softmaxes(x.mean((0, 1)) + x.sum(0).mean() + x.softmax(0).sum()) == []
