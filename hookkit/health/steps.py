"""Rules on the optimizer's other settings: momentum, weight decay, and the direction of its steps.

The size of its steps is in `learning_rate`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, rule
from hookkit.health.learning_rate import lr_too_high
from hookkit.health.loss_expectations import NEVER_BELOW_ZERO
from hookkit.health.run_view import RunView
from hookkit.records import Record

# From here on each gradient is carried on for more than 100 steps
HIGH_MOMENTUM = 0.99
# Weight decay that takes 1 % a step; or weights below 10 % of their first norm (measured)
DECAY_PER_STEP, SHRUNK = 0.01, 0.1
# A decay of a usual size is not to blame where the rate is too high. Dosovitskiy et al. 2021 (ViT),
# table 3: up to 0.3
USUAL_DECAY = 0.3
# The same where decay is seen to outweigh the gradient (measured)
HALVED = 0.5


@rule(
    threshold="above 0.99, where the loss does not fall",
    source="the geometric series: steps that agree add up to 1 / (1 - momentum) times the learning "
    "rate; Sutskever et al. 2013: up to 0.999, on a schedule that begins at 0.5",
    cause="a momentum that is too high for this learning rate, or for so short a run",
    fix="use momentum=0.9 (as in torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)), or "
    "divide the learning rate by as much as the series adds",
)
def momentum(run: RunView) -> Iterator[Finding]:
    """A momentum so close to 1 that steps go on for hundreds more, while the loss does not fall."""
    if "momentum" not in run.info:
        raise read.Missing("momentum unknown")
    most = max(run.info["momentum"], default=0.0)
    n, carried = run.recorded.n_steps, 1 / max(1 - most, 1e-9)
    what = f"momentum {most:g} carries each gradient on for {carried:.0f} steps (the run has {n})"
    if HIGH_MOMENTUM < most < 1 and run.fails:
        yield momentum.found("warning", f"{what}, and the loss does not fall", (), run.all_steps)
    elif HIGH_MOMENTUM < most < 1 and carried > n:
        yield _LONGER_THAN_RUN.found("warning", what, (), run.all_steps)


_LONGER_THAN_RUN = momentum.but(threshold="above 0.99, and above 1 - 1/n for n steps")


@rule(
    threshold="over 1 % of the weight a step",
    source="hookkit, measured; usual settings decay 0.05 % a step or less",
    cause="weight decay outweighs the gradient",
    fix="divide the optimizer's weight_decay by 10 or more",
)
def weight_decay(run: RunView) -> Iterator[Finding]:
    """Weights that decay faster than the gradient can hold them."""
    params = run.recorded.params
    if params is None and "weight_decay" not in run.info:
        raise read.Missing("no parameters")
    share, decay = _decay_per_step(run)
    by_rate = share > DECAY_PER_STEP and decay <= USUAL_DECAY  # the other factor
    if by_rate and rate_is_too_high(run):
        return
    if share > DECAY_PER_STEP:
        says = _RATE_OF_DECAY if by_rate and run.info.get("optimizer") == "AdamW" else weight_decay
        what = f"learning rate × weight decay takes {read.percent(share)} of each weight a step"
        severity = "warning" if run.learns else "error"
        yield says.found(severity, what, (), run.all_steps)
    elif params is not None and len(params) >= read.MIN_RECORDS:
        yield from _shrank(run, params)


def rate_is_too_high(run: RunView) -> bool:
    """Whether `lr_too_high` alarms."""
    try:
        return any(f.severity != "note" for f in lr_too_high.check(run))
    except read.Missing:
        return False


def _decay_per_step(run: RunView) -> tuple[float, float]:
    """The largest share of a weight that decay takes in one step, and the weight decay itself."""
    record = run.recorded.params
    if record is not None and "weight_decay" in record.meta and "lr" in record.values:
        rates = np.nan_to_num(record.values["lr"]).max(axis=1, initial=0.0)
        pairs = [*zip(rates.tolist(), record.meta["weight_decay"], strict=True)]
    else:
        pairs = [*zip(run.info.get("lr", ()), run.info.get("weight_decay", ()), strict=False)]
    return max(((lr * decay, decay) for lr, decay in pairs), default=(0.0, 0.0))


def _shrank(run: RunView, params: Record) -> Iterator[Finding]:
    """Matrices that shrink, because decay outweighs the gradient or without a loss that falls."""
    which = read.judged_matrices(params)
    which = which[~read.has_no_gradient(params)[which]]  # `zero_gradient` reports those
    norm = read.table(params, "weight_norm")[which]
    left = read.median(norm[:, -5:], axis=1) / norm[:, 0]
    decay = read.meta(params, "weight_decay", 0.0).astype(float)[which]
    pull = decay * read.median(norm / read.table(params, "grad_norm")[which], axis=1)
    lines = [(_OUTWEIGHS, "warning" if run.learns else "error", (left < HALVED) & (pull > 1))]
    lines += [] if run.learns else [(_SHRANK, "error", left < SHRUNK)]
    for says, severity, hit in lines:
        if len(which) and hit.mean() >= 0.5:
            what = f"{hit.sum()} of {len(which)} matrices shrank to "
            what += f"{read.percent(read.median(left[hit]))} of their first norm"
            if says is _OUTWEIGHS:
                what += f", and decay × weight is {read.median(pull[hit]):.3g} times the gradient"
            layers, _ = read.where(params, which[hit])
            yield says.found(severity, what, layers, run.all_steps)
            return


_RATE_OF_DECAY = lr_too_high.but(
    threshold="over 1 % of the weight a step, at a weight decay of 0.3 or less",
    source="Dosovitskiy et al. 2021 (ViT), table 3: up to 0.3; 1 %: hookkit, measured",
)

_SHRANK = weight_decay.but(
    threshold="most matrices below 10 % of their first norm, and no loss that falls",
    source="hookkit, measured",
)

_OUTWEIGHS = weight_decay.but(
    threshold="most matrices below half of their first norm, where decay × weight is larger than "
    "the gradient, by the median over the run",
    source="exact: which of the two pulls harder; half: hookkit, measured",
)


@rule(
    threshold="any rise, under maximize=True and with a loss that is to fall",
    source="PyTorch's documentation of optimizers: maximize turns the direction of the steps",
    cause="the optimizer maximises the loss",
    fix="make the optimizer without maximize=True",
)
def ascent(run: RunView) -> Iterator[Finding]:
    """A loss that the optimizer pushes up, though it cannot be meant to rise."""
    series = run.losses_of(20)
    start, end = read.start_level(series), read.end_level(series)
    if run.info.get("maximize") and run.loss_name in NEVER_BELOW_ZERO and end > start:
        what = f"the loss rises from {start:.3g} to {end:.3g}, and the optimizer was made with "
        yield ascent.found("error", f"{what}maximize=True", (), run.all_steps)
