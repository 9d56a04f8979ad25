"""`Tally`: statistics of named tensors over steps: batch → step → history.

A hook calls `see` for each tensor, and its row goes into the dict of the current batch. Events only
move dicts: `drop` forgets the batch, `fold` keeps it for its step, `forget` drops the step too,
`commit` ends the step, whose rows then wait, and after 8 steps go into the history on the host. On
a GPU they are sent there without waiting, and have arrived by then.

All that changes together is one tuple, which is replaced by one assignment: an interrupt leaves all
of a step or nothing. Inside `torch.compile` the hook's call becomes one opaque operation of the
graph (`graph_op`), which runs this very code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookkit.moments import triton_rows, units
from hookkit.moments.bins import LogBins, RangeBins, narrowed, sample_of
from hookkit.moments.device import arriving
from hookkit.moments.graph_op import enlist, new_token, show_traced
from hookkit.moments.history import WAIT, History, Tables
from hookkit.moments.rows import EMPTY, array_row, flat, merge, moments, plain, widened
from hookkit.moments.variation import Variation

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
        tops: (units,) the greatest value of each unit.
        full: how many values are at the flat ends of a bounded activation; None of any other.
    """

    row: Any
    counts: Any = None
    tops: Any = None
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
    return Entry(row, counts, units.greatest(a.tops, b.tops), full)


Entries = dict[int, Entry]


class _State(NamedTuple):
    """What changes together.

    Args:
        n: how many records were made.
        history: the records.
        window: tops of units, of what was read.
        step: what was kept for the step under way.
        batch: what was seen since.
    """

    n: int
    history: History
    window: units.Units
    step: Entries
    batch: Entries


