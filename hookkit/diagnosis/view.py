"""`View`: a run with the properties that several rules read: its loss, its weights and their order.

A row of a record is a layer or a parameter; a column is a recorded step.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from hookkit.diagnosis.finding import LOSSES
from hookkit.records import Floats, Record, Run

ENOUGH = 10
"""The least number of records, or losses, from which rules measure anything."""

DENSE = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d")


class View:
    """Derives from a run the properties that several rules read.

    Attributes:
        run, info: the run and its facts.
        activations, params: its records. Rules that need one are skipped if it is too short.
        loss_name: the name of the loss without capitals, "_" and "Loss": "crossentropy"; or "".
        losses: (n,) the finite losses.
        first_nan_step: the step from which the loss is NaN or Inf until the end; or None.
        loss_start, loss_end: medians of the first and of the last losses; NaN if there are none.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.info = run, run.info
        self.activations: Any = run.activations
        self.params: Any = run.params
        name = str(run.info.get("loss_func") or "")
        self.loss_name = name.replace("_", "").lower().removesuffix("loss")
        losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, np.float64)
        self.first_nan_step = nan_from(losses)
        self.losses = known = losses[np.isfinite(losses)]
        if len(losses) and not len(known) and run.info.get("nan_losses"):
            self.first_nan_step = int(run.info.get("first_step", 0))
        self.loss_start = self.loss_end = np.nan
        if n := len(known):
            self.loss_start = float(np.median(known[: max(5, n // 20)]))
            self.loss_end = float(np.median(known[-max(5, n // 10) :]))
            if n > 20 and 0 < 3 * known[0] < self.loss_start and self.loss_end > known[0]:
                # the first step tripled the loss for good: only the first loss is undamaged
                self.loss_start = float(known[0])

    def lacks(self, need: str) -> str:
        """Return the missing data if the run does not have `need`, such as `"units"`; else ""."""
        if need == LOSSES:
            return "" if len(self.losses) or self.first_nan_step is not None else need
        if need == "loss graph":
            facts = {"loss_graph", "loss_input", "broadcast", "softmax_dim"}
            return "" if facts & self.info.keys() else need
        if need == "units":
            return "" if self.activations and "dead" in self.activations.values else need
        record = self.params if need == "parameters" else self.activations
        if not record or not record.names:
            return need
        n, steps = len(record), record.steps
        # with `every=10`, a few records cover many steps
        is_spread = n >= ENOUGH // 2 and steps[-1] - steps[0] >= 40
        return "" if n >= ENOUGH or is_spread else f"{ENOUGH} records of {need}"

    # --- the loss

    @property
    def loss_decreasing(self) -> bool:
        """Return whether the loss ends more than 5 % below its start, and is finite."""
        least = self.loss_start - 0.05 * abs(self.loss_start)
        return self.first_nan_step is None and self.loss_end < least

    @property
    def loss_flat(self) -> bool:
        """Return whether there are 50 or more losses, and they do not decrease."""
        return len(self.losses) >= 50 and not self.loss_decreasing

    @property
    def much_loss_left(self) -> bool:
        """Return whether the loss ends above 30 % of its start, or is not known."""
        return not self.loss_end < 0.3 * self.loss_start

    @property
    def severity(self) -> str:
        """Return `"error"` if the loss is flat or not finite, else `"warning"`."""
        return "error" if self.loss_flat or self.first_nan_step is not None else "warning"

    @cached_property
    def pretrained(self) -> bool:
        """Return whether the weights were trained: norms' biases vary, or the loss begins low."""
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
        """Return (k,) the rows of trainable weights with two or more dimensions, not embeddings."""
        p = self.params
        if not p:
            return np.zeros(0, np.int64)
        wide = (meta(p, "ndim", 2) > 1) & meta(p, "requires_grad", True).astype(bool)
        embeds = np.array(["Embedding" in kind for kind in p.types], bool)
        return np.flatnonzero(wide & ~embeds)

    @property
    def predecessors(self) -> dict[str, str]:
        """Return weight in the graph → the weight before it; "" if it reads the data."""
        known = self.activations.meta.get("predecessors") if self.activations is not None else None
        return known or {}

    @cached_property
    def input_layers(self) -> list[int]:
        """Return the rows of the layers that read the data, except embeddings."""
        a, graph = self.activations, self.predecessors
        if a is None:
            return []
        rows = {name: i for i, name in enumerate(a.names)}
        owners = [name.rpartition(".")[0] for name, before in graph.items() if not before]
        first = [rows[name] for name in dict.fromkeys(owners) if name in rows]
        if not graph:
            first = [i for i, kind in enumerate(a.types) if kind in DENSE][:1]
        return [i for i in first if "Embedding" not in a.types[i]]

    @cached_property
    def gradient_by_depth(self) -> tuple[Any, Any]:
        """Return the longest chain of matrices from the data to the loss, and its gradients.

        (k,) rows, and (k,) median RMS of their gradients in the first third of the run, without
        those that are 0; both are empty if fewer than 3 are left. If the graph is not known, the
        chain is all matrices.
        """
        chain, before = [*self.matrices], self.predecessors
        rows = {self.params.names[i]: i for i in chain}
        if before.keys() & rows.keys():
            chain, followed = [], {*before.values()}
            for name in [name for name in before if name not in followed]:  # last weights: go back
                passed: dict[str, None] = {}
                while name and name not in passed:
                    passed[name] = None
                    name = before.get(name, "")
                chain = max(chain, [rows[n] for n in passed if n in rows][::-1], key=len)
        third = slice(0, max(len(self.params) // 3, 1))
        size = median(table(self.params, "grad_rms")[chain][:, third])
        known = size > 0 if (size > 0).sum() > 2 else np.zeros(len(size), bool)
        return np.array(chain, np.int64)[known], size[known]

    @property
    def gradients_vanish(self) -> bool:
        """Return whether gradients shrink 1000-fold or more from the loss to the data."""
        _, size = self.gradient_by_depth
        return bool(len(size) and size[0] < 1e-4 and size[0] < 1e-3 * size[-1])


# --- of one series or record


def nan_from(values: Floats) -> int | None:
    """Return the step from which `values` are NaN or Inf until the end, or None.

    NaN may also mean that a value is not known: a loss may be reported every tenth step. So NaN at
    the end count only if they are more than two of the longest gap before. None if all are NaN.
    """
    known = np.flatnonzero(np.isfinite(values))
    if not len(known) or len(values) - 1 - known[-1] <= 2 * np.diff(known, prepend=-1).max():
        return None
    return int(known[-1]) + 1


def meta(record: Record, key: str, default: Any) -> Any:
    """Return (rows,) the values of `record.meta[key]`, or `default` for each row without it."""
    known = record.meta.get(key)
    return np.array([default] * len(record.names) if known is None else known)


def table(record: Record, statistic: str) -> Floats:
    """Return (rows, n) the values of a statistic; NaN if it was not recorded."""
    known = record.values.get(statistic)
    return np.full((len(record.names), len(record)), np.nan) if known is None else known


def median(values: Floats) -> Floats:
    """Return (rows,) the median of the finite values of each row; NaN if there are none."""
    values = np.where(np.isfinite(values), values, np.nan)
    known = ~np.isnan(values).all(axis=1)
    medians = np.full(len(values), np.nan)
    medians[known] = np.nanmedian(values[known], axis=1)
    return medians


def later_half(record: Record, statistic: str) -> Floats:
    """Return (rows,) the median of a statistic in the later half of the records."""
    return median(table(record, statistic)[:, len(record) // 2 :])


def names(record: Record, which: Any) -> tuple[str, ...]:
    """Return the names of the rows `which`: indices, or a mask of all rows."""
    which = np.asarray(which)
    rows = np.flatnonzero(which) if which.dtype == bool else which
    return tuple(record.names[int(i)] for i in rows)


def percent(share: float) -> str:
    """Return a fraction as text with three digits: `"0.25%"`."""
    return f"{100 * share:.3g}%"
