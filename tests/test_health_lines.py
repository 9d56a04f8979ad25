"""A finding shows the line that it crossed: each branch of each rule, by a run that reaches it.

A rule with several lines has a variant for each. `CASES` holds a run for every call of `found`, and
the number in its evidence must be beyond the number in its threshold. So a new branch without a
line of its own, or without a case here, fails.
"""

import ast
import dataclasses
import operator
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from health_runs import CE, EVEN, FLAT, MSE, N, acts, falling, found, sized, slow, weights
from test_health_attention import QK, attention, with_row
from test_health_loss_expectations import signed
from test_health_precision import HALF, TINY, grads, overflow, with_dtypes
from test_health_units import layers
from test_health_unmoved import begun
from torch import nn

from hookkit import FlightRecorder, health, watch
from hookkit.health import RULES, diagnose
from hookkit.health.diagnosis import Rule
from hookkit.records import Incident, Run

LATER, FIRST_30 = np.arange(N) >= 20, np.arange(N) < 30
SPOILED = "Its own weights were not finite: the step before has spoiled them."
NLL, BCE = {"loss_func": "NLLLoss"}, {"loss_func": "BCEWithLogitsLoss"}
NO_GRADIENT = {"update_norm": [1, 0, 1, 1], "grad_norm": [1, 0, 1, 1]}
BEGAN = np.where(np.arange(N) > 0, 5.0, 0.0)  # the norm of a matrix that began at 0
SOFTMAX = acts(("Linear", "ReLU", "Linear", "Softmax"))
PLAYERS = weights(update_norm=[EVEN, EVEN, ~EVEN, ~EVEN])
TEACHER = weights(
    requires_grad=[True, True, False, False],
    in_optimizer=[True, True, False, False],
    update_norm=[1, 1, 0, 0],
    weight_norm=np.tile(5.0 + 0.01 * np.arange(N), (4, 1)),
)
VALID = [{"epoch": i, "train_loss": 1 / (i + 1), "valid_loss": 0.5 + 0.1 * i} for i in range(6)]


GROWN = np.tile(np.geomspace(5.0, 50.0, N), (4, 1))


def decaying():
    made = weights(weight_norm=np.tile(np.geomspace(5.0, 1.0, N), (4, 1)))
    return dataclasses.replace(made, meta={**made.meta, "weight_decay": [1.0] * 4})


def shaped(**values):
    made = weights(**values)
    return dataclasses.replace(made, meta={**made.meta, "shape": [[64, 64]] * 4})


def clipped():
    return weights(grad_norm=[5e-7] * 4, update_ratio=[2e-4] * 4)


def with_fact(key, value, made=None):
    made = made or acts()
    return dataclasses.replace(made, meta={**made.meta, key: value})


TWO_INPUTS = {"0.weight": "", "2.weight": ""}


def cells(made):
    """The same of a GRU: what it is given, and its own last output."""
    names = tuple(f"{i // 2}.weight_{('ih', 'hh')[i % 2]}_l0" for i in range(4))
    return dataclasses.replace(made, names=names, types=("GRU",) * 4)


def rare(made, every=50):
    """The same, of each 50th step."""
    return dataclasses.replace(made, steps=every * np.arange(len(made)))


def wandering(n=600):
    """Losses of sorted data: each class is learnt, and then forgotten, sooner or later."""
    rng = np.random.default_rng(3)
    return 2 + np.sin(np.cumsum(rng.uniform(0.05, 0.12, n))) + rng.normal(0, 0.02, n)


def seen(first, last, types=("Linear",) * 3, before=None):
    """Activations of three layers, whose samples differ by these shares."""
    made = acts(types)
    made = with_fact("predecessors", before, made) if before else made
    return with_fact("first_variation", first, with_fact("last_variation", last, made))


def given(rms, most, variation):
    """Activations of three layers, the first of which is given data of this size."""
    nan = float("nan")
    made = with_fact("predecessors", {"0.weight": "", "2.weight": "0.weight"})
    for key, value in (("rms", rms), ("max", most), ("variation", variation)):
        made = with_fact(f"given_{key}", [value, nan, nan], made)
    return made


