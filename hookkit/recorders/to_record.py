"""From a `RunningStats` to a `Record`: of this process, or of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from hookkit.recorders.moments import statistics
from hookkit.recorders.step_recorder import from_all_ranks
from hookkit.recorders.step_table import Numbers, StepTable
from hookkit.recorders.unit_stats import CLAMPING, WINDOW
from hookkit.records import Record

if TYPE_CHECKING:
    from hookkit.recorders.running_stats import RunningStats


def record_of(running: RunningStats, since: int = -1) -> Record:
    """Return what was recorded, as plain numbers; here the host waits for the device.

    With `since` only the columns that begin after this step, or the last one if there is none.
    """
    return _record(running, _own(running, running.table.since(since)))


def record_of_ranks(running: RunningStats) -> Record:
    """Return what all ranks recorded together: each of them has to call.

    One exchange of all tables, which are merged in the order of the ranks. The share of dead units
    is the mean of the ranks' shares.

    Raises:
        HookError: on every rank, if they recorded different steps or with other options.
    """
    first, *others = from_all_ranks(f"{running.kind}s", _own(running))
    for other in others:
        first = _together(running.table, first, other)
    return _record(running, first)


def _own(running: RunningStats, first: int = 0) -> dict[str, Any]:
    """What a rank sends, or reads: from column `first` on."""
    options, places = running.options, running.table.places(first)
    edges = None if options.bins is None else options.bins.edges.tolist()
    return {
        "types": dict(zip(running.names, running.types, strict=True)),
        "steps": [tuple(place) for place in places.tolist()],
        "options": [options.eps, "units" if options.units else "no units", *(edges or ["no bins"])],
        "tables": running.tables(first),
        "given": running.given_rms(),
        "dtypes": {running.names[row]: str(dtype) for row, dtype in running.dtypes.items()},
    }


def _together(table: StepTable, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    types = {**a["types"], **b["types"]}
    names = list(types)
    places = [[names.index(name) for name in each["types"]] for each in (a, b)]
    pairs = list(zip((a, b), places, strict=True))
    tables: Numbers = {}
    for name, field in table.fields.items():
        both = [field.blanks(len(each["steps"]), len(names)) for each in (a, b)]
        for whole, (each, at) in zip(both, pairs, strict=True):
            whole[:, at] = each["tables"][name]
        tables[name] = field.merge(*both)
    known = {what: {**b[what], **a[what]} for what in ("dtypes", "given")}
    return {**a, **known, "types": types, "tables": tables}


def _record(running: RunningStats, own: dict[str, Any]) -> Record:
    tables, names, types = own["tables"], tuple(own["types"]), tuple(own["types"].values())
    values = statistics(np.moveaxis(tables["moments"], 1, 0))
    if "units" in tables:
        values |= _of_units(tables["units"], own["types"], running.consumers)
    hist = edges = None
    if running.options.bins is not None:
        edges = running.options.bins.edges
        hist = np.ascontiguousarray(np.transpose(tables["hist"], (1, 2, 0)))
    steps, epochs, iters, spans = np.array(own["steps"], np.int64).reshape(-1, 4).T
    axes: Any = {"steps": steps, "epochs": epochs, "iters": iters, "spans": spans}
    fields: Any = {"values": values, "hist": hist, "edges": edges, "meta": _meta(running, own)}
    return Record(running.kind, names, types, **axes, **fields)


def _of_units(table: Any, types: Mapping[str, str], consumers: Mapping[str, Any]) -> dict[str, Any]:
    """(rows, n) by statistic, from (n, rows, 4); NaN where nothing was judged."""
    dead, judged, full, n = np.moveaxis(np.moveaxis(table, 1, 0), -1, 0)
    clamped = [is_clamped(consumers, *layer) for layer in types.items()]
    judged = np.where((judged > 0) & np.array(clamped, bool)[:, None], judged, np.nan)
    return {"dead": dead / judged, "saturated": full / np.where(n > 0, n, np.nan)}


def is_clamped(consumers: Mapping[str, Any], name: str, kind: str) -> bool:
    """Whether 0 is all that comes of a value below 0 in this layer's output."""
    return kind in CLAMPING or consumers.get(name) in CLAMPING


def _meta(running: RunningStats, own: dict[str, Any]) -> dict[str, Any]:
    names = list(own["types"])
    meta: dict[str, Any] = {"eps": running.options.eps, "skipped": dict(running.skipped)}
    meta["dtype"] = [own["dtypes"].get(name, "") for name in names]
    meta["unscaled"] = running.unscaled
    if running.consumers:
        meta["read_by"] = [running.consumers.get(name) for name in names]
    meta |= {name: copy(fact) for name, fact in running.facts.items() if fact}
    if running.options.units:
        meta["window"] = WINDOW
    if own["given"]:
        meta["input_rms"] = [own["given"].get(name, math.nan) for name in names]
    return meta
