"""How large steps are: against the weights, and against what the optimizer is made for.

Builds on `reading` and `run_view`. `learning_rate` judges by it.
"""

from __future__ import annotations

import numpy as np

from hookkit.health import reading as read
from hookkit.health.reading import Bools
from hookkit.health.run_view import RunView
from hookkit.records import Floats, Ints, Record

# A rate below this share of its largest is none (hookkit, measured)
NO_RATE = 1e-3
# One step that changes half of the weights, and how far all together blow them up while the loss
# falls (hookkit, measured)
LEAP, BLOWN_UP = 0.5, 4
# A gain that most weights neither begin with nor may be blown up to; tiny ones grow to a usual one.
# 1.43 in healthy trainings (measured); torch.nn.init.calculate_gain: tanh's 5/3 at most
UNUSUAL_GAIN = 1.5


def update_ratios(run: RunView, which: Ints | None = None) -> tuple[Record, Ints, Floats]:
    """update:weight of `which`, all matrices, that did not begin at 0 and that a gradient moves."""
    record = run.params
    if run.info.get("optimizer") == "LBFGS" and not run.fails:
        raise read.Missing("LBFGS searches its own step")  # without line_search_fn it does not
    ratio = read.table(record, "update_ratio")
    norm = read.table(record, "weight_norm")
    ratio = np.where(norm > 0, ratio, np.nan)  # from exactly 0 any step is infinite
    by_decay = read.has_no_gradient(record)
    moving = (np.nan_to_num(ratio).max(axis=1) > 0) & ~by_decay & (norm[:, 0] != 0)
    which = read.matrices(record) if which is None else which
    which = which[moving[which]]
    if not len(which):
        raise read.Missing("no matrix that began away from 0 moves")
    return record, which, ratio[which]


def early_of(record: Record, ratio: Floats) -> Floats:
    """Each matrix's median over the first 20 steps, of as many records as they have."""
    first = record.steps < record.steps[0] + 20
    return np.asarray(read.median(ratio[:, first], axis=1), np.float64)


def mean_step(record: Record, ratio: Floats) -> Floats:
    """The mean update:weight of each matrix's steps."""
    return np.asarray(np.nansum(ratio * record.spans, axis=1) / record.spans.sum())


def n_steps(record: Record) -> int:
    """Steps from the first one recorded to the last, with those between."""
    first, last = read.span(record)
    return last - first + 1


def growth(record: Record, which: Ints) -> Floats:
    """How many times as large each matrix is at the end as at first."""
    norm = read.table(record, "weight_norm")[which]
    return np.asarray(read.median(norm[:, -5:], axis=1) / norm[:, 0])


def largest(ratio: Floats) -> Floats:
    """The largest update:weight of each matrix; -1 where none is known."""
    return np.asarray(np.nanmax(np.where(np.isfinite(ratio), ratio, -1.0), axis=1))


def blown_up(record: Record, which: Ints, ratio: Floats) -> Bools:
    """Which matrices one step has changed by half, and all together made 4 times as large."""
    return (largest(ratio) > LEAP) & (growth(record, which) > BLOWN_UP)


def last_gain(record: Record, which: Ints) -> Floats:
    """The RMS of each matrix at the end, times √fan_in (or √fan_out); inf where it is not known."""
    if "weight_rms" not in record.values or "shape" not in record.meta:
        return np.full(len(which), np.inf)
    shapes = [record.meta["shape"][i] for i in which]
    fans = [max(shape[0], np.prod(shape[1:])) for shape in shapes]
    return np.asarray(read.median(record.values["weight_rms"][which, -5:], axis=1) * np.sqrt(fans))


def by_rate(record: Record, which: Ints) -> list[Bools]:
    """Which matrices share optimizer and learning rate: each such group is judged by itself."""
    if "lr" not in record.values or "optimizer" not in record.meta:
        return [np.ones(len(which), bool)]
    rates = np.nan_to_num(read.table(record, "lr")[which].max(axis=1), nan=-1.0)
    keys = [*zip(read.meta(record, "optimizer", "")[which], rates.tolist(), strict=True)]
    return [np.array([key == own for key in keys]) for own in dict.fromkeys(keys)]


def rates(run: RunView, record: Record, which: Ints) -> Floats:
    """(n, records) learning rates of parameters; of the run where they were not recorded."""
    if "lr" in record.values:
        return read.table(record, "lr")[which]
    rates = [lr for lr in run.info.get("lr", ()) if lr > 0]
    return np.full((len(which), len(record)), min(rates, default=np.nan))


def rate_gone(run: RunView, record: Record, which: Ints) -> float:
    """In what share of the records the largest learning rate is almost 0."""
    rate = np.nan_to_num(rates(run, record, which), nan=-1.0).max(axis=0)
    known = rate[rate >= 0]
    return float((known < NO_RATE * known.max()).mean()) if len(known) and known.max() > 0 else 0.0


def shares(run: RunView, record: Record, which: Ints) -> Floats:
    """(n, records) Adam's steps as shares of its learning rate, by element; inf for others."""
    if run.info.get("optimizer") not in ("Adam", "AdamW", "NAdam"):
        return np.full((len(which), len(record)), np.inf)
    rate = rates(run, record, which)
    size = np.sqrt(read.meta(record, "numel", np.nan)[which])[:, None]
    step = read.table(record, "update_norm")[which] / size
    return np.asarray(np.where(rate > 0, step / rate, np.nan))


def share_of_rate(run: RunView, record: Record, which: Ints) -> float:
    """Adam's first steps as a share of its learning rate, by element; inf for other optimizers.

    The first one has the size of the rate, but for its eps (Kingma & Ba 2015, 2.1).
    """
    early = record.steps < record.steps[0] + 20
    share = shares(run, record, which)[:, early].max(axis=1, initial=0.0)
    return float(np.nan_to_num(read.median(share), nan=np.inf))


def late_share(run: RunView, record: Record, which: Ints) -> Floats:
    """Each matrix's steps in the later half, as a share of what they are while gradients agree.

    That is the rate for Adam (`shares`), and |gradient| × rate / (1 - momentum) for SGD; NaN for
    others.
    """
    size = shares(run, record, which)
    if run.info.get("optimizer") == "SGD":
        most = read.table(record, "grad_norm")[which] * rates(run, record, which)
        most /= 1 - max(run.info["momentum"])
        size = np.where(most > 0, read.table(record, "update_norm")[which] / most, np.nan)
    return np.asarray(read.median(size[:, len(record) // 2 :], axis=1))
