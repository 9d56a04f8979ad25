"""`StatsAccumulator`: statistics of named tensors over steps, kept on the data's device until read.

A hook calls `see` for each tensor: its exact moments go into one row of a preallocated table, and a
bounded sample of it into one row of another (`buffers`). At the step `commit` does the rest for all
rows at once, and puts the result into a history (`history`). No value is read by the host before
`record()` (`reading`).

What has to change together is one tuple, `_State`: `commit`, `fold` and `drop` build the next state
beside the old one, put it in place by one assignment, and then empty the current batch, which is
repeated before anything else if an interrupt or an error comes in between. So no record is ever
half written or counted twice, at whatever line an exception is raised.

Inside `torch.compile` the hook's call becomes one opaque operation of the graph (`graph_op`), which
runs this very code: no graph break, no second implementation. The file is longer than 300 lines: it
is one class, and almost every method reads or replaces its one `_State`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.hooks.snapshot import is_transforming, outside, unwrapped
from hookkit.moments import reading
from hookkit.moments.buffers import Buffers, Options
from hookkit.moments.graph_op import enlist, new_token, show_traced
from hookkit.moments.histograms import Bins
from hookkit.moments.history import Place, StepHistory, Table
from hookkit.moments.merging import RankUnits, merged
from hookkit.moments.moments import floats_of, plain, working_dtype
from hookkit.moments.unit_layouts import UnitLayout, layout_of
from hookkit.moments.units import UnitTables
from hookkit.moments.variation import Variation
from hookkit.records import Record

_CPU = torch.device("cpu")


class _State(NamedTuple):
    """What changes together.

    Args:
        n: how many records were made.
        history: the records, but for those that wait.
        waiting: places of the records that wait in the buffers' slots.
        buffers: by device.
    """

    n: int
    history: StepHistory
    waiting: tuple[Place, ...]
    buffers: dict[torch.device, Buffers]


class _Layers:
    """Which row each layer has, and each of several tensors that it gives."""

    def __init__(self) -> None:
        # names, types, and the row of each name: one tuple, so that they never differ in length
        self.state: tuple[list[str], list[str], dict[str, int]] = [], [], {}
        self.leaves: dict[tuple[int, str], int] = {}

    def rows(self, names: Sequence[str], types: Sequence[str]) -> list[int]:
        """The row of each name; known ones are continued, others added."""
        known, kinds, row_of = self.state
        pairs = list(zip(names, types, strict=True))
        if any(name not in row_of or kinds[row_of[name]] != kind for name, kind in pairs):
            known, kinds, row_of = [*known], [*kinds], {**row_of}
            for name, kind in pairs:
                if name not in row_of:
                    row_of[name] = len(known)
                    known.append(name)
                    kinds.append(kind)
                kinds[row_of[name]] = kind
            self.state = known, kinds, row_of
        return [row_of[name] for name in names]

    def leaf(self, row: int, path: str) -> int:
        """The row of the tensor at `path` of what the layer in `row` gives."""
        if (row, path) not in self.leaves:
            names, types, _ = self.state
            (self.leaves[row, path],) = self.rows([names[row] + path], [types[row]])
        return self.leaves[row, path]


class StatsAccumulator:
    """Moments and histograms of named tensors over steps, in bounded memory.

    Args:
        kind: of the `Record` it gives, `"activation"` or `"gradient"`.
        options: what is counted.
        like: another one, whose rows this one shares, now and later.

    Attributes:
        thread: whose calls of compiled graphs are recorded; None records every thread's.
        unscale: a 0-d tensor that values are multiplied by, or None.
        consumers: by layer, the class of the one activation that reads it; None if not looked for.
        facts: what else is known of the model, by its name in `Record.meta`.
        variation: how much of what layers give differs between samples; None if not looked at.
        looks: whether it is looked at in this batch.

    >>> stats = StatsAccumulator("activation")
    >>> (row,) = stats.rows(["fc"], ["Linear"])
    >>> for step in range(3):
    ...     stats.see(row, 0, "", torch.full((4, 2), float(step)))
    ...     stats.commit(step, epoch=0, iteration=step)
    >>> stats.record().value("mean", "fc")
    array([0., 1., 2.])
    """

    def __init__(
        self, kind: str, options: Options | None = None, like: StatsAccumulator | None = None
    ) -> None:
        self.kind, self.options = kind, options or Options()
        self._layers: _Layers = _Layers() if like is None else like._layers
        self._state = _State(0, StepHistory(), (), {})
        self._must_clear = False
        self.unscale: Tensor | None = None
        self.unscaled = False
        self.skipped: dict[str, str] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        self.consumers: dict[str, str | None] | None = None
        self.facts: dict[str, Any] = {}
        self.variation: Variation | None = None
        self.looks = False
        self.thread: int | None = None
        # with the number of records that they are of
        self._own: tuple[int, Record] | None = None
        self._whole: tuple[int, Record, RankUnits | None] | None = None
        self.id, self.token = enlist(self), new_token()

    def rows(self, names: Sequence[str], types: Sequence[str]) -> list[int]:
        """The row of each name; known ones are continued, others added."""
        return self._layers.rows(names, types)

    @property
    def names(self) -> list[str]:
        """Of the rows."""
        return self._layers.state[0]

    @property
    def types(self) -> list[str]:
        """Class names of the rows' modules."""
        return self._layers.state[1]

    @property
    def n_records(self) -> int:
        """How many records were made."""
        return self._state.n

    # --- the current batch

    def see(self, row: int, leaf: int, path: str, t: Tensor) -> None:
        """Record `t`, leaf number `leaf` (called `path`) of what module `row` gave.

        Costs one read of `t` and a copy of its sample; returns at once on a GPU. Inside
        `torch.compile` it is one operation of the graph.
        """
        if torch.compiler.is_compiling():
            show_traced(self, row, leaf, path, t)
            return
        if self._must_clear:
            self._clear()
        if self.looks and self.variation is not None and not (leaf or is_transforming()):
            self.variation.see(row, t)
        if self.unscale is None and not leaf and (array := floats_of(t)) is not None:
            self.dtypes[row] = t.dtype
            self._add(row, t, array)
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
            row = self._layers.leaf(row, path)
        self.dtypes[row] = values.dtype
        if self.unscale is not None:
            self.unscaled = True
            values = values.to(working_dtype(values)) * self.unscale
        self._add(row, values)

    def _add(self, row: int, t: Tensor, array: Any = None) -> None:
        device = _CPU if array is not None else t.device
        buffers = self._state.buffers.get(device)
        if buffers is None or row >= buffers.rows:
            buffers = self._make_room(device, row)
        layout = None
        if buffers.units is not None:
            layout = layout_of(t.shape, self.types[row])
            if layout.n and buffers.units.places.get(row, (0, 0))[1] != layout.n:
                buffers = self._new_units(device, row, layout)
        state = self._state
        buffers.add(len(state.waiting), row, t, state.n, array, layout)

    def _make_room(self, device: torch.device, row: int) -> Buffers:
        """Room for `row` on `device`: the tables double."""
        self._flush()
        buffers = self._state.buffers.get(device)
        if buffers is None:
            new = Buffers(self.options, device, max(len(self.names), row + 1))
        else:
            new = buffers.resized(0, max(2 * buffers.rows, row + 1))
        self._replace({device: new})
        return new

    def _new_units(self, device: torch.device, row: int, layout: UnitLayout) -> Buffers:
        """Has `row` give another number of units. Those of before are judged first."""
        self._flush()
        history, old, past = self._state.history, self._state.buffers[device], ("past", device)
        assert old.units is not None
        new = old.with_units_of(row, layout.n, layout.saturates)
        if past in history.tables:
            whole = history.whole(past).transpose(1, 2)
            moved = old.units.moved(row, whole, whole[..., :0])
            history = history.with_table(past, moved.transpose(1, 2))
        self._state = self._state._replace(
            history=history, buffers={**self._state.buffers, device: new}
        )
        return new

    def _replace(self, new: dict[torch.device, Buffers]) -> None:
        self._state = self._state._replace(buffers={**self._state.buffers, **new})

    def _clear(self) -> None:
        """Empties the current batch; done again if it was interrupted."""
        slot = len(self._state.waiting)
        for buffers in self._state.buffers.values():
            buffers.clear(slot)
        self._must_clear = False

    def _move_to(self, state: _State) -> None:
        """Puts the next state in place, in which the current batch is empty."""
        self._must_clear, self._state = True, state
        self._clear()

    # --- steps

    def drop(self) -> None:
        """Forget what was seen since the last `fold` or `commit` (a cancelled batch)."""
        self._must_clear = True
        self._clear()

    def fold(self, *, finite_only: bool = False) -> None:
        """Counts what was seen towards a later step; with `finite_only` only if it is finite."""
        if self._must_clear:
            self._clear()
        slot, state = len(self._state.waiting), self._state
        kept = {device: b.folded(slot, finite_only) for device, b in state.buffers.items()}
        self._move_to(state._replace(buffers=kept))

    def forget(self) -> None:
        """Forget everything since the last `commit`."""
        buffers = {device: b.with_kept(None) for device, b in self._state.buffers.items()}
        self._move_to(self._state._replace(buffers=buffers))

    def commit(self, step: int, epoch: int, iteration: int) -> None:
        """Close the record of one step: everything seen since the last commit."""
        if self._must_clear:
            self._clear()
        n, history, waiting, buffers = self._state
        waiting = (*waiting, (step, epoch, iteration))
        if any([b.kept for b in buffers.values()]):  # noqa: C419
            buffers = {device: b.with_kept(None) for device, b in buffers.items()}
        state = _State(n + 1, history, waiting, buffers)
        slots = min((b.slots for b in buffers.values()), default=1)
        window = self.options.window  # what waits may not go beyond half of it
        if len(waiting) >= slots or (window and (n + 1) % max(window // 2, 1) == 0):
            self._move_to(self._flushed(state))
        else:
            self._state = state

    def _flushed(self, state: _State) -> _State:
        """The state with the records that wait in the history; the current batch is in slot 0.

        Tables of a single slot stay where they are: a CUDA graph writes to fixed addresses.
        """
        n, history, waiting, buffers = state
        if not waiting:
            return state
        many, rows, with_ranks = len(waiting), len(self.names), ranks.is_distributed()
        slots = min((b.best_slots for b in buffers.values()), default=1)
        after, tables = {}, {}
        for device, b in buffers.items():
            found, new = b.records(many, n, rows)
            after[device] = new if b.slots == slots == 1 else new.resized(many, b.rows, slots)
            for name, table in found.items():
                if name != "past" or with_ranks:
                    tables[name, device] = table
        return _State(n, history.with_records(waiting, tables), (), after)

    def _flush(self) -> None:
        self._state = self._flushed(self._state)

    # --- reading

    @property
    def history(self) -> StepHistory:
        """All records."""
        self._flush()
        return self._state.history

    @property
    def units(self) -> list[UnitTables]:
        """Of each device, if units are counted; up to the last record."""
        self._flush()
        found = [b.units for b in self._state.buffers.values()]
        return [units for units in found if units is not None]

    @property
    def n_bytes(self) -> int:
        """Memory it holds now, on all devices."""
        state = self._state
        return state.history.n_bytes + sum(b.n_bytes for b in state.buffers.values())

    def record(self, *, local: bool = False) -> Record:
        """Everything recorded, as plain numbers; the one place where the host reads the device.

        Of all ranks, if they were gathered since the last record and `local` is not set; else of
        this one, named in `meta["rank"]`; it waits for no other. Without a new record it is free.
        """
        if not local and self._is_whole():
            assert self._whole is not None
            return self._whole[1]
        if self._own is None or self._own[0] != self.n_records:
            self._own = self.n_records, self._read(False)[0]
        return self._own[1]

    def gather(self) -> None:
        """Merges exactly what all ranks recorded, for `record()`: each of them has to call.

        Raises a HookError on every rank if they recorded different steps, or with other options.
        """
        if ranks.is_distributed():
            self._whole = self.n_records, *self._read(True)

    def _is_whole(self) -> bool:
        return self._whole is not None and self._whole[0] == self.n_records

    def _read(self, whole: bool) -> tuple[Record, RankUnits | None]:
        now = self._state
        found = reading.record_of(self, whole)
        # What waits is read as part of the history, and goes on waiting: the last digits of
        # units' sums depend on which records are judged together, and must not on who reads.
        self._state = now
        return found

    def units_now(self, name: str, which: str) -> Tensor | None:
        """(units,) bool: which of a layer are `"dead"` or `"dormant"` now; None if it is unseen."""
        of_ranks = self._whole[2] if self._whole is not None and self._is_whole() else None
        return reading.units_now(self, of_ranks, name, which)

    def stored(self, like: StatsAccumulator | None = None, *, whole: bool) -> StatsAccumulator:
        """A copy on the CPU for a file, without what was read; with the rows of the copy `like`.

        `whole`: with what all ranks recorded; each of them has to call.
        """
        new = copy(self)
        new._own = new._whole = None
        if whole:
            new._take_all_ranks(self)
        if like is not None:
            new._layers = like._layers
        return new

    def _take_all_ranks(self, own: StatsAccumulator) -> None:
        history = own.history
        tables = reading.tables_of(history, len(own.names), own.options)
        if own.variation is not None:
            tables["variation"] = own.variation.read(len(own.names))
        names, types, found, units = merged(own, tables)
        self._layers = _Layers()
        self.rows(names, types)
        row_of = [names.index(name) for name in own.names]
        self.dtypes = {row_of[row]: dtype for row, dtype in own.dtypes.items()}
        if own.variation is not None:
            self.variation = Variation.of(found.pop("variation"))
        found = {k: t.to(tables[k].dtype) if k in tables else t for k, t in found.items()}
        history = history.of_cpu(found)
        buffers = Buffers(own.options, _CPU, len(names), units.units) if units else None
        self._state = _State(own.n_records, history, (), {_CPU: buffers} if buffers else {})

    def empty(self) -> None:
        """Keeps rows and steps and forgets all values, which another rank has."""
        units = [each.blanked() for each in self.units]
        buffers = {each.row_of.device: each for each in units}
        made = {d: Buffers(self.options, d, len(self.names), each) for d, each in buffers.items()}
        history = self.history.emptied()
        self._state = _State(self.n_records, history, (), made)

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the past of all devices as one, on the CPU, so that it loads anywhere."""
        now, units = self.history, self.units
        tables = reading.tables_of(now, len(self.names), self.options)
        if units and (past := ("past", units[0].row_of.device)) in now.tables:
            tables["past"] = now.read(past)
        state = _State(self.n_records, now.of_cpu(tables), (), {})
        gone = dict.fromkeys(("token", "unscale", "thread"))
        of_cpu = units[0].on_cpu() if units else None
        return {**self.__dict__, **gone, "_state": state, "units": of_cpu}

    def __setstate__(self, state: dict[str, Any]) -> None:
        units = state.pop("units")
        self.__dict__.update(state)
        if units is not None:
            self._replace({_CPU: Buffers(self.options, _CPU, len(self.names), units)})
        self.id, self.token = enlist(self), new_token()


RECORDED = [StatsAccumulator, _Layers, _State, Options, Bins, StepHistory, Table, UnitTables]
RECORDED += [Variation]
"""The classes that a stored accumulator is made of: what may be loaded from a checkpoint."""
