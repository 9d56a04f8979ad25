"""Rules on mistakes in the loop that the curves give away.

The loss is climbed, zero_grad is forgotten, softmax is applied twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import aims
from hookkit.health import reading as read
from hookkit.health.findings import Finding
from hookkit.records import Floats, Record, Run


def ascent(run: Run) -> Iterator[Finding]:
    """A loss that the steps push up, as far as their size and the gradients' explains.

    To first order a step dw changes the loss by g·dw, and never by more than |g| |dw|, summed over
    parameters. Climbing uses most of that. A rate that is too high makes the loss rise as well, but
    then the steps go to and fro: where it takes ten of them or more to rise tenfold, that is a
    sixteenth of the sum (of a quadratic: (r - 1) / 2, if the distance grows r-fold a step).
    """
    asked = bool(run.info.get("maximize")) and aims.loss_name(run) in aims.NEVER_BELOW_ZERO
    record = None if asked else read.params(run)
    series = read.losses(run, 20)
    if read.improved(run) is not False:
        return
    rises = read.end_level(series) > read.start_level(series)
    share = _climbed(record, series) if record is not None else 1.0 if rises else None
    if share is None or not 0.2 < share < 2:
        return
    yield Finding(
        "ascent",
        "sick",
        (),
        (0, run.n_steps - 1),
        "the loss rises, and the optimizer was made with maximize=True"
        if asked
        else f"the loss rises steadily, by {share:.0%} of all that steps and gradients can do",
        "over 20 % of the sum of |gradient| × |update|, where steps that are too large, and go to "
        "and fro, reach 6 %",
        "first-order Taylor expansion and the Cauchy-Schwarz inequality; 20 %: hookkit, measured",
        "the loss is climbed: maximize=True, or a wrong sign",
        "minimise: leave out maximize=True, or turn the sign of what backward() is called on",
    )


def _climbed(record: Record, series: Floats) -> float | None:
    """The rise of the loss over the sum of |g| |dw|, until it has risen tenfold."""
    if set(np.diff(record.steps)) | set(record.spans) != {1}:
        raise read.Missing("not every step of parameters")
    reach = np.nansum(read.table(record, "grad_norm") * read.table(record, "update_norm"), axis=0)
    inside = record.steps < len(series)
    loss, reach = series[record.steps[inside]], reach[inside]
    unknown = np.flatnonzero(~np.isfinite(loss))
    loss = loss[: unknown[0]] if len(unknown) else loss
    if len(loss) < read.MIN_RECORDS:
        return None
    start = float(np.median(loss[:5]))
    high = np.flatnonzero(~(_smoothed(loss) <= start + 9 * abs(start)))
    end = int(high[0]) if len(high) else len(loss)
    if end < read.MIN_RECORDS:
        return None
    noise = 1.4826 * float(read.median(np.abs(np.diff(loss[:end]))))
    rise = float(read.median(loss[end - 5 : end])) - start
    total = float(reach[:end].sum())
    return rise / total if rise > 3 * noise and np.isfinite(total) and total > 0 else None


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
