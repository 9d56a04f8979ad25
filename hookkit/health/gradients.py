"""Rules on the size of gradients: over the depth of a net, and over the steps.

That they are exactly 0 is in `unmoved`, that float16 loses them in `precision`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hookkit.health import reading as read
from hookkit.health.diagnosis import Finding, Rule, rule
from hookkit.health.layer_order import chains
from hookkit.health.learning_rate import ADAM_SHARE, USUAL, by_share
from hookkit.health.reading import known
from hookkit.health.run_view import RunView
from hookkit.health.step_sizes import share_of_rate, update_ratios
from hookkit.records import Floats, Ints

# AUTOTRAINER: gradients of the first over those of the last layer
EXPLODED_RATIO = 70
# Gradients of fresh batches differ by more than this, and by this in 9 of 10 records if clipped
SAME_SHARE, MOSTLY = 1e-3, 0.9
# A norm of all gradients above this is no almost nothing (hookkit, measured)
CLIPPED = 1e-2
# PyTorch's default of Adam and its kin
EPS = 1e-8
# A correlation of log size with depth: the size changes along the depth (hookkit, measured)
ORDERED = 0.6


@rule(
    needs=("params",),
    threshold="first over last below 1e-3 with the first below 1e-4",
    source="Zhang et al., AUTOTRAINER, ICSE 2021",
    cause="many saturating layers, small weights, or depth without skip connections",
    fix="use nn.ReLU with torch.nn.init.kaiming_normal_, norm layers, or skip connections",
)
def vanishing(run: RunView) -> Iterator[Finding]:
    """Gradients that fade towards the input."""
    faded = [c for c in _sizes_by_depth(run) if _fades(c.early) and c.late[0] < c.late[-1] / 10]
    if not faded:
        return
    which, size, _, early = min(faded, key=lambda c: c.early[0] / c.early[-1])
    first = read.table(run.params, "grad_rms")[which, 0]
    if (first > 0).all() and _fades(first):  # before any step, which is then not to blame
        size, early = first, read.FIRST
    # of a loss that need not fall: actor and critic, both players, are no depth of one net
    severity = "error" if run.fails else "note" if run.excused else "warning"
    yield _first_and_last(run, vanishing, severity, which, size, early)


@rule(
    needs=("params",),
    threshold="first over last above 70",
    source="Zhang et al., AUTOTRAINER, ICSE 2021",
    cause="weights too large for the depth, or a recurrence that amplifies",
    fix="clip gradients before each step, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); "
    "use smaller initial weights or norm layers",
)
def exploding(run: RunView) -> Iterator[Finding]:
    """Gradients that grow towards the input."""
    if not run.fails:
        return
    grows = [c for c in _sizes_by_depth(run) if c.early[0] / c.early[-1] > EXPLODED_RATIO]
    if grows:
        which, size, _, early = max(grows, key=lambda c: c.early[0] / c.early[-1])
        yield _first_and_last(run, exploding, "error", which, size, early)


class _Chain(NamedTuple):
    """Matrices in the order in which the data pass them, and how large their gradients are."""

    which: Ints
    early: Floats
    late: Floats
    window: slice  # of the records that `early` is from


def _sizes_by_depth(run: RunView) -> list[_Chain]:
    """Chains of three matrices or more with gradients, the median RMS of each early and late."""
    record = run.params
    which = read.matrices(record)
    began = read.table(record, "weight_norm")[which, 0]  # one that begins at 0 holds gradients back
    early = slice(0, max(read.MIN_RECORDS, len(record) // 3))
    found = []
    for chain in chains(run, which[began != 0]):
        rms = read.table(record, "grad_rms")[chain]
        sizes = [read.median(rms[:, w], axis=1) for w in (early, read.last_half(record))]
        known = np.isfinite(sizes[0]) & (sizes[0] > 0)
        if known.sum() >= 3:
            found.append(_Chain(chain[known], sizes[0][known], sizes[1][known], early))
    if not found:
        raise read.Missing("fewer than 3 matrices with gradients")
    return found


def _fades(size: Floats) -> bool:
    """Whether gradients fade towards the input, by the earlier half of the matrices too.

    Not by the first one alone: one channel before a norm has no gradient.
    """
    half = float(np.median(size[: max(1, len(size) // 2)]) / size[-1])
    fades = size[0] / size[-1] < read.VANISHED_RATIO and size[0] < read.VANISHED
    return bool(fades and _order(size) > ORDERED and half < read.VANISHED_RATIO**0.5)


@rule(
    needs=("params",),
    threshold="the same norm of all gradients in 9 of 10 records, and steps that are almost 0",
    source="exact: after clip_grad_norm_ the norm is max_norm; steps: as lr_too_low",
    cause="gradients that are clipped to almost nothing: a max_norm that is far below their size",
    fix="use a max_norm near the usual norm of the gradients: clip_grad_norm_(parameters, 1.0) "
    "returns the norm before clipping; print it for some steps",
)
def clipping(run: RunView) -> Iterator[Finding]:
    """Gradients whose norm is always the same, and so small that the optimizer hardly moves."""
    norms = known(run.grad_norms[0])
    if len(norms) < read.MIN_RECORDS or not (level := float(np.median(norms))) > 0:
        return
    share = float((np.abs(norms - level) < SAME_SHARE * level).mean())
    if share < MOSTLY or level > CLIPPED or not (line := _too_small(run, level)):
        return
    what = f"the norm of all gradients is {level:.3g} in {share:.0%} of the records, and {line}"
    severity = "warning" if run.learns else "error"
    yield clipping.found(severity, what, (), run.all_steps)


def _too_small(run: RunView, level: float) -> str:
    """In words, where the steps are far below what the optimizer is made for; "" if not."""
    record, which, ratio = update_ratios(run)
    if (share := share_of_rate(run, record, which)) < ADAM_SHARE:
        return by_share(run, share)
    whole = read.median(ratio, axis=1)
    adam = np.isfinite(share)
    numel = read.meta(record, "numel", np.nan)[read.trainable(record)].sum()
    if run.info.get("optimizer") in _DIVIDE and (rms := level / np.sqrt(numel)) < EPS:
        return f"their RMS of {rms:.2g} is below {run.info['optimizer']}'s eps"
    if not adam and (whole < USUAL).mean() > 0.5:
        return f"update:weight of most matrices is {read.median(whole):.2g}"
    return ""


# They divide by the gradients' size, to which they add an eps of 1e-8 where nothing else was asked
_DIVIDE = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"})


def _order(size: Floats) -> float:
    """The correlation of log size with depth."""
    return float(np.corrcoef(np.arange(len(size)), np.log(size))[0, 1]) if np.ptp(size) else 0.0


def _first_and_last(
    run: RunView, says: Rule, severity: str, which: Ints, size: Floats, early: slice
) -> Finding:
    (first, last), steps = read.where(run.params, which[[0, -1]], early)
    what = f"gradient RMS is {size[0]:.2g} in {first} and {size[-1]:.2g} in {last}: "
    what += f"first over last {size[0] / size[-1]:.2g}"
    return says.found(severity, what, (first, last), steps)


# A step or two may be meant so; most of the first ones are not
SEVERAL = 3


@rule(
    threshold="most of the first steps, and 3 or more",
    source="exact, by what autograd adds new gradients to",
    cause="gradients are not zeroed: each step adds to the last one's",
    fix="call optimizer.zero_grad() once per step, before loss.backward()",
)
def grads_pile_up(run: RunView) -> Iterator[Finding]:
    """Steps that use the gradients of the steps before them, too."""
    kept, of = run.info.get("kept_gradients") or (0, 0)
    if kept >= SEVERAL and 2 * kept > of:
        what = (
            f"in {kept} of the first {of} steps the gradient of the step before was still there, "
        )
        what += "and the new one was added to it"
        severity = "error" if run.fails else "warning"
        yield grads_pile_up.found(severity, what, (), (0, of))
