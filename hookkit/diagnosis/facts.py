"""Rules on facts about the loss, the loop, the data and units, which the recorders saw directly.

A fact needs no threshold, or one that only excludes single odd batches. It is an alarm: an error if
the loss does not decrease, otherwise a warning. A fact that is harmless by itself is a note.
`weights` has the rules on parameters, `non_finite` those on NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.diagnosis.finding import Finding, plural
from hookkit.diagnosis.view import View, names, percent, table

# --- the loss

_INPUTS = {
    "Softmax": (
        "what a softmax gives",
        "a softmax before a loss that applies its own",
        "return the scores from the model, without nn.Softmax at its end",
    ),
    "Sigmoid": (
        "what a sigmoid gives",
        "a sigmoid before a loss that applies its own",
        "return the scores from the model, without nn.Sigmoid at its end",
    ),
    "probabilities": (
        "probabilities, and reads them as their logarithms",
        "a softmax before a loss that expects its logarithm",
        "give it scores.log_softmax(-1); or scores to nn.CrossEntropyLoss",
    ),
    "scores": (
        "what a layer gives, and reads it as logarithms of probabilities",
        "scores before a loss that expects logarithms of probabilities",
        "give it scores.log_softmax(-1); or use nn.CrossEntropyLoss in place of nn.NLLLoss",
    ),
}


def broadcast(run: View) -> Iterator[Finding]:
    """Find a loss that broadcasts: (n, 1) predictions against (n,) targets compare all pairs."""
    if shapes := run.info.get("broadcast"):
        what = f"in the loss {shapes}"
        cause = "predictions and targets of different shapes: each one meets every other"
        fix = "give both the same shape: loss_func(pred.squeeze(-1), target)"
        yield Finding("broadcast", "error", what, cause, fix)


def softmax_dim(run: View) -> Iterator[Finding]:
    """Find a softmax before the loss that is taken over samples, not over classes."""
    if dim := run.info.get("softmax_dim"):
        what = f"the softmax before the loss is taken {dim}"
        cause = "a softmax that shares probabilities among samples, not classes"
        fix = "use F.cross_entropy(scores, targets), or torch.log_softmax(scores, dim=-1)"
        yield Finding("softmax_dim", "error", what, cause, fix)


def probabilities(run: View) -> Iterator[Finding]:
    """Find a loss that is given probabilities or scores and expects something different."""
    loss, found = run.loss_name, run.info.get("loss_input")
    takes_probabilities = loss.startswith(("binary", "bce")) and not loss.endswith("withlogits")
    if found in _INPUTS and not takes_probabilities:
        what, cause, fix = _INPUTS[found]
        yield Finding("probabilities", "error", f"the loss is given {what}", cause, fix)


_NEVER_BELOW_ZERO = (
    *("mse", "l1", "smoothl1", "huber", "crossentropy", "nll"),
    *("bce", "bcewithlogits", "binarycrossentropy", "binarycrossentropywithlogits"),
)


def below_zero(run: View) -> Iterator[Finding]:
    """Find a negative value of a loss that cannot be negative."""
    low = float(run.losses.min(initial=0.0))
    if run.loss_name in _NEVER_BELOW_ZERO and low < -1e-3:
        what = f"the loss falls to {low:.3g}, and {run.info['loss_func']} cannot be below 0"
        cause = "a wrong sign, or numbers that are no probabilities (or no labels) in the loss"
        fix = "check the sign of what backward() is called on, and what the loss is given"
        yield Finding("below_zero", "error", what, cause, fix)


# --- the loop


def no_step(run: View) -> Iterator[Finding]:
    """Find training batches without any optimizer step."""
    n, (lost, of) = run.info.get("train_iter", 0), run.info.get("nan_losses") or (0, 1)
    # not if most losses are NaN, whose steps a GradScaler skips; few batches may accumulate
    if run.info.get("no_step") and n >= 3 and 2 * lost <= of:
        what = f"{n} training batches, no step, and weights that stay as they were"
        cause = "optimizer.step() is never called, what steps is not what watch was given, or a "
        cause += "GradScaler skips each step, since the scaled gradients have NaN or Inf"
        fix = "call optimizer.step() after loss.backward(); give GradScaler a smaller init_scale"
        yield Finding("no_step", "error", what, cause, fix)


def grads_pile_up(run: View) -> Iterator[Finding]:
    """Find gradients that are never zeroed."""
    kept, of = run.info.get("kept_gradients") or (0, 0)
    if kept >= 3 and 2 * kept > of:
        what = f"in {kept} of the first {of} steps the gradient of the step before was still there"
        cause = "gradients are not zeroed: they add up"
        fix = "call optimizer.zero_grad() once per step, before loss.backward()"
        yield Finding("grads_pile_up", run.severity, what, cause, fix)


def eval_mode(run: View) -> Iterator[Finding]:
    """Find steps in eval mode; a note if all steps are and the loss falls: it may be intended."""
    n, of = run.info.get("eval_steps") or (0, 0)
    if n:
        severity = "note" if n == of and not run.loss_flat else run.severity
        what = f"{n} of {of} steps were made in eval mode"
        cause = "model.train() was forgotten: dropout and batch norm work as in validation"
        fix = "call model.train() at the beginning of each epoch"
        yield Finding("eval_mode", severity, what, cause, fix)


def schedule_over(run: View) -> Iterator[Finding]:
    """Find a learning rate that is almost 0 for more than half of the run."""
    rate = np.nan_to_num(table(run.params, "lr")).max(axis=0, initial=0)
    gone = float((rate < 1e-3 * rate.max()).mean())
    if gone > 0.5:
        severity = run.severity if run.much_loss_left else "note"
        what = (
            f"in {percent(gone)} of the records the learning rate is below a thousandth of its "
            "largest"
        )
        cause = "a schedule that ends long before the run: made for epochs, stepped at every batch"
        fix = "make the scheduler for the number of steps: T_max=n_epochs * len(loader)"
        steps = (0, max(run.run.n_steps - 1, 0))
        yield Finding("schedule_over", severity, what, cause, fix, steps=steps)


# --- the data


def repeated_data(run: View) -> Iterator[Finding]:
    """Find a run on at most 4 different batches: a note, since the data set may be small."""
    n, different = run.info.get("batches") or (0, 0)
    if n >= 40 and different <= 4:
        seen = plural(different, "different batch", "different batches")
        what = f"the first {n} steps see {seen}"
        cause = "next(iter(loader)) in each step, a subset for debugging, or a data set this small"
        fix = "go through the whole loader: for x, y in loader"
        yield Finding("repeated_data", "note", what, cause, fix)


def dropout(run: View) -> Iterator[Finding]:
    """Find dropout layers that keep less than a quarter of the values."""
    rates = run.activations.meta.get("dropout") or {}
    high = {name: rate for name, rate in rates.items() if rate > 0.75}
    if high:
        what = f"dropout keeps {percent(1 - max(high.values()))} of what it is given"
        cause = "a rate that is too high: p is the share that is dropped, not kept"
        fix = "lower p to 0.5 or less: nn.Dropout(p=0.5)"
        yield Finding("dropout", run.severity, what, cause, fix, tuple(high))


# --- units


def dead(run: View) -> Iterator[Finding]:
    """Find units before a ReLU that are never above 0 in the later half of the run.

    The recorder counts dead units of a ReLU, and of a layer that only a ReLU reads. If both have a
    row, the row of the ReLU is read.
    """
    a = run.activations
    units = a.values["dead"]
    late = np.where(np.isfinite(units), units, np.inf)[:, len(a) // 2 :].min(axis=1, initial=np.inf)
    relu = np.array([kind in ("ReLU", "ReLU6") for kind in a.types], bool)
    counts = np.isfinite(late) & (relu | ~np.append(relu[1:], False))
    share = np.where(counts, late, 0)
    for low, severity in ((0.9, run.severity), (0.5, "note")):
        if (hit := share > low).any():
            what = f"up to {percent(share[hit].max())} of a layer's units are never above 0 before "
            what += "their ReLU"
            cause, first = "a step that was too large", "divide the learning rate by 10"
            if (units[hit, :3].min(axis=1) > low).all():
                what += ", from the first step on"
                cause, first = "biases or weights that began so", "begin with biases of 0"
            fix = f"{first}, or use nn.LeakyReLU or nn.GELU"
            yield Finding("dead", severity, what, cause, fix, names(a, hit))
            return
