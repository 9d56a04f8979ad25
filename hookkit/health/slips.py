"""Rules on mistakes in the loop that the curves give away: zero_grad forgotten, softmax twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.findings import Finding
from hookkit.records import Floats, Run


def grads_pile_up(run: Run) -> Iterator[Finding]:
    """A gradient norm that grows smoothly while the loss does not fall."""
    norms = _grad_norms(run)
    known = norms[np.isfinite(norms)]
    if len(known) < 2 * read.MIN_RECORDS:
        raise read.Missing("no gradient norms")
    first = float(np.median(known[:3]))
    peak = float(np.max(_smoothed(known)))
    jitter = float(np.median(np.abs(np.diff(known)) / np.maximum(known[1:], 1e-300)))
    learns = read.improved(run)
    lasts = known[-read.MIN_RECORDS :].max() > peak / 100  # an explosion passes, a sum stays
    stuck = peak >= 10 * first and jitter <= 0.15 and learns is False and bool(lasts)
    if first <= 0 or not (stuck or (learns and _too_smooth(run, known))):
        return
    yield Finding(
        "grads_pile_up",
        "warn" if learns else "sick",
        (),
        (0, run.n_steps - 1),
        f"the gradient norm grew {peak / first:.3g}-fold, changing by only {jitter:.2g} of itself "
        "a step, " + ("and the loss does not fall" if stuck else "while the loss jitters"),
        "10-fold with a median change below 15 % a step, while the loss does not fall; or 1.5-fold "
        "below 3 %, where the loss changes five times as much from batch to batch",
        "hookkit, measured: fresh batches make the norm jitter, a running sum is smooth",
        "gradients are never zeroed: each step adds to the last one's",
        "call optimizer.zero_grad() once per step",
    )


def _too_smooth(run: Run, norms: Floats) -> bool:
    """Whether batches differ, by their losses, and the gradient norm hides it, and grew."""
    series = read.losses(run)
    series = series[np.isfinite(series)]
    own, loss = _jitter(norms), _jitter(series)
    grew = np.median(norms[-10:]) / np.median(norms[:3])
    return bool(1e-5 < own < 0.03 and loss > 5 * own and grew > 1.5)  # 0 where it is clipped


def _jitter(series: Floats) -> float:
    """The median change from one step to the next, over the later half, as a share."""
    late = series[len(series) // 2 :]
    return float(read.median(np.abs(np.diff(late)) / np.maximum(np.abs(late[1:]), 1e-300)))


def _smoothed(values: Floats, n: int = 5) -> Floats:
    """Medians of `n` neighbours, so that one wild batch is no peak."""
    views = np.lib.stride_tricks.sliding_window_view(values, min(n, len(values)))
    return np.asarray(np.median(views, axis=1))


def _grad_norms(run: Run) -> Floats:
    if run.params is None and run.grad_norms is not None:
        return np.asarray(run.grad_norms, np.float64)
    record = read.params(run)
    moved = np.nan_to_num(read.table(record, "update_norm")).max(axis=1) > 0
    norms = read.table(record, "grad_norm")[moved]  # what is in no optimizer, nobody zeroes
    known = np.isfinite(norms).any(axis=0)
    return np.asarray(np.where(known, np.sqrt(np.nansum(norms**2, axis=0)), np.nan))


def probabilities(run: Run) -> Iterator[Finding]:
    """Probabilities fed to a loss that expects scores."""
    name = str(run.info.get("loss", run.info.get("loss_func", "")))
    nll = name in ("NLLLoss", "nll_loss")
    if not nll and "CrossEntropy" not in name and "cross_entropy" not in name:
        raise read.Missing("loss function unknown")
    proof = _by_last_layer(run) or (None if nll else _by_output(run) or _by_floor(run))
    if proof is None:
        return
    severity, layers, evidence = proof
    yield Finding(
        "probabilities",
        severity,
        layers,
        (0, run.n_steps - 1),
        evidence,
        "rows of non-negative numbers that sum to 1 (or a loss that cannot pass below "
        "ln(e + C - 1) - 1)",
        "PyTorch, NLLLoss: the input is expected to contain log probabilities"
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
        return "sick", (), "the model's output rows are probabilities"
    return None


def _by_last_layer(run: Run) -> _Proof | None:
    record = run.activations
    if record is None or not record.names or record.types[-1] not in ("Softmax", "Sigmoid"):
        return None
    return "sick", (record.names[-1],), f"the last layer is {record.types[-1]}"


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
    return "warn", (), f"the loss stays within {low:.4g} and {high:.4g} and settles on {end:.4g}"
