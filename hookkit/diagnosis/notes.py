"""What the curves look like, for those who look at them: notes, which never alarm.

A loss need not fall (players, policies), gradients need not be of one size, and large steps may be
meant. So these say what was measured, and what it may come from.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hookkit.diagnosis.finding import Finding
from hookkit.diagnosis.view import View


def not_learning(run: View) -> Iterator[Finding]:
    """A loss that ends less than 5 % below its start, after 50 steps or more."""
    if run.stands and run.broke is None:
        what = f"the loss did not fall: {run.start:.3g} → {run.end:.3g} in {len(run.losses)} steps"
        cause = "what else is found; or a loss that need not fall (GAN, policy, a few noisy steps)"
        fix = "train on one batch again and again: a model that works brings its loss near 0"
        yield Finding("not_learning", "note", what, cause, fix)


def initial_loss(run: View) -> Iterator[Finding]:
    """A first loss of more than twice what guessing gives."""
    chance = float(np.log(run.info.get("n_classes") or 1))
    if "entropy" in run.loss and len(run.losses) and run.losses[0] > 2 * chance > 0:
        what = f"the first loss is {run.losses[0]:.3g}, and guessing gives {chance:.3g}"
        cause = "a last layer, or inputs, that begin too large"
        fix = "begin with a small last layer: layer.weight.data.mul_(0.1)"
        yield Finding("initial_loss", "note", what, cause, fix, steps=(0,))


def vanishing(run: View) -> Iterator[Finding]:
    """Gradients that fade towards the input, 1000-fold or more."""
    yield from _by_depth(run, "vanishing")


def exploding(run: View) -> Iterator[Finding]:
    """Gradients that grow towards the input, 100-fold or more."""
    yield from _by_depth(run, "exploding")


def _by_depth(run: View, rule: str) -> Iterator[Finding]:
    own, size = run.depth
    times = float(size[0] / size[-1]) if len(size) else 1.0
    if run.fades if rule == "vanishing" else times > 100:
        first, last = (run.params.names[i] for i in own[[0, -1]])
        what = f"gradients of {first} are {times:.2g} times those of {last}"
        cause = "weights that are large for the depth, or a recurrence"
        fix = "clip gradients, or use norm layers"
        if run.fades:
            cause, fix = "saturating layers, or depth without shortcuts", "use norms or shortcuts"
        yield Finding(rule, "note", what, cause, fix, (first, last))


def overfit(run: View) -> Iterator[Finding]:
    """A validation loss that rises by a tenth above its best, and above the training loss."""
    # a part that was left out in an epoch has no loss there
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
