"""What all ranks recorded as one: `merged`, in three reductions however many ranks there are.

1. MAX of −min and max, and of how many units each layer has;
2. SUM of counts and sums: of values, of those near zero, of bins, of units;
3. SUM of squared deviations from the mean of all ranks, which the second one has given.

Before these they compare layouts and names, 16 bytes each; names are sent only where they differ.

Each rank receives as much as it sends, whatever their number, and nothing crosses the network
before this. It builds on `ranks` and `units`. The alternative, every rank's tables on each of them,
needs one exchange, but memory and time that grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hookkit import ranks
from hookkit.moments.moments import N_FIELDS, empty_rows
from hookkit.moments.units import UnitTables, judged

if TYPE_CHECKING:
    from hookkit.moments.accumulator import StatsAccumulator

Tables = dict[str, Tensor]
"""(columns, rows, fields) on the CPU: "moments", and "counts" and "units" where they are kept."""


class RankUnits(NamedTuple):
    """The units of all ranks together, and the names of their rows."""

    units: UnitTables
    names: list[str]


def merged(
    stats: StatsAccumulator, tables: Tables
) -> tuple[list[str], list[str], Tables, RankUnits | None]:
    """Names, types and tables of all ranks together, in one order on each: all of them call.

    Raises a HookError on every rank if they recorded different steps, or with other options.
    """
    o, history = stats.options, stats.history
    edges = None if o.bins is None else o.bins.edges.tolist()
    history.check_ranks(stats.kind, (o.eps, edges, o.exact_hist, o.window), str(o))
    types = ranks.union(dict(zip(stats.names, stats.types, strict=True)))
    names, kinds = list(types), list(types.values())
    order = [names.index(name) for name in stats.names]
    units = {names.index(name): table for name, table in _own_counts(stats).items()}
    widths = [units[row].shape[1] if row in units else 0 for row in range(len(names))]
    rows = empty_rows(len(history) * len(names)).view(len(history), len(names), N_FIELDS)
    rows[:, order] = tables["moments"]
    low, high, most = _reduced(
        ranks.greatest, -rows[..., 4], rows[..., 5], torch.tensor(widths, device="cpu")
    )
    widths = most.int().tolist()

    own = {"moments": _sums(rows), "units": _side_by_side(units, widths, len(history))}
    own |= _aligned(tables, order, len(names))
    sums = dict(zip(own, _reduced(ranks.total, *own.values()), strict=True))
    found, of_ranks = {"moments": _rows_of(rows, -low, high, sums["moments"])}, None
    if "counts" in sums:
        found["counts"] = sums["counts"].long()
    if "variation" in sums:
        known, n = sums["variation"].chunk(2, dim=1)
        found["variation"] = known / n
    if o.window:
        layers = [(i, kinds[i], width) for i, width in enumerate(widths) if width]
        counts = sums["units"].float()
        found["units"], seen = judged(counts, layers, o.window, history.stride, len(names))
        found["past"], of_ranks = counts, RankUnits(seen, names)
    return names, kinds, found, of_ranks


def _reduced(reduce: Callable[[Tensor], Tensor], *tables: Tensor) -> list[Tensor]:
    """Each table reduced over the ranks, all of them in one exchange."""
    flat = reduce(torch.cat([t.double().flatten() for t in tables]))
    parts = torch.split(flat, [t.numel() for t in tables])
    return [part.view(t.shape) for part, t in zip(parts, tables, strict=True)]


def _sums(rows: Tensor) -> Tensor:
    """(n, rows, 6) of `FIELDS`: those that add up, with sums in place of means."""
    calls, n, mean, _, _, _, near, zero, bad = rows.unbind(-1)
    return torch.stack([calls, n, n * mean, near, zero, bad], -1)


def _rows_of(own: Tensor, low: Tensor, high: Tensor, sums: Tensor) -> Tensor:
    """(n, rows, 9) of all ranks: this rank's rows, and what the others have been reduced to."""
    calls, n, total, near, zero, bad = sums.unbind(-1)
    mean = total / n.clamp(min=1)
    m2 = ranks.total(own[..., 3] + own[..., 1] * (own[..., 2] - mean).square())
    return torch.stack([calls, n, mean, m2, low, high, near, zero, bad], -1)


def _aligned(tables: Tables, order: list[int], rows: int) -> Tables:
    """The counts of bins, and what was seen of variation, in the rows of all ranks."""
    found: Tables = {}
    if "counts" in tables:
        n, _, bins = tables["counts"].shape
        found["counts"] = torch.zeros(n, rows, bins, dtype=torch.float64, device="cpu")
        found["counts"][:, order] = tables["counts"].double()
    if "variation" in tables:
        shares = tables["variation"].double()
        width = 2 * shares.shape[1]
        found["variation"] = torch.zeros(rows, width, dtype=torch.float64, device="cpu")
        seen = ~shares.isnan()
        found["variation"][order] = torch.cat([shares.nan_to_num(0.0), seen.double()], 1)
    return found


def _side_by_side(units: dict[int, Tensor], widths: list[int], n: int) -> Tensor:
    """(n, units of all rows, 4): the counts of this rank where it has seen the layer."""
    blank = [torch.zeros(n, width, 4, device="cpu") for width in (0, *widths)]
    for row, table in units.items():
        blank[row + 1][:, : table.shape[1]] = table
    return torch.cat(blank, 1)


def _own_counts(stats: StatsAccumulator) -> Tables:
    """By layer the (columns, units, 4) counts of this rank."""
    found: Tables = {}
    for units in stats.units:
        key = "past", units.row_of.device
        if key in stats.history.tables:
            whole = stats.history.read(key)
            for row, (start, n) in units.places.items():
                found[stats.names[row]] = whole[:, start : start + n]
    return found
