"""How rules read records: rows by type, windows, robust averages; `Missing` if it is not there.

Builds on `records`. Medians and windows of many records stand for "lasting": no rule reports
anything that was seen in one batch alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hookkit.records import Floats, Record, Run

# With fewer records than this nothing is judged. Half as many are enough if they are spread over
# `SPREAD_STEPS` steps or more, since such batches differ more than neighbours do.
MIN_RECORDS = 10

SPREAD_STEPS = 40

# Relative difference below which two norms may belong to the same values: the last digits of a
# norm depend on the order in which it was summed.
SAME_NORM = 1e-6
# AUTOTRAINER (ICSE 2021): a first layer's gradient below 1e-4 and below 1e-3 of the last one's
VANISHED, VANISHED_RATIO = 1e-4, 1e-3

RELU_LIKE = frozenset({"ReLU", "ReLU6"})
PRE_ACTIVATION = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d")
EMBEDDINGS = frozenset({"Embedding", "EmbeddingBag"})


class Missing(Exception):
    """The run does not hold what a rule needs; the message says what, in a few words."""


def enough(record: Record | None, what: str) -> Record:
    """`record`, if it is there and long enough to judge.

    Raises:
        Missing: it is not.
    """
    if record is None or not record.names:
        raise Missing(f"no {what}")
    half = len(record) >= MIN_RECORDS // 2
    spread = half and record.steps[-1] - record.steps[0] >= SPREAD_STEPS
    if len(record) < MIN_RECORDS and not spread:
        raise Missing(f"fewer than {MIN_RECORDS} records of {what}")
    return record


def table(record: Record, statistic: str) -> Floats:
    """(n_layers, n) of a statistic."""
    if statistic not in record.values:
        raise Missing(f"{statistic} not recorded")
    return record.values[statistic]


def rows(record: Record, types: Iterable[str]) -> list[int]:
    """Rows whose module class is one of `types`, in execution order."""
    wanted = set(types)
    return [i for i, t in enumerate(record.types) if t in wanted]


def matrices(record: Record) -> list[int]:
    """Rows of trainable parameters with two dimensions or more, without embeddings."""
    ndim = meta(record, "ndim", 2)
    trainable = meta(record, "requires_grad", True)
    return [
        i
        for i, t in enumerate(record.types)
        if ndim[i] >= 2 and trainable[i] and t not in EMBEDDINGS
    ]


def meta(record: Record, key: str, default: Any) -> list[Any]:
    """A list per row from `meta`, or `default` for each row."""
    found = record.meta.get(key)
    return list(found) if found is not None else [default] * len(record.names)


def median(values: Floats, axis: int | None = None) -> Any:
    """The median of the finite values; NaN where there are none."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, for an all-NaN slice
        return np.nanmedian(np.where(np.isfinite(values), values, np.nan), axis=axis)


def last_half(record: Record) -> slice:
    """The later half of the records, at least `MIN_RECORDS` of them."""
    return slice(min(len(record) // 2, max(len(record) - MIN_RECORDS, 0)), None)


def span(record: Record, window: slice = slice(None)) -> tuple[int, int]:
    """First and last optimizer step of a window of records."""
    steps = record.steps[window]
    last = int(steps[-1]) + int(record.spans[window][-1]) - 1
    return int(steps[0]), last


def names(record: Record, which: Iterable[int]) -> tuple[str, ...]:
    """Names of rows."""
    return tuple(record.names[i] for i in which)


def smallest(series: Floats) -> float:
    """The smallest known value; 0 where none is known."""
    known = series[np.isfinite(series)]
    return float(known.min()) if len(known) else 0.0


def input_size(params: Record | None, layer: str) -> float:
    """About how large a layer's inputs are, estimated from the gradients of its weight and bias.

    The weight's gradient is a sum of errors times inputs, the bias's a sum of the errors alone, so
    that their ratio, per input, is the size of an input. 1 where a gradient is not known or is 0.
    """
    names = [f"{layer}.weight", f"{layer}.bias"]
    if params is None or not set(names) <= set(params.names):
        return 1.0
    rows = [params.names.index(name) for name in names]
    grads = table(params, "grad_norm")[rows]
    numel = [meta(params, "numel", 0)[i] for i in rows]
    with np.errstate(all="ignore"):
        ratio = float(median(grads[0] / grads[1]))
    if not all(numel) or not ratio > 0:
        return 1.0
    return ratio / float(np.sqrt(numel[0] / numel[1]))


def has_changed(record: Record) -> npt.NDArray[np.bool_]:
    """(n_params,) whether each parameter has changed over the run, also between recorded steps.

    By its bits, where they were compared; else by its norm, to `SAME_NORM`.
    """
    if "moved" in record.meta:
        return np.array(record.meta["moved"], bool)
    norms = np.nan_to_num(table(record, "weight_norm"))
    return np.asarray(np.ptp(norms, axis=1) > SAME_NORM * norms.max(axis=1, initial=0))


def has_no_gradient(record: Record) -> npt.NDArray[np.bool_]:
    """(n_params,) whether each gradient is known, and exactly 0 in all records."""
    grads = table(record, "grad_norm")
    return np.asarray(np.isfinite(grads).any(axis=1) & (np.nan_to_num(grads) == 0).all(axis=1))


def trained_in_turns(run: Run) -> bool:
    """Whether some matrices are trained in some steps and others in others: a GAN's two players.

    No matrix moves at (nearly) every step, and two of them never move in the same step, but each
    moves between steps of the other.
    """
    if run.params is None or len(run.params) < MIN_RECORDS:
        return False
    moves = np.nan_to_num(table(run.params, "update_norm")[matrices(run.params)]) > 0
    if (has_changed(run.params)[matrices(run.params)] & ~moves.any(axis=1)).any():
        return True  # it moves, but always in steps that were not recorded
    moves = moves[moves.mean(axis=1) > 0.1]
    if len(moves) < 2 or moves.mean(axis=1).max() > 0.95:
        return False
    together = moves.astype(float) @ moves.T.astype(float)
    first, second = np.unravel_index(int(together.argmin()), together.shape)
    a, b = np.flatnonzero(moves[first]), np.flatnonzero(moves[second])
    return bool(together.min() == 0 and a[0] < b[-1] and b[0] < a[-1])


def gradients_fade(record: Record) -> bool:
    """Whether the first matrix's gradients vanish against the last one's.

    Then all but the last matrices hardly move, whatever the learning rate: `vanishing` reports why.
    """
    which = matrices(record)
    if len(which) < 3 or "grad_rms" not in record.values:
        return False
    size = median(record.values["grad_rms"][which], axis=1)
    return bool(size[0] < VANISHED and size[0] < VANISHED_RATIO * size[-1])
