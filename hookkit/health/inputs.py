"""The rule on the data: too large, or too small, by what the first layers are given.

What a layer is given was recorded in the first batch (`moments.variation`); in a compiled model it
was not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import LECUN, Finding, rule
from hookkit.health.layer_order import given_numbers
from hookkit.health.run_view import RunView

# The RMS of inputs, where 1 is usual; healthy trainings reach 2.3 (hookkit, measured)
LARGE = 10
# The largest size of an input, and the norm of what one output is made of. Healthy ones begin at
# 0.3 and 0.25; vectors of length 1 with many elements, or with few that are not 0, are usual.
SMALL, SMALL_NORM = 0.1, 0.25


@rule(
    needs=("activations",),
    threshold="RMS above 10, where standardised inputs have 1",
    source=f"{LECUN}; 10: hookkit, measured",
    cause="inputs that are not standardised (0-255 images, prices, times of 0 to 1000)",
    fix="scale the inputs to mean 0 and standard deviation 1: (x - mean) / std, with mean and std "
    "of the training set",
)
def input_scale(run: RunView) -> Iterator[Finding]:
    """A layer that is given the data, and they are huge or tiny: each input."""
    record = run.activations
    rms, most = (read.meta(record, f"given_{key}", np.nan).astype(float) for key in ("rms", "max"))
    if not np.isfinite(rms).any():
        raise read.Missing("what layers are given was not recorded")
    for row in given_numbers(run, record):
        name, where = record.names[row], read.where(record, [row], read.FIRST)
        normed = "Norm" in "".join(record.types[row : row + 2])
        if rms[row] > LARGE:
            what = f"what {name} is given has RMS {rms[row]:.3g} before training"
            severity = "note" if normed else "error" if run.fails else "warning"
            yield input_scale.found(severity, what, *where)
        elif most[row] < SMALL and (norm := rms[row] * _fan_in(run, name) ** 0.5) < SMALL_NORM:
            what = f"what {name} is given is at most {most[row]:.2g} in size, and {norm:.2g} is "
            what += "the norm of what makes one output"
            yield _SMALL.found("note" if normed else "warning", what, *where)


_SMALL = input_scale.but(
    threshold="below 0.1 in size and a norm below 0.25, where standardised inputs have RMS 1",
    source=f"{LECUN}; 0.1 and 0.25: hookkit, measured",
    cause="inputs that were divided too often (by 255, and by 255 again), or are in a unit that "
    "makes them tiny",
)


def _fan_in(run: RunView, name: str) -> float:
    """Of how many inputs a layer makes one output; 1 if that is not known."""
    params = run.recorded.params
    if params is None or "shape" not in params.meta:
        return 1.0
    rows = [i for i in read.matrices(params) if params.names[i].rpartition(".")[0] == name]
    return float(np.prod(params.meta["shape"][rows[0]][1:])) if rows else 1.0
