"""Rules on the batches: unshuffled, repeated_data, constant_input."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from health_runs import FLAT, acts, alarms, falling, found, weights
from torch import nn

from hookkit import ActivationStats, watch
from hookkit.health import diagnose
from hookkit.health.batches import _correlations, period_of
from hookkit.records import Run

RNG = np.random.default_rng(0)


def learnt(order, n=200):
    """A classifier of three classes, trained on the batches that `order(x, y, step)` gives."""
    torch.manual_seed(0)
    x = torch.randn(480, 6)
    y = x[:, :3].argmax(1)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt) as w:
        for step in range(n):
            at = order(y, step)
            loss = F.cross_entropy(net(x[at]), y[at])
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    return w.run_record()


def shuffled(y, step):
    return torch.randint(len(y), (40,))


def by_class(y, step):
    return y.argsort()[40 * (step % 12) :][:40]


def three_batches(y, step):
    return torch.arange(480)[40 * (step % 3) :][:40]


@pytest.mark.parametrize(
    ("order", "rule"),
    [(shuffled, None), (by_class, "unshuffled"), (three_batches, "repeated_data")],
)
def test_the_order_of_the_data_is_seen_in_the_losses(order, rule):
    said = set(diagnose(learnt(order)).rules) & {"unshuffled", "repeated_data"}

    assert said == ({rule} if rule else set())


def test_all_the_data_in_one_batch_are_no_repetition():
    assert "repeated_data" not in diagnose(learnt(lambda y, step: torch.arange(480))).rules


def test_turns_of_fresh_data_are_no_repetition():
    turns = falling(end=1.0) + np.tile([0.0, 0.8], 150) + RNG.normal(0, 0.05, 300)

    assert alarms(Run(losses=turns)) == set()


def images(size, n=60, data=None):
    """A small conv net with batch norm, on batches of `size`."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    with watch(net, opt, ActivationStats()) as w:
        for _ in range(n):
            x = torch.randn(size, 1, 8, 8) if data is None else data
            loss = F.mse_loss(net(x), x.mean((2, 3)).expand(-1, 2))
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
    return w.run_record()


def test_batch_norm_over_two_samples_is_named():
    assert found(images(2), "small_batch").severity == "warning"
    shaken = dataclasses.replace(images(2), params=weights(update_ratio=[2.0] * 4), losses=FLAT)
    assert diagnose(shaken).rules[:2] == ("small_batch", "lr_too_high")
    assert "small_batch" not in diagnose(images(8)).rules


def test_batch_norm_over_the_many_places_of_two_images_is_a_note():
    many = acts()
    many = dataclasses.replace(many, meta={**many.meta, "norm_samples": 2, "norm_values": 2048})

    assert found(Run(many), "small_batch").severity == "note"


def test_a_fixed_order_that_does_no_harm_is_a_note():
    batches = np.tile(RNG.normal(0, 0.1, 10), 30)

    assert found(Run(losses=falling(end=0.5) + batches), "unshuffled").severity == "note"


def test_single_hard_batches_in_a_fixed_order_are_not_sorted_data():
    batches = RNG.permutation(np.repeat([0.1, 2.5], [70, 10]))
    level = 3 * np.exp(-np.arange(800) / 40) + RNG.normal(0, 0.01, 800)

    run = Run(losses=level + np.tile(batches, 10))

    assert found(run, "unshuffled").severity == "note"


@pytest.mark.parametrize(
    ("period", "end", "named"),
    [(44, 1.5, True), (44, 0.2, False), (0, 1.5, False), (4, 1.5, False), (100, 1.5, False)],
)
def test_the_same_batches_in_the_same_order_are_named_where_little_is_learnt(period, end, named):
    info = {"batches": [64, period or 64]} | ({"batches_period": period} if period else {})

    waves = 0.3 * end * np.sin(np.arange(300) * np.pi / 22)  # class after class

    assert ("unshuffled" in alarms(Run(losses=falling(end=end) + waves, info=info))) == named
    assert alarms(Run(losses=falling(end=end), info=info)) == set()  # in an order by chance


