"""Runs that follow each other are one run: `run + later`."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit import ActivationStats, ParamStats, watch
from hookkit.errors import ArgumentError, OptionError
from hookkit.records import Incident, Record, Run
from hookkit.testing import mlp


def record(steps: Any, names: Any = ("fc",), **options: Any) -> Record:
    n = len(steps)
    axis = [np.array(steps), np.zeros(n, np.int64), np.arange(n), np.ones(n, np.int64)]
    values = {"mean": np.arange(float(len(names) * n)).reshape(len(names), n)}
    return Record("activation", names, ("Linear",) * len(names), *axis, values, **options)


def joined(a: Record, b: Record) -> Any:
    return (Run(a) + Run(b)).activations


def trained(net: nn.Module, epochs: int) -> Run:
    """A plain loop of three batches an epoch, the same ones in each."""
    opt = torch.optim.SGD(net.parameters(), 0.05)
    with watch(net, opt, ActivationStats(with_hist=True), ParamStats()) as w:
        for _ in range(epochs):
            for i in range(3):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
                loss = net(x).square().mean()
                w.loss(loss)
                loss.backward()
                opt.step()
                opt.zero_grad()
            w.epoch(score=float(i))
    return w.run_record()


def without_meta(run: Run) -> Run:
    """Without the facts of how it was made."""
    slots = {slot: getattr(run, slot) for slot in ("activations", "params")}
    return replace(run, info={}, **{slot: replace(r, meta={}) for slot, r in slots.items()})


def test_two_trainings_in_a_row_join_to_what_one_would_have_recorded() -> None:
    torch.manual_seed(0)
    net = mlp(4, 8, 1)
    whole, again = trained(copy.deepcopy(net), 5), trained(net, 2)

    both = again + trained(net, 3)

    assert without_meta(both) == without_meta(whole)


def test_a_run_that_goes_on_where_the_first_ends_keeps_its_numbers() -> None:
    a = Run(record([0, 1]), losses=np.arange(2.0), valid=[{"epoch": 0, "step": 1}])
    losses = np.array([np.nan, np.nan, 7.0, 8.0, 9.0])
    later = Run(record([2, 3, 4]), losses=losses, valid=[{"epoch": 1, "step": 4}])

    both: Any = a + replace(later, info={"first_step": 2, "n_steps": 5})

    assert both.activations.steps.tolist() == [0, 1, 2, 3, 4]
    assert both.activations.iters.tolist() == [0, 1, 2, 3, 4]
    assert both.losses.tolist() == [0.0, 1.0, 7.0, 8.0, 9.0]
    assert both.valid == [{"epoch": 0, "step": 1}, {"epoch": 1, "step": 4}]
    assert both.info == {"first_step": 0, "n_steps": 5}


@pytest.mark.parametrize("first", [1, 3])
def test_runs_that_do_not_follow_each_other_are_an_error(first: int) -> None:
    later = Run(record([4]), info={"first_step": first, "n_steps": 5})

    with pytest.raises(
        OptionError, match=rf"has 2 steps, and the later one begins with step {first}"
    ):
        _ = Run(record([0, 1])) + later


def test_steps_without_a_record_and_epochs_that_a_fit_numbers_keep_their_numbers() -> None:
    a = Run(record([7]), valid=[{"epoch": 0, "step": 19}], info={"n_steps": 20})
    b = Run(record([3]), valid=[{"epoch": 1, "step": 9}], info={"n_steps": 10})
    epoch_1 = replace(b.activations, epochs=np.array([1]))  # as of fit(2, start_epoch=1)

    both: Any = a + replace(b, activations=epoch_1)

    assert both.n_steps == 30
    assert both.activations.steps.tolist() == [7, 23]
    assert both.activations.epochs.tolist() == [0, 1]
    assert both.valid == [{"epoch": 0, "step": 19}, {"epoch": 1, "step": 29}]


def test_losses_that_are_not_finite_add_up() -> None:
    a = Run(losses=np.zeros(3), info={"train_iter": 3, "nan_losses": [1, 3]})
    b = Run(losses=np.zeros(2), info={"train_iter": 2})

    assert (a + b).info["nan_losses"] == (b + a).info["nan_losses"] == [1, 5]


def test_runs_that_both_begin_at_0_are_counted_on() -> None:
    incident = Incident("loss", "", "", 1, 0, 1, (), np.array([0]))
    a = Run(record([0, 2]), losses=np.array([3.0, 2.0, 1.0]), valid=[{"epoch": 0}])
    b = replace(a, incidents=(incident,), valid=[{"epoch": 0, "step": 2, "x": 7}])

    both: Any = a + b

    assert both.activations.steps.tolist() == [0, 2, 3, 5]
    assert both.activations.epochs.tolist() == [0, 0, 1, 1]
    assert both.losses.tolist() == [3.0, 2.0, 1.0] * 2
    assert both.valid == [{"epoch": 0}, {"epoch": 1, "step": 5, "x": 7}]
    assert (both.incidents[0].step, both.incidents[0].epoch) == (4, 1)
    assert both.incidents[0].steps.tolist() == [3]
    assert both.n_epochs == 2
    assert Run() + a == a + Run() == a


def test_facts_are_the_later_ones_but_for_how_the_training_began() -> None:
    a, b = record([0, 1], ("fc", "out")), record([2], ("fc", "out"))
    a.meta.update(dtype=["half", "float"], moved=[True, False], constant=[1, 0], skipped={"x": 1})
    b.meta.update(dtype=["bfloat", "float"], moved=[False, False], constant=[0, 0], window=None)

    both = joined(a, b)

    assert both.value("mean").tolist() == [[0, 1, 0], [2, 3, 1]]
    assert both.meta["dtype"] == ["bfloat", "float"]
    assert both.meta["moved"] == [True, False]
    assert both.meta["constant"] == [1, 0]
    assert both.meta["skipped"] == {"x": 1}


def test_histograms_follow_each_other_and_other_options_are_an_error() -> None:
    bins = {"hist": np.ones((1, 3, 2), np.int64), "edges": np.arange(4.0), "meta": {"eps": 0.05}}
    a = record([0, 1], **bins)
    assert joined(a, replace(a, hist=2 * a.hist)).hist[0].tolist() == [[1, 1, 2, 2]] * 3

    others: dict[str, Any] = {
        "bins": {"edges": 2 * bins["edges"]},
        "eps": {"meta": {"eps": 0.1}},
        "layers": {"names": ("out",)},
        "statistics": {"values": {"std": a.values["mean"]}},
    }
    for what, changes in others.items():
        with pytest.raises(OptionError, match=f"with another choice of {what}"):
            joined(a, replace(a, **changes))
    with pytest.raises(ArgumentError, match="int was given, and it holds no records"):
        Run(a) + 3