class Tally:
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
        variation: how much of what layers give differs between samples; None if not looked at.
        looks: whether it is looked at in this batch.

    >>> stats = Tally("activation")
    >>> row = stats.row("fc", "Linear")
    >>> for step in range(3):
    ...     stats.see(row, 0, "", torch.full((4, 2), float(step)))
    ...     stats.commit(step, epoch=0, iteration=step)
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
        self.variation: Variation | None = None
        self.unscale: Tensor | None = None
        self.unscaled = self.looks = False
        self.thread: int | None = None
        self._rows: dict[str, int] = {}
        self._dims: dict[tuple[int, int], int] = {}  # of units, by row and number of dimensions
        self._lock = Lock()
        self._state = _State(0, History(), units.Units(), {}, {})
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

    @property
    def n_records(self) -> int:
        """How many records were made."""
        return self._state.n

    # --- the current batch

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
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
        if self.looks and self.variation is not None and not leaf:
            self.variation.see(row, t)
        if leaf:
            row = self.row(self.names[row] + path, self.types[row])
        self.dtypes[row] = x.dtype
        if self.unscale is not None:
            self.unscaled, x = True, widened(x) * self.unscale
        dim = self._dim(row, t) if self.options.units and x.numel() and x.ndim else None
        batch = self._state.batch
        if not x.is_cpu:
            entry = self._entry_on_device(x, row, dim)
        elif x.dtype is torch.float32 and x.is_contiguous():
            entry = self._entry(x.numpy(), row, dim)
        else:
            entry = self._entry(widened(x).numpy(), row, dim)
        with self._lock:  # DataParallel's replicas run in threads
            batch[row] = merged(batch[row], entry) if row in batch else entry

    def _entry(self, x: Any, row: int, dim: int | None) -> Entry:
        eps, bins = self.options.eps, self.options.bins
        values = x.reshape(-1) if x.flags.c_contiguous else _dense(x)
        counts, tops, full = None, None, None
        if bins is not None:
            part = values[sample_of(len(values), self._state.n)]
            counts = bins.count(part if part.dtype == np.float32 else narrowed(part))
        if dim is not None:
            tops = units.array_tops(x, dim)
            if (middle := units.middle(self.types[row])) is not None:
                full = float(np.count_nonzero(np.abs(x - middle) > 0.97 * (1 - middle)))
        return Entry(array_row(values, eps), counts, tops, full)

    def _entry_on_device(self, x: Tensor, row: int, dim: int | None) -> Entry:
        eps, values = self.options.eps, flat(x)
        fused = triton_rows.serves(x.device)
        with torch.inference_mode(False), torch.no_grad():
            moment = triton_rows.sums_of(values, eps) if fused else moments(widened(values), eps)
            samples: list[Tensor] | None = None
            tops: Any = None
            full: Any = None
            if self.options.bins is not None:
                part = values[sample_of(len(values), self._state.n)]
                samples = [part.to(torch.float32, copy=True)]
            if dim is not None:
                tops = x.amax([d for d in range(x.ndim) if d != dim]) if x.ndim > 1 else x.clone()
                if (middle := units.middle(self.types[row])) is not None:
                    full = ((x - middle).abs() > 0.97 * (1 - middle)).sum().to(torch.float32)
        return Entry(moment, samples, tops, full)

    def _dim(self, row: int, t: Tensor) -> int:
        key = row, t.ndim
        if key not in self._dims:
            self._dims[key] = units.channel_dim(self.types[row], t)
        return self._dims[key]

    # --- steps

    def drop(self) -> None:
        """Forgets the batch."""
        self._state = self._state._replace(batch={})

    def fold(self, *, finite_only: bool = False) -> None:
        """Keeps the batch for its step; with `finite_only` only if all of its values are finite."""
        n, history, window, step, batch = self._state
        if finite_only and any(_bad(entry) for entry in batch.values()):
            batch = {}
        self._state = _State(n, history, window, _together(step, batch), {})

    def forget(self) -> None:
        """Forgets everything since the last `commit`."""
        self._state = self._state._replace(step={}, batch={})

    def commit(self, step: int, epoch: int, iteration: int) -> None:
        """Ends the step: all that was seen since the last commit is its record."""
        n, history, window, kept, batch = self._state
        entries = _together(kept, batch)
        if Tensor in {type(entry.row) for entry in entries.values()}:
            read = partial(self._tables, arriving(entries, self.options.bins))
        else:
            read = partial(self._tables, lambda: entries)
        history = history.later((step, epoch, iteration), read)
        state = _State(n + 1, history, window, {}, {})
        self._state = self._settled(state) if len(history.waiting) >= WAIT else state

    def _tables(self, read: Any) -> Tables:
        """The tables of a step; `units` still as the tops of its units."""
        entries: Entries = read()
        n, rows = len(self.names), list(entries)
        table = np.tile(np.array(EMPTY), (n, 1))
        tables: Tables = {"moments": table}
        if rows:
            table[rows] = [entry.row for entry in entries.values()]
        if (bins := self.options.bins) is not None:
            counts = np.zeros((n, bins.width), np.int64)
            for row, entry in entries.items():
                counts[row] = entry.counts
            tables["hist"] = bins.in_bins(counts).astype(np.int32)
        if self.options.units:
            tables["units"] = entries
        return tables

    def _settled(self, state: _State) -> _State:
        n, history, window = state.n, state.history, state.window
        first = n - len(history.waiting)

        def finish(tables: Tables) -> Tables:
            """Puts the shares of dead units and saturated values in the place of their tops."""
            nonlocal window, first
            if "units" in tables:
                entries: Entries = tables["units"]
                tops = {row: e.tops for row, e in entries.items() if e.tops is not None}
                shares, window = window.after(tops, first)
                table = np.zeros((len(tables["moments"]), 4))
                for row, share in shares.items():
                    full = entries[row].full
                    size = 0.0 if full is None else entries[row].row[1]
                    table[row] = share, 1.0, full or 0.0, size
                tables["units"] = table
            first += 1
            return tables

        history = history.settled(finish)
        return state._replace(history=history, window=window)

    # --- reading

    @property
    def history(self) -> History:
        """All records, read: here the host waits for the device."""
        self._state = self._settled(self._state)
        return self._state.history

    def tables(self) -> Tables:
        """By name (columns, rows, …) arrays of all records."""
        history, rows = self.history, len(self.names)
        bins = self.options.bins
        shapes = {"moments": (9,)} | ({"hist": (len(bins.edges) - 1,)} if bins else {})
        shapes |= {"units": (4,)} if self.options.units else {}
        if not history.columns:
            return {name: np.zeros((0, rows, *shape)) for name, shape in shapes.items()}
        return {name: history.table(name, rows) for name in shapes}

    def dead(self, name: str) -> Any:
        """(units,) bool of a layer's units over the window; None if it did not run."""
        self._state = self._settled(self._state)
        return self._state.window.dead(self._rows.get(name, -1))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the step under way, which is on its device."""
        state = self._settled(self._state)._replace(step={}, batch={})
        gone = dict.fromkeys(("token", "unscale", "thread", "_lock"))
        return {**self.__dict__, **gone, "_state": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, self.id, self.token = Lock(), enlist(self), new_token()


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