@pytest.mark.parametrize(("n", "size"), [(240, 8), (60, 1), (128, 16)])
def test_wrong_labels_in_small_batches_of_a_fixed_order_are_not_sorted_data(n, size):
    torch.manual_seed(3)
    y = torch.randint(3, (n,))
    x = 2 * torch.randn(3, 8)[y] + torch.randn(n, 8)
    y = torch.where(torch.rand(n) < 0.12, (y + 1) % 3, y)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.Adam(net.parameters(), 1e-2)
    with watch(net, opt) as w:
        for i in range(400):
            at = torch.arange(i * size, (i + 1) * size) % n
            loss = F.cross_entropy(net(x[at]), y[at])
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    assert "unshuffled" in diagnose(w.run_record()).rules
    assert "unshuffled" not in alarms(w.run_record())


@pytest.mark.parametrize("n", [5, 12, 40])
def test_the_period_is_the_first_and_no_multiple_of_it(n):
    batches = np.tile(RNG.normal(0, 0.3, n), 400 // n + 1)[:400]

    assert period_of(falling(400) + batches).steps == n


def test_noise_trends_waves_and_spikes_have_no_period():
    walk = 2 + 0.01 * RNG.normal(size=400).cumsum()
    spiked = falling(400)
    spiked[::50] += 30

    for losses in (falling(400), walk, RNG.normal(1, 0.3, 400), spiked, np.ones(400)):
        assert period_of(losses) is None


def test_a_long_run_takes_no_more_memory_than_its_losses_ask_for():
    losses = falling(20_000) + RNG.normal(0, 0.1, 20_000)
    tracemalloc.start()
    try:
        period_of(losses)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 100 * losses.nbytes  # all windows of a running median were 1,300 times as much


def test_the_correlations_are_those_with_the_losses_a_period_before():
    a = RNG.normal(size=201)

    plain = [
        (a[n:] * a[:-n]).sum() / np.sqrt((a[n:] ** 2).sum() * (a[:-n] ** 2).sum())
        for n in range(2, 51)
    ]

    np.testing.assert_allclose(_correlations(a, 50), plain, rtol=0, atol=1e-12)


def looks(types, first, last, **predecessors):
    made = acts(types)
    facts = {"first_variation": first, "last_variation": last, "predecessors": predecessors}
    return Run(dataclasses.replace(made, meta={**made.meta, **facts}), losses=falling())


def one_by_one(data):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    with watch(model, opt, ActivationStats()) as w:
        for x in data.split(1):
            loss = (model(x) - x.sum()).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss.item())
    return w.run_record()


def test_one_sample_at_a_time_does_not_say_that_data_are_alike():
    assert "constant_input" not in diagnose(one_by_one(torch.randn(40, 4))).rules


def test_tokens_that_are_the_same_for_all_samples_are_an_error():
    types, fed = ("Embedding", "Linear", "Linear"), {"1.weight": "0.weight", "2.weight": "1.weight"}

    f = found(looks(types, [0.0, 0.2, 0.3], [0.0, 0.2, 0.3], **fed), "constant_input")

    assert (f.severity, f.layers) == ("error", ("0",))


def test_places_are_the_same_for_all_samples_beside_tokens_that_differ():
    types, fed = ("Embedding", "Embedding", "Linear"), {"2.weight": "0.weight"}

    assert alarms(looks(types, [0.9, 0.0, 0.3], [0.9, 0.0, 0.3], **fed)) == set()


def test_noise_that_is_one_for_the_whole_batch_is_named():
    almost, types = [1e-4, 5e-4, 2e-4], ("Linear",) * 3

    f = found(looks(types, almost, almost), "constant_input")

    assert f.severity == "warning"
    assert "0.0001 of the mean square of what the first layers give" in f.evidence


def test_data_with_a_large_mean_differ_enough_if_what_comes_out_differs():
    types = ("Linear",) * 3

    assert alarms(looks(types, [1e-4, 0.1, 0.3], [1e-4, 0.1, 0.3])) == set()
