"""Softmaxes whose weights are added up over another dimension than they sum to 1 over."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit.autograd_graph import users_of
from hookkit.stats.softmaxes import wrong_softmaxes


def found(output):
    return wrong_softmaxes(users_of(output))


class Attends(nn.Module):
    def __init__(self, dim, heads=1, after=lambda a: a):
        super().__init__()
        self.qkv, self.dim, self.heads, self.after = nn.Linear(4, 12), dim, heads, after

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.mT).softmax(self.dim)
        return self.after(F.dropout(weights, 0.1)) @ v


@pytest.mark.parametrize(("dim", "heads"), [(0, 1), (1, 2), (2, 1), (2, 2)])
def test_attention_whose_weights_are_shared_among_samples_heads_or_queries(dim, heads):
    wrong = found(Attends(dim, heads)(torch.randn(3, 5, 4)))

    assert wrong == [f"over dimension {dim} of (3, {heads}, 5, 5)"]


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_and_slot_attention_are_right(heads):
    x = torch.randn(3, 5, 4)

    assert found(Attends(-1, heads)(x)) == []
    slots = Attends(-2, heads, lambda a: a / a.sum(-1, keepdim=True))
    assert found(slots(x)) == []


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


def keys_first(x):
    """Weights of (key, query), turned before the product."""
    return (x @ x.mT).softmax(1).mT @ x


def additive(x):
    """Bahdanau's attention, as a sum of products: it is not followed."""
    return (nn.Linear(4, 1)(x).softmax(0) * x).sum(1)


def dice(x):
    """A loss that adds up each class's probabilities over the places."""
    return (nn.Linear(4, 3)(x).softmax(-1) * torch.ones(2, 5, 3)).sum((0, 1))


@pytest.mark.parametrize(
    "model", [pooled, capsules, dispatched, experts, keys_first, additive, dice]
)
def test_shares_that_are_meant_are_not_found(model):
    assert found(model(torch.randn(2, 5, 4, requires_grad=True))) == []


def test_a_softmax_that_only_other_reductions_follow_is_not_found():
    x = torch.randn(3, 5, requires_grad=True)

    assert found(x.mean((0, 1)) + x.sum(0).mean() + x.softmax(0).sum()) == []
