"""Rules on the data: inputs, by what the first layers are given, and targets, by the loss.

What a layer is given was recorded in the first step (`moments.variation`); in a compiled model it
was not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import LECUN, Finding, rule
from hookkit.health.layer_order import ends, given_numbers
from hookkit.health.loss_expectations import ERRORS, asks
from hookkit.health.reading import end_level, known
from hookkit.health.run_view import RunView
from hookkit.health.steps import rate_is_too_high

# The RMS of inputs, where 1 is usual; healthy trainings reach 2.3 (hookkit, measured)
LARGE = 10
# The largest size of an input, and the norm of what one output is made of. Healthy ones begin at
# 0.3 and 0.25; vectors of length 1 with many elements, or with few that are not 0, are usual.
SMALL, SMALL_NORM = 0.1, 0.25
# Where standardised targets give an error of about 1 (hookkit, measured)
LARGE_ERROR = 20
# What an output grows to, and by, for targets that nobody scaled, where the loss is large: healthy
# ones end at 4, after 19-fold growth, but for values of agents: these end at 36 (hookkit, measured)
FAR_OUTPUT, OF_AGENT, FAR_GROWTH = 30, 150, 30


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
        severity = "note" if normed else "error" if run.fails else "warning"
        if rms[row] > LARGE:
            what = f"what {name} is given has RMS {rms[row]:.3g} before training"
            yield input_scale.found(severity, what, *where)
        elif most[row] < SMALL and (norm := rms[row] * _fan_in(run, name) ** 0.5) < SMALL_NORM:
            what = f"what {name} is given is at most {most[row]:.2g} in size, and {norm:.2g} is "
            what += "the norm of what makes one output"
            yield _SMALL.found(severity, what, *where)


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


@rule(
    needs=("losses",),
    threshold="above 20 at first and at the end, where standardised targets give about 1",
    source=f"{LECUN} (here of targets); 20: hookkit, measured",
    cause="targets that are not standardised, so that the output takes very many steps to reach "
    "them; or a loss that is summed over the batch",
    fix="scale the targets to mean 0 and standard deviation 1, (y - mean) / std; average the loss: "
    'reduction="mean"',
)
def target_scale(run: RunView) -> Iterator[Finding]:
    """A regression whose errors are huge from first to last."""
    name, first = run.loss_name, float(known(run.losses)[0])
    if name not in ERRORS:
        yield from _far_outputs(run) if not _by_class(name) else ()
        return
    error, last = (_error(name, loss) for loss in (first, end_level(run.losses)))
    if min(error, last) > LARGE_ERROR:
        what = f"the first error is {error:.3g} ({name} {first:.3g}), and the last is {last:.3g}"
        yield target_scale.found("warning", what, (), (0, 0))


def _by_class(name: str) -> bool:
    return "entropy" in name or name.startswith(("nll", "bce", "ctc", "kldiv"))


def _far_outputs(run: RunView) -> Iterator[Finding]:
    """Outputs that have to grow far to reach their targets, of a loss that is not known.

    One head of several, or a value beside a policy. Not where the steps are too large.
    """
    record = run.recorded.activations
    if record is None or not end_level(run.losses) > LARGE_ERROR or rate_is_too_high(run):
        return
    last = read.are(record.types, read.PRE_ACTIVATION)
    rows = [i for i in ends(run, record) if last[i]]
    rms = read.table(record, "rms")[rows]
    began, ended = read.median(rms[:, :3], axis=1), read.median(rms[:, -10:], axis=1)
    least = OF_AGENT if asks(run) else FAR_OUTPUT
    far = (ended > least) & (ended > FAR_GROWTH * began)
    if far.any():
        what = f"what {record.names[rows[int(ended.argmax())]]} gives has grown from RMS "
        what += f"{began[ended.argmax()]:.3g} to {ended.max():.3g}"
        where = read.where(record, [row for row, hit in zip(rows, far, strict=True) if hit])
        here = _FAR_OUTPUT.but(threshold=_FAR_OUTPUT.threshold.replace("30,", f"{least:g},", 1))
        yield here.found("warning", what, *where)


_FAR_OUTPUT = target_scale.but(
    threshold="an output that grows to RMS above 30, where standardised targets need 1, 30-fold, "
    "and a loss that ends above 20",
    source=f"{LECUN} (here of targets); 20 and 30: hookkit, measured",
    cause="targets (of one head, or returns) that are not standardised: the output takes very many "
    "steps to reach them, and their gradients drown those of other heads",
    fix="scale the targets to mean 0 and standard deviation 1, (y - mean) / std: boxes as shares "
    "of the image, returns by a running standard deviation",
)


def _error(name: str, loss: float) -> float:
    """About how far the output is off, from a squared or an absolute error."""
    return float(max(loss, 0.0) ** (0.5 if name == "mse" else 1.0))
