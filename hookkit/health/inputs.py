"""The rule on the data: too large, too small, or far from 0, by what the first layers are given.

What a layer is given was recorded in the first batch (`moments.variation`). In a compiled model it
was not: there large data show in what the first layers give.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import LECUN, Finding, Rule, rule
from hookkit.health.layer_order import given_data, given_numbers
from hookkit.health.run_view import RunView
from hookkit.records import Record

# The RMS of inputs, where 1 is usual; healthy trainings reach 2.3 (hookkit, measured)
LARGE = 30
# What weights of the usual size make of that (hookkit, measured)
LARGE_OUTPUT = 20
# The largest size of an input, and the norm of what one output is made of. Healthy ones begin at
# 0.3 and 0.25; vectors of length 1 with many elements, or with few that are not 0, are usual.
SMALL, SMALL_NORM = 0.1, 0.25
# Of the mean square of inputs, the share that differs between samples: a standard deviation of a
# tenth of the mean. Healthy trainings begin at 0.27 (hookkit, measured).
FAR = 0.01


@rule(
    needs=("activations",),
    threshold="RMS above 30, where standardised inputs have 1",
    source=f"{LECUN}; 30: hookkit, measured",
    cause="inputs that are not standardised (0-255 images, prices, times of 0 to 1000)",
    fix="scale the inputs to mean 0 and standard deviation 1: (x - mean) / std, with mean and std "
    "of the training set",
)
def input_scale(run: RunView) -> Iterator[Finding]:
    """A layer that is given the data, and they are huge, tiny or far from 0: each input."""
    record = run.activations
    known = np.isfinite(read.meta(record, "given_rms", np.nan))
    rows = [row for row in given_numbers(run, record) if known[row]]
    judge = _by_inputs if rows else _by_output
    for row in rows or given_data(run, record):
        what, says, severity = judge(run, record, row)
        normed = "Norm" in "".join(record.types[row : row + 2])
        if says is not None:
            where = read.where(record, [row], read.FIRST)
            yield says.found("note" if normed else severity, what, *where)


def _by_inputs(run: RunView, record: Record, row: int) -> tuple[str, Rule | None, str]:
    """What is wrong with the data that a layer is given: in words, the rule that says so, how bad.

    The rule is None if nothing is.
    """
    rms, most, share = (
        float(read.meta(record, f"given_{key}", np.nan)[row]) for key in ("rms", "max", "variation")
    )
    name = record.names[row]
    if rms > LARGE:
        what = f"what {name} is given has RMS {rms:.3g} before training"
        return what, input_scale, "error" if run.fails else "warning"
    if most < SMALL and (norm := rms * _fan_in(run, name) ** 0.5) < SMALL_NORM:
        what = f"what {name} is given is at most {most:.2g} in size, and {norm:.2g} is the norm of "
        return f"{what}what makes one output", _SMALL, "warning"
    if share < FAR and not run.excused and (run.fails or run.has_learnt_little):
        what = (
            f"only {share:.2g} of the mean square of what {name} is given differs between samples"
        )
        return what, _FAR, "warning"
    return "", None, ""


def _by_output(run: RunView, record: Record, row: int) -> tuple[str, Rule | None, str]:
    """The same, from what the layer gives."""
    size = _spread_without_bias(run, record, row)
    what = f"the output of {record.names[row]}, which is given the data, has standard deviation "
    severity = "error" if run.fails else "warning"
    return (
        f"{what}{size:.3g} before training",
        _LARGE_OUTPUT if size > LARGE_OUTPUT else None,
        severity,
    )


_LARGE_OUTPUT = input_scale.but(
    threshold="above 20, where standardised inputs give about 1",
    source=f"{LECUN}; 20: hookkit, measured",
    cause=f"{input_scale.cause}, or a first layer that begins too large",
)

_SMALL = input_scale.but(
    threshold="below 0.1 in size and a norm below 0.25, where standardised inputs have RMS 1",
    source=f"{LECUN}; 0.1 and 0.25: hookkit, measured",
    cause="inputs that were divided too often (by 255, and by 255 again), or are in a unit that "
    "makes them tiny",
)

_FAR = input_scale.but(
    threshold="below 0.01: a standard deviation of a tenth of the mean",
    source=f"{LECUN}; a tenth: hookkit, measured",
    cause="inputs that are far from 0, so that their mean hides what differs",
)


def _fan_in(run: RunView, name: str) -> float:
    """Of how many inputs a layer makes one output; 1 if that is not known."""
    params = run.recorded.params
    if params is None or "shape" not in params.meta:
        return 1.0
    rows = [i for i in read.matrices(params) if params.names[i].rpartition(".")[0] == name]
    return float(np.prod(params.meta["shape"][rows[0]][1:])) if rows else 1.0


def _spread_without_bias(run: RunView, record: Record, row: int) -> float:
    """The spread of a layer's first output, without what its bias adds where that is known."""
    rms, std = (read.table(record, s)[row, 0] for s in ("rms", "std"))
    name, params = f"{record.names[row]}.bias", run.recorded.params
    if params is None or name not in params.names:
        return float(std)
    at = params.names.index(name)
    n = read.meta(params, "numel", 0)[at]
    bias = np.square(read.table(params, "weight_norm")[at, 0]) / n if n else 0.0
    return float(min(std, np.sqrt(max(np.square(rms) - bias, 0.0))))
