"""Rules on activations: non-finite, or badly scaled from the start."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import loss_expectations
from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding
from hookkit.records import Floats, Record, Run

SAGEMAKER = "Amazon SageMaker Debugger"

_FIRST = frozenset({"RNN", "LSTM", "GRU", "MultiheadAttention", *read.EMBEDDINGS})


def non_finite(run: Run) -> Iterator[Finding]:
    """NaN or Inf: the first step, and the first layer in execution order."""
    if run.incidents:
        i = run.incidents[0]
        evidence = f"first non-finite {i.kind}{f' in {i.type}' if i.type else ''} at step {i.step}"
        yield _non_finite((i.name,) if i.name else (), i.step, evidence)
        return
    seen = [r for r in run.records if "nonfinite" in r.values]
    if not seen and run.losses is None:
        raise read.Missing("no activations")
    firsts = [f for r in seen if (f := _first(r)) is not None]
    broken = _loss_breaks(run)
    if not firsts and broken is not None:
        yield _non_finite((), broken, f"the loss stops being a number at step {broken}")
    for record, row, step in sorted(firsts, key=lambda f: f[2])[:1]:
        what = {"activation": "output", "gradient": "gradient", "param": "value"}[record.kind]
        evidence = f"the {what} of {record.names[row]} ({record.types[row]}) has NaN or Inf"
        note = ""
        if broken is None and record.kind != "activation" and _survived(run, record):
            note = ", and weights, activations and loss stay finite"
        elif step == record.steps[0] and broken is None and loss_expectations.learns(run):
            note = ", from the first step on, while the loss stays finite and falls"
        severity = "note" if note else "error"
        harmless = _MASK if record.kind == "activation" else _SKIPPED
        yield _non_finite((record.names[row],), step, evidence + note, severity, harmless)


_MASK = "a deliberate mask of -inf, most likely", "nothing, if it is a mask"
_SKIPPED = (
    "steps that a GradScaler leaves out while it looks for its scale, most likely",
    "nothing, if they are few",
)


def _survived(run: Run, record: Record) -> bool:
    """Whether gradients that were not finite did no harm: a fused optimizer left the step out."""
    own = np.nan_to_num(record.values["nonfinite"][:, -read.MIN_RECORDS :]) > 0
    seen = run.activations, run.params
    if seen == (None, None) or own.any(axis=0).all():
        return False
    if run.activations is not None and _first(run.activations) is not None:
        return False
    weights = None if run.params is None else run.params.values.get("weight_norm")
    if weights is None:
        return True
    ever, at_last = np.isfinite(weights).any(axis=1), np.isfinite(weights[:, -1])
    return bool((at_last | ~ever).all())


def _first(record: Record) -> tuple[Record, int, int] | None:
    """The earliest record with a non-finite value, and the row where it began."""
    if "nonfinite" not in record.values:
        return None
    bad = np.nan_to_num(record.values["nonfinite"]) > 0
    if not bad.any():
        return None
    at = int(bad.any(0).argmax())
    which = np.flatnonzero(bad[:, at])
    row = which[-1] if record.kind == "gradient" else which[0]  # backward runs from the end
    return record, int(row), int(record.steps[at])


def _loss_breaks(run: Run) -> int | None:
    """The step from which on a loss that was known is no number."""
    if run.losses is None or not np.isfinite(run.losses).any():
        return None
    if read.breaks_off(run.losses):
        return int(np.flatnonzero(np.isfinite(run.losses))[-1]) + 1
    return int(np.isinf(run.losses).argmax()) if np.isinf(run.losses).any() else None


def _non_finite(
    layers: tuple[str, ...],
    step: int,
    what: str,
    severity: str = "error",
    harmless: tuple[str, str] = ("", ""),
) -> Finding:
    return Finding(
        "non_finite",
        severity,
        layers,
        (step, step),
        what,
        "any NaN or Inf",
        "IEEE 754: both spread through every later sum",
        "overflow, log or division by 0, or a learning rate that is too high"
        if severity == "error"
        else harmless[0],
        "look at this layer's inputs in the steps before; lower the learning rate, add an eps, "
        "or clip gradients"
        if severity == "error"
        else harmless[1],
    )


def bad_init(run: Run) -> Iterator[Finding]:
    """Activations that shrink or grow from layer to layer in the first batch."""
    record = read.activations(run)
    yield from _amplifies(run, record)
    which = read.rows(record, read.PRE_ACTIVATION)
    if len(which) < 4:
        yield from _leaps(run, record, which)
        return
    std = read.table(record, "std")[which][:, 0]  # later ones show the steps, not the weights
    std = std[:-1]  # the head's scale is its own affair
    body = range(len(std))
    if not (std > 0).all():
        return
    ratio = float(np.square(std.max() / std.min()))  # Inf, where Python's ** would raise
    order = _order(np.log(std)) if ratio > 1 else 0.0
    grows = order > 0
    line = 10.0 * len(which)
    by_default = float(np.float64(6.0) ** len(body)) if order < 0 else 0.0
    if ratio > line and abs(order) > 0.8:
        fails = loss_expectations.learns(run) is False and ratio > min(by_default, 1e6)
        yield Finding(
            "bad_init",
            "note" if not fails else "error" if ratio > 1e6 else "warning",
            read.names(record, [which[i] for i in body]),
            read.span(record, slice(0, 1)),
            f"the variance of layer outputs {'grows' if grows else 'shrinks'} {ratio:.2g}-fold "
            f"over {len(which)} layers before training",
            f"over 10 × the number of layers ({line:.0f}), along the depth; where it shrinks, an "
            "alarm from 6-fold a layer: PyTorch's own weights behind a ReLU do that",
            f"10: {SAGEMAKER}, PoorWeightInitialization; times the layers: hookkit, measured; 6: "
            "variance 1 / (3 fan_in), of which a ReLU leaves half",
            f"weights that begin too {'large' if grows else 'small'} for this depth",
            "use He or Xavier initialisation, or put norm layers between",
        )


def _order(sizes: Floats) -> float:
    """How strictly sizes grow (1) or shrink (-1) along the depth, but for one of five or more.

    A layer may be registered out of its place: a stem behind the blocks.
    """
    place = np.arange(len(sizes))
    rest = [np.delete(place, i) for i in place] if len(place) > 4 else []
    with np.errstate(all="ignore"):
        orders = [float(np.corrcoef(k, sizes[k])[0, 1]) for k in (place, *rest)]
    return max((x for x in orders if np.isfinite(x)), key=abs, default=0.0)


def _amplifies(run: Run, record: Record) -> Iterator[Finding]:
    """A recurrence whose output is huge before training: each step makes it larger."""
    rms = read.table(record, "rms")[:, 0]
    hit = [i for i in read.rows(record, ("RNN",)) if rms[i] > 100]
    if hit:
        yield Finding(
            "bad_init",
            "error" if loss_expectations.learns(run) is False else "note",
            read.names(record, hit),
            read.span(record, slice(0, 1)),
            f"the output of a recurrence has RMS {rms[hit].max():.3g} before training",
            "above 100, where a tanh keeps it below 1",
            "Pascanu et al. 2013 (arXiv 1211.5063): a recurrence whose largest singular value is "
            "above 1 may explode; 100: hookkit, measured",
            "recurrent weights that begin too large for the length of the sequence",
            "begin with the identity or a smaller orthogonal matrix, use an LSTM or GRU, or clip "
            "gradients",
        )


def _leaps(run: Run, record: Record, which: list[int]) -> Iterator[Finding]:
    """A body layer whose first output is huge though the first layer's is not: cells in a loop."""
    if len(which) < 3:
        return
    table = read.table(record, "std")[which[:-1]]  # the head's scale is its own affair
    std, late = table[:, 0], read.median(table[:, read.last_half(record)], axis=1)
    hit = [i for i, s in zip(which, std, strict=False) if s > 100 and s > 100 * std[0] > 0]
    if hit:
        stays = (late[1:] > np.maximum(100, 100 * std[0])).any()
        yield Finding(
            "bad_init",
            "error" if loss_expectations.learns(run) is False else "warning" if stays else "note",
            read.names(record, hit),
            read.span(record, slice(0, 1)),
            f"a layer's output has standard deviation {std.max():.3g} before training, the first "
            f"layer's {std[0]:.3g}",
            "above 100, and 100 times the first layer's; an alarm where the loss does not fall, or "
            "it stays so",
            f"{SAGEMAKER}, PoorWeightInitialization: 10 in variance; Pascanu et al. 2013 (arXiv "
            "1211.5063), of recurrences; 100: hookkit, measured",
            "weights that begin too large, of a layer that is called again and again perhaps",
            "begin with smaller (or orthogonal) weights, or put a norm between",
        )


