"""`RunningStats`: statistics of named tensors, from `update` in a hook to the `Record`.

    update          a tensor → an `Entry`, the numbers of a layer in this batch
    end_batch       the batch's entries are merged into those of the step
    end_step        the step's entries go to the `StepTable`, where they wait to be read
    record          all columns of the table as plain numbers, with names and facts

No hook waits for a device. The numbers on a device are copied to the host asynchronously when their
step ends, and read 8 to 16 recorded steps later, or when somebody reads the record. Small tensors
on a CPU are copied, and their numbers computed together then. Ctrl-C can leave a record without the
step under way.

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

_MOST_SAMPLES = 64  # of a layer in a batch on a device: of more calls no sample is taken


@dataclass(frozen=True)
class Options:
    """Say what is counted.

    Args:
        eps: a value of at most this size is near zero.
        bins: of the histogram; None for none.
        units: whether dead and saturated units are counted.
    """

    eps: float = 0.05
    bins: LogBins | RangeBins | None = None
    units: bool = False


class Entry(NamedTuple):
    """Hold the numbers of a layer in a batch or a step; those on a device stay there as tensors.

    Args:
        row: its nine numbers; a tensor on a device, on CUDA the sums of `triton_rows`.
        small: pairs of a `SmallArrays` and a number in it, whose rows are not yet computed.
        counts: of the histogram; on a device the samples, a list.
        alive: (units,) bool, whether a value of the unit is above 0; None if units are not known.
        full: how many values are at the flat ends of a bounded activation; None of any other.
        given: the RMS of what the layer was given, of each call.
    """

    row: Any = None
    small: tuple[tuple[SmallArrays, int], ...] = ()
    counts: Any = None
    alive: Any = None
    full: Any = None
    given: tuple[Any, ...] = ()


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
        table: the records, whose fields are "moments", "hist" and "units".
        spent: seconds that `update` has taken since this was set to 0.

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
        self._given: dict[int, tuple[Any, ...]] = {}  # by row the `given` of the first record
        self._lock = Lock()
        self._small = SmallArrays(self.options.eps, self.options.bins)
        self._batch: Entries = {}
        self._step: Entries = {}  # of the batches before this one
        self._units = units.Units()
        fields = {"moments": MOMENTS}
        if self.options.bins is not None:
            fields["hist"] = sums(self.options.bins.n, int)
        if self.options.units:  # dead units, judged records; full values, of how many
            fields["units"] = sums(4)
        self.table = StepTable(**fields)
        self.id, self.token = enlist(self)

    def row(self, name: str, kind: str) -> int:
        """Return the row of a name, a new one if it has none; `kind` is its type from now on."""
        with self._lock:
            row = self._rows.setdefault(name, len(self.names))
            if row == len(self.names):
                self.names.append(name)
                self.types.append(kind)
            self.types[row] = kind
            return row

    # --- the batch

    def update(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Record `t`, leaf number `leaf` (called `path`) of what the layer in `row` gave.

        Costs one read of `t`; returns at once on a GPU. In `torch.compile` one operation.
        """
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
            return
        began, x = step_recorder.clock(), plain(t)
        if x is None:
            self.skipped[self.names[row] + path] = f"{type(t).__name__} without values to read"
            return
        if leaf:
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
        x, alive, full, bins = t.numpy(), None, None, self.options.bins
        if self.options.units:
            seen = units.look_at(t, self.types[row], dim)
            alive, full = (None if each is None else each.numpy() for each in seen)
        if 0 < x.size <= SMALL and x.dtype == np.float32:
            with self._lock:
                number = self._small.add(x)
                if number is None:
                    self._small = SmallArrays(self.options.eps, bins)
                    number = self._small.add(x)
                    assert number is not None
                return Entry(None, ((self._small, number),), None, alive, full)
        values = flat(t).numpy()
        with np.errstate(all="ignore"):  # the user's own setting may raise
            counts = None
            if bins is not None:
                counts = count(values[sample_of(len(values), self.table.n_steps)], bins)
            return Entry(array_row(values, self.options.eps), (), counts, alive, full)

    def _on_device(self, x: Tensor, row: int, dim: int | None) -> Entry:
        values, eps = flat(x), self.options.eps
        samples, alive, full = None, None, None
        with torch.inference_mode(False), torch.no_grad():
            fused = triton_rows.serves(x.device)
            row_of = triton_rows.sums_of if fused else moments
            moment = row_of(values if fused else to_widest_float(values), eps)
            if self.options.bins is not None:
                samples = [narrowed(values[sample_of(len(values), self.table.n_steps)])]
            if self.options.units:
                alive, full = units.look_at(x, self.types[row], dim)
        return Entry(moment, (), samples, alive, full)

    def update_inputs(self, row: int, inputs: Any) -> None:
        """Keep the RMS of the first tensor that a layer is given, if it has floats."""
        t = None if is_transforming() else next(iter(tree_leaves(inputs)), None)
        x = plain(t) if t is not None and t.is_floating_point() else None
        if x is not None and x.numel():
            with torch.inference_mode(False), torch.no_grad():
                rms = norm(x) / math.sqrt(x.numel())
            with self._lock:
                before = self._batch.get(row, Entry())
                self._batch[row] = _merged(before, Entry(given=(rms,)))

    # --- steps

    def discard_batch(self) -> None:
        """Forget the batch."""
        self._batch = {}

    def end_batch(self) -> None:
        """Keep the batch for its step."""
        step = self._step
        both = {row: _merged(step[row], e) if row in step else e for row, e in self._batch.items()}
        self._step, self._batch = {**step, **both}, {}

    def discard_step(self) -> None:
        """Forget everything since the last `end_step`."""
        self._step, self._batch = {}, {}

    def end_step(self, step: int, epoch: int, iteration: int) -> None:
        """End the step: all that was seen since the last `end_step` is its record."""
        self.end_batch()
        entries, self._step = self._step, {}
        if not self.table.n_steps:
            self._given = {row: entry.given for row, entry in entries.items() if entry.given}
        sent = {row: e for row, e in entries.items() if isinstance(e.row, Tensor)}
        wait = _send(sent, self.options.bins) if sent else None
        # without `self`, which holds the table: the two would wait for the garbage collector
        parts = self.table.n_steps, self.table.fields, self.names, self.options, self._units
        self.table.later((step, epoch, iteration), partial(_numbers, entries, wait, *parts))

    # --- reading

    def record(self, since: int = -1) -> Record:
        """Return what was recorded, as plain numbers; here the host waits for the device.

        With `since` only the columns that begin after this step, or the last one if there is none.
        """
        return self._record(self._parts(self.table.since(since)))

    def record_of_ranks(self) -> Record:
        """Return what all ranks recorded together: each of them has to call.

        One exchange of all tables, which are merged in the order of the ranks. The share of dead
        units is the mean of the ranks' shares.

        Raises:
            HookError: on every rank, if they recorded different steps or with other options.
        """
        whole, *others = step_recorder.from_all_ranks(f"{self.kind}s", self._parts())
        for other in others:  # by name: a layer may have run on some ranks alone
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
        """Return what a record is made of, and a rank sends: the columns from `first` on."""
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
        # further outputs of a module, lstm[1], came last as it ran: put them next to its first
        owners = [name.partition("[")[0] for name in types]
        first = {owner: row for row, owner in reversed([*enumerate(owners)])}
        order = sorted(range(len(owners)), key=lambda row: first[owners[row]])
        if order != sorted(order):
            types = {name: types[name] for name in np.array([*types])[order].tolist()}
            tables = {name: table[:, order] for name, table in tables.items()}
        values = statistics(np.moveaxis(tables["moments"], 1, 0))
        if options.units:
            dead, judged, full, n = np.moveaxis(np.moveaxis(tables["units"], 1, 0), -1, 0)
            clamped = [units.is_clamped(self.consumers, *layer) for layer in types.items()]
            judged = np.where((judged > 0) & np.array(clamped, bool)[:, None], judged, np.nan)
            values |= {"dead": dead / judged, "saturated": full / np.where(n > 0, n, np.nan)}
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
        """Return by name the RMS of each layer's inputs in the first record. Sync: once."""
        self._given = {row: tuple(map(float, given)) for row, given in self._given.items()}
        # all calls count: the first may be fed zeros
        return {self.names[i]: math.hypot(*x) / math.sqrt(len(x)) for i, x in self._given.items()}

    def dead(self, name: str) -> Any:
        """Return (units,) bool of a layer's units over the window; None if they are not known."""
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
    """Return two calls of a layer, or two batches, as one."""
    counts = _combined(a.counts, b.counts, add)
    counts = counts[:_MOST_SAMPLES] if isinstance(counts, list) else counts
    row, full = _combined(a.row, b.row, _merged_rows), _combined(a.full, b.full, add)
    alive = units.either(a.alive, b.alive)
    return Entry(row, a.small + b.small, counts, alive, full, a.given + b.given)


