"""Rules on the shape of curves. They only yield notes, never an alarm.

A loss need not decrease (GANs, policies), gradients may have different sizes, and large steps may
be intended. So a note says what was measured, and what may cause it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.diagnosis.finding import Finding
from hookkit.diagnosis.view import View, later_half, names, percent


def not_learning(run: View) -> Iterator[Finding]:
    """Find a loss that ends less than 5 % below its start, after 50 steps or more."""
    if run.loss_flat and run.first_nan_step is None:
        fell = f"{run.loss_start:.3g} → {run.loss_end:.3g} in {len(run.losses)} steps"
        cause = "what else is found; or a loss that need not fall (GAN, policy, a few noisy steps)"
        fix = "train on one batch again and again: a model that works brings its loss near 0"
        yield Finding("not_learning", "note", f"the loss did not fall: {fell}", cause, fix)


def initial_loss(run: View) -> Iterator[Finding]:
    """Find a first loss of more than twice the loss of guessing."""
    chance = float(np.log(run.info.get("n_classes") or 1))
    if "entropy" in run.loss_name and len(run.losses) and run.losses[0] > 2 * chance > 0:
        what = f"the first loss is {run.losses[0]:.3g}, and guessing gives {chance:.3g}"
        cause = "a last layer, or inputs, that begin too large"
        fix = "begin with a small last layer: layer.weight.data.mul_(0.1)"
        yield Finding("initial_loss", "note", what, cause, fix, steps=(0,))


def vanishing(run: View) -> Iterator[Finding]:
    """Find gradients that shrink 1000-fold or more from the loss to the data."""
    if run.gradients_vanish:
        cause, fix = "saturating layers, or depth without shortcuts", "use norms or shortcuts"
        yield _by_depth(run, "vanishing", cause, fix)


def exploding(run: View) -> Iterator[Finding]:
    """Find gradients that grow 100-fold or more from the loss to the data."""
    _, size = run.gradient_by_depth
    if len(size) and size[0] > 100 * size[-1]:
        cause = "weights that are large for the depth, or a recurrence"
        yield _by_depth(run, "exploding", cause, "clip gradients, or use norm layers")


def _by_depth(run: View, rule: str, cause: str, fix: str) -> Finding:
    rows, size = run.gradient_by_depth
    first, last = names(run.params, rows[[0, -1]])
    what = f"gradients of {first} are {size[0] / size[-1]:.2g} times those of {last}"
    return Finding(rule, "note", what, cause, fix, (first, last))


def saturated(run: View) -> Iterator[Finding]:
    """Find Tanh and Sigmoid layers with more than half of their values at the ends of the range."""
    a = run.activations
    bounded = np.array([kind in ("Tanh", "Sigmoid") for kind in a.types], bool)
    share = np.where(bounded, np.nan_to_num(later_half(a, "saturated")), 0)
    if (hit := share > 0.5).any():
        what = f"up to {percent(share.max())} of a layer is at the ends of its range"
        cause = "weights or inputs that are large: the slope there is almost 0"
        fix = "smaller first weights (torch.nn.init.xavier_normal_), or a norm before it"
        yield Finding("saturated", "note", what, cause, fix, names(a, hit))


def overfit(run: View) -> Iterator[Finding]:
    """Find a validation loss that rises 10 % above its best, and above the training loss."""
    # an epoch without training or without validation lacks one of the losses
    rows = [r for r in run.run.valid if None not in (r.get("train_loss"), r.get("valid_loss"))]
    valid = np.array([r["valid_loss"] for r in rows], float)
    if len(rows) < 4 or not np.isfinite(valid).all() or valid.argmin() >= len(rows) - 2:
        return
    best, train = int(valid.argmin()), float(rows[-1]["train_loss"])
    if valid[-1] > 1.1 * valid[best] and valid[-1] > 1.1 * train:
        what = (
            f"the validation loss was {valid[best]:.3g} in epoch {rows[best].get('epoch', best)} "
            f"and is {valid[-1]:.3g} now; the training loss is {train:.3g}"
        )
        cause = "the model learns the training set by heart"
        fix = "stop at the best epoch, or add data, augmentation or regularisation"
        yield Finding("overfit", "note", what, cause, fix)
