"""A run in a few lines of text: its loss over the steps, and its layers from first to last.

Builds on `records` and `health`. Each line ends with a row of bars: a character for a step or a
layer, or for the mean of several.

    epoch 2/5 · step 1,240 · 01:01 · loss 0.431    █▇▆▅▄▃▃▂▂▁▁
    activations, RMS 0.21 to 1.4, 8 layers         ▂▃▃▄▅▅▆█
    update:weight, 0.0001 to 0.003, 9 matrices     ▁▃▄▅▅▅▆▇█
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hookkit.health.reading import stops_being_a_number
from hookkit.records import Floats, Record, Run
from hookkit.texts import pad, width

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BARS = 24
_LATEST = 5  # records whose median is shown


def glance(head: str, run: Run) -> list[str]:
    """`head`, which says how far the run is, with its loss, and a line for each record.

    >>> glance("step 4", Run(losses=np.array([4.0, 3.0, 1.0, 1.0])))
    ['step 4 · loss 2  █▆▁▁']
    """
    rows = [_loss(head, run), *_layers(run)]
    most = max(width(text) for text, _ in rows)
    return [f"{pad(text, most)}  {drawn}".rstrip() for text, drawn in rows]


def bars(values: Floats) -> str:
    """A row of at most `MOST_BARS` characters, from the smallest value to the greatest.

    >>> bars(np.array([0.0, 1.0, np.nan, 7.0]))
    '▁▂ █'
    """
    parts = np.array_split(values, min(len(values), MOST_BARS)) if len(values) else []
    means = np.array([part[np.isfinite(part)].mean() if _any(part) else np.nan for part in parts])
    if not _any(means):
        return ""
    low, high = np.nanmin(means), np.nanmax(means)
    heights = (means - low) / (high - low if high > low else 1.0) * (len(BLOCKS) - 1)
    return "".join(" " if np.isnan(h) else BLOCKS[round(float(h))] for h in heights)


def _any(values: Any) -> bool:
    return bool(np.isfinite(values).any())


def _loss(head: str, run: Run) -> tuple[str, str]:
    if run.losses is None or not _any(run.losses):
        return head, ""
    known = run.losses[np.isfinite(run.losses)]
    now = np.nan if stops_being_a_number(run.losses) else float(np.median(known[-_LATEST:]))
    return f"{head} · loss {now:.4g}", bars(known)


def _layers(run: Run) -> Iterator[tuple[str, str]]:
    """Of each record what it is, from where to where it reaches, and the bars of its layers."""
    for record, what in (
        (run.activations, "activations, RMS"),
        (run.gradients, "gradients, RMS"),
        (run.params, "update:weight,"),
    ):
        if record is None or not len(record) or not record.names:
            continue
        values = _latest(record)
        known = 10 ** values[np.isfinite(values)]
        if len(known):
            low, high = f"{known.min():.2g}", f"{known.max():.2g}"
            reach = low if low == high else f"{low} to {high}"
            yield f"{what} {reach}, {_count(len(values), record.kind)}", bars(values)


def _count(n: int, kind: str) -> str:
    one, many = ("matrix", "matrices") if kind == "param" else ("layer", "layers")
    return f"{n} {one if n == 1 else many}"


def _latest(record: Record) -> Floats:
    """(rows,) log10 of each layer's RMS, or of each matrix's update, over the latest records."""
    table = record.value("update_ratio" if record.kind == "param" else "rms")
    if record.kind == "param" and "ndim" in record.meta:
        table = table[np.array(record.meta["ndim"]) > 1]  # a bias that begins at 0 has no ratio
    latest = table[:, -_LATEST:]
    sizes = np.where(np.isfinite(latest) & (latest > 0), latest, np.nan)
    seen = np.isfinite(sizes).any(axis=1)
    found = np.full(len(sizes), np.nan)
    found[seen] = np.log10(np.nanmedian(sizes[seen], axis=1))
    return found