def input_scale(run: Run) -> Iterator[Finding]:
    """A first layer, with no norm behind it, whose output is huge: inputs nobody standardised."""
    record = read.activations(run)
    which = read.rows(record, read.PRE_ACTIVATION)
    if not which:
        return
    row = which[0]
    if set(record.types[:row]) & _FIRST:
        return  # it is not inputs that this layer is given
    normed = "Norm" in "".join(record.types[row : row + 2])
    size = _without_bias(run, record, row)
    if size > 20:
        yield Finding(
            "input_scale",
            "note" if normed else "error" if loss_expectations.learns(run) is False else "warning",
            (record.names[row],),
            read.span(record, slice(0, 1)),
            f"the first layer's output has standard deviation {size:.3g} before training",
            "above 20, where standardised inputs give about 1",
            "LeCun et al. 1998, Efficient BackProp: inputs of mean 0 and variance 1; "
            "20: hookkit, measured",
            "inputs that are not standardised (0-255 images), or a first layer begun too large",
            "scale the inputs to mean 0 and standard deviation 1",
        )
    elif not normed and (size := read.input_size(run.params, record.names[row])) < read.FAINT_INPUT:
        yield Finding(
            "input_scale",
            "warning" if loss_expectations.learns(run) is False else "note",
            (record.names[row],),
            read.span(record),
            f"by its gradients the first layer is given inputs of size {size:.2g}",
            "below 3e-3, where standardised inputs give about 1: |gradient of the weight| over "
            "|gradient of the bias|, by input; an alarm if the loss does not fall",
            "LeCun et al. 1998, Efficient BackProp: inputs of mean 0 and variance 1; "
            "3e-3: hookkit, measured",
            "inputs that are almost 0: divided by 255 twice, say",
            "scale the inputs to mean 0 and standard deviation 1",
        )


def _without_bias(run: Run, record: Record, row: int) -> float:
    """The spread of a layer's first output, less what its bias makes where that is known."""
    rms, std = (read.table(record, s)[row, 0] for s in ("rms", "std"))
    name = f"{record.names[row]}.bias"
    if run.params is None or name not in run.params.names:
        return float(std)
    at = run.params.names.index(name)
    n = read.meta(run.params, "numel", 0)[at]
    bias = np.square(run.params.value("weight_norm", at)[0]) / n if n else 0.0
    return float(min(std, np.sqrt(max(np.square(rms) - bias, 0.0))))
