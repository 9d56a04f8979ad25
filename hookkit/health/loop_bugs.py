"""Rules on mistakes in the loop that the curves give away.

The loss is climbed, zero_grad is forgotten, softmax is applied twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import loss_bound, loss_expectations
from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding
from hookkit.records import Floats, Ints, Run


def ascent(run: Run) -> Iterator[Finding]:
    """A loss that the steps push up, as far as their size and the gradients' explains.

    What they can do, and how much of it steps that go to and fro use, is in `reach`.
    """
    asked = (
        bool(run.info.get("maximize"))
        and loss_expectations.loss_name(run) in loss_expectations.NEVER_BELOW_ZERO
    )
    record = None if asked else read.params(run)
    series = read.losses(run, 20)
    if read.improved(run) or loss_expectations.excuse(run):
        return
    rises = read.end_level(series) > read.start_level(series)
    share = loss_bound.climbed(record, series) if record is not None else 1.0 if rises else None
    if share is None or not 0.12 < share < 2:
        return
    yield Finding(
        "ascent",
        "error",
        (),
        (0, run.n_steps - 1),
        "the loss rises, and the optimizer was made with maximize=True"
        if asked
        else f"the loss rises steadily, by {share:.0%} of all that steps and gradients can do",
        "over 12 % of the sum of |gradient| × |update|, twice what steps reach that are too large "
        "and go to and fro",
        "first-order Taylor expansion and the Cauchy-Schwarz inequality; 12 %: hookkit, measured",
        "the loss is climbed: maximize=True, or a wrong sign",
        "minimise: leave out maximize=True, or turn the sign of what backward() is called on",
    )


def grads_pile_up(run: Run) -> Iterator[Finding]:
    """A gradient norm that grows as a sum does, and smoothly."""
    norms, steps = _grad_norms(run)
    known, steps = norms[np.isfinite(norms)], steps[np.isfinite(norms)]
    if len(known) < read.MIN_RECORDS:
        raise read.Missing("no gradient norms")
    first = float(np.median(known[steps < steps[0] + 3]))
    if first <= 0 or not _grows_as_a_sum(known, steps):
        return
    peak = float(np.max(loss_bound.smoothed(known)))
    jitter = float(np.median(np.abs(np.diff(known)) / np.maximum(known[1:], 1e-300)))
    learns = loss_expectations.learns(run)
    lasts = known[-read.MIN_RECORDS :].max() > peak / 100  # an explosion passes, a sum stays
    stuck = peak >= 10 * first and jitter <= 0.15 and learns is False and bool(lasts)
    unsaid = learns is None and jitter < 0.03 and peak >= 10 * first
    smooth = run.losses is not None and _too_smooth(run, known, steps)
    if not (stuck or unsaid or smooth):
        return
    yield Finding(
        "grads_pile_up",
        "error" if learns is False else "warning",
        (),
        (0, run.n_steps - 1),
        f"the gradient norm grew {peak / first:.3g}-fold, by √n or more in the first n steps, and "
        f"changes by only {jitter:.2g} of itself from record to record"
        + (", and the loss does not fall" if learns is False else ""),
        "at first by √n in n steps or more; and 10-fold with a median change below 15 % a step, "
        "while the loss does not fall (3 % where it is unknown); or 1.5-fold below 3 %, where the "
        "loss changes five times as much (3-fold below 6 %, where some steps only are recorded)",
        "a sum of n independent gradients is √n as long as one; the rest: hookkit, measured: fresh "
        "batches make the norm jitter, a running sum is smooth",
        "gradients are never zeroed: each step adds to the last one's",
        "call optimizer.zero_grad() once per step",
    )


def _grows_as_a_sum(norms: Floats, steps: Ints) -> bool:
    """Whether the first norms, of ten steps or of four records, grow by √n in n steps or more."""
    since = steps - steps[0]
    early = (since > 0) & (since <= max(10, 4 * since[1]))
    return bool(np.median(norms[early] / norms[0] / np.sqrt(since[early] + 1)) >= 1)


def _too_smooth(run: Run, norms: Floats, steps: Ints) -> bool:
    """Whether batches differ, by their losses, and the gradient norm hides it, and grew."""
    series = read.losses(run)
    series = series[np.isfinite(series)]
    own, loss = _jitter(norms), _jitter(series)
    grew = np.median(norms[-10:]) / np.median(norms[:3])
    if steps[1] - steps[0] > 1:  # the sum goes on between the records
        return bool(1e-5 < own < 0.06 and np.median(norms[-10:]) > 3 * norms[0])
    return bool(1e-5 < own < 0.03 and loss > 5 * own and grew > 1.5)  # 0 where it is clipped


def _jitter(series: Floats) -> float:
    """The median change from one step to the next, over the later half, as a share."""
    late = series[len(series) // 2 :]
    return float(read.median(np.abs(np.diff(late)) / np.maximum(np.abs(late[1:]), 1e-300)))


def _grad_norms(run: Run) -> tuple[Floats, Ints]:
    """Norms of the whole gradient, and the steps they are of."""
    if run.params is None and run.grad_norms is not None:
        return np.asarray(run.grad_norms, np.float64), np.arange(len(run.grad_norms))
    record = read.params(run)
    moved = np.nan_to_num(read.table(record, "update_norm")).max(axis=1) > 0
    norms = read.table(record, "grad_norm")[moved]  # what is in no optimizer, nobody zeroes
    known = np.isfinite(norms).any(axis=0)
    whole = np.where(known, np.sqrt(np.nansum(norms**2, axis=0)), np.nan)
    return np.asarray(whole), record.steps


def probabilities(run: Run) -> Iterator[Finding]:
    """Probabilities fed to a loss that expects scores."""
    name = loss_expectations.loss_name(run)
    nll, binary = name == "nll", name.endswith("withlogits")
    if not nll and not binary and ("crossentropy" not in name or name.startswith("binary")):
        raise read.Missing("loss function unknown")
    proof = _by_last_layer(run)
    if proof is None and binary:
        proof = _by_narrow_range(run)
    elif proof is None and not nll:
        proof = _by_output(run) or _by_floor(run)
    if proof is None:
        return
    severity, layers, evidence = proof
    yield Finding(
        "probabilities",
        severity,
        layers,
        (0, run.n_steps - 1),
        evidence,
        "a sigmoid at the end; or a loss between ln(1 + 1/e) and ln(1 + e), which inputs between 0 "
        "and 1 cannot leave, where the last layer gives RMS 4 or more"
        if binary
        else "rows of non-negative numbers that sum to 1 (or a loss that cannot pass below "
        "ln(e + C - 1) - 1)",
        "PyTorch, BCEWithLogitsLoss: combines a Sigmoid layer and the BCELoss; the bounds are exact"
        if binary
        else "PyTorch, NLLLoss: the input is expected to contain log probabilities"
        if nll
        else "PyTorch, CrossEntropyLoss: the input is expected to contain unnormalised logits",
        "a softmax before a loss that expects its logarithm"
        if nll
        else "a softmax (or sigmoid) before a loss that applies its own",
        "use log_softmax, or return the scores and use CrossEntropyLoss"
        if nll
        else "return the scores from the model; apply softmax only to show probabilities",
    )


_Proof = tuple[str, tuple[str, ...], str]


def _by_output(run: Run) -> _Proof | None:
    if run.info.get("output_is_probabilities"):
        return "error", (), "the model's output rows are probabilities"
    return None


_ENDS = ("Softmax", "Sigmoid")


def _by_last_layer(run: Run) -> _Proof | None:
    if (given := run.info.get("loss_input")) in _ENDS:
        return "error", (), f"the loss is given what a {given.lower()} gives"
    record = run.activations
    if record is None or not record.names or record.types[-1] not in _ENDS:
        return None
    return "error", (record.names[-1],), f"the last layer is {record.types[-1]}"


def _by_narrow_range(run: Run) -> _Proof | None:
    """With inputs in [0, 1] no batch of a binary cross entropy is below .313, or above 1.313.

    Scores as large as 4 would make it almost 0 where they are right, and large where they are not.
    """
    record, series = run.activations, read.losses(run, 50)
    low, high = float(np.nanmin(series)), float(np.nanmax(series))
    if (
        record is None
        or record.types[-1] not in read.PRE_ACTIVATION
        or len(record) < read.MIN_RECORDS
    ):
        return None
    inside = low >= np.log1p(1 / np.e) and high <= np.log1p(np.e)
    rms, least = (read.median(record.value(s, -1)[read.last_half(record)]) for s in ("rms", "min"))
    if not inside or not rms > 4 or least < -1e3:  # a mask is large, and leaves the loss as it is
        return None
    given = f"{record.names[-1]} gives values of RMS {rms:.3g}"
    return "warning", (), f"the loss stays within {low:.3g} and {high:.3g} while {given}"


def _by_floor(run: Run) -> _Proof | None:
    """With inputs in [0, 1] a cross entropy stays in [floor, floor + 1]; learning nears floor."""
    if run.losses is None or not run.info.get("n_classes") or len(run.losses) < 50:
        return None
    series = run.losses[np.isfinite(run.losses)]
    n = int(run.info["n_classes"])
    floor = float(np.log(np.e + n - 1) - 1)
    low, high, end = series.min(), series.max(), read.end_level(series)
    if n < 3 or low < floor - 1e-4 or high > floor + 1 + 1e-4 or end > floor + 0.1:
        return None
    before = float(np.median(series[-max(len(series) // 4, 10) :][:10]))
    if before - end > end - floor:
        return None  # it passes by the floor, and does not settle
    return "warning", (), f"the loss stays within {low:.4g} and {high:.4g} and settles on {end:.4g}"
