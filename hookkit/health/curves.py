"""Rules on the loss and the gradient norm over the steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.health import reading as read
from hookkit.health.findings import Finding
from hookkit.health.signals import SAGEMAKER
from hookkit.health.updates import CHECKER
from hookkit.records import Floats, Run

CROSS_ENTROPY = ("CrossEntropy", "cross_entropy", "NLL")


def _classes(run: Run) -> int:
    n = run.info.get("n_classes")
    if not n or int(n) < 2:
        raise read.Missing("number of classes unknown")
    return int(n)


def initial_loss(run: Run) -> Iterator[Finding]:
    """A first loss far above what guessing would give."""
    series, n_classes = read.losses(run), _classes(run)
    chance = float(np.log(n_classes))
    first = float(series[np.isfinite(series)][0])
    excess = (first - chance) / chance
    if excess <= 1:
        return
    recovers = read.improved(run) is True
    yield Finding(
        "initial_loss",
        "info" if recovers else "warn",
        (),
        (0, 0),
        f"the first loss is {first:.3g}; guessing among {n_classes} classes gives {chance:.3g}",
        "more than twice ln C",
        f"cs231n, Neural Networks Part 3: look for correct loss at chance performance; {CHECKER}",
        "a head that begins too large, inputs that are not standardised, or wrong labels",
        "standardise the inputs and begin the last layer with small weights",
    )


def not_learning(run: Run) -> Iterator[Finding]:
    """A loss that ends where it began, or higher."""
    series = read.losses(run, 50)
    if read.improved(run) is not False:
        return
    start, end = read.start_level(series), read.end_level(series)
    worse = bool(np.isinf(end)) or end > start + 0.5 * abs(start)
    yield Finding(
        "diverging" if worse else "not_learning",
        "sick" if worse else "warn",
        (),
        (0, len(series) - 1),
        f"the loss began at {start:.3g} and ends at {end:.3g}",
        "less than 5 % below its start, or at chance",
        f"{CHECKER}: 5 %; cs231n: chance is ln C",
        "the steps go too far: learning rate too high, or gradients that are never zeroed"
        if worse
        else "see the other findings; without any: wrong labels, a model that is too small, or a "
        "loss that need not fall (GAN, policy)",
        "lower the learning rate; check that zero_grad() runs every step"
        if worse
        else "try to learn one batch by heart: a sound model and loss can",
    )


def spikes(run: Run) -> Iterator[Finding]:
    """Losses that jump out of the last 128 steps, after the warm-up."""
    series = read.losses(run, 100)
    known = series[np.isfinite(series)]
    level = read.start_level(known)
    at = [t for t in range(64, len(known)) if _jumps(known, t, level)]
    if not at:
        return
    often = len(at) >= 3 and len(at) > 0.01 * len(known)
    yield Finding(
        "spikes",
        "warn" if often else "info",
        (),
        (at[0], at[-1]),
        f"{len(at)} loss spike{'s' * (len(at) != 1)}, the highest {known[at].max():.3g}",
        "6 standard deviations (by the median) above the last 128 steps, and by half the first "
        "loss; an alarm from 3 and 1 % of the steps",
        "6 and 128: OLMo-core, SkipStepOptimizer; the rest: hookkit, measured",
        "broken batches, or a learning rate at the edge",
        "look at the data of those steps; clip gradients",
    )


def _jumps(series: Floats, t: int, level: float) -> bool:
    before = series[max(0, t - 128) : t]
    middle = np.median(before)
    sigma = 1.4826 * np.median(np.abs(before - middle))  # so that spikes do not hide each other
    return bool(series[t] - middle > max(6 * sigma, 0.5 * abs(level)))


def grads_pile_up(run: Run) -> Iterator[Finding]:
    """A gradient norm that grows smoothly while the loss does not fall."""
    norms = _grad_norms(run)
    known = norms[np.isfinite(norms)]
    if len(known) < 2 * read.MIN_RECORDS:
        raise read.Missing("no gradient norms")
    first = float(np.median(known[:3]))
    peak = float(np.max(read_smooth(known)))
    jitter = float(np.median(np.abs(np.diff(known)) / np.maximum(known[1:], 1e-300)))
    if first <= 0 or peak < 10 * first or jitter > 0.15 or read.improved(run) is not False:
        return
    yield Finding(
        "grads_pile_up",
        "sick",
        (),
        (0, run.n_steps - 1),
        f"the gradient norm grew {peak / first:.3g}-fold, changing by only {jitter:.0%} a step, "
        "and the loss does not fall",
        "10-fold, with a median change below 15 % a step",
        "hookkit, measured: fresh batches make the norm jitter, a running sum is smooth",
        "gradients are never zeroed: each step adds to the last one's",
        "call optimizer.zero_grad() once per step",
    )


def read_smooth(values: Floats, n: int = 5) -> Floats:
    """Medians of `n` neighbours, so that one wild batch is no peak."""
    views = np.lib.stride_tricks.sliding_window_view(values, min(n, len(values)))
    return np.asarray(np.median(views, axis=1))


def _grad_norms(run: Run) -> Floats:
    if run.grad_norms is not None and np.isfinite(run.grad_norms).any():
        return np.asarray(run.grad_norms, np.float64)
    norms = read.table(read.params(run), "grad_norm")
    return np.asarray(np.sqrt(np.nansum(norms**2, axis=0)))


def probabilities(run: Run) -> Iterator[Finding]:
    """Probabilities fed to a loss that expects scores."""
    name = str(run.info.get("loss", run.info.get("loss_func", "")))
    if "CrossEntropy" not in name and "cross_entropy" not in name:
        raise read.Missing("loss function unknown")
    proof = _by_output(run) or _by_last_layer(run) or _by_floor(run)
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
        "PyTorch, CrossEntropyLoss: the input is expected to contain unnormalised logits",
        "a softmax (or sigmoid) before a loss that applies its own",
        "return the scores from the model; apply softmax only to show probabilities",
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


def overfit(run: Run) -> Iterator[Finding]:
    """A validation loss that rises while the training loss falls: a note."""
    rows = [r for r in run.valid if {"train_loss", "valid_loss"} <= set(r)]
    if len(rows) < 4:
        raise read.Missing("fewer than 4 epochs with validation")
    train = np.array([r["train_loss"] for r in rows], float)
    valid = np.array([r["valid_loss"] for r in rows], float)
    best = int(valid.argmin())
    gap = (valid[-1] - train[-1]) / max(abs(train[-1]), 1e-12)
    if best >= len(rows) - 2 or gap <= 0.1 or valid[-1] < 1.1 * valid[best]:
        return
    yield Finding(
        "overfit",
        "info",
        (),
        (0, max(run.n_steps - 1, 0)),
        f"the validation loss was best in epoch {rows[best].get('epoch', best)} "
        f"({valid[best]:.3g}) and is {valid[-1]:.3g} now",
        "validation over training loss by more than 10 %, and rising",
        f"{SAGEMAKER}, Overfit: 0.1",
        "the model learns the training set by heart",
        "stop at the best epoch, or add data, augmentation or regularisation",
    )