def repeating(n, size=1.0, noise=1.0):
    """Losses of `n` batches that come back in the same order."""
    swing = np.linspace(-size, size, n)[np.random.default_rng(0).permutation(n)]
    smooth = 1.2 + 1.1 * np.exp(-np.arange(300) / 60)
    return smooth + noise * (falling(end=1.2) - smooth) + np.tile(swing, 300 // n)


def at(step, value, rest=1e-3, k=4):
    """(k, N) a series that has `value` in one step."""
    table = np.full((k, N), float(rest))
    table[:, step] = value
    return table


def spiked(*at):
    losses = falling()
    losses[list(at)] += 5
    return losses


def broken(step=120, value=np.nan, losses=falling):
    series = losses()
    series[step:] = value
    return series


def nan_in(row, step, **values):
    bad = np.zeros((3, N))
    bad[row:, step:] = 7
    return acts(nonfinite=bad, **values)


def incident(kind, note="", history=(), name="body.log"):
    past = {name: np.array(history)}
    return Run(incidents=(Incident(kind, name, "Log", 12, history=past, note=note),))


# a run, the rule, what its threshold says, and what its evidence says
CASES = [
    # learning rate, momentum, weight decay
    (
        Run(params=weights(update_ratio=[0.3] * 4), losses=FLAT),
        "lr_too_high",
        "above 0.1 in the first 20 steps, in most",
        "0.3 in the first 20 steps",
    ),
    (
        Run(params=weights(update_ratio=at(50, 0.7)), losses=FLAT),
        "lr_too_high",
        "above 0.5 in one step",
        "is 0.7 in one step (in 4), while",
    ),
    (
        Run(params=weights(update_ratio=at(50, 4.0))),
        "lr_too_high",
        "above 1 in one step, in most",
        "is 4 in one step",
    ),
    (
        Run(params=weights(update_ratio=at(50, 0.6), weight_norm=GROWN), losses=falling()),
        "lr_too_high",
        "above 0.5 in one step, with weights that grow 4-fold or more",
        "0.6 in one step, and the weights grew 9.55-fold",
    ),
    (
        Run(params=weights(lr=[np.where(FIRST_30, 0.1, 1e-5)] * 4), losses=falling()),
        "lr_too_low",
        "below a thousandth of its largest, in half of the records or more",
        "in 70% of the records",
    ),
    (
        Run(params=weights(update_ratio=[5e-4] * 4), losses=falling(end=1.5)),
        "lr_too_low",
        "below 20 % of the weight in all steps together, and 1e-3 in the mean",
        "by 5% of their weight",
    ),
    (
        Run(params=weights(update_ratio=at(50, 0.4)), losses=falling(end=1.5),
            info={"optimizer": "Adam"}),
        "lr_too_high",
        "above 0.3 in one step",
        "is 0.4 in one step",
    ),
    (
        Run(params=decaying(), losses=falling()),
        "weight_decay",
        "most matrices below half of their first norm, where decay × weight is larger than",
        "shrank to 20.7% of their first norm",
    ),
    (
        Run(losses=falling(), info={"momentum": [0.999]}),
        "momentum",
        "above 0.99, and above 1 - 1/n for n steps",
        "momentum 0.999",
    ),
    (
        Run(params=clipped(), losses=falling(end=2.0)),
        "clipping",
        "the same norm of all gradients in 9 of 10 records",
        "the norm of all gradients is 1e-06 in 100% of the records",
    ),
    # data and collapse
    (
        Run(seen([0.3, 0.3, 0.3], [0.3, 1e-6, 0.3]), losses=falling()),
        "representation_collapse",
        "below 0.001 of a layer's mean square",
        "only 1e-06 of the mean square of 1 layer",
    ),
    (
        Run(seen([0.0, 0.3, 0.3], [0.0, 0.3, 0.3]), losses=falling()),
        "constant_input",
        "no difference between samples, in every look",
        "the same for every sample",
    ),
    (
        Run(seen([1e-4, 0.3, 1e-4], [1e-4, 0.3, 1e-4]), losses=falling()),
        "constant_input",
        "below 0.001 of the mean square",
        "only 0.0001 of the mean square",
    ),
    (
        Run(seen([0.0, 0.3, 0.3], [0.0, 0.3, 0.3], ("Linear", "ReLU", "Linear"), TWO_INPUTS)),
        "constant_input",
        "no difference between samples, in every look",
        "the same for every sample",
    ),
    (
        Run(losses=repeating(10)),
        "unshuffled",
        "correlation above 0.85 with the losses of a period before, while most",
        "(correlation 1.00)",
    ),
    (
        Run(losses=repeating(10, 0.3)),
        "unshuffled",
        "correlation above 0.85 with the losses of a period before",
        "(correlation 0.9",
    ),
    (
        Run(losses=wandering(), info={"batches": [64, 40], "batches_period": 40}),
        "unshuffled",
        "5 batches or more that come in the same order",
        "the same 40 batches",
    ),
    (
        Run(losses=falling(), info={"eval_steps": [200, 300]}),
        "eval_mode",
        "any step of a new model that has batch norms, or",
        "200 of 300 steps",
    ),
    (
        Run(losses=falling(), info={"batches": [64, 4]}),
        "repeated_data",
        "2 to 4 different batches",
        "the first 64 steps see 4 different batches",
    ),
    (
        Run(with_fact("norm_samples", 2), losses=falling()),
        "small_batch",
        "2 samples or fewer, and 128 values or fewer",
        "over 2 samples at a time",
    ),
    # what the loss's operations show
    (
        Run(losses=falling(), info={"broadcast": "(4, 1) is compared with (4,)"}),
        "broadcast",
        "n predictions and n targets",
        "in the loss (4, 1)",
    ),
    (
        Run(losses=FLAT, info={"outer_product": "(4, 1) is multiplied to (4, 4)"}),
        "broadcast",
        "n numbers times n of another shape",
        "in the loss (4, 1) is multiplied",
    ),
    (
        Run(losses=falling(), info={"softmax_dim": "over dimension 0 of (4, 7)"}),
        "softmax_dim",
        "any dimension but that of the classes",
        "over dimension 0",
    ),
    (
        Run(with_fact("softmax_dim", ["over dimension 2 of (4, 2, 5, 5)"]), losses=falling()),
        "softmax_dim",
        "over which the weighted values are added up",
        "1 softmax inside the model",
    ),
    (
        Run(losses=falling(), info={"loss_input": "probabilities"}),
        "probabilities",
        "any softmax just before this loss",
        "reads them as their logarithms",
    ),
    (
        Run(losses=falling(), info={"loss_input": "scores"}),
        "probabilities",
        "anything but logarithms of probabilities",
        "given what a layer gives",
    ),
    (
        Run(params=weights(update_ratio=[0.3] * 4)),
        "lr_too_high",
        "above 0.1 a step, by the median",
        "is 0.3 a step, by the median",
    ),
    (
        Run(params=rare(weights(update_ratio=[2e-4] * 4)), losses=FLAT),
        "lr_too_low",
        "below 3e-4 in most matrices, while the loss does not fall",
        "is 0.0002, and the loss hardly falls",
    ),
    (
        Run(params=weights(update_ratio=[5e-5] * 4)),
        "lr_too_low",
        "below 1e-4 in most matrices",
        "is 5e-05",
    ),
    (
        Run(
            params=weights(update_ratio=[5e-4] * 4, update_norm=[8e-5] * 4, lr=[1e-3] * 4),
            losses=falling(end=2.0),
            info={"optimizer": "Adam"},
        ),
        "lr_too_low",
        "below 3e-2 of the learning rate in the first 20 steps",
        "by 0.01 of its learning rate",
    ),
    (
        Run(
            params=weights(update_ratio=[5e-4] * 4, update_norm=[6.4e-3] * 4, lr=[1e-3] * 4),
            losses=falling(end=2.0),
            info={"optimizer": "Adam", "momentum": [0.9]},
        ),
        "lr_too_low",
        "above 0.6 in the later half",
        "are 0.8 times what",
    ),
    (
        Run(params=weights(grad_norm=at(5, 5.0, 0.1)), losses=falling()),
        "lr_too_high",
        "above 25 times what it is at first",
        "to 50 times its first",
    ),
    (
        Run(params=begun([False] * 4, kind="GRU", grad_norm=at(5, 5.0, 0.1)), losses=falling()),
        "exploding",
        "above 25 times what it is at first",
        "to 50 times its first",
    ),
    (
        Run(params=weights(weight_norm=GROWN), losses=FLAT),
        "lr_too_high",
        "above 2 times the first weights in the end, in most",
        "grew 9.55-fold",
    ),
    (
        Run(params=weights(update_ratio=[3e-7] * 4)),
        "lr_too_low",
        "below 1e-5 in the mean step",
        "is 3e-07 in the mean",
    ),
    (
        Run(losses=FLAT, info={"momentum": [0.999]}),
        "momentum",
        "above 0.99, where the loss does not fall",
        "momentum 0.999",
    ),
    (
        Run(params=weights(), losses=falling(), info={"lr": [0.01], "weight_decay": [1.04]}),
        "weight_decay",
        "over 1 % of the weight a step",
        "takes 1.04% of each weight",
    ),
    (
        Run(params=weights(), losses=falling(),
            info={"lr": [0.2], "weight_decay": [0.1], "optimizer": "AdamW"}),
        "lr_too_high",
        "over 1 % of the weight a step, at a weight decay of 0.3 or less",
        "takes 2% of each weight",
    ),
    (
        Run(params=weights(weight_norm=np.geomspace(5, 1e-3, N)[None].repeat(4, 0)), losses=FLAT),
        "weight_decay",
        "below 10 % of their first norm",
        "to 0.0238% of their first norm",
    ),
    (
        Run(losses=np.linspace(2, 5, N), info={**CE, "maximize": True}),
        "ascent",
        "any rise, under maximize=True",
        "made with maximize=True",
    ),
    (
        Run(acts(rms=[1, 1, np.geomspace(1, 400, N)]), losses=falling(start=9e4, end=1e4)),
        "target_scale",
        "to RMS above 30, where",
        "to 305",
    ),
    (
        Run(acts(rms=[1, 1, np.geomspace(1, 400, N)]), losses=falling(start=9e4, end=1e4),
            info={"asked": [64, 64]}),
        "target_scale",
        "to RMS above 150, where",
        "to 305",
    ),
    # inputs and initial weights
    (Run(given(80, 255, 0.5)), "input_scale", "RMS above 10", "has RMS 80"),
    (
        Run(acts(), params=cells(sized(1.0))),
        "bad_init",
        "a gain above 5 in a recurrent layer",
        "√fan_in) of 8",
    ),
    (
        Run(losses=falling(), info={"wasted_gradients": [147, 3]}),
        "unmoved",
        "32 for each step",
        "of 147 batches",
    ),
    (
        Run(info={"train_iter": 8, "no_step": True}),
        "unmoved",
        "3 training batches or more",
        "seen 8 training",
    ),
    (
        Run(given(0.02, 0.06, 0.5)),
        "input_scale",
        "below 0.1 in size",
        "is at most 0.06 in size",
    ),
    (
        Run(with_fact("dropout", {"drop": 0.902}), losses=FLAT),
        "dropout",
        "less than 25 % is kept",
        "keeps 9.8%",
    ),
    (
        Run(acts(rms=[1, 1, 6]), params=shaped(weight_rms=[1.0] * 4)),
        "bad_init",
        "output above 4",
        "gives RMS 6",
    ),
    (
        Run(acts(rms=[1, 1, np.geomspace(60, 6, N)]), params=shaped(weight_rms=[0.1] * 4)),
        "exploding",
        "output above 10",
        "gives RMS 60",
    ),
    (
        Run(acts(), params=shaped(weight_rms=[0.005] * 4), losses=FLAT),
        "bad_init",
        "below 0.07 in most layers",
        "with a gain of 0.04",
    ),
    (
        Run(acts(rms=[1, np.geomspace(1, 0.01, N), 1], types=("Linear",) * 3)),
        "representation_collapse",
        "below 10 % of its first RMS",
        "1.29% of it",
    ),
    (
        Run(losses=falling(start=40.0), info={**CE, "chance": np.log(10)}),
        "initial_loss",
        "above 4.61, 2 times ln C",
        "the first loss is 40",
    ),
    # dead, dormant, saturated units
    (Run(acts(dead=[0, 0.904, 0])), "dead", "over 90 % of a layer's units", "up to 90.4%"),
    (Run(acts(dead=[0, 0.6, 0])), "dead", "over 50 % of a layer's units", "up to 60%"),
    (Run(acts(dead=[0, 0.3, 0])), "dead", "over 20 % of a layer's units", "up to 30%"),
    (Run(acts(dead=[np.zeros(N), 0.95 * LATER, np.zeros(N)])), "dead", "over 90 %", "up to 95%"),
    (
        Run(layers(["ReLU", "ReLU", ""], dead=[np.zeros(N), 0.7 * LATER, np.zeros(N)]),
            losses=falling()),
        "dead",
        "over 50 % of a layer's units, while the loss falls",
        "up to 70%",
    ),
    (
        Run(layers(["", "ReLU", ""], dead=[0, 0.6, 0])),
        "dead",
        "over 50 % of a layer's units",
        "up to 60%",
    ),
    (
        Run(acts(("Linear", "Tanh", "Linear"), saturated=[np.nan, 0.7, np.nan])),
        "saturated",
        "over 50 % at its ends",
        "up to 70%",
    ),
    (
        Run(acts(("Linear", "Tanh", "Linear"), saturated=[np.nan, 0.95, np.nan])),
        "saturated",
        "over 90 % at its ends",
        "up to 95%",
    ),
    (
        Run(acts(("Linear", "Sigmoid", "Linear"), saturated=[0, 0.95, 0], mean=[0, 0.02, 0],
                 std=[1, 0.01, 1]), losses=falling()),
        "saturated",
        "over 90 % at its ends",
        "up to 95%",
    ),
    # parameters that do not move
    (Run(params=weights(update_norm=[1, 0, 1, 1])), "unmoved", "exactly no change", "never moves"),
    (
        Run(params=weights(update_norm=[1, 0, 1, 1], in_optimizer=[True, False, True, True])),
        "not_in_optimizer",
        "exactly no change",
        "no optimizer that steps has it",
    ),
    (
        Run(params=weights(update_norm=[1, 0, 1, 1], grad_norm=[1, np.nan, 1, 1])),
        "no_gradient",
        "no gradient in any record",
        "no gradient ever reaches it",
    ),
    (
        Run(with_dtypes(acts(), ["", "", ""], unregistered=["w"])),
        "not_in_optimizer",
        "any weight in a batch's autograd graph",
        "1 weight",
    ),
    (
        Run(params=weights(**NO_GRADIENT)),
        "zero_gradient",
        "a gradient of exactly 0",
        "exactly 0 at every step",
    ),
    (
        Run(params=weights(weight_norm=[0, 0, BEGAN, BEGAN], update_norm=[0, 0, 1, 1])),
        "zero_init",
        "all matrices begin at 0, and some never move",
        "all 4 matrices begin at exactly 0",
    ),
    (
        Run(params=begun([False, True, True, False])),
        "constant_init",
        "two layers in a row or more",
        "2 layers in a row",
    ),
    (
        Run(
            acts(("Linear", "ReLU", "Sigmoid"), saturated=[0, 0, 0.8]),
            losses=falling(end=1.2),
            info=MSE,
        ),
        "saturated",
        "over 50 % of the last layer, with 0.3 of an error left",
        "80% of the output is at the ends",
    ),
    # gradients
    (
        Run(params=weights(grad_rms=[1e-7, 1e-6, 1e-5, 1e-3])),
        "vanishing",
        "first over last below 1e-3",
        "first over last 0.0001",
    ),
    (
        Run(params=weights(grad_rms=[9, 3, 1, 0.1]), losses=FLAT),
        "exploding",
        "first over last above 70",
        "first over last 90",
    ),
    (
        Run(losses=falling(), info={"kept_gradients": [7, 8]}),
        "grads_pile_up",
        "most of the first steps, and 3 or more",
        "in 7 of the first 8 steps",
    ),
    # NaN, Inf, float16
    (Run(nan_in(1, 40), params=weights()), "non_finite", "any NaN or Inf", "its own weights are"),
    (Run(nan_in(0, 40), params=weights()), "non_finite", "any NaN or Inf", "the first layer"),
    (
        Run(nan_in(1, 40, rms=[np.geomspace(1, 1e9, N)] * 3), params=weights()),
        "non_finite",
        "any NaN or Inf",
        "grew more than 100-fold",
    ),
    (Run(acts(nonfinite=[0, 5, 0]), losses=falling()), "non_finite", "any NaN", "stays finite"),
    (Run(acts(), gradients=overflow(until=N)), "non_finite", "any NaN or Inf", "still finite"),
    (
        Run(acts(), gradients=overflow(), losses=falling()),
        "non_finite",
        "any NaN or Inf",
        "weights, activations and loss stay finite",
    ),
    (
        Run(losses=falling(), info={"nan_losses": [40, 300]}),
        "non_finite",
        "5 % of the batches",
        "the loss of 40 of 300 batches",
    ),
    (Run(losses=broken()), "non_finite", "any NaN or Inf", "stops being a number at step 120"),
    (Run(acts(n=300), losses=broken()), "non_finite", "any NaN", "the layers give stays finite"),
    (
        incident("activation", SPOILED),
        "non_finite",
        "any NaN or Inf",
        "at step 12. Its own weights were not finite",
    ),
    (
        Run(with_dtypes(acts(max=[1e4, 1e4, 1]), [HALF] * 3)),
        "fp16_range",
        "above 6550, a tenth",
        "up to 1e+04",
    ),
    (Run(gradients=grads(**TINY)), "fp16_underflow", "below 2.4e-7 in most layers", "RMS 1.1e-07"),
    # attention
    (
        Run(attention(min=with_row(2, -90.0), max=with_row(2, 240.0))),
        "attention_logits",
        "above 100",
        "the largest logit is 240",
    ),
    (
        Run(attention(**QK)),
        "attention_logits",
        "above 33, where the largest",
        "by queries and keys, is 144",
    ),
    # what the loss is given
    (
        Run(losses=FLAT, info={**CE, "loss_input": "Softmax"}),
        "probabilities",
        "any softmax or sigmoid just before",
        "what a softmax gives",
    ),
    (Run(SOFTMAX, info=CE), "probabilities", "any softmax or sigmoid", "the last layer is Softmax"),
    (Run(SOFTMAX, info=NLL), "probabilities", "any softmax or sigmoid", "last layer is Softmax"),
    (
        Run(acts(("Linear", "Sigmoid")), info=BCE),
        "probabilities",
        "any softmax or sigmoid",
        "the last layer is Sigmoid",
    ),
    (
        Run(losses=FLAT, info={**CE, "output_is_probabilities": True}),
        "probabilities",
        "rows from 0 to 1 that sum to 1",
        "rows are probabilities",
    ),
    (Run(info={"broadcast": "(8, 1) meets (8,)"}), "broadcast", "makes n × n", "(8, 1) meets (8,)"),
    (
        Run(info={"softmax_dim": "over the batch"}),
        "softmax_dim",
        "any dimension but that of the classes",
        "is taken over the batch",
    ),
    (
        Run(info={"pulls": "two outputs of shape (8, 4)"}),
        "representation_collapse",
        "no target, no negatives and no stopped gradient",
        "only pulls together two outputs of shape (8, 4)",
    ),
    # where the loss begins and ends
    (
        Run(losses=falling(start=2.7e4, end=3e3), info=MSE),
        "target_scale",
        "above 20 at first and at the end",
        "and the last is 56",
    ),
    (Run(losses=FLAT), "not_learning", "above 2.19, 5 % below its start", "ends at 2.3"),
    (
        Run(losses=np.r_[np.full(20, 30.0), FLAT], info=CE),
        "not_learning",
        "within 5 % of chance (chance is ln 10 = 2.3)",
        "ends at 2.3",
    ),
    (
        Run(losses=np.r_[np.full(20, 80.0), np.full(280, 40.0)], info=CE),
        "not_learning",
        "above 23, ten times chance",
        "ends at 40",
    ),
    (
        Run(losses=np.full(300, -2.3), info={"maximize": True}),
        "not_learning",
        "below -2.18, 5 % above its start",
        "ends at -2.3",
    ),
    (
        Run(losses=slow(0.09)),
        "not_learning",
        "above 2.19, 5 % below its start; and 2 % or more",
        "ends at 2.2",
    ),
    (
        Run(losses=1 + 0.4 * np.random.default_rng(2).normal(size=300)),
        "not_learning",
        "5 % below its start; and noise (two standard errors) with room",
        "so noisy that a fall of 5 %",
    ),
    (
        Run(seen([0.3, 0.3, 0.005], [0.3, 0.3, 0.005]), losses=falling(end=1.5)),
        "not_learning",
        "below 0.1, and",
        "differ by 0.07",
    ),
    (Run(losses=np.linspace(2.3, 50, 300)), "not_learning", "above 5.1", "ends at 47.7"),
    (Run(losses=broken()), "not_learning", "any NaN or Inf", "is not finite at the end"),
    (Run(params=PLAYERS, losses=FLAT), "not_learning", "above 2.19, 5 %", "ends at 2.3"),
    (Run(params=TEACHER, losses=FLAT), "not_learning", "above 2.19, 5 %", "ends at 2.3"),
    (
        Run(losses=FLAT, info={"asked": [64, 60]}),
        "not_learning",
        "above 2.19, 5 % below its start, where the model is called",
        "ends at 2.3",
    ),
    (Run(losses=signed(0, 0.2)), "not_learning", "stays within ten times", "above 0 and below"),
    (
        Run(params=weights(grad_norm=[0.1] * 4, update_norm=[0.05] * 4),
            losses=3 + np.linspace(0, 8, N)),
        "not_learning",
        "above twice the sum of |gradient| × |update|",
        "times as far as gradients and steps explain",
    ),
    (
        Run(losses=falling(end=-0.9), info=NLL),
        "below_zero",
        "below 0, for a loss that cannot be",
        "falls to -0.871",
    ),
    (
        Run(losses=-2.3 - 300 * np.linspace(0, 1, 300) ** 3),
        "below_zero",
        "below -23, ten times its start",
        "falls to -261",
    ),
    (Run(losses=spiked(200)), "spikes", "above the last 128 steps", "1 loss spike"),
    (
        Run(losses=spiked(*range(100, 300, 13))),
        "spikes",
        "4 spikes or more, in a period of 5 steps or more",
        "16 loss spikes",
    ),
    (
        Run(losses=falling(), valid=VALID),
        "overfit",
        "by 10 % above its best",
        "best in epoch 0 (0.5) and is 1 now",
    ),
]  # fmt: skip

NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)( ?%)?"
WORDS = {
    "above": operator.gt,
    "over": operator.gt,
    "below": operator.lt,
    "less than": operator.lt,
    "or more": operator.ge,
    "or less": operator.le,
    "or fewer": operator.le,
}


