"""What the pictures of a page show, in words and numbers: their captions and descriptions.

A caption is true of its picture whatever was recorded. Where there are too many layers to name each
on an axis, it says which ones have the largest and the smallest values; the table below names all.
Nothing here needs matplotlib: without it, the words are still on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hookkit.health.units import can_be_dormant, can_die
from hookkit.records import Record, Run

NAMED = 12
"""Layers up to which the pictures name each of them."""


def in_words(record: Record) -> str:
    """What a heat-map of `record` shows, in words and numbers.

    A parameter that begins at 0 is left out: its relative update is infinite at first, and large
    then, whatever the learning rate.
    """
    param = record.kind == "param"
    name = "update:weight" if param else f"RMS of {record.kind}s"
    table = record.values.get("update_ratio" if param else "rms", np.zeros((0, 0)))
    fine, of = np.isfinite(table), f"{len(record.names)} rows"
    if param and len(record) and "weight_norm" in record.values:
        fine &= record.values["weight_norm"][:, :1] != 0
        if left := int((~fine.any(axis=1)).sum()):
            of = f"{len(record.names) - left} of {of} (others begin at 0 or have no finite value)"
    if not fine.any():
        return f"{name}: no finite value"
    row, column = np.unravel_index(np.where(fine, table, -np.inf).argmax(), table.shape)
    where = f"{record.labels[row]} at step {record.steps[column]}"
    bad = (record.values.get("nonfinite", np.zeros((1, 1))) > 0).any(axis=1).sum()
    return (
        f"{name} of {of} over {len(record)} records: median "
        f"{np.median(table[fine]):.2g}, largest {table[row, column]:.2g} in {where}"
        + (f", NaN or Inf in {bad} rows" if bad else "")
    )


def of_run(run: Run, findings: Any) -> str:
    """Of the heat-maps: what their rows, colours and numbers are."""
    text = "Layers from top to bottom, steps from left to right."
    if run.params is not None and len(run.params):
        text += (
            " Updates: pale is 0.001 of a weight, a healthy pace; purple is faster, green slower."
        )
    if any(finding.layers for finding in findings):
        text += " Numbers in the picture are those of the findings."
    return text


def of_loss(run: Run) -> str:
    """Of the loss: which losses and norms there are; "" where there are none to draw."""
    norms = [run.grad_norms, run.params.values.get("grad_norm") if run.params else None]
    kinds = ["training"] * _is_known(run.losses)
    kinds += ["validation"] * any("valid_loss" in row for row in run.valid)
    if not kinds:
        none = "The global gradient norm. No loss was recorded."
        return none if any(map(_is_known, norms)) else ""
    text = f"{' and '.join(kinds)} loss by step".capitalize()
    return text + ", and the global gradient norm" * any(map(_is_known, norms)) + "."


def _is_known(values: Any) -> bool:
    return values is not None and bool(np.isfinite(values).any())


def of_lines(record: Record) -> str:
    """Of means and standard deviations."""
    text = f"Means and standard deviations of {record.kind}s, a line a layer."
    return text + extremes(record, "std", "the standard deviation")


def of_dead(record: Record) -> str:
    """Of dead and dormant units, or of values near zero where there are none of these."""
    able = {"dead": can_die(record), "dormant": can_be_dormant(record)}
    known = [
        kind
        for kind, rows in able.items()
        if kind in record.values and _is_known(record.values[kind][rows])
    ]
    if known:
        return f"The share of units that are {' or '.join(known)}, a line a layer."
    text = "The share of values near zero, a line a layer."
    return (
        text if "dead" in record.values else f"{text} For dead units: ActivationStats(units=True)."
    )


def of_updates(record: Record) -> str:
    """Of update:weight, which is drawn of matrices only."""
    text = "How far each matrix moves in a step, relative to its size."
    ndim = record.meta.get("ndim", [2] * len(record.names))
    rows = [i for i, n in enumerate(ndim) if n >= 2]
    return text + extremes(record, "update_ratio", "update:weight", rows)


def extremes(record: Record, statistic: str, name: str, rows: Sequence[int] | None = None) -> str:
    """Which of many layers end with the largest and the smallest value; else ""."""
    rows = range(len(record.names)) if rows is None else rows
    found = {i: last(record.values[statistic][i]) for i in rows if statistic in record.values}
    found = {i: value for i, value in found.items() if np.isfinite(value)}
    if len(found) <= NAMED:
        return ""
    low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    return (
        f" At the last step with a value, {name} is largest in {record.labels[high]} "
        f"({found[high]:.2g}) and smallest in {record.labels[low]} ({found[low]:.2g})."
    )


def last(row: Any) -> float:
    """The last value that was seen, NaN if none was."""
    seen = row[~np.isnan(row)]
    return float(seen[-1]) if len(seen) else float("nan")
