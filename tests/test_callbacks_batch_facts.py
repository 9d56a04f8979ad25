"""How many of the first batches differ."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import ActivationStats, watch
from hookkit.callbacks.batch_facts import MANY, BatchFacts


def batches_of(data, n=50, model=None, opt=None):
    """What a watched training on `data(step)` says of its batches."""
    model = nn.Linear(4, 3) if model is None else model
    opt = torch.optim.SGD(model.parameters(), 0.01) if opt is None else opt(model.parameters())
    with watch(model, opt, ActivationStats()) as w:
        for step in range(n):

            def closure(step=step):
                opt.zero_grad()
                loss = sum(model(x).square().mean() for x in data(step))
                loss.backward()
                return loss

            opt.step(closure)
    return pickle.loads(pickle.dumps(w)).run_record().info["batches"]


ROWS = torch.randn(128, 4)
PARTS = ROWS.split(32)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda step: [torch.randn(32, 4)], 50),
        (lambda step: [PARTS[step % 4]], 4),
        (lambda step: [PARTS[int(torch.randint(4, ()))]], 4),  # in any order
        (lambda step: [ROWS], 1),
        (lambda step: PARTS, 1),  # several in each step
        (lambda step: [PARTS[step % 2][torch.randperm(32)]], 50),  # rows change their places
        (lambda step: [ROWS[torch.randperm(128)[:32]]], 50),
        (lambda step: [PARTS[step % 2] + 1e-3 * torch.randn(32, 4)], 50),  # augmented
    ],
)
def test_batches_that_come_again_are_counted_once(data, expected):
    torch.manual_seed(0)

    assert batches_of(data) == [50, expected]


def test_a_closure_that_evaluates_a_batch_several_times_sees_one():
    lbfgs = lambda params: torch.optim.LBFGS(params, 0.1, max_iter=3)  # noqa: E731

    assert batches_of(lambda step: [ROWS], 10, opt=lbfgs) == [10, 1]


def test_only_the_first_steps_are_looked_at():
    assert batches_of(lambda step: [PARTS[0]] if step < MANY else [torch.randn(8, 4)], 80) == [
        MANY,
        1,
    ]


@pytest.mark.parametrize(
    "given",
    [
        torch.randint(9, (4, 5)),
        torch.rand(3) > 0.5,
        {"x": [torch.randn(2, 2), "text"], "mask": None},
        torch.randn(2, dtype=torch.complex64),
        torch.randn(300, 70).to(torch.bfloat16),
    ],
)
def test_any_structure_of_tensors_is_seen(given):
    facts = BatchFacts()
    for _ in range(3):
        facts.see(given)
        facts.end_step()

    assert facts.read() == {"batches": [3, 1]}


def test_what_holds_no_plain_tensor_is_not_counted():
    facts = BatchFacts()
    facts.see([torch.eye(3).to_sparse(), torch.empty(0), "text"])
    facts.end_step()

    assert facts.read() == {}


def test_a_model_without_a_forward_of_its_own_is_seen_by_its_parts():
    both = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    opt = torch.optim.SGD(both.parameters(), 0.01)
    with watch(both, opt, ActivationStats()) as w:
        for step in range(12):
            loss = F.mse_loss(both[0](PARTS[step % 3]), both[1](PARTS[step % 3]).detach())
            loss.backward()
            opt.step()

    assert w.run_record().info["batches"] == [12, 3]
