"""`RunningStats`: statistics of named tensors over steps: batch → step → `StepTable`.

A hook calls `see` for each tensor, and its row goes into the dict of the current batch. Events only
move dicts: `drop` forgets the batch, `fold` keeps it for its step, `forget` drops the step too,
`commit` ends the step, whose rows then wait, and after 8 steps go into the table on the host. On a
GPU they are sent there without waiting, and have arrived by then. Ctrl-C can leave a record without
the step under way.

Inside `torch.compile` the hook's call becomes one opaque operation of the graph (`graph_op`), which
runs this very code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookkit.hooks.snapshot import is_transforming
from hookkit.nested import leaves
from hookkit.recorders import triton_rows, unit_stats as units
from hookkit.recorders.bins import LogBins, RangeBins, narrowed, narrowed_tensor, sample_of
from hookkit.recorders.device_rows import arriving
from hookkit.recorders.graph_op import enlist, new_token, show_traced
from hookkit.recorders.moments import array_row, flat, merge, moments, plain, widened
from hookkit.recorders.step_table import MOMENTS, Field, Numbers, StepTable, sums

_MOST_SAMPLES = 64  # of a layer in a batch on a device: of more calls no sample is taken


@dataclass(frozen=True)
class Options:
    """What is counted.

    Args:
        eps: a value of at most this size is near zero.
        bins: of the histogram; None for none.
        units: whether dead and saturated units are counted.
    """

    eps: float = 0.05
    bins: LogBins | RangeBins | None = None
    units: bool = False


class Entry(NamedTuple):
    """What a layer gave in a batch; of another device than a CPU the numbers are tensors on it.

    Args:
        row: its nine numbers; on CUDA the sums of `triton_rows`.
        counts: of the histogram; on a device the samples, a list.
        alive: (units,) bool, whether a value of the unit is above 0; None if units are not known.
        full: how many values are at the flat ends of a bounded activation; None of any other.
    """

    row: Any
    counts: Any = None
    alive: Any = None
    full: Any = None


def merged(a: Entry, b: Entry) -> Entry:
    """Two calls of a layer, or two batches, as one."""
    row = a.row
    if isinstance(row, tuple):
        row = merge(row, b.row)
    elif row.ndim == 2:
        row = triton_rows.joined(row, b.row)
    else:
        row = torch.stack(merge(row.unbind(), b.row.to(row.device).unbind()))
    counts = a.counts if a.counts is None else a.counts + b.counts
    if isinstance(counts, list):
        counts = counts[:_MOST_SAMPLES]
    full = b.full if a.full is None else a.full if b.full is None else a.full + b.full
    return Entry(row, counts, units.either(a.alive, b.alive), full)


Entries = dict[int, Entry]


class RunningStats:
    """Statistics of named tensors over steps, in bounded memory.

    Args:
        kind: of the `Record` it gives, `"activation"` or `"gradient"`.
        options: what is counted.

    Attributes:
        names, types: of the rows, and the class names of their modules.
        thread: whose calls of compiled graphs are recorded; None records every thread's.
        unscale: a 0-d tensor that values are multiplied by, or None.
        skipped: name → type of what has no values to read.
        consumers: by layer, the class of the one activation that reads it.
        facts: what else is known of the model, by its name in `Record.meta`.
        given: by row, the RMS of what each of the layer's calls was given in the first record.
        n_records: how many records were made.
        table: the records, whose fields are "moments", "hist" and "units".

    >>> stats = RunningStats("activation")
    >>> row = stats.row("fc", "Linear")
    >>> for step in range(3):
    ...     stats.update(row, 0, "", torch.full((4, 2), float(step)))
    ...     stats.end_step(step, epoch=0, iteration=step)
    >>> stats.tables()["moments"][:, 0, 2].tolist()
    [0.0, 1.0, 2.0]
    """

    def __init__(self, kind: str, options: Options | None = None) -> None:
        self.kind, self.options = kind, options or Options()
        self.names: list[str] = []
        self.types: list[str] = []
        self.dtypes: dict[int, torch.dtype] = {}
        self.skipped: dict[str, str] = {}
        self.consumers: dict[str, str | None] = {}
        self.facts: dict[str, Any] = {}
        self.given: dict[int, list[Any]] = {}
        self.unscale: Tensor | None = None
        self.unscaled = False
        self.thread: int | None = None
        self._rows: dict[str, int] = {}
        self._dims: dict[tuple[int, int], int | None] = {}  # of units, by row and `ndim`
        self._before: units.Before | None = None  # the last tensor whose units are known
        self._lock = Lock()
        self._step: Entries = {}  # what was kept for the step under way
        self._batch: Entries = {}  # what was seen since
        self._window = units.Units()
        fields = {"moments": MOMENTS}
        if self.options.bins is not None:
            fields["hist"] = sums(len(self.options.bins.edges) - 1, int)
        if self.options.units:
            fields["units"] = sums(
                4
            )  # dead units, records that were judged; full values, of how many
        self.table, self.n_records = StepTable(**fields), 0
        self.id, self.token = enlist(self), new_token()

    def row(self, name: str, kind: str) -> int:
        """The row of a name: that of before, or a new one."""
        if name not in self._rows:
            self.names.append(name)
            self.types.append(kind)
            self._rows[name] = len(self.names) - 1
        row = self._rows[name]
        self.types[row] = kind
        return row

    # --- the current batch

    def update(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Records `t`, leaf number `leaf` (called `path`) of what the layer in `row` gave.

        Costs one read of `t`; returns at once on a GPU. In `torch.compile` one operation.
        """
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
            return
        x = plain(t)
        if x is None:
            self.skipped[self.names[row] + path] = f"{type(t).__name__} without values to read"
            return
        if leaf:
            row = self.row(self.names[row] + path, self.types[row])
        self.dtypes[row] = x.dtype
        if self.unscale is not None:
            self.unscaled, x = True, widened(x) * self.unscale
        dim = self._dim(row, t) if self.options.units and x.numel() and x.ndim else None
        batch = self._batch
        if not x.is_cpu:
            entry = self._entry_on_device(x, row, dim)
        elif x.dtype is torch.float32 and x.is_contiguous():
            entry = self._entry(x.numpy(), row, dim)
        else:
            entry = self._entry(widened(x).numpy(), row, dim)
        with self._lock:  # DataParallel's replicas run in threads
            batch[row] = merged(batch[row], entry) if row in batch else entry

    def see_inputs(self, row: int, inputs: Any) -> None:
        """Keep the RMS of the first tensor that a layer is given, if it has floats."""
        t = None if is_transforming() else next(iter(leaves(inputs)), None)
        x = plain(t) if t is not None and t.is_floating_point() else None
        if x is not None and x.numel():
            wide = x.dtype if x.itemsize > 2 else torch.float32
            with torch.inference_mode(False), torch.no_grad():
                # without a copy in float32, which may be too large for a device
                x = x.to(wide) if x.itemsize < 2 else x
                rms = torch.linalg.vector_norm(x, dtype=wide) / math.sqrt(x.numel())
            self.given.setdefault(row, []).append(rms)

    def _entry(self, x: Any, row: int, dim: int | None) -> Entry:
        with np.errstate(all="ignore"):  # the user's own setting may raise
            return self._entry_in_array(x, row, dim)

    def _entry_in_array(self, x: Any, row: int, dim: int | None) -> Entry:
        eps, bins = self.options.eps, self.options.bins
        values = x.reshape(-1) if x.flags.c_contiguous else _dense(x)
        counts, alive, full = None, None, None
        if bins is not None:
            part = values[sample_of(len(values), self.n_records)]
            counts = bins.count(part if part.dtype == np.float32 else narrowed(part))
        if dim is not None:
            alive = units.alive_in_array(x, dim)
        if self.options.units and (middle := units.middle(self.types[row])) is not None and x.size:
            full = float(np.count_nonzero(np.abs(x - middle) > 0.97 * (1 - middle)))
        return Entry(array_row(values, eps), counts, alive, full)

    def _entry_on_device(self, x: Tensor, row: int, dim: int | None) -> Entry:
        eps, values = self.options.eps, flat(x)
        fused = triton_rows.serves(x.device)
        with torch.inference_mode(False), torch.no_grad():
            moment = triton_rows.sums_of(values, eps) if fused else moments(widened(values), eps)
            samples: list[Tensor] | None = None
            alive: Any = None
            full: Any = None
            if self.options.bins is not None:
                part = values[sample_of(len(values), self.n_records)]
                samples = [narrowed_tensor(part)]
            if self.options.units and not (x.is_floating_point() and x.dtype.itemsize > 1):
                x = widened(x)  # bool and float8 have no arithmetic
            if dim is not None:
                alive = units.alive_in_tensor(x, dim)
            middle = units.middle(self.types[row]) if self.options.units and x.numel() else None
            if middle is not None:
                full = ((x - middle).abs() > 0.97 * (1 - middle)).sum().to(torch.float32)
        return Entry(moment, samples, alive, full)

    def _dim(self, row: int, t: Tensor) -> int | None:
        key = row, t.ndim
        if key not in self._dims:
            self._dims[key] = units.channel_dim(self.types[row], t, self._before)
        if (dim := self._dims[key]) is not None:
            self._before = t.shape, dim
        return dim

    # --- steps

    def discard_batch(self) -> None:
        """Forgets the batch."""
        self._batch = {}

    def end_batch(self, *, finite_only: bool = False) -> None:
        """Keeps the batch for its step; with `finite_only` only if all of its values are finite."""
        if not (finite_only and any(_bad(entry) for entry in self._batch.values())):
            self._step = _together(self._step, self._batch)
        self._batch = {}

    def discard_step(self) -> None:
        """Forgets everything since the last `commit`."""
        self._step, self._batch = {}, {}

    def end_step(self, step: int, epoch: int, iteration: int) -> None:
        """Ends the step: all that was seen since the last commit is its record."""
        n, entries = self.n_records, _together(self._step, self._batch)
        read: Any = lambda: entries  # noqa: E731
        if Tensor in {type(entry.row) for entry in entries.values()}:
            read = arriving(entries, self.options.bins)
        self._step, self._batch, self.n_records = {}, {}, n + 1
        # without `self`, which holds the table: the two would wait for the garbage collector
        parts = self.table.fields, self.names, self.options, self._window
        self.table.later((step, epoch, iteration), lambda: _numbers(read(), n, *parts))

    # --- reading

    def tables(self, first: int = 0) -> Numbers:
        """By field the (columns, rows, …) numbers of the records from column `first` on.

        Here the host waits for the device.
        """
        return {name: self.table.read(name, len(self.names), first) for name in self.table.fields}

    def given_rms(self) -> dict[str, float]:
        """Return by name the RMS of each layer's inputs in the first record. Sync: once."""
        self.given = {row: [float(x) for x in calls] for row, calls in self.given.items()}
        # all calls count: the first may be fed zeros
        return {
            self.names[row]: math.hypot(*calls) / math.sqrt(len(calls))
            for row, calls in self.given.items()
        }

    def dead(self, name: str) -> Any:
        """(units,) bool of a layer's units over the window; None if they are not known."""
        self.table.settle()
        return self._window.dead(self._rows.get(name, -1))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the step under way, which is on its device."""
        self.table.settle()
        self.given_rms()
        gone = dict.fromkeys(("token", "unscale", "thread", "_lock", "_before"))
        return {**vars(self), **gone, "_step": {}, "_batch": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, self.id, self.token = Lock(), enlist(self), new_token()


def _numbers(
    entries: Entries,
    n: int,
    fields: dict[str, Field],
    names: list[str],
    options: Options,
    window: units.Units,
) -> Numbers:
    """The numbers of record `n`; called once, in the order of records."""
    numbers = {name: field.blanks(len(names)) for name, field in fields.items()}
    if entries:
        numbers["moments"][list(entries)] = [entry.row for entry in entries.values()]
    if (bins := options.bins) is not None:
        counts = np.zeros((len(names), bins.width), np.int64)
        for row, entry in entries.items():
            counts[row] = entry.counts
        numbers["hist"] = bins.in_bins(counts)
    if options.units:
        known = {row: e.alive for row, e in entries.items() if e.alive is not None}
        for row, share in window.after(known, n).items():
            numbers["units"][row, :2] = share, 1.0
        for row, entry in entries.items():
            if entry.full is not None:
                numbers["units"][row, 2:] = entry.full, entry.row[1]
    return numbers


def _dense(x: Any) -> Any:
    """The values of an array in one dimension, in memory order where that is dense."""
    return x.transpose(np.argsort([-step for step in x.strides], kind="stable")).reshape(-1)


def _bad(entry: Entry) -> bool:
    """Whether values are not finite; sync: of a device, in a step that was not made."""
    row = entry.row
    return bool(row[8] if not isinstance(row, Tensor) or row.ndim == 1 else row[:, 8].sum())


def _together(a: Entries, b: Entries) -> Entries:
    """What was seen in two batches."""
    if not a:
        return b
    return {**a, **{row: merged(a[row], e) if row in a else e for row, e in b.items()}}
