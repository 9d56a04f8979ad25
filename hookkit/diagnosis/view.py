"""`View`: a run as rules read it: what its loss does, which weights there are, in what order.

A row of a record is a layer or a parameter, a column a recorded step.
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


class View:
    """Read a run for the rules.

    Attributes:
        run, info: the run and its facts.
        activations, params: its records. A rule that needs one is asked if it is long enough.
        loss_name: name of the loss without "Loss", underscores, capitals: "crossentropy"; or "".
        losses: (n,) the finite losses.
        first_nan_step: the step from which on the loss is NaN or Inf, to the end; or None.
        loss_start, loss_end: medians of the first losses and of the last; NaN if there are none.
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
                # it tripled with the first step and never came back: what follows is the damage
                self.loss_start = float(known[0])

    def lacks(self, need: str) -> str:
        """Return what the run lacks of a rule's need, such as `"parameters"`; "" if nothing."""
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
        is_spread = n >= ENOUGH // 2 and steps[-1] - steps[0] >= 40  # as with `every=10`
        return "" if n >= ENOUGH or is_spread else f"{ENOUGH} records of {need}"

    # --- the loss

    @property
    def loss_decreasing(self) -> bool:
        """Return whether the loss ends 5 % or more below its start."""
        least = self.loss_start - 0.05 * abs(self.loss_start)
        return self.first_nan_step is None and self.loss_end < least

    @property
    def loss_flat(self) -> bool:
        """Return whether there are 50 losses or more, and they do not decrease."""
        return len(self.losses) >= 50 and not self.loss_decreasing

    @property
    def much_loss_left(self) -> bool:
        """Return whether more than 0.3 of the loss is left, or it is not known."""
        return not self.loss_end < 0.3 * self.loss_start

    @property
    def severity(self) -> str:
        """Return `"error"` if the loss is flat or not finite, else `"warning"`."""
        return "error" if self.loss_flat or self.first_nan_step is not None else "warning"

    @cached_property
    def pretrained(self) -> bool:
        """Return whether weights are not new, as biases of norms differ, or the loss began low."""
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
        """Return (k,) rows of trainable weights of two dimensions or more, except embeddings."""
        p = self.params
        if not p:
            return np.zeros(0, np.int64)
        wide = (meta(p, "ndim", 2) > 1) & meta(p, "requires_grad", True).astype(bool)
        embeds = np.array(["Embedding" in kind for kind in p.types], bool)
        return np.flatnonzero(wide & ~embeds)

    @property
    def predecessors(self) -> dict[str, str]:
        """Return each weight in the graph → the weight before it; "" if the data come before it."""
        known = self.activations.meta.get("predecessors") if self.activations is not None else None
        return known or {}

    @cached_property
    def input_layers(self) -> list[int]:
        """Return the rows of the layers, except embeddings, whose input is the data."""
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
        """Return the longest chain of matrices from the data on, and their gradients.

        (k,) rows, and (k,) RMS of their gradients in the first third of the run, where it is above
        0; both empty if these are fewer than 3. If the graph is not known, all matrices.
        """
        chain, before = [*self.matrices], self.predecessors
        rows = {self.params.names[i]: i for i in chain}
        if before.keys() & rows.keys():
            chain, followed = [], {*before.values()}
            for name in [name for name in before if name not in followed]:
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
        """Return whether gradients fade towards the data, 1000-fold or more."""
        _, size = self.gradient_by_depth
        return bool(len(size) and size[0] < 1e-4 and size[0] < 1e-3 * size[-1])


# --- of one series or record


def nan_from(values: Floats) -> int | None:
    """Return the step from which on values are NaN or Inf to the end; None if there is none.

    NaN alone says that a value is not known: a loss may be read every tenth step. So the end counts
    if it is longer than two of the gaps before. If no value is finite, none is known to be lost.
    """
    known = np.flatnonzero(np.isfinite(values))
    if not len(known) or len(values) - 1 - known[-1] <= 2 * np.diff(known, prepend=-1).max():
        return None
    return int(known[-1]) + 1


def meta(record: Record, key: str, default: Any) -> Any:
    """Return (rows,) what is known of each row, or `default` for each."""
    known = record.meta.get(key)
    return np.array([default] * len(record.names) if known is None else known)


def table(record: Record, statistic: str) -> Floats:
    """Return (rows, n) of a statistic; NaN if it was not recorded."""
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
    """Return (rows,) the median of the later half of the records."""
    return median(table(record, statistic)[:, len(record) // 2 :])


def names(record: Record, which: Any) -> tuple[str, ...]:
    """Return the names of rows, which are given as numbers or as a mask."""
    which = np.asarray(which)
    rows = np.flatnonzero(which) if which.dtype == bool else which
    return tuple(record.names[int(i)] for i in rows)


def percent(share: float) -> str:
    """Write a share with three digits: `"0.25%"`."""
    return f"{100 * share:.3g}%"
