"""Records to a TensorBoard writer: a few scalars per layer, histograms in their recorded bins.

Builds on `values`. TensorBoard is optional: the writer is any object with `add_scalar` and, for
histograms, `add_histogram_raw`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from hookkit.errors import ArgumentError, OptionError, nearest
from hookkit.records.values import records_of, sources_of

if TYPE_CHECKING:
    from hookkit.records.record import Record

_SCALARS = ("mean", "std", "rms", "near_zero", "nonfinite", "dead")
_PARAM_SCALARS = ("weight_norm", "grad_norm", "update_ratio")


def log_to(writer: Any, source: Any, *, statistics: Iterable[str] | None = None) -> None:
    """Sends records to a TensorBoard `SummaryWriter`: a few scalars per layer, and the histograms.

    A recorder, Watcher or Learner sends what is new since it was last sent to this writer, so that
    `w.log_to(writer)` can be called after each epoch; a Record or a Run is sent whole.

    Histograms go with the bins they were recorded in (`add_histogram_raw`), not from the values:
    a kilobyte each, where `add_histogram` of a layer's output costs a pass over all of it.

    Args:
        writer: torch's or tensorboardX's SummaryWriter; it is neither flushed nor closed.
        source: a Record, a Run, a recording callback, a Learner, a Watcher, or a list of these.
        statistics: which scalars, a list of names (or one name); None takes about five per kind,
            [] none.

    Raises:
        ArgumentError: `writer` cannot take scalars, or not the histograms that are there.
        OptionError: one of `statistics` was recorded nowhere.
    """
    parts = [(each, records_of(each)) for each in sources_of(source)]
    records = [record for _, found in parts for record in found]
    needed = ["add_scalar", *["add_histogram_raw"] * any(r.hist is not None for r in records)]
    if missing := [name for name in needed if not callable(getattr(writer, name, None))]:
        raise ArgumentError(
            f"log_to(writer): {type(writer).__name__} was given, which has no {missing[0]}. "
            f"Give a SummaryWriter: torch.utils.tensorboard.SummaryWriter(log_dir); it needs "
            f'tensorboard: pip install "hookkit[tensorboard]".'
        )
    wanted = None if statistics is None else _checked(statistics, records)
    for each, found in parts:
        sent = _sent(each, writer)
        for record in found:
            _log(writer, record, wanted, sent)


Sent = dict[tuple[str, str], int]  # (kind, statistic) → the last step that was sent
_SENT: WeakKeyDictionary[Any, list[tuple[Callable[[], Any], Sent]]] = WeakKeyDictionary()
"""By source, for each writer the last steps that it was sent: neither is kept alive by this."""


def _sent(source: Any, writer: Any) -> Sent:
    """What `source` has sent to `writer`, to be updated; nothing yet for a Record or a Run."""
    try:
        writers = _SENT.setdefault(source, [])
    except TypeError:  # a Record or a Run: a value has no hash, and is sent whole each time
        return {}
    writers[:] = [(held, sent) for held, sent in writers if held() is not None]
    for held, sent in writers:
        if held() is writer:
            return sent
    new: Sent = {}
    try:
        writers.append((ref(writer), new))
    except TypeError:  # it cannot be held weakly: it lives as long as the source
        writers.append((lambda: writer, new))
    return new


def _log(writer: Any, record: Record, wanted: list[str] | None, sent: Sent) -> None:
    """Sends the columns of `record` after those in `sent`."""
    if not len(record):
        return
    usual = _PARAM_SCALARS if record.kind == "param" else _SCALARS
    last = int(record.steps[-1])
    for statistic in usual if wanted is None else wanted:
        _log_scalars(writer, record, statistic, sent.get((record.kind, statistic), -1))
        sent[record.kind, statistic] = last
    if record.hist is not None:
        for row in range(len(record.names)):
            _log_hist(writer, record, row, sent.get((record.kind, "hist"), -1))
        sent[record.kind, "hist"] = last


def _checked(statistics: Any, records: list[Record]) -> list[str]:
    """The names in `statistics`, each recorded somewhere in `records`."""
    one = isinstance(statistics, str) or not isinstance(statistics, Iterable)
    wanted = [statistics] if one else list(statistics)
    known = list(dict.fromkeys(name for record in records for name in record.values))
    for name in wanted:
        if records and name not in known:
            near = nearest(str(name), known) or known
            raise OptionError(
                f"log_to(statistics=…) names {name!r}, which was not recorded. "
                f"Use some of: {', '.join(near)}."
            )
    return wanted


def _tag(record: Record, row: int) -> str:
    return record.names[row].replace(".", "/") or "model"


def _log_scalars(writer: Any, record: Record, statistic: str, after: int) -> None:
    for row, values in enumerate(record.values.get(statistic, ())):
        for step, value in zip(record.steps, values, strict=True):
            if step > after and np.isfinite(value):
                tag = f"{record.kind}/{statistic}/{_tag(record, row)}"
                writer.add_scalar(tag, float(value), int(step))


def _log_hist(writer: Any, record: Record, row: int, after: int) -> None:
    assert record.hist is not None
    assert record.edges is not None
    for i, step in enumerate(record.steps):
        counts = record.hist[row, :, i]
        total = int(counts.sum())
        if not total or step <= after:
            continue
        stats = {name: float(record.values[name][row, i]) for name in ("min", "max", "mean", "rms")}
        used = np.flatnonzero(counts)
        first, last = int(used[0]), int(used[-1]) + 1
        limits = record.edges[first + 1 : last + 1].copy()
        if np.isinf(limits[-1]):  # an open bin ends at the greatest value
            limits[-1] = max(stats["max"], np.nextafter(record.edges[last - 1], np.inf))
        writer.add_histogram_raw(
            f"{record.kind}/{_tag(record, row)}",
            min=stats["min"],
            max=stats["max"],
            num=total,
            sum=stats["mean"] * total,
            sum_squares=min(stats["rms"], 1e150) ** 2 * total,  # or Python's ** raises
            bucket_limits=limits.tolist(),
            bucket_counts=counts[first:last].tolist(),
            global_step=int(step),
        )
