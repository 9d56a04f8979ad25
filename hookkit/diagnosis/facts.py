"""Facts of the loss, the loop and the data: each was seen where it happens.

A fact needs no threshold, or one that only keeps single odd batches out. It is an alarm, an error
where the loss does not fall; one that does no harm by itself is a note. `weights` has the facts of
parameters, `units` those of what layers give.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.diagnosis.finding import Finding
from hookkit.diagnosis.view import View, percent, plural, table

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
    """A column of predictions that is compared with each element of a row of targets."""
    if shapes := run.info.get("broadcast"):
        what = f"in the loss {shapes}"
        cause = "predictions and targets of different shapes: each one meets every other"
        fix = "give both the same shape: loss_func(pred.squeeze(-1), target)"
        yield Finding("broadcast", "error", what, cause, fix)


def softmax_dim(run: View) -> Iterator[Finding]:
    """A softmax over samples, before the loss."""
    if dim := run.info.get("softmax_dim"):
        what = f"the softmax before the loss is taken {dim}"
        cause = "a softmax that shares probabilities among samples, not classes"
        fix = "use F.cross_entropy(scores, targets), or torch.log_softmax(scores, dim=-1)"
        yield Finding("softmax_dim", "error", what, cause, fix)


def probabilities(run: View) -> Iterator[Finding]:
    """Probabilities where scores belong, or scores where their logarithms belong."""
    given = run.info.get("loss_input")
    takes_shares = run.loss.startswith(("binary", "bce")) and not run.loss.endswith("withlogits")
    if given in _INPUTS and not takes_shares:
        what, cause, fix = _INPUTS[given]
        yield Finding("probabilities", "error", f"the loss is given {what}", cause, fix)


_BELOW_ZERO_NEVER = (
    *("mse", "l1", "smoothl1", "huber", "crossentropy", "nll"),
    *("bce", "bcewithlogits", "binarycrossentropy", "binarycrossentropywithlogits"),
)


def below_zero(run: View) -> Iterator[Finding]:
    """A loss that cannot be below 0, and is."""
    low = float(run.losses.min(initial=0.0))
    if run.loss in _BELOW_ZERO_NEVER and low < -1e-3:
        what = f"the loss falls to {low:.3g}, and {run.info['loss_func']} cannot be below 0"
        cause = "a wrong sign, or numbers that are no probabilities (or no labels) in the loss"
        fix = "check the sign of what backward() is called on, and what the loss is given"
        yield Finding("below_zero", "error", what, cause, fix)


# --- the loop


def no_step(run: View) -> Iterator[Finding]:
    """Batches, and no step of an optimizer."""
    n, (lost, of) = run.info.get("train_iter", 0), run.info.get("nan_losses") or (0, 1)
    # a GradScaler leaves out the steps of losses that are not finite; few batches may accumulate
    if run.info.get("no_step") and n >= 3 and 2 * lost <= of:
        what = f"{n} training batches, no step, and weights that stay as they were"
        cause = "optimizer.step() is never called, what steps is not what watch was given, or a "
        cause += "GradScaler skips each step, since the scaled gradients have NaN or Inf"
        fix = "call optimizer.step() after loss.backward(); give GradScaler a smaller init_scale"
        yield Finding("no_step", "error", what, cause, fix)


def grads_pile_up(run: View) -> Iterator[Finding]:
    """Gradients that are never zeroed."""
    kept, of = run.info.get("kept_gradients") or (0, 0)
    if kept >= 3 and 2 * kept > of:
        what = f"in {kept} of the first {of} steps the gradient of the step before was still there"
        cause = "gradients are not zeroed: they add up"
        fix = "call optimizer.zero_grad() once per step, before loss.backward()"
        yield Finding("grads_pile_up", run.severity, what, cause, fix)


def eval_mode(run: View) -> Iterator[Finding]:
    """Steps of a model in eval mode; a note where all are, and the loss falls: it may be meant."""
    n, of = run.info.get("eval_steps") or (0, 0)
    if n:
        severity = "note" if n == of and not run.stands else run.severity
        what = f"{n} of {of} steps were made in eval mode"
        cause = "model.train() was forgotten: dropout and batch norm work as in validation"
        fix = "call model.train() at the beginning of each epoch"
        yield Finding("eval_mode", severity, what, cause, fix)


def schedule_over(run: View) -> Iterator[Finding]:
    """A learning rate that is almost 0 for half of the run or more."""
    rate = np.nan_to_num(table(run.params, "lr")).max(axis=0, initial=0)
    gone = float((rate < 1e-3 * rate.max()).mean())
    if gone > 0.5:
        severity = run.severity if run.has_much_left else "note"
        what = (
            f"in {percent(gone)} of the records the learning rate is below a thousandth of its "
            "largest"
        )
        cause = "a schedule that ends long before the run: made for epochs, stepped at every batch"
        fix = "make the scheduler for the number of steps: T_max=n_epochs * len(loader)"
        yield Finding("schedule_over", severity, what, cause, fix, steps=run.all_steps)


# --- the data


def repeated_data(run: View) -> Iterator[Finding]:
    """The same few batches again and again: a note, since a small data set has no more."""
    n, different = run.info.get("batches") or (0, 0)
    if n >= 40 and different <= 4:
        what = (
            f"the first {n} steps see {plural(different, 'different batch', 'different batches')}"
        )
        cause = "next(iter(loader)) in each step, a subset for debugging, or a data set this small"
        fix = "go through the whole loader: for x, y in loader"
        yield Finding("repeated_data", "note", what, cause, fix)


def dropout(run: View) -> Iterator[Finding]:
    """Dropout that keeps less than a quarter."""
    rates = run.acts.meta.get("dropout") or {}
    high = {name: rate for name, rate in rates.items() if rate > 0.75}
    if high:
        what = f"dropout keeps {percent(1 - max(high.values()))} of what it is given"
        cause = "a rate that is too high: p is the share that is dropped, not kept"
        fix = "lower p to 0.5 or less: nn.Dropout(p=0.5)"
        yield Finding("dropout", run.severity, what, cause, fix, tuple(high))
