"""What is new in a run, sent to a target: losses, epochs, a few scalars per layer, histograms."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from hookkit.checks import is_number
from hookkit.errors import OptionError, nearest
from hookkit.records.targets import Target, as_target
from hookkit.records.values import read_source

if TYPE_CHECKING:
    from hookkit.records.record import Record

_SCALARS = ("mean", "std", "rms", "near_zero", "nonfinite", "dead")
_PARAM_SCALARS = ("weight_norm", "grad_norm", "update_ratio")

Sent = dict[str, int]  # name → the last step that was sent
_SENT: WeakKeyDictionary[Any, list[tuple[Callable[[], Any], Sent]]] = WeakKeyDictionary()
"""By source: writers, and the last steps that each was sent.

Neither is kept alive by this; but a writer that cannot be held weakly (a class with `__slots__`)
is held as long as its source, or another one at its address would be taken for it.
"""


def log_to(writer: Any, source: Any, statistics: Iterable[str] | None = None) -> None:
    """See `Tables.log_to`."""
    target, run = as_target("log_to", writer), read_source(source)
    chosen = None if statistics is None else _checked(statistics, run.records)
    send(target, run, sent_to(target.writer, source), chosen)


def sent_to(writer: Any, source: Any) -> Sent:
    """What `source` has sent to `writer`, to be updated; nothing yet for a Record or a Run."""
    source = vars(source).get("loop", source)  # a Watcher and its loop have the same run
    try:
        known = _SENT.setdefault(source, [])
    except TypeError:  # a Record or a Run: a value has no hash, and is sent whole each time
        return {}
    for held, sent in known:
        # a path is a string; writers are told apart by identity, whatever their `==` says
        if held() is writer or (isinstance(writer, str) and held() == writer):
            return sent
    try:
        hold: Callable[[], Any] = weakref.ref(writer)
    except TypeError:
        hold = lambda: writer  # noqa: E731
    known[:] = [pair for pair in known if pair[0]() is not None]
    known.append((hold, {}))
    return known[-1][1]


def send(target: Target, run: Any, sent: Sent, statistics: list[str] | None = None) -> None:
    """Sends the values of a Record or Run that are newer than those in `sent`, step by step."""
    rows: dict[int, dict[str, Any]] = defaultdict(dict)
    for tag, steps, values in _series(run, statistics):
        for i in np.flatnonzero(np.isfinite(values) & (steps > sent.get(tag, -1))):
            rows[int(steps[i])][tag] = float(values[i])
    least = max(sent.values(), default=0) if target.in_order else 0
    for step in sorted(rows):
        target.scalars(max(step, least), rows[step])
        sent.update(dict.fromkeys(rows[step], step))
    if target.histogram is not None:
        _send_histograms(target, run, sent)


def _series(run: Any, statistics: list[str] | None) -> Iterator[tuple[str, Any, Any]]:
    """Name, steps and values of every series of numbers in a Record or a Run."""
    for name, values in (("loss", "losses"), ("grad_norm", "grad_norms")):
        if (series := getattr(run, values, None)) is not None:
            yield name, np.arange(len(series)), series
    facts, epochs = getattr(run, "info", {}), getattr(run, "valid", ())
    yield from _rates(run, facts.get("lr", []))
    for row in epochs[:-1] if facts.get("within_epoch") else epochs:
        for name, value in row.items():
            if name not in ("epoch", "step") and "step" in row and is_number(value):
                yield f"epoch/{name}", np.array([row["step"]]), np.array([float(value)])
    for record in run.records:
        usual = _PARAM_SCALARS if record.kind == "param" else _SCALARS
        tags = _tags(record)
        for statistic in usual if statistics is None else statistics:
            for tag, values in zip(tags, record.values.get(statistic, ()), strict=False):
                yield f"{record.kind}/{statistic}/{tag}", record.steps, values


def _rates(run: Any, rates: Any) -> Iterator[tuple[str, Any, Any]]:
    """The learning rate of the first optimizer's last group: in the last step, and as recorded."""
    if np.size(rates) and run.n_steps:
        yield "lr", np.array([run.n_steps - 1]), np.atleast_1d(rates)[-1:]
    params, last = getattr(run, "params", None), np.size(rates) - 1
    if params is not None and last in (groups := list(params.meta.get("group", ()))):
        yield "lr", params.steps, params.values["lr"][groups.index(last)]


def _checked(statistics: Any, records: Iterable[Record]) -> list[str]:
    """The names in `statistics`, each recorded somewhere in `records`."""
    one = isinstance(statistics, str) or not isinstance(statistics, Iterable)
    names = [statistics] if one else list(statistics)
    known = list(dict.fromkeys(name for record in records for name in record.values))
    for name in names:
        if known and name not in known:
            raise OptionError(
                f"log_to(statistics=…) names {name!r}, which was not recorded. "
                f"Use some of: {', '.join(nearest(str(name), known) or known)}."
            )
    return names


_PLAIN = str.maketrans({"[": "-", "]": None, "'": None})


def _tags(record: Record) -> list[str]:
    """The names of the rows: `lstm-1` for `lstm[1]`, since mlflow refuses brackets.

    Where a layer is really called `lstm-1`, both keep their own names.
    """
    tags = [name.translate(_PLAIN) or "model" for name in record.names]
    times = Counter(tags)
    both = zip(tags, record.names, strict=True)
    return [tag if times[tag] == 1 else name or "(model)" for tag, name in both]


def _send_histograms(target: Target, run: Any, sent: Sent) -> None:
    """Sends TensorBoard those that are newer than those in `sent`."""
    for record in run.records:
        if record.hist is None:
            continue
        for row, name in enumerate(_tags(record)):
            tag = f"{record.kind}/{name}"
            last = sent.get(f"{tag} histogram", -1)
            for i in np.flatnonzero((record.steps > last) & record.hist[row].any(0)):
                step = int(record.steps[i])
                target.histogram(tag, **_raw(record, row, int(i)), global_step=step)
                sent[f"{tag} histogram"] = step


def _raw(record: Record, row: int, i: int) -> dict[str, Any]:
    """Arguments of `add_histogram_raw`, from the first bin that has values to the last."""
    assert record.hist is not None
    assert record.edges is not None
    counts = record.hist[row, :, i]
    used = np.flatnonzero(counts)
    limits = record.edges[used[0] + 1 : used[-1] + 2].copy()
    mean, rms, low, high = (float(record.values[s][row, i]) for s in ("mean", "rms", "min", "max"))
    if np.isinf(limits[-1]):  # an open bin ends at the greatest value
        limits[-1] = max(high, np.nextafter(record.edges[-2], np.inf))
    n, rms = int(counts.sum()), min(rms, 1e150)  # or Python's ** raises
    return {
        **{"min": low, "max": high, "num": n, "sum": mean * n, "sum_squares": rms**2 * n},
        "bucket_limits": limits.tolist(),
        "bucket_counts": counts[used[0] : used[-1] + 1].tolist(),
    }
