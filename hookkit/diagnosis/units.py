"""Units that give nothing: dead before a ReLU, or at the ends of a tanh or a sigmoid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hookkit.diagnosis.finding import Finding
from hookkit.diagnosis.view import View, later_half, meta, names, percent
from hookkit.records import Record


def can_die(record: Record) -> Any:
    """(n_layers,) bool: whose units are judged, those of a ReLU or of what a ReLU alone reads.

    Each ReLU is counted once: by its own row, if it has one.
    """
    relu = np.array([kind in ("ReLU", "ReLU6") for kind in record.types], bool)
    feeds = [kind in ("ReLU", "ReLU6") for kind in meta(record, "feeds", None)]
    return relu | (np.array(feeds, bool) & ~np.append(relu[1:], False))


def dead(run: View) -> Iterator[Finding]:
    """Units before a ReLU that are never above 0 in the later half of the run."""
    a = run.acts
    units = a.values.get("never_positive", a.values.get("dead"))
    late = np.where(np.isfinite(units), units, np.inf)[:, len(a) // 2 :].min(axis=1, initial=np.inf)
    share = np.where(can_die(a) & np.isfinite(late), late, 0)
    for low, severity in ((0.9, run.severity), (0.5, "note")):
        if (hit := share > low).any():
            began = bool((units[hit, :3].min(axis=1) > low).all())
            what = (
                f"up to {percent(share[hit].max())} of a layer's units are never above 0 before "
                "their ReLU" + ", from the first step on" * began
            )
            cause = "biases or weights that began so" if began else "a step that was too large"
            fix = (
                "begin with biases of 0, or use nn.LeakyReLU or nn.GELU"
                if began
                else "divide the learning rate by 10, or use nn.LeakyReLU or nn.GELU"
            )
            yield Finding("dead", severity, what, cause, fix, names(a, hit))
            return


def saturated(run: View) -> Iterator[Finding]:
    """Tanh and sigmoid layers at the ends of their range: a note."""
    a = run.acts
    kinds = np.array([kind in ("Tanh", "Sigmoid") for kind in a.types], bool)
    share = np.where(kinds, np.nan_to_num(later_half(a, "saturated")), 0)
    if (hit := share > 0.5).any():
        what = f"up to {percent(share.max())} of a layer is at the ends of its range"
        cause = "weights or inputs that are large: the slope there is almost 0"
        fix = "smaller first weights (torch.nn.init.xavier_normal_), or a norm before it"
        yield Finding("saturated", "note", what, cause, fix, names(a, hit))
