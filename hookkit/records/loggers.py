"""Values of a run to a target: losses, a few scalars per layer, histograms in their recorded bins.

Builds on `values` and `targets`. `send` is what `log_to` and the callback `LogTo` have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from hookkit.checks import is_number
from hookkit.errors import OptionError, nearest
from hookkit.records.targets import Target, as_target
from hookkit.records.values import read_source, sources_of

if TYPE_CHECKING:
    from hookkit.records.record import Record

_SCALARS = ("mean", "std", "rms", "near_zero", "nonfinite", "dead")
_PARAM_SCALARS = ("weight_norm", "grad_norm", "update_ratio")


def log_to(writer: Any, source: Any, *, statistics: Iterable[str] | None = None) -> None:
    """Sends what was recorded to a tracker or a file: losses, and a few scalars per layer.

    A recorder, Watcher or Learner sends what is new since it was last sent to this writer, so that
    `w.log_to(writer)` can be called after each epoch; a Record or a Run is sent whole. `LogTo` does
    the same while it trains.

    Names are `loss`, `grad_norm`, `lr`, `epoch/valid_loss`, `activation/mean/layer1.0`. Histograms
    go to TensorBoard, wandb and trackio, with the bins they were recorded in: a kilobyte each,
    where TensorBoard's `add_histogram` of a layer's output costs a pass over all of it.

    Args:
        writer: a SummaryWriter of torch or tensorboardX; what has `log_metrics(dict, step=)`
            (mlflow, Lightning's loggers) or `log(dict, step=)` (wandb, trackio); or the path of a
            `.csv` or `.jsonl` file, to which lines are added. It is neither flushed nor closed.
        source: a Record, a Run, a recording callback, a Learner, a Watcher, or a list of these.
        statistics: which scalars of layers, a list of names (or one name); None takes about five
            per kind, [] none.

    Raises:
        ArgumentError: `writer` is none of these.
        OptionError: one of `statistics` was recorded nowhere; a file has another ending.
    """
    target = as_target("log_to", writer)
    parts = [(each, read_source(each)) for each in sources_of(source)]
    records = [record for _, found in parts for record in found.records]
    wanted = None if statistics is None else _checked(statistics, records)
    for each, found in parts:
        send(target, found, sent_to(target, each), wanted)


def send(target: Target, found: Any, sent: Sent, statistics: list[str] | None = None) -> None:
    """Sends the values of a Record or Run that are newer than those in `sent`, step by step."""
    rows: dict[int, dict[str, Any]] = defaultdict(dict)
    for tag, steps, values in _series(found, statistics):
        for i in np.flatnonzero(np.isfinite(values) & (steps > sent.get(tag, -1))):
            rows[int(steps[i])][tag] = float(values[i])
    hists = [*_histograms(found, sent)] if target.takes_histograms else []
    for hist in hists if target.bars is not None else ():
        rows[hist.step][hist.name] = target.bars(np_histogram=hist.few())
    least = max(sent.values(), default=0) if target.in_order else 0
    for step in sorted(rows):
        target.scalars(max(step, least), rows[step])
        sent.update(dict.fromkeys(rows[step], step))
    for hist in hists:
        target.histogram(f"{hist.kind}/{hist.layer}", hist.step, **hist.raw())
        sent[hist.name] = hist.step


Sent = dict[str, int]  # name → the last step that was sent
_SENT: WeakKeyDictionary[Any, list[tuple[Callable[[], Any], Sent]]] = WeakKeyDictionary()
"""By source, for each writer the last steps that it was sent: neither is kept alive by this."""


def sent_to(target: Target, source: Any) -> Sent:
    """What `source` has sent to `target`, to be updated; nothing yet for a Record or a Run."""
    writer = target.given
    source = vars(source).get("loop", source)  # a Watcher and its loop have the same run
    try:
        writers = _SENT.setdefault(source, [])
    except TypeError:  # a Record or a Run: a value has no hash, and is sent whole each time
        return {}
    writers[:] = [(held, sent) for held, sent in writers if held() is not None]
    for held, sent in writers:
        if held() is writer or held() == writer:
            return sent
    new: Sent = {}
    try:
        writers.append((ref(writer), new))
    except TypeError:  # it cannot be held weakly: it lives as long as the source
        writers.append((lambda: writer, new))
    return new


def _series(found: Any, statistics: list[str] | None) -> Iterator[tuple[str, Any, Any]]:
    """Name, steps and values of every series of numbers in a Record or a Run."""
    for name, values in (("loss", "losses"), ("grad_norm", "grad_norms")):
        if (series := getattr(found, values, None)) is not None:
            yield name, np.arange(len(series)), series
    yield from _of_epochs(found)
    for record in found.records:
        usual = _PARAM_SCALARS if record.kind == "param" else _SCALARS
        for statistic in usual if statistics is None else statistics:
            for row, values in enumerate(record.values.get(statistic, ())):
                yield f"{record.kind}/{statistic}/{_tag(record, row)}", record.steps, values


def _of_epochs(found: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a Run knows by epoch that has ended, at its last step; and learning rates."""
    facts = getattr(found, "info", {})
    yield from _rates(found, facts.get("lr", []))
    epochs = getattr(found, "valid", ())
    for row in epochs[:-1] if facts.get("within_epoch") else epochs:
        for name, value in row.items():
            if name not in ("epoch", "step") and "step" in row and is_number(value):
                yield f"epoch/{name}", np.array([row["step"]]), np.array([float(value)])


def _rates(found: Any, rates: Any) -> Iterator[tuple[str, Any, Any]]:
    """The learning rate of the first optimizer's last group: in the last step, and as recorded.

    Args:
        found: a Run, if there are `rates`.
        rates: of the first optimizer's groups in the last step.
    """
    if np.size(rates) and found.n_steps:
        yield "lr", np.array([found.n_steps - 1]), np.atleast_1d(rates)[-1:]
    params = getattr(found, "params", None)
    if params is None or "lr" not in params.values:
        return
    groups, last = list(params.meta.get("group", ())), np.size(rates) - 1
    if last in groups:
        yield "lr", params.steps, params.values["lr"][groups.index(last)]


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
    """The layer's name: `lstm-1` for `lstm[1]`, since mlflow refuses brackets.

    With its dots: mlflow makes files of names, and `layer1/0` would be one in the file `layer1`.
    """
    return record.names[row].translate(_PLAIN) or "model"


_PLAIN = str.maketrans({"[": "-", "]": None, "'": None})


@dataclass(frozen=True)
class _Histogram:
    """A layer's histogram of one step, from its first bin that has values to its last.

    Args:
        kind: of the record.
        layer: its name.
        step: of the run.
        counts: (n,) of each bin.
        edges: (n + 1,) of the bins; those of open bins are as far out as a value was.
        stats: min, max, mean and rms of the values.
    """

    kind: str
    layer: str
    step: int
    counts: Any
    edges: Any
    stats: dict[str, float]

    @property
    def name(self) -> str:
        """Where there are numbers of the same step."""
        return f"{self.kind}/histogram/{self.layer}"

    def raw(self) -> dict[str, Any]:
        """Arguments of TensorBoard's `add_histogram_raw`."""
        n, rms = int(self.counts.sum()), min(self.stats["rms"], 1e150)  # or Python's ** raises
        return {
            **{"min": self.stats["min"], "max": self.stats["max"], "num": n},
            **{"sum": self.stats["mean"] * n, "sum_squares": rms**2 * n},
            **{"bucket_limits": self.edges[1:].tolist(), "bucket_counts": self.counts.tolist()},
        }

    def few(self) -> tuple[Any, Any]:
        """Counts and edges of at most 512 bins, which is what wandb takes."""
        starts = np.arange(0, len(self.counts), -(-len(self.counts) // 512))
        return np.add.reduceat(self.counts, starts), self.edges[[*starts, -1]]


def _histograms(found: Any, sent: Sent) -> Iterator[_Histogram]:
    """Those of a Record or a Run that are newer than those in `sent`."""
    for record in found.records:
        for row in range(len(record.names)) if record.hist is not None else ():
            kind, layer = record.kind, _tag(record, row)
            last = sent.get(f"{kind}/histogram/{layer}", -1)
            for i in np.flatnonzero((record.steps > last) & record.hist[row].any(0)):
                yield _Histogram(kind, layer, int(record.steps[i]), *_used(record, row, int(i)))


def _used(record: Record, row: int, i: int) -> tuple[Any, Any, dict[str, float]]:
    assert record.hist is not None
    assert record.edges is not None
    counts = record.hist[row, :, i]
    used = np.flatnonzero(counts)
    edges = record.edges[used[0] : used[-1] + 2].copy()
    stats = {name: float(record.values[name][row, i]) for name in ("min", "max", "mean", "rms")}
    if np.isinf(edges[0]):  # an open bin ends at the least or greatest value
        edges[0] = min(stats["min"], np.nextafter(edges[1], -np.inf))
    if np.isinf(edges[-1]):
        edges[-1] = max(stats["max"], np.nextafter(edges[-2], np.inf))
    return counts[used[0] : used[-1] + 1], edges, stats