def _combined(a: Any, b: Any, join: Callable[[Any, Any], Any]) -> Any:
    return b if a is None else a if b is None else join(a, b)


def _merged_rows(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return merge(a, b)
    b = b.to(a.device)  # DataParallel's replicas are on several
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
    """Return the numbers of record `n`; called once, in the order of records."""
    numbers = {name: field.blanks(len(names)) for name, field in fields.items()}
    entries = entries if wait is None else {**entries, **wait()}
    for row, entry in entries.items():
        values, counts = entry.row, entry.counts
        for arrays, number in entry.small:
            more, in_bins = arrays.read(number)
            values = more if values is None else merge(values, more)
            counts = in_bins if counts is None else counts + in_bins
        if values is None:  # it was given something, and gave nothing that can be read
            continue
        numbers["moments"][row] = values
        if options.bins is not None:
            numbers["hist"][row] = counts
        if entry.full is not None:
            numbers["units"][row, 2:] = entry.full, values[1]
    if options.units:
        known = {row: e.alive for row, e in entries.items() if e.alive is not None}
        for row, share in window.after(known, n).items():
            numbers["units"][row, :2] = share, 1.0
    return numbers


# --- from a device


def _send(entries: Entries, bins: Any) -> Callable[[], Entries]:
    """Send entries to the host; return a function that waits for them and returns them there."""
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
            rows, counts, *alive, full = np.split(numbers, np.cumsum(sizes))
            rows, counts, full = rows.reshape(n, 9), counts.reshape(n, -1), iter(full.tolist())
            for i, (row, entry) in enumerate(each.items()):
                found[row] = Entry(
                    tuple(rows[i].tolist()),
                    entry.small,
                    None if bins is None else counts[i, :-1].astype(np.int64),
                    None if entry.alive is None else alive[i] > 0,
                    None if entry.full is None else next(full),
                )
        return found

    return wait


def _send_from(entries: list[Entry], bins: Any) -> Callable[[], Tensor]:
    """Send the entries on one device as one tensor: rows, counts, living units, full values."""
    device = entries[0].row.device
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.stack([entry.row for entry in entries])
        parts = [triton_rows.collapse(rows) if rows.ndim == 3 else rows]
        if bins is not None:
            samples = [(i, x.to(device)) for i, entry in enumerate(entries) for x in entry.counts]
            places = bins.places_in_tensor(torch.cat([x for _, x in samples]))
            width = bins.n + 1  # one more for NaN and Inf
            layout = tuple((i * width, len(x)) for i, x in samples)
            table = torch.zeros(len(entries) * width, dtype=torch.int32, device=device)
            ones = torch.ones_like(places, dtype=torch.int32)
            parts.append(table.scatter_add_(0, places + _offsets(layout, device), ones))
        alive = [entry.alive.to(device) for entry in entries if entry.alive is not None]
        full = [entry.full.to(device) for entry in entries if entry.full is not None]
        parts += [torch.cat(alive)] if alive else []
        parts += [torch.stack(full)] if full else []
        return to_host_async(torch.cat([part.reshape(-1).to(parts[0].dtype) for part in parts]))


@lru_cache(16)
def _offsets(layout: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return for each value of the samples the first of its row's counts."""
    first, sizes = zip(*layout, strict=True)
    offsets = np.repeat(np.array(first, np.int64), sizes)
    return torch.from_numpy(offsets).to(device)  # sync: once for the layout of a step