def line_of(text):
    """How a line in words compares, and with which number ("above 0.1"); None if it has none."""
    before = re.search(rf"\b(above|over|below|less than) {NUMBER}", text)
    after = re.search(rf"{NUMBER}[-\w]* (or more|or less|or fewer)\b", text)
    if before:
        return WORDS[before[1]], float(before[2]) / (100 if before[3] else 1)
    return (WORDS[after[3]], float(after[1]) / (100 if after[2] else 1)) if after else None


def is_beyond(line, seen):
    """Whether the first number that was seen is beyond the number of a line in words."""
    compares, least = line_of(line)
    size, percent = re.search(NUMBER, seen).groups()
    return compares(float(size) / (100 if percent else 1), least)


@pytest.mark.parametrize(
    ("run", "rule", "line", "seen"), CASES, ids=[f"{rule}: {line}" for _, rule, line, _ in CASES]
)
def test_the_number_in_the_evidence_is_beyond_the_line_that_is_shown(run, rule, line, seen):
    fits = [f for f in diagnose(run) if f.rule == rule and line in f.threshold]

    assert fits, diagnose(run)
    assert any(seen in f.evidence for f in fits), fits
    if line_of(line):
        assert is_beyond(line, seen)


@pytest.mark.parametrize(
    ("line", "seen", "beyond"),
    [
        ("above 0.1 early", "is 0.3", True),
        ("above 0.1 early", "is 0.057", False),
        ("below 1e-4", "is 3e-05", True),
        ("below 10 % of", "9.8%", True),
        ("over 50 %", "50%", False),
        ("10-fold or more", "grew 10-fold", True),
    ],
)
def test_a_number_on_the_wrong_side_of_a_line_is_seen(line, seen, beyond):
    assert is_beyond(line, seen) is beyond


