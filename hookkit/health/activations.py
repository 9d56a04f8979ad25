"""Rules on what layers give: badly scaled from the start, or too noisy in training.

What they are given is in `inputs`; units that give nothing are in `units`; NaN, Inf and the range
of float16 in `precision`; attention's logits in `attention`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import SAGEMAKER, Finding, rule
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Ints

# Three times the largest gain of torch.nn.init.calculate_gain, tanh's 5/3
LARGE_GAIN = 5.0
# PyTorch's own begin with a gain of 1/√3 = 0.58, GPT's with 0.14 in small nets (hookkit, measured)
SMALL_GAIN = 0.07
# Healthy trainings begin with an RMS of at most 1.1 (hookkit, measured)
LARGE_EMBEDDING = 3
# Beyond this a net that does not learn has its cause (hookkit, measured)
BROKEN_RATIO = 1e6
# A correlation of log size with depth: it grows or shrinks along the depth (measured)
ALONG_DEPTH = 0.8
# Srivastava et al. 2014, Dropout: 50 % to 80 % of hidden units are kept; 25 %: half of the least.
LEAST_KEPT = 0.25


@rule(
    needs=("activations",),
    threshold="over 1e6-fold along the depth, while the loss does not fall",
    source=f"{SAGEMAKER}, PoorWeightInitialization, compares the same; 1e6: hookkit, measured",
    cause="weights that begin too large or too small for this depth",
    fix="initialise each weight for its fan-in, torch.nn.init.kaiming_normal_(layer.weight), or "
    "put norm layers (nn.LayerNorm, nn.BatchNorm2d) between",
)
def bad_init(run: RunView) -> Iterator[Finding]:
    """Weights whose size, or what they make of the first batch, is far from what can be learnt."""
    by_size = [*_large_weights(run), *_large_embeddings(run), *_small_weights(run)]
    yield from by_size or _along_depth(run)


def _along_depth(run: RunView) -> Iterator[Finding]:
    """Activations that shrink or grow from layer to layer before training, and nothing is learnt.

    Not of the head, whose scale is free.
    """
    record = run.activations
    which = read.rows(record, read.PRE_ACTIVATION)[:-1]
    std = read.table(record, "std")[which, 0]
    if len(which) < 3 or not (std > 0).all() or not run.fails:
        return
    ratio = float(np.square(std.max() / std.min()))  # inf, where Python's ** would raise
    if not ratio > BROKEN_RATIO:
        return
    trend = float(np.corrcoef(np.arange(len(std)), np.log(std))[0, 1])
    if abs(trend) > ALONG_DEPTH:
        grows, large = ("grows", "large") if trend > 0 else ("shrinks", "small")
        what = f"the variance of layer outputs {grows} {ratio:.3g}-fold over {len(which) + 1} "
        what += "layers before training, and the loss does not fall"
        here = bad_init.but(cause=f"weights that begin too {large} for this depth")
        yield here.found("error", what, *read.where(record, which, read.FIRST))


def _large_weights(run: RunView) -> Iterator[Finding]:
    """Weights that begin several times as large as keeps the size of what they are given."""
    which, gain = _gains(run)
    hit = gain > LARGE_GAIN
    if hit.any() and hit.mean() > 0.5:
        what = f"the weights of {hit.sum()} of {len(which)} layers begin with a gain of "
        what += f"{read.median(gain[hit]):.3g}: their RMS times √fan_in"
        yield _LARGE_GAIN.found("warning", what, *read.where(run.params, which[hit], read.FIRST))


def _small_weights(run: RunView) -> Iterator[Finding]:
    """Weights that begin so small that hardly anything comes through, where the loss stays."""
    which, gain = _gains(run)
    which, gain = which[gain > 0], gain[gain > 0]
    hit = gain < SMALL_GAIN
    if hit.any() and hit.mean() > 0.5 and run.fails:
        what = f"the weights of {hit.sum()} of {len(which)} layers begin with a gain of "
        what += f"{read.median(gain[hit]):.2g}: their RMS times √fan_in; and the loss does not fall"
        yield _SMALL_GAIN.found("warning", what, *read.where(run.params, which[hit], read.FIRST))


def _gains(run: RunView) -> tuple[Ints, Floats]:
    """Matrices, and their RMS times √fan_in."""
    record = run.recorded.params
    if record is None or "shape" not in record.meta or "weight_rms" not in record.values:
        return np.zeros(0, np.int64), np.zeros(0)
    which = read.matrices(record)
    fan_in = np.array([np.prod(record.meta["shape"][i][1:]) for i in which])
    return which, record.values["weight_rms"][which, 0] * np.sqrt(fan_in)


def _large_embeddings(run: RunView) -> Iterator[Finding]:
    """Embeddings that begin several times as large as PyTorch's."""
    record = run.recorded.params
    if record is None or "weight_rms" not in record.values:
        return
    which = read.rows(record, read.EMBEDDINGS)
    size = record.values["weight_rms"][which, 0]
    hit = (size > LARGE_EMBEDDING) & read.trainable(record)[which]
    if hit.any():
        what = f"embeddings begin with RMS {size[hit].max():.3g}"
        where = read.where(record, which[hit], read.FIRST)
        yield _LARGE_EMBEDDING.found("warning", what, *where)


_LARGE_EMBEDDING = bad_init.but(
    threshold="above 3, where those of PyTorch begin with 1",
    source="PyTorch, nn.Embedding: initialised from N(0, 1); 3: hookkit, measured",
    cause="embeddings (or codes) that begin far from where the data are: steps need long to bring "
    "them there",
    fix="begin with small ones: torch.nn.init.normal_(embedding.weight, std=0.02)",
)

_SMALL_GAIN = bad_init.but(
    threshold="below 0.07 in most layers, an eighth of what PyTorch's begin with, while the loss "
    "does not fall",
    source="PyTorch, nn.Linear and nn.LSTM: 0.58 and about that; an eighth: hookkit, measured",
    cause="weights that begin too small: hardly anything comes through, forwards and backwards",
)

_LARGE_GAIN = bad_init.but(
    threshold="above 5 in most layers, where 1 keeps the size of what a layer is given",
    source="He et al. 2015: √2; torch.nn.init.calculate_gain: 5/3 at most, a third of this",
    cause="weights that begin too large: a standard deviation that does not shrink with the number "
    "of inputs",
)


@rule(
    needs=("activations",),
    threshold="less than 25 % is kept",
    source="Srivastava et al. 2014, Dropout: 50 % to 80 % of hidden units are kept; "
    "25 %: half of the least",
    cause="a dropout rate that is too high (p is the share that is dropped, not kept)",
    fix="lower p to 0.5 or less: nn.Dropout(p=0.5)",
)
def dropout(run: RunView) -> Iterator[Finding]:
    """Dropout that keeps less than a quarter."""
    rates = run.activations.meta.get("dropout") or {}
    hit = [name for name, rate in rates.items() if 1 - rate < LEAST_KEPT]
    if hit:
        what = f"dropout keeps {read.percent(1 - max(rates[name] for name in hit))} of what it is "
        severity = "error" if run.fails else "warning"
        yield dropout.found(severity, f"{what}given", hit, run.all_steps)
