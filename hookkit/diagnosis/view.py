"""`View`: a run as rules read it. What the loss does, which weights there are, in what order.

Builds on `records`. A row of a record is a layer or a parameter, a column a recorded step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from hookkit.diagnosis.finding import LOSSES
from hookkit.records import Floats, Record, Run

ENOUGH = 10
"""Records, or losses, with fewer of which nothing is measured."""

DENSE = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d")
ERRORS = ("mse", "l1", "smoothl1", "huber")
"""Losses of which the size of an error is known."""

_NO_ONE = np.zeros(0, np.int64)


class View:
    """What rules read of a run.

    Attributes:
        info, acts, grads, params: of the run. Records are never None, nor too short to judge, in a
            rule that needs them.
        loss: the loss's name without "Loss", underscores and capitals: "crossentropy"; or "".
        losses: (n,) the finite losses.
        start, end: the level of the loss at first and at last; NaN if it is not known.
        broke: the step from which on the loss is no number, to the end; or None.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.info = run, run.info
        self.acts: Any = run.activations
        self.params: Any = run.params
        self.grads = run.gradients
        name = str(run.info.get("loss_func") or "")
        self.loss = name.replace("_", "").lower().removesuffix("loss")
        losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, np.float64)
        at = np.flatnonzero(np.isfinite(losses))
        self.losses = losses[at]
        gap = int(np.diff(at, prepend=-1).max()) if len(at) else 0
        self.broke = int(at[-1]) + 1 if len(at) and len(losses) - 1 - at[-1] > 2 * gap else None
        if len(losses) and not len(at) and run.info.get("nan_losses"):
            self.broke = int(run.info.get("first_step", 0))  # from the first step on
        self.start, self.end = _levels(self.losses)

    def lacks(self, need: str) -> str:
        """What the run lacks of a rule's need, such as `"parameters"`; "" if nothing."""
        if need == LOSSES:
            return "" if len(self.losses) or self.broke is not None else need
        if need == "loss graph":
            facts = ("loss_graph", "loss_input", "broadcast", "softmax_dim")
            return "" if any(key in self.info for key in facts) else need
        if need == "units":
            shown = self.acts is not None and {"never_positive", "dead"} & {*self.acts.values}
            return "" if shown else need
        record = self.params if need == "parameters" else self.acts
        if record is None or not record.names or not len(record):
            return need
        return "" if is_enough(record) else f"{ENOUGH} records of {need}"

    # --- the loss

    @property
    def falls(self) -> bool:
        """The loss ends 5 % or more below its start."""
        return self.broke is None and self.end < self.start - 0.05 * abs(self.start)

    @property
    def stands(self) -> bool:
        """There are 50 losses or more, and they do not fall."""
        return len(self.losses) >= 50 and not self.falls

    @property
    def has_much_left(self) -> bool:
        """More than 0.3 of the loss is left, or it is not known."""
        return not self.end < 0.3 * self.start

    @property
    def severity(self) -> str:
        """Of a mistake whose harm the loss shows: an error where it does not fall."""
        return "error" if self.stands or self.broke is not None else "warning"

    @cached_property
    def trained_before(self) -> bool:
        """Weights are not new: norms begin with biases that differ, or the loss below chance."""
        chance = np.log(self.info.get("n_classes") or 1)
        if len(self.losses) and self.losses[0] < 0.5 * chance:
            return True
        p = self.params
        if p is None or "constant" not in p.meta:
            return False
        norms = [i for i, kind in enumerate(p.types) if "Norm" in kind]
        biases = [i for i in norms if p.names[i].endswith("bias")] or norms
        return any(not p.meta["constant"][i] for i in biases)

    # --- the model

    @cached_property
    def matrices(self) -> Any:
        """(k,) rows of weights with two dimensions or more that can be trained, but embeddings."""
        p = self.params
        if p is None or not len(p):
            return _NO_ONE
        wide = meta(p, "ndim", 2) > 1
        embeds = np.array(["Embedding" in kind for kind in p.types], bool)
        return np.flatnonzero(wide & meta(p, "requires_grad", True).astype(bool) & ~embeds)

    @property
    def before(self) -> dict[str, str]:
        """Each weight in the graph → the one before it; "" for those that are given the data."""
        known = {} if self.acts is None else self.acts.meta.get("predecessors")
        return known or {}

    def given_data(self) -> list[int]:
        """Return the rows of the layers, except embeddings, whose input is the data."""
        if self.acts is None:
            return []
        dense = [i for i, kind in enumerate(self.acts.types) if kind in DENSE][:1]
        rows = {name: i for i, name in enumerate(self.acts.names)}
        owners = [name.rpartition(".")[0] for name, before in self.before.items() if not before]
        given = [rows[name] for name in owners if name in rows] if self.before else dense
        return [i for i in dict.fromkeys(given) if "Embedding" not in self.acts.types[i]]

    @cached_property
    def depth(self) -> tuple[Any, Any]:
        """The longest chain of matrices in the graph, from the data on, and their gradients.

        (k,) rows, and the RMS of their gradients in the first third of the run, where that is above
        0; empty if these are fewer than 3. All matrices, where the graph is not known.
        """
        rows = self._chain()
        third = slice(0, max(len(self.params) // 3, 1))
        size = median(table(self.params, "grad_rms")[rows][:, third])
        known = size > 0
        return (rows[known], size[known]) if known.sum() > 2 else (_NO_ONE, np.zeros(0))

    @property
    def fades(self) -> bool:
        """Gradients fade towards the data, 1000-fold or more."""
        _, size = self.depth
        return bool(len(size) and size[0] < 1e-4 and size[0] < 1e-3 * size[-1])

    def _chain(self) -> Any:
        rows, before = {self.params.names[i]: i for i in self.matrices}, self.before
        if not before.keys() & rows.keys():
            return self.matrices
        chains = []
        for name in before.keys() - set(before.values()):
            chain: dict[str, None] = {}
            while name and name not in chain:
                chain[name] = None
                name = before.get(name, "")
            chains.append([rows[name] for name in chain if name in rows][::-1])
        return np.array(max(chains, key=len, default=[]), np.int64)

    # --- whole record

    @property
    def all_steps(self) -> tuple[int, int]:
        """The first and the last step of the run."""
        return 0, max(self.run.n_steps - 1, 0)


def _levels(losses: Floats) -> tuple[float, float]:
    """Medians of the first steps (a twentieth, 5 at least) and of the last (a tenth).

    The first loss alone, if it tripled with the first step and never came back: what follows is
    the damage.
    """
    if not len(losses):
        return np.nan, np.nan
    start = float(np.median(losses[: max(5, len(losses) // 20)]))
    end = float(np.median(losses[-max(5, len(losses) // 10) :]))
    leapt = len(losses) > 20 and 0 < 3 * losses[0] < start and end > losses[0]
    return (float(losses[0]) if leapt else start), end


def is_enough(record: Record) -> bool:
    """10 records or more; or 5 that are spread over 40 steps, as with `every=10`."""
    spread = len(record) >= ENOUGH // 2 and record.steps[-1] - record.steps[0] >= 40
    return len(record) >= ENOUGH or bool(spread)


def meta(record: Record, key: str, default: Any) -> Any:
    """(rows,) what is known of each row, or `default` for each."""
    known = record.meta.get(key)
    return np.array([default] * len(record.names) if known is None else known)


def table(record: Record, statistic: str) -> Floats:
    """(rows, n) of a statistic; NaN where it was not recorded."""
    known = record.values.get(statistic)
    return np.full((len(record.names), len(record)), np.nan) if known is None else known


def median(values: Floats) -> Floats:
    """(rows,) the median of the finite values of each row; NaN where there are none."""
    values = np.where(np.isfinite(values), values, np.nan)
    known = ~np.isnan(values).all(axis=1)
    medians = np.full(len(values), np.nan)
    medians[known] = np.nanmedian(values[known], axis=1)
    return medians


def later_half(record: Record, statistic: str) -> Floats:
    """(rows,) the median of the later half of the records."""
    return median(table(record, statistic)[:, len(record) // 2 :])


def names(record: Record, which: Any) -> tuple[str, ...]:
    """The names of rows, given as numbers or as a mask."""
    which = np.asarray(which)
    rows = np.flatnonzero(which) if which.dtype == bool else which
    return tuple(record.names[int(i)] for i in rows)


def percent(share: float) -> str:
    """A share in three digits: `"0.25%"`."""
    return f"{100 * share:.3g}%"


def plural(n: int, noun: str, many: str = "") -> str:
    """`"1 step"`, `"3 steps"`; `many` for nouns that take no s."""
    return f"{n:,} {noun if n == 1 else many or noun + 's'}"
