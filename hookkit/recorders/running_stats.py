"""`RunningStats`: statistics of named tensors, from `update` in a hook to the `Record`.

    update          turns a tensor into an `Entry`, the numbers of a layer in this batch
    end_batch       merges the batch's entries into those of the step
    end_step        puts the step's entries into the `StepTable`, where they wait to be read
    record          returns all columns of the table as plain numbers, with names and facts

No hook waits for a device. When a step ends, its numbers are copied to the host asynchronously.
They are read 8 to 16 recorded steps later, or when the record is read. Small tensors on a CPU are
copied in the hook; their numbers are computed later, together. Ctrl-C can lose the step under way.

Inside `torch.compile` the hook's call becomes one opaque operation of the graph (`graph_op`), which
runs this very code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import add
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookkit._core.devices import to_host_async, to_widest_float
from hookkit._core.pytree import tree_leaves
from hookkit.hooks.values import is_transforming
from hookkit.recorders import step_recorder, triton_rows, unit_stats as units
from hookkit.recorders.bins import LogBins, RangeBins, count, narrowed, sample_of
from hookkit.recorders.graph_op import enlist, show_traced
from hookkit.recorders.moments import (
    SMALL,
    SmallArrays,
    array_row,
    flat,
    merge,
    moments,
    norm,
    plain,
    statistics,
)
from hookkit.recorders.step_table import MOMENTS, Field, Numbers, StepTable, sums
from hookkit.records import Record

_MOST_SAMPLES = 64  # for the histogram, on a device: of one layer in a step, one for each call


@dataclass(frozen=True)
class Options:
    """Choose what a `RunningStats` counts.

    Args:
        eps: a value is near zero if its absolute value is at most this.
        bins: the bins of the histogram; None counts no histogram.
        units: whether dead and saturated units are counted.
    """

    eps: float = 0.05
    bins: LogBins | RangeBins | None = None
    units: bool = False


class Entry(NamedTuple):
    """Hold the numbers of a layer in a batch or a step; those on a device stay there as tensors.

    Args:
        row: the nine numbers of `moments`, a tuple; a tensor on a device; `triton_rows` on CUDA.
        small: tensors whose nine numbers are not computed yet: a `SmallArrays` and an index in it.
        counts: (n_bins,) counts of the histogram; on a device a list of samples to be counted.
        alive: (n_units,) bool, whether a unit has a value above 0; None if units are not known.
        saturated: how many values are at the flat ends of a bounded activation; None for others.
        input_rms: the RMS of the layer's input in each call.
    """

    row: Any = None
    small: tuple[tuple[SmallArrays, int], ...] = ()
    counts: Any = None
    alive: Any = None
    saturated: Any = None
    input_rms: tuple[Any, ...] = ()


Entries = dict[int, Entry]


class RunningStats:
    """Computes statistics of named tensors over steps, in bounded memory.

    Args:
        kind: the kind of the `Record`, `"activation"` or `"gradient"`.
        options: what is counted.

    Attributes:
        names, types: the name of each row, and the class name of its module.
        thread: the thread whose compiled graphs are recorded; None records all threads.
        unscale: a 0-d tensor that multiplies all values, or None.
        skipped: name of a tensor whose values cannot be read → why.
        consumers: layer → class name of the activation that alone reads it; None if there is none.
        facts: further facts about the model, by their names in `Record.meta`.
        table: the records, whose fields are "moments", "hist" and "units".
        spent: seconds that `update` has taken since the caller set it to 0.

    >>> stats = RunningStats("activation")
    >>> row = stats.row("fc", "Linear")
    >>> for step in range(3):
    ...     stats.update(row, 0, "", torch.full((4, 2), float(step)))
    ...     stats.end_step(step, epoch=0, iteration=step)
    >>> stats.record().value("mean", "fc").tolist()
    [0.0, 1.0, 2.0]
    """

    def __init__(self, kind: str, options: Options | None = None) -> None:
        self.kind, self.options = kind, options or Options()
        self.names: list[str] = []
        self.types: list[str] = []
        self.skipped: dict[str, str] = {}
        self.consumers: dict[str, str | None] = {}
        self.facts: dict[str, Any] = {}
        self.unscale: Tensor | None = None
        self.thread: int | None = None
        self.spent = 0.0
        self._unscaled = False
        self._rows: dict[str, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._rms: dict[int, tuple[Any, ...]] = {}  # row → RMS of inputs in the first record
        self._lock = Lock()
        self._small = SmallArrays(self.options.eps, self.options.bins)
        self._batch: Entries = {}
        self._step: Entries = {}  # the step's earlier batches, merged
        self._units = units.Units()
        fields = {"moments": MOMENTS}
        if self.options.bins is not None:
            fields["hist"] = sums(self.options.bins.n, int)
        # share of dead units, records where it is known; number of saturated values, of all values
        if self.options.units:
            fields["units"] = sums(4)
        self.table = StepTable(**fields)
        self.id, self.token = enlist(self)

    def row(self, name: str, kind: str) -> int:
        """Return the row of `name`, made if it is new, and set its type to `kind`."""
        with self._lock:
            row = self._rows.setdefault(name, len(self.names))
            if row == len(self.names):
                self.names.append(name)
                self.types.append(kind)
            self.types[row] = kind
            return row

    # --- the batch

    def update(self, row: int, number: int, path: str, t: Tensor) -> None:
        """Record `t`, tensor number `number`, at `path`, in the output of the layer in `row`.

        The first tensor is recorded in `row`, and each other in a row of its own. Reads `t` once,
        and does not wait for a GPU. In a compiled graph it is one operation.
        """
        if torch.compiler.is_compiling():
            show_traced(self, row, number, path, t)
            return
        began, x = step_recorder.clock(), plain(t)
        if x is None:
            self.skipped[self.names[row] + path] = f"{type(t).__name__} without values to read"
            return
        if number:
            row = self.row(self.names[row] + path, self.types[row])
        self._dtypes[row] = x.dtype
        if self.unscale is not None:
            self._unscaled, x = True, to_widest_float(x) * self.unscale
        dim = None
        if self.options.units and x.numel():
            dim = self._units.dim(row, self.types[row], t)
        entry = self._on_host(x, row, dim) if x.is_cpu else self._on_device(x, row, dim)
        with self._lock:  # DataParallel's replicas run in threads
            batch = self._batch
            batch[row] = _merged(batch[row], entry) if row in batch else entry
        self.spent += step_recorder.clock() - began

    def _on_host(self, t: Tensor, row: int, dim: int | None) -> Entry:
        t = t if t.dtype is torch.float32 else to_widest_float(t)
        x, alive, saturated, bins = t.numpy(), None, None, self.options.bins
        if self.options.units:
            seen = units.look_at(t, self.types[row], dim)
            alive, saturated = (None if each is None else each.numpy() for each in seen)
        if 0 < x.size <= SMALL and x.dtype == np.float32:
            with self._lock:
                number = self._small.add(x)
                if number is None:  # it is full: begin another
                    self._small = SmallArrays(self.options.eps, bins)
                    number = self._small.add(x)
                    assert number is not None
                return Entry(None, ((self._small, number),), None, alive, saturated)
        values = flat(t).numpy()
        with np.errstate(all="ignore"):  # the user may have set numpy to raise
            counts = None
            if bins is not None:
                counts = count(values[sample_of(len(values), self.table.n_steps)], bins)
            return Entry(array_row(values, self.options.eps), (), counts, alive, saturated)

    def _on_device(self, x: Tensor, row: int, dim: int | None) -> Entry:
        values, eps = flat(x), self.options.eps
        samples, alive, saturated = None, None, None
        with torch.inference_mode(False), torch.no_grad():
            fused = triton_rows.serves(x.device)
            row_of = triton_rows.sums_of if fused else moments
            moment = row_of(values if fused else to_widest_float(values), eps)
            if self.options.bins is not None:
                samples = [narrowed(values[sample_of(len(values), self.table.n_steps)])]
            if self.options.units:
                alive, saturated = units.look_at(x, self.types[row], dim)
        return Entry(moment, (), samples, alive, saturated)

    def update_inputs(self, row: int, inputs: Any) -> None:
        """Keep the RMS of the first tensor in the inputs of a layer, if it has floats."""
        t = None if is_transforming() else next(iter(tree_leaves(inputs)), None)
        x = plain(t) if t is not None and t.is_floating_point() else None
        if x is not None and x.numel():
            with torch.inference_mode(False), torch.no_grad():
                rms = norm(x) / math.sqrt(x.numel())
            with self._lock:
                before = self._batch.get(row, Entry())
                self._batch[row] = _merged(before, Entry(input_rms=(rms,)))

    # --- steps

    def discard_batch(self) -> None:
        """Discard what was recorded since the last `end_batch` or `end_step`."""
        self._batch = {}

    def end_batch(self) -> None:
        """Merge the batch into its step."""
        step = self._step
        both = {row: _merged(step[row], e) if row in step else e for row, e in self._batch.items()}
        self._step, self._batch = {**step, **both}, {}

    def discard_step(self) -> None:
        """Discard what was recorded since the last `end_step`."""
        self._step, self._batch = {}, {}

    def end_step(self, step: int, epoch: int, iteration: int) -> None:
        """Make one record of everything since the last `end_step`."""
        self.end_batch()
        entries, self._step = self._step, {}
        if not self.table.n_steps:
            self._rms = {row: e.input_rms for row, e in entries.items() if e.input_rms}
        sent = {row: e for row, e in entries.items() if isinstance(e.row, Tensor)}
        wait = _send(sent, self.options.bins) if sent else None
        # not `self`: it holds the table, and the cycle would last until the garbage collector runs
        parts = self.table.n_steps, self.table.fields, self.names, self.options, self._units
        self.table.later((step, epoch, iteration), partial(_numbers, entries, wait, *parts))

    # --- reading

    def record(self, since: int = -1) -> Record:
        """Return what was recorded, as plain numbers. The host waits for the device here.

        With `since`, return the columns that begin after this step, or the last column if none do.
        """
        return self._record(self._parts(self.table.since(since)))

    def record_of_ranks(self) -> Record:
        """Return the record of all ranks together. Collective: every rank has to call.

        All ranks exchange their tables once, and merge them in the order of ranks. The share of
        dead units is the mean of the ranks' shares.

        Raises:
            HookError: on every rank, if they recorded different steps or with other options.
        """
        whole, *others = step_recorder.from_all_ranks(f"{self.kind}s", self._parts())
        for other in others:  # matched by name, because a layer may have run on some ranks only
            types = {**whole["types"], **other["types"]}
            names, tables = list(types), {}
            for name, field in self.table.fields.items():
                both = [field.blanks(len(whole["steps"]), len(names)) for _ in range(2)]
                for table, part in zip(both, (whole, other), strict=True):
                    table[:, [names.index(layer) for layer in part["types"]]] = part["tables"][name]
                tables[name] = field.merge(*both)
            known = {key: {**other[key], **whole[key]} for key in ("dtypes", "input_rms")}
            whole = {**whole, **known, "types": types, "tables": tables}
        return self._record(whole)

    def _parts(self, first: int = 0) -> dict[str, Any]:
        """Return the parts of a record, which ranks exchange: the columns from `first` on."""
        bins, names = self.options.bins, self.names
        edges = ["no bins"] if bins is None else bins.edges.tolist()
        table = self.table
        return {
            "types": dict(zip(names, self.types, strict=True)),
            "steps": [tuple(place) for place in table.places(first).tolist()],
            "options": [self.options.eps, "units" if self.options.units else "no units", *edges],
            "tables": {name: table.read(name, len(names), first) for name in table.fields},
            "input_rms": self._rms_by_name(),
            "dtypes": {names[row]: str(dtype) for row, dtype in self._dtypes.items()},
        }

    def _record(self, parts: dict[str, Any]) -> Record:
        tables, types, options = parts["tables"], parts["types"], self.options
        # a row such as lstm[1] was added after all first outputs: move it next to its module's row
        owners = [name.partition("[")[0] for name in types]
        first = {owner: row for row, owner in reversed([*enumerate(owners)])}
        order = sorted(range(len(owners)), key=lambda row: first[owners[row]])
        if order != sorted(order):
            types = {name: types[name] for name in np.array([*types])[order].tolist()}
            tables = {name: table[:, order] for name, table in tables.items()}
        values = statistics(np.moveaxis(tables["moments"], 1, 0))
        if options.units:
            dead, judged, saturated, n = np.moveaxis(np.moveaxis(tables["units"], 1, 0), -1, 0)
            clamped = [units.is_clamped(self.consumers, *layer) for layer in types.items()]
            judged = np.where((judged > 0) & np.array(clamped, bool)[:, None], judged, np.nan)
            values |= {"dead": dead / judged, "saturated": saturated / np.where(n > 0, n, np.nan)}
        hist = edges = None
        if options.bins is not None:
            edges = options.bins.edges
            hist = np.ascontiguousarray(np.transpose(tables["hist"], (1, 2, 0)))
        meta: dict[str, Any] = {"eps": options.eps, "skipped": dict(self.skipped)}
        meta["dtype"] = [parts["dtypes"].get(name, "") for name in types]
        meta["unscaled"] = self._unscaled
        if self.consumers:
            meta["read_by"] = [self.consumers.get(name) for name in types]
        meta |= {name: copy(fact) for name, fact in self.facts.items() if fact}
        if options.units:
            meta["window"] = units.WINDOW
        if parts["input_rms"]:
            meta["input_rms"] = [parts["input_rms"].get(name, math.nan) for name in types]
        axes = np.array(parts["steps"], np.int64).reshape(-1, 4).T
        fields: Any = {"values": values, "hist": hist, "edges": edges, "meta": meta}
        return Record(self.kind, tuple(types), tuple(types.values()), *axes, **fields)

    def _rms_by_name(self) -> dict[str, float]:
        """Return layer name → RMS of its inputs in the first record. Sync: once."""
        self._rms = {row: tuple(map(float, calls)) for row, calls in self._rms.items()}
        # over all calls of a layer, since the first one may get zeros
        return {self.names[i]: math.hypot(*x) / math.sqrt(len(x)) for i, x in self._rms.items()}

    def dead(self, name: str) -> Any:
        """Return (n_units,) bool: which units of a layer are dead; None if that is not known."""
        self.table.settle()
        return self._units.dead(self._rows.get(name, -1))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the step under way on its device."""
        self.table.settle()
        self._rms_by_name()
        gone = dict.fromkeys(("token", "unscale", "thread", "_lock", "_small"))
        return {**vars(self), **gone, "_step": {}, "_batch": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, (self.id, self.token) = Lock(), enlist(self)
        self._small = SmallArrays(self.options.eps, self.options.bins)


# --- entries


def _merged(a: Entry, b: Entry) -> Entry:
    """Return the merged numbers of two calls of a layer, or of two batches."""
    counts = _combined(a.counts, b.counts, add)
    counts = counts[:_MOST_SAMPLES] if isinstance(counts, list) else counts
    row, saturated = _combined(a.row, b.row, _merged_rows), _combined(a.saturated, b.saturated, add)
    alive = units.either(a.alive, b.alive)
    return Entry(row, a.small + b.small, counts, alive, saturated, a.input_rms + b.input_rms)


def _combined(a: Any, b: Any, join: Callable[[Any, Any], Any]) -> Any:
    return b if a is None else a if b is None else join(a, b)


def _merged_rows(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return merge(a, b)
    b = b.to(a.device)  # DataParallel's replicas are on several devices
    return (
        triton_rows.merge_sums(a, b) if a.ndim == 2 else torch.stack(merge(a.unbind(), b.unbind()))
    )


def _numbers(
    entries: Entries,
    wait: Callable[[], Entries] | None,
    n: int,
    fields: dict[str, Field],
    names: list[str],
    options: Options,
    window: units.Units,
) -> Numbers:
    """Return the numbers of record `n`, waiting for them. Called once for each, in order."""
    numbers = {name: field.blanks(len(names)) for name, field in fields.items()}
    entries = entries if wait is None else {**entries, **wait()}
    for row, entry in entries.items():
        values, counts = entry.row, entry.counts
        for arrays, number in entry.small:
            more, in_bins = arrays.read(number)
            values = more if values is None else merge(values, more)
            counts = in_bins if counts is None else counts + in_bins
        if values is None:  # the layer has an input, and no output that can be read
            continue
        numbers["moments"][row] = values
        if options.bins is not None:
            numbers["hist"][row] = counts
        if entry.saturated is not None:
            numbers["units"][row, 2:] = entry.saturated, values[1]
    if options.units:
        known = {row: e.alive for row, e in entries.items() if e.alive is not None}
        for row, share in window.after(known, n).items():
            numbers["units"][row, :2] = share, 1.0
    return numbers


# --- from a device


def _send(entries: Entries, bins: Any) -> Callable[[], Entries]:
    """Begin to copy entries to the host; return a function that waits for them and returns them."""
    by_device: dict[torch.device, Entries] = {}
    for row, entry in entries.items():
        by_device.setdefault(entry.row.device, {})[row] = entry
    on_way = [(each, _send_from(list(each.values()), bins)) for each in by_device.values()]

    def wait() -> Entries:
        found = {}
        for each, wait_for in on_way:
            numbers, n = wait_for().double().numpy(), len(each)
            sizes = [9 * n, 0 if bins is None else (bins.n + 1) * n]
            sizes += [0 if e.alive is None else len(e.alive) for e in each.values()]
            rows, counts, *alive, saturated = np.split(numbers, np.cumsum(sizes))
            rows, counts = rows.reshape(n, 9), counts.reshape(n, -1)
            n_saturated = iter(saturated.tolist())
            for i, (row, entry) in enumerate(each.items()):
                found[row] = Entry(
                    tuple(rows[i].tolist()),
                    entry.small,
                    None if bins is None else counts[i, :-1].astype(np.int64),
                    None if entry.alive is None else alive[i] > 0,
                    None if entry.saturated is None else next(n_saturated),
                )
        return found

    return wait


def _send_from(entries: list[Entry], bins: Any) -> Callable[[], Tensor]:
    """Begin to copy entries as one tensor (rows, counts, alive, saturated); return `wait`."""
    device = entries[0].row.device
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.stack([entry.row for entry in entries])
        parts = [triton_rows.collapse(rows) if rows.ndim == 3 else rows]
        if bins is not None:
            samples = [(i, x.to(device)) for i, entry in enumerate(entries) for x in entry.counts]
            places = bins.places_in_tensor(torch.cat([x for _, x in samples]))
            width = bins.n + 1  # the last place is for NaN and Inf
            layout = tuple((i * width, len(x)) for i, x in samples)
            table = torch.zeros(len(entries) * width, dtype=torch.int32, device=device)
            ones = torch.ones_like(places, dtype=torch.int32)
            parts.append(table.scatter_add_(0, places + _offsets(layout, device), ones))
        alive = [entry.alive.to(device) for entry in entries if entry.alive is not None]
        saturated = [entry.saturated.to(device) for entry in entries if entry.saturated is not None]
        parts += [torch.cat(alive)] if alive else []
        parts += [torch.stack(saturated)] if saturated else []
        return to_host_async(torch.cat([part.reshape(-1).to(parts[0].dtype) for part in parts]))


@lru_cache(16)
def _offsets(layout: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return, for each value of the samples, the index of the first bin of its row."""
    first, sizes = zip(*layout, strict=True)
    offsets = np.repeat(np.array(first, np.int64), sizes)
    return torch.from_numpy(offsets).to(device)  # sync: once for the layout of a step
