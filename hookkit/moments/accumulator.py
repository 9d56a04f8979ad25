"""The tally: what hooks hand in, kept on the data's device until somebody reads.

A hook calls `see` for each tensor: its exact moments go into one row of a preallocated table,
and a bounded sample of it into one row of another (`moments.py`, `histograms.py`). At the step
`commit` does the rest for all rows at once, and puts the result into a ring (`banks.py`,
`rings.py`). No value is read by the host before `record()`.

Inside `torch.compile` the hook's call becomes one opaque operation of the graph, `observe`, which
runs this very code: no graph break, no second implementation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookkit import ranks
from hookkit.hooks.entries import in_thread, is_exporting
from hookkit.hooks.snapshot import is_transforming, outside, unwrapped
from hookkit.moments import triton_kernels
from hookkit.moments.banks import Bank, Options
from hookkit.moments.histograms import sample_error
from hookkit.moments.history import Axis, Ring
from hookkit.moments.moments import (
    N_FIELDS,
    empty_rows,
    floats_of,
    merge,
    plain,
    statistics,
    working_dtype,
)
from hookkit.moments.unitarrays import UnitsByArrays
from hookkit.moments.units import CLAMPING, Units, judged, shares
from hookkit.moments.waiting import WaitingBank
from hookkit.records import Record


class Tally:
    """Moments and histograms of named tensors over steps, in bounded memory.

    Args:
        kind: of the `Record` it gives, `"activation"` or `"gradient"`.
        options: what is counted.

    Attributes:
        thread: whose calls of compiled graphs are recorded; None records every thread's.

    >>> t = Tally("activation")
    >>> (row,) = t.rows(["fc"], ["Linear"])
    >>> for step in range(3):
    ...     t.see(row, 0, "", torch.full((4, 2), float(step)))
    ...     t.commit(step, epoch=0, iteration=step)
    >>> t.record().value("mean", "fc")
    array([0., 1., 2.])
    """

    def __init__(self, kind: str, options: Options | None = None) -> None:
        self.kind, self.options = kind, options or Options()
        self.axis = Axis()
        # names, types, and the row of each name: one tuple, so that they never differ in length
        self._layers: tuple[list[str], list[str], dict[str, int]] = [], [], {}
        # what is being done to all banks; done again after an interrupt
        self._pending: Callable[[Bank], None] | None = None
        self._place: tuple[int, int, int, int] | None = None
        self.banks: dict[torch.device, Bank] = {}
        self.unscale: Tensor | None = None
        self.skipped: dict[str, str] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.unscaled = False
        self.feeds: dict[str, str | None] | None = None
        self.unregistered: list[str] = []
        self._n_folds = 0
        self._leaves: dict[tuple[int, str], int] = {}
        self._cache: tuple[int, bool, Record] | None = None
        self._merged: Units | None = None  # of all ranks, at the last `record()`
        self._merged_names: list[str] = []
        self.thread: int | None = None
        self._enlist()

    def _enlist(self) -> None:
        self.id, self.token = enlist(self), new_token()

    def rows(self, names: Sequence[str], types: Sequence[str]) -> list[int]:
        """The row of each name; known ones are continued, others added."""
        known, kinds, row_of = self._layers
        pairs = list(zip(names, types, strict=True))
        if any(name not in row_of or kinds[row_of[name]] != kind for name, kind in pairs):
            known, kinds, row_of = [*known], [*kinds], {**row_of}
            for name, kind in pairs:
                if name not in row_of:
                    row_of[name] = len(known)
                    known.append(name)
                    kinds.append(kind)
                kinds[row_of[name]] = kind
            self._layers = known, kinds, row_of
        return [row_of[name] for name in names]

    @property
    def names(self) -> list[str]:
        """Of the rows."""
        return self._layers[0]

    @property
    def types(self) -> list[str]:
        """Class names of the rows' modules."""
        return self._layers[1]

    @property
    def n_commits(self) -> int:
        """How many records were closed."""
        return self.axis.n

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Record `t`, leaf number `leaf` (called `path`) of what module `row` gave.

        Costs one read of `t` and a copy of its sample; returns at once on a GPU. Inside
        `torch.compile` it is one operation of the graph.
        """
        if torch.compiler.is_compiling():
            if not is_exporting():
                torch.ops.hookkit.observe(t.detach(), self.token, self.id, row, leaf, path)
            return
        if self._pending is not None:
            self._finish()
        if self.unscale is None and not leaf and (array := floats_of(t)) is not None:
            self.dtypes[row] = t.dtype
            self._bank(_CPU).take_array(row, array, t, self.types[row])
        elif is_transforming():  # the values behind torch.func's wrappers, outside of them
            inner = unwrapped(t)
            with outside():
                self._see(row, leaf, path, inner)
        else:
            self._see(row, leaf, path, t)

    def _see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        values = plain(t)
        if values is None:
            self.skipped[self.names[row] + path] = f"{type(t).__name__} without values to read"
            return
        if leaf:
            row = self._leaf_row(row, path)
        self.dtypes[row] = values.dtype
        if self.unscale is not None:
            self.unscaled = True
            values = values.to(working_dtype(values)) * self.unscale
        self._bank(values.device).take(row, values, self.types[row])

    def _leaf_row(self, row: int, path: str) -> int:
        key = row, path
        if key not in self._leaves:
            (self._leaves[key],) = self.rows([self.names[row] + path], [self.types[row]])
        return self._leaves[key]

    def _bank(self, device: torch.device) -> Bank:
        bank = self.banks.get(device)
        if bank is None:
            bank = bank_of(self.options, device, len(self.names))
            bank.begin_at(self.axis.n)
            self.banks[device] = bank
        return bank

    # An interrupt may come between any two lines. What is done to all banks is therefore kept in
    # `_pending` until all of it is done; each bank passes over what it did before; and whatever is
    # called next, finishes it first. The place in time comes last: no record shows before it is
    # whole.

    def _do(self, what: Callable[[Bank], None], place: Any = None) -> None:
        self._finish()
        self._place = place
        self._pending = what
        self._finish()

    def _finish(self) -> None:
        if self._pending is None:
            return
        place = self._place
        adds = place is not None and place[0] == self.axis.n
        if adds:
            self.axis.make_room()
        for bank in self.banks.values():
            self._pending(bank)
        if adds and place is not None:
            self.axis.add(*place[1:])
        self._pending = None

    def drop(self) -> None:
        """Forget what was seen since the last `fold` or `commit` (a cancelled batch)."""
        self._do(lambda bank: bank.drop())

    def fold(self, *, finite_only: bool = False) -> None:
        """Count what was seen towards the record of a step that is still to come.

        With `finite_only` nothing is kept if any of it was not finite.
        """
        self._finish()
        self._n_folds += 1
        batch = self._n_folds
        self._do(lambda bank: bank.fold(batch, finite_only))

    def forget(self) -> None:
        """Forget everything since the last `commit`."""
        self._do(lambda bank: bank.forget())

    def commit(self, step: int, epoch: int, iteration: int) -> None:
        """Close the record of one step: everything seen since the last commit."""
        self._finish()
        axis, record = self.axis, self.axis.n
        if not record:
            self._fit_axis()
        self._do(lambda bank: bank.commit(record, axis), (record, step, epoch, iteration))

    def _fit_axis(self) -> None:
        bins = self.options.bins
        hist = (8 if self.options.exact_hist else 4) * (bins.width - 1) if bins else 0
        units = 4 * len(Units.FIELDS) if self.options.window else 0
        of_units = sum(bank.units.n_bytes for bank in self.banks.values() if bank.units is not None)
        self.axis.fit(len(self.names) * (8 * N_FIELDS + hist + units) + of_units)

    @property
    def n_bytes(self) -> int:
        """Memory it holds now, on all devices."""
        return sum(bank.n_bytes for bank in self.banks.values())

    def record(self, *, local: bool = False) -> Record:
        """Everything recorded, as plain numbers; the one place where the host reads the device.

        Ranks of a process group are merged exactly, unless `local`: then every rank has to call
        it. Read again without a new record in between, it costs nothing.

        Raises:
            HookError: on every rank, if they recorded different steps, or with other options.
        """
        self._finish()
        if self._cache is None or self._cache[:2] != (self.n_commits, local):
            self._cache = self.n_commits, local, self._read(local)
        return self._cache[2]

    def _read(self, local: bool) -> Record:
        names, types = self.names, self.types
        table, counts, units = self._tables(len(self.axis), len(names))
        self._merged = None
        if not local and ranks.is_distributed():
            names, types, table, counts, units = self._over_ranks(table, counts, units)
        values = statistics(table.transpose(0, 1).numpy())
        if self.options.window:
            values |= self._shares(units.transpose(0, 1).numpy(), names, types)
        hist = self._hist(counts, values) if self.options.bins else None
        axis = (self.axis.steps, self.axis.epochs, self.axis.iters, self.axis.spans)
        steps, epochs, iters, spans = (np.array(column, dtype=np.int64) for column in axis)
        return Record(
            self.kind,
            tuple(names),
            tuple(types),
            steps,
            epochs,
            iters,
            spans,
            values,
            hist,
            self.options.bins.edges if self.options.bins else None,
            self._meta(names),
        )

    def _shares(self, units: Any, names: Sequence[str], types: Sequence[str]) -> dict[str, Any]:
        """Shares of units by statistic.

        `dead` is "never above 0" of a ReLU, and of a layer that a ReLU alone reads. Of others that
        says nothing: they are dead where they give nothing but 0. Who reads a layer is in `feeds`;
        None if nobody asked, as in a tally of one's own.
        """
        values = shares(units)
        zero = values.pop("only_zero")
        if self.feeds is not None:
            clamped = [self.is_clamped(*layer) for layer in zip(names, types, strict=True)]
            low = values["never_positive"]
            values["dead"] = np.where(np.array(clamped, bool)[:, None], low, zero)
        return values

    def is_clamped(self, name: str, kind: str) -> bool:
        """Whether 0 is all that comes of a value below 0 in this layer's output."""
        return kind in CLAMPING or (self.feeds or {}).get(name) in CLAMPING

    def units_now(self, name: str, which: str) -> Tensor | None:
        """Which units of a layer are `"dead"` or `"dormant"` at the last record; None if unseen.

        (units,) bool, of what `record()` has read last: of all ranks or of this one.
        """
        self._finish()
        found = [(self._merged, self._merged_names)] if self._merged is not None else []
        found += [(b.units, self.names) for b in self.banks.values() if b.units is not None]
        for units, names in found:
            row = names.index(name) if name in names else -1
            seen = units.now(row)
            if seen is not None and which == "dormant":
                return seen[1]
            if seen is not None:
                clamped = self.feeds is None or self.is_clamped(name, self._type_of(name))
                return seen[0] if clamped else units.zero(row)
        return None

    def _type_of(self, name: str) -> str:
        return self.types[self.names.index(name)] if name in self.names else ""

    def _hist(self, counts: Tensor, values: dict[str, Any]) -> Any:
        """(rows, bins, n) counts; how many zeros, NaN and Inf there were goes into `values`."""
        assert self.options.bins is not None
        n, table = self.options.bins.n, counts.permute(1, 2, 0).numpy()
        ran = ~np.isnan(values["count"])
        for i, name in enumerate(("hist_zero", "hist_nan", "hist_inf")):
            values[name] = np.where(ran, table[:, n + i], np.nan)
        return table[:, :n].copy()

    def _tables(self, n: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """(n, rows, …) moments, counts and units of all devices, on the CPU."""
        width = self.options.bins.width - 1 if self.options.bins else 0
        table = empty_rows(n * rows).view(n, rows, N_FIELDS)
        counts = torch.zeros(n, rows, width, dtype=torch.int64, device=_CPU)
        units = torch.zeros(n, rows, len(Units.FIELDS), dtype=torch.float64, device=_CPU)
        for bank in self.banks.values():
            bank.flush()
            bank.catch_up(self.axis.stride)
            mine = bank.ring.read(n).double()[:, :rows]
            here = slice(mine.shape[1])
            table[:, here] = merge(table[:, here], mine)
            if bank.hist is not None:
                counts[:, here] += bank.hist.read(n)[:, :rows]
            if bank.units is not None:
                units += bank.units.read(n, rows)
        return table, counts, units

    def _over_ranks(self, table: Tensor, counts: Tensor, units: Tensor) -> Any:
        """Names, types and tables of all ranks together, in one fixed order on each of them."""
        o, bins = self.options, self.options.bins
        edges = None if bins is None else bins.edges.tolist()
        self.axis.check_ranks(self.kind, (o.eps, edges, o.exact_hist, o.window), str(o))
        types: dict[str, str] = {}
        for names, kinds in ranks.gather_object((self.names, self.types)):
            types.update((n, t) for n, t in zip(names, kinds, strict=True) if n not in types)
        order = [list(types).index(name) for name in self.names]
        n = len(table)
        whole = empty_rows(n * len(types)).view(n, len(types), N_FIELDS)
        sums = counts.new_zeros(n, len(types), counts.shape[2])
        whole[:, order], sums[:, order] = table, counts
        merged, *rest = ranks.stacked(whole)
        for part in rest:
            merged = merge(merged, part)
        if self.options.window:
            units = self._units_over_ranks(types)
        return list(types), list(types.values()), merged, ranks.all_reduce(sums), units

    def _units_over_ranks(self, types: dict[str, str]) -> Tensor:
        """(n, rows, 6) shares of units: what all ranks counted is added up, and then judged."""
        mine: dict[str, Tensor] = {}
        for bank in self.banks.values():
            if bank.units is not None:
                found = bank.units.counts(len(self.axis))
                mine |= {self.names[row]: table for row, table in found.items()}
        widths = {name: table.shape[1] for name, table in mine.items()}
        most: dict[str, int] = {}
        for theirs in ranks.gather_object(widths):
            most |= {name: max(n, most.get(name, 0)) for name, n in theirs.items()}
        n, names = len(self.axis), [name for name in types if name in most]
        tables = [torch.zeros(n, most[name], 4, device=_CPU) for name in names]
        for name, table in zip(names, tables, strict=True):
            if name in mine:
                table[:, : widths[name]] = mine[name]
        blank = torch.zeros(n, 0, 4, device=_CPU)
        whole = ranks.all_reduce(torch.cat([blank, *tables], 1))
        layers = [(list(types).index(name), types[name], most[name]) for name in names]
        self._merged = judged(whole, layers, self.options.window, self.axis)
        self._merged_names = list(types)
        return self._merged.read(n, len(types))

    def _meta(self, names: Sequence[str]) -> dict[str, Any]:
        o = self.options
        dtypes = {self.names[row]: str(dtype) for row, dtype in self.dtypes.items()}
        meta: dict[str, Any] = {"eps": o.eps, "skipped": dict(self.skipped)}
        meta["dtype"] = [dtypes.get(name, "") for name in names]
        meta["unscaled"] = self.unscaled
        feeds = self.feeds or {}
        if feeds:
            meta["feeds"] = [feeds.get(name) for name in names]
        if self.unregistered:
            meta["unregistered"] = list(self.unregistered)
        if o.window:
            meta["window"] = o.window
        if o.bins is not None:
            meta["exact_hist"] = o.exact_hist
            meta["sample"] = None if o.exact_hist else o.sample
            meta["sample_error"] = 0.0 if o.exact_hist else sample_error(o.sample)
        return meta

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the past of all devices as one, on the CPU, so that it loads anywhere."""
        self._finish()
        one = WaitingBank(self.options, len(self.names))
        table, counts, units = self._tables(len(self.axis), len(self.names))
        one.ring = Ring.of(table, self.axis, counts=False)
        if one.hist is not None:
            counts = counts.to(one.hist.data.dtype)
            one.hist = Ring.of(counts, self.axis, counts=True)
        if one.units is not None:
            seen = [bank.units for bank in self.banks.values() if bank.units is not None]
            one.units = UnitsByArrays.of(seen[0]) if seen else one.units
            one.units.ring = Ring.of(units.float(), self.axis, counts=True)
        one.begin_at(self.axis.n)
        gone = dict.fromkeys(("token", "unscale", "thread"))
        return {**self.__dict__, **gone, "banks": {one.device: one}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enlist()


def bank_of(options: Options, device: torch.device, rows: int) -> Bank:
    """New tables for what is on `device`."""
    if device.type == "cpu" and not triton_kernels.serves(device):
        return WaitingBank(options, rows)
    return Bank(options, device, rows)


_CPU = torch.device("cpu")
_ids = itertools.count()
_seers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enlist(seer: Any) -> int:
    """A number under which compiled graphs find `seer`, whose `see` they call; held weakly."""
    number = next(_ids)
    _seers[number] = seer
    return number


def new_token() -> Tensor:
    """What a compiled graph writes where it shows a tensor to a seer."""
    return torch.zeros(1, dtype=torch.float32, device=_CPU)


# `token` is written, so no compiler pass drops the call or moves it past another one.
_library: Any = torch.library.Library("hookkit", "DEF")  # type: ignore[no-untyped-call]
_library.define("observe(Tensor t, Tensor(a!) token, int seer, int row, int leaf, str path) -> ()")


def _observe(t: Tensor, token: Tensor, seer: int, row: int, leaf: int, path: str) -> None:
    known = _seers.get(seer)
    if known is not None and in_thread(known.thread):
        known.see(row, leaf, path, t)


_library.impl("observe", _observe, "CompositeExplicitAutograd")
torch.library.register_fake("hookkit::observe", lambda *args: None, lib=_library)