FOLDER = Path(health.__file__).parent


def calls_of_found():
    """(file, first line, last line) of each call of `found` in the rules."""
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "found":
                yield file.name, node.lineno, node.end_lineno


def test_every_branch_that_finds_something_has_a_case(monkeypatch):
    reached, told, plain = set(), [], Rule.found

    def seen(self, *args):
        frame = sys._getframe(1)
        reached.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        told.append(plain(self, *args))
        return told[-1]

    monkeypatch.setattr(Rule, "found", seen)
    for run, *_ in CASES:
        diagnose(run)
    calls = list(calls_of_found())
    modules = [import_module(f"hookkit.health.{file.stem}") for file in FOLDER.glob("*.py")]
    rules = {id(r): r for m in modules for r in vars(m).values() if isinstance(r, Rule)}

    missed = [(f, a) for f, a, b in calls if not any((f, n) in reached for n in range(a, b + 1))]
    assert len(calls) > 40
    assert missed == []
    shown = [{f.threshold, f.source, f.cause, f.fix} for f in told]
    texts = [{r.threshold, r.source, r.cause, r.fix} for r in rules.values()]
    silent = [own for own in texts if not any(len(own & parts) > 1 for parts in shown)]
    assert silent == []


def test_no_line_holds_the_line_of_another_severity():
    told = [f for run, *_ in CASES for f in diagnose(run)]

    assert [
        f.threshold for f in told if re.search(r"a (warning|note|error) (if|from)", f.threshold)
    ] == []
    assert {r.name for r in RULES} - {f.rule for f in told} == {
        "no_step",
        "only_pulls",
        "unregistered",
    }


