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


def asked(question, n=40):
    """What is known of calls without gradients in a training where `question(model, step)` asks."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))
    opt = torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt) as w:
        for step in range(n):
            with torch.no_grad():
                question(model, step)
            opt.zero_grad()
            model(torch.full((8, 4), float(step))).square().mean().backward()
            opt.step()
    return pickle.loads(pickle.dumps(w)).run_record().info.get("asked")


def in_eval_mode(model, step):
    model.eval()(torch.randn(1, 4))
    model.train()


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (lambda model, step: model(torch.randn(1, 4)), [40, 40]),
        (lambda model, step: [model(torch.randn(1, 4)) for _ in range(5)], [40, 40]),
        (lambda model, step: step % 8 or model(torch.randn(1, 4)), [5, 5]),
        (
            lambda model, step: model[0](torch.randn(1, 4)),
            [1, 1],
        ),  # then the model itself is called
        (lambda model, step: model(ROWS), [40, 1]),
        (
            lambda model, step: model(torch.full((8, 4), step - 1.0)),
            [1, 1],
        ),  # what it was trained on
        (in_eval_mode, None),
        (lambda model, step: None, None),
    ],
)
def test_what_a_model_is_asked_between_its_steps(question, expected):
    torch.manual_seed(0)

    assert asked(question) == expected


def test_what_the_parts_of_a_model_are_asked():
    torch.manual_seed(0)
    parts = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 2)})
    opt = torch.optim.SGD(parts.parameters(), 0.01)
    with watch(parts, opt) as w:
        for _ in range(10):
            with torch.no_grad():
                parts["head"](parts["body"](torch.randn(1, 4)))
            opt.zero_grad()
            parts["head"](parts["body"](torch.randn(8, 4))).square().mean().backward()
            opt.step()

    assert w.run_record().info["asked"] == [10, 10]


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


def test_images_with_much_padding_differ():
    def images(step):
        image = torch.zeros(64, 1, 64, 64)
        image[:, :, 1:30, 1:30] = step
        return [image.flatten(2)]

    class Pool(nn.Linear):
        def forward(self, x):
            return super().forward(x[:, 0, 65:69])

    assert batches_of(images, 6, Pool(4, 3)) == [6, 6]


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

    assert facts.read()["batches"] == [3, 1]


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


@pytest.mark.parametrize(
    ("order", "period"),
    [
        ([0, 1, 2] * 4, 3),
        ([0, 1, 2, 0, 1], 3),
        ([0, 1, 2, 3], 0),
        ([0, 1, 2, 2, 0, 1], 0),  # shuffled anew
        ([0, 0, 0], 1),
    ],
)
def test_batches_that_come_again_in_the_same_order_have_a_period(order, period):
    facts = BatchFacts()
    for i in order:
        facts.see(torch.full((2, 3), i))
        facts.end_step()

    assert facts.read().get("batches_period", 0) == period
