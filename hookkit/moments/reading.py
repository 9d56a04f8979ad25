"""From a `StatsAccumulator`'s tables to a `Record`: of this process, or of all ranks together.

It builds on `history`, `moments.merge`, and `merging` for the tables of several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments.buffers import Options
from hookkit.moments.histograms import sample_error
from hookkit.moments.history import StepHistory
from hookkit.moments.merging import RankUnits, Tables, merged
from hookkit.moments.moments import N_FIELDS, empty_rows, statistics
from hookkit.moments.units import CLAMPING, FIELDS
from hookkit.moments.variation import COLUMNS
from hookkit.records.record import AXES, Record

if TYPE_CHECKING:
    from hookkit.moments.accumulator import StatsAccumulator


def tables_of(history: StepHistory, rows: int, options: Options) -> Tables:
    """The tables of all devices as one."""
    n, bins = len(history), options.bins
    tables = {"moments": empty_rows(n * rows).view(n, rows, N_FIELDS)}
    if bins is not None:
        dtype = torch.int64 if options.exact_hist else torch.int32
        tables["counts"] = torch.zeros(n, rows, bins.width - 1, dtype=dtype, device="cpu")
    if options.window:
        tables["units"] = torch.zeros(n, rows, len(FIELDS), dtype=torch.float32, device="cpu")
    on_host = history.on_cpu()
    for key in on_host.tables:
        if key[0] in tables:
            part = on_host.whole(key)
            tables[key[0]][:, : part.shape[1]] = part
    return tables


def record_of(stats: StatsAccumulator, whole: bool) -> tuple[Record, RankUnits | None]:
    """Everything recorded, as plain numbers; `whole`: of all ranks, each of which has to call."""
    history, names, types, options = stats.history, stats.names, stats.types, stats.options
    tables, of_ranks = tables_of(history, len(names), options), None
    if stats.variation is not None:
        tables["variation"] = stats.variation.read(len(names))
    if whole:
        names, types, tables, of_ranks = merged(stats, tables)
    values = statistics(tables["moments"].transpose(0, 1).numpy())
    if options.window:
        units = tables["units"].double().transpose(0, 1).numpy()
        values |= _unit_shares(units, names, types, stats.consumers)
    hist = _hist(options, tables["counts"], values) if options.bins else None
    of_column = {n: np.array(history.column(i), np.int64) for i, n in enumerate(AXES)}
    edges = options.bins.edges if options.bins else None
    meta = _meta(stats, names)
    if not whole and ranks.is_distributed():
        meta["rank"] = ranks.this_rank()
    if (shares := tables.get("variation")) is not None:
        meta |= zip(COLUMNS, shares.T.tolist(), strict=True)
    fields: Any = {**of_column, "values": values, "hist": hist, "edges": edges, "meta": meta}
    return Record(stats.kind, tuple(names), tuple(types), **fields), of_ranks


def _unit_shares(
    table: Any, names: Sequence[str], types: Sequence[str], consumers: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Shares of units by statistic, from (rows, n, 6) `units.FIELDS`; NaN where not judged.

    `dead` is "never above 0" of a ReLU, and of a layer that a ReLU alone reads, which `consumers`
    says; None if that was not looked for. Others are dead where they give nothing but 0.
    """
    low, zero, dormant, full, n, n_saturable = np.moveaxis(table, -1, 0)
    n, n_saturable = (np.where(k == 0, np.nan, k) for k in (n, n_saturable))
    dead = low
    if consumers is not None:
        clamped = [is_clamped(consumers, *layer) for layer in zip(names, types, strict=True)]
        dead = np.where(np.array(clamped, bool)[:, None], low, zero)
    return {
        "dead": dead / n,
        "dormant": dormant / n,
        "saturated": full / n_saturable,
        "never_positive": low / n,
    }


def is_clamped(consumers: Mapping[str, Any], name: str, kind: str) -> bool:
    """Whether 0 is all that comes of a value below 0 in this layer's output."""
    return kind in CLAMPING or consumers.get(name) in CLAMPING


def units_now(
    stats: StatsAccumulator, of_ranks: RankUnits | None, name: str, which: str
) -> Tensor | None:
    """See `StatsAccumulator.units_now`."""
    found = [] if of_ranks is None else [of_ranks]
    found += [RankUnits(units, stats.names) for units in stats.units]
    for units, names in found:
        seen = units.now(names.index(name)) if name in names else None
        if seen is not None:
            low, zero, dormant, _ = seen
            kind = stats.types[stats.names.index(name)] if name in stats.names else ""
            clamped = stats.consumers is None or is_clamped(stats.consumers, name, kind)
            return dormant if which == "dormant" else low if clamped else zero
    return None


def _hist(options: Options, counts: Tensor, values: dict[str, Any]) -> Any:
    """(rows, bins, n) counts; how many zeros, NaN and Inf there were goes into `values`."""
    assert options.bins is not None
    n, table = options.bins.n, counts.long().permute(1, 2, 0).numpy()
    ran = ~np.isnan(values["count"])
    for i, name in enumerate(("hist_zero", "hist_nan", "hist_inf")):
        values[name] = np.where(ran, table[:, n + i], np.nan)
    return table[:, :n].copy()


def _meta(stats: StatsAccumulator, names: Sequence[str]) -> dict[str, Any]:
    o, consumers = stats.options, stats.consumers or {}
    dtypes = {stats.names[row]: str(dtype) for row, dtype in stats.dtypes.items()}
    meta: dict[str, Any] = {"eps": o.eps, "skipped": dict(stats.skipped)}
    meta["dtype"] = [dtypes.get(name, "") for name in names]
    meta["unscaled"] = stats.unscaled
    if consumers:
        meta["feeds"] = [consumers.get(name) for name in names]
    meta |= {name: copy(fact) for name, fact in stats.facts.items() if fact}
    if o.window:
        meta["window"] = o.window
    if o.bins is not None:
        meta["exact_hist"] = o.exact_hist
        meta["sample"] = None if o.exact_hist else o.sample
        meta["sample_error"] = 0.0 if o.exact_hist else sample_error(o.sample)
    return meta