@pytest.mark.parametrize(
    ("note", "cause"),
    [
        ("The model's input was not finite: look at the data.", "the data"),
        (SPOILED, "a step that made"),
        (
            "Its weights are finite: if its input was not, look at what runs between 1 and it.",
            "log",
        ),
        ("", "overflow, log"),
    ],
)
def test_the_cause_of_nan_is_what_the_flight_recorder_saw(note, cause):
    assert found(incident("activation", note), "non_finite").cause.startswith(("a function", cause))


def test_a_layer_that_grew_before_it_overflowed_has_its_growth_as_cause():
    note = "Its weights are finite: if its input was not, look at what runs between 1 and it."

    grew = incident("activation", note, history=[1.0, 30.0, 4e3])

    assert "values that grew" in found(grew, "non_finite").cause
    assert "the loss itself" in found(incident("loss", name=""), "non_finite").cause
    assert "a derivative" in found(incident("gradient"), "non_finite").cause


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


def flown(model, x, lr=0.01, spoil=None):
    """A run of six steps in which something is not finite from the fourth one on."""
    torch.manual_seed(0)
    opt = torch.optim.SGD(model.parameters(), lr)
    with watch(model, opt, FlightRecorder("report")) as w:
        for i in range(6):
            opt.zero_grad()
            if i == 3 and spoil is not None:
                spoil(model)
            model(x if i < 3 or spoil is not None else x * np.nan).sum().backward()
            opt.step()
    return w.run_record()


def test_the_recorders_own_incidents_have_the_cause_that_it_names():
    x = torch.rand(4, 2) + 1
    plain, logs = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), Log())

    def spoil(model):
        model[0].weight.data.fill_(np.inf)

    def negate(model):
        model[0].bias.data.fill_(-50.0)

    data = found(flown(plain, x), "non_finite")
    weight = found(flown(nn.Sequential(nn.Linear(2, 2)), x, spoil=spoil), "non_finite")
    function = found(flown(logs, x, 0.0, spoil=negate), "non_finite")

    assert "data" in data.cause
    assert "learning rate that is too high" not in data.cause
    assert "a step that made the weights NaN" in weight.cause
    assert (function.layers, "log, sqrt" in function.cause) == (("1",), True)
