"""Values of a run to a target: losses, a few scalars per layer, histograms in their recorded bins.

Builds on `values` and `targets`. `send` is what `log_to` and the callback `LogTo` have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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
    the same while it trains. Of a run that `watch(…, resume=run)` goes on from, only what comes
    after is sent: send that run itself if the writer has not got it.

    Names are `loss`, `grad_norm`, `lr`, `epoch/valid_loss`, `activation/mean/layer1.0`. Histograms
    go to TensorBoard, with the bins they were recorded in (`add_histogram_raw`): a kilobyte each,
    where `add_histogram` of a layer's output costs a pass over all of it.

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
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for tag, steps, values in _series(found, statistics):
        for i in np.flatnonzero(np.isfinite(values) & (steps > sent.get(tag, -1))):
            rows[int(steps[i])][tag] = float(values[i])
    least = max(sent.values(), default=0) if target.in_order else 0
    for step in sorted(rows):
        target.scalars(max(step, least), rows[step])
        sent.update(dict.fromkeys(rows[step], step))
    for record in found.records if target.takes_histograms else ():
        if record.hist is not None:
            for row in range(len(record.names)):
                _send_hist(target, record, row, sent)


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
    if (earlier := vars(source).get("earlier")) is not None:  # a run that is resumed was sent
        send(Target(None), earlier, new)
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
    """What a Run knows by epoch that has ended, at its last step, and the learning rate now."""
    facts = getattr(found, "info", {})
    rates = facts.get("lr", [])
    if np.size(rates) and found.n_steps:
        yield "lr", np.array([found.n_steps - 1]), np.atleast_1d(rates)[-1:]
    epochs = getattr(found, "valid", ())
    for row in epochs[:-1] if facts.get("within_epoch") else epochs:
        for name, value in row.items():
            if name not in ("epoch", "step") and "step" in row and is_number(value):
                yield f"epoch/{name}", np.array([row["step"]]), np.array([float(value)])


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


def _send_hist(target: Target, record: Record, row: int, sent: Sent) -> None:
    assert record.hist is not None
    assert record.edges is not None
    tag = f"{record.kind}/{_tag(record, row)}"
    key = f"histogram {tag}"
    for i in np.flatnonzero(record.steps > sent.get(key, -1)):
        counts, step = record.hist[row, :, i], record.steps[i]
        total = int(counts.sum())
        if not total:
            continue
        stats = {name: float(record.values[name][row, i]) for name in ("min", "max", "mean", "rms")}
        used = np.flatnonzero(counts)
        first, last = int(used[0]), int(used[-1]) + 1
        limits = record.edges[first + 1 : last + 1].copy()
        if np.isinf(limits[-1]):  # an open bin ends at the greatest value
            limits[-1] = max(stats["max"], np.nextafter(record.edges[last - 1], np.inf))
        target.histogram(
            tag,
            int(step),
            min=stats["min"],
            max=stats["max"],
            num=total,
            sum=stats["mean"] * total,
            sum_squares=min(stats["rms"], 1e150) ** 2 * total,  # or Python's ** raises
            bucket_limits=limits.tolist(),
            bucket_counts=counts[first:last].tolist(),
        )
        sent[key] = int(step)
